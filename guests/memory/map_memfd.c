// Feature: memfd mappings
// Proves: two processes and two mappings in one of them, shared and private, of a memfd agree with
// each other and with its read, write and ftruncate.
#include "guest.h"

static int fd;
static uint8_t *shared;

static long answer(long step) {
    FILLED(shared, 4 * PAGE, (uint64_t)step);
    fill(shared + 4 * PAGE, 4 * PAGE, (uint64_t)step + 1);
    return step;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    fd = (int)SYS(memfd_create("a name", 0));
    SYS(ftruncate(fd, 16 * PAGE));
    shared = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    uint8_t *again = mmap(NULL, 8 * PAGE, PROT_READ, MAP_SHARED, fd, 4 * PAGE);
    uint8_t *private = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    CHECK(shared != MAP_FAILED && again != MAP_FAILED && private != MAP_FAILED);
    fill(private + 8 * PAGE, PAGE, 99);
    struct peer peer = peer_start(answer);
    static uint8_t bytes[4 * PAGE];
    off_t size = 16 * PAGE;
    STEPS {
        struct stat stat;
        SYS(fstat(fd, &stat));
        EQ(stat.st_size, size);
        fill(bytes, sizeof bytes, (uint64_t)g.step);
        EQ(pwrite(fd, bytes, sizeof bytes, 0), sizeof bytes);
        nap();
        EQ(peer_ask(&peer, g.step), g.step);
        FILLED(again, 4 * PAGE, (uint64_t)g.step + 1);
        FILLED(private, 4 * PAGE, (uint64_t)g.step);
        FILLED(private + 8 * PAGE, PAGE, 99);
        ZEROS(shared + 8 * PAGE, 8 * PAGE);
        EQ(pread(fd, bytes, sizeof bytes, 4 * PAGE), sizeof bytes);
        FILLED(bytes, sizeof bytes, (uint64_t)g.step + 1);
        char link[64] = "";
        snprintf((char *)bytes, 64, "/proc/self/fd/%d", fd);
        SYS(readlink((char *)bytes, link, sizeof link - 1));
        CHECK(!strcmp(link, "/memfd:a name (deleted)"), "got %s", link);
        size = (off_t)((16 + (unsigned)g.step % 5) * PAGE + (unsigned)g.step);
        SYS(ftruncate(fd, size));
    }
    peer_end(&peer);
    return guest_pass();
}
