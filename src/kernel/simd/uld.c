/* Universal logit distillation on vectors of f32. Chunks and rows that f32 cannot represent are left to the plain kernels. */

#include "kernel/cpu/uld.h"
#include "kernel/simd/loops.h"

#include <math.h>
#include <string.h>

/* Rows that are multiplied by less than this, or by more than its inverse, are left to double. */
#define XDI_ULD_LEAST 1e-30

/* scale times a row's probabilities; false where f32 does not fit. */
static bool xdi_simd_uld_power(const xd_uld_rows *side, int64_t row, double scale, xdi_xtoken_power *p) {
    const double *part = side->parts + row * XD_SOFTMAX_PARTS, least = XDI_ULD_LEAST;
    const double lse = part[XD_SOFTMAX_MAX] / side->temperature + log(part[XD_SOFTMAX_SUM]);
    if (scale != 0.0 && !(fabs(scale) > least && fabs(scale) < 1.0 / least)) return false;
    return xdi_simd_xtoken_power(side->temperature, lse, scale, p);
}

/* ---- compare ---- */

/* The state of one chunk. */
typedef struct xdi_simd_uld {
    const xdi_uld_loops *loops;
    const xd_uld_args *a;
    xd_uld_chunk *chunk;
    xdi_xtoken_power power[XD_ULD_SIDES];
    float *slope;
    double mean;
    xdi_uld_tile tile;
} xdi_simd_uld;

/* Logits of ranks [r, r + n), -infinity past the list's end. */
static void xdi_simd_uld_logits(const uint64_t *sorted, int64_t count, int64_t r, int64_t n, float *out) {
    int64_t i = 0;
    for (; i < n && r + i < count; i++) out[i] = xd_float_of_key((uint32_t)(sorted[r + i] >> 32));
    for (; i < n; i++) out[i] = -INFINITY;
}

static void xdi_simd_uld_unmatched(xdi_simd_uld *f, int64_t at) {
    const xd_uld_rows *student = &f->a->side[XD_ULD_STUDENT], *teacher = &f->a->side[XD_ULD_TEACHER];
    const uint64_t *x = student->sorted + at * student->count, *y = teacher->sorted + at * teacher->count;
    const int64_t longest = student->count > teacher->count ? student->count : teacher->count;
    const float weight = (float)f->a->unmatched_weight;
    for (int64_t r = 0; student->count > 0 && teacher->count > 0 && r < longest; r += XDI_ULD_TILE) {
        const int64_t n = longest - r < XDI_ULD_TILE ? longest - r : (int64_t)XDI_ULD_TILE;
        xdi_simd_uld_logits(x, student->count, r, n, f->tile.x);
        xdi_simd_uld_logits(y, teacher->count, r, n, f->tile.y);
        f->loops->ranks(&f->tile, n, &f->power[XD_ULD_STUDENT], &f->power[XD_ULD_TEACHER]);
        f->chunk->unmatched += f->tile.value;
        f->mean += f->a->unmatched_weight * f->tile.mean;
        for (int64_t i = 0; f->slope && i < n && r + i < student->count; i++)
            f->slope[(uint32_t)x[r + i]] = weight * f->tile.slope[i];
    }
}

static void xdi_simd_uld_matched(xdi_simd_uld *f) {
    const xd_uld_args *a = f->a;
    const float weight = (float)a->matched_weight;
    for (int64_t first = 0; first < a->matched_count; first += XDI_ULD_TILE) {
        const int64_t left = a->matched_count - first, n = left < XDI_ULD_TILE ? left : (int64_t)XDI_ULD_TILE;
        const int32_t *s = a->matched[XD_ULD_STUDENT] + first, *t = a->matched[XD_ULD_TEACHER] + first;
        for (int64_t i = 0; i < n; i++) {
            f->tile.x[i] =
                (float)xdi_loss_load(&a->side[XD_ULD_STUDENT].logits, f->chunk->base[XD_ULD_STUDENT], s[i]);
            f->tile.y[i] =
                (float)xdi_loss_load(&a->side[XD_ULD_TEACHER].logits, f->chunk->base[XD_ULD_TEACHER], t[i]);
        }
        f->loops->pairs(&f->tile, n, &f->power[XD_ULD_STUDENT], &f->power[XD_ULD_TEACHER], a->beta);
        f->chunk->matched += f->tile.value;
        f->mean += a->matched_weight * f->tile.mean;
        for (int64_t i = 0; f->slope && i < n; i++) f->slope[s[i]] = weight * f->tile.slope[i];
    }
}

/* False when nothing was done. */
static bool xdi_simd_uld_chunk(const xd_launch *launch, const xd_uld_args *a, int64_t i) {
    const int64_t columns = a->side[XD_ULD_STUDENT].columns;
    xdi_simd_uld f;
    f.loops = xdi_loops_of(launch)->uld;
    f.a = a;
    f.chunk = &a->chunks[i];
    f.slope = a->slope ? a->slope + i * columns : NULL;
    f.mean = 0.0;
    for (int which = 0; which < XD_ULD_SIDES; which++)
        if (!xdi_simd_uld_power(&a->side[which], f.chunk->base[which], f.chunk->factor[which],
                                &f.power[which]) ||
            f.chunk->factor[which] == 0.0)
            return false;
    f.chunk->matched = f.chunk->unmatched = 0.0;
    if (f.slope) memset(f.slope, 0, (size_t)columns * sizeof *f.slope);
    xdi_simd_uld_unmatched(&f, i);
    xdi_simd_uld_matched(&f);
    f.chunk->mean = f.mean / f.chunk->factor[XD_ULD_STUDENT];
    return true;
}

static void xdi_simd_uld_compare_chunks(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                        int slot) {
    const xd_uld_args *a = (const xd_uld_args *)args;
    (void)slot;
    for (int64_t i = begin; i < end; i++)
        if (a->chunks[i].finite && !xdi_simd_uld_chunk(launch, a, i)) xdi_uld_compare_chunk(a, i);
}

static xd_result xdi_simd_uld_compare(const xd_launch *launch, const xd_uld_args *a) {
    return xdi_spread_items(launch, a->count, 1, xdi_simd_uld_compare_chunks, a);
}

/* ---- gradient ---- */

static void xdi_simd_uld_write_row(const xd_launch *launch, const xd_uld_args *a, int64_t row) {
    const xd_uld_rows *side = &a->side[XD_ULD_STUDENT];
    const int64_t i = a->owner[row] - a->first;
    const xdi_uld_scale s = xdi_uld_row_scale(a, &a->chunks[i], row);
    xdi_xtoken_writer w;
    memset(&w, 0, sizeof w);
    w.soft = true;
    w.times_p = s.only < 0;
    w.u_scale = 1.0f;
    w.shift = (float)s.mean;
    if (!xdi_simd_uld_power(side, row, s.scale, &w.p)) {
        xdi_uld_gradient_row(a, row);
        return;
    }
    for (int64_t c = 0; c < side->columns; c += XDI_TILE) {
        w.x = xdi_simd_array_of(&side->logits, row, c);
        w.out = xdi_simd_array_of(&a->gradient, row, c);
        w.u = s.only < 0 ? a->slope + i * side->columns + c : NULL;
        xdi_loops_of(launch)->xtoken->write(&w, xdi_simd_tile_at(c, side->columns));
    }
    if (s.only >= 0) xdi_loss_store(&a->gradient, row, s.only, s.scale * s.mean * (1.0 - s.mean));
}

static xd_result xdi_simd_uld_gradient(const xd_launch *launch, const xd_uld_args *a) {
    return xdi_uld_gradient_rows(launch, a, xdi_simd_uld_write_row);
}

/* The entries that are faster with vectors. */
XD_PRIVATE void xdi_simd_uld_fill(xd_uld_kernels *kernels) {
    kernels->compare = xdi_simd_uld_compare;
    kernels->gradient = xdi_simd_uld_gradient;
}
