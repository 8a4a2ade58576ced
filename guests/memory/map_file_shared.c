// Feature: shared file mappings
// Proves: writes through a MAP_SHARED mapping reach the file, another process's mapping and read(),
// writes by write() reach the mapping, with and without msync.
#include "guest.h"

#define PAGES 32
static uint8_t *shared;
static int fd;

static long answer(long step) {
    FILLED(shared, 8 * PAGE, (uint64_t)step);
    fill(shared + 8 * PAGE, 8 * PAGE, (uint64_t)step * 3);
    return step;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    fd = (int)SYS(open(beside("mapped"), O_RDWR | O_CREAT | O_TRUNC, 0600));
    SYS(ftruncate(fd, PAGES * PAGE));
    shared = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(shared != MAP_FAILED);
    struct peer peer = peer_start(answer);
    static uint8_t bytes[8 * PAGE];
    STEPS {
        fill(shared, 8 * PAGE, (uint64_t)g.step);
        if (g.step % 2) SYS(msync(shared, 8 * PAGE, MS_SYNC));
        fill(bytes, sizeof bytes, (uint64_t)g.step * 5);
        EQ(pwrite(fd, bytes, sizeof bytes, 16 * PAGE), sizeof bytes);
        nap();
        EQ(peer_ask(&peer, g.step), g.step);
        FILLED(shared + 8 * PAGE, 8 * PAGE, (uint64_t)g.step * 3);
        FILLED(shared + 16 * PAGE, 8 * PAGE, (uint64_t)g.step * 5);
        for (size_t i = 0; i < 2; i++) {
            EQ(pread(fd, bytes, sizeof bytes, (off_t)(i * 8 * PAGE)), sizeof bytes);
            FILLED(bytes, sizeof bytes, (uint64_t)g.step * (i ? 3 : 1));
        }
        ZEROS(shared + 24 * PAGE, (PAGES - 24) * PAGE);
    }
    peer_end(&peer);
    return guest_pass();
}
