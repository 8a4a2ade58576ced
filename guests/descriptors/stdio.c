// Feature: standard input, output and error
// Proves: whatever they are, they stay open with their flags; writing to them never fails the
// program, reading from standard input ends or blocks but breaks nothing, and stdio buffers stay.
#include "guest.h"

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int flags[3];
    for (int fd = 0; fd < 3; fd++) flags[fd] = fcntl(fd, F_GETFL);
    char *memory = NULL;
    size_t length = 0;
    FILE *buffered = open_memstream(&memory, &length);
    FILE *file = fopen(beside("buffered"), "w+");
    CHECK(buffered && file);
    signal(SIGPIPE, SIG_IGN);
    STEPS {
        fprintf(buffered, "step %d\n", g.step);
        fprintf(file, "step %d\n", g.step);
        printf("step %d\n", g.step);
        nap();
        // A terminal may have gone away with its host: an error is fine, a closed number is not.
        if (fflush(stdout) != 0) clearerr(stdout);
        for (int fd = 0; fd < 3; fd++) {
            int now = fcntl(fd, F_GETFL);
            CHECK((now < 0) == (flags[fd] < 0), "descriptor %d", fd);
            if (now >= 0) EQ(now & O_ACCMODE, flags[fd] & O_ACCMODE);
        }
        struct pollfd input = {.fd = 0, .events = POLLIN};
        char byte;
        if (poll(&input, 1, 0) == 1 && input.revents & POLLIN) EQ(read(0, &byte, 1) < 2, 1);
    }
    fclose(buffered);
    rewind(file);
    char line[64], want[64];
    const char *at = memory;
    for (int step = 1; step <= g.steps; step++) {
        snprintf(want, sizeof want, "step %d\n", step);
        CHECK(fgets(line, sizeof line, file) && !strcmp(line, want), "expected %s", want);
        CHECK(!strncmp(at, want, strlen(want)));
        at += strlen(want);
    }
    return guest_pass();
}
