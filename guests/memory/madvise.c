// Feature: madvise
// Proves: pages given back by MADV_DONTNEED and MADV_REMOVE read as zero, DONTFORK and WIPEONFORK
// act on every fork, and those, HUGEPAGE, NOHUGEPAGE, DONTDUMP, SEQUENTIAL and RANDOM stay set.
#include "smaps.h"

enum { PLAIN, DONTFORK, WIPE, HUGE, NOHUGE, NODUMP, SEQUENTIAL, RANDOM, KINDS };
static const struct { int advice; const char *flag; } kinds[] = {
    [PLAIN] = {MADV_NORMAL, " rd"},        [DONTFORK] = {MADV_DONTFORK, " dc"},
    [WIPE] = {MADV_WIPEONFORK, " wf"},     [HUGE] = {MADV_HUGEPAGE, " hg"},
    [NOHUGE] = {MADV_NOHUGEPAGE, " nh"},   [NODUMP] = {MADV_DONTDUMP, " dd"},
    [SEQUENTIAL] = {MADV_SEQUENTIAL, " sr"}, [RANDOM] = {MADV_RANDOM, " rr"},
};
#define LENGTH (32 * PAGE)
static uint8_t *areas[KINDS];

static void in_child(void) {
    unsigned char resident;
    FAILS(mincore(areas[DONTFORK], PAGE, &resident), ENOMEM);
    ZEROS(areas[WIPE], LENGTH);
    FILLED(areas[PLAIN] + 16 * PAGE, 16 * PAGE, (uint64_t)g.step);
    _exit(0);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    for (int i = 0; i < KINDS; i++) {
        areas[i] = map_anon(LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE);
        // A gap keeps neighbours from being merged.
        map_anon(PAGE, PROT_NONE, MAP_PRIVATE);
        SYS(madvise(areas[i], LENGTH, kinds[i].advice));
    }
    uint8_t *shared = map_anon(LENGTH, PROT_READ | PROT_WRITE, MAP_SHARED);
    STEPS {
        for (int i = 0; i < KINDS; i++) fill(areas[i], LENGTH, (uint64_t)(g.step + i));
        fill(shared, LENGTH, (uint64_t)g.step);
        SYS(madvise(areas[PLAIN], 8 * PAGE, MADV_DONTNEED));
        SYS(madvise(shared + 8 * PAGE, 8 * PAGE, MADV_REMOVE));
        fill(areas[PLAIN], LENGTH, (uint64_t)g.step);
        nap_ms(g.step_ms / 2);
        // Discarded late in the round: a page that was copied before must not come back.
        SYS(madvise(areas[PLAIN], 8 * PAGE, MADV_DONTNEED));
        nap_ms(g.step_ms / 2);
        ZEROS(areas[PLAIN], 8 * PAGE);
        ZEROS(shared + 8 * PAGE, 8 * PAGE);
        fill(areas[PLAIN] + 16 * PAGE, 16 * PAGE, (uint64_t)g.step);
        for (int i = 1; i < KINDS; i++) {
            FILLED(areas[i], LENGTH, (uint64_t)(g.step + i));
            for (int other = 1; other < KINDS; other++)
                CHECK(smaps_flag(areas[i], kinds[other].flag) == (i == other), "area %d flag%s", i,
                      kinds[other].flag);
        }
        pid_t pid = (pid_t)SYS(fork());
        if (pid == 0) in_child();
        reap(pid, 0);
    }
    return guest_pass();
}
