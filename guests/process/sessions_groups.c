// Feature: sessions and process groups
// Proves: session and group ids of a session leader, a group leader and a member stay, also when
// the session's leader has died; kill(-group) reaches exactly the group.
#include "guest.h"

static int64_t hits;
static void count(int signal) { hits += signal == SIGUSR1; }

static long ids(long question) {
    if (question == -1) return (long)SYS(setsid());
    if (question == -2) return hits;
    if (question == -3) return getsid(0);
    // By its parent this would be refused to one that has called execve, as after a failover.
    if (question < -3) return (long)SYS(setpgid(0, (pid_t)-question));
    return getpgrp();
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    signal(SIGUSR1, count);
    struct peer leader = peer_start(ids), member = peer_start(ids), loner = peer_start(ids);
    CHECK(loner.pid > 3);
    EQ(peer_ask(&loner, -loner.pid), 0);
    EQ(peer_ask(&member, -loner.pid), 0);
    EQ(peer_ask(&leader, -1), leader.pid);
    pid_t session = getsid(0), group = getpgrp(), pair[2];
    // A process whose session leader is gone keeps that session and group.
    int from[2];
    SYS(pipe(from));
    pid_t gone = (pid_t)SYS(fork());
    if (gone == 0) {
        SYS(setsid());
        pid_t heir = (pid_t)SYS(fork());
        if (heir == 0)
            for (;;) pause();
        put_long(from[1], heir);
        _exit(0);
    }
    pid_t heir = (pid_t)get_long(from[0]);
    reap(gone, 0);
    STEPS {
        EQ(getsid(0), session);
        EQ(getpgrp(), group);
        EQ(getsid(leader.pid), leader.pid);
        EQ(getpgid(leader.pid), leader.pid);
        EQ(peer_ask(&leader, -3), leader.pid);
        EQ(peer_ask(&loner, 1), loner.pid);
        EQ(peer_ask(&member, 1), loner.pid);
        EQ(peer_ask(&member, -3), session);
        EQ(getsid(heir), gone);
        EQ(getpgid(heir), gone);
        SYS(kill(-loner.pid, SIGUSR1));
        pair[0] = (pid_t)peer_ask(&loner, -2);
        pair[1] = (pid_t)peer_ask(&member, -2);
        EQ(pair[0], g.step);
        EQ(pair[1], g.step);
        EQ(peer_ask(&leader, -2) + hits, 0);
        FAILS(setpgid(leader.pid, group), EPERM);
        nap();
    }
    SYS(kill(-gone, SIGKILL));
    peer_end(&leader);
    peer_end(&member);
    peer_end(&loner);
    return guest_pass();
}
