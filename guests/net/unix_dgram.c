// Feature: UNIX datagram sockets
// Proves: queued datagrams keep their borders, contents, order and sender's name, for pairs, bound
// (abstract and path) and connected sockets.
#include "guest.h"
#include <sys/un.h>

static struct sockaddr_un name(const char *text, socklen_t *length) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, text, strlen(text) + (*text == '/'));
    if (*text == '@') address.sun_path[0] = 0;
    *length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(text) + (*text == '/'));
    return address;
}
static int bound(const char *text) {
    socklen_t length;
    struct sockaddr_un address = name(text, &length);
    int fd = (int)SYS(socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0));
    SYS(bind(fd, (struct sockaddr *)&address, length));
    return fd;
}
static void expect(int fd, size_t length, uint64_t seed, const char *from) {
    uint8_t bytes[4000];
    struct sockaddr_un got = {0}, want;
    socklen_t got_length = sizeof got, want_length = 0;
    EQ(recvfrom(fd, bytes, sizeof bytes, 0, (struct sockaddr *)&got, &got_length), length);
    FILLED(bytes, length, seed);
    if (!from) return;
    want = name(from, &want_length);
    EQ(got_length, want_length);
    CHECK(!memcmp(&got, &want, want_length), "sender %s", got.sun_path);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    char directory[PATH_MAX], path[PATH_MAX + 8];
    CHECK(realpath(g.dir, directory));
    snprintf(path, sizeof path, "%s/sock", directory);
    int pair[2], abstract = bound("@guest"), by_path = bound(path), sender = bound("@sender");
    SYS(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0, pair));
    int connected = (int)SYS(socket(AF_UNIX, SOCK_DGRAM, 0));
    socklen_t length;
    struct sockaddr_un address = name(path, &length);
    SYS(connect(connected, (struct sockaddr *)&address, length));
    uint8_t bytes[4000];
    STEPS {
        for (size_t i = 1; i <= 4; i++) {
            uint64_t seed = (uint64_t)g.step * 10 + i;
            fill(bytes, 300 * i, seed);
            put(pair[i % 2], bytes, 300 * i);
            struct sockaddr_un to = name("@guest", &length);
            EQ(sendto(sender, bytes, 200 * i, 0, (struct sockaddr *)&to, length), 200 * i);
            put(connected, bytes, 100 * i);
        }
        nap();
        for (size_t i = 1; i <= 4; i++) {
            uint64_t seed = (uint64_t)g.step * 10 + i;
            expect(pair[1 - i % 2], 300 * i, seed, NULL);
            expect(abstract, 200 * i, seed, "@sender");
            expect(by_path, 100 * i, seed, NULL);
        }
        FAILS(recv(abstract, bytes, 1, 0), EAGAIN);
        FAILS(recv(pair[0], bytes, 1, 0), EAGAIN);
        struct stat status;
        SYS(stat(path, &status));
        CHECK(S_ISSOCK(status.st_mode));
    }
    return guest_pass();
}
