// Feature: thread names and other prctl state
// Proves: per thread name and timer slack, and per process parent-death signal, dumpable,
// subreaper and huge-page settings stay, and the personality too.
#include "guest.h"
#include <sys/personality.h>
#include <sys/prctl.h>

#define THREADS 3

static void *worker(void *argument) {
    char want[16], got[16];
    snprintf(want, sizeof want, "a name/%ld <>", (long)argument);
    SYS(prctl(PR_SET_NAME, want));
    SYS(prctl(PR_SET_TIMERSLACK, 60000 + (long)argument));
    for (int step = 1; step <= g.steps; step++) {
        SYS(prctl(PR_GET_NAME, got));
        CHECK(!strcmp(got, want), "expected %s, got %s", want, got);
        EQ(prctl(PR_GET_TIMERSLACK), 60000 + (long)argument);
        nap();
        snprintf(want, sizeof want, "step %d/%d", step % 1000, (int)(long)argument % 10);
        SYS(prctl(PR_SET_NAME, want));
    }
    return NULL;
}

static long child(long step) {
    if (step == 0) {
        SYS(prctl(PR_SET_PDEATHSIG, SIGUSR2));
        SYS(prctl(PR_SET_DUMPABLE, 0));
        SYS(prctl(PR_SET_CHILD_SUBREAPER, 1));
        SYS(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0));
        SYS(personality(ADDR_NO_RANDOMIZE));
        return 0;
    }
    int signal = 0, subreaper = 0;
    SYS(prctl(PR_GET_PDEATHSIG, &signal));
    SYS(prctl(PR_GET_CHILD_SUBREAPER, &subreaper));
    EQ(signal, SIGUSR2);
    EQ(subreaper, 1);
    EQ(prctl(PR_GET_DUMPABLE), 0);
    EQ(prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0), 1);
    EQ(personality(0xffffffff), ADDR_NO_RANDOMIZE);
    return 0;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++) threads[i] = start(worker, (void *)i);
    struct peer peer = peer_start(child);
    peer_ask(&peer, 0);
    SYS(prctl(PR_SET_NAME, "the main thread"));
    STEPS {
        char name[16];
        SYS(prctl(PR_GET_NAME, name));
        CHECK(!strcmp(name, "the main thread"), "got %s", name);
        EQ(prctl(PR_GET_DUMPABLE), 1);
        peer_ask(&peer, g.step);
        nap();
    }
    peer_end(&peer);
    for (int i = 0; i < THREADS; i++) join(threads[i]);
    return guest_pass();
}
