// Feature: idle TCP connections and their options
// Proves: connections that carry nothing for rounds keep options, buffer sizes and
// send queues held back by a peer that does not read, and work again afterwards.
#include "inet.h"

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int idle[2], blocked[2];
    connected_pair(7041, idle);
    connected_pair(7042, blocked);
    set_option(idle[0], IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(idle[0], SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(idle[0], IPPROTO_TCP, TCP_KEEPIDLE, 1234);
    set_option(idle[0], IPPROTO_TCP, TCP_KEEPINTVL, 56);
    set_option(idle[0], IPPROTO_TCP, TCP_KEEPCNT, 7);
    set_option(idle[0], IPPROTO_TCP, TCP_USER_TIMEOUT, 98765);
    set_option(idle[0], IPPROTO_IP, IP_TOS, 0x10);
    set_option(idle[1], SOL_SOCKET, SO_RCVBUF, 70000);
    struct linger linger = {1, 9}, got_linger;
    SYS(setsockopt(idle[1], SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
    int size = option(idle[1], SOL_SOCKET, SO_RCVBUF);
    // Writes until neither side's buffers take more: the rest stays in the send queue.
    SYS(fcntl(blocked[0], F_SETFL, O_NONBLOCK));
    set_option(blocked[0], SOL_SOCKET, SO_SNDBUF, 50000);
    static uint8_t bytes[8192];
    uint64_t state = 1, check = 1;
    long written = 0;
    STEPS {
        for (;;) {
            uint64_t before = state;
            for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)(mix(&state) >> 8);
            ssize_t n = write(blocked[0], bytes, sizeof bytes);
            if (n == (ssize_t)sizeof bytes) {
                written += n;
                continue;
            }
            // Only the part that was taken counts.
            state = before;
            for (ssize_t i = 0; i < n; i++) mix(&state);
            written += n > 0 ? n : 0;
            if (n < 0) break;
        }
        EQ(errno, EAGAIN);
        nap();
        long want = g.step == g.steps ? written : written / 2;
        for (long i = 0; i < want;) {
            ssize_t n = SYS(read(blocked[1], bytes, want - i < 4096 ? (size_t)(want - i) : 4096));
            for (ssize_t at = 0; at < n; at++) EQ(bytes[at], (uint8_t)(mix(&check) >> 8));
            i += n;
        }
        written -= want;
        EQ(option(idle[0], IPPROTO_TCP, TCP_NODELAY), 1);
        EQ(option(idle[0], SOL_SOCKET, SO_KEEPALIVE), 1);
        EQ(option(idle[0], IPPROTO_TCP, TCP_KEEPIDLE), 1234);
        EQ(option(idle[0], IPPROTO_TCP, TCP_KEEPINTVL), 56);
        EQ(option(idle[0], IPPROTO_TCP, TCP_KEEPCNT), 7);
        EQ(option(idle[0], IPPROTO_TCP, TCP_USER_TIMEOUT), 98765);
        EQ(option(idle[0], IPPROTO_IP, IP_TOS), 0x10);
        EQ(option(idle[1], SOL_SOCKET, SO_RCVBUF), size);
        EQ(option(idle[1], IPPROTO_TCP, TCP_NODELAY), 0);
        socklen_t length = sizeof got_linger;
        SYS(getsockopt(idle[1], SOL_SOCKET, SO_LINGER, &got_linger, &length));
        EQ(got_linger.l_linger, 9);
        if (g.step % 10 == 0) {
            put_long(idle[0], g.step);
            EQ(get_long(idle[1]), g.step);
        }
    }
    return guest_pass();
}
