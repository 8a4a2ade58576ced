// Feature: mprotect
// Proves: protections that change each round are the ones the kernel shows and enforces, contents
// stay through PROT_NONE, and 64 pages with mixed protections stay apart.
#include "smaps.h"
#include <setjmp.h>

#define PAGES 64
static sigjmp_buf escape;
static void on_fault(int signal) { siglongjmp(escape, signal); }

// Whether touching the byte is allowed.
static bool allowed(volatile uint8_t *byte, bool writing) {
    if (sigsetjmp(escape, 1)) return false;
    uint8_t value = *byte;
    if (writing) *byte = value;
    return true;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    signal(SIGSEGV, on_fault);
    static const int protections[] = {PROT_READ | PROT_WRITE, PROT_READ, PROT_NONE,
                                      PROT_READ | PROT_EXEC};
    static const char *const shown[] = {"rw-p", "r--p", "---p", "r-xp"};
    uint8_t *memory = map_anon(PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
    for (size_t i = 0; i < PAGES; i++) fill(memory + i * PAGE, PAGE, i);
    STEPS {
        for (size_t i = 0; i < PAGES; i++)
            SYS(mprotect(memory + i * PAGE, PAGE, protections[(i + (size_t)g.step) % 4]));
        nap();
        for (size_t i = 0; i < PAGES; i++) {
            size_t kind = (i + (size_t)g.step) % 4;
            uint8_t *page = memory + i * PAGE;
            if (i < 8) smaps_protection(page, shown[kind]);
            EQ(allowed(page + 5, false), kind != 2);
            EQ(allowed(page + 5, true), kind == 0);
            SYS(mprotect(page, PAGE, PROT_READ | PROT_WRITE));
            FILLED(page, PAGE, i + 1000 * (size_t)(g.step - 1) * (g.step > 1));
            fill(page, PAGE, i + 1000 * (size_t)g.step);
        }
    }
    return guest_pass();
}
