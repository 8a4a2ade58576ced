// Feature: pending and queued signals
// Proves: blocked signals stay pending with their values, order, code and sender: standard ones
// once, real-time ones queued, directed at the process and at single threads.
#include "guest.h"

#define QUEUED 12
static sigset_t all;
static pid_t other;
static pthread_barrier_t sent, taken;

static void take(int signal, int code, int value, pid_t sender) {
    siginfo_t info;
    struct timespec none = {0};
    // libc's sigtimedwait would turn SI_TKILL into SI_USER.
    EQ(syscall(SYS_rt_sigtimedwait, &all, &info, &none, NSIG / 8), signal);
    EQ(info.si_signo, signal);
    EQ(info.si_code, code);
    EQ(info.si_pid, sender);
    EQ(info.si_uid, 0);
    if (code == SI_QUEUE) EQ(info.si_value.sival_int, value);
}
static void expect_none(void) { FAILS(sigtimedwait(&all, NULL, &(struct timespec){0}), EAGAIN); }

static void queue_to_thread(pid_t tid, int signal, int value) {
    siginfo_t info = {.si_signo = signal, .si_code = SI_QUEUE};
    info.si_pid = getpid();
    info.si_value.sival_int = value;
    SYS(syscall(SYS_rt_tgsigqueueinfo, getpid(), tid, signal, &info));
}

// Its own queue, apart from that of the process.
static void *worker(void *argument) {
    *(pid_t *)argument = gettid();
    pthread_barrier_wait(&taken);
    for (int step = 1; step <= g.steps; step++) {
        pthread_barrier_wait(&sent);
        for (int i = 0; i < QUEUED; i++) take(SIGRTMIN + 5, SI_QUEUE, step * 500 + i, getpid());
        pthread_barrier_wait(&taken);
    }
    return NULL;
}

static long send_from_outside(long step) {
    if (step == 0) return 0;
    SYS(kill(getppid(), SIGUSR1));
    SYS(kill(getppid(), SIGUSR1));
    for (int i = 0; i < 3; i++)
        SYS(sigqueue(getppid(), SIGRTMIN + 2, (union sigval){.sival_int = (int)step * 10 + i}));
    return 0;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct peer peer = peer_start(send_from_outside);
    sigfillset(&all);
    PTH(pthread_sigmask(SIG_BLOCK, &all, NULL));
    PTH(pthread_barrier_init(&sent, NULL, 2));
    PTH(pthread_barrier_init(&taken, NULL, 2));
    pthread_t thread = start(worker, &other);
    pthread_barrier_wait(&taken);
    STEPS {
        peer_ask(&peer, g.step);
        for (int i = 0; i < QUEUED; i++) queue_to_thread(other, SIGRTMIN + 5, g.step * 500 + i);
        for (int i = 0; i < 2; i++) queue_to_thread(gettid(), SIGRTMAX, g.step * 20 + i);
        SYS(syscall(SYS_tgkill, getpid(), gettid(), SIGHUP));
        nap();
        sigset_t pending;
        SYS(sigpending(&pending));
        const int want[] = {SIGUSR1, SIGRTMIN + 2, SIGRTMAX, SIGHUP};
        for (int i = 0; i < 4; i++) CHECK(sigismember(&pending, want[i]), "signal %d", want[i]);
        EQ(sigismember(&pending, SIGRTMIN + 5), 0);
        pthread_barrier_wait(&sent);
        pthread_barrier_wait(&taken);
        // A thread's own queue comes first, and in each the lowest number.
        take(SIGHUP, SI_TKILL, 0, getpid());
        for (int i = 0; i < 2; i++) take(SIGRTMAX, SI_QUEUE, g.step * 20 + i, getpid());
        take(SIGUSR1, SI_USER, 0, peer.pid);
        for (int i = 0; i < 3; i++) take(SIGRTMIN + 2, SI_QUEUE, g.step * 10 + i, peer.pid);
        expect_none();
    }
    join(thread);
    peer_end(&peer);
    siginfo_t died;
    EQ(sigtimedwait(&all, &died, &(struct timespec){1, 0}), SIGCHLD);
    EQ(died.si_pid, peer.pid);
    return guest_pass();
}
