// Refused: namespace
// Feature: namespaces made by the program
// Proves: a child in pid, uts and mount namespaces of its own, as a container engine makes, is
// refused.
#include "refused.h"
#include <sys/utsname.h>

static struct peer peer;
static long answer(long step) {
    if (step == 0) SYS(sethostname("inner", 5));
    struct utsname name;
    SYS(uname(&name));
    return !strcmp(name.nodename, "inner") && getpid() == 1;
}
static void appear(void) {
    pid_t parent = getpid();
    SYS(unshare(CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWNS));
    peer = peer_start(answer);
    EQ(getpid(), parent);
    EQ(peer_ask(&peer, 0), 1);
}
static void use(void) { EQ(peer_ask(&peer, g.step), 1); }
int main(int argc, char **argv) { return run_refused(argc, argv, appear, use); }
