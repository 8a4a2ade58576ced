// Feature: reserved address space, committed and given back in pieces
// Proves: of a 4 GB PROT_NONE reservation, pieces committed, released and committed again each
// round hold their contents or zeros, as the Go runtime's heap relies on.
#include "guest.h"
#include <setjmp.h>

#define PIECE (256 * 1024ul)
#define PIECES 40
#define SPREAD (100ul << 20)

enum state { RESERVED, COMMITTED, RELEASED };
static enum state states[PIECES];
static uint64_t seeds[PIECES];
static uint8_t *arena;

static sigjmp_buf escape;
static void on_fault(int signal) { siglongjmp(escape, signal); }
static bool readable(volatile uint8_t *byte) {
    if (sigsetjmp(escape, 1)) return false;
    (void)*byte;
    return true;
}

// Moves a piece to its next state, the way sysMap, sysUnused and sysFault do.
static void advance(size_t i) {
    uint8_t *piece = arena + i * SPREAD;
    switch (states[i]) {
    case RESERVED:
        map_fixed(piece, PIECE, PROT_READ | PROT_WRITE, 0);
        ZEROS(piece, PIECE);
        seeds[i] = i * 1000 + (uint64_t)g.step;
        fill(piece, PIECE, seeds[i]);
        states[i] = COMMITTED;
        return;
    case COMMITTED:
        SYS(madvise(piece, PIECE, MADV_DONTNEED));
        states[i] = RELEASED;
        return;
    case RELEASED:
        map_fixed(piece, PIECE, PROT_NONE, MAP_NORESERVE);
        states[i] = RESERVED;
        return;
    }
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    signal(SIGSEGV, on_fault);
    arena = map_anon(PIECES * SPREAD, PROT_NONE, MAP_PRIVATE | MAP_NORESERVE);
    uint64_t random = seeded(3);
    STEPS {
        for (int i = 0; i < 12; i++) advance(mix(&random) % PIECES);
        nap();
        for (size_t i = 0; i < PIECES; i++) {
            uint8_t *piece = arena + i * SPREAD;
            EQ(readable(piece), states[i] != RESERVED);
            if (states[i] == COMMITTED) FILLED(piece, PIECE, seeds[i]);
            if (states[i] == RELEASED) ZEROS(piece, PIECE);
        }
    }
    return guest_pass();
}
