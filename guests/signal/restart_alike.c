// Feature: waits that look alike
// Proves: a thread that waits again and again with the same registers goes on with the vector
// registers of its last wait, not of one before.
#include "restart.h"
#include <sys/sem.h>

static int semaphore;
static _Atomic bool ending;
static _Atomic uint64_t waits;

struct wait {
    struct sembuf down;
    uint64_t want, got;
};

// All general registers are the same in each call; what changes is in XMM15, which system calls
// keep.
static __attribute__((noinline)) long wait_with(volatile struct wait *wait, struct timespec *time) {
    long result = SYS_semtimedop;
    register struct timespec *r10 __asm__("r10") = time;
    __asm__ volatile("movq %[want], %%xmm15\n\t"
                     "xorl %%r8d, %%r8d\n\t"
                     "xorl %%r9d, %%r9d\n\t"
                     "syscall\n\t"
                     "movq %%xmm15, %[got]"
                     : "+a"(result), [got] "=m"(wait->got)
                     : [want] "m"(wait->want), "D"((long)semaphore), "S"(&wait->down), "d"(1L),
                       "r"(r10)
                     : "rcx", "r8", "r9", "r11", "xmm15", "memory");
    return result;
}

static void *wait_often(void *unused) {
    // Volatile, so that no register counts.
    volatile struct wait wait = {.down.sem_op = -1};
    struct timespec time = {.tv_nsec = 20000000};
    while (!ending) {
        wait.want++;
        EQ(wait_with(&wait, &time), -EAGAIN);
        EQ(wait.got, wait.want);
        waits++;
    }
    return unused;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    semaphore = (int)SYS(semget(IPC_PRIVATE, 1, 0600));
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) threads[i] = start(wait_often, NULL);
    STEPS nap();
    ending = true;
    for (int i = 0; i < 4; i++) join(threads[i]);
    CHECK(waits > 4);
    return guest_pass();
}
