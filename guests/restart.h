// Threads that block in one system call each, over and over, for a given time. A stop must be
// invisible to them: no EINTR, not shorter than asked for, not much longer.
#ifndef RESTART_H
#define RESTART_H
#include "guest.h"

struct blocker {
    const char *name;
    void (*block)(long ms); // blocks for ms and checks the result
    bool by_ticks;          // its time is counted in ticks, which a crowded machine catches up on
};

static _Atomic bool blockers_stop;
static _Atomic long blockers_rounds;

HELPER void *run_blocker(void *argument) {
    const struct blocker *blocker = argument;
    // From shorter than a round to several rounds, so that a stop finds every stage.
    static const long rounds[] = {1, 6, 3, 12};
    for (int i = 0; !blockers_stop; i++) {
        long ms = g.step_ms * rounds[i % 4] / 2 + 1;
        int64_t before = clock_ns(CLOCK_MONOTONIC);
        // Goes on with each tick.
        int64_t tick_before = clock_ns(CLOCK_MONOTONIC_COARSE);
        blocker->block(ms);
        int64_t ticks = clock_ns(CLOCK_MONOTONIC_COARSE) - tick_before;
        int64_t took = clock_ns(CLOCK_MONOTONIC) - before;
        CHECK((blocker->by_ticks ? ticks : took) >= ms * 1000000, "%s: %ld ms asked, %lld ns taken",
              blocker->name, ms, (long long)took);
        CHECK(took < (ms + LATE_MS_MAX) * 1000000, "%s: %ld ms asked, %lld ns taken",
              blocker->name, ms, (long long)took);
        blockers_rounds++;
    }
    return NULL;
}

// Runs two threads of each kind through all steps.
HELPER void run_blockers(const struct blocker *blockers, int count) {
    pthread_t threads[2 * count];
    for (int i = 0; i < 2 * count; i++)
        threads[i] = start(run_blocker, (void *)&blockers[i % count]);
    STEPS nap();
    blockers_stop = true;
    for (int i = 0; i < 2 * count; i++) join(threads[i]);
    CHECK(blockers_rounds >= count);
}
#define RUN_BLOCKERS(blockers) run_blockers(blockers, sizeof(blockers) / sizeof *(blockers))

#endif
