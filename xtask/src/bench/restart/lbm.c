/* A lattice-Boltzmann stencil (D2Q9) over two lattices of 54 MB, each touched whole in each step:
   the worst that can happen to a restart. */
#include <stdio.h>
#include <stdlib.h>

enum { W = 1024, H = 768, Q = 9 };
static const int cx[Q] = { 0, 1, 0, -1, 0, 1, -1, -1, 1 };
static const int cy[Q] = { 0, 0, 1, 0, -1, 1, 1, -1, -1 };
static const double w[Q] = { 4. / 9,  1. / 9,  1. / 9,  1. / 9, 1. / 9,
                             1. / 36, 1. / 36, 1. / 36, 1. / 36 };

int main(void)
{
    double *now = malloc(sizeof *now * W * H * Q), *next = malloc(sizeof *next * W * H * Q);
    for (long i = 0; i < (long)W * H; i++)
        for (int q = 0; q < Q; q++)
            now[i * Q + q] = next[i * Q + q] = w[q] * (1 + 0.01 * (i % 17));
    for (long step = 1;; step++) {
        for (int y = 0; y < H; y++)
            for (int x = 0; x < W; x++) {
                double *f = now + ((long)y * W + x) * Q, rho = 0, ux = 0, uy = 0;
                for (int q = 0; q < Q; q++)
                    rho += f[q], ux += cx[q] * f[q], uy += cy[q] * f[q];
                ux /= rho, uy /= rho;
                for (int q = 0; q < Q; q++) {
                    double u = 3 * (cx[q] * ux + cy[q] * uy);
                    double e = w[q] * rho * (1 + u + u * u / 2 - 1.5 * (ux * ux + uy * uy));
                    long to = (long)((y + cy[q] + H) % H) * W + (x + cx[q] + W) % W;
                    next[to * Q + q] = f[q] + (e - f[q]) / 0.6;
                }
            }
        double *swap = now;
        now = next, next = swap;
        printf("%ld\n", step), fflush(stdout);
    }
}
