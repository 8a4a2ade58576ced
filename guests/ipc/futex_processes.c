// Feature: futexes shared between processes
// Proves: ten processes that pass a token round by futexes, barriers, semaphores and condition
// variables in shared memory neither lose nor double it.
#include "guest.h"
#include <semaphore.h>

#define PROCESSES 10
static struct {
    sem_t turn[PROCESSES];
    pthread_barrier_t barrier;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    long token, laps[PROCESSES], round, done;
} *board;

// Waits for its turn, adds itself to the token, hands on; then all meet at the barrier.
static void work(int rank) {
    for (long round = 1; round <= g.steps; round++) {
        for (int lap = 0; lap < 3; lap++) {
            while (sem_wait(&board->turn[rank]) < 0) EQ(errno, EINTR);
            EQ(board->token % PROCESSES, rank);
            board->token++;
            board->laps[rank]++;
            SYS(sem_post(&board->turn[(rank + 1) % PROCESSES]));
        }
        pthread_mutex_lock(&board->lock);
        board->done++;
        pthread_cond_broadcast(&board->changed);
        while (board->round < round) pthread_cond_wait(&board->changed, &board->lock);
        pthread_mutex_unlock(&board->lock);
        pthread_barrier_wait(&board->barrier);
    }
    _exit(rank);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    board = map_anon(2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED);
    pthread_mutexattr_t lock_kind;
    pthread_condattr_t condition_kind;
    pthread_barrierattr_t barrier_kind;
    PTH(pthread_mutexattr_init(&lock_kind));
    PTH(pthread_condattr_init(&condition_kind));
    PTH(pthread_barrierattr_init(&barrier_kind));
    PTH(pthread_mutexattr_setpshared(&lock_kind, PTHREAD_PROCESS_SHARED));
    PTH(pthread_condattr_setpshared(&condition_kind, PTHREAD_PROCESS_SHARED));
    PTH(pthread_barrierattr_setpshared(&barrier_kind, PTHREAD_PROCESS_SHARED));
    PTH(pthread_mutex_init(&board->lock, &lock_kind));
    PTH(pthread_cond_init(&board->changed, &condition_kind));
    PTH(pthread_barrier_init(&board->barrier, &barrier_kind, PROCESSES + 1));
    pid_t pids[PROCESSES];
    for (int i = 0; i < PROCESSES; i++) 
        SYS(sem_init(&board->turn[i], 1, 0));
    for (int i = 0; i < PROCESSES; i++)
        if ((pids[i] = (pid_t)SYS(fork())) == 0) work(i);
    SYS(sem_post(&board->turn[0]));
    STEPS {
        nap();
        pthread_mutex_lock(&board->lock);
        while (board->done < (long)PROCESSES * g.step)
            pthread_cond_wait(&board->changed, &board->lock);
        EQ(board->token, 3l * PROCESSES * g.step);
        for (int i = 0; i < PROCESSES; i++) EQ(board->laps[i], 3 * g.step);
        board->round = g.step;
        pthread_cond_broadcast(&board->changed);
        pthread_mutex_unlock(&board->lock);
        pthread_barrier_wait(&board->barrier);
    }
    for (int i = 0; i < PROCESSES; i++) reap(pids[i], i);
    return guest_pass();
}
