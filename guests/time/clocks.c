// Feature: clocks that never go back
// Proves: CLOCK_MONOTONIC, MONOTONIC_RAW, MONOTONIC_COARSE and BOOTTIME only grow and make no leap,
// by vDSO and by system call, in three threads, and the time stamps of each round stay in order.
// Build: static too
#include "guest.h"

static const clockid_t clocks[] = {CLOCK_MONOTONIC, CLOCK_MONOTONIC_RAW, CLOCK_MONOTONIC_COARSE,
                                   CLOCK_BOOTTIME};
static _Atomic bool stop;

static int64_t raw_ns(clockid_t clock) {
    struct timespec now;
    SYS(syscall(SYS_clock_gettime, clock, &now));
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static void *watch(void *argument) {
    int64_t last[4] = {0};
    while (!stop) {
        for (int round = 0; round < 1000; round++) {
            for (int i = 0; i < 4; i++) {
                int64_t now = round % 2 ? raw_ns(clocks[i]) : clock_ns(clocks[i]);
                CHECK(now >= last[i], "clock %d went back %lld ns", clocks[i],
                      (long long)(last[i] - now));
                CHECK(last[i] == 0 || now < last[i] + LATE_MS_MAX * 1000000ll,
                      "clock %d leapt %lld ns", clocks[i], (long long)(now - last[i]));
                last[i] = now;
            }
        }
        sched_yield();
    }
    return argument;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int64_t *stamps = calloc((size_t)g.steps + 1, sizeof *stamps);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) threads[i] = start(watch, NULL);
    time_t began = time(NULL);
    STEPS {
        stamps[g.step] = clock_ns(CLOCK_MONOTONIC);
        for (int i = 1; i <= g.step; i++)
            CHECK(stamps[i] >= stamps[i - 1] + (i > 1 ? g.step_ms * 1000000ll : 0));
        // The wall clock is the host's: it may differ a little between hosts.
        CHECK(labs(time(NULL) - began) < 3600);
        nap();
    }
    stop = true;
    for (int i = 0; i < 3; i++) join(threads[i]);
    return guest_pass();
}
