/* A call on a device, and PROJECTED and LIKELIHOOD there. What lists decide is settled on the host first: the rows of
 * every tile, the chunks' sizes and weights, who has a say in J, everything about likelihoods. One copy brings all of
 * it; then the device runs tile after tile without the host; then the chunks come back with their divergences. The
 * host waits for that, and before it, where there are labels, for the statistics of rows. */

#include "align/project.h"
#include "loss/softmax.h"
#include "xtoken/internal.h"

#include <string.h>

/* ---- memory ---- */

/* What comes back of a teacher: chunks, or positions; LIKELIHOOD is the host's. */
static int64_t xdi_staged_chunks(const xd_xtoken_desc *d, const xd_xtoken_teacher *t) {
    if (t->kind == XD_XTOKEN_LIKELIHOOD) return 0;
    return t->kind == XD_XTOKEN_SAME ? d->student.rows : d->sequences * t->chunks;
}

/* Rows of the teacher, and what it has instead of a choice, or for it. */
static void xdi_staged_teacher_lists(const xdi_xtoken *x, const xd_xtoken_teacher *t, int64_t firsts,
                                     xdi_xtoken_lists *l, xd_arena *arena, bool *fits) {
    const int64_t k = xdi_xtoken_columns(&x->d, t, x->vocab.size), rows = t->logits.rows;
    const bool same = t->kind == XD_XTOKEN_SAME, gold = t->kind == XD_XTOKEN_GOLD;
    int64_t ids = t->column_ids ? x->d.sequences * 2 * k : 0;
    if (same) ids = k == x->vocab.size ? k : 0;
    l->teacher_first = (int64_t *)xdi_arena_array(arena, same ? 0 : firsts, sizeof(int64_t), fits);
    l->teacher_rows = (int64_t *)xdi_arena_array(arena, same ? 0 : rows, sizeof(int64_t), fits);
    l->teacher_places = (int64_t *)xdi_arena_array(arena, same ? 0 : rows, sizeof(int64_t), fits);
    l->ids = (int64_t *)xdi_arena_array(arena, ids, sizeof(int64_t), fits);
    l->mask = (uint8_t *)xdi_arena_array(arena, gold ? 0 : rows, 1, fits);
    if (!gold || !t->map) return;
    l->pair = (int32_t *)xdi_arena_array(arena, t->map->pairs, sizeof(int32_t), fits);
    l->other = (int32_t *)xdi_arena_array(arena, t->map->pairs, sizeof(int32_t), fits);
    l->rest = (int32_t *)xdi_arena_array(arena, t->map->student_rest_count, sizeof(int32_t), fits);
    l->other_rest = (int32_t *)xdi_arena_array(arena, t->map->teacher_rest_count, sizeof(int32_t), fits);
}

/* The lists of one teacher but for its chunks. */
static void xdi_staged_lists(xdi_xtoken *x, int index, xd_arena *arena, bool *fits) {
    const xd_xtoken_desc *d = &x->d;
    const xd_xtoken_teacher *t = &d->teachers[index];
    const int64_t tile = xdi_xtoken_tile_size(d, t, xdi_xtoken_columns(d, t, x->vocab.size));
    const int64_t tiles =
        d->sequences * (t->kind == XD_XTOKEN_SAME ? 1 : xdi_xtoken_most_tiles(t->chunks, tile));
    xdi_xtoken_lists l;
    memset(&l, 0, sizeof l);
    if (t->kind == XD_XTOKEN_LIKELIHOOD) {
        xdi_likelihood_layout_lists(x, &l.likelihood, arena, fits);
    } else {
        l.first = (int64_t *)xdi_arena_array(arena, tiles + 1, sizeof(int64_t), fits);
        l.rows = (int64_t *)xdi_arena_array(arena, d->student.rows, sizeof(int64_t), fits);
        l.places = (int64_t *)xdi_arena_array(arena, d->student.rows, sizeof(int64_t), fits);
        if (t->kind != XD_XTOKEN_CACHED) xdi_staged_teacher_lists(x, t, tiles + 1, &l, arena, fits);
    }
    if (x->device.lists) x->device.lists[index] = l;
}

/* Blocks of LIKELIHOOD that are no lists: sums and moments. */
static void xdi_staged_layout_likelihood(xdi_xtoken *x, int index, xd_arena *host, xd_arena *device,
                                         bool *fits) {
    const xd_xtoken_teacher *t = &x->d.teachers[index];
    const int64_t rows = xdi_xtoken_reads_logits(t) ? t->logits.rows : 0;
    xdi_likelihood plan, *h = x->device.lists ? &x->device.lists[index].likelihood : &plan;
    if (t->kind != XD_XTOKEN_LIKELIHOOD) return;
    xdi_likelihood_layout_work(x, t, h, host, fits);
    double *moments = (double *)xdi_arena_array(device, rows, XD_XTOKEN_MOMENTS * sizeof(double), fits);
    if (x->device.lists) x->device.lists[index].moments = moments;
}

static void xdi_staged_layout_host(xdi_xtoken *x, const xdi_xtoken_sizes *s, xd_arena *arena, bool *fits) {
    const xd_xtoken_desc *d = &x->d;
    xdi_xtoken_device *v = &x->device;
    size_t first = 0, chunks = 0, end = 0;
    v->lists = (xdi_xtoken_lists *)xdi_arena_array(arena, d->teacher_count, sizeof *v->lists, fits);
    *fits = *fits && xd_arena_take(arena, 0, &first);
    x->ce_factor = (double *)xdi_arena_array(arena, d->student.rows, sizeof(double), fits);
    v->rest = (int64_t *)xdi_arena_array(arena, d->student.rows, sizeof(int64_t), fits);
    v->all_rows = (int64_t *)xdi_arena_array(arena, s->teachers, sizeof(int64_t), fits);
    for (int i = 0; i < d->teacher_count; i++) xdi_staged_lists(x, i, arena, fits);
    *fits = *fits && xd_arena_take(arena, 0, &chunks);
    for (int i = 0; i < d->teacher_count; i++) {
        xd_xtoken_chunk *all = (xd_xtoken_chunk *)xdi_arena_array(
            arena, xdi_staged_chunks(d, &d->teachers[i]), sizeof *all, fits);
        if (v->lists) v->lists[i].chunks = all;
    }
    *fits = *fits && xd_arena_take(arena, 0, &end);
    v->here = arena->base ? arena->base + first : NULL;
    v->list_bytes = end - first;
    v->chunk_bytes = end - chunks;
}

static void xdi_staged_layout_gold(xdi_xtoken *x, const xdi_xtoken_sizes *s, xd_arena *device, bool *fits) {
    const int64_t all = x->vocab.ranks > 1 ? x->vocab.ranks * s->tail : 0;
    x->u = (float *)xdi_arena_array(device, s->tail > 0 ? x->columns : 0, sizeof(float), fits);
    x->tails = (double *)xdi_arena_array(device, s->tail, sizeof(double), fits);
    x->all_tails = (double *)xdi_arena_array(device, all, sizeof(double), fits);
    x->other_tail = (double *)xdi_arena_array(device, s->tail, sizeof(double), fits);
    x->tail_ids = (int64_t *)xdi_arena_array(device, 2 * s->tail, sizeof(int64_t), fits);
    x->scratch = (float *)xdi_arena_array(device, s->tail > 0 ? s->scratch : 0, sizeof(float), fits);
    x->device.merged = (double *)xdi_arena_array(device, 2, sizeof(double), fits);
}

/* Cells of the student, of the teacher and of rows lie behind each other, to be zeroed at once. */
XD_PRIVATE bool xdi_xtoken_device_layout(xdi_xtoken *x, const xdi_xtoken_sizes *s, xd_arena *host,
                                         xd_arena *device) {
    const int64_t rows = x->d.student.rows;
    xdi_xtoken_device *v = &x->device;
    bool fits = true;
    xdi_staged_layout_host(x, s, host, &fits);
    v->there = (unsigned char *)xdi_arena_array(device, (int64_t)v->list_bytes, 1, &fits);
    v->written = (uint8_t *)xdi_arena_array(device, rows, 1, &fits);
    v->labels = (int64_t *)xdi_arena_array(device, rows, sizeof(int64_t), &fits);
    v->argmax = (int64_t *)xdi_arena_array(device, rows, sizeof(int64_t), &fits);
    v->log_probs = (double *)xdi_arena_array(device, rows, sizeof(double), &fits);
    v->maxima = (float *)xdi_arena_array(device, s->slots, sizeof(float), &fits);
    v->values = (double *)xdi_arena_array(device, s->ids, sizeof(double), &fits);
    v->settled =
        (double *)xdi_arena_array(device, x->fixed ? s->student + s->teacher : 0, sizeof(double), &fits);
    v->delta = (double *)xdi_arena_array(device, x->held, sizeof(double), &fits);
    v->moments = (double *)xdi_arena_array(device, s->teachers, XD_XTOKEN_MOMENTS * sizeof(double), &fits);
    v->teacher_labels = (int64_t *)xdi_arena_array(device, s->teachers, sizeof(int64_t), &fits);
    x->moments = (double *)xdi_arena_array(host, s->teachers, XD_XTOKEN_MOMENTS * sizeof(double), &fits);
    x->lse = (double *)xdi_arena_array(device, rows, sizeof(double), &fits);
    x->lse_one = (double *)xdi_arena_array(device, rows, sizeof(double), &fits);
    x->ids = (int64_t *)xdi_arena_array(device, s->ids, sizeof(int64_t), &fits);
    x->slots = (int32_t *)xdi_arena_array(device, s->slots, sizeof(int32_t), &fits);
    xdi_staged_layout_gold(x, s, device, &fits);
    for (int i = 0; i < x->d.teacher_count; i++) xdi_staged_layout_likelihood(x, i, host, device, &fits);
    const int64_t cells = s->student + s->teacher + x->held + 2;
    x->student = (double *)xdi_arena_array(device, cells > rows ? cells : rows,
                                           x->fixed ? sizeof(xd_fixed) : sizeof(double), &fits);
    return fits;
}

XD_PRIVATE void *xdi_xtoken_there(const xdi_xtoken *x, const void *list) {
    return x->device.there + ((const unsigned char *)list - x->device.here);
}

XD_PRIVATE xd_result xdi_xtoken_device_open(xdi_xtoken *x) {
    for (int i = 0; i < x->d.teacher_count; i++) {
        xdi_xtoken_lists *l = &x->device.lists[i];
        const xd_xtoken_kind kind = x->d.teachers[i].kind;
        if (!x->d.teachers[i].projection || (kind != XD_XTOKEN_PROJECTED && kind != XD_XTOKEN_CACHED))
            continue;
        l->projection = *x->d.teachers[i].projection;
        if (xdi_projection_is_near(x->ctx, &l->projection)) continue;
        XD_TRY(xd_projection_upload(x->ctx, x->d.teachers[i].projection, &l->copied));
        l->projection = l->copied;
    }
    return XD_OK;
}

/* Behind a failure the device may still read what was launched. */
XD_PRIVATE void xdi_xtoken_device_close(xdi_xtoken *x, xd_result result) {
    const xd_device_ops memory = x->device.kernels->memory;
    if (result != XD_OK) memory.synchronize(&x->launch);
    for (int i = 0; i < x->d.teacher_count && x->device.lists; i++) {
        xd_projection_unload(x->ctx, &x->device.lists[i].copied);
        xdi_xtoken_device_cached_close(x, &x->device.lists[i]);
    }
    memory.release(x->ctx, x->device.memory);
}

static xd_result xdi_staged_copy(const xdi_xtoken *x, void *to, const void *from, size_t bytes,
                                 xd_copy_kind kind) {
    return x->device.kernels->memory.copy(&x->launch, to, from, bytes, kind);
}

/* ---- statistics of rows ---- */

XD_PRIVATE xd_xtoken_args xdi_xtoken_device_args(const xdi_xtoken *x, const int64_t *rows,
                                                 const int64_t *places, int64_t count) {
    xd_xtoken_args a = xdi_xtoken_student_args(x, count);
    a.rows = (const int64_t *)xdi_xtoken_there(x, rows);
    a.places = (const int64_t *)xdi_xtoken_there(x, places);
    if (a.ce_factor) a.ce_factor = (const double *)xdi_xtoken_there(x, x->ce_factor);
    if (a.labels) a.labels = x->device.labels;
    a.written = x->device.written;
    return a;
}

/* In INVARIANT mode relative to the whole row's maximum, as on a CPU. */
static xd_result xdi_staged_lse(xdi_xtoken *x, double temperature, double *lse) {
    const xd_rows *z = &x->d.student;
    XD_TRY(xd_row_stats(x->ctx, x->d.vocab, *z, temperature, lse, x->device.argmax));
    if (!x->fixed) return XD_OK;
    XD_TRY(xd_gather_columns(x->ctx, x->d.vocab, *z, x->device.argmax, 1, 1, lse));
    xd_xtoken_args a = xdi_xtoken_student_args(x, 0);
    a.temperature = temperature;
    a.row_lse = lse;
    a.cells = x->student;
    XD_TRY(x->device.kernels->memory.fill(&x->launch, a.cells, 0, (size_t)z->rows * sizeof(xd_fixed)));
    XD_TRY(x->kernels.row_sums(&x->launch, &a));
    XD_TRY(xdi_xtoken_reduce(x, x->vocab.tp, a.cells, z->rows));
    return x->kernels.row_logs(&x->launch, &a);
}

/* Starts the moments of all rows of a teacher; `a` says which, its labels are the host's. */
static xd_result xdi_staged_moments(const xdi_xtoken *x, const xd_xtoken_args *a) {
    const xdi_xtoken_device *v = &x->device;
    const size_t rows = (size_t)a->logits.rows;
    xd_xtoken_args all = *a;
    for (int64_t row = 0; row < a->logits.rows; row++) v->all_rows[row] = row;
    all.count = a->logits.rows;
    all.rows = (const int64_t *)xdi_xtoken_there(x, v->all_rows);
    XD_TRY(xdi_staged_copy(x, xdi_xtoken_there(x, v->all_rows), v->all_rows, rows * sizeof *v->all_rows,
                           XD_COPY_TO_DEVICE));
    if (a->labels) {
        all.labels = v->teacher_labels;
        XD_TRY(xdi_staged_copy(x, v->teacher_labels, a->labels, rows * sizeof *a->labels, XD_COPY_TO_DEVICE));
    }
    return x->kernels.moments(&x->launch, &all);
}

/* Those of LIKELIHOOD, on their way to the host. */
static xd_result xdi_staged_likelihoods(const xdi_xtoken *x) {
    for (int i = 0; i < x->d.teacher_count; i++) {
        const xdi_xtoken_lists *l = &x->device.lists[i];
        const xd_xtoken_teacher *t = x->terms[i].teacher;
        if (t->kind != XD_XTOKEN_LIKELIHOOD || !xdi_xtoken_reads_logits(t)) continue;
        xd_xtoken_args a = xdi_xtoken_teacher_args(x, &x->terms[i], 0);
        a.labels = t->labels;
        a.moments = l->moments;
        XD_TRY(xdi_staged_moments(x, &a));
        XD_TRY(xdi_staged_copy(x, l->likelihood.moments, l->moments,
                               (size_t)t->logits.rows * XD_XTOKEN_MOMENTS * sizeof *l->moments,
                               XD_COPY_TO_HOST));
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_device_stats(xdi_xtoken *x) {
    const xd_xtoken_desc *d = &x->d;
    const size_t bytes = (size_t)d->student.rows * 8;
    xdi_xtoken_device *v = &x->device;
    XD_TRY(xdi_staged_lse(x, d->temperature, x->lse));
    if (!d->labels) return XD_OK;
    XD_TRY(xdi_staged_copy(x, v->labels, d->labels, bytes, XD_COPY_TO_DEVICE));
    XD_TRY(xdi_staged_lse(x, 1.0, x->lse_one));
    XD_TRY(xd_gather_columns(x->ctx, d->vocab, d->student, v->labels, 1, 1, v->log_probs));
    XD_TRY(xdi_staged_likelihoods(x));
    XD_TRY(xdi_staged_copy(x, x->argmax, v->argmax, bytes, XD_COPY_TO_HOST));
    XD_TRY(xdi_staged_copy(x, x->row_sums, x->lse_one, bytes, XD_COPY_TO_HOST));
    XD_TRY(xd_read(x->ctx, x->log_probs, v->log_probs, bytes));
    for (int64_t row = 0; row < d->student.rows; row++) x->log_probs[row] -= x->row_sums[row];
    return XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_device_moments(const xdi_xtoken *x, const xd_xtoken_args *a,
                                               double *moments) {
    xd_xtoken_args there = *a;
    there.moments = x->device.moments;
    XD_TRY(xdi_staged_moments(x, &there));
    return xd_read(x->ctx, moments, there.moments,
                   (size_t)a->logits.rows * XD_XTOKEN_MOMENTS * sizeof *moments);
}

/* ---- lists ---- */

XD_PRIVATE void xdi_xtoken_device_rows(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                       const xdi_xtoken_side *side, int64_t *first, int64_t *rows,
                                       int64_t *places) {
    int64_t index = 0;
    first[0] = 0;
    for (int64_t b = 0; b < x->d.sequences; b++)
        for (int64_t i = 0; i < xdi_xtoken_tiles(term, b); i++, index++) {
            const xdi_xtoken_tile tile = xdi_xtoken_tile_at(x, term, b, i);
            const int64_t at = first[index];
            first[index + 1] = at + xdi_xtoken_tile_rows(term, side, &tile, rows + at, places + at);
        }
}

XD_PRIVATE xd_xtoken_chunk *xdi_xtoken_device_chunks(const xdi_xtoken_term *term, const xdi_xtoken_lists *l,
                                                     const xdi_xtoken_tile *tile) {
    return l->chunks + tile->b * term->teacher->chunks + tile->first;
}

static void xdi_staged_fill_chunks(xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xtoken_lists *l) {
    const xd_xtoken_teacher *t = term->teacher;
    const int64_t *ids = t->column_ids;
    xdi_xtoken_device_rows(x, term, &term->student_rows, l->first, l->rows, l->places);
    xdi_xtoken_device_rows(x, term, &term->teacher_rows, l->teacher_first, l->teacher_rows,
                           l->teacher_places);
    for (int64_t b = 0; b < x->d.sequences; b++) {
        for (int64_t j = 0; j < term->k && ids; j++) {
            l->ids[2 * b * term->k + j] = ids[b * term->k + j];
            l->ids[(2 * b + 1) * term->k + j] = j;
        }
        for (int64_t at = b * t->chunks; at < b * t->chunks + term->listed[b]; at++)
            l->chunks[at] = xdi_projected_chunk(x, term, b, term->order[at]);
        if (t->kind == XD_XTOKEN_PROJECTED) xdi_xtoken_voters(x, term, b, l->mask + b * term->held);
    }
    if (t->kind == XD_XTOKEN_GOLD) {
        memcpy(l->pair, t->map->student, (size_t)t->map->pairs * sizeof *l->pair);
        memcpy(l->other, t->map->teacher, (size_t)t->map->pairs * sizeof *l->other);
        memcpy(l->rest, t->map->student_rest, (size_t)t->map->student_rest_count * sizeof *l->rest);
        memcpy(l->other_rest, t->map->teacher_rest,
               (size_t)t->map->teacher_rest_count * sizeof *l->other_rest);
    }
}

/* The lists of a teacher; the rows that it looks at are marked. */
static xd_result xdi_staged_fill(xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xtoken_lists *l) {
    const xd_xtoken_teacher *t = term->teacher;
    int64_t tiles = 0;
    if (t->kind == XD_XTOKEN_LIKELIHOOD) {
        XD_TRY(xdi_likelihood_settle(x, term, &l->likelihood));
        for (int64_t i = 0; i < l->likelihood.count; i++) x->written[l->likelihood.rows[i]] = 1;
        return XD_OK;
    }
    if (t->kind == XD_XTOKEN_SAME) {
        xdi_xtoken_device_same_fill(x, term, l);
    } else if (t->kind == XD_XTOKEN_CACHED) {
        xdi_xtoken_device_cached_fill(x, term, l);
    } else {
        xdi_staged_fill_chunks(x, term, l);
    }
    for (int64_t b = 0; b < x->d.sequences; b++)
        tiles += t->kind == XD_XTOKEN_SAME ? 1 : xdi_xtoken_tiles(term, b);
    for (int64_t i = 0; i < l->first[tiles]; i++) x->written[l->rows[i]] = 1;
    return XD_OK;
}

/* ---- tiles ---- */

XD_PRIVATE xd_result xdi_xtoken_device_choose(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                              const xdi_xtoken_lists *l, int64_t size, int64_t b) {
    const xd_kernels *kernels = x->device.kernels;
    const xd_rows *y = &term->teacher->logits;
    const int64_t skip = x->d.compat ? 0 : b * term->held * (y->stride ? y->stride : y->cols);
    xd_rows rows = *y;
    xd_select_args a;
    if (!x->d.compat) rows.rows = term->held;
    if (y->data) rows.data = (unsigned char *)y->data + (size_t)skip * xd_dtype_size(y->dtype);
    const uint8_t *mask = (const uint8_t *)xdi_xtoken_there(x, l->mask + b * term->held);
    XD_TRY(kernels->rows.column_maxima(&x->launch, &rows, x->d.compat ? NULL : mask, size, x->device.maxima));
    if (x->d.sequence_comm && xd_comm_size(x->d.sequence_comm) > 1)
        XD_TRY(xd_all_reduce(x->d.sequence_comm, x->device.maxima, x->device.maxima, size, XD_DTYPE_F32,
                             XD_MAX));
    memset(&a, 0, sizeof a);
    a.logits.data = x->device.maxima;
    a.logits.dtype = XD_DTYPE_F32;
    a.logits.rows = 1;
    a.logits.cols = a.columns = size;
    a.k = term->k;
    a.values = x->device.values;
    a.ids = x->ids;
    XD_TRY(kernels->topk.select(&x->launch, &a));
    return kernels->rows.sort_ids(&x->launch, x->ids, term->k);
}

/* J, and where every teacher id is in it. */
static xd_result xdi_staged_columns(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_xtoken_lists *l,
                                    int64_t b, const int64_t **ids, const int64_t **in_rows) {
    const xd_projection *m = &l->projection;
    xd_xtoken_args a = xdi_xtoken_student_args(x, 0);
    if (term->teacher->column_ids) {
        *ids = (const int64_t *)xdi_xtoken_there(x, l->ids + 2 * b * term->k);
        *in_rows = *ids + term->k;
    } else {
        XD_TRY(xdi_xtoken_device_choose(x, term, l, term->vocabulary, b));
        *ids = *in_rows = x->ids;
    }
    a.ids = *ids;
    a.k = term->k;
    a.columns = m->teacher_size;
    a.slots = x->slots;
    x->matrix.columns = x->columns;
    x->matrix.k = term->k;
    x->matrix.begin = m->row_begin + x->vocab.begin;
    x->matrix.slot = m->teacher_id;
    x->matrix.weight = m->weight;
    x->matrix.places = x->slots;
    x->matrix.column_begin = m->column_begin;
    x->matrix.column_student = m->student_id;
    x->matrix.column_weight = m->column_weight;
    return x->kernels.slots(&x->launch, &a);
}

/* A tile of a term: its rows on both sides, its chunks, and its cells. */
typedef struct xdi_staged_tile {
    xd_xtoken_args student, teacher;
    double *row_cells;
    xd_comm *comm;
} xdi_staged_tile;

/* Tile `index` of all. */
static xdi_staged_tile xdi_staged_tile_of(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                          const xdi_xtoken_lists *l, const xdi_xtoken_tile *tile,
                                          int64_t index) {
    const int64_t places = tile->count;
    const int64_t at = l->first[index], teacher_at = l->teacher_first[index], wide = x->fixed ? 2 : 1;
    xdi_staged_tile w;
    w.comm = tile->comm;
    w.student = xdi_xtoken_device_args(x, l->rows + at, l->places + at, l->first[index + 1] - at);
    w.student.place_count = places;
    w.student.matrix = x->matrix;
    w.student.k = term->k;
    w.student.chunks = (xd_xtoken_chunk *)xdi_xtoken_there(x, xdi_xtoken_device_chunks(term, l, tile));
    w.student.cells = x->student;
    w.student.normalise = !x->d.compat;
    w.student.reverse = x->d.reverse;
    w.teacher = xdi_xtoken_device_args(x, l->teacher_rows + teacher_at, l->teacher_places + teacher_at,
                                       l->teacher_first[index + 1] - teacher_at);
    w.teacher.place_count = places;
    w.teacher.logits = term->teacher->logits;
    w.teacher.columns = term->vocabulary;
    w.teacher.lse = NULL;
    w.teacher.k = term->k;
    w.teacher.cells = x->student + wide * places * term->k;
    w.row_cells = w.teacher.cells + wide * places * term->k;
    return w;
}

/* Sums of the tile over all ranks, as doubles. */
static xd_result xdi_staged_sums(const xdi_xtoken *x, xdi_staged_tile *w) {
    const int64_t count = w->student.place_count * w->student.k;
    const size_t bytes = (size_t)((const char *)(w->row_cells + (x->fixed ? 2 : 1) * w->student.count) -
                                  (const char *)x->student);
    XD_TRY(x->device.kernels->memory.fill(&x->launch, x->student, 0, bytes));
    XD_TRY(x->kernels.project(&x->launch, &w->student));
    XD_TRY(x->kernels.target(&x->launch, &w->teacher));
    XD_TRY(xdi_xtoken_reduce(x, x->vocab.tp, w->student.cells, count));
    XD_TRY(xdi_xtoken_reduce(x, w->comm, w->student.cells, 2 * count));
    w->student.student = x->fixed ? x->device.settled : w->student.cells;
    w->student.teacher = w->student.student + count;
    if (!x->fixed) return XD_OK;
    xd_xtoken_args a = w->student;
    a.count = 2 * count;
    a.out = x->device.settled;
    return x->kernels.settle(&x->launch, &a);
}

static xd_result xdi_staged_gradient(const xdi_xtoken *x, const xdi_staged_tile *w) {
    xd_xtoken_args a = w->student;
    a.cells = w->row_cells;
    XD_TRY(x->kernels.delta(&x->launch, &a));
    XD_TRY(xdi_xtoken_reduce(x, x->vocab.tp, a.cells, a.count));
    a.out = x->device.delta;
    XD_TRY(x->kernels.row_deltas(&x->launch, &a));
    a.delta = a.out;
    return x->kernels.gradient(&x->launch, &a);
}

static xd_result xdi_staged_term(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_xtoken_lists *l) {
    const int64_t *ids = NULL, *in_rows = NULL;
    int64_t index = 0;
    for (int64_t b = 0; b < x->d.sequences; b++) {
        if (b == 0 || !x->d.compat) XD_TRY(xdi_staged_columns(x, term, l, b, &ids, &in_rows));
        for (int64_t i = 0; i < xdi_xtoken_tiles(term, b); i++, index++) {
            const xdi_xtoken_tile tile = xdi_xtoken_tile_at(x, term, b, i);
            xdi_staged_tile w = xdi_staged_tile_of(x, term, l, &tile, index);
            w.student.ids = ids;
            w.teacher.ids = in_rows;
            XD_TRY(xdi_staged_sums(x, &w));
            XD_TRY(x->kernels.divergence(&x->launch, &w.student));
            if (x->write) XD_TRY(xdi_staged_gradient(x, &w));
        }
    }
    return XD_OK;
}

/* ---- a pass ---- */

/* The divergences of all chunks, and what they add to the sums. */
static xd_result xdi_staged_take_home(xdi_xtoken *x) {
    const size_t skip = x->device.list_bytes - x->device.chunk_bytes;
    XD_TRY(xd_read(x->ctx, x->device.here + skip, x->device.there + skip, x->device.chunk_bytes));
    for (int i = 0; i < x->d.teacher_count; i++) {
        const xdi_xtoken_term *term = &x->terms[i];
        const xdi_xtoken_lists *l = &x->device.lists[i];
        const xd_xtoken_teacher *t = term->teacher;
        if (!term->active) continue;
        if (t->kind == XD_XTOKEN_SAME) { /* of rows that count */
            for (int64_t c = 0; c < l->first[x->d.sequences]; c++)
                xdi_same_add_chunk(x, term, &l->chunks[c], l->rows[c]);
            continue;
        }
        for (int64_t at = 0; at < xdi_staged_chunks(&x->d, t); at++) {
            const int64_t b = at / t->chunks;
            if (at % t->chunks >= term->listed[b]) continue;
            if (t->kind == XD_XTOKEN_GOLD)
                xdi_gold_add_chunk(x, term, &l->chunks[at], b, term->order[at]);
            else
                xdi_projected_add_chunk(x, term, &l->chunks[at], b, term->order[at]);
        }
    }
    return XD_OK;
}

/* dz += slope (onehot(label) - p), p at temperature 1: the only part of LIKELIHOOD that is the device's. */
static xd_result xdi_staged_likelihood(const xdi_xtoken *x, const xdi_xtoken_lists *l) {
    const xdi_likelihood *h = &l->likelihood;
    xd_xtoken_args a = xdi_xtoken_device_args(x, h->rows, h->rows, h->count);
    a.slopes = (const double *)xdi_xtoken_there(x, h->slopes);
    return x->write ? x->kernels.gradient(&x->launch, &a) : XD_OK;
}

static xd_result xdi_staged_run(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_xtoken_lists *l) {
    switch (term->teacher->kind) {
    case XD_XTOKEN_GOLD: return xdi_xtoken_device_gold(x, term, l);
    case XD_XTOKEN_SAME: return xdi_xtoken_device_same(x, term, l);
    case XD_XTOKEN_CACHED: return xdi_xtoken_device_cached(x, term, l);
    case XD_XTOKEN_LIKELIHOOD: return xdi_staged_likelihood(x, l);
    default: return xdi_staged_term(x, term, l);
    }
}

XD_PRIVATE xd_result xdi_xtoken_device_begin(xdi_xtoken *x) {
    for (int i = 0; i < x->d.teacher_count; i++)
        if (x->terms[i].active && x->terms[i].teacher->kind == XD_XTOKEN_CACHED)
            XD_TRY(xdi_xtoken_device_cached_open(x, &x->terms[i], &x->device.lists[i]));
    return XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_device_pass(xdi_xtoken *x) {
    xdi_xtoken_device *v = &x->device;
    int64_t rest = 0;
    for (int i = 0; i < x->d.teacher_count; i++)
        if (x->terms[i].active) XD_TRY(xdi_staged_fill(x, &x->terms[i], &v->lists[i]));
    for (int64_t row = 0; row < x->d.student.rows; row++)
        if (!x->written[row]) v->rest[rest++] = row;
    XD_TRY(xdi_staged_copy(x, v->there, v->here, v->list_bytes, XD_COPY_TO_DEVICE));
    XD_TRY(v->kernels->memory.fill(&x->launch, v->written, 0, (size_t)x->d.student.rows));
    for (int i = 0; i < x->d.teacher_count; i++)
        if (x->terms[i].active) XD_TRY(xdi_staged_run(x, &x->terms[i], &v->lists[i]));
    if (x->write) {
        const xd_xtoken_args a = xdi_xtoken_device_args(x, v->rest, v->rest, rest);
        XD_TRY(x->kernels.gradient(&x->launch, &a));
    }
    return xdi_staged_take_home(x);
}
