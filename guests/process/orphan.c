// Feature: orphans
// Proves: a daemonised grandchild keeps init as its parent and its own session, one under a
// subreaper is adopted by that, and both go on working.
#include "guest.h"
#include <sys/prctl.h>

struct daemon {
    pid_t pid;
    int to, from;
};

// Forks twice; the grandchild answers each number with its parent's pid.
static struct daemon daemonise(void) {
    int there[2], back[2], status;
    SYS(pipe(there));
    SYS(pipe(back));
    pid_t middle = (pid_t)SYS(fork());
    if (middle == 0) {
        middle = (pid_t)SYS(setsid());
        pid_t pid = (pid_t)SYS(fork());
        if (pid != 0) _exit(0);
        put_long(back[1], getpid());
        for (;;) {
            if (get_long(there[0]) == PEER_END) _exit(9);
            EQ(getsid(0), middle);
            put_long(back[1], getppid());
        }
    }
    SYS(waitpid(middle, &status, 0));
    return (struct daemon){(pid_t)get_long(back[0]), there[1], back[0]};
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct daemon lost = daemonise();
    SYS(prctl(PR_SET_CHILD_SUBREAPER, 1));
    struct daemon kept = daemonise();
    STEPS {
        put_long(lost.to, g.step);
        EQ(get_long(lost.from), 1);
        put_long(kept.to, g.step);
        EQ(get_long(kept.from), getpid());
        FAILS(waitpid(lost.pid, NULL, WNOHANG), ECHILD);
        EQ(waitpid(kept.pid, NULL, WNOHANG), 0);
        nap();
    }
    put_long(lost.to, PEER_END);
    put_long(kept.to, PEER_END);
    reap(kept.pid, 9);
    return guest_pass();
}
