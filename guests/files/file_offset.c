// Feature: open file descriptions
// Proves: offset and flags shared by dup, fork and a descriptor passed on, and apart for a second
// open of the same file, stay; so do flags such as O_APPEND, O_NONBLOCK, O_PATH, O_NOATIME.
#include "guest.h"

#define SIZE 100000
static int shared;

static long read_in_child(long length) {
    if (length == 0) return 0;
    uint8_t bytes[512];
    EQ(read(shared, bytes, (size_t)length), length);
    return bytes[0];
}

static const int flags[] = {O_RDONLY, O_WRONLY | O_APPEND, O_RDWR | O_NONBLOCK,
                            O_RDONLY | O_NOATIME, O_PATH, O_WRONLY | O_SYNC,
                            O_RDWR | O_DSYNC | O_CLOEXEC};
#define COUNT (int)(sizeof flags / sizeof *flags)
#define SHOWN (O_ACCMODE | O_APPEND | O_NONBLOCK | O_NOATIME | O_PATH | O_SYNC | O_DSYNC)

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    static uint8_t content[SIZE];
    fill(content, SIZE, 1);
    const char *path = beside("read");
    shared = (int)SYS(open(path, O_RDWR | O_CREAT | O_TRUNC, 0600));
    put(shared, content, SIZE);
    SYS(lseek(shared, 0, SEEK_SET));
    int copy = (int)SYS(dup(shared)), apart = (int)SYS(open(path, O_RDONLY)), opened[COUNT];
    for (int i = 0; i < COUNT; i++) opened[i] = (int)SYS(open(path, flags[i]));
    struct peer peer = peer_start(read_in_child);
    off_t at = 0, apart_at = 0;
    STEPS {
        uint8_t bytes[512];
        if (at > SIZE - 2000) SYS(lseek(copy, at = 0, SEEK_SET));
        EQ(read(shared, bytes, 100), 100);
        CHECK(!memcmp(bytes, content + at, 100));
        at += 100;
        nap();
        EQ(lseek(copy, 0, SEEK_CUR), at);
        EQ(peer_ask(&peer, g.step % 300 + 1), content[at]);
        at += g.step % 300 + 1;
        EQ(lseek(shared, 0, SEEK_CUR), at);
        EQ(read(copy, bytes, 7), 7);
        CHECK(!memcmp(bytes, content + at, 7));
        at += 7;
        EQ(lseek(apart, 0, SEEK_CUR), apart_at);
        apart_at = g.step * 5000;
        EQ(lseek(apart, apart_at, SEEK_SET), apart_at);
        for (int i = 0; i < COUNT; i++) {
            int now = fcntl(opened[i], F_GETFL);
            CHECK((now & SHOWN) == (flags[i] & SHOWN), "descriptor %d: %#x", i, now);
        }
        FAILS(read(opened[4] /* O_PATH */, bytes, 1), EBADF);
    }
    peer_end(&peer);
    return guest_pass();
}
