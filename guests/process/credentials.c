// Feature: credentials
// Proves: a child's real, effective, saved and file-system user and group ids and its supplementary
// groups stay, and files it makes belong to them.
#include "guest.h"
#include <grp.h>
#include <sys/fsuid.h>

static long check(long step) {
    if (step == 0) {
        gid_t groups[] = {1, 20, 300, 4000, 65533};
        SYS(setgroups(5, groups));
        SYS(setresgid(1001, 1002, 1003));
        SYS(setresuid(2001, 2002, 2003));
        setfsuid(2003);
        setfsgid(1003);
        return 0;
    }
    uid_t uid[3];
    gid_t gid[3], groups[8] = {0};
    SYS(getresuid(&uid[0], &uid[1], &uid[2]));
    SYS(getresgid(&gid[0], &gid[1], &gid[2]));
    for (unsigned i = 0; i < 3; i++) {
        EQ(uid[i], 2001 + i);
        EQ(gid[i], 1001 + i);
    }
    EQ(setfsuid((uid_t)-1), 2003);
    EQ(setfsgid((gid_t)-1), 1003);
    EQ(getgroups(8, groups), 5);
    gid_t want[] = {1, 20, 300, 4000, 65533};
    for (int i = 0; i < 5; i++) EQ(groups[i], want[i]);
    // What has been dropped cannot be taken back.
    FAILS(setresuid(0, 0, 0), EPERM);
    FAILS(setgroups(0, NULL), EPERM);
    int fd = (int)SYS(memfd_create("owned", 0));
    struct stat stat;
    SYS(fstat(fd, &stat));
    EQ(stat.st_uid, 2003);
    EQ(stat.st_gid, 1003);
    close(fd);
    return 0;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct peer child = peer_start(check);
    peer_ask(&child, 0);
    STEPS {
        peer_ask(&child, g.step);
        EQ(geteuid(), 0);
        nap();
    }
    peer_end(&child);
    return guest_pass();
}
