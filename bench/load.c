// The load of `cargo xtask bench scale`: a program that is as large, as busy and as many as it is
// told, and does nothing else.
//
//   load [--memory-mb N] [--pages-per-s N] [--threads N] [--wakes-per-s N] [--processes N]
//        [--mappings N] [--port N]
//
// --memory-mb    anonymous memory, filled with numbers that do not compress well
// --pages-per-s  pages of it that are written to, at random places, a thousand times a second
// --threads      threads besides the first, asleep
// --wakes-per-s  how often each of them wakes up and writes to its stack
// --processes    children, each with a page of its own that it wrote to, asleep
// --mappings     mappings of one page each, that cannot be merged
// --port         listens there, accepts what comes and answers nothing
//
// Says `ready` when all of that is there. Needs libc only.
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define SECOND 1000000000L

static long wakes_per_s;

static void die(const char *doing)
{
	fprintf(stderr, "load: %s: %s\n", doing, strerror(errno));
	exit(1);
}

// xorshift64*: good enough that no page is like another.
static uint64_t roll(uint64_t *state)
{
	*state ^= *state >> 12;
	*state ^= *state << 25;
	*state ^= *state >> 27;
	return *state * 2685821657736338717UL;
}

static void *map(size_t bytes)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (at == MAP_FAILED)
		die("map memory");
	return at;
}

static void sleep_until(struct timespec *due, long ns)
{
	due->tv_nsec += ns;
	while (due->tv_nsec >= SECOND) {
		due->tv_nsec -= SECOND;
		due->tv_sec++;
	}
	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, due, NULL) == EINTR)
		;
}

static void *sleeper(void *unused)
{
	volatile long woken = 0;
	struct timespec due;
	clock_gettime(CLOCK_MONOTONIC, &due);
	while (wakes_per_s) {
		sleep_until(&due, SECOND / wakes_per_s);
		woken++;
	}
	for (;;)
		pause();
	return unused;
}

static void *acceptor(void *listener)
{
	for (;;)
		if (accept((int)(intptr_t)listener, NULL, NULL) < 0 && errno != ECONNABORTED)
			die("accept a connection");
	return NULL;
}

static void start(void *(*work)(void *), void *argument)
{
	pthread_attr_t attributes;
	pthread_t thread;
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, 64 << 10);
	errno = pthread_create(&thread, &attributes, work, argument);
	if (errno)
		die("start a thread");
}

static void serve(long port)
{
	struct rlimit files;
	getrlimit(RLIMIT_NOFILE, &files);
	files.rlim_cur = files.rlim_max;
	setrlimit(RLIMIT_NOFILE, &files);
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(port) };
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 4096))
		die("listen");
	start(acceptor, (void *)(intptr_t)listener);
}

static void fork_children(long count)
{
	for (long child = 0; child < count; child++) {
		int pid = fork();
		if (pid < 0)
			die("start a process");
		if (pid == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			*(volatile long *)map(PAGE) = child;
			for (;;)
				pause();
		}
	}
}

static void map_many(long count)
{
	// Neighbours of another protection are not merged.
	char *all = map((size_t)count * PAGE);
	for (long page = 0; page < count; page++)
		*(long *)(all + page * PAGE) = page;
	for (long page = 0; page < count; page += 2)
		if (mprotect(all + page * PAGE, PAGE, PROT_READ))
			die("make mappings (see /proc/sys/vm/max_map_count)");
}

int main(int count, char **words)
{
	const char *names[] = { "--memory-mb", "--pages-per-s", "--threads", "--wakes-per-s",
				"--processes", "--mappings", "--port" };
	long values[7] = { 0 };
	for (int word = 1; word + 1 < count; word += 2) {
		int name = 0;
		while (name < 7 && strcmp(words[word], names[name]))
			name++;
		if (name == 7) {
			fprintf(stderr, "load: no such option: %s\n", words[word]);
			return 2;
		}
		values[name] = atol(words[word + 1]);
	}
	long pages = values[0] * 256;
	// First, so that they do not have the memory, too.
	fork_children(values[4]);
	uint64_t state = 88172645463325252UL;
	uint64_t *memory = pages ? map((size_t)pages * PAGE) : NULL;
	for (long word = 0; word < pages * 512; word++)
		memory[word] = roll(&state);
	if (values[5])
		map_many(values[5]);
	wakes_per_s = values[3];
	for (long thread = 0; thread < values[2]; thread++)
		start(sleeper, NULL);
	if (values[6])
		serve(values[6]);
	printf("ready\n");
	fflush(stdout);
	struct timespec due;
	clock_gettime(CLOCK_MONOTONIC, &due);
	for (long owed = 0;;) {
		sleep_until(&due, pages && values[1] ? SECOND / 1000 : SECOND);
		for (owed += values[1]; pages && owed >= 1000; owed -= 1000) {
			uint64_t number = roll(&state);
			memory[number % pages * 512 + (number >> 40) % 512] = number;
		}
	}
}
