// Programs that use what Hotspare refuses. They pass on plain Linux; under Hotspare the use ends
// the protection, with the reason, and not the program. GUEST_APPEARS_AT is the round in which the
// refused object appears (default 1), so that the refusal before and after the start can be told
// apart.
#ifndef REFUSED_H
#define REFUSED_H
#include "guest.h"

HELPER int run_refused(int argc, char **argv, void (*appear)(void), void (*use)(void)) {
    guest_begin(argc, argv);
    int appears_at = number_from_env("GUEST_APPEARS_AT", 1);
    STEPS {
        if (g.step == appears_at) appear();
        nap();
        if (g.step >= appears_at) use();
    }
    return guest_pass();
}

#endif
