// Feature: POSIX timers
// Proves: timers that notify by process signal, by thread signal and not at all keep their ids,
// clocks, values, intervals and targets, and a blocked periodic one counts its overruns (those
// before a checkpoint that finds its signal waiting are not known; see LIMITS.md).
#include "guest.h"

#define PERIOD_MS 2
static _Atomic long process_ticks, thread_ticks, strays;
static _Atomic int ticked_on;

static void on_tick(int signal, siginfo_t *info, void *context) {
    (void)context;
    if (info->si_code != SI_TIMER) strays++;
    else if (signal == SIGRTMIN + 1 && info->si_value.sival_int == 1234) process_ticks++;
    else if (signal == SIGRTMIN + 2 && info->si_value.sival_int == 5678) thread_ticks++;
    else strays++;
    if (signal == SIGRTMIN + 2) ticked_on = gettid();
}

static void *target(void *argument) {
    *(_Atomic int *)argument = gettid();
    for (;;) pause();
    return NULL;
}

static timer_t make(clockid_t clock, int notify, int signal, int value, int tid) {
    struct sigevent event = {.sigev_notify = notify, .sigev_signo = signal};
    event.sigev_value.sival_int = value;
    event._sigev_un._tid = tid;
    int id = -1;
    SYS(syscall(SYS_timer_create, clock, &event, &id));
    return (timer_t)(long)id;
}
static void arm(timer_t timer, int flags, struct timespec value, long interval_ms) {
    struct itimerspec times = {.it_value = value, .it_interval = after_ms(interval_ms)};
    SYS(syscall(SYS_timer_settime, timer, flags, &times, NULL));
}
static struct itimerspec left(timer_t timer) {
    struct itimerspec times;
    SYS(syscall(SYS_timer_gettime, timer, &times));
    return times;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct sigaction action = {.sa_sigaction = on_tick, .sa_flags = SA_SIGINFO | SA_RESTART};
    SYS(sigaction(SIGRTMIN + 1, &action, NULL));
    SYS(sigaction(SIGRTMIN + 2, &action, NULL));
    sigset_t blocked;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGRTMIN + 3);
    SYS(sigprocmask(SIG_BLOCK, &blocked, NULL));
    _Atomic int tid = 0;
    start(target, &tid);
    while (tid == 0) sched_yield();
    // One is deleted again, so that ids have a gap.
    timer_t gap = make(CLOCK_MONOTONIC, SIGEV_NONE, 0, 0, 0);
    timer_t process = make(CLOCK_MONOTONIC, SIGEV_SIGNAL, SIGRTMIN + 1, 1234, 0);
    timer_t thread = make(CLOCK_REALTIME, SIGEV_THREAD_ID, SIGRTMIN + 2, 5678, tid);
    timer_t silent = make(CLOCK_BOOTTIME, SIGEV_NONE, 0, 0, 0);
    timer_t overrun = make(CLOCK_MONOTONIC, SIGEV_SIGNAL, SIGRTMIN + 3, 42, 0);
    timer_t idle = make(CLOCK_MONOTONIC, SIGEV_SIGNAL, SIGRTMIN + 1, 1, 0);
    timer_t absolute = make(CLOCK_MONOTONIC, SIGEV_SIGNAL, SIGRTMIN + 1, 2, 0);
    SYS(syscall(SYS_timer_delete, gap));
    int64_t began = clock_ns(CLOCK_MONOTONIC);
    arm(process, 0, after_ms(PERIOD_MS), PERIOD_MS);
    arm(thread, 0, after_ms(PERIOD_MS), PERIOD_MS);
    arm(silent, 0, after_ms(5000000), 7000);
    arm(overrun, 0, after_ms(PERIOD_MS), PERIOD_MS);
    arm(absolute, TIMER_ABSTIME, after_ms(mono_ms() + 9000000), 0);
    int overran = 0;
    STEPS {
        long before[2] = {process_ticks, thread_ticks};
        nap();
        while (process_ticks == before[0] || thread_ticks == before[1]) nap_ms(1);
        EQ(strays, 0);
        EQ(ticked_on, tid);
        int64_t elapsed_ms = (clock_ns(CLOCK_MONOTONIC) - began) / 1000000;
        CHECK(process_ticks <= elapsed_ms / PERIOD_MS + 1);
        EQ(left(process).it_interval.tv_nsec, PERIOD_MS * 1000000);
        EQ(left(silent).it_interval.tv_sec, 7);
        long rest_ms = left(silent).it_value.tv_sec * 1000;
        CHECK(rest_ms > 4990000 - elapsed_ms - LATE_MS_MAX && rest_ms <= 5000000);
        rest_ms = left(absolute).it_value.tv_sec * 1000;
        CHECK(rest_ms > 8990000 - elapsed_ms - LATE_MS_MAX && rest_ms <= 9000000);
        EQ(left(idle).it_value.tv_sec + left(idle).it_value.tv_nsec, 0);
        FAILS(syscall(SYS_timer_settime, gap, 0, &(struct itimerspec){0}, NULL), EINVAL);
        siginfo_t info;
        // Its own handlers interrupt this wait.
        int got;
        do got = sigtimedwait(&blocked, &info, &(struct timespec){LATE_MS_MAX / 1000, 0});
        while (got < 0 && errno == EINTR);
        EQ(got, SIGRTMIN + 3);
        EQ(info.si_value.sival_int, 42);
        CHECK(info.si_overrun >= 0 && info.si_overrun <= elapsed_ms / PERIOD_MS);
        overran += info.si_overrun > 0;
    }
    if (g.step_ms >= 10 * PERIOD_MS) CHECK(overran > g.steps / 2);
    return guest_pass();
}
