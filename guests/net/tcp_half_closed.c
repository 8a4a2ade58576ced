// Feature: half closed TCP connections
// Proves: after shutdown of one direction the other still carries data, the end of the stream comes
// after the last queued byte, and a fully closed peer is told apart.
#include "inet.h"

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int half[2], unread[2], gone[2];
    connected_pair(7051, half);
    connected_pair(7052, unread);
    connected_pair(7053, gone);
    SYS(shutdown(half[0], SHUT_WR));
    char byte, text[11] = "";
    EQ(read(half[1], &byte, 1), 0);
    put(unread[0], "until here", 10);
    SYS(shutdown(unread[0], SHUT_WR));
    put(gone[0], "last words", 10);
    close(gone[0]);
    signal(SIGPIPE, SIG_IGN);
    STEPS {
        uint8_t bytes[5000];
        fill(bytes, sizeof bytes, (uint64_t)g.step);
        put(half[1], bytes, sizeof bytes);
        nap();
        get(half[0], bytes, sizeof bytes);
        FILLED(bytes, sizeof bytes, (uint64_t)g.step);
        EQ(read(half[1], &byte, 1), 0);
        FAILS(write(half[0], "x", 1), EPIPE);
        FAILS(write(unread[0], "x", 1), EPIPE);
        struct pollfd ends[] = {{half[1], POLLIN | POLLRDHUP, 0},
                                {unread[1], POLLIN | POLLRDHUP, 0},
                                {gone[1], POLLIN | POLLRDHUP, 0},
                                {half[0], POLLRDHUP, 0}};
        EQ(poll(ends, 4, 0), 3);
        for (int i = 0; i < 3; i++) EQ(ends[i].revents, POLLIN | POLLRDHUP);
        put_long(unread[1], g.step);
        EQ(get_long(unread[0]), g.step);
    }
    get(unread[1], text, 10);
    CHECK(!strcmp(text, "until here"));
    EQ(read(unread[1], text, 1), 0);
    get(gone[1], text, 10);
    CHECK(!strcmp(text, "last words"));
    EQ(read(gone[1], text, 1), 0);
    return guest_pass();
}
