// Feature: signalfd
// Proves: the set of signals, the blocked mask behind it and queued signals with values and sender
// are read in order; a changed set is kept.
#include "guest.h"
#include <sys/signalfd.h>

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    sigset_t all, some;
    sigemptyset(&all);
    sigemptyset(&some);
    sigaddset(&all, SIGUSR1);
    sigaddset(&all, SIGUSR2);
    sigaddset(&all, SIGRTMIN + 4);
    sigaddset(&some, SIGUSR2);
    SYS(sigprocmask(SIG_BLOCK, &all, NULL));
    int fd = (int)SYS(signalfd(-1, &some, SFD_NONBLOCK | SFD_CLOEXEC));
    SYS(signalfd(fd, &all, 0));
    int narrow = (int)SYS(signalfd(-1, &some, SFD_NONBLOCK));
    STEPS {
        for (int i = 0; i < 3; i++)
            SYS(sigqueue(getpid(), SIGRTMIN + 4, (union sigval){.sival_int = g.step * 3 + i}));
        SYS(kill(getpid(), SIGUSR1));
        SYS(kill(getpid(), SIGUSR2));
        nap();
        struct signalfd_siginfo got[8];
        EQ(read(narrow, got, sizeof got), sizeof *got);
        EQ(got[0].ssi_signo, SIGUSR2);
        EQ(read(fd, got, sizeof got), 4 * sizeof *got);
        EQ(got[0].ssi_signo, SIGUSR1);
        EQ(got[0].ssi_code, SI_USER);
        for (int i = 0; i < 3; i++) {
            EQ(got[i + 1].ssi_signo, SIGRTMIN + 4);
            EQ(got[i + 1].ssi_int, g.step * 3 + i);
            EQ(got[i + 1].ssi_pid, getpid());
        }
        FAILS(read(fd, got, sizeof got), EAGAIN);
    }
    return guest_pass();
}
