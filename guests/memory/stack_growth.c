// Feature: growing stacks
// Proves: the main stack, as deep as 4 MB and deeper each round, and a thread's stack keep every
// frame while the program is blocked at the bottom, and go on growing afterwards.
#include "guest.h"

static int down(int depth, int64_t nap_at_bottom) {
    uint8_t frame[3000];
    fill(frame, sizeof frame, (uint64_t)(depth + g.step));
    int count = 1;
    if (depth > 1) count += down(depth - 1, nap_at_bottom);
    else nap_ms(nap_at_bottom);
    FILLED(frame, sizeof frame, (uint64_t)(depth + g.step));
    return count;
}
static void *in_thread(void *argument) {
    EQ(down(400, g.step_ms), 400);
    return argument;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    STEPS {
        pthread_t thread = start(in_thread, NULL);
        // The deepest so far each time, until the limit is near.
        int depth = 50 + (g.step * 30) % 1350;
        EQ(down(depth, g.step_ms), depth);
        join(thread);
    }
    return guest_pass();
}
