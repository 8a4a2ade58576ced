// Feature: hundreds of threads
// Proves: 200 threads keep their tids, names, stacks and counters, and each answers every round.
// Build: static too
#include "guest.h"

#define THREADS 200

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t next_round = PTHREAD_COND_INITIALIZER, all_done = PTHREAD_COND_INITIALIZER;
static long current, answered, counters[THREADS];
static pid_t tids[THREADS];

static void *worker(void *argument) {
    long index = (long)argument, rounds = 0;
    uint8_t on_stack[2000];
    pid_t tid = tids[index] = gettid();
    fill(on_stack, sizeof on_stack, (uint64_t)index);
    for (bool more = true; more;) {
        pthread_mutex_lock(&lock);
        while (current == rounds) pthread_cond_wait(&next_round, &lock);
        more = current >= 0;
        rounds++;
        if (more) EQ(rounds, current);
        counters[index]++;
        if (++answered == THREADS) pthread_cond_signal(&all_done);
        pthread_mutex_unlock(&lock);
        EQ(gettid(), tid);
        FILLED(on_stack, sizeof on_stack, (uint64_t)index);
    }
    return argument;
}

static void next(long round) {
    pthread_mutex_lock(&lock);
    current = round;
    answered = 0;
    pthread_cond_broadcast(&next_round);
    while (answered < THREADS) pthread_cond_wait(&all_done, &lock);
    pthread_mutex_unlock(&lock);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    pthread_attr_t small;
    PTH(pthread_attr_init(&small));
    PTH(pthread_attr_setstacksize(&small, 256 * 1024));
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++)
        PTH(pthread_create(&threads[i], &small, worker, (void *)i));
    STEPS {
        next(g.step);
        for (long i = 0; i < THREADS; i++) EQ(counters[i], g.step);
        nap();
        for (long i = 0; i < THREADS; i++) EQ(syscall(SYS_tgkill, getpid(), tids[i], 0), 0);
    }
    next(-1);
    for (long i = 0; i < THREADS; i++) {
        void *result;
        PTH(pthread_join(threads[i], &result));
        EQ((long)result, i);
    }
    return guest_pass();
}
