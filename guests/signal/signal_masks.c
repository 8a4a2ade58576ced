// Feature: signal masks
// Proves: each of eight threads keeps its own mask of blocked signals, real-time ones included, and
// a blocked signal stays undelivered.
// Build: static too
#include "guest.h"

static _Atomic long delivered[8];
static __thread long self;
static void count(int signal) { (void)signal, delivered[self]++; }

static void *worker(void *argument) {
    self = (long)argument;
    sigset_t want, got;
    for (int step = 1; step <= g.steps; step++) {
        sigemptyset(&want);
        uint64_t state = seeded((uint64_t)(self * 1000 + step));
        // 32 and 33 belong to libc.
        for (int signal = 1; signal <= SIGRTMAX; signal++)
            if (mix(&state) % 2 && (signal < 32 || signal > 33) && signal != SIGKILL &&
                signal != SIGSTOP)
                sigaddset(&want, signal);
        sigaddset(&want, SIGUSR1);
        sigdelset(&want, SIGUSR2);
        PTH(pthread_sigmask(SIG_SETMASK, &want, NULL));
        long before = delivered[self];
        PTH(pthread_kill(pthread_self(), SIGUSR1));
        PTH(pthread_kill(pthread_self(), SIGUSR2));
        EQ(delivered[self], before + 1);
        nap();
        PTH(pthread_sigmask(SIG_SETMASK, NULL, &got));
        for (int signal = 1; signal <= SIGRTMAX; signal++)
            CHECK(sigismember(&got, signal) == sigismember(&want, signal), "signal %d", signal);
        EQ(delivered[self], before + 1);
        PTH(pthread_sigmask(SIG_UNBLOCK, &got, NULL));
        EQ(delivered[self], before + 2);
    }
    return NULL;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct sigaction action = {.sa_handler = count, .sa_flags = SA_RESTART};
    SYS(sigaction(SIGUSR1, &action, NULL));
    SYS(sigaction(SIGUSR2, &action, NULL));
    pthread_t threads[8];
    for (long i = 0; i < 8; i++) threads[i] = start(worker, (void *)i);
    STEPS nap();
    for (int i = 0; i < 8; i++) join(threads[i]);
    return guest_pass();
}
