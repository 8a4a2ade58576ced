// Feature: restartable sequences
// Proves: the registration glibc made for every thread stays with the kernel and cpu_id follows the
// thread from processor to processor.
#include "guest.h"
#include <sys/rseq.h>

static volatile struct rseq *area(void) {
    return (struct rseq *)((char *)__builtin_thread_pointer() + __rseq_offset);
}

static void check_registered(void) {
    // The kernel takes a second registration of the same area for EBUSY, of another for EINVAL.
    static struct rseq other __attribute__((aligned(32)));
    uint32_t length = __rseq_size > 32 ? __rseq_size : 32;
    FAILS(syscall(SYS_rseq, area(), length, 0, RSEQ_SIG), EBUSY);
    FAILS(syscall(SYS_rseq, &other, 32, 0, RSEQ_SIG), EINVAL);
}

static void follow(int processors) {
    cpu_set_t all;
    SYS(sched_getaffinity(0, sizeof all, &all));
    for (int cpu = 0, seen = 0; seen < processors; cpu++) {
        if (!CPU_ISSET(cpu, &all)) continue;
        seen++;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        SYS(sched_setaffinity(0, sizeof one, &one));
        EQ(area()->cpu_id, cpu);
        EQ(area()->cpu_id_start, cpu);
        EQ(area()->rseq_cs, 0);
    }
    SYS(sched_setaffinity(0, sizeof all, &all));
}

static void *worker(void *argument) {
    volatile struct rseq *mine = area();
    for (int step = 1; step <= g.steps; step++) {
        CHECK(area() == mine);
        check_registered();
        follow(*(int *)argument);
        nap();
    }
    return NULL;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    CHECK(__rseq_size > 0, "glibc did not register rseq");
    cpu_set_t all;
    SYS(sched_getaffinity(0, sizeof all, &all));
    int processors = CPU_COUNT(&all) < 8 ? CPU_COUNT(&all) : 8;
    pthread_t other = start(worker, &processors);
    STEPS {
        check_registered();
        follow(processors);
        nap();
    }
    join(other);
    return guest_pass();
}
