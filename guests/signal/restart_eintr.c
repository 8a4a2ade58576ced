// Feature: interrupted system calls that Linux does not restart
// Proves: sigtimedwait, semtimedop, mq_timedreceive and timed recv, some of which the kernel ends
// with EINTR when a tracer stops the thread, still wait their whole time.
#include "restart.h"
#include <mqueue.h>
#include <sys/sem.h>

static int semaphore;
static mqd_t queue;

static void by_sigtimedwait(long ms) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    struct timespec time = after_ms(ms);
    FAILS(sigtimedwait(&set, NULL, &time), EAGAIN);
}
static void by_semaphore(long ms) {
    struct sembuf down = {.sem_op = -1};
    struct timespec time = after_ms(ms);
    FAILS(semtimedop(semaphore, &down, 1, &time), EAGAIN);
}
static void by_queue(long ms) {
    char text[16];
    struct timespec now;
    SYS(clock_gettime(CLOCK_REALTIME, &now));
    long nsec = now.tv_nsec + (ms + 1) * 1000000;
    now.tv_sec += nsec / 1000000000;
    now.tv_nsec = nsec % 1000000000;
    FAILS(mq_timedreceive(queue, text, sizeof text, NULL, &now), ETIMEDOUT);
}
static void by_socket(long ms) {
    int fd = (int)SYS(socket(AF_UNIX, SOCK_DGRAM, 0));
    // Rounded up to a whole tick of the kernel's timer.
    struct timeval time = {.tv_sec = (ms + 10) / 1000, .tv_usec = (ms + 10) % 1000 * 1000};
    SYS(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time));
    char byte;
    FAILS(recv(fd, &byte, 1, 0), EAGAIN);
    close(fd);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    PTH(pthread_sigmask(SIG_BLOCK, &set, NULL));
    semaphore = (int)SYS(semget(IPC_PRIVATE, 1, 0600));
    struct mq_attr attributes = {.mq_maxmsg = 2, .mq_msgsize = 16};
    queue = (mqd_t)SYS(mq_open("/restart_eintr", O_CREAT | O_RDWR, 0600, &attributes));
    SYS(mq_unlink("/restart_eintr"));
    static const struct blocker blockers[] = {
        {"sigtimedwait", by_sigtimedwait, false},
        {"semtimedop", by_semaphore, false},
        {"mq_timedreceive", by_queue, false},
        {"recv", by_socket, true},
    };
    RUN_BLOCKERS(blockers);
    return guest_pass();
}
