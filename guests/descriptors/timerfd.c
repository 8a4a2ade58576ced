// Feature: timerfd
// Proves: periodic, one-shot, absolute and disarmed timers on three clocks keep interval, rest and
// unread expirations, and tick no faster than they should.
#include "guest.h"
#include <sys/timerfd.h>

#define PERIOD_MS 3
static int make(clockid_t clock, int flags, struct timespec value, long interval_ms) {
    int fd = (int)SYS(timerfd_create(clock, TFD_NONBLOCK));
    struct itimerspec times = {.it_value = value, .it_interval = after_ms(interval_ms)};
    SYS(timerfd_settime(fd, flags, &times, NULL));
    return fd;
}
static struct itimerspec left(int fd) {
    struct itimerspec times;
    SYS(timerfd_gettime(fd, &times));
    return times;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int64_t began = mono_ms();
    int periodic = make(CLOCK_MONOTONIC, 0, after_ms(PERIOD_MS), PERIOD_MS);
    int unread = make(CLOCK_BOOTTIME, 0, after_ms(PERIOD_MS), PERIOD_MS);
    int far = make(CLOCK_MONOTONIC, TFD_TIMER_ABSTIME, after_ms(began + 7000000), 12345);
    int wall = make(CLOCK_REALTIME, 0, after_ms(3600000), 0);
    int disarmed = make(CLOCK_MONOTONIC, 0, after_ms(0), 0);
    int spent = make(CLOCK_MONOTONIC, 0, after_ms(1), 0);
    uint64_t total = 0, count;
    nap_ms(5);
    STEPS {
        nap();
        struct pollfd one = {.fd = periodic, .events = POLLIN};
        EQ(SYS(poll(&one, 1, LATE_MS_MAX)), 1);
        get(periodic, &count, 8);
        total += count;
        int64_t elapsed = mono_ms() - began;
        CHECK(total <= (uint64_t)elapsed / PERIOD_MS + 1, "%lu ticks in %ld ms", total, elapsed);
        EQ(left(periodic).it_interval.tv_nsec, PERIOD_MS * 1000000);
        EQ(left(far).it_interval.tv_sec, 12);
        int64_t rest = left(far).it_value.tv_sec * 1000;
        CHECK(rest <= 7000000 && rest >= 6990000 - elapsed, "%ld ms left", rest);
        rest = left(wall).it_value.tv_sec;
        CHECK(rest <= 3600 && rest > 3000 - elapsed / 1000);
        EQ(left(disarmed).it_value.tv_sec + left(disarmed).it_value.tv_nsec, 0);
        FAILS(read(disarmed, &count, 8), EAGAIN);
        one = (struct pollfd){.fd = spent, .events = POLLIN};
        EQ(poll(&one, 1, 0), 1);
        EQ(left(spent).it_value.tv_sec + left(spent).it_value.tv_nsec, 0);
    }
    get(spent, &count, 8);
    EQ(count, 1);
    int64_t elapsed = mono_ms() - began;
    get(unread, &count, 8);
    CHECK(count <= (uint64_t)elapsed / PERIOD_MS + 1);
    // Expirations before a move count with those after it.
    CHECK(count >= (uint64_t)g.steps * (uint64_t)g.step_ms / PERIOD_MS / 2, "%lu unread", count);
    return guest_pass();
}
