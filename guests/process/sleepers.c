// Feature: threads that sleep from checkpoint to checkpoint
// Proves: what others do to a sleeping thread stays, though it has executed nothing or only a
// handler since the last checkpoint: name, niceness, affinity, user, seccomp filters, a pending
// signal, timer slack.
#include "guest.h"
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>

enum { READ, EPOLL, POLL, FUTEX, KINDS };
static struct sleeper {
    pthread_t thread;
    _Atomic pid_t tid;
    int there[2], back[2];
    _Atomic uint32_t word;
} sleepers[KINDS];
static _Atomic int handled;

// What every sleeper has to find.
static struct {
    int step, nice, cpu, filters;
    uid_t user;
} want;

static void on_signal(int signal) {
    EQ(signal, SIGUSR2);
    SYS(prctl(PR_SET_TIMERSLACK, 1000000 + want.step, 0, 0, 0));
    handled++;
}

static void wait_for(int kind, int epoll) {
    struct sleeper *own = &sleepers[kind];
    struct epoll_event event;
    struct pollfd poll_in = {.fd = own->there[0], .events = POLLIN};
    switch (kind) {
    case EPOLL:
        while (epoll_wait(epoll, &event, 1, -1) != 1) EQ(errno, EINTR);
        break;
    case POLL:
        while (ppoll(&poll_in, 1, NULL, NULL) != 1) EQ(errno, EINTR);
        break;
    case FUTEX:
        while (own->word != (uint32_t)g.step) {
            uint32_t seen = own->word;
            if (seen == (uint32_t)g.step) break;
            syscall(SYS_futex, &own->word, FUTEX_WAIT_PRIVATE, seen, NULL);
        }
        break;
    default: break;
    }
    EQ(get_long(own->there[0]), want.step);
}

static void check_all(int kind) {
    char name[16], wanted[16];
    snprintf(wanted, sizeof wanted, "s%d-%d", kind, want.step);
    SYS(prctl(PR_GET_NAME, name));
    CHECK(!strcmp(name, wanted), "name %s, wanted %s", name, wanted);
    EQ(SYS(getpriority(PRIO_PROCESS, 0)), want.nice);
    EQ(syscall(SYS_geteuid), want.user);
    EQ(atoi(proc_line("/proc/thread-self/status", "Seccomp_filters:")), want.filters);
    EQ(SYS(prctl(PR_GET_TIMERSLACK)), 1000000 + want.step);
    cpu_set_t set;
    SYS(sched_getaffinity(0, sizeof set, &set));
    CHECK(CPU_COUNT(&set) == 1 && CPU_ISSET(want.cpu, &set), "affinity of kind %d", kind);
    sigset_t one;
    siginfo_t info;
    struct timespec now = {0};
    sigemptyset(&one);
    sigaddset(&one, SIGUSR1);
    EQ(SYS(sigtimedwait(&one, &info, &now)), SIGUSR1);
    EQ(info.si_value.sival_int, want.step);
    FAILS(sigtimedwait(&one, &info, &now), EAGAIN);
}

static void *sleeper(void *argument) {
    int kind = (int)(intptr_t)argument;
    struct sleeper *own = &sleepers[kind];
    int epoll = (int)SYS(epoll_create1(0));
    struct epoll_event event = {.events = EPOLLIN};
    SYS(epoll_ctl(epoll, EPOLL_CTL_ADD, own->there[0], &event));
    own->tid = gettid();
    for (int step = 1; step <= g.steps; step++) {
        wait_for(kind, epoll);
        check_all(kind);
        put_long(own->back[1], step);
    }
    return NULL;
}

// One more filter, which lets everything pass, on all threads.
static void confine(void) {
    struct sock_filter code[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog program = {1, code};
    EQ(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program), 0);
    want.filters++;
}

static int nth_cpu(int nth) {
    cpu_set_t all;
    SYS(sched_getaffinity(0, sizeof all, &all));
    nth %= CPU_COUNT(&all);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &all) || nth-- > 0) cpu++;
    return cpu;
}

static void change(int kind) {
    struct sleeper *one = &sleepers[kind];
    char name[16];
    snprintf(name, sizeof name, "s%d-%d", kind, want.step);
    PTH(pthread_setname_np(one->thread, name));
    SYS(setpriority(PRIO_PROCESS, (id_t)one->tid, want.nice));
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(want.cpu, &set);
    SYS(sched_setaffinity(one->tid, sizeof set, &set));
    PTH(pthread_sigqueue(one->thread, SIGUSR1, (union sigval){.sival_int = want.step}));
    int before = handled;
    PTH(pthread_kill(one->thread, SIGUSR2));
    while (handled == before) nap_ms(1);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    SYS(sigaction(SIGUSR2, &action, NULL));
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    PTH(pthread_sigmask(SIG_BLOCK, &set, NULL));
    SYS(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    for (int kind = 0; kind < KINDS; kind++) {
        SYS(pipe(sleepers[kind].there));
        SYS(pipe(sleepers[kind].back));
        sleepers[kind].thread = start(sleeper, (void *)(intptr_t)kind);
    }
    for (int kind = 0; kind < KINDS; kind++)
        while (!sleepers[kind].tid) nap_ms(1);
    STEPS {
        nap_ms(g.step_ms / 2 + 1);
        SYS(seteuid(0));
        want.step = g.step;
        want.nice = g.step / 16;
        want.cpu = nth_cpu(g.step);
        want.user = g.step % 3 ? (uid_t)(1000 + g.step) : 0;
        for (int kind = 0; kind < KINDS; kind++) change(kind);
        if (g.step % 16 == 1) confine();
        SYS(seteuid(want.user));
        nap();
        for (int kind = 0; kind < KINDS; kind++) {
            sleepers[kind].word = (uint32_t)g.step;
            SYS(syscall(SYS_futex, &sleepers[kind].word, FUTEX_WAKE_PRIVATE, 1));
            put_long(sleepers[kind].there[1], g.step);
            EQ(get_long(sleepers[kind].back[0]), g.step);
        }
    }
    for (int kind = 0; kind < KINDS; kind++) join(sleepers[kind].thread);
    return guest_pass();
}
