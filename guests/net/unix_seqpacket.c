// Feature: UNIX seqpacket sockets
// Proves: packets queued both ways keep borders, order and contents, an empty one included; a
// listener in one process goes on accepting from another, and a connection that waits with a packet
// is accepted with it or reset at once.
// Unsupported: increments: bytes in accept(2) hold up checkpoints: fewer than 50 fit
#include "guest.h"
#include <sys/un.h>

static const struct sockaddr_un address = {AF_UNIX, "\0seqpacket"};
static const socklen_t length = sizeof(sa_family_t) + 10;

// With a negative step: whether the connection was reset.
static long connect_in_child(long step) {
    static int fd = -1;
    if (step == 0) return 0;
    if (step < 0) {
        struct pollfd one = {.fd = fd, .events = POLLIN};
        char byte;
        if (SYS(poll(&one, 1, 0)) == 0) return 0;
        FAILS(read(fd, &byte, 1), ECONNRESET);
        return 1;
    }
    if (fd >= 0) close(fd);
    fd = (int)SYS(socket(AF_UNIX, SOCK_SEQPACKET, 0));
    SYS(connect(fd, (const struct sockaddr *)&address, length));
    put_long(fd, step * 3);
    return 0;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int pair[2], listener = (int)SYS(socket(AF_UNIX, SOCK_SEQPACKET, 0));
    SYS(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair));
    SYS(bind(listener, (const struct sockaddr *)&address, length));
    SYS(listen(listener, 5));
    struct peer peer = peer_start(connect_in_child);
    uint8_t bytes[2000];
    STEPS {
        fill(bytes, sizeof bytes, (uint64_t)g.step);
        for (size_t i = 0; i < 5; i++)
            EQ(send(pair[i % 2], bytes + i, 1 + i * 150, 0), 1 + i * 150);
        peer_ask(&peer, g.step);
        nap();
        for (size_t i = 0; i < 5; i++) {
            uint8_t got[2000];
            EQ(recv(pair[1 - i % 2], got, sizeof got, 0), 1 + i * 150);
            CHECK(!memcmp(got, bytes + i, 1 + i * 150));
        }
        FAILS(recv(pair[0], bytes, 1, MSG_DONTWAIT), EAGAIN);
        if (peer_ask(&peer, -g.step)) {
            struct pollfd none = {.fd = listener, .events = POLLIN};
            EQ(poll(&none, 1, 0), 0);
            peer_ask(&peer, g.step);
        }
        int accepted = (int)SYS(accept(listener, NULL, NULL));
        EQ(get_long(accepted), g.step * 3);
        close(accepted);
    }
    peer_end(&peer);
    return guest_pass();
}
