// Feature: alternate signal stacks
// Proves: threads stopped inside a handler on their alternate stack return from it properly;
// sigaltstack keeps address, size and flags, in and out of the handler.
#include "guest.h"

#define SIZE (64 * 1024)
static __thread uint8_t *stack;
static __thread volatile long hits;

static void on_stack(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info, (void)context;
    uint8_t local[3000];
    CHECK(local > stack && local < stack + SIZE, "handler is not on its stack");
    stack_t now;
    fill(local, sizeof local, (uint64_t)hits);
    SYS(sigaltstack(NULL, &now));
    EQ(now.ss_flags, SS_ONSTACK);
    nap();
    FILLED(local, sizeof local, (uint64_t)hits);
    SYS(sigaltstack(NULL, &now));
    EQ(now.ss_flags, SS_ONSTACK);
    CHECK(now.ss_sp == stack);
    FAILS(sigaltstack(&(stack_t){.ss_flags = SS_DISABLE}, NULL), EPERM);
    hits++;
}

static void run(bool counting) {
    stack = map_anon(SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE);
    stack_t want = {.ss_sp = stack, .ss_size = SIZE}, got;
    SYS(sigaltstack(&want, NULL));
    for (int step = 1; step <= g.steps; step++) {
        uint8_t local[3000];
        fill(local, sizeof local, (uint64_t)step + 7);
        PTH(pthread_kill(pthread_self(), SIGUSR1));
        FILLED(local, sizeof local, (uint64_t)step + 7);
        EQ(hits, step);
        SYS(sigaltstack(NULL, &got));
        CHECK(got.ss_sp == stack);
        EQ(got.ss_size, SIZE);
        EQ(got.ss_flags, 0);
        nap_ms(1);
        if (counting) {
            g.step = step;
            step_done();
        }
    }
}
static void *worker(void *argument) {
    run(false);
    return argument;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct sigaction action = {.sa_sigaction = on_stack, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    SYS(sigaction(SIGUSR1, &action, NULL));
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) threads[i] = start(worker, NULL);
    run(true);
    for (int i = 0; i < 3; i++) join(threads[i]);
    return guest_pass();
}
