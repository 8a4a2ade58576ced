// Feature: signal frames
// Proves: a program stopped three handlers deep, with floating-point work in each, returns through
// all of them with locals, masks and floating-point state as they were.
#include "guest.h"

static const int signals[] = {SIGUSR1, SIGUSR2, 40};
static volatile sig_atomic_t level, returned;

static void handler(int signal) {
    long own = level++;
    uint8_t local[1000];
    fill(local, sizeof local, (uint64_t)(own + g.step));
    volatile double value = 1.0 / (own + 3);
    EQ(signal, signals[own]);
    double before = value * g.step;
    if (level < 3) raise(signals[level]);
    else nap();
    CHECK(value * g.step == before);
    FILLED(local, sizeof local, (uint64_t)(own + g.step));
    sigset_t mask;
    SYS(sigprocmask(SIG_BLOCK, NULL, &mask));
    for (int i = 0; i < 3; i++) EQ(sigismember(&mask, signals[i]), i <= own);
    EQ(level, own + 1);
    level--;
    returned++;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    for (int i = 0; i < 3; i++) SYS(signal(signals[i], handler) == SIG_ERR ? -1 : 0);
    STEPS {
        double sum = 0;
        for (int i = 1; i < 50; i++) sum += 1.0 / i;
        raise(SIGUSR1);
        double again = 0;
        for (int i = 1; i < 50; i++) again += 1.0 / i;
        CHECK(sum == again);
        EQ(level, 0);
        EQ(returned, g.step * 3);
    }
    return guest_pass();
}
