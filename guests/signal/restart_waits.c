// Feature: interrupted system calls without end
// Proves: threads blocked in read (pipe, eventfd, socket), write to a full pipe, wait4,
// flock, futex and poll wake exactly when what they wait for comes.
#include "guest.h"
#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/file.h>

enum { READ, EVENT, SOCKET, WRITE, WAIT, FLOCK, FUTEX, POLL, KINDS };
static _Atomic long woken[KINDS], begun[KINDS];
static int pipe_in[2], full[2], event, sockets[2], poll_pipe[2];
static int lock_mine, lock_theirs, child_pipe[2];
static _Atomic int futex_word;
static _Atomic long locked_by_main;

static void wait_child(void) {
    // The child lives until main closes its pipe's last writer, that is writes one number to it.
    pid_t pid = (pid_t)SYS(fork());
    if (pid == 0) _exit((int)get_long(child_pipe[0]));
    int status;
    EQ(SYS(wait4(pid, &status, 0, NULL)), pid);
    EQ(WEXITSTATUS(status), 33);
}

static void block(int kind, long round) {
    struct pollfd one = {.fd = poll_pipe[0], .events = POLLIN};
    uint64_t number;
    char page[PAGE];
    switch (kind) {
    case READ:
        EQ(get_long(pipe_in[0]), round);
        break;
    case EVENT:
        get(event, &number, 8);
        EQ(number, round);
        break;
    case SOCKET:
        EQ(get_long(sockets[1]), round);
        break;
    case WRITE:
        fill(page, PAGE, (uint64_t)round);
        put(full[1], page, PAGE);
        break;
    case WAIT:
        wait_child();
        break;
    case FLOCK:
        SYS(flock(lock_theirs, LOCK_EX));
        SYS(flock(lock_theirs, LOCK_UN));
        break;
    case FUTEX:
        while (futex_word < round) {
            errno = 0;
            long result = syscall(SYS_futex, &futex_word, FUTEX_WAIT, round - 1, NULL, NULL, 0);
            CHECK(result == 0 || errno == EAGAIN, "futex");
        }
        break;
    case POLL:
        EQ(SYS(poll(&one, 1, -1)), 1);
        EQ(get_long(poll_pipe[0]), round);
        break;
    }
}

static void *worker(void *argument) {
    int kind = (int)(long)argument;
    for (long round = 1; round <= g.steps; round++) {
        begun[kind] = round;
        block(kind, round);
        woken[kind] = round;
        // The lock is asked for again only after main has taken it back.
        while (kind == FLOCK && locked_by_main <= round && round < g.steps) nap_ms(1);
    }
    return NULL;
}

static void wake(long round) {
    uint64_t number = (uint64_t)round;
    char page[PAGE];
    put_long(pipe_in[1], round);
    put(event, &number, 8);
    put_long(sockets[0], round);
    get(full[0], page, PAGE);
    put_long(child_pipe[1], 33);
    SYS(flock(lock_mine, LOCK_UN));
    futex_word = (int)round;
    SYS(syscall(SYS_futex, &futex_word, FUTEX_WAKE, 1, NULL, NULL, 0));
    put_long(poll_pipe[1], round);
}

static void set_up(void) {
    SYS(pipe(pipe_in));
    SYS(pipe(full));
    SYS(pipe(poll_pipe));
    SYS(pipe(child_pipe));
    SYS(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets));
    event = (int)SYS(eventfd(0, 0));
    char page[PAGE];
    long pages = SYS(fcntl(full[1], F_GETPIPE_SZ)) / (long)PAGE;
    for (long i = 0; i < pages; i++) put(full[1], page, PAGE);
    lock_mine = (int)SYS(open(beside("lock"), O_RDWR | O_CREAT, 0600));
    lock_theirs = (int)SYS(open(beside("lock"), O_RDWR));
    SYS(flock(lock_mine, LOCK_EX));
    locked_by_main = 1;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    set_up();
    pthread_t threads[KINDS];
    for (long i = 0; i < KINDS; i++) threads[i] = start(worker, (void *)i);
    STEPS {
        for (int i = 0; i < KINDS; i++)
            while (begun[i] < g.step) nap_ms(1);
        nap();
        for (int i = 0; i < KINDS; i++) CHECK(woken[i] == g.step - 1, "kind %d woke early", i);
        wake(g.step);
        for (int i = 0; i < KINDS; i++)
            while (woken[i] < g.step) nap_ms(1);
        SYS(flock(lock_mine, LOCK_EX));
        locked_by_main = g.step + 1;
    }
    for (int i = 0; i < KINDS; i++) join(threads[i]);
    return guest_pass();
}
