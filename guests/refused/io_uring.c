// Refused: anon_inode:[io_uring]
// Feature: io_uring
// Proves: a ring that runs one no-op a round is refused: its requests in flight cannot be seen.
#include "refused.h"
#include <linux/io_uring.h>

static struct io_uring_params ring;
static uint8_t *queues;
static struct io_uring_sqe *entries;
static int fd;

static void appear(void) {
    fd = (int)SYS(syscall(SYS_io_uring_setup, 4, &ring));
    queues = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, IORING_OFF_SQ_RING);
    entries = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, IORING_OFF_SQES);
    CHECK(queues != MAP_FAILED && entries != MAP_FAILED);
}
static void use(void) {
    _Atomic uint32_t *tail = (void *)(queues + ring.sq_off.tail);
    _Atomic uint32_t *head = (void *)(queues + ring.cq_off.head);
    uint32_t at = *tail % ring.sq_entries;
    entries[at] = (struct io_uring_sqe){.opcode = IORING_OP_NOP, .user_data = (uint64_t)g.step};
    ((uint32_t *)(queues + ring.sq_off.array))[at] = at;
    ++*tail;
    EQ(SYS(syscall(SYS_io_uring_enter, fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0)), 1);
    struct io_uring_cqe *done = (void *)(queues + ring.cq_off.cqes);
    EQ(done[*head % ring.cq_entries].user_data, g.step);
    ++*head;
}
int main(int argc, char **argv) { return run_refused(argc, argv, appear, use); }
