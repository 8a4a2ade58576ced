// Feature: signal handlers
// Proves: handlers, their flags (SIGINFO, RESTART, NODEFER, RESETHAND, NOCLDWAIT) and masks, and
// ignored signals stay, are seen by sigaction and act accordingly.
// Build: static too
#include "guest.h"

static volatile sig_atomic_t plain_hits, info_hits, depth, deepest, blocked_inside;

static void plain(int signal) {
    sigset_t mask;
    sigprocmask(SIG_BLOCK, NULL, &mask);
    blocked_inside = sigismember(&mask, SIGTERM) && !sigismember(&mask, SIGWINCH);
    plain_hits += signal == SIGUSR1;
}
static void with_info(int signal, siginfo_t *info, void *context) {
    (void)context;
    if (info->si_signo == signal && info->si_code == SI_QUEUE && info->si_pid == getpid())
        info_hits += info->si_value.sival_int;
}
static void nested(int signal) {
    if (++depth > deepest) deepest = depth;
    if (depth < 3) raise(signal);
    depth--;
}

static const struct sigaction by_plain = {.sa_handler = plain}, by_nested = {.sa_handler = nested},
                              by_info = {.sa_sigaction = with_info},
                              by_sig_ign = {.sa_handler = SIG_IGN},
                              by_sig_dfl = {.sa_handler = SIG_DFL};
static struct sigaction actions[NSIG];
static void set(int signal, const struct sigaction *handler, int flags, int masked) {
    actions[signal] = *handler;
    actions[signal].sa_flags = flags;
    sigemptyset(&actions[signal].sa_mask);
    if (masked) sigaddset(&actions[signal].sa_mask, masked);
    SYS(sigaction(signal, &actions[signal], NULL));
}

static void check(int signal) {
    struct sigaction got;
    SYS(sigaction(signal, NULL, &got));
    CHECK(got.sa_handler == actions[signal].sa_handler, "handler of %d", signal);
    int flags = SA_SIGINFO | SA_RESTART | SA_NODEFER | (int)SA_RESETHAND | SA_NOCLDWAIT;
    EQ(got.sa_flags & flags, actions[signal].sa_flags & flags);
    for (int other = 1; other <= SIGRTMAX; other++)
        CHECK(sigismember(&got.sa_mask, other) == sigismember(&actions[signal].sa_mask, other),
              "mask of %d for %d", signal, other);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    set(SIGUSR1, &by_plain, SA_RESTART, SIGTERM);
    set(SIGRTMIN + 3, &by_info, SA_SIGINFO, SIGRTMAX);
    set(SIGHUP, &by_nested, SA_NODEFER, SIGURG);
    set(SIGUSR2, &by_plain, (int)SA_RESETHAND, SIGALRM);
    set(SIGINT, &by_sig_ign, 0, 0);
    set(SIGPIPE, &by_sig_ign, SA_RESTART, 0);
    set(SIGCHLD, &by_sig_dfl, SA_NOCLDWAIT, 0);
    int infos = 0;
    STEPS {
        nap();
        static const int kept[] = {SIGUSR1, SIGHUP, SIGUSR2, SIGINT, SIGPIPE, SIGCHLD, SIGTERM};
        for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) check(kept[i]);
        check(SIGRTMIN + 3);
        raise(SIGUSR1);
        EQ(plain_hits, g.step);
        EQ(blocked_inside, 1);
        infos += g.step;
        SYS(sigqueue(getpid(), SIGRTMIN + 3, (union sigval){.sival_int = g.step}));
        EQ(info_hits, infos);
        deepest = 0;
        raise(SIGHUP);
        EQ(deepest, 3);
        raise(SIGINT);
        raise(SIGUSR2);
        struct sigaction now;
        SYS(sigaction(SIGUSR2, NULL, &now));
        CHECK(now.sa_handler == SIG_DFL);
        SYS(sigaction(SIGUSR2, &actions[SIGUSR2], NULL));
        // With SA_NOCLDWAIT children leave no zombie.
        pid_t pid = (pid_t)SYS(fork());
        if (pid == 0) _exit(0);
        FAILS(waitpid(pid, NULL, 0), ECHILD);
    }
    return guest_pass();
}
