// Feature: anonymous memory shared between processes
// Proves: three processes go on seeing each other's writes to one MAP_SHARED mapping and its
// untouched pages stay zero.
#include "guest.h"

#define PAGES 128
static uint8_t *shared;

static long answer(long step) {
    FILLED(shared, 64 * PAGE, (uint64_t)step);
    fill(shared + 64 * PAGE, 32 * PAGE, (uint64_t)(step * 2));
    return step;
}
static long answer_second(long step) {
    FILLED(shared + 64 * PAGE, 32 * PAGE, (uint64_t)(step * 2));
    ZEROS(shared + 96 * PAGE, (PAGES - 96) * PAGE);
    return step;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    shared = map_anon(PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED);
    struct peer first = peer_start(answer), second = peer_start(answer_second);
    STEPS {
        fill(shared, 64 * PAGE, (uint64_t)g.step);
        nap_ms(g.step_ms / 2);
        EQ(peer_ask(&first, g.step), g.step);
        nap_ms(g.step_ms / 2);
        EQ(peer_ask(&second, g.step), g.step);
    }
    peer_end(&first);
    peer_end(&second);
    return guest_pass();
}
