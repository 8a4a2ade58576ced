// Feature: appending
// Proves: two processes that append to one file through O_APPEND descriptors lose and overwrite
// nothing, also after the file was cut short.
#include "guest.h"

static int fd;
static long append(long step) {
    char line[64];
    snprintf(line, sizeof line, "child %ld\n", step);
    put(fd, line, strlen(line));
    return 0;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    fd = (int)SYS(open(beside("log"), O_RDWR | O_CREAT | O_TRUNC | O_APPEND, 0600));
    struct peer peer = peer_start(append);
    static char want[1 << 16], got[1 << 16];
    size_t length = 0;
    STEPS {
        if (g.step % 20 == 0) {
            length /= 2;
            SYS(ftruncate(fd, (off_t)length));
        }
        char line[64];
        snprintf(line, sizeof line, "parent %d\n", g.step);
        put(fd, line, strlen(line));
        nap();
        peer_ask(&peer, g.step);
        size_t room = sizeof want - length;
        length += (size_t)snprintf(want + length, room, "%schild %d\n", line, g.step);
        EQ(pread(fd, got, sizeof got, 0), length);
        CHECK(!memcmp(got, want, length));
        if (length > sizeof want / 2) SYS(ftruncate(fd, (off_t)(length = 0)));
    }
    peer_end(&peer);
    return guest_pass();
}
