/* nn_small.c - small products, tile by tile; with the vectors of AVX2 where the machine has them. */
#include "nn_small.h"

#include "xdistill.h"

#include <string.h>

/* At -O2 gcc makes no vectors of these loops. */
#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC push_options
#    pragma GCC optimize("O3")
#endif

#if defined(__GNUC__) && defined(__x86_64__)
#    define NN_SMALL_INLINE static inline __attribute__((always_inline))
#    define NN_SMALL_AVX2 __attribute__((target("avx2")))
#else
#    define NN_SMALL_INLINE static inline
#endif

enum { NN_TILE_ROWS = 4, NN_TILE_COLS = 8 };

/* Left to itself gcc makes vectors across the rows of a tile, from single numbers. */
#if defined(__GNUC__)
typedef float nn_eight __attribute__((vector_size(32), aligned(4), may_alias));

NN_SMALL_INLINE void nn_small_tile(const nn_small *s, const float *a, const float *b, float *out) {
    const int64_t row = s->row;
    nn_eight x = { 0 }, y = x, z = x, w = x;
    for (int64_t p = 0; p < s->terms; p++, a += s->term, b += s->b_row) {
        const nn_eight line = *(const nn_eight *)(const void *)b;
        x += a[0] * line;
        y += a[row] * line;
        z += a[2 * row] * line;
        w += a[3 * row] * line;
    }
    memcpy(out, &x, sizeof x);
    memcpy(out + s->out_row, &y, sizeof y);
    memcpy(out + 2 * s->out_row, &z, sizeof z);
    memcpy(out + 3 * s->out_row, &w, sizeof w);
}

NN_SMALL_INLINE void nn_small_row(const nn_small *s, const float *a, const float *b, float *out) {
    nn_eight x = { 0 };
    for (int64_t p = 0; p < s->terms; p++, a += s->term, b += s->b_row)
        x += a[0] * *(const nn_eight *)(const void *)b;
    memcpy(out, &x, sizeof x);
}
#else
NN_SMALL_INLINE void nn_small_tile(const nn_small *s, const float *a, const float *b, float *out) {
    float sum[NN_TILE_ROWS][NN_TILE_COLS] = { { 0 } };
    for (int64_t p = 0; p < s->terms; p++, a += s->term, b += s->b_row)
        for (int r = 0; r < NN_TILE_ROWS; r++)
            for (int c = 0; c < NN_TILE_COLS; c++) sum[r][c] += a[r * s->row] * b[c];
    for (int r = 0; r < NN_TILE_ROWS; r++) memcpy(out + r * s->out_row, sum[r], sizeof sum[r]);
}

NN_SMALL_INLINE void nn_small_row(const nn_small *s, const float *a, const float *b, float *out) {
    float sum[NN_TILE_COLS] = { 0 };
    for (int64_t p = 0; p < s->terms; p++, a += s->term, b += s->b_row)
        for (int c = 0; c < NN_TILE_COLS; c++) sum[c] += a[0] * b[c];
    memcpy(out, sum, sizeof sum);
}
#endif

NN_SMALL_INLINE void nn_small_tiles(const nn_small *s, const float *a, const float *b, float *out) {
    const int64_t tiled = s->rows - s->rows % NN_TILE_ROWS;
    for (int64_t i = 0; i < tiled; i += NN_TILE_ROWS)
        for (int64_t j = 0; j < s->cols; j += NN_TILE_COLS)
            nn_small_tile(s, a + i * s->row, b + j, out + i * s->out_row + j);
    for (int64_t i = tiled; i < s->rows; i++)
        for (int64_t j = 0; j < s->cols; j += NN_TILE_COLS)
            nn_small_row(s, a + i * s->row, b + j, out + i * s->out_row + j);
}

#if defined(NN_SMALL_AVX2)
NN_SMALL_AVX2 static void nn_small_avx2(const nn_small *s, const float *a, const float *b, float *out) {
    nn_small_tiles(s, a, b, out);
}
#endif

void nn_small_product(const nn_small *sizes, const float *a, const float *b, float *out) {
#if defined(NN_SMALL_AVX2)
    if (xd_cpu_best() >= XD_CPU_AVX2) {
        nn_small_avx2(sizes, a, b, out);
        return;
    }
#endif
    nn_small_tiles(sizes, a, b, out);
}

#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC pop_options
#endif
