// Feature: threads that come and go
// Proves: joinable and detached threads started and ended all the time give their results, run
// their thread-specific destructors once, and leave no thread behind.
#include "guest.h"

#define JOINED 6
#define DETACHED 4

static pthread_key_t key;
static _Atomic long destroyed, detached_done;

static void destroy(void *value) { destroyed += (long)value; }

static void *work(void *argument) {
    PTH(pthread_setspecific(key, (void *)1));
    nap_ms(1 + (long)argument % 3);
    return (void *)((long)argument * 3);
}
static void *work_alone(void *argument) {
    PTH(pthread_detach(pthread_self()));
    work(argument);
    detached_done++;
    return NULL;
}
// Starts and joins threads without a pause, so that a stop finds one half made.
static void *restless(void *stop) {
    while (!*(_Atomic bool *)stop) {
        void *result;
        pthread_t thread = start(work, (void *)5);
        PTH(pthread_join(thread, &result));
        EQ((long)result, 15);
        destroyed--;
    }
    return NULL;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    PTH(pthread_key_create(&key, destroy));
    _Atomic bool stop = false;
    pthread_t churner = start(restless, &stop);
    STEPS {
        pthread_t threads[JOINED];
        for (long i = 0; i < JOINED; i++) threads[i] = start(work, (void *)(i + g.step));
        for (long i = 0; i < DETACHED; i++) start(work_alone, (void *)i);
        nap();
        for (long i = 0; i < JOINED; i++) {
            void *result;
            PTH(pthread_join(threads[i], &result));
            EQ((long)result, (i + g.step) * 3);
        }
        while (detached_done < (long)g.step * DETACHED) nap_ms(1);
    }
    stop = true;
    join(churner);
    // The kernel lets go of a thread just after join returns.
    while (atoi(proc_line("/proc/self/status", "Threads:")) > 1) nap_ms(1);
    EQ(destroyed, (long)g.steps * (JOINED + DETACHED));
    return guest_pass();
}
