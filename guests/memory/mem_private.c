// Feature: private anonymous memory
// Proves: 16 MB of heap, data, bss and mapped pages hold what each round wrote, pages never written
// stay zero, and no byte is a round old.
// Build: static too
#include "guest.h"

#define PAGES 4096
static uint8_t bss[64 * PAGE];
static uint8_t data[16 * PAGE] = {1, 2, 3};

// The first bytes of a page name the page and the round that wrote it last.
static void stamp(uint8_t *page, uint64_t index, uint64_t round) {
    fill(page, 64, index << 32 | round);
    fill(page + PAGE - 64, 64, index << 32 | round | 1ull << 31);
}
static void check(const uint8_t *page, uint64_t index, uint64_t round) {
    if (round == 0) {
        ZEROS(page, PAGE);
        return;
    }
    FILLED(page, 64, index << 32 | round);
    FILLED(page + PAGE - 64, 64, index << 32 | round | 1ull << 31);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    uint8_t *pages = map_anon(PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
    uint8_t *heap = malloc(1000000);
    static uint32_t written[PAGES];
    uint64_t state = seeded(1);
    STEPS {
        for (int i = 0; i < 300; i++) {
            uint64_t index = mix(&state) % PAGES;
            if (index % 4 == 0) continue;
            stamp(pages + index * PAGE, index, (uint64_t)g.step);
            written[index] = (uint32_t)g.step;
        }
        fill(bss, sizeof bss, (uint64_t)g.step);
        fill(data, sizeof data, (uint64_t)g.step + 1);
        fill(heap, 1000000, (uint64_t)g.step + 2);
        nap();
        for (uint64_t i = 0; i < PAGES; i++) check(pages + i * PAGE, i, written[i]);
        FILLED(bss, sizeof bss, (uint64_t)g.step);
        FILLED(data, sizeof data, (uint64_t)g.step + 1);
        FILLED(heap, 1000000, (uint64_t)g.step + 2);
    }
    return guest_pass();
}
