// Feature: directory descriptors
// Proves: a directory read half way goes on with exactly the entries not yet seen, and openat
// through directory descriptors leads where it did, after a rename too.
#include "guest.h"
#include <dirent.h>

#define FILES 200

// Reads on until the directory ends or about half a buffer of entries has been seen.
static bool read_some(int fd, bool *seen) {
    char buffer[1024];
    long length = SYS(syscall(SYS_getdents64, fd, buffer, sizeof buffer));
    for (long at = 0; at < length;) {
        struct dirent64 *entry = (struct dirent64 *)(buffer + at);
        at += entry->d_reclen;
        if (entry->d_name[0] == '.') continue;
        int number = atoi(entry->d_name);
        CHECK(number >= 0 && number < FILES && !seen[number], "%s came twice", entry->d_name);
        seen[number] = true;
    }
    return length > 0;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    SYS(mkdir(beside("many"), 0755));
    int reading = (int)SYS(open(beside("many"), O_RDONLY | O_DIRECTORY));
    int path_only = (int)SYS(open(beside("many"), O_PATH | O_DIRECTORY));
    for (int i = 0; i < FILES; i++) {
        char name[16];
        snprintf(name, sizeof name, "%03d", i);
        int fd = (int)SYS(openat(path_only, name, O_WRONLY | O_CREAT | O_EXCL, 0600));
        put(fd, name, 3);
        close(fd);
    }
    bool seen[FILES] = {0};
    STEPS {
        if (!read_some(reading, seen)) {
            for (int i = 0; i < FILES; i++) CHECK(seen[i], "%03d never came", i);
            memset(seen, 0, sizeof seen);
            SYS(lseek(reading, 0, SEEK_SET));
        }
        nap();
        char name[16], content[4] = "";
        snprintf(name, sizeof name, "%03d", g.step * 7 % FILES);
        int fd = (int)SYS(openat(g.step % 2 ? reading : path_only, name, O_RDONLY));
        get(fd, content, 3);
        CHECK(!strcmp(content, name), "expected %s, got %s", name, content);
        close(fd);
        if (g.step % 10 == 0) {
            bool there = access(beside("many"), F_OK) == 0;
            SYS(rename(beside(there ? "many" : "moved"), beside(there ? "moved" : "many")));
        }
    }
    while (read_some(reading, seen)) continue;
    for (int i = 0; i < FILES; i++) CHECK(seen[i], "%03d never came", i);
    return guest_pass();
}
