/* Minimal fine-tuning and the cosine on vectors. The gradient of minimal fine-tuning is that of a forward KL with a scaled-down
 * teacher. The cosine's terms are double, among them products without rounding, so its loops differ from the plain ones only in
 * the order of additions, and the elements that they write have the same bits. */

#include "kernel/ids.h"
#include "kernel/mft_scalar.h"
#include "kernel/simd/loops.h"

#include <math.h>
#include <string.h>

/* ---- minimal fine-tuning ---- */

static void xdi_mft_simd_terms(const xdi_mft_level *level, const xd_mft_args *a, int64_t r, int64_t columns) {
    const xd_loss_row *row = a->row + r;
    const xdi_simd_power q =
        xdi_simd_normalised(XDI_TILE_LOG2E / a->temperature, row->teacher_max, row->teacher_log);
    xdi_mft_tile tile;
    tile.x = xdi_simd_array_of(&a->student, r, 0);
    tile.y = xdi_simd_array_of(&a->teacher, r, 0);
    tile.out = xdi_simd_array_of(&a->terms, r, 0);
    tile.power = q.power;
    tile.q_scale = (float)((1.0 - row->mean) * exp2(-q.rest));
    tile.weight = (float)a->weight;
    tile.x_max = (float)row->max;
    tile.y_max = (float)row->teacher_max;
    tile.slope = (float)(1.0 / a->temperature);
    tile.shift = (float)(log(1.0 - row->mean) + row->soft_log - row->teacher_log);
    level->terms(&tile, columns);
}

static void xdi_mft_simd_gradient(const xdi_tiles *tiles, const xd_mft_args *a, int64_t r, int64_t columns,
                                  bool streamed) {
    const xd_loss_row *row = a->row + r;
    const double factor = XDI_TILE_LOG2E / a->temperature,
                 weight = a->row_scale[r] * a->weight / a->temperature;
    const xdi_simd_power p = xdi_simd_normalised(factor, row->max, row->soft_log);
    const xdi_simd_power q = xdi_simd_normalised(factor, row->teacher_max, row->teacher_log);
    xdi_tile_gradient g;
    memset(&g, 0, sizeof g);
    g.p = p.power;
    g.q = q.power;
    g.soft_scale = (float)(weight * exp2(-p.rest));
    g.teacher_scale = (float)(weight * (1.0 - row->mean) * exp2(-q.rest));
    for (int64_t c = 0; c < columns; c += XDI_TILE) {
        g.x = xdi_simd_array_of(&a->student, r, c);
        g.y = xdi_simd_array_of(&a->teacher, r, c);
        g.out = xdi_simd_array_of(&a->gradient, r, c);
        g.streamed = streamed && (uintptr_t)g.out.data % XDI_SIMD_LINE == 0;
        tiles->gradient(&g, XDI_TILE_FORWARD, xdi_simd_tile_at(c, columns));
    }
}

/* Two columns are double: the label's, which the correction concerns, and the most probable one. Most of the probability may be
 * there, so that f32 would cancel. Their logits are read before the row is overwritten. */
static void xdi_mft_simd_row(const xdi_mft_level *level, const xdi_tiles *tiles, const xd_mft_args *a,
                             int64_t r, int64_t columns, bool streamed) {
    const int64_t at[2] = { xd_id_at(a->labels, r) - a->vocab.begin,
                            (int64_t)a->row[r].argmax - a->vocab.begin };
    double x[2] = { 0.0, 0.0 }, y[2] = { 0.0, 0.0 };
    for (int i = 0; i < 2; i++) {
        if (at[i] < 0 || at[i] >= columns) continue;
        x[i] = xdi_loss_load(&a->student, r, at[i]);
        y[i] = xdi_loss_load(&a->teacher, r, at[i]);
    }
    if (a->terms.data) xdi_mft_simd_terms(level, a, r, columns);
    if (a->gradient.data) xdi_mft_simd_gradient(tiles, a, r, columns, streamed);
    for (int i = 0; i < 2; i++)
        if (at[i] >= 0 && at[i] < columns) xdi_mft_write_at(a, r, at[i], x[i], y[i]);
}

static void xdi_mft_simd_write_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                    int slot) {
    const xd_mft_args *a = (const xd_mft_args *)args;
    const xdi_mft_level *level = xdi_loops_of(launch)->mft;
    const xdi_tiles *tiles = xdi_simd_tiles(launch);
    const double factor = XDI_TILE_LOG2E / a->temperature;
    const bool streamed = xdi_simd_streams(&a->gradient, a->student.data, a->teacher.data);
    (void)slot;
    for (int64_t r = begin; r < end; r++) {
        const int64_t columns = xdi_mft_begin_row(a, r);
        if (xdi_simd_fits(a->row[r].max, factor) && xdi_simd_fits(a->row[r].teacher_max, factor))
            xdi_mft_simd_row(level, tiles, a, r, columns, streamed);
        else
            xdi_mft_write_row(a, r, columns);
    }
    tiles->fence();
}

static xd_result xdi_mft_simd_write(const xd_launch *launch, const xd_mft_args *a) {
    return xdi_spread_rows(launch, a->student.rows, a->vocab.end - a->vocab.begin, xdi_mft_simd_write_rows,
                           a);
}

/* ---- cosine ---- */

static void xdi_mft_simd_largest_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                      int slot) {
    const xd_mft_args *a = (const xd_mft_args *)args;
    const xdi_mft_level *level = xdi_loops_of(launch)->mft;
    (void)slot;
    for (int64_t r = begin; r < end; r++) {
        const int64_t columns = a->row_scale[r] != 0.0 ? a->vocab.end - a->vocab.begin : 0;
        double *sides = a->sides + r * XD_MFT_SIDES;
        sides[XD_MFT_STUDENT] = (double)level->largest(xdi_simd_array_of(&a->student, r, 0), columns);
        sides[XD_MFT_TEACHER] = (double)level->largest(xdi_simd_array_of(&a->teacher, r, 0), columns);
    }
}

static xd_result xdi_mft_simd_largest(const xd_launch *launch, const xd_mft_args *a) {
    return xdi_spread_rows(launch, a->student.rows, a->vocab.end - a->vocab.begin, xdi_mft_simd_largest_rows,
                           a);
}

static void xdi_mft_simd_products_row(const void *state, const xd_mft_args *a, int64_t r, double x_scale,
                                      double y_scale, xdi_cosine_sums *sums) {
    const xdi_mft_level *level = (const xdi_mft_level *)state;
    const xdi_simd_array x = xdi_simd_array_of(&a->student, r, 0), y = xdi_simd_array_of(&a->teacher, r, 0);
    if (a->fixed)
        level->exact(x, y, a->vocab.end - a->vocab.begin, x_scale, y_scale, sums->exact);
    else
        level->products(x, y, a->vocab.end - a->vocab.begin, sums->plain);
}

static xd_result xdi_mft_simd_products(const xd_launch *launch, const xd_mft_args *a) {
    return xdi_cosine_products_rows(launch, a, xdi_mft_simd_products_row, xdi_loops_of(launch)->mft);
}

static void xdi_mft_simd_slopes_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                     int slot) {
    const xd_mft_args *a = (const xd_mft_args *)args;
    const xdi_mft_level *level = xdi_loops_of(launch)->mft;
    (void)slot;
    for (int64_t r = begin; r < end; r++) {
        const int64_t columns = xdi_mft_begin_row(a, r);
        double of_x, of_y;
        xd_cosine_slope(a, r, &of_x, &of_y);
        level->slopes(xdi_simd_array_of(&a->student, r, 0), xdi_simd_array_of(&a->teacher, r, 0),
                      xdi_simd_array_of(&a->gradient, r, 0), columns, of_x, of_y);
    }
}

static xd_result xdi_mft_simd_slopes(const xd_launch *launch, const xd_mft_args *a) {
    return xdi_spread_rows(launch, a->student.rows, a->vocab.end - a->vocab.begin, xdi_mft_simd_slopes_rows,
                           a);
}

/* The entries that are faster with vectors; what runs once per row stays plain. */
XD_PRIVATE void xdi_simd_mft_fill(xd_mft_kernels *kernels) {
    kernels->write = xdi_mft_simd_write;
    kernels->largest = xdi_mft_simd_largest;
    kernels->products = xdi_mft_simd_products;
    kernels->slopes = xdi_mft_simd_slopes;
}
