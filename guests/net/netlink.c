// Feature: netlink sockets
// Proves: a NETLINK_ROUTE socket kept open goes on listing the interfaces, under its port id.
#include "guest.h"
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>

static uint32_t port_of(int fd) {
    struct sockaddr_nl name;
    socklen_t length = sizeof name;
    SYS(getsockname(fd, (struct sockaddr *)&name, &length));
    return name.nl_pid;
}
// Whether the answer to this request names the loopback interface.
static bool lists_loopback(int fd, uint32_t sequence) {
    char buffer[16384];
    bool found = false;
    for (;;) {
        unsigned length = (unsigned)SYS(recv(fd, buffer, sizeof buffer, 0));
        struct nlmsghdr *head = (struct nlmsghdr *)buffer;
        for (; NLMSG_OK(head, length); head = NLMSG_NEXT(head, length)) {
            EQ(head->nlmsg_seq, sequence);
            if (head->nlmsg_type == NLMSG_DONE) return found;
            EQ(head->nlmsg_type, RTM_NEWLINK);
            found |= ((struct ifinfomsg *)NLMSG_DATA(head))->ifi_flags & IFF_LOOPBACK;
        }
    }
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    int fd = (int)SYS(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE));
    struct sockaddr_nl name = {.nl_family = AF_NETLINK};
    SYS(bind(fd, (struct sockaddr *)&name, sizeof name));
    uint32_t port = port_of(fd);
    STEPS {
        nap();
        struct {
            struct nlmsghdr head;
            struct rtgenmsg body;
        } request = {{sizeof request, RTM_GETLINK, NLM_F_REQUEST | NLM_F_DUMP, 0, 0}, {AF_PACKET}};
        request.head.nlmsg_seq = (uint32_t)g.step;
        EQ(send(fd, &request, sizeof request, 0), sizeof request);
        CHECK(lists_loopback(fd, (uint32_t)g.step), "no loopback interface");
        EQ(port_of(fd), port);
    }
    return guest_pass();
}
