// What every guest program shares: a log, a step loop, checks that say what they wanted, and
// small helpers. A guest is run as `PROGRAM OUTFILE`; see README.md for the protocol.
#ifndef GUEST_H
#define GUEST_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define HELPER __attribute__((unused)) static
#define PAGE 4096ul
// A blocking call may take this much longer than asked for: a takeover can fall into it.
#define LATE_MS_MAX 20000
// Descriptors of the log and of the peers are kept out of the low numbers that guests look at.
#define LOG_FD 300

static struct {
    int steps;      // rounds to run, GUEST_STEPS
    int step_ms;    // length of a round, GUEST_STEP_MS
    int step;       // round under way, from 1; 0 during set-up
    pid_t main_pid; // the process whose exit status is the verdict
    char dir[PATH_MAX];
} g;

HELPER void say(const char *line) {
    size_t length = strlen(line), done = 0;
    while (done < length) {
        ssize_t n = write(LOG_FD, line + done, length - done);
        if (n < 0 && errno != EINTR) _exit(1);
        if (n > 0) done += (size_t)n;
    }
}

// Writes the FAIL line and ends the program; in a child process it ends the main process too.
__attribute__((unused, noreturn, format(printf, 4, 5))) static void
guest_fail(const char *file, int line, const char *what, const char *format, ...) {
    int error = errno;
    char detail[512] = "", text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(detail, sizeof detail, format, arguments);
    va_end(arguments);
    const char *base = strrchr(file, '/') ? strrchr(file, '/') + 1 : file;
    snprintf(text, sizeof text, "FAIL step %d: %s:%d: %s%s%s (errno %d: %s)\n", g.step, base, line,
             what, *detail ? ": " : "", detail, error, strerror(error));
    say(text);
    if (write(2, text, strlen(text)) < 0) _exit(2);
    if (getpid() != g.main_pid) kill(g.main_pid, SIGKILL);
    _exit(1);
}

// The claim must hold; more arguments are a printf message.
#define CHECK(claim, ...)                                                                          \
    do {                                                                                           \
        if (!(claim)) guest_fail(__FILE__, __LINE__, #claim, " " __VA_ARGS__);                     \
    } while (0)
// Two integers must be equal.
#define EQ(got, want)                                                                              \
    do {                                                                                           \
        long long got_ = (long long)(got), want_ = (long long)(want);                              \
        if (got_ != want_)                                                                         \
            guest_fail(__FILE__, __LINE__, #got, "expected %lld, got %lld", want_, got_);          \
    } while (0)
// A call in the manner of libc, -1 and errno on failure; the value is its result.
#define SYS(call)                                                                                  \
    ({                                                                                             \
        errno = 0;                                                                                 \
        long result_ = (long)(call);                                                               \
        if (result_ == -1) guest_fail(__FILE__, __LINE__, #call, "failed");                        \
        result_;                                                                                   \
    })
// A call in the manner of pthreads, 0 or an error number.
#define PTH(call)                                                                                  \
    do {                                                                                           \
        errno = (call);                                                                            \
        if (errno) guest_fail(__FILE__, __LINE__, #call, "failed");                                \
    } while (0)
// The call must fail with this errno.
#define FAILS(call, error)                                                                         \
    do {                                                                                           \
        errno = 0;                                                                                 \
        long result_ = (long)(call);                                                               \
        if (result_ != -1 || errno != (error))                                                     \
            guest_fail(__FILE__, __LINE__, #call, "expected %s, got %ld", #error, result_);        \
    } while (0)

HELPER void step_done(void) {
    char line[64];
    snprintf(line, sizeof line, "step %d ok\n", g.step);
    say(line);
    g.step++;
}
#define STEPS for (g.step = 1; g.step <= g.steps; step_done())

HELPER int number_from_env(const char *name, int otherwise) {
    const char *text = getenv(name);
    int value = text ? atoi(text) : 0;
    return value > 0 ? value : otherwise;
}

// Opens the log and reads the environment. Called first by every guest.
HELPER void guest_resume(const char *outfile, int flags) {
    g.steps = number_from_env("GUEST_STEPS", 60);
    g.step_ms = number_from_env("GUEST_STEP_MS", 50);
    g.main_pid = getpid();
    const char *slash = strrchr(outfile, '/');
    int length = slash ? (int)(slash - outfile) : 1;
    snprintf(g.dir, sizeof g.dir, "%.*s", length, slash ? outfile : ".");
    int fd = open(outfile, O_WRONLY | O_CREAT | O_APPEND | flags, 0644);
    if (fd < 0 || dup3(fd, LOG_FD, O_CLOEXEC) < 0) {
        perror(outfile);
        exit(1);
    }
    close(fd);
}
HELPER void guest_begin(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: %s OUTFILE\n", argv[0]);
        exit(2);
    }
    guest_resume(argv[1], O_TRUNC);
}
HELPER int guest_pass(void) {
    say("PASS\n");
    return 0;
}

// A path next to OUTFILE; the last eight stay valid.
HELPER const char *beside(const char *name) {
    static char paths[8][PATH_MAX + 64];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", g.dir, name);
    return path;
}

HELPER int64_t clock_ns(clockid_t clock) {
    struct timespec now;
    SYS(clock_gettime(clock, &now));
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}
HELPER int64_t mono_ms(void) { return clock_ns(CLOCK_MONOTONIC) / 1000000; }
HELPER struct timespec after_ms(long ms) {
    return (struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
}
// Blocks for this long, over any signal handlers.
HELPER void nap_ms(long ms) {
    struct timespec rest = after_ms(ms);
    int error;
    while ((error = clock_nanosleep(CLOCK_MONOTONIC, 0, &rest, &rest)) == EINTR) continue;
    EQ(error, 0);
}
// What is left of a round is spent here, with the state under test in the kernel's hands.
HELPER void nap(void) { nap_ms(g.step_ms); }

// A reproducible byte pattern (xorshift64), different for each seed.
HELPER uint64_t mix(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}
HELPER uint64_t seeded(uint64_t seed) { return (seed + 1) * 0x9e3779b97f4a7c15ull | 1; }
HELPER void fill(void *memory, size_t length, uint64_t seed) {
    uint64_t state = seeded(seed);
    for (size_t at = 0; at < length; at += 8) {
        uint64_t word = mix(&state);
        memcpy((uint8_t *)memory + at, &word, length - at < 8 ? length - at : 8);
    }
}
HELPER void check_bytes(const char *file, int line, const uint8_t *got, const void *want,
                        size_t length, size_t at) {
    for (size_t i = 0; i < length; i++)
        if (got[at + i] != ((const uint8_t *)want)[i])
            guest_fail(file, line, "content", "byte %zu: expected %02x, got %02x", at + i,
                       ((const uint8_t *)want)[i], got[at + i]);
}
#define FILLED(memory, length, seed) check_fill(__FILE__, __LINE__, memory, length, seed)
HELPER void check_fill(const char *file, int line, const void *memory, size_t length,
                       uint64_t seed) {
    uint64_t state = seeded(seed);
    for (size_t at = 0; at < length; at += 8) {
        uint64_t word = mix(&state);
        size_t part = length - at < 8 ? length - at : 8;
        if (memcmp((const uint8_t *)memory + at, &word, part))
            check_bytes(file, line, memory, &word, part, at);
    }
}
#define ZEROS(memory, length) check_zeros(__FILE__, __LINE__, memory, length)
HELPER void check_zeros(const char *file, int line, const void *memory, size_t length) {
    static const uint8_t zeros[PAGE];
    for (size_t at = 0; at < length; at += PAGE) {
        size_t part = length - at < PAGE ? length - at : PAGE;
        if (memcmp((const uint8_t *)memory + at, zeros, part))
            check_bytes(file, line, memory, zeros, part, at);
    }
}

HELPER void *map_anon(size_t length, int protection, int flags) {
    void *memory = mmap(NULL, length, protection, MAP_ANONYMOUS | flags, -1, 0);
    CHECK(memory != MAP_FAILED, "mmap %zu", length);
    return memory;
}
// Replaces whatever is mapped there.
HELPER void map_fixed(void *at, size_t length, int protection, int flags) {
    flags |= MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    CHECK(mmap(at, length, protection, flags, -1, 0) == at, "mmap %p", at);
}
HELPER pthread_t start(void *(*body)(void *), void *argument) {
    pthread_t thread;
    PTH(pthread_create(&thread, NULL, body, argument));
    return thread;
}
HELPER void join(pthread_t thread) { PTH(pthread_join(thread, NULL)); }
// Waits for this child and demands this exit status.
HELPER void reap(pid_t pid, int status) {
    int got = -1;
    pid_t who;
    while ((who = waitpid(pid, &got, 0)) < 0 && errno == EINTR) continue;
    EQ(who, pid);
    CHECK(WIFEXITED(got) && WEXITSTATUS(got) == status, "wait status %#x, wanted exit %d", got,
          status);
}
// Reads or writes exactly this many bytes.
HELPER void put(int fd, const void *bytes, size_t length) {
    ssize_t n;
    while ((n = write(fd, bytes, length)) < 0 && errno == EINTR) continue;
    EQ(n, length);
}
HELPER void get(int fd, void *bytes, size_t length) {
    for (size_t done = 0; done < length;) {
        ssize_t n = read(fd, (char *)bytes + done, length - done);
        if (n < 0 && errno == EINTR) continue;
        CHECK(n > 0, "read gave %zd after %zu of %zu bytes", n, done, length);
        done += (size_t)n;
    }
}
HELPER void put_long(int fd, long value) { put(fd, &value, sizeof value); }
HELPER long get_long(int fd) {
    long value;
    get(fd, &value, sizeof value);
    return value;
}
// First line of a /proc file that starts with this key, without the key.
HELPER const char *proc_line(const char *path, const char *key) {
    static _Thread_local char line[512];
    FILE *file = fopen(path, "re");
    CHECK(file, "open %s", path);
    bool found = false;
    while (!found && fgets(line, sizeof line, file)) found = !strncmp(line, key, strlen(key));
    fclose(file);
    CHECK(found, "no %s in %s", key, path);
    return line + strlen(key);
}

// A child process that answers questions until it is asked PEER_END or its pipe is closed.
#define PEER_END LONG_MIN
struct peer {
    pid_t pid;
    int to, from;
};
HELPER struct peer peer_start(long (*answer)(long question)) {
    int there[2], back[2];
    SYS(pipe2(there, O_CLOEXEC));
    SYS(pipe2(back, O_CLOEXEC));
    pid_t pid = (pid_t)SYS(fork());
    if (pid == 0) {
        long question;
        close(there[1]);
        close(back[0]);
        while (read(there[0], &question, sizeof question) == sizeof question) {
            if (question == PEER_END) break;
            g.step = (int)question;
            put_long(back[1], answer(question));
        }
        _exit(0);
    }
    close(there[0]);
    close(back[1]);
    return (struct peer){.pid = pid, .to = there[1], .from = back[0]};
}
HELPER long peer_ask(struct peer *peer, long question) {
    put_long(peer->to, question);
    return get_long(peer->from);
}
HELPER void peer_end(struct peer *peer) {
    put_long(peer->to, PEER_END);
    reap(peer->pid, 0);
    close(peer->to);
    close(peer->from);
}

#endif
