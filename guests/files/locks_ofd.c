// Feature: open file description locks
// Proves: a lock belongs to its description: kept while a dup or a child holds it, in the way of
// another description in the same process, gone with the last close.
#include "guest.h"

static struct flock range(short type, off_t from, off_t length) {
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = from, .l_len = length};
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    const char *path = beside("locked");
    int first = (int)SYS(open(path, O_RDWR | O_CREAT, 0600)), other = (int)SYS(open(path, O_RDWR));
    struct flock lock = range(F_WRLCK, 5, 20);
    SYS(fcntl(first, F_OFD_SETLK, &lock));
    int copy = (int)SYS(dup(first));
    close(first);
    STEPS {
        lock = range(F_WRLCK, 100 + g.step, 1);
        SYS(fcntl(copy, F_OFD_SETLK, &lock));
        // A third description whose lock dies with it.
        int third = (int)SYS(open(path, O_RDWR));
        lock = range(F_RDLCK, 5000, 5);
        SYS(fcntl(third, F_OFD_SETLK, &lock));
        nap();
        lock = range(F_WRLCK, 0, 6);
        FAILS(fcntl(other, F_OFD_SETLK, &lock), EAGAIN);
        SYS(fcntl(other, F_OFD_GETLK, &lock));
        EQ(lock.l_start, 5);
        EQ(lock.l_len, 20);
        EQ(lock.l_pid, -1);
        lock = range(F_RDLCK, 100 + g.step, 1);
        FAILS(fcntl(other, F_OFD_SETLK, &lock), EAGAIN);
        lock = range(F_WRLCK, 5000, 1);
        FAILS(fcntl(other, F_OFD_SETLK, &lock), EAGAIN);
        close(third);
        SYS(fcntl(other, F_OFD_SETLK, &lock));
        lock.l_type = F_UNLCK;
        SYS(fcntl(other, F_OFD_SETLK, &lock));
        lock = range(F_UNLCK, 100 + g.step, 1);
        SYS(fcntl(copy, F_OFD_SETLK, &lock));
    }
    close(copy);
    lock = range(F_WRLCK, 0, 0);
    SYS(fcntl(other, F_OFD_SETLK, &lock));
    return guest_pass();
}
