// Refused: bpf-map
// Feature: BPF maps
// Proves: a BPF map is refused: it lives in this host's kernel.
#include "refused.h"
#include <linux/bpf.h>

static int fd;
static void change(int command, uint32_t key, uint64_t *value) {
    union bpf_attr request = {.map_fd = (uint32_t)fd};
    request.key = (uintptr_t)&key;
    request.value = (uintptr_t)value;
    SYS(syscall(SYS_bpf, command, &request, sizeof request));
}
static void appear(void) {
    union bpf_attr request = {.map_type = BPF_MAP_TYPE_ARRAY, .key_size = 4, .value_size = 8};
    request.max_entries = 4;
    fd = (int)SYS(syscall(SYS_bpf, BPF_MAP_CREATE, &request, sizeof request));
}
static void use(void) {
    uint64_t value = (uint64_t)g.step, got = 0;
    change(BPF_MAP_UPDATE_ELEM, 2, &value);
    change(BPF_MAP_LOOKUP_ELEM, 2, &got);
    EQ(got, g.step);
}
int main(int argc, char **argv) { return run_refused(argc, argv, appear, use); }
