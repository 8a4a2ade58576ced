// Feature: UNIX stream socket pairs
// Proves: bytes queued in both directions, half closed and closed ends, credentials of the peer,
// buffer sizes and time limits stay.
#include "guest.h"
#include <sys/time.h>

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int pair[2], half[2], closed[2];
    SYS(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    SYS(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, half));
    SYS(socketpair(AF_UNIX, SOCK_STREAM, 0, closed));
    put(half[0], "until here", 10);
    SYS(shutdown(half[0], SHUT_WR));
    put(closed[0], "last words", 10);
    close(closed[0]);
    int size = 100000;
    SYS(setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &size, sizeof size));
    socklen_t length = sizeof size;
    SYS(getsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &size, &length));
    struct timeval limit = {3, 500000}, got_limit;
    SYS(setsockopt(pair[1], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    signal(SIGPIPE, SIG_IGN);
    static uint8_t bytes[30000];
    STEPS {
        for (int side = 0; side < 2; side++) {
            fill(bytes, sizeof bytes, (uint64_t)(g.step * 2 + side));
            put(pair[side], bytes, sizeof bytes);
        }
        put_long(half[1], g.step);
        nap();
        for (int side = 0; side < 2; side++) {
            get(pair[1 - side], bytes, sizeof bytes);
            FILLED(bytes, sizeof bytes, (uint64_t)(g.step * 2 + side));
        }
        EQ(get_long(half[0]), g.step);
        FAILS(write(half[0], "x", 1), EPIPE);
        FAILS(write(closed[1], "x", 1), EPIPE);
        int now;
        SYS(getsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &now, &length));
        EQ(now, size);
        length = sizeof got_limit;
        SYS(getsockopt(pair[1], SOL_SOCKET, SO_RCVTIMEO, &got_limit, &length));
        EQ(got_limit.tv_sec, 3);
        struct ucred peer;
        length = sizeof peer;
        SYS(getsockopt(pair[0], SOL_SOCKET, SO_PEERCRED, &peer, &length));
        EQ(peer.pid, getpid());
        EQ(peer.uid, 0);
        struct pollfd end = {.fd = closed[1], .events = POLLIN | POLLRDHUP};
        EQ(poll(&end, 1, 0), 1);
        EQ(end.revents, POLLIN | POLLRDHUP | POLLHUP);
    }
    char text[11] = "";
    get(half[1], text, 10);
    CHECK(!strcmp(text, "until here"));
    EQ(read(half[1], text, 1), 0);
    get(closed[1], text, 10);
    CHECK(!strcmp(text, "last words"));
    EQ(read(closed[1], text, 1), 0);
    return guest_pass();
}
