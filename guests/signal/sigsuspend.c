// Feature: temporary signal masks
// Proves: threads waiting in sigsuspend, ppoll and pselect under a temporary mask wake only for the
// signal it lets in, with EINTR, and get their own mask back.
#include "guest.h"
#include <sys/select.h>

enum { SUSPEND, PPOLL, PSELECT, KINDS };
static _Atomic long woken[KINDS], handled[KINDS];
static _Atomic bool stop;
static __thread int kind;
static pthread_t threads[KINDS];
static void count(int signal) { handled[kind] += signal == SIGUSR1; }

static void wait_for_it(const sigset_t *mask) {
    struct pollfd none;
    if (kind == SUSPEND) FAILS(sigsuspend(mask), EINTR);
    if (kind == PPOLL) FAILS(ppoll(&none, 0, NULL, mask), EINTR);
    if (kind == PSELECT) FAILS(pselect(0, NULL, NULL, NULL, NULL, mask), EINTR);
}

static void *worker(void *argument) {
    kind = (int)(long)argument;
    sigset_t inside, got;
    sigfillset(&inside);
    sigdelset(&inside, SIGUSR1);
    while (!stop) {
        wait_for_it(&inside);
        PTH(pthread_sigmask(SIG_SETMASK, NULL, &got));
        EQ(sigismember(&got, SIGUSR1), 1);
        EQ(sigismember(&got, SIGUSR2), 1);
        EQ(sigismember(&got, SIGTERM), 0);
        EQ(handled[kind], woken[kind] + 1);
        woken[kind]++;
    }
    return NULL;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct sigaction action = {.sa_handler = count, .sa_flags = SA_RESTART};
    SYS(sigaction(SIGUSR1, &action, NULL));
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR1);
    sigaddset(&mask, SIGUSR2);
    PTH(pthread_sigmask(SIG_BLOCK, &mask, NULL));
    for (long i = 0; i < KINDS; i++) threads[i] = start(worker, (void *)i);
    STEPS {
        nap();
        for (int i = 0; i < KINDS; i++) EQ(woken[i], g.step - 1);
        stop = g.step == g.steps;
        for (int i = 0; i < KINDS; i++) PTH(pthread_kill(threads[i], SIGUSR1));
        for (int i = 0; i < KINDS; i++)
            while (woken[i] < g.step) nap_ms(1);
    }
    for (int i = 0; i < KINDS; i++) join(threads[i]);
    return guest_pass();
}
