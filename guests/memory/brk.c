// Feature: the program break
// Proves: the heap grows and shrinks from where it was, keeps its contents, and what it gives back
// comes again as zeros.
// Build: static too
#include "guest.h"

#define BASE (64 * PAGE)

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    // stdio would move the break; nothing here uses it from now on.
    uint8_t *start_at = (uint8_t *)(((uintptr_t)sbrk(0) + PAGE - 1) & ~(PAGE - 1));
    SYS(brk(start_at + BASE));
    fill(start_at, BASE, 0);
    size_t size = BASE;
    STEPS {
        EQ(sbrk(0), start_at + size);
        size_t grown = BASE + (1 + (size_t)g.step % 20) * 8 * PAGE;
        SYS(brk(start_at + grown));
        ZEROS(start_at + BASE, grown - BASE);
        fill(start_at + BASE, grown - BASE, (uint64_t)g.step);
        nap();
        FILLED(start_at, BASE, (uint64_t)g.step - 1);
        FILLED(start_at + BASE, grown - BASE, (uint64_t)g.step);
        EQ(sbrk(0), start_at + grown);
        fill(start_at, BASE, (uint64_t)g.step);
        size = BASE;
        SYS(brk(start_at + size));
    }
    return guest_pass();
}
