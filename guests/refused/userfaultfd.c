// Refused: anon_inode:[userfaultfd]
// Feature: userfaultfd of the program's own
// Proves: a program that fills its missing pages itself is refused: the mechanism is taken.
#include "refused.h"
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>

static int fd;
static uint8_t *memory;

static void *fill_pages(void *argument) {
    static uint8_t page[PAGE];
    struct uffd_msg message;
    for (;;) {
        get(fd, &message, sizeof message);
        fill(page, PAGE, 7);
        struct uffdio_copy copy = {.src = (uintptr_t)page, .len = PAGE};
        copy.dst = message.arg.pagefault.address & ~(PAGE - 1);
        SYS(ioctl(fd, UFFDIO_COPY, &copy));
    }
    return argument;
}
static void appear(void) {
    fd = (int)SYS(syscall(SYS_userfaultfd, O_CLOEXEC));
    struct uffdio_api api = {.api = UFFD_API};
    SYS(ioctl(fd, UFFDIO_API, &api));
    memory = map_anon(PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
    struct uffdio_register area = {{(uintptr_t)memory, PAGE}, UFFDIO_REGISTER_MODE_MISSING, 0};
    SYS(ioctl(fd, UFFDIO_REGISTER, &area));
    start(fill_pages, NULL);
}
static void use(void) {
    FILLED(memory, PAGE, 7);
    SYS(madvise(memory, PAGE, MADV_DONTNEED));
}
int main(int argc, char **argv) { return run_refused(argc, argv, appear, use); }
