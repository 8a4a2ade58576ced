// Feature: robust lists
// Proves: a robust mutex whose owner, a thread or another process, dies after a move is handed on
// with EOWNERDEAD; one whose owner lives stays locked.
#include "guest.h"

struct board {
    pthread_mutex_t by_thread, by_process, alive;
};
static struct board *board;

static void make(pthread_mutex_t *mutex) {
    pthread_mutexattr_t kind;
    PTH(pthread_mutexattr_init(&kind));
    PTH(pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST));
    PTH(pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED));
    PTH(pthread_mutex_init(mutex, &kind));
}

static _Atomic bool held, seen;
static void *hold_and_die(void *argument) {
    PTH(pthread_mutex_lock(&board->by_thread));
    held = true;
    while (!seen) nap_ms(1);
    nap();
    return argument;
}
static long hold(long step) {
    if (step > 0) PTH(pthread_mutex_lock(&board->by_process));
    return 0;
}
static void *hold_on(void *argument) {
    PTH(pthread_mutex_lock(&board->alive));
    for (held = true;;) pause();
    return argument;
}
static void recover(pthread_mutex_t *mutex) {
    EQ(pthread_mutex_lock(mutex), EOWNERDEAD);
    PTH(pthread_mutex_consistent(mutex));
    PTH(pthread_mutex_unlock(mutex));
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    board = map_anon(PAGE, PROT_READ | PROT_WRITE, MAP_SHARED);
    make(&board->by_thread);
    make(&board->by_process);
    make(&board->alive);
    start(hold_on, NULL);
    while (!held) sched_yield();
    STEPS {
        held = seen = false;
        struct peer peer = peer_start(hold);
        peer_ask(&peer, g.step);
        pthread_t thread = start(hold_and_die, NULL);
        while (!held) sched_yield();
        EQ(pthread_mutex_trylock(&board->by_thread), EBUSY);
        EQ(pthread_mutex_trylock(&board->by_process), EBUSY);
        seen = true;
        join(thread);
        recover(&board->by_thread);
        SYS(kill(peer.pid, SIGKILL));
        SYS(waitpid(peer.pid, NULL, 0));
        recover(&board->by_process);
        close(peer.to);
        close(peer.from);
        EQ(pthread_mutex_trylock(&board->alive), EBUSY);
        void *head;
        size_t length;
        SYS(syscall(SYS_get_robust_list, 0, &head, &length));
        CHECK(head != NULL && length == 24, "robust list %p of %zu", head, length);
    }
    return guest_pass();
}
