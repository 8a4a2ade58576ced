// Feature: locked memory
// Proves: mlock, mlock2(MLOCK_ONFAULT) and mlockall(MCL_FUTURE) keep exactly their pages locked.
#include "smaps.h"

static long locked_kb(void) { return atol(proc_line("/proc/self/status", "VmLck:")); }

static long lock_future(long step) {
    static uint8_t *memory;
    if (step == 0) return SYS(mlockall(MCL_FUTURE));
    if (memory) {
        CHECK(smaps_flag(memory, " lo"));
        SYS(munmap(memory, 4 * PAGE));
    }
    memory = map_anon(4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
    CHECK(smaps_flag(memory, " lo"));
    return 0;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    uint8_t *memory = map_anon(64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
    struct peer peer = peer_start(lock_future);
    peer_ask(&peer, 0);
    fill(memory, 64 * PAGE, 1);
    SYS(mlock(memory, 16 * PAGE));
    SYS(syscall(SYS_mlock2, memory + 32 * PAGE, 8 * PAGE, 1 /* MLOCK_ONFAULT */));
    long want = locked_kb();
    EQ(want, 24 * 4);
    STEPS {
        EQ(locked_kb(), want);
        EQ(smaps_flag(memory, " lo"), 1);
        EQ(smaps_flag(memory + 20 * PAGE, " lo"), 0);
        EQ(smaps_flag(memory + 33 * PAGE, " lo"), 1);
        EQ(smaps_flag(memory + 48 * PAGE, " lo"), g.step % 2 == 0);
        FILLED(memory, 64 * PAGE, 1);
        peer_ask(&peer, g.step);
        nap();
        if (g.step % 2) SYS(mlock(memory + 48 * PAGE, PAGE));
        else SYS(munlock(memory + 48 * PAGE, PAGE));
        want += g.step % 2 ? 4 : -4;
    }
    peer_end(&peer);
    return guest_pass();
}
