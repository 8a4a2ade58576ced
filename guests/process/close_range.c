// Feature: descriptor table: sparse numbers, close-on-exec flags, close_range
// Proves: which numbers are open and which have FD_CLOEXEC stays exactly so, and a new descriptor
// gets the lowest free number.
#include "guest.h"

#define TOP 1000
static bool open_now[TOP], cloexec[TOP];

static void set(int fd, bool flag) {
    SYS(dup3(0, fd, flag ? O_CLOEXEC : 0));
    open_now[fd] = true;
    cloexec[fd] = flag;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    SYS(syscall(SYS_close_range, 3, LOG_FD - 1, 0));
    SYS(syscall(SYS_close_range, LOG_FD + 1, TOP - 1, 0));
    for (int fd = 0; fd < 3; fd++) open_now[fd] = fcntl(fd, F_GETFD) >= 0;
    open_now[LOG_FD] = cloexec[LOG_FD] = true;
    for (int fd = 5; fd < TOP; fd += 7 + fd / 5)
        if (fd != LOG_FD) set(fd, fd % 2);
    set(TOP - 1, true);
    STEPS {
        for (int fd = 0; fd < TOP; fd++) {
            int flags = fcntl(fd, F_GETFD);
            CHECK((flags >= 0) == open_now[fd], "descriptor %d", fd);
            if (flags >= 0) CHECK(!!(flags & FD_CLOEXEC) == cloexec[fd], "descriptor %d", fd);
        }
        int lowest = 0;
        while (open_now[lowest]) lowest++;
        int fd = (int)SYS(dup(0));
        EQ(fd, lowest);
        close(fd);
        nap();
        // A window of the table is marked close-on-exec, another is closed, one is opened.
        unsigned at = 301 + (unsigned)g.step * 37 % 600;
        SYS(syscall(SYS_close_range, at, at + 30, 4 /* CLOSE_RANGE_CLOEXEC */));
        for (unsigned i = at; i <= at + 30; i++) cloexec[i] |= open_now[i];
        SYS(syscall(SYS_close_range, at + 31, at + 60, 0));
        for (unsigned i = at + 31; i <= at + 60; i++) open_now[i] = cloexec[i] = false;
        set(3 + g.step * 11 % 290, g.step % 2);
        set((int)at + 50, g.step % 2);
    }
    return guest_pass();
}
