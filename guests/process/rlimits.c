// Feature: resource limits
// Proves: soft and hard limits of all sixteen kinds stay, and one of them is still enforced.
#include "guest.h"
#include <sys/resource.h>

static void limit_of(int kind, struct rlimit *limit) {
    SYS(getrlimit((__rlimit_resource_t)kind, limit));
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct rlimit want[RLIM_NLIMITS];
    for (int i = 0; i < RLIM_NLIMITS; i++) {
        limit_of(i, &want[i]);
        // Big enough to live with and different for each kind.
        rlim_t hard = (1ull << 40) + (rlim_t)i * 1000003;
        if (i == RLIMIT_NOFILE) hard = 900;
        if (i == RLIMIT_NICE || i == RLIMIT_RTPRIO) hard = 15;
        if (i == RLIMIT_STACK) hard = 64 << 20;
        if (want[i].rlim_max != RLIM_INFINITY && hard > want[i].rlim_max) hard = want[i].rlim_max;
        want[i].rlim_max = hard;
        want[i].rlim_cur = hard - (hard > 0);
        if (i == RLIMIT_STACK) want[i].rlim_cur = 8 << 20;
        SYS(setrlimit((__rlimit_resource_t)i, &want[i]));
    }
    STEPS {
        for (int i = 0; i < RLIM_NLIMITS; i++) {
            struct rlimit got;
            limit_of(i, &got);
            CHECK(got.rlim_cur == want[i].rlim_cur, "kind %d", i);
            CHECK(got.rlim_max == want[i].rlim_max, "kind %d", i);
        }
        FAILS(fcntl(0, F_DUPFD, 899), EINVAL);
        close((int)SYS(fcntl(0, F_DUPFD, 898)));
        nap();
        want[RLIMIT_CORE].rlim_cur = (rlim_t)g.step;
        if (want[RLIMIT_CORE].rlim_max < (rlim_t)g.step) want[RLIMIT_CORE].rlim_cur = 0;
        SYS(setrlimit(RLIMIT_CORE, &want[RLIMIT_CORE]));
    }
    return guest_pass();
}
