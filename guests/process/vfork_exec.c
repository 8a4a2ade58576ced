// Feature: vfork and exec all the time
// Proves: four threads that start children with vfork and exec without a pause get every exit
// status, argument and environment string right.
#include "guest.h"

extern char **environ;
static _Atomic bool stop;
static _Atomic long runs;

static void run(const char *program, long number) {
    char text[32], expected[48], name[] = "CHILD_NUMBER";
    snprintf(text, sizeof text, "%ld", number);
    snprintf(expected, sizeof expected, "%s=%s", name, text);
    char *arguments[] = {(char *)program, "--child", text, NULL};
    char *environment[] = {expected, NULL};
    pid_t pid = vfork();
    if (pid == 0) {
        execve("/proc/self/exe", arguments, environment);
        _exit(111);
    }
    SYS(pid);
    reap(pid, (int)(number % 100));
    runs++;
}

static const char *program;
static void *runner(void *argument) {
    for (long number = (long)argument; !stop; number += 4) run(program, number);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "--child")) {
        const char *number = getenv("CHILD_NUMBER");
        return number && !strcmp(number, argv[2]) ? atoi(number) % 100 : 112;
    }
    guest_begin(argc, argv);
    program = argv[0];
    pthread_t threads[4];
    for (long i = 0; i < 4; i++) threads[i] = start(runner, (void *)i);
    STEPS {
        long before = runs;
        nap();
        while (runs < before + 4) sched_yield();
    }
    stop = true;
    for (int i = 0; i < 4; i++) join(threads[i]);
    FAILS(wait(NULL), ECHILD);
    return guest_pass();
}
