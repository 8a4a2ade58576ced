// Feature: exec of itself
// Proves: a program that replaces itself every few rounds keeps its pid, open descriptors, pipe
// contents, signal mask and ignored signals, and loses handlers and close-on-exec descriptors.
#include "guest.h"

#define PIPE_READ 20
#define PIPE_WRITE 21
#define CLOSED 22

static void again(char **argv, int step, pid_t pid) {
    char numbers[2][16];
    snprintf(numbers[0], sizeof numbers[0], "%d", step);
    snprintf(numbers[1], sizeof numbers[1], "%d", pid);
    char *arguments[] = {argv[0], argv[1], numbers[0], numbers[1], NULL};
    execv("/proc/self/exe", arguments);
    CHECK(false, "exec");
}

static void prepare(void) {
    int ends[2];
    SYS(pipe(ends));
    SYS(dup2(ends[0], PIPE_READ));
    SYS(dup2(ends[1], PIPE_WRITE));
    put(PIPE_WRITE, "in the pipe", 12);
}

static void check_after_exec(pid_t pid) {
    EQ(getpid(), pid);
    FAILS(fcntl(CLOSED, F_GETFD), EBADF);
    char text[12];
    get(PIPE_READ, text, 12);
    CHECK(!strcmp(text, "in the pipe"), "got %s", text);
    put(PIPE_WRITE, text, 12);
    sigset_t mask;
    SYS(sigprocmask(SIG_BLOCK, NULL, &mask));
    EQ(sigismember(&mask, SIGUSR1), 1);
    struct sigaction action;
    SYS(sigaction(SIGUSR2, NULL, &action));
    CHECK(action.sa_handler == SIG_IGN);
    SYS(sigaction(SIGHUP, NULL, &action));
    CHECK(action.sa_handler == SIG_DFL);
}

int main(int argc, char **argv) {
    if (argc < 4) {
        guest_begin(argc, argv);
        prepare();
    } else {
        guest_resume(argv[1], 0);
        g.step = atoi(argv[2]);
        check_after_exec(atoi(argv[3]));
    }
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR1);
    SYS(sigprocmask(SIG_SETMASK, &mask, NULL));
    signal(SIGUSR2, SIG_IGN);
    signal(SIGHUP, exit);
    SYS(dup3(0, CLOSED, O_CLOEXEC));
    if (g.step == 0) g.step = 1;
    for (int round = 0; g.step <= g.steps; round++) {
        if (round == 3) again(argv, g.step, getpid());
        nap();
        step_done();
    }
    return guest_pass();
}
