// Feature: identity and attributes of files
// Proves: inode numbers, modes, link counts, times, hard links, symbolic links and sizes that the
// program remembers stay true, by descriptor and by path. Not the device: its number is the host's.
#include "guest.h"

#define FILES 5
struct known {
    struct stat stat;
    char name[16];
    int fd;
};

static void same(const struct stat *got, const struct stat *want, const char *name) {
    CHECK(got->st_ino == want->st_ino, "%s: inode", name);
    CHECK(got->st_mode == want->st_mode, "%s: mode", name);
    CHECK(got->st_nlink == want->st_nlink, "%s: links", name);
    CHECK(got->st_size == want->st_size, "%s: size", name);
    CHECK(got->st_mtim.tv_sec == want->st_mtim.tv_sec, "%s: mtime", name);
    CHECK(got->st_mtim.tv_nsec == want->st_mtim.tv_nsec, "%s: mtime", name);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct known files[FILES];
    for (int i = 0; i < FILES; i++) {
        snprintf(files[i].name, sizeof files[i].name, "file %d", i);
        files[i].fd = (int)SYS(open(beside(files[i].name), O_RDWR | O_CREAT, 0600));
        put(files[i].fd, "0123456789", (size_t)i + 1);
    }
    SYS(link(beside("file 1"), beside("linked")));
    SYS(symlink("file 2", beside("symbolic")));
    SYS(fchmod(files[3].fd, 0741));
    SYS(futimens(files[4].fd, (struct timespec[2]){{1000, 1}, {123456789, 987654321}}));
    for (int i = 0; i < FILES; i++) SYS(fstat(files[i].fd, &files[i].stat));
    EQ(files[4].stat.st_mtim.tv_nsec, 987654321);
    STEPS {
        struct stat got;
        for (int i = 0; i < FILES; i++) {
            SYS(fstat(files[i].fd, &got));
            same(&got, &files[i].stat, files[i].name);
            SYS(stat(beside(files[i].name), &got));
            same(&got, &files[i].stat, files[i].name);
        }
        SYS(stat(beside("linked"), &got));
        same(&got, &files[1].stat, "linked");
        SYS(stat(beside("symbolic"), &got));
        same(&got, &files[2].stat, "symbolic");
        char target[32] = "";
        EQ(readlink(beside("symbolic"), target, sizeof target), 6);
        CHECK(!strcmp(target, "file 2"));
        EQ(files[1].stat.st_nlink, 2);
        nap();
        SYS(fchmod(files[0].fd, 0600 | (mode_t)(g.step % 64)));
        put(files[2].fd, "x", 1);
        SYS(fstat(files[0].fd, &files[0].stat));
        SYS(fstat(files[2].fd, &files[2].stat));
        EQ(files[2].stat.st_size, 3 + g.step);
    }
    return guest_pass();
}
