/* Norms of a list of arrays. */

#include "kernel/internal.h"
#include "kernel/optimizer_scalar.h"
#include "kernel/span.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* Adds mantissa * 2^(bit - 320) to the limbs. mantissa < 2^48, so a limb grows by less than 2^33 a call. */
static void xdi_norm_add(int64_t *limbs, uint64_t mantissa, int bit) {
    const int limb = bit / 32, shift = bit % 32;
    const uint64_t low = (mantissa & 0xffffffffu) << shift, high = (mantissa >> 32) << shift;
    limbs[limb] += (int64_t)(low & 0xffffffffu);
    limbs[limb + 1] += (int64_t)(low >> 32) + (int64_t)(high & 0xffffffffu);
    limbs[limb + 2] += (int64_t)(high >> 32);
}

/* |x| or its square, added exactly. */
static void xdi_norm_add_f32(int64_t *limbs, float x, bool square) {
    int exponent;
    const uint64_t mantissa = xd_norm_mantissa(x, &exponent);
    if (square)
        xdi_norm_add(limbs, mantissa * mantissa, 2 * exponent + 320);
    else
        xdi_norm_add(limbs, mantissa, exponent + 320);
}

XD_PRIVATE void xdi_norm_exact(int64_t *limbs, const float *x, int64_t n, bool square) {
    for (int64_t i = 0; i < n; i++) xdi_norm_add_f32(limbs, x[i], square);
    xd_norm_carry(limbs);
}

/* Exact sums of many elements first add integers in bins by exponent: one addition per element, and limbs only once
 * per block. Four sets are used in turn, because neighbours often have the same exponent and would wait for each
 * other's addition. A mantissa's square is below 2^48, so a bin can hold 2^16 of them. */
enum { XDI_NORM_BLOCK = XDI_NORM_SETS << 14 };

XD_PRIVATE void xdi_norm_bins_add(xdi_norm_bins *bins, const float *x, int64_t n, bool square) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        const uint32_t exponent = (bits >> 23) & 0xffu;
        const uint64_t mantissa = (bits & 0x7fffffu) | (exponent ? 0x800000u : 0u);
        bins->sum[i % XDI_NORM_SETS][exponent] += square ? mantissa * mantissa : mantissa;
    }
}

/* Moves the bins of finite elements to the limbs. */
XD_PRIVATE void xdi_norm_bins_flush(const xdi_norm_bins *bins, int64_t *limbs, bool square) {
    for (int e = 0; e < XDI_NORM_EXPONENTS - 1; e++) {
        const int exponent = (e ? e : 1) - 150, bit = (square ? 2 * exponent : exponent) + 320;
        for (int set = 0; set < XDI_NORM_SETS; set++) {
            const uint64_t sum = bins->sum[set][e];
            if (sum == 0) continue;
            xdi_norm_add(limbs, sum & 0xffffffffu, bit);
            xdi_norm_add(limbs, sum >> 32, bit + 32);
        }
    }
    xd_norm_carry(limbs);
}

/* A span that may have infinities and NaNs: they are counted, the others added, one by one. */
static void xdi_norm_one_by_one(const xd_norm_args *args, const float *x, int64_t n, bool replica,
                                xd_norm_sum *sum) {
    double subtotal = 0.0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(x[i])) {
            sum->not_finite++;
            sum->nan += isnan(x[i]) ? 1 : 0;
        } else if (!replica) {
            const double magnitude = fabs((double)x[i]);
            if (args->type == XD_NORM_MAX)
                sum->largest = magnitude > sum->largest ? magnitude : sum->largest;
            else if (args->exact)
                xdi_norm_add_f32(sum->limbs, x[i], args->type == XD_NORM_L2);
            else
                subtotal += args->type == XD_NORM_L2 ? magnitude * magnitude : magnitude;
        }
    }
    sum->sum += subtotal;
    if (args->exact) xd_norm_carry(sum->limbs);
}

static void xdi_norm_span(const xd_norm_args *args, const xdi_span_kernels *spans, const xd_norm_array *a,
                          int64_t at, int64_t n, xd_norm_sum *sum) {
    float widened[XDI_SPAN];
    const char *x = (const char *)a->data + (size_t)at * xd_dtype_size(a->dtype);
    const double subtotal = spans->power_sum(x, a->dtype, args->type, n);
    const bool finite = subtotal <= DBL_MAX;
    if (!finite || (args->exact && args->type != XD_NORM_MAX && !a->replica)) {
        xdi_norm_one_by_one(args, xdi_span_widen(spans, a->data, a->dtype, at, n, widened), n, a->replica,
                            sum);
    } else if (!a->replica) {
        if (args->type == XD_NORM_MAX)
            sum->largest = subtotal > sum->largest ? subtotal : sum->largest;
        else
            sum->sum += subtotal;
    }
}

/* Adds elements [begin, end), at most a block, to the limbs, through bins. */
static void xdi_norm_block(const xd_norm_args *args, const xdi_span_kernels *spans, const xd_norm_array *a,
                           int64_t begin, int64_t end, xd_norm_sum *sum) {
    const bool square = args->type == XD_NORM_L2;
    float widened[XDI_SPAN];
    xdi_norm_bins bins;
    bool finite = true;
    memset(&bins, 0, sizeof bins);
    for (int64_t at = begin; at < end; at += XDI_SPAN) {
        const int64_t n = xdi_span_length(end, at);
        xdi_norm_bins_add(&bins, xdi_span_widen(spans, a->data, a->dtype, at, n, widened), n, square);
    }
    for (int set = 0; set < XDI_NORM_SETS; set++)
        finite = finite && bins.sum[set][XDI_NORM_EXPONENTS - 1] == 0;
    if (finite)
        xdi_norm_bins_flush(&bins, sum->limbs, square);
    else
        for (int64_t at = begin; at < end; at += XDI_SPAN) {
            const int64_t n = xdi_span_length(end, at);
            xdi_norm_one_by_one(args, xdi_span_widen(spans, a->data, a->dtype, at, n, widened), n, false,
                                sum);
        }
}

/* The arrays of a norm, and the sum of each piece. */
typedef struct xdi_norm_job {
    const xd_norm_args *args;
    const xdi_span_kernels *spans;
    xd_norm_sum *sum;
} xdi_norm_job;

static int64_t xdi_norm_count(const void *job, int64_t k) {
    return ((const xdi_norm_job *)job)->args->arrays[k].count;
}

static void xdi_norm_part(const void *job, int64_t k, int64_t begin, int64_t end) {
    const xdi_norm_job *j = (const xdi_norm_job *)job;
    const xd_norm_array *a = &j->args->arrays[k];
    /* Bins pay from a few spans on: emptying them costs as much as adding one. */
    const bool binned = j->spans->binned && j->args->exact && j->args->type != XD_NORM_MAX && !a->replica &&
                        a->count >= 4 * XDI_SPAN;
    for (int64_t at = begin; binned && at < end; at += XDI_NORM_BLOCK)
        xdi_norm_block(j->args, j->spans, a, at, end - at < XDI_NORM_BLOCK ? end : at + XDI_NORM_BLOCK,
                       j->sum);
    for (int64_t at = begin; !binned && at < end; at += XDI_SPAN)
        xdi_norm_span(j->args, j->spans, a, at, xdi_span_length(end, at), j->sum);
}

/* The sums of all pieces. */
typedef struct xdi_norm_pieces {
    xdi_norm_job job;
    int64_t blocks, grain;
    xd_norm_sum sums[XDI_WALK_PIECES];
} xdi_norm_pieces;

static void xdi_norm_piece(void *argument, int64_t piece, int slot) {
    xdi_norm_pieces *p = (xdi_norm_pieces *)argument;
    xdi_norm_job job = p->job;
    const xdi_walk walk = { &job, job.args->array_count, xdi_norm_count, xdi_norm_part };
    const int64_t begin = piece * p->grain, left = p->blocks - begin;
    job.sum = &p->sums[piece];
    xdi_walk_piece(NULL, &walk, begin, begin + (left < p->grain ? left : p->grain), slot);
}

static void xdi_norm_join(xd_norm_sum *sum, const xd_norm_sum *part) {
    sum->sum += part->sum;
    sum->largest = part->largest > sum->largest ? part->largest : sum->largest;
    sum->not_finite += part->not_finite;
    sum->nan += part->nan;
    for (int i = 0; i < XD_NORM_LIMBS; i++) sum->limbs[i] += part->limbs[i];
    xd_norm_carry(sum->limbs);
}

/* norm: the part of these arrays in (sum |x|^p)^(1/p), p = 1 or 2, or in max |x|. Either a double sum in the order of
 * arrays, piece by piece, which depends on how arrays are split, or an exact one, which does not. */
XD_PRIVATE xd_result xdi_norm_run(const xd_launch *launch, const xd_norm_args *args, xd_norm_sum *sum,
                                  const xdi_span_kernels *spans) {
    xdi_norm_pieces p = { { args, spans, sum }, 0, 0, { { 0.0, 0.0, 0, 0, { 0 } } } };
    const xdi_walk walk = { &p.job, args->array_count, xdi_norm_count, xdi_norm_part };
    for (int64_t k = 0; k < args->array_count; k++)
        XD_REQUIRE(launch->ctx, xdi_span_takes(args->arrays[k].dtype), XD_ERROR_DTYPE,
                   "array %lld: norms take F32, BF16 or F16, not %s", (long long)k,
                   xd_dtype_name(args->arrays[k].dtype));
    p.grain = xdi_walk_grain(&walk, &p.blocks);
    const int64_t pieces = (p.blocks + p.grain - 1) / p.grain;
    if (pieces <= 1) {
        xdi_walk_piece(launch, &walk, 0, p.blocks, 0);
        return XD_OK;
    }
    XD_TRY(xdi_parallel(launch->ctx, pieces, xdi_norm_piece, &p));
    for (int64_t i = 0; i < pieces; i++) xdi_norm_join(sum, &p.sums[i]);
    return XD_OK;
}
