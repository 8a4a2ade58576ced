// Feature: epoll
// Proves: registrations with their events, data, edge-triggered and one-shot state, of a descriptor
// and its dup, and of a nested epoll, report as before; no edge is lost, while one that was told
// may be told again.
#include "guest.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>

enum { LEVEL, EDGE, ONESHOT, DUP, OUTPUT, SILENT, COUNT };
static int outer, inner, fds[COUNT];

static void control(int epoll, int operation, int fd, uint32_t events, uint64_t data) {
    struct epoll_event event = {.events = events, .data.u64 = data};
    SYS(epoll_ctl(epoll, operation, fd, &event));
}
// The set of ready registrations as a bit mask; the upper half of data must be intact.
static unsigned ready(int epoll, uint32_t *events) {
    struct epoll_event got[COUNT + 1];
    unsigned mask = 0;
    long count = SYS(epoll_wait(epoll, got, COUNT + 1, 0));
    for (long i = 0; i < count; i++) {
        EQ(got[i].data.u64 >> 32, 0xfeedf00d);
        unsigned which = got[i].data.u64 & 0xff;
        CHECK(!(mask >> which & 1), "registration %u twice", which);
        mask |= 1u << which;
        if (events) *events |= got[i].events;
    }
    return mask;
}
// What is ready must be `want`. An edge that was told may be told once more after a takeover: no
// call shows which were, and a lost one would be waited for in vain.
static void expect(unsigned want, unsigned edges) {
    unsigned got = ready(inner, NULL);
    EQ(got & ~(edges & ~want), want);
}
static void raise_event(int fd) { put(fd, &(uint64_t){1}, 8); }
static void clear(int fd) { get(fd, &(uint64_t){0}, 8); }

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    outer = (int)SYS(epoll_create1(0));
    inner = (int)SYS(epoll_create1(EPOLL_CLOEXEC));
    static const uint32_t want[COUNT] = {EPOLLIN, EPOLLIN | EPOLLET, EPOLLIN | EPOLLONESHOT,
                                         EPOLLIN, EPOLLOUT | EPOLLET, EPOLLIN | EPOLLPRI};
    for (int i = 0; i < COUNT; i++) {
        fds[i] = i == DUP ? (int)SYS(dup(fds[LEVEL])) : (int)SYS(eventfd(0, EFD_NONBLOCK));
        control(inner, EPOLL_CTL_ADD, fds[i], want[i], 0xfeedf00d00000000 | (unsigned)i);
    }
    control(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 0xfeedf00d00000000 | COUNT);
    EQ(ready(inner, NULL), 1u << OUTPUT);
    unsigned edges = 1u << EDGE | 1u << OUTPUT;
    STEPS {
        expect(0, edges);
        expect(0, edges);
        EQ(ready(outer, NULL) & ~(1u << COUNT), 0);
        raise_event(fds[LEVEL]);
        raise_event(fds[EDGE]);
        raise_event(fds[ONESHOT]);
        EQ(ready(outer, NULL), 1u << COUNT);
        nap_ms(g.step_ms / 2);
        unsigned all = 1u << LEVEL | 1u << DUP;
        expect(all | 1u << EDGE | 1u << ONESHOT, edges);
        // The edge has been told and the one shot is spent; only the level is left.
        nap_ms(g.step_ms / 2);
        expect(all, edges);
        raise_event(fds[EDGE]);
        expect(all | 1u << EDGE, edges);
        clear(fds[LEVEL]);
        clear(fds[EDGE]);
        clear(fds[ONESHOT]);
        control(inner, EPOLL_CTL_MOD, fds[ONESHOT], want[ONESHOT], 0xfeedf00d00000000 | ONESHOT);
        struct epoll_event event = {0};
        FAILS(epoll_ctl(inner, EPOLL_CTL_ADD, fds[SILENT], &event), EEXIST);
        uint32_t events = 0;
        control(inner, EPOLL_CTL_MOD, fds[OUTPUT], want[OUTPUT], 0xfeedf00d00000000 | OUTPUT);
        EQ(ready(inner, &events), 1u << OUTPUT);
        EQ(events, EPOLLOUT);
    }
    return guest_pass();
}
