// Feature: registers with the full XSAVE area
// Proves: x87, MXCSR, xmm, ymm, zmm, mask registers and PKRU, as far as the processor has them, and
// every general register and GS base survive in threads that only spin in user code.
#include "guest.h"
#include <asm/prctl.h>
#include <cpuid.h>

#define AREA_MAX 16384
#define PKRU 9

struct spinner {
    uint8_t before[AREA_MAX], want[AREA_MAX], got[AREA_MAX];
    uint64_t want_registers[14], got_registers[14];
    _Atomic int go;
} __attribute__((aligned(64)));

static uint64_t mask;
static uint32_t sizes[64], offsets[64];
static _Atomic int finished;

static uint64_t xgetbv0(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static void find_components(void) {
    uint32_t a, b, c, d;
    __cpuid(1, a, b, c, d);
    CHECK(c & bit_OSXSAVE, "no XSAVE");
    mask = xgetbv0();
    __cpuid_count(0xd, 0, a, b, c, d);
    CHECK(b <= AREA_MAX, "area of %u bytes", b);
    for (uint32_t i = 2; i < 63; i++) {
        if (!(mask >> i & 1)) continue;
        __cpuid_count(0xd, i, a, b, c, d);
        // AMX tiles need a permission asked for first; leave them alone.
        if (i == 17 || i == 18) mask &= ~(1ull << i);
        sizes[i] = a;
        offsets[i] = b;
    }
    mask &= ~0x18ull; // MPX
}

// A legal area full of a pattern: exceptions stay masked, instruction pointers stay zero.
static void make_area(uint8_t *area, uint64_t seed) {
    memset(area, 0, AREA_MAX);
    area[0] = 0x7f;
    area[1] = (uint8_t)(0x03 | (seed % 4) << 2); // rounding mode
    area[4] = 0xff;                              // all x87 registers in use
    uint32_t mxcsr = 0x1f80 | (uint32_t)(seed % 4) << 13 | (uint32_t)(seed % 64);
    memcpy(area + 24, &mxcsr, 4);
    for (int i = 0; i < 8; i++) fill(area + 32 + 16 * i, 10, seed * 8 + (uint64_t)i);
    fill(area + 160, 256, seed);
    for (int i = 2; i < 63; i++)
        if (mask >> i & 1) fill(area + offsets[i], sizes[i], seed + (uint64_t)i);
    if (mask >> PKRU & 1) {
        memset(area + offsets[PKRU], 0, sizes[PKRU]);
        area[offsets[PKRU] + 1] = (uint8_t)(0x55 + seed % 2); // key 0 stays open
    }
    memcpy(area + 512, &mask, 8);
}

// Loads the pattern, spins until told to stop with nothing but registers holding it, stores it.
__attribute__((noinline)) static void spin_vector(struct spinner *s) {
    uint32_t low = (uint32_t)mask, high = (uint32_t)(mask >> 32);
    __asm__ volatile("xsave64 (%0)\n xrstor64 (%1)\n"
                     "1: pause\n cmpl $0, (%3)\n jne 1b\n"
                     "xsave64 (%2)\n xrstor64 (%0)\n"
                     :
                     : "r"(s->before), "r"(s->want), "r"(s->got), "r"(&s->go), "a"(low), "d"(high)
                     : "memory", "cc");
}

// The same for rbx, rcx, rdx, rsi, rbp and r8 to r15 (rdi points to the flag, rax to the values).
__attribute__((noinline)) static void spin_general(struct spinner *s) {
    __asm__ volatile(
        "push %%rbp\n push %%rbx\n push %%rax\n"
        "mov 0(%%rax),%%rbx\n mov 8(%%rax),%%rcx\n mov 16(%%rax),%%rdx\n mov 24(%%rax),%%rsi\n"
        "mov 32(%%rax),%%rbp\n mov 40(%%rax),%%r8\n mov 48(%%rax),%%r9\n mov 56(%%rax),%%r10\n"
        "mov 64(%%rax),%%r11\n mov 72(%%rax),%%r12\n mov 80(%%rax),%%r13\n mov 88(%%rax),%%r14\n"
        "mov 96(%%rax),%%r15\n mov 104(%%rax),%%rax\n"
        "1: pause\n cmpl $0, (%%rdi)\n jne 1b\n"
        "xchg %%rax, (%%rsp)\n"
        "mov %%rbx,112(%%rax)\n mov %%rcx,120(%%rax)\n mov %%rdx,128(%%rax)\n"
        "mov %%rsi,136(%%rax)\n mov %%rbp,144(%%rax)\n mov %%r8,152(%%rax)\n"
        "mov %%r9,160(%%rax)\n mov %%r10,168(%%rax)\n mov %%r11,176(%%rax)\n"
        "mov %%r12,184(%%rax)\n mov %%r13,192(%%rax)\n mov %%r14,200(%%rax)\n"
        "mov %%r15,208(%%rax)\n pop %%rcx\n mov %%rcx,216(%%rax)\n"
        "pop %%rbx\n pop %%rbp\n"
        :
        : "a"(s->want_registers), "D"(&s->go)
        : "rcx", "rdx", "rsi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory",
          "cc");
}

static void compare(const struct spinner *s) {
    static const struct { size_t at, length; } legacy[] = {{0, 5}, {24, 4}, {160, 256}};
    for (size_t i = 0; i < 3; i++)
        CHECK(!memcmp(s->want + legacy[i].at, s->got + legacy[i].at, legacy[i].length),
              "x87 or SSE state at %zu", legacy[i].at);
    for (size_t i = 0; i < 8; i++)
        CHECK(!memcmp(s->want + 32 + 16 * i, s->got + 32 + 16 * i, 10), "st%zu", i);
    for (int i = 2; i < 63; i++)
        if (mask >> i & 1)
            CHECK(!memcmp(s->want + offsets[i], s->got + offsets[i], sizes[i]), "component %d", i);
}

static struct spinner spinners[2];

static void *run_vector(void *argument) {
    spin_vector(argument);
    finished++;
    return NULL;
}
static void *run_general(void *argument) {
    uint64_t want = 0x7f1234560000, got = 0;
    SYS(syscall(SYS_arch_prctl, ARCH_SET_GS, want));
    spin_general(argument);
    SYS(syscall(SYS_arch_prctl, ARCH_GET_GS, &got));
    EQ(got, want);
    finished++;
    return NULL;
}

int main(int argc, char **argv) {
    guest_begin(argc, argv);
    find_components();
    STEPS {
        struct spinner *vector = &spinners[0], *general = &spinners[1];
        make_area(vector->want, (uint64_t)g.step);
        memset(vector->got, 0, AREA_MAX);
        fill(general->want_registers, sizeof general->want_registers, (uint64_t)g.step);
        vector->go = general->go = 1;
        finished = 0;
        pthread_t threads[] = {start(run_vector, vector), start(run_general, general)};
        nap();
        vector->go = general->go = 0;
        join(threads[0]);
        join(threads[1]);
        EQ(finished, 2);
        compare(vector);
        for (int i = 0; i < 14; i++)
            CHECK(general->want_registers[i] == general->got_registers[i], "register %d", i);
    }
    return guest_pass();
}
