/* Distribution matching on vectors, with the bits of the plain kernels: tiles are widened to f32 and rounded back by the
 * spans of the level, and the arithmetic between is that of kernel/dmd.h. */

#include "kernel/cpu/dmd.h"
#include "kernel/dmd_scalar.h"
#include "kernel/simd/dmd.h"

static bool xdi_simd_mix_takes(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F16;
}

/* Whether a level mixes these arrays as they are. */
static bool xdi_simd_mix_narrow(const xdi_span_kernels *spans, const xd_mix_desc *d, bool both) {
    return spans->mix_bf16 && d->p.dtype == XD_DTYPE_BF16 && d->out.dtype == XD_DTYPE_BF16 &&
           (!both || d->q.dtype == XD_DTYPE_BF16);
}

/* How a span that begins at `out` goes through memory. */
static void xdi_simd_mix_way(const xdi_span_kernels *spans, const xd_mix_desc *d, const void *out,
                             xdi_span_mix *mix) {
    const bool apart = d->out.data != d->p.data && d->out.data != d->q.data;
    mix->large = d->out.rows * d->out.stride * (int64_t)xd_dtype_size(d->out.dtype) > XDI_STREAMED;
    mix->streamed = mix->large && apart && spans->fence && (uintptr_t)out % 64 == 0;
}

/* Elements [c, c + n) of row r, n at most XDI_SPAN. */
static void xdi_simd_mix_span(const xdi_span_kernels *spans, const xd_mix_desc *d, int64_t r, int64_t c,
                              int64_t n) {
    float p_room[XDI_SPAN], q_room[XDI_SPAN], rounded[XDI_SPAN];
    const bool narrow = d->out.dtype != XD_DTYPE_F32;
    const bool both = d->q.data && d->mix[r].c1 != 0.0;
    void *const to =
        (char *)d->out.data + (size_t)(r * d->out.stride + c) * (narrow ? sizeof(uint16_t) : sizeof(float));
    xdi_span_mix mix;
    mix.factors = d->mix[r];
    mix.to_odd = narrow;
    xdi_simd_mix_way(spans, d, to, &mix);
    if (xdi_simd_mix_narrow(spans, d, both)) {
        spans->mix_bf16(&mix, (const uint16_t *)d->p.data + (r * d->p.stride + c),
                        both ? (const uint16_t *)d->q.data + (r * d->q.stride + c) : NULL, (uint16_t *)to, n);
        return;
    }
    const float *p = xdi_span_widen(spans, d->p.data, d->p.dtype, r * d->p.stride + c, n, p_room), *q = NULL;
    if (narrow) mix.streamed = false;
    if (both) q = xdi_span_widen(spans, d->q.data, d->q.dtype, r * d->q.stride + c, n, q_room);
    (spans->mix ? spans->mix : xdi_span_kernels_plain()->mix)(&mix, p, q, narrow ? rounded : (float *)to, n);
    if (narrow) spans->narrow(rounded, (uint16_t *)to, d->out.dtype, n);
}

static void xdi_simd_mix_piece(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                               int slot) {
    const xd_mix_desc *d = (const xd_mix_desc *)args;
    const xdi_span_kernels *spans = xdi_span_kernels_level(xd_ctx_settings(launch->ctx)->cpu);
    (void)slot;
    for (int64_t i = begin, n; i < end; i += n) {
        const int64_t r = i / d->out.cols, c = i - r * d->out.cols, row = d->out.cols - c;
        n = row < end - i ? row : end - i;
        if (n > XDI_SPAN) n = XDI_SPAN;
        xdi_simd_mix_span(spans, d, r, c, n);
    }
    if (spans->fence) spans->fence();
}

static xd_result xdi_simd_mix(const xd_launch *launch, const xd_mix_desc *d) {
    const bool vectors = xdi_simd_mix_takes(d->p.dtype) && xdi_simd_mix_takes(d->out.dtype) &&
                         (!d->q.data || xdi_simd_mix_takes(d->q.dtype));
    if (!vectors) return xdi_dmd_kernels_plain()->mix(launch, d);
    return xdi_spread_elements(launch, d->out.rows * d->out.cols, 1, xdi_simd_mix_piece, d);
}

XD_PRIVATE void xdi_simd_dmd_fill(xd_dmd_kernels *kernels) {
    kernels->mix = xdi_simd_mix;
}
