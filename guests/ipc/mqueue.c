// Feature: POSIX message queues
// Proves: queued messages keep priority, order and contents, descriptors their flags and the queue
// its limits, also after its name is gone or belongs to another queue.
#include "guest.h"
#include <mqueue.h>

static void exchange(mqd_t queue) {
    uint8_t bytes[200];
    unsigned priority;
    for (unsigned i = 0; i < 6; i++) {
        fill(bytes, 50 + i, (uint64_t)g.step * 10 + i);
        SYS(mq_send(queue, (char *)bytes, 50 + i, i % 3 * 1000));
    }
    nap();
    static const unsigned order[] = {2, 5, 1, 4, 0, 3};
    for (unsigned i = 0; i < 6; i++) {
        EQ(mq_receive(queue, (char *)bytes, sizeof bytes, &priority), 50 + order[i]);
        EQ(priority, order[i] % 3 * 1000);
        FILLED(bytes, 50 + order[i], (uint64_t)g.step * 10 + order[i]);
    }
    FAILS(mq_receive(queue, (char *)bytes, sizeof bytes, NULL), EAGAIN);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    struct mq_attr limits = {.mq_maxmsg = 8, .mq_msgsize = 200}, got;
    mqd_t named = (mqd_t)SYS(mq_open("/named", O_RDWR | O_CREAT | O_NONBLOCK, 0600, &limits));
    mqd_t unnamed = (mqd_t)SYS(mq_open("/gone", O_RDWR | O_CREAT | O_NONBLOCK, 0600, &limits));
    // Another description of it, of another mode.
    mqd_t writer = (mqd_t)SYS(mq_open("/gone", O_WRONLY));
    SYS(mq_unlink("/gone"));
    mqd_t gone = (mqd_t)SYS(mq_open("/reused", O_RDWR | O_CREAT | O_NONBLOCK, 0600, &limits));
    SYS(mq_unlink("/reused"));
    mqd_t reused = (mqd_t)SYS(mq_open("/reused", O_RDWR | O_CREAT | O_NONBLOCK, 0600, &limits));
    SYS(mq_send(gone, "of the old one", 14, 7));
    STEPS {
        exchange(g.step % 2 ? named : unnamed);
        SYS(mq_getattr(g.step % 2 ? unnamed : named, &got));
        EQ(got.mq_maxmsg, 8);
        EQ(got.mq_msgsize, 200);
        EQ(got.mq_curmsgs, 0);
        EQ(got.mq_flags, O_NONBLOCK);
        FAILS(mq_open("/gone", O_RDWR), ENOENT);
        char bytes[200];
        SYS(mq_send(writer, "x", 1, 0));
        FAILS(mq_receive(writer, bytes, sizeof bytes, NULL), EBADF);
        EQ(mq_receive(unnamed, bytes, sizeof bytes, NULL), 1);
        mqd_t again = (mqd_t)SYS(mq_open("/reused", O_WRONLY));
        SYS(mq_send(again, "to the new", 10, 0));
        EQ(mq_receive(reused, bytes, sizeof bytes, NULL), 10);
        SYS(mq_close(again));
        SYS(mq_getattr(gone, &got));
        EQ(got.mq_curmsgs, 1);
    }
    char bytes[200];
    unsigned priority;
    EQ(mq_receive(gone, bytes, sizeof bytes, &priority), 14);
    EQ(priority, 7);
    CHECK(!memcmp(bytes, "of the old one", 14));
    SYS(mq_unlink("/named"));
    SYS(mq_unlink("/reused"));
    return guest_pass();
}
