// Feature: signals that come while a wait is interrupted
// Proves: every signal that a thread lets in only while it waits in epoll_pwait, epoll_pwait2 or
// ppoll ends that wait with EINTR, also when it comes during a stop, and signals that the program
// ignores end no wait.
#include "guest.h"
#include <sys/epoll.h>

enum { PWAIT, PWAIT2, PPOLL, KINDS };
static _Atomic long handled[KINDS], served[KINDS];
static _Atomic bool ending;
static _Thread_local int mine = -1;
static int quiet;
static pthread_t waiters[KINDS], calm;

static void on_signal(int signal) {
    EQ(signal, SIGUSR1);
    handled[mine]++;
}

static int wait_once(const sigset_t *open) {
    struct epoll_event event;
    struct timespec minute = {.tv_sec = 60};
    switch (mine) {
    case PWAIT: return epoll_pwait(quiet, &event, 1, -1, open);
    case PWAIT2: return epoll_pwait2(quiet, &event, 1, &minute, open);
    default: return ppoll(NULL, 0, &minute, open);
    }
}

static void *wait_for_signals(void *argument) {
    mine = (int)(intptr_t)argument;
    sigset_t open;
    sigfillset(&open);
    sigdelset(&open, SIGUSR1);
    while (!ending) {
        long before = handled[mine];
        FAILS(wait_once(&open), EINTR);
        EQ(handled[mine], before + 1);
        served[mine]++;
    }
    return NULL;
}

// Takes no notice of signals that are ignored, by default or on purpose.
static void *wait_calmly(void *argument) {
    while (!ending) {
        struct epoll_event event;
        int64_t before = clock_ns(CLOCK_MONOTONIC);
        EQ(SYS(epoll_wait(quiet, &event, 1, 30)), 0);
        CHECK(clock_ns(CLOCK_MONOTONIC) - before >= 30000000);
    }
    return argument;
}

static void serve(int kind) {
    long before = served[kind];
    PTH(pthread_kill(waiters[kind], SIGUSR1));
    int64_t deadline = clock_ns(CLOCK_MONOTONIC) + LATE_MS_MAX * 1000000ll;
    while (served[kind] == before) {
        CHECK(clock_ns(CLOCK_MONOTONIC) < deadline, "kind %d: handled %ld, served %ld", kind,
              handled[kind], served[kind]);
        // Yielding instead would take a whole processor from the guests beside this one.
        usleep(20);
    }
    EQ(served[kind], before + 1);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct sigaction action = {.sa_handler = on_signal};
    SYS(sigaction(SIGUSR1, &action, NULL));
    action.sa_handler = SIG_IGN;
    SYS(sigaction(SIGUSR2, &action, NULL));
    quiet = (int)SYS(epoll_create1(0));
    calm = start(wait_calmly, NULL);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    PTH(pthread_sigmask(SIG_BLOCK, &set, NULL));
    for (int kind = 0; kind < KINDS; kind++)
        waiters[kind] = start(wait_for_signals, (void *)(intptr_t)kind);
    STEPS {
        int64_t end = clock_ns(CLOCK_MONOTONIC) + g.step_ms * 1000000ll;
        do {
            for (int kind = 0; kind < KINDS; kind++) serve(kind);
            PTH(pthread_kill(calm, SIGUSR2));
            PTH(pthread_kill(calm, SIGWINCH));
        } while (clock_ns(CLOCK_MONOTONIC) < end);
    }
    ending = true;
    for (int kind = 0; kind < KINDS; kind++) serve(kind);
    for (int kind = 0; kind < KINDS; kind++) join(waiters[kind]);
    join(calm);
    return guest_pass();
}
