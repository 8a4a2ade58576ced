// Sockets on the loopback interface.
#ifndef INET_H
#define INET_H
#include "guest.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

HELPER struct sockaddr_in loopback(uint16_t port) {
    return (struct sockaddr_in){.sin_family = AF_INET,
                                .sin_port = htons(port),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}
HELPER int bound_socket(int type, uint16_t port) {
    int fd = (int)SYS(socket(AF_INET, type, 0)), one = 1;
    SYS(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one));
    struct sockaddr_in address = loopback(port);
    SYS(bind(fd, (struct sockaddr *)&address, sizeof address));
    return fd;
}
HELPER int listening(uint16_t port, int backlog) {
    int fd = bound_socket(SOCK_STREAM, port);
    SYS(listen(fd, backlog));
    return fd;
}
HELPER int dial(uint16_t port) {
    int fd = (int)SYS(socket(AF_INET, SOCK_STREAM, 0));
    struct sockaddr_in address = loopback(port);
    SYS(connect(fd, (struct sockaddr *)&address, sizeof address));
    return fd;
}
// Both ends of one connection: [0] dialled, [1] accepted.
HELPER void connected_pair(uint16_t port, int ends[2]) {
    int listener = listening(port, 1);
    ends[0] = dial(port);
    ends[1] = (int)SYS(accept(listener, NULL, NULL));
    close(listener);
}
HELPER int option(int fd, int level, int name) {
    int value = 0;
    socklen_t length = sizeof value;
    SYS(getsockopt(fd, level, name, &value, &length));
    return value;
}
HELPER void set_option(int fd, int level, int name, int value) {
    SYS(setsockopt(fd, level, name, &value, sizeof value));
}
HELPER uint16_t port_of(int fd, bool of_peer) {
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    if (of_peer) SYS(getpeername(fd, (struct sockaddr *)&address, &length));
    else SYS(getsockname(fd, (struct sockaddr *)&address, &length));
    EQ(address.sin_addr.s_addr, htonl(INADDR_LOOPBACK));
    return ntohs(address.sin_port);
}

#endif
