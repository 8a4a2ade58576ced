// Feature: POSIX record locks
// Proves: byte ranges locked by a process, for reading and for writing, keep out another process,
// with the owner's pid as the kernel tells it, and go when the owner closes the file.
#include "guest.h"

static struct flock range(short type, off_t from, off_t length) {
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = from, .l_len = length};
}
static int fd;
static pid_t owner;

static long look_from_child(long step) {
    if (step == 0) return close(fd), fd = (int)SYS(open(beside("locked"), O_RDWR));
    struct flock lock = range(F_WRLCK, 0, 10);
    FAILS(fcntl(fd, F_SETLK, &lock), EAGAIN);
    SYS(fcntl(fd, F_GETLK, &lock));
    EQ(lock.l_type, F_WRLCK);
    EQ(lock.l_start, 0);
    EQ(lock.l_len, 10);
    EQ(lock.l_pid, owner);
    lock = range(F_RDLCK, 100, 50);
    SYS(fcntl(fd, F_SETLK, &lock));
    lock.l_type = F_UNLCK;
    SYS(fcntl(fd, F_SETLK, &lock));
    lock = range(F_WRLCK, 120, 1);
    SYS(fcntl(fd, F_GETLK, &lock));
    EQ(lock.l_type, F_RDLCK);
    EQ(lock.l_len, 50);
    lock = range(F_WRLCK, 1000 + step, 0);
    SYS(fcntl(fd, F_GETLK, &lock));
    EQ(lock.l_start, 1000 + step);
    EQ(lock.l_len, 1);
    lock = range(F_WRLCK, 1001 + step, 0);
    SYS(fcntl(fd, F_GETLK, &lock));
    EQ(lock.l_type, F_UNLCK);
    return 0;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    fd = (int)SYS(open(beside("locked"), O_RDWR | O_CREAT, 0600));
    owner = getpid();
    struct peer peer = peer_start(look_from_child);
    peer_ask(&peer, 0);
    struct flock locks[] = {range(F_WRLCK, 0, 10), range(F_RDLCK, 100, 50)};
    for (int i = 0; i < 2; i++) SYS(fcntl(fd, F_SETLK, &locks[i]));
    STEPS {
        struct flock moving = range(F_WRLCK, 1000 + g.step, 1);
        SYS(fcntl(fd, F_SETLK, &moving));
        nap();
        peer_ask(&peer, g.step);
        moving.l_type = F_UNLCK;
        SYS(fcntl(fd, F_SETLK, &moving));
    }
    peer_end(&peer);
    return guest_pass();
}
