// Feature: thousands of mappings
// Proves: 2,000 mappings, each with its own contents and every other read-only, stay, while some
// are unmapped and mapped again each round.
#include "guest.h"

#define COUNT 2000
static uint8_t *base;
static uint64_t seeds[COUNT];

static void map_one(size_t i, uint64_t seed) {
    uint8_t *page = base + 2 * i * PAGE;
    map_fixed(page, PAGE, PROT_READ | PROT_WRITE, 0);
    seeds[i] = seed;
    fill(page, 256, seed);
    if (i % 2) SYS(mprotect(page, PAGE, PROT_READ));
}

static int count_mappings(void) {
    FILE *file = fopen("/proc/self/maps", "re");
    char line[512];
    int count = 0;
    unsigned long from, to;
    while (fgets(line, sizeof line, file))
        count += sscanf(line, "%lx-%lx", &from, &to) == 2 && from >= (uintptr_t)base &&
                 to <= (uintptr_t)base + 2 * COUNT * PAGE;
    fclose(file);
    return count;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    base = map_anon((2 * COUNT + 1) * PAGE, PROT_NONE, MAP_PRIVATE);
    SYS(munmap(base, (2 * COUNT + 1) * PAGE));
    for (size_t i = 0; i < COUNT; i++) map_one(i, i);
    STEPS {
        for (size_t i = (size_t)g.step % 50; i < COUNT; i += 50) {
            SYS(munmap(base + 2 * i * PAGE, PAGE));
            map_one(i, i + (uint64_t)g.step * COUNT);
        }
        nap();
        EQ(count_mappings(), COUNT);
        for (size_t i = 0; i < COUNT; i++) FILLED(base + 2 * i * PAGE, 256, seeds[i]);
    }
    return guest_pass();
}
