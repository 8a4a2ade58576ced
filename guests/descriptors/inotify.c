// Feature: inotify
// Proves: watches on a directory and on a file keep their descriptors and masks, unread events stay
// in order or give way to the one that says that events were lost, and each change afterwards is
// told once.
#include "guest.h"
#include <sys/inotify.h>

static int fd;
static void expect(const char *buffer, long *at, int watch, uint32_t mask, const char *name) {
    const struct inotify_event *event = (const void *)(buffer + *at);
    EQ(event->wd, watch);
    EQ(event->mask, mask);
    CHECK(!strcmp(event->len ? event->name : "", name), "expected %s, got %s", name, event->name);
    *at += (long)sizeof *event + event->len;
}
static void touch(const char *name) {
    close((int)SYS(open(beside(name), O_WRONLY | O_CREAT, 0600)));
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    fd = (int)SYS(inotify_init1(IN_NONBLOCK));
    SYS(mkdir(beside("watched"), 0755));
    SYS(mkdir(beside("gone"), 0755));
    touch("file");
    // The first watch is removed, so that the others do not start from 1.
    int gone = (int)SYS(inotify_add_watch(fd, beside("gone"), IN_CREATE));
    int directory = (int)SYS(inotify_add_watch(fd, beside("watched"), IN_CREATE | IN_DELETE));
    int file = (int)SYS(inotify_add_watch(fd, beside("file"), IN_ATTRIB));
    SYS(inotify_rm_watch(fd, gone));
    char buffer[4096];
    EQ(read(fd, buffer, sizeof buffer), sizeof(struct inotify_event));
    STEPS {
        char name[32];
        snprintf(name, sizeof name, "watched/%d", g.step);
        touch(name);
        SYS(chmod(beside("file"), 0600 | (mode_t)(g.step % 2)));
        nap();
        SYS(unlink(beside(name)));
        long at = 0, length = SYS(read(fd, buffer, sizeof buffer));
        int left = 3;
        if (((const struct inotify_event *)buffer)->mask & IN_Q_OVERFLOW) {
            expect(buffer, &at, -1, IN_Q_OVERFLOW, "");
            left = 0;
            for (long next = at; next < length; left++)
                next += (long)sizeof(struct inotify_event) +
                        ((const struct inotify_event *)(buffer + next))->len;
        }
        if (left > 2) expect(buffer, &at, directory, IN_CREATE, name + 8);
        if (left > 1) expect(buffer, &at, file, IN_ATTRIB, "");
        if (left > 0) expect(buffer, &at, directory, IN_DELETE, name + 8);
        EQ(at, length);
        FAILS(read(fd, buffer, sizeof buffer), EAGAIN);
        // Adding a watch again gives the number it has.
        EQ(inotify_add_watch(fd, beside("watched"), IN_CREATE | IN_DELETE), directory);
    }
    return guest_pass();
}
