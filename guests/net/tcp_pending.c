// Feature: TCP connections waiting to be accepted
// Proves: connections that clients inside made and wrote to before accept() are accepted later with
// their data and are connections in both directions, or reset at once; the listener goes on.
#include "inet.h"

#define PENDING 3

// Waits until the listener has a connection or a client sees its own reset; that one calls again.
static void await_one(int listener, int dialled[PENDING]) {
    for (;;) {
        struct pollfd all[PENDING + 1] = {{.fd = listener, .events = POLLIN}};
        for (int i = 0; i < PENDING; i++) all[i + 1].fd = dialled[i];
        CHECK(SYS(poll(all, PENDING + 1, LATE_MS_MAX)) > 0, "neither accepted nor reset");
        if (all[0].revents) return;
        for (int i = 0; i < PENDING; i++) {
            if (!all[i + 1].revents) continue;
            char byte;
            CHECK(all[i + 1].revents & POLLERR, "events %#x", all[i + 1].revents);
            FAILS(read(dialled[i], &byte, 1), ECONNRESET);
            close(dialled[i]);
            dialled[i] = dial(7031);
            put_long(dialled[i], g.step * 100 + i);
        }
    }
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int listener = listening(7031, 8);
    STEPS {
        int dialled[PENDING];
        bool seen[PENDING] = {0};
        for (int i = 0; i < PENDING; i++) {
            dialled[i] = dial(7031);
            put_long(dialled[i], g.step * 100 + i);
        }
        nap();
        for (int n = 0; n < PENDING; n++) {
            await_one(listener, dialled);
            int accepted = (int)SYS(accept(listener, NULL, NULL));
            long i = get_long(accepted) - g.step * 100;
            CHECK(i >= 0 && i < PENDING && !seen[i], "connection %ld", i);
            seen[i] = true;
            EQ(port_of(accepted, true), port_of(dialled[i], false));
            put_long(accepted, i);
            EQ(get_long(dialled[i]), i);
            close(accepted);
            close(dialled[i]);
            dialled[i] = -1;
        }
    }
    return guest_pass();
}
