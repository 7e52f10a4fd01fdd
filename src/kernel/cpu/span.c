/* Loops over arrays in blocks, for threads, and over a block in spans. */

#include "kernel/internal.h"
#include "kernel/span.h"

#include <string.h>

static int64_t xdi_walk_blocks(const xdi_walk *w, int64_t k) {
    return (w->count(w->job, k) + XDI_WALK_BLOCK - 1) / XDI_WALK_BLOCK;
}

XD_PRIVATE void xdi_walk_piece(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                               int slot) {
    const xdi_walk *w = (const xdi_walk *)args;
    int64_t first = 0; /* block of array k */
    (void)launch, (void)slot;
    for (int64_t k = 0; k < w->arrays && first < end; k++) {
        const int64_t count = w->count(w->job, k), blocks = xdi_walk_blocks(w, k);
        const int64_t from = begin > first ? begin - first : 0,
                      to = end - first < blocks ? end - first : blocks;
        if (from < to)
            w->run(w->job, k, from * XDI_WALK_BLOCK,
                   to * XDI_WALK_BLOCK < count ? to * XDI_WALK_BLOCK : count);
        first += blocks;
    }
}

XD_PRIVATE int64_t xdi_walk_grain(const xdi_walk *w, int64_t *blocks) {
    int64_t elements = 0;
    *blocks = 0;
    for (int64_t k = 0; k < w->arrays; k++) {
        elements += w->count(w->job, k);
        *blocks += xdi_walk_blocks(w, k);
    }
    if (elements <= XDI_WALK_BLOCK) return *blocks > 0 ? *blocks : 1;
    return (*blocks + XDI_WALK_PIECES - 1) / XDI_WALK_PIECES;
}

XD_PRIVATE xd_result xdi_walk_run(const xd_launch *launch, const xdi_walk *w) {
    int64_t blocks;
    const int64_t grain = xdi_walk_grain(w, &blocks);
    return xdi_spread_items(launch, blocks, grain, xdi_walk_piece, w);
}

XD_PRIVATE bool xdi_span_takes(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F16;
}

XD_PRIVATE int64_t xdi_span_length(int64_t count, int64_t at) {
    const int64_t room = XDI_SPAN;
    return count - at < room ? count - at : room;
}

XD_PRIVATE const float *xdi_span_widen(const xdi_span_kernels *spans, const void *data, xd_dtype dtype,
                                       int64_t at, int64_t n, float *buffer) {
    if (dtype == XD_DTYPE_F32) return (const float *)data + at;
    spans->widen((const uint16_t *)data + at, dtype, buffer, n);
    return buffer;
}

XD_PRIVATE void xdi_span_narrow(const xdi_span_kernels *spans, const float *values, void *data,
                                xd_dtype dtype, int64_t at, int64_t n) {
    if (dtype == XD_DTYPE_F32)
        memcpy((float *)data + at, values, (size_t)n * sizeof *values);
    else
        spans->narrow(values, (uint16_t *)data + at, dtype, n);
}
