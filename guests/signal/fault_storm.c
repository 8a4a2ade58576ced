// Feature: faults that the program handles, without a pause
// Proves: each access to a forbidden page, division by zero and unknown instruction of threads
// that do nothing else is handled once, whenever the stop comes.
#include "guest.h"
#include <ucontext.h>

enum { ACCESS, DIVIDE, UNKNOWN, KINDS };
static const int signals[KINDS] = {[ACCESS] = SIGSEGV, [DIVIDE] = SIGFPE, [UNKNOWN] = SIGILL};
static _Thread_local int mine;
static _Thread_local volatile long handled;
static _Thread_local uint8_t *page;
static _Atomic bool ending;
static _Atomic long rounds[KINDS];

static void on_fault(int signal, siginfo_t *info, void *context) {
    EQ(signal, signals[mine]);
    CHECK(info->si_code > 0);
    handled++;
    ucontext_t *frame = context;
    if (mine == ACCESS) {
        CHECK(info->si_addr == page);
        SYS(mprotect(page, PAGE, PROT_READ | PROT_WRITE));
    } else if (mine == DIVIDE) {
        frame->uc_mcontext.gregs[REG_RCX] = 1;
    } else {
        frame->uc_mcontext.gregs[REG_RIP] += 2;
    }
}

static void fault(long round) {
    switch (mine) {
    case ACCESS:
        SYS(mprotect(page, PAGE, PROT_NONE));
        *(volatile long *)page = round;
        EQ(*(volatile long *)page, round);
        break;
    case DIVIDE: {
        long low = round, high = 0, by = 0;
        __asm__ volatile("divq %%rcx" : "+a"(low), "+d"(high), "+c"(by) : : "cc");
        EQ(low, round);
        EQ(by, 1);
        break;
    }
    default: __asm__ volatile("ud2" : : : "memory");
    }
}

static void *storm(void *argument) {
    mine = (int)(intptr_t)argument;
    page = map_anon(PAGE, PROT_NONE, MAP_PRIVATE);
    for (long round = 1; !ending; round++) {
        fault(round);
        EQ(handled, round);
        rounds[mine]++;
    }
    return NULL;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    for (int kind = 0; kind < KINDS; kind++) SYS(sigaction(signals[kind], &action, NULL));
    pthread_t threads[KINDS];
    for (int kind = 0; kind < KINDS; kind++)
        threads[kind] = start(storm, (void *)(intptr_t)kind);
    STEPS {
        long before[KINDS];
        for (int kind = 0; kind < KINDS; kind++) before[kind] = rounds[kind];
        nap();
        for (int kind = 0; kind < KINDS; kind++)
            while (rounds[kind] == before[kind]) nap_ms(1);
    }
    ending = true;
    for (int kind = 0; kind < KINDS; kind++) join(threads[kind]);
    return guest_pass();
}
