// Feature: pipes with contents
// Proves: unread bytes, packets (O_DIRECT), enlarged size, O_NONBLOCK, fullness, and the hang-up of
// a pipe whose writers are gone, stay.
#include "guest.h"

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int bytes[2], packets[2], full[2], orphan[2];
    SYS(pipe(bytes));
    SYS(pipe2(packets, O_DIRECT | O_NONBLOCK));
    SYS(pipe2(full, O_NONBLOCK));
    SYS(pipe(orphan));
    SYS(fcntl(bytes[1], F_SETPIPE_SZ, 1 << 18));
    SYS(fcntl(full[1], F_SETPIPE_SZ, (int)(2 * PAGE)));
    put(orphan[1], "last words", 10);
    close(orphan[1]);
    static uint8_t data[200000];
    int oldest = 1;
    STEPS {
        fill(data, sizeof data, (uint64_t)g.step);
        size_t length = 1 + (size_t)g.step * 7919 % sizeof data;
        put(bytes[1], data, length);
        for (int i = 1; i <= 4; i++) put(packets[1], data + i, (size_t)(i * 100 + g.step));
        while (write(full[1], data, PAGE) > 0) continue;
        EQ(errno, EAGAIN);
        nap();
        EQ(SYS(fcntl(bytes[0], F_GETPIPE_SZ)), 1 << 18);
        EQ(SYS(fcntl(packets[1], F_GETFL)) & (O_DIRECT | O_NONBLOCK), O_DIRECT | O_NONBLOCK);
        static uint8_t got[200000];
        get(bytes[0], got, length);
        FILLED(got, length, (uint64_t)g.step);
        for (int i = 1; i <= 4; i++) {
            EQ(read(packets[0], got, sizeof got), i * 100 + g.step);
            CHECK(!memcmp(got, data + i, (size_t)(i * 100 + g.step)));
        }
        FAILS(read(packets[0], got, 1), EAGAIN);
        FAILS(write(full[1], data, PAGE), EAGAIN);
        get(full[0], got, PAGE);
        FILLED(got, PAGE, (uint64_t)oldest);
        struct pollfd end = {.fd = orphan[0], .events = POLLIN};
        EQ(poll(&end, 1, 0), 1);
        EQ(end.revents, POLLIN | POLLHUP);
        // The page just taken is replaced: the pipe holds last round's page and this one's.
        fill(data, PAGE, (uint64_t)g.step);
        put(full[1], data, PAGE);
        oldest = g.step == 1 ? 1 : g.step - 1;
    }
    char words[11] = "";
    EQ(read(orphan[0], words, sizeof words), 10);
    CHECK(!strcmp(words, "last words"));
    EQ(read(orphan[0], words, 1), 0);
    return guest_pass();
}
