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
// The connection was reset: reading says so, once.
static bool is_reset(int fd) {
    char byte;
    struct pollfd one = {.fd = fd, .events = POLLIN};
    if (SYS(poll(&one, 1, 0)) == 0) return false;
    CHECK(one.revents & POLLHUP, "events %#x", one.revents);
    FAILS(read(fd, &byte, 1), ECONNRESET);
    EQ(read(fd, &byte, 1), 0);
    return true;
}
static void redial(int i, int fds[PENDING], bool one_gone) {
    for (int n = 0; n < PENDING; n++) {
        if (!(one_gone && n == 1)) {
            if (n) CHECK(is_reset(fds[n]), "connection %d", n);
            close(fds[n]);
        }
        fds[n] = dial(i);
        CHECK(fds[n] >= 0);
        put_long(fds[n], g.step * 100 + i * 10 + n);
    }
    if (one_gone) close(fds[1]);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    addresses[0] = (struct sockaddr_un){AF_UNIX, "\0listener"};
    lengths[0] = sizeof(sa_family_t) + 9;
    addresses[1].sun_family = AF_UNIX;
    // A relative path, as servers use: the working directory is part of the name.
    SYS(chdir(g.dir));
    strcpy(addresses[1].sun_path, "listener");
    lengths[1] = sizeof(sa_family_t) + 9;
    int listeners[2] = {make(0), make(1)};
    STEPS {
        int dialled[2][PENDING];
        for (int i = 0; i < 2; i++) {
            for (int n = 0; n < PENDING; n++) {
                dialled[i][n] = dial(i);
                CHECK(dialled[i][n] >= 0);
                put_long(dialled[i][n], g.step * 100 + i * 10 + n);
            }
            EQ(dial(i), -1);
        }
        // One has hung up before it was accepted.
        close(dialled[0][1]);
        nap();
        for (int i = 0; i < 2; i++)
            if (is_reset(dialled[i][0])) redial(i, dialled[i], i == 0);
        EQ(dial(0), -1);
        for (int i = 0; i < 2; i++) {
            for (int n = 0; n < PENDING; n++) {
                struct sockaddr_un name;
                socklen_t length = sizeof name;
                int fd = (int)SYS(accept(listeners[i], NULL, NULL));
                EQ(get_long(fd), g.step * 100 + i * 10 + n);
                SYS(getsockname(fd, (struct sockaddr *)&name, &length));
                EQ(length, lengths[i]);
                CHECK(!memcmp(&name, &addresses[i], length));
                if (i == 0 && n == 1) {
                    EQ(read(fd, &name, 1), 0);
                } else {
                    put_long(fd, n);
                    EQ(get_long(dialled[i][n]), n);
                    close(dialled[i][n]);
                }
                close(fd);
            }
            FAILS(accept(listeners[i], NULL, NULL), EAGAIN);
        }
    }
    return guest_pass();
}
