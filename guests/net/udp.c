// Feature: UDP sockets
// Proves: bound, unbound, connected and IPv6 sockets keep ports, peers, options and queued
// datagrams with borders, order and sender.
#include "inet.h"

#define QUEUED 8

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int server = bound_socket(SOCK_DGRAM, 7001), client = (int)SYS(socket(AF_INET, SOCK_DGRAM, 0));
    int connected = bound_socket(SOCK_DGRAM, 7002);
    struct sockaddr_in to = loopback(7001), from;
    SYS(connect(connected, (struct sockaddr *)&to, sizeof to));
    set_option(server, SOL_SOCKET, SO_RCVBUF, 150000);
    set_option(server, SOL_SOCKET, SO_BROADCAST, 1);
    set_option(server, IPPROTO_IP, IP_TTL, 33);
    int size = option(server, SOL_SOCKET, SO_RCVBUF);
    int six = (int)SYS(socket(AF_INET6, SOCK_DGRAM | SOCK_NONBLOCK, 0));
    struct sockaddr_in6 to_six = {.sin6_family = AF_INET6, .sin6_port = htons(7003),
                                  .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    SYS(bind(six, (struct sockaddr *)&to_six, sizeof to_six));
    uint8_t bytes[3000];
    uint16_t client_port = 0;
    STEPS {
        for (size_t i = 1; i <= QUEUED; i++) {
            fill(bytes, i * 300, (uint64_t)g.step * 10 + i);
            const struct sockaddr *whom = i % 2 ? (struct sockaddr *)&to : NULL;
            int fd = i % 2 ? client : connected;
            EQ(sendto(fd, bytes, i * 300, 0, whom, whom ? sizeof to : 0), i * 300);
        }
        EQ(sendto(six, "six", 3, 0, (struct sockaddr *)&to_six, sizeof to_six), 3);
        nap();
        for (size_t i = 1; i <= QUEUED; i++) {
            socklen_t length = sizeof from;
            struct sockaddr *sender = (struct sockaddr *)&from;
            EQ(recvfrom(server, bytes, sizeof bytes, 0, sender, &length), i * 300);
            FILLED(bytes, i * 300, (uint64_t)g.step * 10 + i);
            if (client_port == 0) client_port = ntohs(from.sin_port);
            EQ(ntohs(from.sin_port), i % 2 ? client_port : 7002);
        }
        FAILS(recv(server, bytes, 1, MSG_DONTWAIT), EAGAIN);
        EQ(recv(six, bytes, 10, 0), 3);
        EQ(port_of(connected, true), 7001);
        EQ(port_of(server, false), 7001);
        EQ(option(server, SOL_SOCKET, SO_RCVBUF), size);
        EQ(option(server, SOL_SOCKET, SO_BROADCAST), 1);
        EQ(option(server, IPPROTO_IP, IP_TTL), 33);
        // A connected socket takes nothing from others.
        struct sockaddr_in back = loopback(7002);
        EQ(sendto(client, "no", 2, 0, (struct sockaddr *)&back, sizeof back), 2);
        EQ(sendto(server, "yes", 3, 0, (struct sockaddr *)&back, sizeof back), 3);
        EQ(recv(connected, bytes, 10, 0), 3);
    }
    return guest_pass();
}
