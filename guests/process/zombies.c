// Feature: zombies
// Proves: dead children that nobody has waited for keep their exit status or killing signal.
#include "guest.h"

struct death {
    pid_t pid;
    int code, status;
};

static void check(const struct death *death, int options) {
    siginfo_t info = {0};
    SYS(waitid(P_PID, (id_t)death->pid, &info, WEXITED | options));
    EQ(info.si_pid, death->pid);
    EQ(info.si_code, death->code);
    EQ(info.si_status, death->status);
    EQ(info.si_signo, SIGCHLD);
}

static pid_t die(int status, int signal) {
    pid_t pid = (pid_t)SYS(fork());
    if (pid != 0) return pid;
    if (signal) raise(signal);
    _exit(status);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct death deaths[] = {
        {die(0, 0), CLD_EXITED, 0},
        {die(42, 0), CLD_EXITED, 42},
        {die(255, 0), CLD_EXITED, 255},
        {die(0, SIGKILL), CLD_KILLED, SIGKILL},
        {die(0, SIGUSR2), CLD_KILLED, SIGUSR2},
    };
    struct death fresh = {die(0, 0), CLD_EXITED, 0};
    STEPS {
        for (size_t i = 0; i < sizeof deaths / sizeof *deaths; i++) {
            check(&deaths[i], WNOWAIT);
            char path[64];
            snprintf(path, sizeof path, "/proc/%d/stat", deaths[i].pid);
            const char *stat = strrchr(proc_line(path, ""), ')');
            CHECK(stat && stat[2] == 'Z', "state %s", stat);
            SYS(kill(deaths[i].pid, 0));
        }
        nap();
        check(&fresh, 0);
        fresh = (struct death){die(g.step % 200, 0), CLD_EXITED, g.step % 200};
        check(&fresh, WNOWAIT);
    }
    for (size_t i = 0; i < sizeof deaths / sizeof *deaths; i++) check(&deaths[i], 0);
    check(&fresh, 0);
    FAILS(wait(NULL), ECHILD);
    return guest_pass();
}
