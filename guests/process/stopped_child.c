// Feature: stopped processes
// Proves: a child stopped by SIGSTOP stays stopped, does no work, keeps its unread stop report, and
// goes on after SIGCONT.
// Unsupported: capture-restore: stopped by job control before the first checkpoint
// Unsupported: increments: stopped by job control before the first checkpoint
// Unsupported: failover: stopped by job control before the first checkpoint
// Unsupported: switchover: stopped by job control before the first checkpoint
#include "guest.h"

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    _Atomic long *work = map_anon(PAGE, PROT_READ | PROT_WRITE, MAP_SHARED);
    pid_t child = (pid_t)SYS(fork());
    if (child == 0)
        for (;; usleep(500)) ++*work;
    STEPS {
        siginfo_t info = {0};
        SYS(kill(child, SIGSTOP));
        SYS(waitid(P_PID, (id_t)child, &info, WSTOPPED | WNOWAIT));
        EQ(info.si_status, SIGSTOP);
        long before = *work;
        nap();
        EQ(*work, before);
        info = (siginfo_t){0};
        SYS(waitid(P_PID, (id_t)child, &info, WSTOPPED | WNOHANG));
        EQ(info.si_pid, child);
        EQ(info.si_code, CLD_STOPPED);
        SYS(kill(child, SIGCONT));
        SYS(waitid(P_PID, (id_t)child, &info, WCONTINUED));
        EQ(info.si_code, CLD_CONTINUED);
        while (*work == before) sched_yield();
    }
    SYS(kill(child, SIGKILL));
    SYS(waitpid(child, NULL, 0));
    return guest_pass();
}
