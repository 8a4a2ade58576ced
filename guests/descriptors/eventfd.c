// Feature: eventfd
// Proves: counters, semaphore mode, non-blocking mode and a writer blocked by overflow stay.
#include "guest.h"
#include <sys/eventfd.h>

static void add(int fd, uint64_t value) { put(fd, &value, 8); }
static uint64_t take(int fd) {
    uint64_t value;
    get(fd, &value, 8);
    return value;
}
// Blocks in every round until main takes the counter, which is as high as it can be.
static int overflowing;
static _Atomic long begun, overflowed;
static void *block(void *argument) {
    for (int step = 1; step <= g.steps; step++) {
        while (begun < step) nap_ms(1);
        add(overflowing, 2);
        overflowed++;
    }
    return argument;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int counter = (int)SYS(eventfd(5, EFD_NONBLOCK));
    int semaphore = (int)SYS(eventfd(3, EFD_SEMAPHORE | EFD_NONBLOCK | EFD_CLOEXEC));
    int zero = (int)SYS(eventfd(0, EFD_NONBLOCK));
    overflowing = (int)SYS(eventfd(0, 0));
    pthread_t thread = start(block, NULL);
    uint64_t want = 5;
    STEPS {
        add(overflowing, UINT64_MAX - 1);
        begun = g.step;
        add(counter, 0x100000000ull * (uint64_t)g.step);
        add(semaphore, 1);
        want += 0x100000000ull * (uint64_t)g.step;
        nap();
        EQ(take(counter), want);
        add(counter, want = (uint64_t)g.step);
        EQ(take(semaphore), 1);
        uint64_t value;
        FAILS(read(zero, &value, 8), EAGAIN);
        EQ(overflowed, g.step - 1);
        EQ(take(overflowing), UINT64_MAX - 1);
        while (overflowed < g.step) nap_ms(1);
        EQ(take(overflowing), 2);
    }
    join(thread);
    for (int i = 0; i < 3; i++) EQ(take(semaphore), 1);
    FAILS(read(semaphore, &want, 8), EAGAIN);
    return guest_pass();
}
