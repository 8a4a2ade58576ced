// Feature: code written at run time
// Proves: functions generated into pages flipped between writable and executable, and into a memfd
// mapped twice, return this round's numbers.
#include "guest.h"

typedef int (*function)(void);

// mov eax, value; ret
static void generate(uint8_t *at, int value) {
    at[0] = 0xb8;
    memcpy(at + 1, &value, 4);
    at[5] = 0xc3;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    uint8_t *code = map_anon(8 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
    int fd = (int)SYS(memfd_create("jit", 0));
    SYS(ftruncate(fd, PAGE));
    uint8_t *writable = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    uint8_t *executable = mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_SHARED, fd, 0);
    CHECK(writable != MAP_FAILED && executable != MAP_FAILED);
    STEPS {
        for (int i = 0; i < 8; i++) {
            // The last page's code is as old as the program.
            if (i == 7 && g.step > 1) continue;
            uint8_t *page = code + (size_t)i * PAGE;
            SYS(mprotect(page, PAGE, PROT_READ | PROT_WRITE));
            generate(page + 64 * i, i * 1000 + g.step);
            if (i % 2) nap_ms(g.step_ms / 8);
            SYS(mprotect(page, PAGE, PROT_READ | PROT_EXEC));
        }
        generate(writable + 100, g.step * 7);
        nap();
        for (int i = 0; i < 8; i++) {
            function made = (function)(uintptr_t)(code + (size_t)i * PAGE + 64 * i);
            EQ(made(), i * 1000 + (i == 7 ? 1 : g.step));
        }
        EQ(((function)(uintptr_t)(executable + 100))(), g.step * 7);
    }
    return guest_pass();
}
