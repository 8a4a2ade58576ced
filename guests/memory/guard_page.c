// Feature: faults handled by the program
// Proves: a SIGSEGV handler gets address and code of accesses to guard pages, absent mappings and
// read-only pages, repairs them and the access goes on; SIGBUS beyond the end of a file too.
#include "guest.h"

static uint8_t *guard;
static volatile long faults, last_code;
static void *volatile last_address;
static void on_fault(int signal, siginfo_t *info, void *context) {
    (void)context;
    int error = errno;
    faults++;
    last_code = info->si_code;
    last_address = info->si_addr;
    uintptr_t page = (uintptr_t)info->si_addr & ~(PAGE - 1);
    if (signal == SIGBUS || info->si_code == SEGV_MAPERR)
        mmap((void *)page, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
             -1, 0);
    else mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE);
    errno = error;
}

static void hit(uint8_t *at, int code, uint8_t value) {
    long before = faults;
    *(volatile uint8_t *)at = value;
    EQ(faults, before + 1);
    EQ(last_code, code);
    CHECK(last_address == at, "expected %p, got %p", (void *)at, last_address);
    EQ(*at, value);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    SYS(sigaction(SIGSEGV, &action, NULL));
    SYS(sigaction(SIGBUS, &action, NULL));
    int fd = (int)SYS(open(beside("short"), O_RDWR | O_CREAT | O_TRUNC, 0600));
    SYS(ftruncate(fd, 100));
    guard = map_anon(4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
    STEPS {
        uint8_t value = (uint8_t)g.step;
        SYS(mprotect(guard, PAGE, PROT_NONE));
        SYS(munmap(guard + PAGE, PAGE));
        SYS(mprotect(guard + 2 * PAGE, PAGE, PROT_READ));
        CHECK(mmap(guard + 3 * PAGE, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
                   PAGE) != MAP_FAILED);
        nap();
        hit(guard + 17, SEGV_ACCERR, value);
        hit(guard + PAGE + 18, SEGV_MAPERR, value);
        hit(guard + 2 * PAGE + 19, SEGV_ACCERR, value);
        hit(guard + 3 * PAGE + 20, BUS_ADRERR, value);
        EQ(faults, 4 * g.step);
    }
    return guest_pass();
}
