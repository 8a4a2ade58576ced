// Feature: fork tree
// Proves: seven processes in three generations keep their pids, parents, pipes and private copies
// of forked memory.
#include "guest.h"

static uint8_t memory[3 * PAGE];
static struct peer children[2];
static pid_t self, parent;
static int depth;

// Each process counts its subtree after checking itself; its memory differs from its parent's.
static long count_subtree(long question) {
    EQ(getpid(), self);
    EQ(getppid(), parent);
    FILLED(memory, sizeof memory, (uint64_t)(self + question - 1));
    fill(memory, sizeof memory, (uint64_t)(self + question));
    long count = 1;
    for (int i = 0; depth < 2 && i < 2; i++) count += peer_ask(&children[i], question);
    return count;
}

static long first_question(long question) {
    if (question == 0) {
        parent = self;
        self = getpid();
        fill(memory, sizeof memory, (uint64_t)self);
        depth++;
        for (int i = 0; depth < 2 && i < 2; i++) {
            children[i] = peer_start(first_question);
            EQ(peer_ask(&children[i], 0), 0);
        }
        return 0;
    }
    return count_subtree(question);
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    self = getpid();
    parent = getppid();
    fill(memory, sizeof memory, (uint64_t)self);
    for (int i = 0; i < 2; i++) {
        children[i] = peer_start(first_question);
        EQ(peer_ask(&children[i], 0), 0);
    }
    STEPS {
        EQ(count_subtree(g.step), 7);
        nap();
    }
    for (int i = 0; i < 2; i++) peer_end(&children[i]);
    return guest_pass();
}
