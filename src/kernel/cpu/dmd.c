/* Plain kernels of distribution matching: kernel/dmd.h has the formulas. */

#include "kernel/cpu/dmd.h"
#include "kernel/dmd_scalar.h"

/* Elements [begin, end) of the tensor out, which cover several rows or a part of one. */
static void xdi_cpu_mix_piece(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                              int slot) {
    const xd_mix_desc *d = (const xd_mix_desc *)args;
    (void)launch, (void)slot;
    for (int64_t i = begin; i < end; i++) {
        const int64_t r = i / d->out.cols, c = i - r * d->out.cols;
        const xd_mix mix = d->mix[r];
        const bool both = d->q.data && mix.c1 != 0.0;
        const double p = xd_element_load(d->p.data, d->p.dtype, r * d->p.stride + c);
        const double q = both ? xd_element_load(d->q.data, d->q.dtype, r * d->q.stride + c) : 0.0;
        xd_store_once(d->out.data, d->out.dtype, r * d->out.stride + c, xd_mix_of(mix, both, p, q));
    }
}

static xd_result xdi_cpu_mix(const xd_launch *launch, const xd_mix_desc *desc) {
    return xdi_spread_elements(launch, desc->out.rows * desc->out.cols, 1, xdi_cpu_mix_piece, desc);
}

/* ---- draw ---- */

/* Blocks [begin, end) of the sequences of all rows. */
static void xdi_cpu_draw_piece(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                               int slot) {
    const xd_draw_desc *d = (const xd_draw_desc *)args;
    const int64_t blocks = xd_draw_blocks(d);
    (void)launch, (void)slot;
    for (int64_t i = begin, r = begin / blocks; i < end; r++) {
        const xd_philox random = xd_draw_of(d, r);
        for (; i < end && i < (r + 1) * blocks; i++) {
            const int64_t block = d->first / 4 + (i - r * blocks), column = 4 * block - d->first;
            float lanes[4];
            xd_philox_lanes(&random, block, !d->uniform, lanes);
            for (int k = 0; k < 4; k++)
                if (column + k >= 0 && column + k < d->out.cols)
                    xd_element_store(d->out.data, d->out.dtype, r * d->out.stride + column + k,
                                     (double)lanes[k]);
        }
    }
}

static xd_result xdi_cpu_draw(const xd_launch *launch, const xd_draw_desc *desc) {
    const int64_t grain = 4096; /* some hundred microseconds */
    if (desc->out.rows == 0 || desc->out.cols == 0) return XD_OK;
    return xdi_spread_items(launch, desc->out.rows * xd_draw_blocks(desc), grain, xdi_cpu_draw_piece, desc);
}

XD_PRIVATE const xd_dmd_kernels *xdi_dmd_kernels_plain(void) {
    static const xd_dmd_kernels kernels = { xdi_cpu_mix, xdi_cpu_draw };
    return &kernels;
}
