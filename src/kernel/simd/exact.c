/* INVARIANT mode's sums of a row on vectors, tile by tile: the terms of the plain kernels, and integers are
 * added in any order. Terms that are large or not finite, and the last few columns, are left to those. */

#include "kernel/simd/loops.h"

#include <math.h>
#include <string.h>

static bool xdi_exact_narrow(const xd_rows *x) {
    return !x->data || x->dtype == XD_DTYPE_F32 || x->dtype == XD_DTYPE_BF16;
}

/* Adds the sums of a tile. False when one of them might overflow in between, which only the plain kernels detect,
 * term by term; nothing is added then. */
static bool xdi_exact_join(xd_fixed *sums, const xd_fixed *part, int count) {
    const int64_t room = (int64_t)1 << 54;
    for (int i = 0; i < count; i++)
        if (sums[i].high >= room || sums[i].high <= -room) return false;
    for (int i = 0; i < count; i++) {
        sums[i].high += part[i].high;
        sums[i].low += part[i].low;
    }
    return true;
}

/* ---- sums of a loss ---- */

/* The sums of n columns; a hard loss together with a soft one of temperature 1 has the same terms. */
static bool xdi_exact_tile_stats(const xdi_exact_level *level, const xd_loss_args *a,
                                 const xdi_exact_tile *tile, int64_t n, xd_fixed *part) {
    const bool hard = xdi_loss_has_hard(a), soft = xdi_loss_has_soft(a);
    const bool shared = soft && a->temperature == 1.0;
    memset(part, 0, XD_LOSS_SUMS * sizeof *part);
    if (soft && !level->pair(tile, n, a->divergence, part)) return false;
    if (!hard) return true;
    if (shared)
        part[XD_LOSS_HARD] = part[XD_LOSS_SOFT];
    else if (!level->powers(tile->x, n, tile->max, 1.0, &part[XD_LOSS_HARD]))
        return false;
    return a->uniform_weight == 0.0 || level->linear(tile->x, n, tile->max, &part[XD_LOSS_LINEAR]);
}

static void xdi_exact_stats_row(const void *state, const xd_loss_args *a, int64_t r, const double *ref,
                                xdi_loss_sums *sums) {
    const xdi_exact_level *level = (const xdi_exact_level *)state;
    const int64_t columns = xdi_loss_columns(a), whole = columns - columns % level->lanes;
    const bool soft = xdi_loss_has_soft(a);
    xdi_exact_tile tile;
    memset(&tile, 0, sizeof tile);
    tile.max = ref[XD_LOSS_MAX];
    tile.teacher_max = ref[XD_LOSS_TEACHER_MAX];
    tile.teacher_at_arg = ref[XD_LOSS_TEACHER_AT_ARG];
    tile.scale = 1.0 / a->temperature;
    for (int64_t c = 0; c < whole; c += XDI_TILE) {
        const int64_t n = xdi_simd_tile_at(c, whole);
        xd_fixed part[XD_LOSS_SUMS];
        tile.x = xdi_simd_array_of(&a->student, r, c);
        if (soft) tile.y = xdi_simd_array_of(&a->teacher, r, c);
        if (!xdi_exact_tile_stats(level, a, &tile, n, part) ||
            !xdi_exact_join(sums->exact, part, XD_LOSS_BAD))
            xdi_loss_stats_columns(a, r, c, c + n, ref, sums);
    }
    xdi_loss_stats_columns(a, r, whole, columns, ref, sums);
}

XD_PRIVATE xd_result xdi_exact_stats(const xd_launch *launch, const xd_loss_args *a) {
    if (!xdi_exact_narrow(&a->student) || !xdi_exact_narrow(&a->teacher))
        return xdi_loss_kernels_cpu_plain()->stats(launch, a);
    return xdi_loss_stats_rows(launch, a, xdi_exact_stats_row, xdi_loops_of(launch)->exact);
}

static void xdi_exact_mixture_row(const void *state, const xd_loss_args *a, int64_t r, const double *ref,
                                  xdi_loss_sums *sums) {
    const xdi_exact_level *level = (const xdi_exact_level *)state;
    const int64_t columns = xdi_loss_columns(a), whole = columns - columns % level->lanes;
    xdi_exact_tile tile;
    (void)ref;
    memset(&tile, 0, sizeof tile);
    tile.scale = 1.0 / a->temperature;
    for (int64_t c = 0; c < whole; c += XDI_TILE) {
        const int64_t n = xdi_simd_tile_at(c, whole);
        xd_fixed part[XD_LOSS_MIXTURES];
        tile.x = xdi_simd_array_of(&a->student, r, c);
        tile.y = xdi_simd_array_of(&a->teacher, r, c);
        if (!level->mixture(&tile, n, a->row + r, a->beta, part) ||
            !xdi_exact_join(sums->exact, part, XD_LOSS_MIXTURES))
            xdi_loss_mixture_columns(a, r, c, c + n, sums);
    }
    xdi_loss_mixture_columns(a, r, whole, columns, sums);
}

XD_PRIVATE xd_result xdi_exact_mixtures(const xd_launch *launch, const xd_loss_args *a) {
    if (!xdi_exact_narrow(&a->student) || !xdi_exact_narrow(&a->teacher))
        return xdi_loss_kernels_cpu_plain()->mixture(launch, a);
    return xdi_loss_mixture_rows(launch, a, xdi_exact_mixture_row, xdi_loops_of(launch)->exact);
}

/* ---- sums outside the ids of a top-k loss ---- */

static void xdi_exact_topk_columns(const void *state, const xd_topk_args *a, int64_t r, int64_t begin,
                                   int64_t end, xdi_topk_sums *sums) {
    const xdi_exact_level *level = (const xdi_exact_level *)state;
    const int64_t whole = end - (end - begin) % level->lanes;
    for (int64_t c = begin; c < whole; c += XDI_TILE) {
        const int64_t n = xdi_simd_tile_at(c, whole);
        const xdi_simd_array x = xdi_simd_array_of(&a->logits, r, c);
        xd_fixed part[XD_TOPK_SUMS];
        memset(part, 0, sizeof part);
        if (!level->moments(x, n, a->maxima[r], 1.0 / a->temperature, &part[XD_TOPK_OUTSIDE],
                            &part[XD_TOPK_ENTROPY]) ||
            !xdi_exact_join(sums->exact, part, XD_TOPK_BAD))
            xdi_topk_stats_columns(NULL, a, r, c, c + n, sums);
    }
    xdi_topk_stats_columns(NULL, a, r, whole, end, sums);
}

XD_PRIVATE xd_result xdi_exact_topk_stats(const xd_launch *launch, const xd_topk_args *a) {
    return xdi_topk_stats_rows(launch, a, xdi_exact_topk_columns, xdi_loops_of(launch)->exact);
}
