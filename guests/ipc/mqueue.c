// Feature: POSIX message queues
// Proves: queued messages keep priority, order and contents, descriptors their flags and the queue
// its limits, also after its name is gone; a notification asked for once comes once.
#include "guest.h"
#include <mqueue.h>

static volatile sig_atomic_t notified;
static void on_message(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    notified += info->si_code == SI_MESGQ && info->si_value.sival_int == 321;
}

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
    SYS(mq_unlink("/gone"));
    mqd_t watched = (mqd_t)SYS(mq_open("/watched", O_RDWR | O_CREAT | O_NONBLOCK, 0600, &limits));
    struct sigaction action = {.sa_sigaction = on_message, .sa_flags = SA_SIGINFO | SA_RESTART};
    SYS(sigaction(SIGUSR1, &action, NULL));
    STEPS {
        struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
        event.sigev_value.sival_int = 321;
        SYS(mq_notify(watched, &event));
        exchange(g.step % 2 ? named : unnamed);
        SYS(mq_getattr(g.step % 2 ? unnamed : named, &got));
        EQ(got.mq_maxmsg, 8);
        EQ(got.mq_msgsize, 200);
        EQ(got.mq_curmsgs, 0);
        EQ(got.mq_flags, O_NONBLOCK);
        FAILS(mq_open("/gone", O_RDWR), ENOENT);
        mqd_t again = (mqd_t)SYS(mq_open("/watched", O_WRONLY));
        EQ(notified, g.step - 1);
        SYS(mq_send(again, "x", 1, 0));
        EQ(notified, g.step);
        char byte[200];
        EQ(mq_receive(watched, byte, sizeof byte, NULL), 1);
        SYS(mq_close(again));
    }
    SYS(mq_unlink("/named"));
    SYS(mq_unlink("/watched"));
    return guest_pass();
}
