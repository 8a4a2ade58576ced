// Feature: seccomp filters
// Proves: a filter on the whole process and a second one stacked on a single thread still decide
// every round, and a child inherits them.
#include "guest.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>

// Adds a filter that makes one system call fail with this errno.
static void refuse(int number, int error, unsigned flags) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)number, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    SYS(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program));
}

static void check(bool stacked) {
    FAILS(syscall(SYS_getpgid, 0), 77);
    if (stacked) FAILS(syscall(SYS_getsid, 0), 88);
    else SYS(syscall(SYS_getsid, 0));
    EQ(atoi(proc_line("/proc/thread-self/status", "Seccomp:")), SECCOMP_MODE_FILTER);
    EQ(atoi(proc_line("/proc/thread-self/status", "Seccomp_filters:")), stacked ? 2 : 1);
}

static pthread_barrier_t round_begins, round_ends;
static void *bound(void *argument) {
    refuse(SYS_getsid, 88, 0);
    for (int step = 1; step <= g.steps; step++) {
        pthread_barrier_wait(&round_begins);
        check(true);
        pid_t pid = (pid_t)SYS(fork());
        if (pid == 0) {
            check(true);
            _exit(5);
        }
        reap(pid, 5);
        pthread_barrier_wait(&round_ends);
    }
    return argument;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    PTH(pthread_barrier_init(&round_begins, NULL, 2));
    PTH(pthread_barrier_init(&round_ends, NULL, 2));
    SYS(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    refuse(SYS_getpgid, 77, SECCOMP_FILTER_FLAG_TSYNC);
    pthread_t thread = start(bound, NULL);
    STEPS {
        pthread_barrier_wait(&round_begins);
        check(false);
        nap();
        pthread_barrier_wait(&round_ends);
    }
    join(thread);
    return guest_pass();
}
