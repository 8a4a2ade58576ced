// Feature: pidfd
// Proves: descriptors of a living child, of a zombie and of the program itself go on naming their
// process: for signals, poll and waitid.
#include "guest.h"

#ifndef P_PIDFD
#define P_PIDFD 3
#endif
static long hits;
static void hit(int signal) { hits += signal == SIGUSR1; }
static long count(long question) {
    if (question == 0) signal(SIGUSR1, hit);
    return hits;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct peer peer = peer_start(count);
    peer_ask(&peer, 0);
    int living = (int)SYS(syscall(SYS_pidfd_open, peer.pid, 0));
    int self = (int)SYS(syscall(SYS_pidfd_open, getpid(), 0));
    pid_t zombie = (pid_t)SYS(fork());
    if (zombie == 0) _exit(17);
    int dead = (int)SYS(syscall(SYS_pidfd_open, zombie, 0));
    STEPS {
        nap();
        SYS(syscall(SYS_pidfd_send_signal, living, SIGUSR1, NULL, 0));
        EQ(peer_ask(&peer, g.step), g.step);
        SYS(syscall(SYS_pidfd_send_signal, self, 0, NULL, 0));
        struct pollfd polls[] = {{living, POLLIN, 0}, {dead, POLLIN, 0}, {self, POLLIN, 0}};
        EQ(poll(polls, 3, LATE_MS_MAX), 1);
        EQ(polls[1].revents & POLLIN, POLLIN);
        siginfo_t info;
        SYS(waitid((idtype_t)P_PIDFD, (id_t)dead, &info, WEXITED | WNOWAIT));
        EQ(info.si_pid, zombie);
        EQ(info.si_status, 17);
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fdinfo/%d", living);
        EQ(atoi(proc_line(path, "Pid:")), peer.pid);
    }
    peer_end(&peer);
    FAILS(syscall(SYS_pidfd_send_signal, living, 0, NULL, 0), ESRCH);
    return guest_pass();
}
