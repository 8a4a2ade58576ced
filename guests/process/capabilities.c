// Feature: capabilities
// Proves: permitted, effective, inheritable, ambient and bounding sets, secure bits and keep-caps
// of a child that dropped some stay as they were.
#include "guest.h"
#include <linux/capability.h>
#include <linux/securebits.h>
#include <grp.h>
#include <sys/prctl.h>

#define KEPT ((1u << CAP_CHOWN) | (1u << CAP_NET_BIND_SERVICE) | (1u << CAP_SETPCAP))
#define RAISED ((1u << CAP_CHOWN))
#define INHERITED ((1u << CAP_NET_BIND_SERVICE))
#define BITS (SECBIT_NOROOT | SECBIT_KEEP_CAPS)

static long check(long step) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct sets[2] = {{RAISED | 1u << CAP_SETPCAP, KEPT, INHERITED}, {0}};
    if (step == 0) {
        SYS(prctl(PR_CAPBSET_DROP, CAP_NET_RAW));
        SYS(prctl(PR_CAPBSET_DROP, CAP_SYS_MODULE));
        SYS(prctl(PR_SET_SECUREBITS, BITS));
        SYS(syscall(SYS_capset, &header, sets));
        SYS(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_NET_BIND_SERVICE, 0, 0));
        sets[0].effective = RAISED;
        SYS(syscall(SYS_capset, &header, sets));
        return 0;
    }
    SYS(syscall(SYS_capget, &header, sets));
    EQ(sets[0].effective, RAISED);
    EQ(sets[0].permitted, KEPT);
    EQ(sets[0].inheritable, INHERITED);
    EQ(sets[1].effective | sets[1].permitted | sets[1].inheritable, 0);
    EQ(prctl(PR_CAPBSET_READ, CAP_NET_RAW), 0);
    EQ(prctl(PR_CAPBSET_READ, CAP_SYS_MODULE), 0);
    EQ(prctl(PR_CAPBSET_READ, CAP_CHOWN), 1);
    EQ(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, CAP_NET_BIND_SERVICE, 0, 0), 1);
    EQ(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, CAP_CHOWN, 0, 0), 0);
    EQ(prctl(PR_GET_SECUREBITS), BITS);
    EQ(prctl(PR_GET_KEEPCAPS), 1);
    FAILS(setgroups(0, NULL), EPERM);
    return 0;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct peer child = peer_start(check);
    peer_ask(&child, 0);
    STEPS {
        peer_ask(&child, g.step);
        nap();
    }
    peer_end(&child);
    return guest_pass();
}
