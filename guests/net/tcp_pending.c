// Feature: TCP connections waiting to be accepted
// Proves: connections that clients inside made and wrote to before accept() are accepted later with
// their data and are connections in both directions.
#include "inet.h"

#define PENDING 3

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
            struct pollfd one = {.fd = listener, .events = POLLIN};
            EQ(SYS(poll(&one, 1, LATE_MS_MAX)), 1);
            int accepted = (int)SYS(accept(listener, NULL, NULL));
            long i = get_long(accepted) - g.step * 100;
            CHECK(i >= 0 && i < PENDING && !seen[i], "connection %ld", i);
            seen[i] = true;
            EQ(port_of(accepted, true), port_of(dialled[i], false));
            put_long(accepted, i);
            EQ(get_long(dialled[i]), i);
            close(accepted);
            close(dialled[i]);
        }
    }
    return guest_pass();
}
