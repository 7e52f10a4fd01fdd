#ifndef XDI_KERNEL_SPAN_H
#define XDI_KERNEL_SPAN_H

#include "base/cpu.h"
#include "base/internal.h"
#include "kernel/optimizer.h"
#include "kernel/reduce.h"
#include "kernel/optimizer_scalar.h"

/* Arrays are processed in spans that fit in the L1 cache: narrow ones are widened into a buffer and
 * rounded back from it, so that all arithmetic is over f32 and a CPU level is just a table of functions
 * on spans. The loops over arrays, spans and dtypes are written once, in cpu/optimizer.c and cpu/norm.c. */
enum { XDI_SPAN = 512 };

/* A gradient of more bytes is no longer in the caches when it is next read: its stores bypass them, which also avoids reading
 * the lines that it overwrites. In place, they have been read already. */
#define XDI_STREAMED ((int64_t)8 << 20)

/* A span's sum of squares in f32 is accurate above 2^-60: the error of subnormal terms is below 2^-140. */
#define XDI_SPAN_LEAST_SQUARES 8.673617379884035e-19

/* How far an average moves; see xd_lerp_f32. */
typedef struct xdi_span_average {
    float weight; /* 1 - keep */
    float keep;
    bool weighted_sum; /* fma(weight, source, keep * target) */
} xdi_span_average;

/* A conversion of rows. */
typedef struct xdi_span_mix {
    xd_mix factors;
    bool to_odd; /* from f64 to f32 by xd_float_to_odd, for a type that is narrower still */
    bool large;  /* memory is asked for ahead */
    /* stores bypass the caches where the level has such: out is a multiple of 64 bytes; a fence follows */
    bool streamed;
} xdi_span_mix;

/* Bytes between what conversions read and what they ask for. */
enum { XDI_MIX_AHEAD = 3072 };

/* Steps elements [at, at + n) of an array; `gradient` points to the first one's. */
typedef void (*xdi_span_update)(const xd_update_args *args, const xd_update_array *a, const float *gradient,
                                int64_t at, int64_t n);

/* The functions of a level on at most XDI_SPAN elements. All but power_sum give the same bits on every level; when an
 * operation has several NaNs as operands, the result may be any of them. */
typedef struct xdi_span_kernels {
    void (*widen)(const uint16_t *from, xd_dtype dtype, float *to, int64_t n); /* dtype: BF16 or F16 */
    void (*narrow)(const float *from, uint16_t *to, xd_dtype dtype, int64_t n);

    xdi_span_update adam;
    xdi_span_update sgd;
    void (*lerp)(const xdi_span_average *average, float *target, const float *source, int64_t n);
    void (*scale)(float *x, float factor, int64_t n);
    void (*add)(float *sum, const float *x, int64_t n); /* sum += x */

    /* Sum of |x|, sum of squares, or the largest |x|, by the type of norm, over BF16, F16 or F32. Not
     * finite when an element is not; the value has no other meaning then. */
    double (*power_sum)(const void *x, xd_dtype dtype, xd_norm_type type, int64_t n);

    /* lerp whose source is BF16, for a level where that is faster; NULL: the source is widened first. */
    void (*lerp_bf16)(const xdi_span_average *average, float *target, const uint16_t *source, int64_t n);

    bool binned; /* collects the terms of exact norms by exponent; for speed only */

    /* Rounds to BF16 at random; `element` is the index of the first in its whole parameter. NULL: as the plain spans do. */
    void (*round)(const xd_philox *random, int64_t element, const float *from, uint16_t *to, int64_t n);

    /* out = c0 p + c1 q as in kernel/dmd.h, over f32; q NULL: c0 p. NULL: as the plain spans do. */
    void (*mix)(const xdi_span_mix *mix, const float *p, const float *q, float *out, int64_t n);

    /* xd_lerp_compensated. NULL: as the plain spans do. */
    void (*compensated)(float weight, const float *source, float *target, uint16_t *compensation, int64_t n);

    /* mix whose arrays are all BF16, for a level where that is faster; NULL: they are widened first. */
    void (*mix_bf16)(const xdi_span_mix *mix, const uint16_t *p, const uint16_t *q, uint16_t *out, int64_t n);

    /* Streamed stores are in memory before later ones. NULL: this level streams nothing. */
    void (*fence)(void);
} xdi_span_kernels;

/* Arrays are distributed over threads in blocks, counted from the beginning of each array: the split depends on the
 * sizes of the arrays alone. */
enum { XDI_WALK_BLOCK = 1 << 16, XDI_WALK_PIECES = 128 };

/* What is done to arrays, one after the other: elements [begin, end) of array k. */
typedef struct xdi_walk {
    const void *job;
    int64_t arrays;
    int64_t (*count)(const void *job, int64_t k);
    void (*run)(const void *job, int64_t k, int64_t begin, int64_t end);
} xdi_walk;

/* cpu/span.c: does it, on the context's threads. */
XD_PRIVATE xd_result xdi_walk_run(const xd_launch *launch, const xdi_walk *w);

/* cpu/span.c: blocks per piece, *blocks receives the number of all blocks: few elements are one piece; and blocks [begin, end) of
 * those of all arrays, as a piece is given. */
XD_PRIVATE int64_t xdi_walk_grain(const xdi_walk *w, int64_t *blocks);
XD_PRIVATE void xdi_walk_piece(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                               int slot);

/* cpu/span.c: F32, BF16, F16. */
XD_PRIVATE bool xdi_span_takes(xd_dtype dtype);

/* cpu/span.c: elements of the span that begins at element `at` of `count`. */
XD_PRIVATE int64_t xdi_span_length(int64_t count, int64_t at);

/* cpu/span.c: elements [at, at + n) of an array as f32: the array itself, or `buffer` filled with
 * widened copies; and the reverse, which copies f32. */
XD_PRIVATE const float *xdi_span_widen(const xdi_span_kernels *spans, const void *data, xd_dtype dtype,
                                       int64_t at, int64_t n, float *buffer);
XD_PRIVATE void xdi_span_narrow(const xdi_span_kernels *spans, const float *values, void *data,
                                xd_dtype dtype, int64_t at, int64_t n);

/* cpu/optimizer.c: what the formulas of a step take from its arguments and from those of an array. */
XD_PRIVATE xd_update_rules xdi_update_rules_of(const xd_update_args *args);
XD_PRIVATE xd_update_scalars xdi_update_scalars_of(const xd_update_args *args, const xd_update_array *a);

/* cpu/optimizer.c: the other entries of the table, on the spans of a level. */
XD_PRIVATE xd_result xdi_update_run(const xd_launch *launch, const xd_update_args *args,
                                    const xdi_span_kernels *spans, xdi_span_update update);
XD_PRIVATE xd_result xdi_lerp_run(const xd_launch *launch, const xd_lerp_args *args,
                                  const xdi_span_kernels *spans);
XD_PRIVATE xd_result xdi_cast_run(const xd_launch *launch, const xd_cast_array *arrays, int64_t array_count,
                                  const xdi_span_kernels *spans);
XD_PRIVATE xd_result xdi_scale_run(const xd_launch *launch, const xd_scale_args *args,
                                   const xdi_span_kernels *spans);
XD_PRIVATE xd_result xdi_average_run(const xd_launch *launch, const xd_average_args *args,
                                     const xdi_span_kernels *spans);
XD_PRIVATE xd_result xdi_swap_run(const xd_launch *launch, const xd_swap_array *arrays, int64_t array_count);

/* cpu/norm.c: the entry of the table, on the spans of a level. */
XD_PRIVATE xd_result xdi_norm_run(const xd_launch *launch, const xd_norm_args *args, xd_norm_sum *sum,
                                  const xdi_span_kernels *spans);

/* cpu/norm.c: finite numbers' magnitudes or squares, added exactly to the limbs: one by one, or through bins by exponent,
 * which hold the terms of XDI_NORM_SETS * 2^14 elements and are emptied by flush. Bins pay from a few spans on. */
enum { XDI_NORM_SETS = 4, XDI_NORM_EXPONENTS = 256 };

typedef struct xdi_norm_bins {
    uint64_t sum[XDI_NORM_SETS][XDI_NORM_EXPONENTS];
} xdi_norm_bins;

XD_PRIVATE void xdi_norm_exact(int64_t *limbs, const float *x, int64_t n, bool square);
XD_PRIVATE void xdi_norm_bins_add(xdi_norm_bins *bins, const float *x, int64_t n, bool square);
XD_PRIVATE void xdi_norm_bins_flush(const xdi_norm_bins *bins, int64_t *limbs, bool square);

/* span_avx2.c: round with eight blocks of random numbers at a time. */
#if defined(XDI_X86)
XD_PRIVATE void xdi_avx2_round(const xd_philox *random, int64_t element, const float *from, uint16_t *to,
                               int64_t n);
#endif

/* cpu/optimizer.c: the plain spans and the plain table of entries. */
XD_PRIVATE const xdi_span_kernels *xdi_span_kernels_plain(void);
XD_PRIVATE const xd_optimizer_kernels *xdi_optimizer_kernels_plain(void);

/* A function and its spans make an entry, these entries the table of a level. */
#define XDI_SPAN_ENTRIES(level, spans)                                                                   \
    static xd_result xdi_##level##_entry_adam(const xd_launch *launch, const xd_update_args *args) {     \
        return xdi_update_run(launch, args, &(spans), (spans).adam);                                     \
    }                                                                                                    \
    static xd_result xdi_##level##_entry_sgd(const xd_launch *launch, const xd_update_args *args) {      \
        return xdi_update_run(launch, args, &(spans), (spans).sgd);                                      \
    }                                                                                                    \
    static xd_result xdi_##level##_entry_lerp(const xd_launch *launch, const xd_lerp_args *args) {       \
        return xdi_lerp_run(launch, args, &(spans));                                                     \
    }                                                                                                    \
    static xd_result xdi_##level##_entry_cast(const xd_launch *launch, const xd_cast_array *arrays,      \
                                              int64_t array_count) {                                     \
        return xdi_cast_run(launch, arrays, array_count, &(spans));                                      \
    }                                                                                                    \
    static xd_result xdi_##level##_entry_scale(const xd_launch *launch, const xd_scale_args *args) {     \
        return xdi_scale_run(launch, args, &(spans));                                                    \
    }                                                                                                    \
    static xd_result xdi_##level##_entry_norm(const xd_launch *launch, const xd_norm_args *args,         \
                                              xd_norm_sum *sum) {                                        \
        return xdi_norm_run(launch, args, sum, &(spans));                                                \
    }                                                                                                    \
    static xd_result xdi_##level##_entry_average(const xd_launch *launch, const xd_average_args *args) { \
        return xdi_average_run(launch, args, &(spans));                                                  \
    }                                                                                                    \
    static const xd_optimizer_kernels xdi_##level##_optimizer = {                                        \
        xdi_##level##_entry_adam,                                                                        \
        xdi_##level##_entry_sgd,                                                                         \
        xdi_##level##_entry_lerp,                                                                        \
        xdi_##level##_entry_cast,                                                                        \
        xdi_##level##_entry_scale,                                                                       \
        xdi_##level##_entry_norm,                                                                        \
        NULL,                                                                                            \
        NULL,                                                                                            \
        NULL,                                                                                            \
        xdi_##level##_entry_average,                                                                     \
        xdi_swap_run,                                                                                    \
        true,                                                                                            \
        NULL,                                                                                            \
    };                                                                                                   \
    XD_PRIVATE const xdi_span_kernels *xdi_span_kernels_##level(void) {                                  \
        return &(spans);                                                                                 \
    }                                                                                                    \
    XD_PRIVATE const xd_optimizer_kernels *xdi_optimizer_kernels_##level(void) {                         \
        return &xdi_##level##_optimizer;                                                                 \
    }

#endif
