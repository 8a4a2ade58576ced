// Feature: a thread group whose leader has exited
// Proves: the other threads go on after the main thread ended with pthread_exit, with the same pid.
// Unsupported: capture-restore: the leader has exited, and what is asked by way of it has no answer
// Unsupported: increments: the leader has exited, and what is asked by way of it has no answer
// Unsupported: failover: the leader has exited, and what is asked by way of it has no answer
// Unsupported: switchover: the leader has exited, and what is asked by way of it has no answer
#include "guest.h"

static pid_t pid;

static void *rest(void *argument) {
    join(*(pthread_t *)argument);
    STEPS {
        EQ(getpid(), pid);
        CHECK(gettid() != pid);
        CHECK(strchr(proc_line("/proc/self/stat", ""), 'Z'), "leader is not a zombie");
        nap();
    }
    exit(guest_pass());
}

int main(int argc, char **argv) {
    static pthread_t leader;
    guest_begin(argc, argv);
    pid = getpid();
    leader = pthread_self();
    start(rest, &leader);
    pthread_exit(NULL);
}
