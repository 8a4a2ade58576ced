/*
 * Prices options on interest rates by simulation, in the manner of PARSEC's swaptions: much
 * arithmetic, little memory, threads that need nothing of each other.
 *
 *   swaptions THREADS TRIALS [FILE]
 *
 * The same TRIALS give the same bytes with any number of threads: each option has random numbers
 * of its own, is priced by one thread, and nothing but + - * / and sqrt is used. How long it took
 * is told on standard error.
 */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { OPTIONS = 64, STEPS = 40, TENOR = 20 };

static double prices[OPTIONS], errors[OPTIONS];
static long trials;
static int next_option;
static pthread_mutex_t take = PTHREAD_MUTEX_INITIALIZER;

static double uniform(uint64_t *state)
{
	uint64_t mixed = *state += 0x9e3779b97f4a7c15;
	mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
	mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
	return ((mixed ^ (mixed >> 31)) >> 11) * 0x1p-53;
}

/* Nearly normal: the sum of twelve uniform numbers. */
static double normal(uint64_t *state)
{
	double sum = -6;
	for (int i = 0; i < 12; i++)
		sum += uniform(state);
	return sum;
}

/* The rate wanders back to its mean (Vasicek); at the end the swap is worth its payments. */
static double payoff(uint64_t *state, double strike)
{
	const double dt = 0.25, mean = 0.04, pull = 0.3, sigma = 0.012;
	double rate = 0.03, discount = 1, worth = 0, annuity = 1;
	for (int step = 0; step < STEPS; step++) {
		discount /= 1 + rate * dt;
		rate += pull * (mean - rate) * dt + sigma * sqrt(dt) * normal(state);
	}
	for (int step = 0; step < TENOR; step++) {
		annuity /= 1 + rate * dt;
		worth += (rate - strike) * dt * annuity;
	}
	return worth > 0 ? worth * discount : 0;
}

static void *price(void *unused)
{
	for (;;) {
		pthread_mutex_lock(&take);
		int option = next_option++;
		pthread_mutex_unlock(&take);
		if (option >= OPTIONS)
			return unused;
		uint64_t state = 1000003u * (uint64_t)(option + 1);
		double sum = 0, squares = 0;
		for (long trial = 0; trial < trials; trial++) {
			double paid = payoff(&state, 0.02 + 0.0005 * option);
			sum += paid;
			squares += paid * paid;
		}
		prices[option] = sum / trials;
		errors[option] = sqrt((squares / trials - prices[option] * prices[option]) / trials);
	}
}

int main(int count, char **words)
{
	long threads = count > 2 ? atol(words[1]) : 0;
	trials = count > 2 ? atol(words[2]) : 0;
	if (threads < 1 || threads > OPTIONS || trials < 1) {
		fprintf(stderr, "usage: swaptions THREADS TRIALS [FILE]\n");
		return 2;
	}
	struct timespec start, end;
	clock_gettime(CLOCK_MONOTONIC, &start);
	pthread_t running[OPTIONS];
	for (long i = 0; i < threads; i++)
		if (pthread_create(&running[i], NULL, price, NULL))
			return perror("swaptions: start a thread"), 1;
	for (long i = 0; i < threads; i++)
		pthread_join(running[i], NULL);
	clock_gettime(CLOCK_MONOTONIC, &end);
	FILE *to = count > 3 ? fopen(words[3], "w") : stdout;
	if (!to)
		return perror(words[3]), 1;
	for (int option = 0; option < OPTIONS; option++)
		fprintf(to, "swaption %d: %.9f +- %.9f\n", option, prices[option], errors[option]);
	if (fflush(to) || (to != stdout && fclose(to)))
		return perror("swaptions: write"), 1;
	fprintf(stderr, "took %.3f s\n",
		end.tv_sec - start.tv_sec + (end.tv_nsec - start.tv_nsec) * 1e-9);
	return 0;
}
