// Feature: thread-local storage
// Proves: __thread variables, pthread keys, errno and the FS base of 32 threads stay with them.
// Build: static too
#include "guest.h"
#include <asm/prctl.h>

#define THREADS 32

static __thread long number = 7;
static __thread char text[64] = "untouched";
static __thread uint8_t zeros[5000];
static pthread_key_t key;
static pthread_barrier_t before, after;

static uint64_t fs_base(void) {
    uint64_t base;
    SYS(syscall(SYS_arch_prctl, ARCH_GET_FS, &base));
    return base;
}

static void *worker(void *argument) {
    long index = (long)argument;
    EQ(number, 7);
    CHECK(!strcmp(text, "untouched"));
    ZEROS(zeros, sizeof zeros);
    uint64_t base = fs_base();
    PTH(pthread_setspecific(key, (void *)(index * 100)));
    for (int step = 1; step <= g.steps; step++) {
        number = index * 1000 + step;
        snprintf(text, sizeof text, "thread %ld step %d", index, step);
        fill(zeros, sizeof zeros, (uint64_t)number);
        errno = (int)(index + 1);
        pthread_barrier_wait(&before);
        pthread_barrier_wait(&after);
        EQ(errno, index + 1);
        EQ(number, index * 1000 + step);
        char want[64];
        snprintf(want, sizeof want, "thread %ld step %d", index, step);
        CHECK(!strcmp(text, want), "got %s", text);
        FILLED(zeros, sizeof zeros, (uint64_t)number);
        EQ((long)pthread_getspecific(key), index * 100);
        EQ(fs_base(), base);
    }
    return NULL;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    PTH(pthread_key_create(&key, NULL));
    PTH(pthread_barrier_init(&before, NULL, THREADS + 1));
    PTH(pthread_barrier_init(&after, NULL, THREADS + 1));
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++) threads[i] = start(worker, (void *)i);
    STEPS {
        pthread_barrier_wait(&before);
        nap();
        pthread_barrier_wait(&after);
    }
    for (int i = 0; i < THREADS; i++) join(threads[i]);
    EQ(number, 7);
    return guest_pass();
}
