/* Sums over ranks by spans. */

#include "kernel/simd/internal.h"

#include <string.h>

static bool xdi_reduce_takes_spans(xd_dtype dtype, xd_reduce_op op) {
    return (op == XD_SUM || op == XD_AVG) &&
           (dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F16);
}

static void xdi_reduce_spans(const xdi_span_kernels *spans, void *out, const void *const *pieces, int ranks,
                             int64_t count, xd_dtype dtype, xd_reduce_op op) {
    float sum[XDI_SPAN], widened[XDI_SPAN];
    for (int64_t at = 0; at < count; at += XDI_SPAN) {
        const int64_t n = xdi_span_length(count, at);
        const float *first = xdi_span_widen(spans, pieces[0], dtype, at, n, sum);
        if (first != sum) memcpy(sum, first, (size_t)n * sizeof *sum);
        for (int r = 1; r < ranks; r++)
            spans->add(sum, xdi_span_widen(spans, pieces[r], dtype, at, n, widened), n);
        if (op == XD_AVG) spans->scale(sum, 1.0f / (float)ranks, n);
        xdi_span_narrow(spans, sum, out, dtype, at, n);
    }
}

static xd_result xdi_fast_reduce_pieces(const xd_launch *launch, void *out, const void *const *pieces,
                                        int ranks, int64_t count, xd_dtype dtype, xd_reduce_op op) {
    if (!xdi_reduce_takes_spans(dtype, op))
        return xd_reduce_kernels_cpu()->pieces(launch, out, pieces, ranks, count, dtype, op);
    xdi_reduce_spans(xdi_span_kernels_level(xd_ctx_settings(launch->ctx)->cpu), out, pieces, ranks, count,
                     dtype, op);
    return XD_OK;
}

XD_PRIVATE void xdi_fast_reduce_fill(xd_reduce_kernels *kernels) {
    kernels->pieces = xdi_fast_reduce_pieces;
}
