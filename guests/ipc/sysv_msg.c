// Feature: System V message queues
// Proves: queued messages keep type, length, contents and order, and the queue its id, key, limit
// and last users; a receiver that waits for one type gets only that.
#include "guest.h"
#include <sys/ipc.h>
#include <sys/msg.h>

#define KEY 0x48530003
struct message {
    long type;
    uint8_t bytes[1000];
};
static int id;
static _Atomic long received;

static void *receiver(void *argument) {
    struct message message;
    for (int step = 1; step <= g.steps; step++) {
        EQ(SYS(msgrcv(id, &message, sizeof message.bytes, 99, 0)), 8);
        FILLED(message.bytes, 8, (uint64_t)step);
        received++;
    }
    return argument;
}

// Another process takes the last one.
static long take_one(long step) {
    struct message message;
    if (step == 0) return 0;
    EQ(SYS(msgrcv(id, &message, sizeof message.bytes, 50, 0)), 0);
    return 0;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    SYS(msgctl((int)SYS(msgget(IPC_PRIVATE, 0600)), IPC_RMID, NULL));
    id = (int)SYS(msgget(KEY, IPC_CREAT | IPC_EXCL | 0620));
    struct msqid_ds status;
    SYS(msgctl(id, IPC_STAT, &status));
    status.msg_qbytes = 9000;
    SYS(msgctl(id, IPC_SET, &status));
    struct peer peer = peer_start(take_one);
    pthread_t thread = start(receiver, NULL);
    struct message message;
    STEPS {
        for (int i = 1; i <= 6; i++) {
            message.type = i % 3 + 1;
            fill(message.bytes, (size_t)i * 100, (uint64_t)(g.step * 10 + i));
            SYS(msgsnd(id, &message, (size_t)i * 100, 0));
        }
        message.type = 50;
        SYS(msgsnd(id, &message, 0, 0));
        peer_ask(&peer, g.step);
        nap();
        EQ(received, g.step - 1);
        EQ(msgget(KEY, 0), id);
        SYS(msgctl(id, IPC_STAT, &status));
        EQ(status.msg_qnum, 6);
        EQ(status.msg_qbytes, 9000);
        EQ(status.msg_lspid, getpid());
        EQ(status.msg_lrpid, peer.pid);
        // Those of type 3 first, then the rest in order.
        static const int order[] = {2, 5, 1, 3, 4, 6};
        for (int i = 0; i < 6; i++) {
            long type = i < 2 ? 3 : 0;
            long length = SYS(msgrcv(id, &message, sizeof message.bytes, type, IPC_NOWAIT));
            EQ(length, order[i] * 100);
            EQ(message.type, order[i] % 3 + 1);
            FILLED(message.bytes, (size_t)length, (uint64_t)(g.step * 10 + order[i]));
        }
        message.type = 99;
        fill(message.bytes, 8, (uint64_t)g.step);
        SYS(msgsnd(id, &message, 8, 0));
        while (received < g.step) nap_ms(1);
    }
    join(thread);
    peer_end(&peer);
    SYS(msgctl(id, IPC_RMID, NULL));
    return guest_pass();
}
