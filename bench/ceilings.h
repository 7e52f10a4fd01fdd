/* Loops that read, or read and write in place, as fast as a machine does: the ceilings of what memory bounds. A
 * caller measures many short windows. */
#ifndef XDISTILL_BENCH_CEILINGS_H
#define XDISTILL_BENCH_CEILINGS_H

#include <stdint.h>

typedef uint64_t bench_words __attribute__((vector_size(64)));
typedef float bench_floats __attribute__((vector_size(64)));

#if defined(__x86_64__) && defined(__GLIBC__)
#    define BENCH_BEST_LEVEL __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#    define BENCH_BEST_LEVEL
#endif

/* Which way of going through memory is the fastest differs from machine to machine: some streams at a time, of
 * turns of BENCH_TURN lines, with or without asking for lines ahead. The ceiling is that of the best. */
enum { BENCH_TURN = 32, BENCH_WAYS = 4 };
typedef struct bench_way {
    int streams, ahead; /* in lines; 0: the processor's own prefetch */
} bench_way;
static const bench_way bench_ways[BENCH_WAYS] = { { 1, 0 }, { 2, 0 }, { 4, 0 }, { 2, 32 } };

/* Reads lines of 64 bytes. */
BENCH_BEST_LEVEL static uint64_t bench_read(const bench_words *x, int64_t lines, bench_way way) {
    const int64_t stream = lines / way.streams / BENCH_TURN * BENCH_TURN;
    bench_words a = { 0 }, b = { 0 };
    for (int64_t at = 0; at < stream; at += BENCH_TURN)
        for (int s = 0; s < way.streams; s++) {
            const bench_words *turn = x + s * stream + at;
            for (int i = 0; i < BENCH_TURN; i += 2) {
                if (way.ahead) {
                    __builtin_prefetch(turn + i + way.ahead);
                    __builtin_prefetch(turn + i + 1 + way.ahead);
                }
                a += turn[i];
                b += turn[i + 1];
            }
        }
    a += b;
    return a[0] + a[1] + a[2] + a[3] + a[4] + a[5] + a[6] + a[7];
}

/* Reads lines and writes them back with other values. */
BENCH_BEST_LEVEL static void bench_in_place(bench_floats *x, int64_t lines, bench_way way) {
    const int64_t stream = lines / way.streams / BENCH_TURN * BENCH_TURN;
    for (int64_t at = 0; at < stream; at += BENCH_TURN)
        for (int s = 0; s < way.streams; s++) {
            bench_floats *turn = x + s * stream + at;
            for (int i = 0; i < BENCH_TURN; i++) {
                if (way.ahead) __builtin_prefetch(turn + i + way.ahead, 1);
                turn[i] = turn[i] * 0.999f + 1e-3f;
            }
        }
}

/* The lines that both really visit. */
static int64_t bench_lines(int64_t lines, bench_way way) {
    return lines / way.streams / BENCH_TURN * BENCH_TURN * way.streams;
}

#endif
