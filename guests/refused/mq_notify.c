// Refused: mq_notify
// Feature: notifications of message queues
// Proves: a process that waits for a notification by mq_notify is refused: what value it is to get
// cannot be read.
#include "refused.h"
#include <mqueue.h>

static mqd_t queue;
static volatile sig_atomic_t notified;
static void on_message(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    notified += info->si_code == SI_MESGQ && info->si_value.sival_int == 321;
}
static void ask(void) {
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    event.sigev_value.sival_int = 321;
    SYS(mq_notify(queue, &event));
}
static void appear(void) {
    struct mq_attr limits = {.mq_maxmsg = 8, .mq_msgsize = 200};
    queue = (mqd_t)SYS(mq_open("/watched", O_RDWR | O_CREAT | O_NONBLOCK, 0600, &limits));
    struct sigaction action = {.sa_sigaction = on_message, .sa_flags = SA_SIGINFO | SA_RESTART};
    SYS(sigaction(SIGUSR1, &action, NULL));
    ask();
}
static void use(void) {
    int before = notified;
    char byte[200];
    SYS(mq_send(queue, "x", 1, 0));
    EQ(notified, before + 1);
    EQ(mq_receive(queue, byte, sizeof byte, NULL), 1);
    ask();
}
int main(int argc, char **argv) { return run_refused(argc, argv, appear, use); }
