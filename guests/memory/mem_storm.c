// Feature: memory that is written faster than it can be copied
// Proves: a thread that goes over 128 MiB without a pause finds in every page what it wrote there
// the last time.
// Unsupported: increments: each of its checkpoints takes long, so its life is too short for fifty
#include "guest.h"

#define PAGES 32768
#define WORDS (PAGE / sizeof(uint64_t))
static atomic_bool ending;
static _Atomic uint64_t rounds;

static void *storm(void *argument) {
    uint64_t *memory = argument;
    for (uint64_t round = 1; !ending; round++) {
        for (size_t page = 0; page < PAGES; page++) {
            uint64_t *first = memory + page * WORDS, *last = first + WORDS - 1;
            EQ(*first, round - 1);
            EQ(*last, (round - 1) * PAGES);
            *first = round;
            *last = round * PAGES;
        }
        rounds = round;
    }
    return NULL;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    void *memory = map_anon(PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
    pthread_t writer = start(storm, memory);
    STEPS nap();
    while (!rounds) nap_ms(1);
    ending = true;
    join(writer);
    return guest_pass();
}
