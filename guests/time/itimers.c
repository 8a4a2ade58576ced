// Feature: interval timers
// Proves: ITIMER_REAL, VIRTUAL and PROF keep their interval and go on ticking, no faster than they
// should, and a one-shot alarm in another process fires once.
#include "guest.h"
#include <sys/time.h>

static _Atomic long ticks[3];
static void tick(int signal) {
    ticks[signal == SIGALRM ? ITIMER_REAL : signal == SIGVTALRM ? ITIMER_VIRTUAL : ITIMER_PROF]++;
}

static long alarm_once(long step) {
    if (step == 0) {
        struct itimerval far = {.it_value = {100000, 0}};
        return SYS(setitimer(ITIMER_REAL, &far, NULL));
    }
    struct itimerval now;
    SYS(getitimer(ITIMER_REAL, &now));
    EQ(now.it_interval.tv_sec + now.it_interval.tv_usec, 0);
    CHECK(now.it_value.tv_sec > 90000 && now.it_value.tv_sec <= 100000);
    if (step == 1) {
        struct itimerval soon = {.it_value = {0, 1}};
        int64_t before = ticks[ITIMER_REAL];
        SYS(setitimer(ITIMER_REAL, &soon, NULL));
        while (ticks[ITIMER_REAL] == before) continue;
        SYS(setitimer(ITIMER_REAL, &(struct itimerval){.it_value = {100000, 0}}, NULL));
    }
    return 0;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct sigaction action = {.sa_handler = tick, .sa_flags = SA_RESTART};
    SYS(sigaction(SIGALRM, &action, NULL));
    SYS(sigaction(SIGVTALRM, &action, NULL));
    SYS(sigaction(SIGPROF, &action, NULL));
    struct peer peer = peer_start(alarm_once);
    peer_ask(&peer, 0);
    int64_t began = clock_ns(CLOCK_MONOTONIC);
    for (int kind = 0; kind < 3; kind++) {
        suseconds_t period = 3000 + kind * 1001;
        struct itimerval timer = {{0, period}, {0, period}};
        SYS(setitimer((__itimer_which_t)kind, &timer, NULL));
    }
    STEPS {
        long before[3] = {ticks[0], ticks[1], ticks[2]};
        // Works until every timer has ticked: two of them only count the processor's time.
        for (int kind = 0; kind < 3; kind++)
            while (ticks[kind] == before[kind]) continue;
        nap();
        for (int kind = 0; kind < 3; kind++) {
            struct itimerval now;
            SYS(getitimer((__itimer_which_t)kind, &now));
            EQ(now.it_interval.tv_sec, 0);
            // VIRTUAL and PROF are kept in ticks of the kernel on some configurations.
            CHECK(labs(now.it_interval.tv_usec - (3000 + kind * 1001)) <= 10000);
        }
        int64_t elapsed_us = (clock_ns(CLOCK_MONOTONIC) - began) / 1000;
        CHECK(ticks[ITIMER_REAL] <= elapsed_us / 3000 + 1, "%ld ticks in %lld us",
              ticks[ITIMER_REAL], (long long)elapsed_us);
        peer_ask(&peer, g.step);
    }
    peer_end(&peer);
    return guest_pass();
}
