// Feature: truncation, rename, unlink, directories
// Proves: what a directory tree looks like after each round's creations, renames, exchanges,
// truncations, holes, links and removals is what the program did, no more and no less.
#include "guest.h"
#include <dirent.h>

static void write_file(const char *name, uint64_t seed, size_t length) {
    uint8_t bytes[5000];
    fill(bytes, length, seed);
    int fd = (int)SYS(open(beside(name), O_WRONLY | O_CREAT | O_TRUNC, 0644));
    put(fd, bytes, length);
    close(fd);
}
static void check_file(const char *name, uint64_t seed, size_t length, size_t size) {
    uint8_t bytes[20000];
    int fd = (int)SYS(open(beside(name), O_RDONLY));
    EQ(read(fd, bytes, sizeof bytes), size);
    FILLED(bytes, length, seed);
    ZEROS(bytes + length, size - length);
    close(fd);
}
static int entries(const char *name) {
    DIR *directory = opendir(beside(name));
    CHECK(directory, "opendir %s", name);
    int count = 0;
    while (readdir(directory)) count++;
    closedir(directory);
    return count - 2;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    SYS(mkdir(beside("tree"), 0755));
    write_file("tree/old", 0, 100);
    write_file("tree/left", 1, 10);
    write_file("tree/right", 2, 20);
    STEPS {
        uint64_t step = (uint64_t)g.step;
        check_file("tree/old", step - 1, 100 + (step - 1) % 50, 100 + (step - 1) % 50);
        write_file("tree/new", step, 100 + step % 50);
        SYS(rename(beside("tree/new"), beside("tree/old")));
        SYS(renameat2(AT_FDCWD, beside("tree/left"), AT_FDCWD, beside("tree/right"),
                      2 /* RENAME_EXCHANGE */));
        write_file("tree/cut", step, 4000);
        SYS(truncate(beside("tree/cut"), 1234));
        SYS(truncate(beside("tree/cut"), 15000));
        char name[64];
        snprintf(name, sizeof name, "tree/sub %d", g.step);
        SYS(mkdir(beside(name), 0700));
        strcat(name, "/inner");
        write_file(name, step, 77);
        nap();
        check_file(name, step, 77, 77);
        check_file("tree/cut", step, 1234, 15000);
        check_file("tree/left", 1 + step % 2, step % 2 ? 20 : 10, step % 2 ? 20 : 10);
        check_file("tree/old", step, 100 + step % 50, 100 + step % 50);
        FAILS(access(beside("tree/new"), F_OK), ENOENT);
        EQ(entries("tree"), 5);
        SYS(unlink(beside(name)));
        *strrchr(name, '/') = 0;
        EQ(entries(name), 0);
        SYS(rmdir(beside(name)));
        SYS(unlink(beside("tree/cut")));
    }
    return guest_pass();
}
