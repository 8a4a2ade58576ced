// Feature: private file mappings
// Proves: written pages keep what was written, unwritten ones show the file also after it changes
// on disk, at offsets too, pages given back by MADV_DONTNEED show the file again, and the file
// never sees the writes.
#include "guest.h"

#define PAGES 64
enum { GIVEN_BACK = 16, READ_AGAIN = 8, KEPT = 16 };
static void write_page(int fd, size_t page, uint64_t seed) {
    uint8_t bytes[PAGE];
    fill(bytes, PAGE, seed);
    EQ(pwrite(fd, bytes, PAGE, (off_t)(page * PAGE)), PAGE);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int fd = (int)SYS(open(beside("mapped"), O_RDWR | O_CREAT | O_TRUNC, 0600));
    for (size_t i = 0; i < PAGES; i++) write_page(fd, i, i);
    uint8_t *all = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    uint8_t *tail = mmap(NULL, 8 * PAGE, PROT_READ, MAP_PRIVATE, fd, (PAGES - 8) * PAGE);
    const size_t length = (GIVEN_BACK + KEPT) * PAGE;
    uint8_t *some = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    CHECK(all != MAP_FAILED && tail != MAP_FAILED && some != MAP_FAILED);
    uint64_t on_disk[PAGES];
    for (size_t i = 0; i < PAGES; i++) on_disk[i] = i;
    STEPS {
        for (size_t i = 0; i < PAGES; i += 2)
            fill(all + i * PAGE, PAGE, (uint64_t)g.step * 100 + i);
        size_t changed = (size_t)(g.step % 8 * 2 + 1);
        on_disk[changed] = (uint64_t)g.step * 7777;
        write_page(fd, changed, on_disk[changed]);
        fill(some, length, (uint64_t)g.step);
        nap_ms(g.step_ms / 2);
        // Late in the round: pages that were copied before must not come back.
        SYS(madvise(some, GIVEN_BACK * PAGE, MADV_DONTNEED));
        for (size_t i = 0; i < READ_AGAIN; i++) FILLED(some + i * PAGE, PAGE, on_disk[i]);
        nap_ms(g.step_ms / 2);
        for (size_t i = 0; i < GIVEN_BACK; i++) FILLED(some + i * PAGE, PAGE, on_disk[i]);
        fill(some, GIVEN_BACK * PAGE, (uint64_t)g.step);
        FILLED(some, length, (uint64_t)g.step);
        for (size_t i = 0; i < PAGES; i++)
            FILLED(all + i * PAGE, PAGE, i % 2 ? on_disk[i] : (uint64_t)g.step * 100 + i);
        for (size_t i = 0; i < 8; i++) FILLED(tail + i * PAGE, PAGE, on_disk[PAGES - 8 + i]);
        uint8_t bytes[PAGE];
        for (size_t i = 0; i < PAGES; i += 2) {
            EQ(pread(fd, bytes, PAGE, (off_t)(i * PAGE)), PAGE);
            FILLED(bytes, PAGE, i);
        }
    }
    return guest_pass();
}
