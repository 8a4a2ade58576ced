// Feature: /dev/null, zero, full, urandom
// Proves: open descriptors of these devices and mappings of /dev/zero, shared with a child and
// private, go on working.
#include "guest.h"

static uint8_t *shared;
static long answer(long step) {
    FILLED(shared, 2 * PAGE, (uint64_t)step);
    fill(shared + 2 * PAGE, PAGE, (uint64_t)step);
    return 0;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int null = (int)SYS(open("/dev/null", O_RDWR)), zero = (int)SYS(open("/dev/zero", O_RDWR));
    int full = (int)SYS(open("/dev/full", O_WRONLY));
    int random = (int)SYS(open("/dev/urandom", O_RDONLY));
    shared = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, zero, 0);
    uint8_t *private = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, zero, 0);
    CHECK(shared != MAP_FAILED && private != MAP_FAILED);
    struct peer peer = peer_start(answer);
    uint64_t last[4] = {0};
    STEPS {
        fill(shared, 2 * PAGE, (uint64_t)g.step);
        fill(private, PAGE, (uint64_t)g.step);
        nap();
        peer_ask(&peer, g.step);
        FILLED(shared + 2 * PAGE, PAGE, (uint64_t)g.step);
        FILLED(private, PAGE, (uint64_t)g.step);
        ZEROS(private + PAGE, 3 * PAGE);
        uint8_t bytes[PAGE];
        memset(bytes, 1, PAGE);
        EQ(read(null, bytes, PAGE), 0);
        EQ(write(null, bytes, PAGE), PAGE);
        EQ(read(zero, bytes, PAGE), PAGE);
        ZEROS(bytes, PAGE);
        FAILS(write(full, bytes, 1), ENOSPC);
        uint64_t now[4];
        get(random, now, sizeof now);
        CHECK(memcmp(now, last, sizeof now), "random bytes came twice");
        memcpy(last, now, sizeof now);
    }
    peer_end(&peer);
    return guest_pass();
}
