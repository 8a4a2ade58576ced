// Feature: droppable memory
// Proves: pages of a MAP_DROPPABLE mapping hold what was written since they vanished last, also one
// that is mapped anew each round, and random numbers that vDSO getrandom makes from a state in
// such memory, in a thread without a pause, never come twice.
#include "smaps.h"
#include <elf.h>
#include <sys/auxv.h>

#ifndef MAP_DROPPABLE
#define MAP_DROPPABLE 0x08
#endif
#define PAGES 16
#define SEEN (1u << 16)

// struct vgetrandom_opaque_params of linux/random.h.
struct parameters {
    uint32_t bytes, protection, flags, reserved[13];
};
typedef ssize_t (*getrandom_call)(void *, size_t, unsigned, void *, size_t);

static getrandom_call find_getrandom(void) {
    const char *base = (const char *)getauxval(AT_SYSINFO_EHDR);
    const Elf64_Ehdr *head = (const Elf64_Ehdr *)base;
    CHECK(base);
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(base + head->e_shoff);
    for (int i = 0; i < head->e_shnum; i++) {
        if (sections[i].sh_type != SHT_DYNSYM) continue;
        const Elf64_Sym *symbols = (const Elf64_Sym *)(base + sections[i].sh_offset);
        const char *names = base + sections[sections[i].sh_link].sh_offset;
        for (size_t s = 0; s < sections[i].sh_size / sizeof *symbols; s++)
            if (!strcmp(names + symbols[s].st_name, "__vdso_getrandom"))
                return (getrandom_call)(uintptr_t)(base + symbols[s].st_value);
    }
    return NULL;
}

static uint8_t *map_droppable(size_t bytes, int protection, int flags) {
    void *at = mmap(NULL, bytes, protection, flags | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED, "MAP_DROPPABLE needs Linux 6.11");
    return at;
}

// What was written before the page vanished is gone, what came after it is there.
static void check_page(const uint8_t *page, uint64_t seed) {
    uint8_t want[PAGE];
    fill(want, PAGE, seed);
    size_t from = 0;
    while (from < PAGE && page[from] == 0) from++;
    from -= from % 8;
    CHECK(!memcmp(page + from, want + from, PAGE - from), "page %p from %zu", page, from);
}

static int compare(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static atomic_bool ending;
static atomic_int batches;

static void *draw(void *argument) {
    getrandom_call call = (getrandom_call)(uintptr_t)argument;
    struct parameters wanted;
    EQ(call(NULL, 0, 0, &wanted, ~0ul), 0);
    void *state = map_droppable(PAGE, (int)wanted.protection, (int)wanted.flags);
    CHECK(smaps_flag(state, " dp"));
    uint64_t *numbers = malloc(SEEN * sizeof *numbers);
    CHECK(numbers);
    while (!ending) {
        for (size_t i = 0; i < SEEN; i++)
            EQ(call(&numbers[i], sizeof *numbers, 0, state, wanted.bytes), sizeof *numbers);
        qsort(numbers, SEEN, sizeof *numbers, compare);
        for (size_t i = 1; i < SEEN; i++) CHECK(numbers[i] != numbers[i - 1]);
        batches++;
    }
    return NULL;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    getrandom_call call = find_getrandom();
    CHECK(call, "this kernel has no getrandom in its vDSO (Linux 6.11)");
    pthread_t other = start(draw, (void *)(uintptr_t)call);
    const int access = PROT_READ | PROT_WRITE;
    uint8_t *kept = map_droppable(PAGES * PAGE, access, MAP_DROPPABLE);
    STEPS {
        uint8_t *fresh = map_droppable(PAGES * PAGE, access, MAP_DROPPABLE);
        ZEROS(fresh, PAGES * PAGE);
        int drawn = batches;
        for (int page = 0; page < PAGES; page++) {
            fill(kept + page * PAGE, PAGE, (uint64_t)(g.step + page));
            fill(fresh + page * PAGE, PAGE, (uint64_t)(g.step + page));
        }
        nap();
        for (int page = 0; page < 2 * PAGES; page++) {
            uint8_t *at = (page < PAGES ? kept : fresh) + page % PAGES * PAGE;
            check_page(at, (uint64_t)(g.step + page % PAGES));
        }
        CHECK(smaps_flag(kept, " dp") && smaps_flag(kept, " wf"));
        SYS(munmap(fresh, PAGES * PAGE));
        // An ordinary mapping where a droppable one was keeps its contents.
        uint8_t *plain = mmap(fresh, PAGES * PAGE, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
                              -1, 0);
        CHECK(plain == fresh);
        fill(plain, PAGES * PAGE, (uint64_t)g.step);
        nap();
        FILLED(plain, PAGES * PAGE, (uint64_t)g.step);
        SYS(munmap(plain, PAGES * PAGE));
        while (batches == drawn) nap_ms(1);
    }
    ending = true;
    join(other);
    return guest_pass();
}
