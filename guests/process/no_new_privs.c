// Feature: no_new_privs
// Proves: the bit is kept by the thread that set it, inherited by its children, and not spread to
// the thread that did not.
#include "guest.h"
#include <sys/prctl.h>

static pthread_barrier_t round_begins, round_ends;

static void *bound(void *argument) {
    SYS(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    for (int step = 1; step <= g.steps; step++) {
        pthread_barrier_wait(&round_begins);
        EQ(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 1);
        pid_t pid = (pid_t)SYS(fork());
        if (pid == 0) _exit(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1 ? 3 : 4);
        reap(pid, 3);
        pthread_barrier_wait(&round_ends);
    }
    return argument;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    long outer = SYS(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0));
    PTH(pthread_barrier_init(&round_begins, NULL, 2));
    PTH(pthread_barrier_init(&round_ends, NULL, 2));
    pthread_t thread = start(bound, NULL);
    STEPS {
        pthread_barrier_wait(&round_begins);
        EQ(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), outer);
        nap();
        pthread_barrier_wait(&round_ends);
    }
    join(thread);
    return guest_pass();
}
