// Feature: a storm of short-lived children
// Proves: thirty children a round, some with children of their own, each report the right status
// once, by wait and by SIGCHLD.
#include "guest.h"

#define CHILDREN 30
static _Atomic long reported;
static void on_child(int signal) { reported += signal == SIGCHLD; }

static int work(int number) {
    if (number % 5 == 0) {
        pid_t pid = (pid_t)SYS(fork());
        if (pid == 0) _exit(number);
        reap(pid, number);
    }
    if (number % 3 == 0) nap_ms(1);
    return number;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    SYS(sigaction(SIGCHLD, &(struct sigaction){.sa_handler = on_child, .sa_flags = SA_RESTART}, 0));
    STEPS {
        pid_t pids[CHILDREN];
        bool seen[CHILDREN] = {0};
        reported = 0;
        for (int i = 0; i < CHILDREN; i++)
            if ((pids[i] = (pid_t)SYS(fork())) == 0) _exit(work(i));
        nap_ms(g.step_ms / 2);
        for (int left = CHILDREN; left > 0; left--) {
            int status, who;
            pid_t pid = (pid_t)SYS(wait(&status));
            for (who = 0; who < CHILDREN && pids[who] != pid; who++) continue;
            CHECK(who < CHILDREN && !seen[who], "pid %d", pid);
            seen[who] = true;
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == who, "child %d: %#x", who, status);
        }
        FAILS(wait(NULL), ECHILD);
        CHECK(reported > 0 && reported <= CHILDREN, "%ld reports", reported);
        nap_ms(g.step_ms / 2);
    }
    return guest_pass();
}
