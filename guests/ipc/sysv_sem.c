// Feature: System V semaphores
// Proves: a set keeps id, key, values, last pids and waiters; the SEM_UNDO of a process that
// dies after a move is carried out.
#include "guest.h"
#include <sys/ipc.h>
#include <sys/sem.h>

#define KEY 0x48530002
static int id;
static void change(unsigned short which, short by, short flags) {
    struct sembuf one = {which, by, flags};
    // Linux ends semop with EINTR for any stop; restart_eintr.c looks at that.
    while (semop(id, &one, 1) < 0) EQ(errno, EINTR);
}
static int value(int which) { return (int)SYS(semctl(id, which, GETVAL)); }

static long undo_later(long step) {
    if (step > 0) change(1, -1, SEM_UNDO);
    // The other way round, and more than what is there in the end.
    if (step > 0) {
        change(3, (short)(500 + step), SEM_UNDO);
        change(3, -500, 0);
    }
    return 0;
}
static _Atomic long woken;
static void *waiter(void *argument) {
    for (int step = 1; step <= g.steps; step++) {
        change(2, -1, 0);
        woken++;
    }
    return argument;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    SYS(semctl((int)SYS(semget(IPC_PRIVATE, 1, 0600)), 0, IPC_RMID));
    id = (int)SYS(semget(KEY, 4, IPC_CREAT | IPC_EXCL | 0640));
    unsigned short values[] = {100, 7, 0, 1000};
    SYS(semctl(id, 0, SETALL, values));
    pthread_t thread = start(waiter, NULL);
    STEPS {
        struct peer peer = peer_start(undo_later);
        peer_ask(&peer, g.step);
        change(0, 3, 0);
        EQ(value(1), 6);
        EQ(SYS(semctl(id, 1, GETPID)), peer.pid);
        while (SYS(semctl(id, 2, GETNCNT)) == 0) nap_ms(1);
        nap();
        EQ(semget(KEY, 0, 0), id);
        EQ(value(0), 100 + 3 * g.step);
        EQ(value(1), 6);
        EQ(SYS(semctl(id, 0, GETPID)), getpid());
        for (int i = 1; i < 4; i += 2) EQ(SYS(semctl(id, i, GETPID)), peer.pid);
        while (SYS(semctl(id, 2, GETNCNT)) == 0) nap_ms(1);
        EQ(woken, g.step - 1);
        struct semid_ds status;
        SYS(semctl(id, 0, IPC_STAT, &status));
        EQ(status.sem_nsems, 4);
        EQ(value(3), 1000 + g.step);
        EQ(status.sem_perm.mode & 0777, 0640);
        struct sembuf taken = {1, -7, IPC_NOWAIT};
        FAILS(semop(id, &taken, 1), EAGAIN);
        peer_end(&peer);
        EQ(value(1), 7);
        EQ(value(3), 500);
        SYS(semctl(id, 3, SETVAL, 1000));
        change(2, 1, 0);
        while (woken < g.step) nap_ms(1);
    }
    join(thread);
    SYS(semctl(id, 0, IPC_RMID));
    return guest_pass();
}
