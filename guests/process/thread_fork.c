// Feature: fork in a threaded program
// Proves: children forked by one thread while others run have one thread, the parent's memory and
// atfork handlers, and threads of their own.
#include "guest.h"

static _Atomic long spins;
static _Atomic bool stop;
static long prepared, in_parent, in_child;
static void prepare(void) { prepared++; }
static void parent(void) { in_parent++; }
static void child(void) { in_child++; }

static void *spin(void *argument) {
    while (!stop) {
        spins++;
        nap_ms(1);
    }
    return argument;
}
static void *plus_one(void *argument) { return (void *)((long)argument + 1); }

static void *forker(void *argument) {
    long step = (long)argument;
    pid_t pid = (pid_t)SYS(fork());
    if (pid == 0) {
        EQ(atoi(proc_line("/proc/self/status", "Threads:")), 1);
        EQ(in_child, 1);
        EQ(gettid(), getpid());
        void *result;
        PTH(pthread_join(start(plus_one, argument), &result));
        nap();
        _exit((int)((long)result % 100));
    }
    reap(pid, (int)((step + 1) % 100));
    return argument;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    PTH(pthread_atfork(prepare, parent, child));
    pthread_t spinners[3];
    for (int i = 0; i < 3; i++) spinners[i] = start(spin, NULL);
    STEPS {
        long before = spins;
        join(start(forker, (void *)(long)g.step));
        EQ(prepared, g.step);
        EQ(in_parent, g.step);
        EQ(in_child, 0);
        while (spins == before) sched_yield();
    }
    stop = true;
    for (int i = 0; i < 3; i++) join(spinners[i]);
    return guest_pass();
}
