// Feature: FIFOs with contents
// Proves: a named pipe open at both ends in two processes keeps its unread bytes and its name, also
// when the name is gone.
#include "guest.h"

static int fifo, gone;
static long write_in_child(long step) {
    if (step == 0) {
        fifo = (int)SYS(open(beside("fifo"), O_WRONLY));
        gone = (int)SYS(open(beside("gone"), O_RDWR));
        return 0;
    }
    uint8_t bytes[3000];
    fill(bytes, sizeof bytes, (uint64_t)step);
    put(fifo, bytes, sizeof bytes);
    put(gone, bytes, 500);
    return 0;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    SYS(mkfifo(beside("fifo"), 0600));
    SYS(mkfifo(beside("gone"), 0600));
    int reader = (int)SYS(open(beside("fifo"), O_RDONLY | O_NONBLOCK));
    SYS(fcntl(reader, F_SETFL, 0));
    int unnamed = (int)SYS(open(beside("gone"), O_RDWR));
    struct peer peer = peer_start(write_in_child);
    peer_ask(&peer, 0);
    SYS(unlink(beside("gone")));
    STEPS {
        peer_ask(&peer, g.step);
        nap();
        uint8_t bytes[3000];
        get(reader, bytes, sizeof bytes);
        FILLED(bytes, sizeof bytes, (uint64_t)g.step);
        get(unnamed, bytes, 500);
        FILLED(bytes, 500, (uint64_t)g.step);
        struct stat stat_fd, stat_path;
        SYS(fstat(reader, &stat_fd));
        SYS(stat(beside("fifo"), &stat_path));
        CHECK(S_ISFIFO(stat_fd.st_mode));
        EQ(stat_fd.st_ino, stat_path.st_ino);
        struct pollfd end = {.fd = reader, .events = POLLIN};
        EQ(poll(&end, 1, 0), 0);
    }
    peer_end(&peer);
    uint8_t byte;
    EQ(read(reader, &byte, 1), 0);
    return guest_pass();
}
