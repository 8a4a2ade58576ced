// Refused: anon_inode:[perf_event]
// Feature: performance counters
// Proves: a perf_event descriptor is refused: its counts belong to this host's processor.
#include "refused.h"
#include <linux/perf_event.h>

static int fd;
static uint64_t last;
static void appear(void) {
    struct perf_event_attr what = {.type = PERF_TYPE_SOFTWARE, .size = sizeof what};
    what.config = PERF_COUNT_SW_TASK_CLOCK;
    fd = (int)SYS(syscall(SYS_perf_event_open, &what, 0, -1, -1, 0));
}
static void use(void) {
    uint64_t now;
    get(fd, &now, sizeof now);
    CHECK(now > last);
    last = now;
}
int main(int argc, char **argv) { return run_refused(argc, argv, appear, use); }
