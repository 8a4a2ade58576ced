// Refused: anon_inode:[fanotify]
// Feature: fanotify
// Proves: a fanotify group is refused: it watches files of the host.
#include "refused.h"
#include <sys/fanotify.h>

static int fd;
static void appear(void) {
    fd = (int)SYS(fanotify_init(FAN_CLASS_NOTIF | FAN_NONBLOCK, O_RDONLY));
    SYS(fanotify_mark(fd, FAN_MARK_ADD, FAN_MODIFY, AT_FDCWD, beside("out")));
}
static void use(void) {
    FAILS(fanotify_mark(fd, FAN_MARK_REMOVE, FAN_OPEN, AT_FDCWD, beside("none")), ENOENT);
}
int main(int argc, char **argv) { return run_refused(argc, argv, appear, use); }
