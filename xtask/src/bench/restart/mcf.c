/* Augments a flow along cheapest paths of a random network (Bellman-Ford with a queue), as a
   network simplex does over and over: arcs and nodes are visited in no order that memory knows. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { NODES = 400000, DEGREE = 6, ARCS = NODES * DEGREE };
struct arc {
    int32_t to, cost, flow;
};

static uint64_t state = 1;
static uint32_t roll(void)
{
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return state >> 33;
}

int main(void)
{
    struct arc *arcs = malloc(sizeof *arcs * ARCS);
    int64_t *dist = malloc(sizeof *dist * NODES);
    int32_t *from = malloc(sizeof *from * NODES), *queue = malloc(sizeof *queue * NODES);
    char *waits = calloc(NODES, 1);
    for (long a = 0; a < ARCS; a++)
        arcs[a] = (struct arc){ roll() % NODES, 1 + roll() % 100, 0 };
    for (long round = 1;; round++) {
        long head = 0, count = 1;
        for (long n = 0; n < NODES; n++)
            dist[n] = INT64_MAX / 2, from[n] = -1;
        queue[0] = roll() % NODES, dist[queue[0]] = 0, waits[queue[0]] = 1;
        while (count > 0) {
            long n = queue[head];
            head = (head + 1) % NODES, count--, waits[n] = 0;
            for (long a = n * DEGREE; a < (n + 1) * DEGREE; a++) {
                long to = arcs[a].to, cost = dist[n] + arcs[a].cost + arcs[a].flow;
                if (cost >= dist[to])
                    continue;
                dist[to] = cost, from[to] = a;
                if (!waits[to])
                    waits[to] = 1, queue[(head + count++) % NODES] = to;
            }
        }
        for (long n = roll() % NODES, hops = 0; from[n] >= 0 && hops < 100; hops++) {
            arcs[from[n]].flow++;
            n = from[n] / DEGREE;
        }
        printf("%ld\n", round), fflush(stdout);
    }
}
