// Feature: memory shared copy-on-write after fork
// Proves: parent, child and grandchild each see their own writes and the pages none has written.
#include "guest.h"

#define PAGES 256
static uint8_t *memory;
static int rank;
static struct peer next;

// Process r has rewritten the pages whose number modulo 4 is r; those of 3 are common to all.
static long check(long step) {
    for (int i = 0; i < PAGES; i++) {
        uint64_t seed = (uint64_t)i;
        if (step > 0 && i % 4 == rank) seed += (uint64_t)(step * 1000 + rank);
        FILLED(memory + (size_t)i * PAGE, 100, seed);
        seed = (uint64_t)i + (uint64_t)((step + 1) * 1000 + rank);
        if (i % 4 == rank) fill(memory + (size_t)i * PAGE, 100, seed);
    }
    return rank < 2 ? 1 + peer_ask(&next, step) : 1;
}
static long fork_more(long step) {
    if (step >= 0) return check(step);
    if (++rank < 2) {
        next = peer_start(fork_more);
        peer_ask(&next, -1);
    }
    return 0;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    memory = map_anon(PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
    for (int i = 0; i < PAGES; i++) fill(memory + (size_t)i * PAGE, 100, (uint64_t)i);
    next = peer_start(fork_more);
    peer_ask(&next, -1);
    check(0);
    STEPS {
        EQ(check(g.step), 3);
        nap();
    }
    peer_end(&next);
    return guest_pass();
}
