// Refused: ptrace
// Feature: a program that traces another with ptrace
// Proves: it is refused or, under Hotspare, gets EPERM for a child that is traced already; either
// way the program goes on.
#include "refused.h"
#include <sys/ptrace.h>

static pid_t child;
static bool traced;

static void appear(void) {
    child = (pid_t)SYS(fork());
    if (child == 0)
        for (;;) pause();
    traced = ptrace(PTRACE_SEIZE, child, NULL, NULL) == 0;
    if (!traced) EQ(errno, EPERM);
}
static void use(void) {
    if (!traced) return;
    SYS(ptrace(PTRACE_INTERRUPT, child, NULL, NULL));
    int status;
    EQ(SYS(waitpid(child, &status, __WALL)), child);
    CHECK(WIFSTOPPED(status));
    SYS(ptrace(PTRACE_CONT, child, NULL, NULL));
}
int main(int argc, char **argv) { return run_refused(argc, argv, appear, use); }
