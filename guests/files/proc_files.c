// Feature: open files of /proc
// Proves: descriptors of /proc files of the program itself and of a child, and of a /proc
// directory, go on telling about those processes.
#include "guest.h"

static struct peer peer;
static long answer(long step) { return step; }

static int open_proc(pid_t pid, const char *name) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
    return (int)SYS(open(path, O_RDONLY));
}
static long pid_of_stat(int fd) {
    char text[512] = "";
    CHECK(SYS(pread(fd, text, sizeof text - 1, 0)) > 0);
    return atol(text);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    peer = peer_start(answer);
    int own = open_proc(getpid(), "stat"), child = open_proc(peer.pid, "stat");
    int directory = open_proc(peer.pid, ".");
    int limit = (int)SYS(open("/proc/sys/kernel/pid_max", O_RDONLY));
    STEPS {
        nap();
        EQ(pid_of_stat(own), getpid());
        EQ(pid_of_stat(child), peer.pid);
        CHECK(pid_of_stat(limit) > 300);
        int through = (int)SYS(openat(directory, "stat", O_RDONLY));
        EQ(pid_of_stat(through), peer.pid);
        close(through);
        EQ(peer_ask(&peer, g.step), g.step);
    }
    peer_end(&peer);
    return guest_pass();
}
