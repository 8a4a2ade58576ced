// Feature: memory as of one instant
// Proves: of two counters on different pages that threads raise one after the other without a
// pause, the second is never ahead, whatever instant the memory is copied at.
#include "guest.h"

#define PAIRS 4
static struct {
    _Atomic long first;
    char apart[2 * PAGE];
    _Atomic long second;
    char end[2 * PAGE];
} pairs[PAIRS];
static _Atomic bool stop;

static void *count(void *argument) {
    long i = (long)argument, before = 0;
    while (!stop) {
        long second = pairs[i].second, first = pairs[i].first;
        EQ(second, before);
        EQ(first, before);
        pairs[i].first = ++before;
        pairs[i].second = before;
        if (before % 1000 == 0) sched_yield();
    }
    return NULL;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    pthread_t threads[PAIRS];
    for (long i = 0; i < PAIRS; i++) threads[i] = start(count, (void *)i);
    long seen[PAIRS] = {0};
    STEPS {
        nap();
        for (int i = 0; i < PAIRS; i++) {
            long second = pairs[i].second, first = pairs[i].first;
            CHECK(second <= first, "second %ld, first %ld", second, first);
            CHECK(first >= seen[i]);
            seen[i] = first;
        }
    }
    stop = true;
    for (int i = 0; i < PAIRS; i++) join(threads[i]);
    return guest_pass();
}
