// Feature: niceness, scheduling policy, I/O priority and affinity
// Proves: each of four threads keeps its own.
#include "guest.h"
#include <sys/resource.h>

static const struct {
    int policy, priority, nice, io;
} wanted[] = {
    {SCHED_OTHER, 0, 5, 2 << 13 | 1},
    {SCHED_BATCH, 0, 11, 2 << 13 | 6},
    {SCHED_IDLE, 0, 3, 3 << 13},
    {SCHED_FIFO, 7, 0, 2 << 13 | 3},
};

static void *worker(void *argument) {
    long i = (long)argument;
    struct sched_param priority = {wanted[i].priority}, got_priority;
    SYS(setpriority(PRIO_PROCESS, (id_t)gettid(), wanted[i].nice));
    SYS(syscall(SYS_ioprio_set, 1, 0, wanted[i].io));
    // A kernel may keep real-time scheduling from a group; then that thread stays as it is.
    bool refused = sched_setscheduler(0, wanted[i].policy, &priority);
    int policy = refused ? SCHED_OTHER : wanted[i].policy;
    cpu_set_t all, one, got;
    SYS(sched_getaffinity(0, sizeof all, &all));
    int nth = (int)i % CPU_COUNT(&all), cpu = 0;
    while (!CPU_ISSET(cpu, &all) || nth-- > 0) cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    SYS(sched_setaffinity(0, sizeof one, &one));
    for (int step = 1; step <= g.steps; step++) {
        EQ(sched_getscheduler(0), policy);
        SYS(sched_getparam(0, &got_priority));
        EQ(got_priority.sched_priority, policy == SCHED_FIFO ? 7 : 0);
        errno = 0;
        EQ(getpriority(PRIO_PROCESS, (id_t)gettid()), wanted[i].nice);
        EQ(errno, 0);
        EQ(syscall(SYS_ioprio_get, 1, 0), wanted[i].io);
        SYS(sched_getaffinity(0, sizeof got, &got));
        CHECK(CPU_EQUAL(&got, &one), "affinity of thread %ld", i);
        EQ(sched_getcpu(), cpu);
        nap();
    }
    return NULL;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    pthread_t threads[4];
    long own = getpriority(PRIO_PROCESS, 0);
    for (long i = 0; i < 4; i++) threads[i] = start(worker, (void *)i);
    STEPS {
        EQ(getpriority(PRIO_PROCESS, 0), own);
        EQ(sched_getscheduler(0), SCHED_OTHER);
        nap();
    }
    for (int i = 0; i < 4; i++) join(threads[i]);
    return guest_pass();
}
