// Feature: TCP listeners
// Proves: listeners with their options go on listening, on both IP versions, and hold their port;
// a bound socket that does not listen keeps its port too.
#include "inet.h"

static void serve_once(int listener, int dialled) {
    struct pollfd one = {.fd = listener, .events = POLLIN};
    EQ(SYS(poll(&one, 1, LATE_MS_MAX)), 1);
    int accepted = (int)SYS(accept(listener, NULL, NULL));
    put_long(dialled, g.step);
    EQ(get_long(accepted), g.step);
    put_long(accepted, g.step + 1);
    EQ(get_long(dialled), g.step + 1);
    close(accepted);
    close(dialled);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int listener = listening(7011, 10);
    set_option(listener, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(listener, SOL_SOCKET, SO_KEEPALIVE, 1);
    int six = (int)SYS(socket(AF_INET6, SOCK_STREAM, 0));
    set_option(six, IPPROTO_IPV6, IPV6_V6ONLY, 1);
    struct sockaddr_in6 address = {.sin6_family = AF_INET6, .sin6_port = htons(7011)};
    SYS(bind(six, (struct sockaddr *)&address, sizeof address));
    SYS(listen(six, 3));
    int idle = bound_socket(SOCK_STREAM, 7012);
    STEPS {
        nap();
        serve_once(listener, dial(7011));
        int dialled = (int)SYS(socket(AF_INET6, SOCK_STREAM, 0));
        address.sin6_addr = (struct in6_addr)IN6ADDR_LOOPBACK_INIT;
        SYS(connect(dialled, (struct sockaddr *)&address, sizeof address));
        serve_once(six, dialled);
        EQ(option(listener, SOL_SOCKET, SO_ACCEPTCONN), 1);
        EQ(option(listener, SOL_SOCKET, SO_REUSEADDR), 1);
        EQ(option(listener, SOL_SOCKET, SO_KEEPALIVE), 1);
        EQ(option(listener, IPPROTO_TCP, TCP_NODELAY), 1);
        EQ(option(six, IPPROTO_IPV6, IPV6_V6ONLY), 1);
        EQ(option(idle, SOL_SOCKET, SO_ACCEPTCONN), 0);
        EQ(port_of(idle, false), 7012);
        int taken = (int)SYS(socket(AF_INET, SOCK_STREAM, 0));
        struct sockaddr_in same = loopback(7011);
        FAILS(bind(taken, (struct sockaddr *)&same, sizeof same), EADDRINUSE);
        close(taken);
    }
    return guest_pass();
}
