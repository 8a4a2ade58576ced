// Feature: passed descriptors in flight
// Proves: descriptors queued in UNIX sockets and open nowhere else (a pipe with contents, a file
// with an offset, a memfd, a socket with data, several at once) arrive as what they were.
#include "guest.h"

static void send_fds(int socket, const int *fds, size_t count, long number) {
    char control[CMSG_SPACE(8 * sizeof(int))] = {0};
    struct iovec data = {&number, sizeof number};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control};
    message.msg_controllen = CMSG_SPACE(count * sizeof(int));
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(count * sizeof(int));
    memcpy(CMSG_DATA(head), fds, count * sizeof(int));
    EQ(sendmsg(socket, &message, 0), sizeof number);
    for (size_t i = 0; i < count; i++) close(fds[i]);
}
static void receive_fds(int socket, int *fds, size_t count, long number) {
    char control[CMSG_SPACE(8 * sizeof(int))] = {0};
    long got = 0;
    struct iovec data = {&got, sizeof got};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    EQ(recvmsg(socket, &message, 0), sizeof got);
    EQ(got, number);
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    CHECK(head && head->cmsg_type == SCM_RIGHTS);
    EQ(head->cmsg_len, CMSG_LEN(count * sizeof(int)));
    memcpy(fds, CMSG_DATA(head), count * sizeof(int));
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int streams[2], datagrams[2];
    SYS(socketpair(AF_UNIX, SOCK_STREAM, 0, streams));
    SYS(socketpair(AF_UNIX, SOCK_DGRAM, 0, datagrams));
    STEPS {
        int ends[2], inner[2], fds[3];
        SYS(pipe(ends));
        put_long(ends[1], g.step * 5);
        SYS(socketpair(AF_UNIX, SOCK_STREAM, 0, inner));
        put_long(inner[0], g.step * 6);
        int file = (int)SYS(open(beside("passed"), O_RDWR | O_CREAT | O_TRUNC, 0600));
        put(file, "0123456789", 10);
        SYS(lseek(file, g.step % 10, SEEK_SET));
        int memory = (int)SYS(memfd_create("passed", 0));
        put_long(memory, g.step * 7);
        // Three in one message, then one; a fourth goes as a datagram. Both ends of the pipe and
        // of the inner pair have no other holder while they are on their way.
        send_fds(streams[0], (int[]){ends[0], ends[1], file}, 3, g.step);
        send_fds(streams[0], (int[]){memory}, 1, g.step + 1);
        send_fds(datagrams[0], (int[]){inner[1], inner[0]}, 2, g.step + 2);
        nap();
        receive_fds(streams[1], fds, 3, g.step);
        EQ(get_long(fds[0]), g.step * 5);
        put_long(fds[1], 1);
        EQ(get_long(fds[0]), 1);
        EQ(lseek(fds[2], 0, SEEK_CUR), g.step % 10);
        char digit;
        get(fds[2], &digit, 1);
        EQ(digit, '0' + g.step % 10);
        for (int i = 0; i < 3; i++) close(fds[i]);
        receive_fds(streams[1], fds, 1, g.step + 1);
        long value;
        EQ(pread(fds[0], &value, sizeof value, 0), sizeof value);
        EQ(value, g.step * 7);
        close(fds[0]);
        receive_fds(datagrams[1], fds, 2, g.step + 2);
        EQ(get_long(fds[0]), g.step * 6);
        put_long(fds[0], 2);
        EQ(get_long(fds[1]), 2);
        close(fds[0]);
        close(fds[1]);
    }
    return guest_pass();
}
