// Feature: System V shared memory
// Proves: segments by key and private, attached in two processes, one marked for removal, keep id,
// key, contents, mode and attach count.
#include "guest.h"
#include <sys/ipc.h>
#include <sys/shm.h>

#define KEY 0x48530001
#define SIZE (8 * PAGE + 100)
static uint8_t *keyed, *removed;

static long answer(long step) {
    FILLED(keyed, SIZE, (uint64_t)step);
    FILLED(removed, SIZE, (uint64_t)step + 1);
    fill(keyed, SIZE, (uint64_t)step + 2);
    return 0;
}
static void *attach(int id, int flags) {
    void *at = shmat(id, NULL, flags);
    CHECK(at != (void *)-1, "shmat");
    return at;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    // One made and removed at once, so that ids do not start from zero.
    SYS(shmctl((int)SYS(shmget(IPC_PRIVATE, PAGE, 0600)), IPC_RMID, NULL));
    int key_id = (int)SYS(shmget(KEY, SIZE, IPC_CREAT | IPC_EXCL | 0640));
    int gone_id = (int)SYS(shmget(IPC_PRIVATE, SIZE, 0600));
    int idle_id = (int)SYS(shmget(KEY + 1, PAGE, IPC_CREAT | 0600));
    keyed = attach(key_id, 0);
    removed = attach(gone_id, 0);
    uint8_t *idle = attach(idle_id, 0);
    fill(idle, PAGE, 9);
    SYS(shmdt(idle));
    uint8_t *read_only = attach(key_id, SHM_RDONLY);
    struct peer peer = peer_start(answer);
    SYS(shmctl(gone_id, IPC_RMID, NULL));
    STEPS {
        fill(keyed, SIZE, (uint64_t)g.step);
        fill(removed, SIZE, (uint64_t)g.step + 1);
        nap();
        peer_ask(&peer, g.step);
        FILLED(read_only, SIZE, (uint64_t)g.step + 2);
        EQ(shmget(KEY, 0, 0), key_id);
        struct shmid_ds status;
        SYS(shmctl(key_id, IPC_STAT, &status));
        EQ(status.shm_segsz, SIZE);
        EQ(status.shm_perm.mode & 0777, 0640);
        EQ(status.shm_nattch, 4);
        EQ(status.shm_cpid, getpid());
        // The child attached by fork, which does not count as use.
        EQ(status.shm_lpid, getpid());
        SYS(shmctl(gone_id, IPC_STAT, &status));
        EQ(status.shm_perm.mode & SHM_DEST, SHM_DEST);
        EQ(status.shm_nattch, 2);
        // Nobody has this one attached between two rounds.
        idle = attach(idle_id, 0);
        FILLED(idle, PAGE, 9);
        SYS(shmdt(idle));
    }
    peer_end(&peer);
    SYS(shmdt(removed));
    FAILS(shmctl(gone_id, IPC_STAT, &(struct shmid_ds){0}), EINVAL);
    return guest_pass();
}
