// Refused: AF_PACKET
// Feature: packet sockets
// Proves: a socket that captures packets is refused.
#include "refused.h"
#include <arpa/inet.h>
#include <linux/if_ether.h>

static int fd;
static void appear(void) { fd = (int)SYS(socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL))); }
static void use(void) {
    int kind = 0;
    socklen_t length = sizeof kind;
    SYS(getsockopt(fd, SOL_SOCKET, SO_TYPE, &kind, &length));
    EQ(kind, SOCK_RAW);
}
int main(int argc, char **argv) { return run_refused(argc, argv, appear, use); }
