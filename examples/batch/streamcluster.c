/*
 * Clusters a stream of points, in the manner of PARSEC's streamcluster: much memory is read and
 * written again and again, and threads meet at a barrier many times a second.
 *
 *   streamcluster THREADS BLOCKS [FILE]
 *
 * Points come in blocks. Each block is clustered around the centres so far, which then move
 * (k-means); a point far from all of them takes the place of the least used. The same BLOCKS give
 * the same bytes with any number of threads: sums are kept for each of PARTS slices of a block
 * and added in their order. How long it took is told on standard error.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { DIMENSIONS = 32, CENTRES = 24, PARTS = 16, PART_POINTS = 2048, ROUNDS = 6 };
enum { POINTS = PARTS * PART_POINTS };

struct part {
	double sums[CENTRES][DIMENSIONS];
	long counts[CENTRES];
	double cost, worst;
	int worst_point;
};

static float points[POINTS][DIMENSIONS];
static int nearest[POINTS];
static double centres[CENTRES][DIMENSIONS], total_cost;
static long used[CENTRES], moved;
static struct part parts[PARTS];
static long threads, blocks;
static pthread_barrier_t met;

static double uniform(uint64_t *state)
{
	uint64_t mixed = *state += 0x9e3779b97f4a7c15;
	mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
	mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
	return ((mixed ^ (mixed >> 31)) >> 11) * 0x1p-53;
}

/* The next points of the stream: around places that drift from block to block. */
static void arrive(int part, long block)
{
	uint64_t state = 7919u * (uint64_t)(block * PARTS + part + 1);
	for (int at = part * PART_POINTS; at < (part + 1) * PART_POINTS; at++) {
		int place = (int)(uniform(&state) * 12);
		for (int d = 0; d < DIMENSIONS; d++) {
			double middle = (place * (d + 3) % 17) + 0.01 * block;
			points[at][d] = (float)(middle + uniform(&state) + uniform(&state) - 1);
		}
	}
}

static void assign(int number)
{
	struct part *part = &parts[number];
	*part = (struct part){ .worst = -1 };
	for (int at = number * PART_POINTS; at < (number + 1) * PART_POINTS; at++) {
		double least = -1;
		for (int c = 0; c < CENTRES; c++) {
			double apart = 0;
			for (int d = 0; d < DIMENSIONS; d++) {
				double along = points[at][d] - centres[c][d];
				apart += along * along;
			}
			if (least < 0 || apart < least) {
				least = apart;
				nearest[at] = c;
			}
		}
		for (int d = 0; d < DIMENSIONS; d++)
			part->sums[nearest[at]][d] += points[at][d];
		part->counts[nearest[at]]++;
		part->cost += least;
		if (least > part->worst) {
			part->worst = least;
			part->worst_point = at;
		}
	}
}

/* By one thread, while the others wait. */
static void move_centres(long round)
{
	double cost = 0, worst = -1;
	int worst_point = 0, least_used = 0;
	for (int c = 0; c < CENTRES; c++) {
		double sum[DIMENSIONS] = { 0 };
		long count = 0;
		for (int part = 0; part < PARTS; part++) {
			count += parts[part].counts[c];
			for (int d = 0; d < DIMENSIONS; d++)
				sum[d] += parts[part].sums[c][d];
		}
		for (int d = 0; count && d < DIMENSIONS; d++)
			centres[c][d] = sum[d] / count;
		used[c] = count;
		if (count < used[least_used])
			least_used = c;
	}
	for (int part = 0; part < PARTS; part++) {
		cost += parts[part].cost;
		if (parts[part].worst > worst) {
			worst = parts[part].worst;
			worst_point = parts[part].worst_point;
		}
	}
	if (worst * POINTS > 4 * cost) {
		for (int d = 0; d < DIMENSIONS; d++)
			centres[least_used][d] = points[worst_point][d];
		moved++;
	}
	if (round == ROUNDS - 1)
		total_cost += cost;
}

static void *work(void *number)
{
	long me = (long)number;
	for (long block = 0; block < blocks; block++) {
		for (int part = (int)me; part < PARTS; part += threads)
			arrive(part, block);
		for (long round = 0; round < ROUNDS; round++) {
			pthread_barrier_wait(&met);
			for (int part = (int)me; part < PARTS; part += threads)
				assign(part);
			pthread_barrier_wait(&met);
			if (me == 0)
				move_centres(round);
		}
		pthread_barrier_wait(&met);
	}
	return NULL;
}

int main(int count, char **words)
{
	threads = count > 2 ? atol(words[1]) : 0;
	blocks = count > 2 ? atol(words[2]) : 0;
	if (threads < 1 || threads > PARTS || blocks < 1) {
		fprintf(stderr, "usage: streamcluster THREADS BLOCKS [FILE]\n");
		return 2;
	}
	struct timespec start, end;
	clock_gettime(CLOCK_MONOTONIC, &start);
	for (int c = 0; c < CENTRES; c++)
		for (int d = 0; d < DIMENSIONS; d++)
			centres[c][d] = c * (d + 1) % 17;
	pthread_barrier_init(&met, NULL, (unsigned)threads);
	pthread_t running[PARTS];
	for (long i = 0; i < threads; i++)
		if (pthread_create(&running[i], NULL, work, (void *)i))
			return perror("streamcluster: start a thread"), 1;
	for (long i = 0; i < threads; i++)
		pthread_join(running[i], NULL);
	clock_gettime(CLOCK_MONOTONIC, &end);
	FILE *to = count > 3 ? fopen(words[3], "w") : stdout;
	if (!to)
		return perror(words[3]), 1;
	fprintf(to, "cluster cost %.6f, %ld moved\n", total_cost, moved);
	for (int c = 0; c < CENTRES; c++) {
		fprintf(to, "cluster %d: %ld points at", c, used[c]);
		for (int d = 0; d < 4; d++)
			fprintf(to, " %.6f", centres[c][d]);
		fprintf(to, "\n");
	}
	if (fflush(to) || (to != stdout && fclose(to)))
		return perror("streamcluster: write"), 1;
	fprintf(stderr, "took %.3f s\n",
		end.tv_sec - start.tv_sec + (end.tv_nsec - start.tv_nsec) * 1e-9);
	return 0;
}
