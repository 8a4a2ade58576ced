// Feature: mremap
// Proves: mappings that grow, shrink, move and change places each round keep their contents, and
// the addresses they left are unmapped, or empty after MREMAP_DONTUNMAP.
#include "guest.h"

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
#define RESERVED (256 * PAGE)

static void unmapped(void *address) {
    unsigned char resident;
    FAILS(mincore(address, PAGE, &resident), ENOMEM);
}
static uint8_t *move(uint8_t *from, size_t before, size_t after, int flags, uint8_t *to) {
    uint8_t *at = mremap(from, before, after, flags, to);
    CHECK(at != MAP_FAILED, "mremap");
    return at;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    // Two reserved slots are the fixed places that the pages move to in turn.
    uint8_t *slots = map_anon(2 * RESERVED, PROT_NONE, MAP_PRIVATE);
    uint8_t *at = map_anon(16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
    fill(at, 16 * PAGE, 0);
    STEPS {
        size_t pages = 17 + (size_t)g.step % 40;
        at = move(at, 16 * PAGE, pages * PAGE, MREMAP_MAYMOVE, NULL);
        FILLED(at, 16 * PAGE, (uint64_t)g.step - 1);
        ZEROS(at + 16 * PAGE, (pages - 16) * PAGE);
        fill(at, pages * PAGE, (uint64_t)g.step);
        nap_ms(g.step_ms / 3);
        uint8_t *to = slots + (size_t)(g.step % 2) * RESERVED, *from = at;
        at = move(at, pages * PAGE, pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
        nap_ms(g.step_ms / 3);
        FILLED(at, pages * PAGE, (uint64_t)g.step);
        unmapped(from);
        // The pages move on, the old mapping stays and is empty.
        from = at;
        at = move(at, pages * PAGE, pages * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
        nap_ms(g.step_ms / 3);
        ZEROS(from, pages * PAGE);
        map_fixed(from, pages * PAGE, PROT_NONE, 0);
        FILLED(at, pages * PAGE, (uint64_t)g.step);
        at = move(at, pages * PAGE, 16 * PAGE, 0, NULL);
        unmapped(at + 16 * PAGE);
        FILLED(at, 16 * PAGE, (uint64_t)g.step);
    }
    return guest_pass();
}
