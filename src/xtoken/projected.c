/* PROJECTED: the student's probabilities through a matrix, in chosen columns of the teacher. */

#include "xtoken/internal.h"

#include <math.h>
#include <string.h>

static int64_t xdi_projected_student_rows(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                          const xdi_xtoken_tile *tile) {
    return xdi_xtoken_tile_rows(term, &term->student_rows, tile, x->rows, x->places);
}

/* Sums of the tile over all ranks: [tile, k] of the student and of the teacher. */
static xd_result xdi_projected_sums(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_xtoken_tile *tile) {
    const int64_t count = tile->count * term->k;
    xdi_xtoken_zero(x, x->student, count);
    xdi_xtoken_zero(x, x->teacher, count);
    xd_xtoken_args a = xdi_xtoken_student_args(x, xdi_projected_student_rows(x, term, tile));
    a.place_count = tile->count;
    a.matrix = x->matrix;
    a.k = term->k;
    a.cells = x->student;
    XD_TRY(x->kernels.project(&x->launch, &a));
    a = xdi_xtoken_teacher_args(x, term,
                                xdi_xtoken_tile_rows(term, &term->teacher_rows, tile, x->rows, x->places));
    a.place_count = tile->count;
    XD_TRY(x->kernels.target(&x->launch, &a));
    XD_TRY(xdi_xtoken_join(x, x->student, count, x->vocab.tp, tile->comm));
    return xdi_xtoken_join(x, x->teacher, count, tile->comm, NULL);
}

XD_PRIVATE xd_xtoken_chunk xdi_projected_chunk(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b,
                                               int64_t c) {
    const int64_t at = b * term->teacher->chunks + c;
    xd_xtoken_chunk chunk;
    memset(&chunk, 0, sizeof chunk);
    chunk.compared = xdi_xtoken_looks(x, term, b, c);
    chunk.student = (double)term->student_sizes[at] + XD_XTOKEN_EPSILON;
    chunk.teacher = (double)term->teacher_sizes[at] + XD_XTOKEN_EPSILON;
    chunk.factor = xdi_xtoken_weight(x, term, b, c) * xdi_xtoken_factor(x, term) / chunk.student;
    return chunk;
}

XD_PRIVATE void xdi_projected_add_chunk(xdi_xtoken *x, const xdi_xtoken_term *term,
                                        const xd_xtoken_chunk *chunk, int64_t b, int64_t c) {
    const double weight = xdi_xtoken_weight(x, term, b, c);
    const bool good = isfinite(chunk->value) != 0;
    if (!chunk->compared || !xdi_xtoken_tells(x, term, b, c)) return;
    if (!good && weight != 0.0) xdi_xtoken_found(x, b * term->teacher->chunks + c, chunk->value);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_DIVERGENCE, good ? weight * chunk->value : 0.0);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_AGREEING, good && chunk->agree ? 1.0 : 0.0);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_COMPARED, 1.0);
}

/* Keeps those of the first `count` rows whose chunk has a gradient; of chunks of several positions alone, or
 * of all. */
static int64_t xdi_projected_keep(xdi_xtoken *x, int64_t count, bool several) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        const xd_xtoken_chunk *chunk = &x->chunks[x->places[i]];
        if (chunk->largest == 0.0 || (several && chunk->student < 1.5)) continue;
        x->rows[kept] = x->rows[i];
        x->places[kept++] = x->places[i];
    }
    return kept;
}

/* dz = p (h - delta) / tau, h = M dy, delta = sum p h. A chunk itself knows delta of its only position. */
static xd_result xdi_projected_gradient(xdi_xtoken *x, const xdi_xtoken_term *term,
                                        const xdi_xtoken_tile *tile) {
    double *delta = x->row_sums;
    int64_t next = 0;
    xd_xtoken_args a =
        xdi_xtoken_student_args(x, xdi_projected_keep(x, xdi_projected_student_rows(x, term, tile), true));
    a.place_count = tile->count;
    a.matrix = x->matrix;
    a.k = term->k;
    a.student = x->student;
    a.chunks = x->chunks;
    a.cells = x->row_delta;
    xdi_xtoken_zero(x, x->row_delta, a.count);
    if (a.count > 0) XD_TRY(x->kernels.delta(&x->launch, &a));
    XD_TRY(xdi_xtoken_join(x, x->row_delta, a.count, x->vocab.tp, NULL));
    a.count = xdi_projected_keep(x, xdi_projected_student_rows(x, term, tile), false);
    for (int64_t i = 0; i < a.count; i++) {
        const xd_xtoken_chunk *chunk = &x->chunks[x->places[i]];
        delta[i] = chunk->student < 1.5 ? chunk->delta : x->row_delta[next++] * chunk->largest;
    }
    a.delta = delta;
    return x->kernels.gradient(&x->launch, &a);
}

static xd_result xdi_projected_run(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_xtoken_tile *tile) {
    const int64_t *order = term->order + tile->b * term->teacher->chunks + tile->first;
    XD_TRY(xdi_projected_sums(x, term, tile));
    for (int64_t i = 0; i < tile->count; i++) x->chunks[i] = xdi_projected_chunk(x, term, tile->b, order[i]);
    xd_xtoken_args a = xdi_xtoken_student_args(x, 0);
    a.place_count = tile->count;
    a.k = term->k;
    a.student = x->student;
    a.teacher = x->teacher;
    a.chunks = x->chunks;
    a.normalise = !x->d.compat;
    a.reverse = x->d.reverse;
    XD_TRY(x->kernels.divergence(&x->launch, &a));
    for (int64_t i = 0; i < tile->count; i++)
        xdi_projected_add_chunk(x, term, &x->chunks[i], tile->b, order[i]);
    return x->write ? xdi_projected_gradient(x, term, tile) : XD_OK;
}

/* J as it was given, and behind it where its columns are in the rows. */
static void xdi_projected_given(xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b) {
    memcpy(x->ids, term->teacher->column_ids + b * term->k, (size_t)term->k * sizeof *x->ids);
    for (int64_t j = 0; j < term->k; j++) x->ids[term->k + j] = j;
}

/* J of sequence b, and the projection in it. */
static xd_result xdi_projected_choose(xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b) {
    if (term->teacher->column_ids)
        xdi_projected_given(x, term, b);
    else
        XD_TRY(xdi_xtoken_choose(x, term, b));
    xdi_projection_restrict(term->teacher->projection, x->ids, term->k, x->vocab.begin, x->vocab.end,
                            x->slots, x->row_begin, x->entry_student, x->entry_slot, x->entry_weight);
    x->matrix.columns = x->columns;
    x->matrix.k = term->k;
    x->matrix.begin = x->row_begin;
    x->matrix.student = x->entry_student;
    x->matrix.slot = x->entry_slot;
    x->matrix.weight = x->entry_weight;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_projected(xdi_xtoken *x, xdi_xtoken_term *term) {
    for (int64_t b = 0; b < x->d.sequences; b++) {
        if (b == 0 || !x->d.compat) XD_TRY(xdi_projected_choose(x, term, b));
        for (int64_t i = 0; i < xdi_xtoken_tiles(term, b); i++) {
            const xdi_xtoken_tile tile = xdi_xtoken_tile_at(x, term, b, i);
            XD_TRY(xdi_projected_run(x, term, &tile));
        }
    }
    return XD_OK;
}
