// Feature: umask and working directory
// Proves: the file creation mask and the working directory of two processes stay, and relative
// names lead to the same files, also after the directory was renamed.
#include "guest.h"

static void check(const char *name, mode_t mask) {
    char here[PATH_MAX], want[PATH_MAX];
    CHECK(getcwd(here, sizeof here) != NULL);
    CHECK(realpath(beside(name), want) != NULL);
    CHECK(!strcmp(here, want), "expected %s, got %s", want, here);
    int fd = (int)SYS(open("made", O_CREAT | O_EXCL | O_WRONLY, 0777));
    struct stat stat_fd, stat_path;
    SYS(fstat(fd, &stat_fd));
    EQ(stat_fd.st_mode & 0777, 0777 & ~mask);
    char path[PATH_MAX + 8];
    snprintf(path, sizeof path, "%s/made", want);
    SYS(stat(path, &stat_path));
    EQ(stat_path.st_ino, stat_fd.st_ino);
    SYS(unlink("made"));
    close(fd);
}

static long child(long step) {
    if (step == 0) {
        SYS(chdir(beside("other")));
        umask(0077);
        return 0;
    }
    check("other", 0077);
    return 0;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    SYS(mkdir(beside("one"), 0755));
    SYS(mkdir(beside("other"), 0755));
    char absolute[PATH_MAX];
    CHECK(realpath(g.dir, absolute) != NULL);
    strcpy(g.dir, absolute);
    struct peer peer = peer_start(child);
    peer_ask(&peer, 0);
    SYS(chdir(beside("one")));
    mode_t mask = 0022;
    umask(mask);
    const char *names[] = {"one", "renamed"};
    STEPS {
        check(names[(g.step - 1) % 2], mask);
        peer_ask(&peer, g.step);
        SYS(rename(beside(names[(g.step - 1) % 2]), beside(names[g.step % 2])));
        EQ(umask((mode_t)g.step & 0077), mask);
        mask = (mode_t)g.step & 0077;
        nap();
    }
    peer_end(&peer);
    return guest_pass();
}
