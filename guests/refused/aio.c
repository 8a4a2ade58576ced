// Refused: /[aio]
// Feature: kernel AIO
// Proves: an io_setup context, a mapping that belongs to this kernel, is refused.
#include "refused.h"
#include <linux/aio_abi.h>

static aio_context_t context;
static int fd;

static void appear(void) {
    SYS(syscall(SYS_io_setup, 8, &context));
    fd = (int)SYS(open(beside("aio"), O_RDWR | O_CREAT, 0600));
}
static void use(void) {
    long value = g.step;
    struct iocb one = {.aio_lio_opcode = IOCB_CMD_PWRITE, .aio_fildes = (uint32_t)fd};
    one.aio_buf = (uintptr_t)&value;
    one.aio_nbytes = sizeof value;
    one.aio_data = (uint64_t)g.step;
    struct iocb *list[] = {&one};
    struct io_event done = {0};
    EQ(SYS(syscall(SYS_io_submit, context, 1, list)), 1);
    EQ(SYS(syscall(SYS_io_getevents, context, 1, 1, &done, NULL)), 1);
    EQ(done.data, g.step);
    EQ(done.res, sizeof value);
}
int main(int argc, char **argv) { return run_refused(argc, argv, appear, use); }
