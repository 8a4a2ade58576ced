// Feature: unlinked but open files
// Proves: a deleted file, one replaced by rename, one deleted while another link remains, and
// one mapped after deletion keep their contents, offsets and link counts, and go on growing.
#include "guest.h"

static void grow(int fd, long step) {
    put_long(fd, step * 11);
    struct stat stat;
    SYS(fstat(fd, &stat));
    EQ(stat.st_size, step * (long)sizeof(long));
    for (long i = 1; i <= step; i++) {
        long value;
        EQ(pread(fd, &value, sizeof value, (i - 1) * (long)sizeof value), sizeof value);
        EQ(value, i * 11);
    }
}
static int create(const char *name) {
    return (int)SYS(open(beside(name), O_RDWR | O_CREAT | O_EXCL, 0600));
}
static nlink_t links(int fd) {
    struct stat stat;
    SYS(fstat(fd, &stat));
    return stat.st_nlink;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int deleted = create("deleted"), replaced = create("replaced"), linked = create("linked");
    int mapped = create("mapped");
    SYS(unlink(beside("deleted")));
    // The same name lives on as another file.
    int again = create("deleted");
    close(create("new"));
    SYS(rename(beside("new"), beside("replaced")));
    SYS(link(beside("linked"), beside("other name")));
    SYS(unlink(beside("linked")));
    SYS(ftruncate(mapped, PAGE));
    uint8_t *memory = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, mapped, 0);
    CHECK(memory != MAP_FAILED);
    SYS(unlink(beside("mapped")));
    close(mapped);
    STEPS {
        grow(deleted, g.step);
        grow(replaced, g.step);
        grow(linked, g.step);
        fill(memory, PAGE, (uint64_t)g.step);
        nap();
        FILLED(memory, PAGE, (uint64_t)g.step);
        EQ(links(deleted), 0);
        EQ(links(replaced), 0);
        EQ(links(linked), 1);
        EQ(links(again), 1);
        FAILS(access(beside("linked"), F_OK), ENOENT);
        SYS(access(beside("other name"), F_OK));
        EQ(lseek(again, 0, SEEK_END), 0);
        struct stat stat_path;
        SYS(stat(beside("replaced"), &stat_path));
        EQ(stat_path.st_size, 0);
    }
    return guest_pass();
}
