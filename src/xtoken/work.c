/* Kernel arguments that several kinds need: device blocks, rows of a tile, the choice of columns, deltas and moments. */

#include "xtoken/internal.h"

#include <string.h>

/* ---- memory ---- */

XD_PRIVATE int64_t xdi_xtoken_read(const xd_ctx *ctx, int64_t count) {
    return xdi_plan_is_open(ctx) ? 0 : count;
}

XD_PRIVATE int64_t xdi_xtoken_most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

XD_PRIVATE void *xdi_xtoken_own(xdi_xtoken_term *term, xdi_xtoken_arenas *a, void *plan, size_t bytes) {
    term->own = xdi_arena_array(a->host, 1, bytes, &a->fits);
    memset(term->own ? term->own : plan, 0, bytes);
    return term->own ? term->own : plan;
}

XD_PRIVATE void *xdi_xtoken_list(xdi_xtoken_arenas *a, int64_t count, size_t size) {
    return xdi_arena_array(a->lists, count, size, &a->fits);
}

XD_PRIVATE void *xdi_xtoken_there(const xdi_xtoken_lists *lists, const void *list) {
    return lists->there + ((const unsigned char *)list - lists->here);
}

XD_PRIVATE xd_result xdi_xtoken_copy(const xdi_xtoken *x, void *to, const void *from, size_t bytes,
                                     xd_copy_kind kind) {
    return x->kernels->memory.copy(&x->launch, to, from, bytes, kind);
}

XD_PRIVATE xd_result xdi_xtoken_bring_labels(const xdi_xtoken *x, xd_ids labels, int64_t rows, void *block,
                                             xd_ids *out) {
    const size_t size = labels.dtype == XD_DTYPE_I32 ? sizeof(int32_t) : sizeof(int64_t);
    *out = labels;
    if (!x->on_device) return XD_OK;
    out->data = block;
    return xdi_xtoken_copy(x, block, labels.data, (size_t)rows * size, XD_COPY_TO_DEVICE);
}

/* ---- rows of a tile ---- */

XD_PRIVATE xd_xtoken_rows xdi_xtoken_student(const xdi_xtoken *x, const int64_t *rows, const int64_t *places,
                                             int64_t count) {
    xd_xtoken_rows r;
    memset(&r, 0, sizeof r);
    r.logits = x->d.student;
    r.columns = x->columns;
    r.first = x->vocab.begin;
    r.temperature = x->d.temperature;
    r.lse = x->work.lse;
    if (rows) r.rows = (const int64_t *)xdi_xtoken_there(&x->lists, rows);
    if (places) r.places = (const int64_t *)xdi_xtoken_there(&x->lists, places);
    r.count = count;
    return r;
}

static xd_xtoken_rows xdi_work_tile(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                    const xdi_xtoken_side *side, const xdi_xtoken_tile *tile) {
    const int64_t *begin = side->begin + xdi_xtoken_tile_start(&term->places, tile), at = begin[0];
    xd_xtoken_rows r = xdi_xtoken_student(x, side->rows + at, side->places + at, begin[tile->count] - at);
    r.begin = (const int64_t *)xdi_xtoken_there(&x->lists, begin);
    return r;
}

XD_PRIVATE xd_xtoken_rows xdi_xtoken_student_tile(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                                  const xdi_xtoken_tile *tile) {
    return xdi_work_tile(x, term, &term->student_rows, tile);
}

static void xdi_work_teacher(const xdi_xtoken_term *term, xd_xtoken_rows *r) {
    r->logits = term->teacher->logits;
    r->columns = term->vocabulary;
    r->first = 0;
    r->lse = NULL;
}

XD_PRIVATE xd_xtoken_rows xdi_xtoken_teacher_tile(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                                  const xdi_xtoken_tile *tile) {
    xd_xtoken_rows r = xdi_work_tile(x, term, &term->teacher_rows, tile);
    xdi_work_teacher(term, &r);
    return r;
}

XD_PRIVATE xd_xtoken_gradient xdi_xtoken_gradient_of(const xdi_xtoken *x, xd_xtoken_rows rows) {
    xd_xtoken_gradient to;
    memset(&to, 0, sizeof to);
    to.x = rows;
    to.rows = x->d.common.gradient;
    to.lse_one = x->work.lse_one;
    to.ce_weight = x->weights.ce * x->weights.factor;
    to.written = x->work.written;
    to.fixed = x->fixed;
    if (!x->d.common.labels.data) return to;
    to.ce_factor = (const double *)xdi_xtoken_there(&x->lists, x->host.ce_factor);
    to.labels = x->d.common.labels;
    if (x->on_device) to.labels.data = x->work.labels;
    return to;
}

/* ---- columns ---- */

XD_PRIVATE void xdi_xtoken_fill_voters(const xdi_xtoken *x, const xdi_xtoken_term *term) {
    const xd_xtoken_teacher *t = term->teacher;
    for (int64_t row = 0; row < t->logits.rows && !x->d.compat; row++) {
        if (term->kind->traits & XDI_KIND_POSITIONS)
            term->mask[row] = (uint8_t)(x->host.row_weight[row] != 0.0);
        else
            term->mask[row] = (uint8_t)(t->teacher_chunks[row] >= 0 &&
                                        xdi_xtoken_counts(x, term, row / term->held, t->teacher_chunks[row]));
    }
}

XD_PRIVATE xd_result xdi_xtoken_choose(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t size,
                                       int64_t b) {
    const xd_kernels *kernels = x->kernels;
    const xd_rows *y = &term->teacher->logits;
    const int64_t first = x->d.compat ? 0 : b * term->held, skip = first * (y->stride ? y->stride : y->cols);
    const uint8_t *mask =
        x->d.compat ? NULL : (const uint8_t *)xdi_xtoken_there(&x->lists, term->mask + first);
    uint8_t *voters = x->work.voters + first;
    xd_comm *comm = x->d.sequence_comm;
    float *maxima = x->work.maxima;
    xd_rows rows = *y;
    xd_select_args a;
    if (!x->d.compat) rows.rows = term->held;
    if (y->data) rows.data = (unsigned char *)y->data + (size_t)skip * xd_dtype_size(y->dtype);
    XD_TRY(xdi_rows_elect(&x->launch, &rows, mask, size, voters, maxima));
    if (comm && xd_comm_size(comm) > 1)
        XD_TRY(xd_all_reduce(comm, maxima, maxima, size, XD_DTYPE_F32, XD_MAX));
    memset(&a, 0, sizeof a);
    a.logits.data = maxima;
    a.logits.dtype = XD_DTYPE_F32;
    a.logits.rows = 1;
    a.logits.cols = a.columns = size;
    a.k = term->k;
    a.values = x->work.values;
    a.ids = x->work.ids;
    XD_TRY(kernels->topk.select(&x->launch, &a));
    return kernels->rows.sort_ids(&x->launch, x->work.ids, term->k);
}

/* ---- deltas and moments ---- */

XD_PRIVATE xd_result xdi_xtoken_row_deltas(const xdi_xtoken *x, const xd_xtoken_rows *rows,
                                           const xd_xtoken_chunk *chunks, double *cells) {
    const xd_xtoken_row_deltas_args a = { cells, x->fixed, rows->places, chunks, rows->count, x->work.delta };
    XD_TRY(xdi_xtoken_reduce(x, x->vocab.tp, cells, rows->count));
    return x->kernels->xtoken.row_deltas(&x->launch, &a);
}

XD_PRIVATE xd_result xdi_xtoken_moments(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t columns,
                                        int64_t count, xd_ids labels, bool entropy) {
    const int64_t *asked = x->host.asked;
    const size_t bytes = (size_t)(count * XD_XTOKEN_MOMENTS) * sizeof(double);
    xd_xtoken_moments_args a;
    memset(&a, 0, sizeof a);
    a.x = xdi_xtoken_student(x, asked, NULL, count);
    xdi_work_teacher(term, &a.x);
    a.x.columns = columns;
    a.entropy = entropy;
    a.fixed = x->fixed;
    a.moments = x->work.moments;
    XD_TRY(xdi_xtoken_copy(x, xdi_xtoken_there(&x->lists, asked), asked, (size_t)count * sizeof *asked,
                           XD_COPY_TO_DEVICE));
    if (labels.data)
        XD_TRY(
            xdi_xtoken_bring_labels(x, labels, term->teacher->logits.rows, x->work.moment_labels, &a.labels));
    XD_TRY(x->kernels->xtoken.moments(&x->launch, &a));
    return xd_read(x->ctx, x->host.moments, x->work.moments, bytes);
}
