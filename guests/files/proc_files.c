// Feature: open files of /proc
// Proves: descriptors of /proc files of the program itself and of a child, and of a /proc
// directory, go on telling about those processes, and a listing of mappings that has been read in
// part goes on where it was.
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

#define MAPPINGS 64
static uint8_t *mappings;

// Mappings with a hole behind each, so that each has a line of its own.
static void make_mappings(void) {
    mappings = map_anon(2 * MAPPINGS * PAGE, PROT_NONE, MAP_PRIVATE);
    for (size_t i = 0; i < MAPPINGS; i++) SYS(munmap(mappings + (2 * i + 1) * PAGE, PAGE));
}

// Reads a listing in two parts, the first of which ends within the lines of the mappings.
static void list_mappings(void) {
    static char text[1 << 16];
    int fd = open_proc(getpid(), "maps");
    char first[32];
    snprintf(first, sizeof first, "\n%lx-", (unsigned long)mappings);
    size_t length = 0;
    char *found = NULL;
    while (!found || strlen(found) < 1000) {
        length += (size_t)SYS(read(fd, text + length, 100));
        text[length] = 0;
        found = strstr(text, first);
    }
    nap();
    for (long more; (more = SYS(read(fd, text + length, sizeof text - 1 - length))) > 0;)
        length += (size_t)more;
    text[length] = 0;
    close(fd);
    char *line = found + 1;
    for (size_t i = 0; i < MAPPINGS; i++) {
        EQ(strtoul(line, NULL, 16), (uintptr_t)mappings + 2 * i * PAGE);
        line = strchr(line, '\n') + 1;
    }
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    make_mappings();
    peer = peer_start(answer);
    int own = open_proc(getpid(), "stat"), child = open_proc(peer.pid, "stat");
    int directory = open_proc(peer.pid, ".");
    int limit = (int)SYS(open("/proc/sys/kernel/pid_max", O_RDONLY));
    STEPS {
        list_mappings();
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
