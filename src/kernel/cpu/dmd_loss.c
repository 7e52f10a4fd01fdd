/* Losses over samples: kernel/dmd_loss.h has the formulas. Entries with elements run on the loops of a level. */

#include "kernel/cpu/dmd_loss.h"

#include <math.h>
#include <string.h>

/* ---- the plain loops ---- */

static void xdi_plain_sample_difference(const float *a, const float *b, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = xd_subf(a[i], b[i]);
}

static void xdi_plain_sample_residual(const xd_denoise_term *term, const float *const *in, float *out,
                                      int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = xd_denoise_residual(term, in[0][i], in[1][i], in[2][i]);
}

static void xdi_plain_sample_lanes(const float *x, int64_t n, bool square, double *lanes) {
    memset(lanes, 0, XD_SAMPLE_LANES * sizeof *lanes);
    for (int64_t i = 0; i < n; i++) {
        const double one = fabs((double)x[i]);
        lanes[i % XD_SAMPLE_LANES] += square ? xd_mul_exact(one, one) : one;
    }
}

static void xdi_plain_sample_scaled(const float *x, double factor, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = (float)xd_mul(factor, (double)x[i]);
}

static xdi_sample_level xdi_plain_sample_level(void) {
    static const xdi_sample_loops loops = {
        xdi_plain_sample_difference,
        xdi_plain_sample_residual,
        xdi_plain_sample_lanes,
        xdi_plain_sample_scaled,
    };
    const xdi_sample_level level = { &loops, xdi_span_kernels_plain(), NULL };
    return level;
}

/* ---- elements ---- */

/* Elements [at, at + n) of row b as f32: the row itself, or the buffer. */
static const float *xdi_sample_widen(const xdi_span_kernels *spans, const xd_rows *x, int64_t b, int64_t at,
                                     int64_t n, float *buffer) {
    const int64_t from = b * (x->stride ? x->stride : x->cols) + at;
    if (x->dtype == XD_DTYPE_F32) return (const float *)x->data + from;
    for (int64_t i = 0; i < n; i += XDI_SPAN)
        spans->widen((const uint16_t *)x->data + from + i, x->dtype, buffer + i, xdi_span_length(n, i));
    return buffer;
}

static void xdi_sample_narrow(const xdi_span_kernels *spans, const float *values, const xd_rows *out,
                              int64_t b, int64_t at, int64_t n) {
    const int64_t to = b * (out->stride ? out->stride : out->cols) + at;
    if (out->dtype == XD_DTYPE_F32) {
        memcpy((float *)out->data + to, values, (size_t)n * sizeof *values);
        return;
    }
    for (int64_t i = 0; i < n; i += XDI_SPAN)
        spans->narrow(values + i, (uint16_t *)out->data + to + i, out->dtype, xdi_span_length(n, i));
}

/* Zero where the mask is 0, whatever was there. Returns how many elements count. */
static int64_t xdi_sample_keep(const xd_sample_args *a, int64_t b, int64_t at, int64_t n, float *x) {
    if (!a->mask) return n;
    const uint8_t *mask = a->mask + b * a->elements + at;
    int64_t counted = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!mask[i]) x[i] = 0.0f;
        counted += mask[i] != 0;
    }
    return counted;
}

/* Where three tensors of one dtype that tiles take have elements from `at` of row b on; false for others. */
static bool xdi_sample_at(const xd_rows *const *rows, int64_t b, int64_t at, const void **in) {
    for (int i = 0; i < 3; i++) {
        const xd_rows *x = rows[i];
        const int64_t from = b * (x->stride ? x->stride : x->cols) + at;
        if (x->dtype != rows[0]->dtype || (x->dtype != XD_DTYPE_F32 && x->dtype != XD_DTYPE_BF16))
            return false;
        in[i] = (const char *)x->data + (size_t)from * xd_dtype_size(x->dtype);
    }
    return true;
}

static int64_t xdi_sample_least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* ---- sums ---- */

/* Lanes joined pairwise; lanes from `used` on are zero. */
static double xdi_sample_tree(double *lanes, int64_t used) {
    int64_t width = 1;
    while (width < used) width *= 2;
    for (; width > 1; width /= 2)
        for (int64_t i = 0; i < width / 2; i++) lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
    return lanes[0];
}

static double xdi_sample_tile_sum(const xdi_sample_loops *loops, const float *x, int64_t n, bool square) {
    double lanes[XD_SAMPLE_LANES];
    const int64_t used = xdi_sample_least(n, XD_SAMPLE_LANES);
    loops->lanes(x, n, square, lanes);
    return xdi_sample_tree(lanes, used);
}

/* The sums of a chunk while its tiles are added: which = 0 magnitudes, 1 squares. */
typedef struct xdi_sample_chunk {
    const xdi_sample_loops *loops;
    bool fixed, binned;
    int64_t *sums;
    xdi_norm_bins bins[2];
} xdi_sample_chunk;

static void xdi_sample_chunk_begin(xdi_sample_chunk *chunk, const xd_sample_args *a, int64_t item, int64_t n,
                                   const xdi_sample_loops *loops) {
    chunk->loops = loops;
    chunk->fixed = a->fixed;
    chunk->binned = a->fixed && n > XD_SAMPLE_TILE;
    chunk->sums = a->parts + item * xd_sample_words(a->fixed);
    xd_sample_clear(chunk->sums, a->fixed);
    if (chunk->binned) memset(chunk->bins, 0, sizeof chunk->bins);
}

static void xdi_sample_chunk_add(xdi_sample_chunk *chunk, int which, const float *x, int64_t n) {
    const bool square = which == 1;
    const double sum = xdi_sample_tile_sum(chunk->loops, x, n, square);
    int64_t *words = chunk->sums + (int)XD_SAMPLE_SUMS + which * xd_sum_words(chunk->fixed);
    const int64_t finding = xd_sample_finding(sum);
    if (finding > chunk->sums[XD_SAMPLE_FINDING]) chunk->sums[XD_SAMPLE_FINDING] = finding;
    if (!chunk->fixed)
        xd_sum_put(words, false, sum);
    else if (finding == (int64_t)XD_SAMPLE_FINE && chunk->binned)
        xdi_norm_bins_add(&chunk->bins[which], x, n, square);
    else if (finding == (int64_t)XD_SAMPLE_FINE)
        xdi_norm_exact(words, x, n, square);
}

/* A tile's sum that is known. */
static void xdi_sample_chunk_put(xdi_sample_chunk *chunk, int which, double sum) {
    const int64_t finding = xd_sample_finding(sum);
    if (finding > chunk->sums[XD_SAMPLE_FINDING]) chunk->sums[XD_SAMPLE_FINDING] = finding;
    xd_sum_put(chunk->sums + (int)XD_SAMPLE_SUMS + which, false, sum);
}

static void xdi_sample_chunk_end(xdi_sample_chunk *chunk) {
    for (int which = 0; which < 2 && chunk->binned; which++)
        xdi_norm_bins_flush(&chunk->bins[which],
                            chunk->sums + (int)XD_SAMPLE_SUMS + which * xd_sum_words(true), which == 1);
}

/* ---- chunks of rows over threads ---- */

/* Forms the terms of tile [at, at + n) of row b: of which = 0 into first, of 1 into second, either may be untouched. Returns the
 * sums that have terms as bits. */
typedef int (*xdi_sample_terms)(const void *args, const xdi_sample_level *level, int64_t b, int64_t at,
                                int64_t n, float *const *terms);

/* Sums of the whole tile at [at] of row b, where the level has them without terms in between; those that it found as bits. With
 * XDI_SAMPLE_WROTE among them, the gradient of row `earlier` at the same place is written; earlier < 0: there is none. */
typedef int (*xdi_sample_sums)(const void *args, const xdi_sample_level *level, int64_t b, int64_t earlier,
                               int64_t at, double *sums);
enum { XDI_SAMPLE_WROTE = 4 };

typedef struct xdi_sample_job {
    const xd_sample_args *base;
    const void *args;
    xdi_sample_level level;
    xdi_sample_terms terms;
    xdi_sample_sums sums; /* NULL: by terms */
    void (*write)(const void *args, const xdi_sample_level *level, int64_t b, int64_t at, int64_t n);
    void (*weigh)(const void *args, int64_t b);
    /* what becomes of the second terms once they are added, where `sums` has not done it; NULL: nothing */
    void (*slope)(const void *args, const xdi_sample_level *level, int64_t b, int64_t at, int64_t n,
                  float *term);
    bool later; /* of whole samples: one's gradient is written with the sums of the next */
} xdi_sample_job;

/* As xdi_sample_sums; 0 when terms are needed. */
static int xdi_sample_measure_tile(const xdi_sample_job *job, xdi_sample_chunk *chunk, int64_t b,
                                   int64_t earlier, int64_t at) {
    double sums[2];
    if (!job->sums || !job->level.tiles || job->base->mask || job->base->fixed) return 0;
    const int has = job->sums(job->args, &job->level, b, earlier, at, sums);
    for (int which = 0; which < 2; which++)
        if (has >> which & 1) xdi_sample_chunk_put(chunk, which, sums[which]);
    if (has) chunk->sums[XD_SAMPLE_COUNTED] += XD_SAMPLE_TILE;
    return has;
}

static void xdi_sample_measure_terms(const xdi_sample_job *job, xdi_sample_chunk *chunk, int64_t b,
                                     int64_t at, int64_t n) {
    float first[XD_SAMPLE_TILE], second[XD_SAMPLE_TILE];
    float *const terms[2] = { first, second };
    const int has = job->terms(job->args, &job->level, b, at, n, terms);
    int64_t counted = n;
    for (int which = 0; which < 2; which++) {
        if (!(has >> which & 1)) continue;
        counted = xdi_sample_keep(job->base, b, at, n, terms[which]);
        xdi_sample_chunk_add(chunk, which, terms[which], n);
    }
    chunk->sums[XD_SAMPLE_COUNTED] += counted;
    if (job->slope) job->slope(job->args, &job->level, b, at, n, second);
}

/* Of the item's row, and the gradient of row `earlier` at the same place. */
static void xdi_sample_measure_chunk(const xdi_sample_job *job, int64_t item, int64_t earlier) {
    const xd_sample_args *a = job->base;
    const int64_t chunks = xd_sample_chunks(a->elements), b = item / chunks,
                  begin = (item - b * chunks) * XD_SAMPLE_CHUNK;
    const int64_t end = begin + XD_SAMPLE_CHUNK < a->elements ? begin + XD_SAMPLE_CHUNK : a->elements;
    xdi_sample_chunk chunk;
    xdi_sample_chunk_begin(&chunk, a, item, end - begin, job->level.loops);
    for (int64_t at = begin; at < end; at += XD_SAMPLE_TILE) {
        const int64_t n = xdi_sample_least(end - at, XD_SAMPLE_TILE);
        const int has = n == XD_SAMPLE_TILE ? xdi_sample_measure_tile(job, &chunk, b, earlier, at) : 0;
        if (!has) xdi_sample_measure_terms(job, &chunk, b, at, n);
        if (earlier >= 0 && !(has & (int)XDI_SAMPLE_WROTE))
            job->write(job->args, &job->level, earlier, at, n);
    }
    xdi_sample_chunk_end(&chunk);
}

/* After pieces that may have streamed a gradient. */
static void xdi_sample_fence(const xdi_sample_job *job) {
    if (job->level.tiles) job->level.tiles->fence();
}

static void xdi_sample_measure_piece(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                     int slot) {
    (void)launch, (void)slot;
    for (int64_t item = begin; item < end; item++)
        xdi_sample_measure_chunk((const xdi_sample_job *)args, item, -1);
    xdi_sample_fence((const xdi_sample_job *)args);
}

static void xdi_sample_write_chunk(const xdi_sample_job *job, int64_t item) {
    const int64_t elements = job->base->elements, chunks = xd_sample_chunks(elements);
    const int64_t b = item / chunks, from = (item - b * chunks) * XD_SAMPLE_CHUNK;
    const int64_t to = from + XD_SAMPLE_CHUNK < elements ? from + XD_SAMPLE_CHUNK : elements;
    for (int64_t at = from; at < to; at += XD_SAMPLE_TILE)
        job->write(job->args, &job->level, b, at, xdi_sample_least(to - at, XD_SAMPLE_TILE));
}

static void xdi_sample_write_piece(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                   int slot) {
    (void)launch, (void)slot;
    for (int64_t item = begin; item < end; item++) xdi_sample_write_chunk((const xdi_sample_job *)args, item);
    xdi_sample_fence((const xdi_sample_job *)args);
}

/* Samples that a cache holds: it still has what the gradient is made of. One that goes to memory is written while the next sample
 * is read, so that both directions are busy. */
static void xdi_sample_whole_piece(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                   int slot) {
    const xdi_sample_job *job = (const xdi_sample_job *)args;
    const int64_t chunks = xd_sample_chunks(job->base->elements);
    (void)launch, (void)slot;
    for (int64_t b = begin; b < end; b++) {
        const int64_t earlier = job->write && job->later && b > begin ? b - 1 : -1;
        for (int64_t k = 0; k < chunks; k++) xdi_sample_measure_chunk(job, b * chunks + k, earlier);
        if (chunks != 1) xd_sample_join_chunks(job->base, b);
        job->weigh(job->args, b);
        if (!job->write || (job->later && b + 1 < end)) continue;
        for (int64_t k = 0; k < chunks; k++) xdi_sample_write_chunk(job, b * chunks + k);
    }
    xdi_sample_fence(job);
}

/* A piece has about four chunks' elements. */
static xd_result xdi_sample_spread(const xd_launch *launch, const xdi_sample_job *job, xdi_spread_body body) {
    const int64_t elements = job->base->elements, grain = 4 * (int64_t)XD_SAMPLE_CHUNK;
    const int64_t row = xdi_sample_least(elements, XD_SAMPLE_CHUNK);
    if (elements == 0) return XD_OK;
    return xdi_spread_items(launch, job->base->samples * xd_sample_chunks(elements), grain / row, body, job);
}

static xd_result xdi_sample_spread_whole(const xd_launch *launch, const xdi_sample_job *job) {
    const xd_sample_args *a = job->base;
    const int64_t row = a->elements > 0 ? a->elements : 1, grain = 4 * (int64_t)XD_SAMPLE_CHUNK / row;
    const int64_t share = a->samples / (8 * (int64_t)xd_ctx_settings(launch->ctx)->threads);
    *a->factor = xd_sample_factor(a, xd_sample_denominator(a, a->samples * a->elements));
    return xdi_spread_items(launch, a->samples, grain > share ? grain : share, xdi_sample_whole_piece, job);
}

/* ---- gradients ---- */

/* Whether stores of the gradient, the next of which is `at`, bypass the caches. */
static bool xdi_sample_streams(const xd_rows *const *rows, const xd_rows *gradient, const void *at) {
    const int64_t stride = gradient->stride ? gradient->stride : gradient->cols;
    for (int i = 0; i < 3; i++)
        if (rows[i]->data == gradient->data) return false;
    return (uintptr_t)at % 64 == 0 &&
           gradient->rows * stride * (int64_t)xd_dtype_size(gradient->dtype) > XDI_STREAMED;
}

static double xdi_sample_times(const xd_sample_args *base, int64_t b) {
    return xd_mul(base->sample[b].factor, *base->factor);
}

/* Where a tile of a gradient goes; false unless tiles of the level can write it from these tensors. */
static bool xdi_sample_out_at(const xd_sample_args *base, const xdi_sample_level *level,
                              const xd_rows *const *rows, const xd_rows *gradient, int64_t b, int64_t at,
                              xdi_sample_out *out) {
    const int64_t to = b * (gradient->stride ? gradient->stride : gradient->cols) + at;
    const double factor = fabs(xdi_sample_times(base, b));
    if (!level->tiles || base->mask || gradient->dtype != rows[0]->dtype || factor < XDI_SAMPLE_LEAST ||
        factor > 1.0 / XDI_SAMPLE_LEAST)
        return false;
    out->data = (char *)gradient->data + (size_t)to * xd_dtype_size(gradient->dtype);
    out->streamed = xdi_sample_streams(rows, gradient, out->data);
    return true;
}

/* ---- the student's term ---- */

static int xdi_vsd_terms(const void *args, const xdi_sample_level *level, int64_t b, int64_t at, int64_t n,
                         float *const *terms) {
    const xd_vsd_args *a = (const xd_vsd_args *)args;
    float x[XD_SAMPLE_TILE], t[XD_SAMPLE_TILE], f[XD_SAMPLE_TILE];
    const float *teacher = xdi_sample_widen(level->spans, &a->teacher, b, at, n, t);
    level->loops->difference(xdi_sample_widen(level->spans, &a->generated, b, at, n, x), teacher, terms[0],
                             n);
    level->loops->difference(xdi_sample_widen(level->spans, &a->fake, b, at, n, f), teacher, terms[1], n);
    return 3;
}

/* The gradient from `at` of row b on; false unless tiles of the level can write it. */
static bool xdi_vsd_slopes_at(const xd_vsd_args *a, const xdi_sample_level *level, int64_t b, int64_t at,
                              xdi_sample_slopes *slopes) {
    const xd_rows *const rows[3] = { &a->generated, &a->teacher, &a->fake };
    if (a->form == XD_VSD_COMPAT || a->base.sample[b].factor == 0.0 ||
        !xdi_sample_at(rows, b, at, slopes->in) ||
        !xdi_sample_out_at(&a->base, level, rows, &a->gradient, b, at, &slopes->out))
        return false;
    slopes->factor = xdi_sample_times(&a->base, b);
    return true;
}

static int xdi_vsd_sums(const void *args, const xdi_sample_level *level, int64_t b, int64_t earlier,
                        int64_t at, double *sums) {
    const xd_vsd_args *a = (const xd_vsd_args *)args;
    const xd_rows *const rows[3] = { &a->generated, &a->teacher, &a->fake };
    const void *in[3];
    xdi_sample_slopes slopes;
    if (!xdi_sample_at(rows, b, at, in)) return 0;
    const bool meanwhile = earlier >= 0 && xdi_vsd_slopes_at(a, level, earlier, at, &slopes);
    level->tiles->vsd_sums(in, a->generated.dtype == XD_DTYPE_BF16, meanwhile ? &slopes : NULL, sums);
    return meanwhile ? 3 | (int)XDI_SAMPLE_WROTE : 3;
}

XD_PRIVATE xd_result xdi_vsd_measure(const xd_launch *launch, const xd_vsd_args *a, xdi_sample_level level) {
    const xdi_sample_job job = { &a->base, a, level, xdi_vsd_terms, xdi_vsd_sums, NULL, NULL, NULL, false };
    return xdi_sample_spread(launch, &job, xdi_sample_measure_piece);
}

static int xdi_vsd_steps(const void *args, const xdi_sample_level *level, int64_t b, int64_t at, int64_t n,
                         float *const *terms) {
    const xd_vsd_args *a = (const xd_vsd_args *)args;
    float x[XD_SAMPLE_TILE], t[XD_SAMPLE_TILE], f[XD_SAMPLE_TILE];
    const float *generated = xdi_sample_widen(level->spans, &a->generated, b, at, n, x);
    const float *teacher = xdi_sample_widen(level->spans, &a->teacher, b, at, n, t);
    const float *fake = xdi_sample_widen(level->spans, &a->fake, b, at, n, f);
    const float weight = (float)a->base.sample[b].weight;
    for (int64_t i = 0; i < n; i++)
        terms[1][i] = xd_vsd_step(a->generated.dtype, weight, generated[i], teacher[i], fake[i]);
    return 2;
}

XD_PRIVATE xd_result xdi_vsd_rounded(const xd_launch *launch, const xd_vsd_args *a, xdi_sample_level level) {
    const xdi_sample_job job = { &a->base, a, level, xdi_vsd_steps, NULL, NULL, NULL, NULL, false };
    return xdi_sample_spread(launch, &job, xdi_sample_measure_piece);
}

/* A tile of a gradient: factor times the terms, or zero for a sample without a factor. */
static void xdi_sample_write(const xd_sample_args *base, const xdi_sample_level *level,
                             const xd_rows *gradient, int64_t b, int64_t at, int64_t n, float *term) {
    const double factor = xdi_sample_times(base, b);
    const bool narrow = gradient->dtype != XD_DTYPE_F32;
    const int64_t to = b * (gradient->stride ? gradient->stride : gradient->cols) + at;
    xdi_sample_keep(base, b, at, n, term);
    level->loops->scaled(term, factor, narrow ? term : (float *)gradient->data + to, n);
    if (narrow) xdi_sample_narrow(level->spans, term, gradient, b, at, n);
}

static void xdi_sample_write_zero(const xdi_sample_level *level, const xd_rows *gradient, int64_t b,
                                  int64_t at, int64_t n) {
    float zero[XD_SAMPLE_TILE];
    memset(zero, 0, (size_t)n * sizeof *zero);
    xdi_sample_narrow(level->spans, zero, gradient, b, at, n);
}

static void xdi_vsd_write(const void *args, const xdi_sample_level *level, int64_t b, int64_t at, int64_t n) {
    const xd_vsd_args *a = (const xd_vsd_args *)args;
    float term[XD_SAMPLE_TILE], unused[XD_SAMPLE_TILE], t[XD_SAMPLE_TILE], f[XD_SAMPLE_TILE];
    float *const terms[2] = { unused, term };
    xdi_sample_slopes slopes;
    if (a->base.sample[b].factor == 0.0) {
        xdi_sample_write_zero(level, &a->gradient, b, at, n);
        return;
    }
    const int64_t whole = n - n % XDI_SAMPLE_STEP;
    if (whole > 0 && xdi_vsd_slopes_at(a, level, b, at, &slopes)) {
        level->tiles->vsd_slopes(&slopes, a->fake.dtype == XD_DTYPE_BF16, whole);
        if (whole == n) return;
        at += whole, n -= whole;
    }
    if (a->form == XD_VSD_COMPAT)
        xdi_vsd_steps(args, level, b, at, n, terms);
    else
        level->loops->difference(xdi_sample_widen(level->spans, &a->fake, b, at, n, f),
                                 xdi_sample_widen(level->spans, &a->teacher, b, at, n, t), term, n);
    xdi_sample_write(&a->base, level, &a->gradient, b, at, n, term);
}

XD_PRIVATE xd_result xdi_vsd_slope(const xd_launch *launch, const xd_vsd_args *a, xdi_sample_level level) {
    const xdi_sample_job job = { &a->base, a, level, NULL, NULL, xdi_vsd_write, NULL, NULL, false };
    return xdi_sample_spread(launch, &job, xdi_sample_write_piece);
}

static void xdi_vsd_weigh(const void *args, int64_t b) {
    xd_vsd_weigh_sample((const xd_vsd_args *)args, b);
}

XD_PRIVATE xd_result xdi_vsd_by_sample(const xd_launch *launch, const xd_vsd_args *a,
                                       xdi_sample_level level) {
    const xd_rows *const rows[3] = { &a->generated, &a->teacher, &a->fake };
    const bool sloped = a->gradient.data != NULL;
    const xdi_sample_job job = { &a->base,
                                 a,
                                 level,
                                 xdi_vsd_terms,
                                 xdi_vsd_sums,
                                 sloped ? xdi_vsd_write : NULL,
                                 xdi_vsd_weigh,
                                 NULL,
                                 sloped && xdi_sample_streams(rows, &a->gradient, a->gradient.data) };
    return xdi_sample_spread_whole(launch, &job);
}

/* ---- the denoising term ---- */

static int xdi_denoise_terms(const void *args, const xdi_sample_level *level, int64_t b, int64_t at,
                             int64_t n, float *const *terms) {
    const xd_denoise_args *a = (const xd_denoise_args *)args;
    float p[XD_SAMPLE_TILE], x[XD_SAMPLE_TILE], e[XD_SAMPLE_TILE];
    const float *in[3];
    in[0] = xdi_sample_widen(level->spans, &a->prediction, b, at, n, p);
    in[1] = xdi_sample_widen(level->spans, &a->clean, b, at, n, x);
    in[2] = xdi_sample_widen(level->spans, &a->noise, b, at, n, e);
    level->loops->residual(a->terms + b, in, terms[1], n);
    return 2;
}

static void xdi_denoise_factors(const xd_denoise_term *term, float factors[3]) {
    factors[0] = (float)term->prediction;
    factors[1] = (float)term->clean;
    factors[2] = (float)term->noise;
}

static int xdi_denoise_sums(const void *args, const xdi_sample_level *level, int64_t b, int64_t earlier,
                            int64_t at, double *sums) {
    const xd_denoise_args *a = (const xd_denoise_args *)args;
    const xd_rows *const rows[3] = { &a->prediction, &a->clean, &a->noise };
    const void *in[3];
    float factors[3];
    (void)earlier;
    if (!xdi_sample_at(rows, b, at, in)) return 0;
    xdi_denoise_factors(a->terms + b, factors);
    sums[1] = level->tiles->denoise_sum(factors, in, a->prediction.dtype == XD_DTYPE_BF16);
    return 2;
}

XD_PRIVATE xd_result xdi_denoise_measure(const xd_launch *launch, const xd_denoise_args *a,
                                         xdi_sample_level level) {
    const xdi_sample_job job = { &a->base, a,    level, xdi_denoise_terms, xdi_denoise_sums, NULL,
                                 NULL,     NULL, false };
    return xdi_sample_spread(launch, &job, xdi_sample_measure_piece);
}

static void xdi_denoise_write(const void *args, const xdi_sample_level *level, int64_t b, int64_t at,
                              int64_t n) {
    const xd_denoise_args *a = (const xd_denoise_args *)args;
    float term[XD_SAMPLE_TILE], factors[3];
    float *const terms[2] = { NULL, term };
    const xd_rows *const rows[3] = { &a->prediction, &a->clean, &a->noise };
    const int64_t whole = n - n % XDI_SAMPLE_STEP;
    const void *in[3];
    xdi_sample_out out;
    if (a->base.sample[b].factor == 0.0) {
        xdi_sample_write_zero(level, &a->gradient, b, at, n);
        return;
    }
    if (whole > 0 && xdi_sample_at(rows, b, at, in) &&
        xdi_sample_out_at(&a->base, level, rows, &a->gradient, b, at, &out)) {
        const double factor = xdi_sample_times(&a->base, b);
        xdi_denoise_factors(a->terms + b, factors);
        level->tiles->denoise_slopes(factors, in, a->prediction.dtype == XD_DTYPE_BF16, factor, &out, whole);
        if (whole == n) return;
        at += whole, n -= whole;
    }
    xdi_denoise_terms(args, level, b, at, n, terms);
    xdi_sample_write(&a->base, level, &a->gradient, b, at, n, term);
}

XD_PRIVATE xd_result xdi_denoise_slope(const xd_launch *launch, const xd_denoise_args *a,
                                       xdi_sample_level level) {
    const xdi_sample_job job = { &a->base, a, level, NULL, NULL, xdi_denoise_write, NULL, NULL, false };
    return xdi_sample_spread(launch, &job, xdi_sample_write_piece);
}

/* The gradient of a sample is a known factor times what its sum is made of, unless there is a finding, which makes it zero: both
 * are computed at once, and gradients that turn out to be zero are written anew. The factor of a sample is there before. */
static int xdi_denoise_both(const void *args, const xdi_sample_level *level, int64_t b, int64_t earlier,
                            int64_t at, double *sums) {
    const xd_denoise_args *a = (const xd_denoise_args *)args;
    const xd_rows *const rows[3] = { &a->prediction, &a->clean, &a->noise };
    const void *in[3];
    float factors[3];
    xdi_sample_out out;
    (void)earlier;
    if (!xdi_sample_at(rows, b, at, in) ||
        !xdi_sample_out_at(&a->base, level, rows, &a->gradient, b, at, &out))
        return 0;
    xdi_denoise_factors(a->terms + b, factors);
    sums[1] = level->tiles->denoise_both(factors, in, a->prediction.dtype == XD_DTYPE_BF16,
                                         xdi_sample_times(&a->base, b), &out);
    return 2;
}

static void xdi_denoise_slope_of(const void *args, const xdi_sample_level *level, int64_t b, int64_t at,
                                 int64_t n, float *term) {
    const xd_denoise_args *a = (const xd_denoise_args *)args;
    xdi_sample_write(&a->base, level, &a->gradient, b, at, n, term);
}

static void xdi_denoise_write_zero(const void *args, const xdi_sample_level *level, int64_t b, int64_t at,
                                   int64_t n) {
    const xd_denoise_args *a = (const xd_denoise_args *)args;
    if (a->base.sample[b].factor == 0.0) xdi_sample_write_zero(level, &a->gradient, b, at, n);
}

XD_PRIVATE xd_result xdi_denoise_by_sample(const xd_launch *launch, const xd_denoise_args *a,
                                           xdi_sample_level level) {
    const bool sloped = a->gradient.data != NULL;
    const xdi_sample_job job = { &a->base,
                                 a,
                                 level,
                                 xdi_denoise_terms,
                                 sloped ? xdi_denoise_both : xdi_denoise_sums,
                                 xdi_denoise_write_zero,
                                 NULL,
                                 sloped ? xdi_denoise_slope_of : NULL,
                                 false };
    bool zeros = false;
    *a->base.factor =
        xd_sample_factor(&a->base, xd_sample_denominator(&a->base, a->base.samples * a->base.elements));
    for (int64_t b = 0; b < a->base.samples; b++) {
        const double factor = xd_denoise_factor(a->terms + b);
        a->base.sample[b].factor = isfinite(factor) ? factor : 0.0;
    }
    XD_TRY(xdi_sample_spread(launch, &job, xdi_sample_measure_piece));
    for (int64_t b = 0; b < a->base.samples; b++) {
        if (xd_sample_chunks(a->base.elements) != 1) xd_sample_join_chunks(&a->base, b);
        xd_denoise_weigh_sample(a, b);
        zeros = zeros || a->base.sample[b].factor == 0.0;
    }
    return sloped && zeros ? xdi_sample_spread(launch, &job, xdi_sample_write_piece) : XD_OK;
}

/* ---- the table ---- */

/* A sample of this many elements, in three tensors of f32, is three quarters of a MiB. */
enum { XDI_SAMPLE_CACHED = 4 * XD_SAMPLE_CHUNK };

static xd_result xdi_cpu_vsd_measure(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_vsd_measure(launch, args, xdi_plain_sample_level());
}

static xd_result xdi_cpu_vsd_rounded(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_vsd_rounded(launch, args, xdi_plain_sample_level());
}

static xd_result xdi_cpu_vsd_slope(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_vsd_slope(launch, args, xdi_plain_sample_level());
}

static xd_result xdi_cpu_denoise_measure(const xd_launch *launch, const xd_denoise_args *args) {
    return xdi_denoise_measure(launch, args, xdi_plain_sample_level());
}

static xd_result xdi_cpu_denoise_slope(const xd_launch *launch, const xd_denoise_args *args) {
    return xdi_denoise_slope(launch, args, xdi_plain_sample_level());
}

static xd_result xdi_cpu_vsd_by_sample(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_vsd_by_sample(launch, args, xdi_plain_sample_level());
}

static xd_result xdi_cpu_denoise_by_sample(const xd_launch *launch, const xd_denoise_args *args) {
    return xdi_denoise_by_sample(launch, args, xdi_plain_sample_level());
}

static xd_result xdi_cpu_vsd_weigh(const xd_launch *launch, const xd_vsd_args *args) {
    (void)launch;
    for (int64_t b = 0; b < args->base.samples; b++) xd_vsd_weigh_sample(args, b);
    return XD_OK;
}

static xd_result xdi_cpu_vsd_settle(const xd_launch *launch, const xd_vsd_args *args) {
    (void)launch;
    for (int64_t b = 0; b < args->base.samples; b++) xd_vsd_settle_sample(args, b);
    return XD_OK;
}

static xd_result xdi_cpu_denoise_weigh(const xd_launch *launch, const xd_denoise_args *args) {
    (void)launch;
    for (int64_t b = 0; b < args->base.samples; b++) xd_denoise_weigh_sample(args, b);
    return XD_OK;
}

static xd_result xdi_cpu_gan_terms(const xd_launch *launch, const xd_gan_args *args) {
    (void)launch;
    for (int64_t b = 0; b < args->base.samples; b++) xd_gan_sample(args, b);
    return XD_OK;
}

static xd_result xdi_cpu_gan_slope(const xd_launch *launch, const xd_gan_args *args) {
    (void)launch;
    for (int64_t b = 0; b < args->base.samples; b++) xd_gan_slope_sample(args, b);
    return XD_OK;
}

static xd_result xdi_cpu_sample_join(const xd_launch *launch, const xd_sample_args *args) {
    (void)launch;
    for (int64_t b = 0; b < args->samples; b++) xd_sample_join_chunks(args, b);
    return XD_OK;
}

static xd_result xdi_cpu_sample_total(const xd_launch *launch, const xd_sample_args *args) {
    (void)launch;
    xd_sample_total(args);
    return XD_OK;
}

static xd_result xdi_cpu_sample_finish(const xd_launch *launch, const xd_sample_args *args) {
    xd_sample_finish(args, launch->status);
    return XD_OK;
}

static xd_result xdi_cpu_fdistill_ratios(const xd_launch *launch, const xd_fdistill_args *args) {
    (void)launch;
    xd_fdistill_ratios_of(args);
    return XD_OK;
}

static xd_result xdi_cpu_fdistill_bins(const xd_launch *launch, const xd_fdistill_args *args) {
    xd_fdistill_bins_of(args, launch->status);
    return XD_OK;
}

static xd_result xdi_cpu_fdistill_weights(const xd_launch *launch, const xd_fdistill_args *args) {
    (void)launch;
    xd_fdistill_weights_of(args);
    return XD_OK;
}

XD_PRIVATE const xd_dmd_loss_kernels *xdi_dmd_loss_kernels_plain(void) {
    static const xd_dmd_loss_kernels kernels = {
        xdi_cpu_vsd_measure,
        xdi_cpu_vsd_weigh,
        xdi_cpu_vsd_rounded,
        xdi_cpu_vsd_settle,
        xdi_cpu_vsd_slope,
        xdi_cpu_denoise_measure,
        xdi_cpu_denoise_weigh,
        xdi_cpu_denoise_slope,
        xdi_cpu_gan_terms,
        xdi_cpu_gan_slope,
        xdi_cpu_sample_join,
        xdi_cpu_sample_total,
        xdi_cpu_sample_finish,
        xdi_cpu_fdistill_ratios,
        xdi_cpu_fdistill_bins,
        xdi_cpu_fdistill_weights,
        xdi_cpu_vsd_by_sample,
        xdi_cpu_denoise_by_sample,
        XDI_SAMPLE_CACHED,
        true,
        NULL,
    };
    return &kernels;
}
