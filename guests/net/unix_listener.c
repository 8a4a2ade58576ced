// Feature: UNIX listeners with pending connections
// Proves: connections made but not yet accepted are accepted later in order, on an abstract name
// and on a path; backlog and peer names stay. Those written to are accepted with their data or, all
// of a listener together, seen as reset by their makers at once.
#include "guest.h"
#include <sys/un.h>

#define PENDING 3
static struct sockaddr_un addresses[2];
static socklen_t lengths[2];

static int make(int i) {
    int fd = (int)SYS(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0));
    SYS(bind(fd, (struct sockaddr *)&addresses[i], lengths[i]));
    SYS(listen(fd, PENDING - 1));
    return fd;
}
static int dial(int i) {
    int fd = (int)SYS(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0));
    if (connect(fd, (struct sockaddr *)&addresses[i], lengths[i]) == 0) return fd;
    EQ(errno, EAGAIN);
    close(fd);
    return -1;
}

// The makers' ends, -1 for those that are closed.
static int made[2][PENDING];

// The connection was reset: reading says so, once.
static bool is_reset(int fd) {
    char byte;
    struct pollfd one = {.fd = fd, .events = POLLIN};
    if (fd < 0 || SYS(poll(&one, 1, 0)) == 0) return false;
    CHECK(one.revents & POLLHUP, "events %#x", one.revents);
    FAILS(read(fd, &byte, 1), ECONNRESET);
    EQ(read(fd, &byte, 1), 0);
    return true;
}
// Those that wait in this listener were reset, all of them together.
static bool were_reset(int i) {
    bool reset[PENDING], any = false;
    for (int n = 0; n < PENDING; n++) any |= reset[n] = is_reset(made[i][n]);
    for (int n = 0; any && n < PENDING; n++)
        CHECK(made[i][n] < 0 || reset[n] || is_reset(made[i][n]), "connection %d", n);
    return any;
}
static bool any_reset(int i) {
    bool any = false;
    for (int n = 0; n < PENDING; n++) any |= is_reset(made[i][n]);
    return any;
}
// What is not as it should be must come from a reset, which may happen at any instant.
#define OR_RESET(i, claim)                                                                         \
    do {                                                                                           \
        if (!(claim)) {                                                                            \
            CHECK(any_reset(i), "%s, and nothing was reset", #claim);                              \
            return false;                                                                          \
        }                                                                                          \
    } while (0)
static long word(int i, int n) { return g.step * 100 + i * 10 + n; }

static bool dial_all(int i) {
    for (int n = 0; n < PENDING; n++) {
        long value = word(i, n);
        made[i][n] = dial(i);
        CHECK(made[i][n] >= 0);
        OR_RESET(i, send(made[i][n], &value, sizeof value, MSG_NOSIGNAL) == sizeof value);
    }
    int more = dial(i);
    if (more >= 0) close(more);
    OR_RESET(i, more == -1);
    return true;
}
static bool accept_all(int i, const int listener) {
    for (int n = 0; n < PENDING; n++) {
        struct sockaddr_un name;
        socklen_t length = sizeof name;
        int fd = accept(listener, NULL, NULL);
        if (fd < 0) EQ(errno, EAGAIN);
        OR_RESET(i, fd >= 0);
        EQ(get_long(fd), word(i, n));
        SYS(getsockname(fd, (struct sockaddr *)&name, &length));
        EQ(length, lengths[i]);
        CHECK(!memcmp(&name, &addresses[i], length));
        if (made[i][n] < 0) {
            EQ(read(fd, &name, 1), 0);
        } else {
            put_long(fd, n);
            EQ(get_long(made[i][n]), n);
            close(made[i][n]);
            made[i][n] = -1;
        }
        close(fd);
    }
    FAILS(accept(listener, NULL, NULL), EAGAIN);
    return true;
}
// The listeners are filled, waited for and emptied; false: one was reset meanwhile.
static bool attempt(const int listeners[2]) {
    if (!dial_all(0) || !dial_all(1)) return false;
    // One has hung up before it was accepted.
    close(made[0][1]);
    made[0][1] = -1;
    nap();
    for (int i = 0; i < 2; i++) {
        if (were_reset(i)) return false;
        int more = dial(i);
        if (more >= 0) close(more);
        OR_RESET(i, more == -1);
    }
    return accept_all(0, listeners[0]) && accept_all(1, listeners[1]);
}
static void clear(int i, const int listener) {
    for (int n = 0; n < PENDING; n++) {
        if (made[i][n] >= 0) close(made[i][n]);
        made[i][n] = -1;
    }
    for (int fd; (fd = accept(listener, NULL, NULL)) >= 0;) close(fd);
    EQ(errno, EAGAIN);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    memset(made, -1, sizeof made);
    addresses[0] = (struct sockaddr_un){AF_UNIX, "\0listener"};
    lengths[0] = sizeof(sa_family_t) + 9;
    addresses[1].sun_family = AF_UNIX;
    // A relative path, as servers use: the working directory is part of the name.
    SYS(chdir(g.dir));
    strcpy(addresses[1].sun_path, "listener");
    lengths[1] = sizeof(sa_family_t) + 9;
    int listeners[2] = {make(0), make(1)};
    STEPS {
        while (!attempt(listeners))
            for (int i = 0; i < 2; i++) clear(i, listeners[i]);
    }
    return guest_pass();
}
