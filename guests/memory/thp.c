// Feature: transparent huge pages
// Proves: single bytes written in huge pages each round are kept beside the bytes of earlier ones,
// also when a part of a huge page is given back or protected.
#include "guest.h"

#define HUGE (2ul << 20)
#define COUNT 6

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    uint8_t *raw = map_anon((COUNT + 1) * HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
    uint8_t *huge = (uint8_t *)(((uintptr_t)raw + HUGE - 1) & ~(HUGE - 1));
    SYS(madvise(huge, COUNT * HUGE, MADV_HUGEPAGE));
    for (size_t i = 0; i < COUNT; i++) fill(huge + i * HUGE + 8 * PAGE, HUGE / 2 - 8 * PAGE, i);
    STEPS {
        size_t at = HUGE / 2 + (size_t)g.step * 4099 % (HUGE / 2 - PAGE);
        for (size_t i = 0; i < COUNT; i++) huge[i * HUGE + at] = (uint8_t)(g.step % 255 + 1);
        nap();
        for (size_t i = 0; i < COUNT; i++) {
            FILLED(huge + i * HUGE + 8 * PAGE, HUGE / 2 - 8 * PAGE, g.step > 1 && i == 2 ? 22 : i);
            for (int step = 1; step <= g.step && g.step < 128; step++)
                EQ(huge[i * HUGE + HUGE / 2 + (size_t)step * 4099 % (HUGE / 2 - PAGE)],
                   step % 255 + 1);
        }
        // Splits one page by discarding, one by protecting; fills a third anew.
        SYS(madvise(huge + (size_t)(g.step % 3) * PAGE, PAGE, MADV_DONTNEED));
        ZEROS(huge + (size_t)(g.step % 3) * PAGE, PAGE);
        SYS(mprotect(huge + HUGE, (size_t)(1 + g.step % 8) * PAGE, PROT_READ));
        SYS(mprotect(huge + HUGE, 8 * PAGE, PROT_READ | PROT_WRITE));
        if (g.step == 1) {
            uint8_t *pattern = huge + 2 * HUGE + 8 * PAGE;
            fill(pattern, HUGE / 2 - 8 * PAGE, 22);
        }
    }
    return guest_pass();
}
