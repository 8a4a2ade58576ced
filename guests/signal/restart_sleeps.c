// Feature: interrupted system calls with a restart block
// Proves: nanosleep, clock_nanosleep (relative, absolute), poll, ppoll, select, futex waits with a
// relative and an absolute timeout go on after a stop with the rest of their time.
// Build: static too
#include "restart.h"
#include <linux/futex.h>
#include <sys/select.h>

static void by_nanosleep(long ms) {
    struct timespec time = after_ms(ms);
    SYS(nanosleep(&time, NULL));
}
static void by_clock_nanosleep(long ms) {
    struct timespec time = after_ms(ms), rest = {-1, -1};
    PTH(clock_nanosleep(CLOCK_MONOTONIC, 0, &time, &rest));
}
static struct timespec at(long ms) { return after_ms(mono_ms() + ms + 1); }
static void by_absolute_sleep(long ms) {
    struct timespec time = at(ms);
    PTH(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL));
}
static void by_boottime_sleep(long ms) {
    struct timespec time = after_ms(ms);
    PTH(clock_nanosleep(CLOCK_BOOTTIME, 0, &time, NULL));
}
static void by_poll(long ms) {
    int ends[2];
    SYS(pipe(ends));
    struct pollfd one = {.fd = ends[0], .events = POLLIN};
    EQ(poll(&one, 1, (int)ms), 0);
    close(ends[0]);
    close(ends[1]);
}
static void by_ppoll(long ms) {
    struct timespec time = after_ms(ms);
    EQ(ppoll(NULL, 0, &time, NULL), 0);
}
static void by_select(long ms) {
    struct timeval time = {.tv_sec = ms / 1000, .tv_usec = ms % 1000 * 1000};
    EQ(select(0, NULL, NULL, NULL, &time), 0);
}
static void by_futex(long ms) {
    struct timespec time = after_ms(ms);
    int word = 5;
    FAILS(syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 5, &time, NULL, 0), ETIMEDOUT);
}
static void by_futex_bitset(long ms) {
    struct timespec time = at(ms);
    int word = 5;
    FAILS(syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, 5, &time, NULL, -1), ETIMEDOUT);
}
static void by_condition(long ms) {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
    struct timespec time = at(ms);
    pthread_mutex_lock(&mutex);
    EQ(pthread_cond_clockwait(&condition, &mutex, CLOCK_MONOTONIC, &time), ETIMEDOUT);
    pthread_mutex_unlock(&mutex);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    static const struct blocker blockers[] = {
        {"nanosleep", by_nanosleep, false},
        {"clock_nanosleep", by_clock_nanosleep, false},
        {"absolute sleep", by_absolute_sleep, false},
        {"boottime sleep", by_boottime_sleep, false},
        {"poll", by_poll, false},
        {"ppoll", by_ppoll, false},
        {"select", by_select, false},
        {"futex", by_futex, false},
        {"futex bitset", by_futex_bitset, false},
        {"condition", by_condition, false},
    };
    RUN_BLOCKERS(blockers);
    return guest_pass();
}
