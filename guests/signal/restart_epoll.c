// Feature: interrupted epoll_wait
// Proves: epoll_wait, which the kernel ends with EINTR when a tracer stops the thread, still waits
// its whole time, or for ever until its event comes; epoll_pwait and epoll_pwait2 too.
#include "restart.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>

static int quiet, busy, ends[2];
static _Atomic long woken;

static void by_epoll(long ms) {
    struct epoll_event event;
    EQ(SYS(epoll_wait(quiet, &event, 1, (int)ms)), 0);
}
static void by_epoll_pwait(long ms) {
    struct epoll_event event;
    sigset_t mask;
    sigfillset(&mask);
    EQ(SYS(epoll_pwait(quiet, &event, 1, (int)ms, &mask)), 0);
    PTH(pthread_sigmask(SIG_SETMASK, NULL, &mask));
    EQ(sigismember(&mask, SIGUSR1), 0);
}
static void by_epoll_pwait2(long ms) {
    struct epoll_event event;
    struct timespec time = after_ms(ms);
    EQ(SYS(epoll_pwait2(quiet, &event, 1, &time, NULL)), 0);
}

// Answers numbers until it gets PEER_END.
static void *wait_for_ever(void *argument) {
    for (;;) {
        struct epoll_event event = {0};
        EQ(SYS(epoll_wait(busy, &event, 1, -1)), 1);
        EQ(event.data.u64, 0x1122334455667788);
        if (get_long(ends[0]) == PEER_END) return argument;
        woken++;
    }
}
// Wakes that thread once per round of its own; nothing else may wake it.
static void by_waking(long ms) {
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&one_at_a_time);
    long before = woken;
    nap_ms(ms);
    EQ(woken, before);
    put_long(ends[1], ms);
    while (woken == before) nap_ms(1);
    EQ(woken, before + 1);
    pthread_mutex_unlock(&one_at_a_time);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    quiet = (int)SYS(epoll_create1(0));
    busy = (int)SYS(epoll_create1(0));
    SYS(pipe(ends));
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 0x1122334455667788};
    SYS(epoll_ctl(busy, EPOLL_CTL_ADD, ends[0], &event));
    SYS(epoll_ctl(quiet, EPOLL_CTL_ADD, (int)SYS(eventfd(0, 0)), &event));
    pthread_t thread = start(wait_for_ever, NULL);
    static const struct blocker blockers[] = {
        {"epoll_wait", by_epoll, false},
        {"epoll_pwait", by_epoll_pwait, false},
        {"epoll_pwait2", by_epoll_pwait2, false},
        {"epoll_wait for ever", by_waking, false},
    };
    RUN_BLOCKERS(blockers);
    put_long(ends[1], PEER_END);
    join(thread);
    return guest_pass();
}
