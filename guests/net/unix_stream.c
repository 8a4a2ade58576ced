// Feature: UNIX stream socket pairs
// Proves: bytes queued in both directions, half closed and closed ends, credentials of the peer,
// buffer sizes and time limits stay.
#include "guest.h"
#include <sys/time.h>

static void expect_peer(int fd, pid_t pid, uid_t uid, gid_t gid) {
    struct ucred peer;
    socklen_t length = sizeof peer;
    SYS(getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length));
    EQ(peer.pid, pid);
    EQ(peer.uid, uid);
    EQ(peer.gid, gid);
}
// A pair that another process made as another user, which its parent has as well.
static int foreign[2];
static long make_pair(long to) {
    if (to == 0) return 0;
    int pair[2];
    SYS(setresgid((gid_t)-1, 77, (gid_t)-1));
    SYS(setresuid((uid_t)-1, 66, (uid_t)-1));
    SYS(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    SYS(setresuid((uid_t)-1, 0, (uid_t)-1));
    char control[CMSG_SPACE(sizeof pair)] = {0}, byte = 0;
    struct iovec bytes = {&byte, 1};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1};
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    *head = (struct cmsghdr){CMSG_LEN(sizeof pair), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(head), pair, sizeof pair);
    EQ(SYS(sendmsg((int)to, &message, 0)), 1);
    close(pair[0]);
    close(pair[1]);
    return 0;
}
static void take_pair(int from) {
    char control[CMSG_SPACE(sizeof foreign)], byte;
    struct iovec bytes = {&byte, 1};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1};
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    EQ(SYS(recvmsg(from, &message, 0)), 1);
    memcpy(foreign, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof foreign);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int pair[2], half[2], closed[2], way[2];
    SYS(socketpair(AF_UNIX, SOCK_STREAM, 0, way));
    struct peer maker = peer_start(make_pair);
    peer_ask(&maker, way[1]);
    take_pair(way[0]);
    SYS(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    SYS(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, half));
    SYS(socketpair(AF_UNIX, SOCK_STREAM, 0, closed));
    put(half[0], "until here", 10);
    SYS(shutdown(half[0], SHUT_WR));
    put(closed[0], "last words", 10);
    close(closed[0]);
    int size = 100000;
    SYS(setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &size, sizeof size));
    socklen_t length = sizeof size;
    SYS(getsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &size, &length));
    struct timeval limit = {3, 500000}, got_limit;
    SYS(setsockopt(pair[1], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    signal(SIGPIPE, SIG_IGN);
    static uint8_t bytes[30000];
    STEPS {
        for (int side = 0; side < 2; side++) {
            fill(bytes, sizeof bytes, (uint64_t)(g.step * 2 + side));
            put(pair[side], bytes, sizeof bytes);
        }
        put_long(half[1], g.step);
        nap();
        for (int side = 0; side < 2; side++) {
            get(pair[1 - side], bytes, sizeof bytes);
            FILLED(bytes, sizeof bytes, (uint64_t)(g.step * 2 + side));
        }
        EQ(get_long(half[0]), g.step);
        FAILS(write(half[0], "x", 1), EPIPE);
        FAILS(write(closed[1], "x", 1), EPIPE);
        int now;
        SYS(getsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &now, &length));
        EQ(now, size);
        length = sizeof got_limit;
        SYS(getsockopt(pair[1], SOL_SOCKET, SO_RCVTIMEO, &got_limit, &length));
        EQ(got_limit.tv_sec, 3);
        expect_peer(pair[0], getpid(), 0, 0);
        for (int side = 0; side < 2; side++) expect_peer(foreign[side], maker.pid, 66, 77);
        struct pollfd end = {.fd = closed[1], .events = POLLIN | POLLRDHUP};
        EQ(poll(&end, 1, 0), 1);
        EQ(end.revents, POLLIN | POLLRDHUP | POLLHUP);
    }
    char text[11] = "";
    get(half[1], text, 10);
    CHECK(!strcmp(text, "until here"));
    EQ(read(half[1], text, 1), 0);
    get(closed[1], text, 10);
    CHECK(!strcmp(text, "last words"));
    EQ(read(closed[1], text, 1), 0);
    peer_end(&maker);
    return guest_pass();
}
