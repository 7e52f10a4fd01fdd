/* Sums over ranks by spans. */

#include "kernel/simd/internal.h"

#include <string.h>

static bool xdi_reduce_takes_spans(xd_dtype dtype, xd_reduce_op op) {
    return (op == XD_SUM || op == XD_AVG) &&
           (dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F16);
}

/* The arguments of the entry, and the spans of the context's level. */
typedef struct xdi_reduce_spans_job {
    const xdi_span_kernels *spans;
    void *out;
    const void *const *pieces;
    int ranks;
    xd_dtype dtype;
    xd_reduce_op op;
    bool in_out; /* sums grow where they go */
} xdi_reduce_spans_job;

static void xdi_reduce_spans(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                             int slot) {
    const xdi_reduce_spans_job *j = (const xdi_reduce_spans_job *)args;
    const xdi_span_kernels *spans = j->spans;
    float sum[XDI_SPAN], widened[XDI_SPAN];
    (void)launch, (void)slot;
    for (int64_t at = begin; at < end; at += XDI_SPAN) {
        const int64_t n = xdi_span_length(end, at);
        float *total = j->in_out ? (float *)j->out + at : sum;
        const float *first = xdi_span_widen(spans, j->pieces[0], j->dtype, at, n, sum);
        if (first != total) memcpy(total, first, (size_t)n * sizeof *total);
        for (int r = 1; r < j->ranks; r++)
            spans->add(total, xdi_span_widen(spans, j->pieces[r], j->dtype, at, n, widened), n);
        if (j->op == XD_AVG) spans->scale(total, 1.0f / (float)j->ranks, n);
        if (!j->in_out) xdi_span_narrow(spans, sum, j->out, j->dtype, at, n);
    }
}

/* f32 is summed in `out`, unless that is a piece that is still to be read. */
static bool xdi_reduce_fits_out(const void *out, const void *const *pieces, int ranks, xd_dtype dtype) {
    bool fits = dtype == XD_DTYPE_F32;
    for (int r = 1; r < ranks; r++) fits = fits && pieces[r] != out;
    return fits;
}

static xd_result xdi_simd_reduce_pieces(const xd_launch *launch, void *out, const void *const *pieces,
                                        int ranks, int64_t count, xd_dtype dtype, xd_reduce_op op) {
    if (!xdi_reduce_takes_spans(dtype, op))
        return xdi_reduce_kernels_cpu()->pieces(launch, out, pieces, ranks, count, dtype, op);
    const xdi_span_kernels *spans = xdi_span_kernels_level(xd_ctx_settings(launch->ctx)->cpu);
    const bool in_out = xdi_reduce_fits_out(out, pieces, ranks, dtype);
    const xdi_reduce_spans_job job = { spans, out, pieces, ranks, dtype, op, in_out };
    return xdi_spread_elements(launch, count, ranks, xdi_reduce_spans, &job);
}

/* The nodes of a sum over leaves, in their order, at most two; returns how many there are. */
static int64_t xdi_reduce_nodes(const void *const *forests, const xd_leaves *leaves, int ranks,
                                int64_t stride, const void *nodes[2]) {
    int64_t count = 0;
    for (int r = 0; r < ranks; r++) {
        const int64_t own = xd_leaves_nodes(leaves[r].first, leaves[r].count);
        for (int64_t i = 0; i < own && count + i < 2; i++)
            nodes[count + i] = (const float *)forests[r] + i * stride;
        count += own;
    }
    return count;
}

/* Two nodes are a sum of two pieces. */
static xd_result xdi_simd_reduce_leaves(const xd_launch *launch, void *out, const void *const *forests,
                                        const xd_leaves *leaves, int ranks, int64_t stride, int64_t count,
                                        xd_dtype dtype, xd_reduce_op op) {
    const void *nodes[2] = { NULL, NULL };
    if (dtype == XD_DTYPE_F32 && op == XD_SUM && xdi_reduce_nodes(forests, leaves, ranks, stride, nodes) == 2)
        return xdi_simd_reduce_pieces(launch, out, nodes, 2, count, dtype, op);
    return xdi_reduce_kernels_cpu()->leaves(launch, out, forests, leaves, ranks, stride, count, dtype, op);
}

/* ---- a sum that takes what it adds ---- */

typedef struct xdi_reduce_absorb_job {
    const xdi_span_kernels *spans;
    float *sum, *x;
} xdi_reduce_absorb_job;

static void xdi_reduce_absorb_spans(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                    int slot) {
    const xdi_reduce_absorb_job *j = (const xdi_reduce_absorb_job *)args;
    (void)launch, (void)slot;
    for (int64_t at = begin; at < end; at += XDI_SPAN) {
        const int64_t n = xdi_span_length(end, at);
        j->spans->add(j->sum + at, j->x + at, n);
        memset(j->x + at, 0, (size_t)n * sizeof *j->x);
    }
}

XD_PRIVATE xd_result xdi_reduce_absorb(const xd_launch *launch, float *sum, float *x, int64_t count) {
    const xdi_reduce_absorb_job job = { xdi_span_kernels_level(xd_ctx_settings(launch->ctx)->cpu), sum, x };
    return xdi_spread_elements(launch, count, 2, xdi_reduce_absorb_spans, &job);
}

XD_PRIVATE void xdi_simd_reduce_fill(xd_reduce_kernels *kernels) {
    kernels->pieces = xdi_simd_reduce_pieces;
    kernels->leaves = xdi_simd_reduce_leaves;
}
