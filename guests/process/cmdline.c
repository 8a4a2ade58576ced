// Feature: command line, environment, auxiliary vector and executable of a process
// Proves: what /proc says about the program itself, PR_SET_MM_* areas included, stays.
#include "guest.h"
#include <sys/auxv.h>

static size_t read_all(const char *path, char *buffer, size_t size) {
    int fd = (int)SYS(open(path, O_RDONLY));
    size_t length = 0;
    ssize_t n;
    while ((n = SYS(read(fd, buffer + length, size - length))) > 0) length += (size_t)n;
    close(fd);
    return length;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    static const char *const paths[] = {"/proc/self/cmdline", "/proc/self/environ",
                                        "/proc/self/auxv"};
    static char want[3][65536], got[65536];
    size_t lengths[3];
    char program[PATH_MAX] = "", now[PATH_MAX] = "";
    SYS(readlink("/proc/self/exe", program, sizeof program - 1));
    void *vdso = (void *)getauxval(AT_SYSINFO_EHDR);
    // Programs like nginx write their title over the arguments.
    memset(argv[0], '*', 1);
    for (int i = 0; i < 3; i++) lengths[i] = read_all(paths[i], want[i], sizeof want[i]);
    CHECK(lengths[0] > 0 && want[0][0] == '*');
    STEPS {
        for (int i = 0; i < 3; i++) {
            EQ(read_all(paths[i], got, sizeof got), lengths[i]);
            CHECK(!memcmp(got, want[i], lengths[i]), "%s", paths[i]);
        }
        SYS(readlink("/proc/self/exe", now, sizeof now - 1));
        CHECK(!strcmp(now, program), "expected %s, got %s", program, now);
        CHECK(!memcmp(vdso, "\177ELF", 4));
        nap();
    }
    return guest_pass();
}
