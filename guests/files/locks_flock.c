// Feature: flock
// Proves: shared and exclusive locks, taken before a fork and after, keep out other descriptions,
// upgrade and downgrade.
#include "guest.h"
#include <sys/file.h>

static int other;
static long try_from_child(long operation) {
    if (operation == 0) {
        other = (int)SYS(open(beside("locked"), O_RDWR));
        return 0;
    }
    if (flock(other, (int)operation | LOCK_NB) == 0) return SYS(flock(other, LOCK_UN));
    return errno;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int fd = (int)SYS(open(beside("locked"), O_RDWR | O_CREAT, 0600));
    SYS(flock(fd, LOCK_EX));
    struct peer peer = peer_start(try_from_child);
    peer_ask(&peer, 0);
    STEPS {
        nap_ms(g.step_ms / 2);
        EQ(peer_ask(&peer, LOCK_EX), EWOULDBLOCK);
        EQ(peer_ask(&peer, LOCK_SH), EWOULDBLOCK);
        SYS(flock(fd, LOCK_SH));
        nap_ms(g.step_ms / 2);
        EQ(peer_ask(&peer, LOCK_EX), EWOULDBLOCK);
        EQ(peer_ask(&peer, LOCK_SH), 0);
        SYS(flock(fd, LOCK_UN));
        EQ(peer_ask(&peer, LOCK_EX), 0);
        SYS(flock(fd, LOCK_EX | LOCK_NB));
    }
    peer_end(&peer);
    return guest_pass();
}
