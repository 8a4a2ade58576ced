// Feature: established TCP connections with both ends in the guest
// Proves: bytes unread in the receive queues of both ends, a stream that never stops between two
// processes, and the ports stay; not one byte is lost, doubled or out of order.
#include "inet.h"

#define ROUNDTRIP 20000
static int to_echo;

// Echoes for ever in another process.
static void echo(int fd) {
    uint8_t bytes[4096];
    for (;;) {
        ssize_t n = SYS(read(fd, bytes, sizeof bytes));
        if (n == 0) _exit(0);
        put(fd, bytes, (size_t)n);
    }
}
// Sends a numbered stream without a pause and checks what comes back, eight bytes at a time.
static _Atomic bool stop;
static _Atomic long echoed;
static void *stream(void *argument) {
    for (uint64_t number = 0; !stop; number += 64) {
        uint64_t out[64], in[64];
        for (int i = 0; i < 64; i++) out[i] = number + (uint64_t)i;
        put(to_echo, out, sizeof out);
        get(to_echo, in, sizeof in);
        CHECK(!memcmp(in, out, sizeof in), "stream at %lu: got %lu", number, in[0]);
        echoed++;
    }
    return argument;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int quiet[2], busy[2];
    connected_pair(7021, quiet);
    connected_pair(7022, busy);
    pid_t child = (pid_t)SYS(fork());
    if (child == 0) {
        close(busy[0]);
        echo(busy[1]);
    }
    close(busy[1]);
    to_echo = busy[0];
    pthread_t thread = start(stream, NULL);
    uint16_t port = port_of(quiet[0], false);
    static uint8_t bytes[ROUNDTRIP];
    STEPS {
        long before = echoed;
        for (int side = 0; side < 2; side++) {
            fill(bytes, sizeof bytes, (uint64_t)(g.step * 2 + side));
            put(quiet[side], bytes, sizeof bytes);
        }
        nap();
        for (int side = 0; side < 2; side++) {
            get(quiet[1 - side], bytes, sizeof bytes);
            FILLED(bytes, sizeof bytes, (uint64_t)(g.step * 2 + side));
        }
        FAILS(recv(quiet[0], bytes, 1, MSG_DONTWAIT), EAGAIN);
        EQ(port_of(quiet[0], false), port);
        EQ(port_of(quiet[0], true), 7021);
        EQ(port_of(quiet[1], true), port);
        while (echoed == before) nap_ms(1);
    }
    stop = true;
    join(thread);
    close(to_echo);
    reap(child, 0);
    return guest_pass();
}
