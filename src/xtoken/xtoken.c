/* The call: workspace, sums, passes over teachers, values. */

#include "kernel/cells.h"
#include "loss/softmax.h"
#include "loss/topk.h"
#include "xtoken/internal.h"

#include <math.h>
#include <string.h>

/* Cells of x->sums that are summed over comm. Before the passes they are tokens, denominators and scores;
 * after each, these, and those of the teachers. */
enum {
    XDI_XTOKEN_CE,
    XDI_XTOKEN_TOKENS,
    XDI_XTOKEN_RIGHT,
    XDI_XTOKEN_LABEL,
    XDI_XTOKEN_NOT_FINITE,
    XDI_XTOKEN_FIRST
};

/* ---- small parts that the kinds share ---- */

XD_PRIVATE void xdi_xtoken_zero(const xdi_xtoken *x, double *cells, int64_t count) {
    memset(cells, 0, (size_t)count * (x->fixed ? sizeof(xd_fixed) : sizeof *cells));
}

XD_PRIVATE void xdi_xtoken_add(const xdi_xtoken *x, double *cells, int64_t i, double term) {
    xdi_cells_add(x->fixed, cells, i, term);
}

XD_PRIVATE xd_result xdi_xtoken_reduce(const xdi_xtoken *x, xd_comm *comm, double *cells, int64_t count) {
    if (!comm || xd_comm_size(comm) == 1 || count == 0) return XD_OK;
    if (x->fixed) return xd_all_reduce(comm, cells, cells, 2 * count, XD_DTYPE_I64, XD_SUM);
    return xd_all_reduce(comm, cells, cells, count, XD_DTYPE_F64, XD_SUM);
}

XD_PRIVATE xd_result xdi_xtoken_join(const xdi_xtoken *x, double *cells, int64_t count, xd_comm *first,
                                     xd_comm *second) {
    XD_TRY(xdi_xtoken_reduce(x, first, cells, count));
    XD_TRY(xdi_xtoken_reduce(x, second, cells, count));
    if (x->fixed) xdi_cells_settle(cells, count);
    return XD_OK;
}

static double xdi_xtoken_sample(const xdi_xtoken *x, int64_t b) {
    return x->d.sample_weight ? (double)x->d.sample_weight[b] : 1.0;
}

/* Tokens on both sides, not masked, and exact where that is asked for. */
static bool xdi_xtoken_exists(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c) {
    const xd_xtoken_teacher *t = term->teacher;
    const int64_t at = b * t->chunks + c;
    const bool exact = x->d.exact_only && !(x->d.compat && t->kind == XD_XTOKEN_GOLD);
    uint8_t valid;
    xd_valid_chunks(&term->student_sizes[at], &term->teacher_sizes[at],
                    t->chunk_mask ? &t->chunk_mask[at] : NULL, exact ? &t->chunk_exact[at] : NULL, 1, &valid);
    return valid != 0;
}

XD_PRIVATE bool xdi_xtoken_counts(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c) {
    return xdi_xtoken_sample(x, b) != 0.0 && xdi_xtoken_exists(x, term, b, c);
}

XD_PRIVATE bool xdi_xtoken_looks(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c) {
    const bool all = x->d.compat && term->teacher->kind == XD_XTOKEN_PROJECTED;
    return (all || xdi_xtoken_sample(x, b) != 0.0) && xdi_xtoken_exists(x, term, b, c);
}

XD_PRIVATE double xdi_xtoken_weight(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b, int64_t c) {
    if (!xdi_xtoken_counts(x, term, b, c)) return 0.0;
    return x->d.compat && term->teacher->kind == XD_XTOKEN_GOLD ? 1.0 : xdi_xtoken_sample(x, b);
}

/* tau^2 / D, 0 where nothing counts; log-likelihoods are at temperature 1. */
static double xdi_xtoken_scale(const xdi_xtoken *x, const xdi_xtoken_term *term) {
    const double tau = term->teacher->kind == XD_XTOKEN_LIKELIHOOD ? 1.0 : x->d.temperature;
    return term->denominator > 0.0 ? tau * tau / term->denominator : 0.0;
}

/* omega_i, with the factor of its vocabulary; averaged logits are one teacher of weight 1. */
static double xdi_xtoken_omega(const xdi_xtoken *x, const xdi_xtoken_term *term) {
    if (!term->active) return 0.0;
    return x->d.mode == XD_XTOKEN_AVERAGED_LOGITS ? 1.0 : term->weight * term->length;
}

XD_PRIVATE double xdi_xtoken_factor(const xdi_xtoken *x, const xdi_xtoken_term *term) {
    return x->kd_weight * xdi_xtoken_omega(x, term) * xdi_xtoken_scale(x, term);
}

XD_PRIVATE void xdi_xtoken_found(xdi_xtoken *x, int64_t row, double value) {
    if (x->found.not_finite++ > 0 || x->found.label_out_of_range > 0) return;
    x->found.first_row = row;
    x->found.first_value = value;
}

XD_PRIVATE xd_xtoken_args xdi_xtoken_student_args(const xdi_xtoken *x, int64_t count) {
    xd_xtoken_args a;
    memset(&a, 0, sizeof a);
    a.logits = x->d.student;
    a.columns = x->columns;
    a.temperature = x->d.temperature;
    a.lse = x->lse;
    a.rows = x->rows;
    a.places = x->places;
    a.count = count;
    a.fixed = x->fixed;
    a.scale = 1.0;
    a.first = x->vocab.begin;
    a.gradient = x->d.gradient;
    a.lse_one = x->lse_one;
    a.ce_factor = x->d.labels ? x->ce_factor : NULL;
    a.ce_weight = x->ce_weight;
    a.labels = x->d.labels;
    a.written = x->written;
    a.scratch = x->scratch;
    return a;
}

XD_PRIVATE xd_xtoken_args xdi_xtoken_teacher_args(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                                  int64_t count) {
    xd_xtoken_args a = xdi_xtoken_student_args(x, count);
    a.logits = term->teacher->logits;
    a.columns = term->vocabulary;
    a.lse = NULL;
    a.ids = term->teacher->column_ids ? x->ids + term->k : x->ids;
    a.k = term->k;
    a.cells = x->teacher;
    return a;
}

XD_PRIVATE xd_result xdi_xtoken_write(xdi_xtoken *x, int64_t row, const float *u, double shift) {
    xd_xtoken_args a = xdi_xtoken_student_args(x, 1);
    a.rows = &row;
    a.u = u;
    a.delta = &shift;
    return x->kernels.gradient(&x->launch, &a);
}

/* ---- columns ---- */

XD_PRIVATE bool xdi_xtoken_voters(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b,
                                  uint8_t *mask) {
    const xd_xtoken_teacher *t = term->teacher;
    if (x->d.compat) return true;
    for (int64_t i = 0; i < term->held; i++) {
        const int64_t row = b * term->held + i;
        if (t->kind == XD_XTOKEN_SAME)
            mask[i] = (uint8_t)(x->row_weight[row] != 0.0);
        else
            mask[i] = (uint8_t)(t->teacher_chunks[row] >= 0 &&
                                xdi_xtoken_counts(x, term, b, t->teacher_chunks[row]));
    }
    return false;
}

XD_PRIVATE xd_result xdi_xtoken_choose(xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b) {
    const bool all = xdi_xtoken_voters(x, term, b, x->mask);
    const xd_rows *y = &term->teacher->logits;
    const int64_t size = term->teacher->kind == XD_XTOKEN_SAME ? x->vocab.size : term->vocabulary;
    xd_vocab *columns = NULL;
    xd_rows rows = *y;
    if (!all) {
        const int64_t skip = b * term->held * (y->stride ? y->stride : y->cols);
        rows.rows = term->held;
        if (y->data) rows.data = (unsigned char *)y->data + (size_t)skip * xd_dtype_size(y->dtype);
    }
    xd_result result = xd_vocab_create(x->ctx, NULL, 0, size, size, &columns);
    result = xdi_vocab_agree(x->d.sequence_comm, NULL, result);
    if (result == XD_OK)
        result = xd_vocab_topk_columns(x->ctx, columns, rows, all ? NULL : x->mask, x->d.sequence_comm,
                                       term->k, x->ids, NULL);
    xd_vocab_destroy(columns);
    return xdi_vocab_agree(x->vocab.tp, NULL, result);
}

/* ---- workspace ---- */

static int64_t xdi_xtoken_most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* Entries of the projection in this shard's rows; nobody asks for them where the host cannot read it. */
static int64_t xdi_xtoken_entries(const xdi_xtoken *x, const xd_projection *m) {
    const xd_vocab_info *info = &x->vocab;
    if (!m || x->on_device || m->student_size < info->end) return 0;
    return m->row_begin[info->end] - m->row_begin[info->begin];
}

static void xdi_xtoken_size_teacher(const xdi_xtoken *x, const xd_xtoken_teacher *t, xdi_xtoken_sizes *s) {
    const xd_xtoken_desc *d = &x->d;
    const int64_t k = xdi_xtoken_columns(d, t, x->vocab.size), tile = xdi_xtoken_tile_size(d, t, k);
    const int64_t columns = x->columns, size = xdi_xtoken_vocabulary(t);
    if (xdi_xtoken_reads_logits(t)) s->teachers = xdi_xtoken_most(s->teachers, t->logits.rows);
    if (t->kind == XD_XTOKEN_CACHED || t->kind == XD_XTOKEN_LIKELIHOOD) return; /* they take their own */
    s->held = xdi_xtoken_most(s->held, t->logits.rows / d->sequences);
    if (t->kind == XD_XTOKEN_GOLD) {
        s->student = xdi_xtoken_most(s->student, columns);
        s->teacher = xdi_xtoken_most(s->teacher, size);
        s->tail = xdi_xtoken_most(s->tail, XD_XTOKEN_BEST_WORDS + (t->map ? xdi_xtoken_tail(d, t->map) : 0));
        s->scratch = xdi_xtoken_most(s->scratch, xdi_xtoken_most(columns, size));
        s->scratch = xdi_xtoken_most(s->scratch, XD_XTOKEN_SCRATCH(0));
        return;
    }
    s->ids = xdi_xtoken_most(s->ids, t->column_ids ? 2 * k : k);
    s->mask = xdi_xtoken_most(s->mask, t->logits.rows / d->sequences);
    s->student = xdi_xtoken_most(s->student, tile * k);
    s->teacher = xdi_xtoken_most(s->teacher, tile * k);
    s->tile = xdi_xtoken_most(s->tile, tile);
    if (t->kind == XD_XTOKEN_SAME && x->on_device) s->slots = xdi_xtoken_most(s->slots, x->vocab.size);
    if (t->kind != XD_XTOKEN_PROJECTED) return;
    s->slots = xdi_xtoken_most(s->slots, size);
    s->begin = columns + 1;
    s->entries = xdi_xtoken_most(s->entries, xdi_xtoken_entries(x, t->projection));
    s->scratch = xdi_xtoken_most(s->scratch, XD_XTOKEN_SCRATCH(k));
}

/* A term with its lists of chunks, and of the rows that have one. */
static xdi_xtoken_term xdi_xtoken_layout_chunks(const xd_xtoken_desc *d, const xd_xtoken_teacher *t,
                                                xd_arena *arena, bool *fits) {
    const int64_t b = d->sequences, count = b * t->chunks;
    xdi_xtoken_term term;
    memset(&term, 0, sizeof term);
    if (t->kind == XD_XTOKEN_SAME) return term;
    term.student_sizes = (int64_t *)xdi_arena_array(arena, count, sizeof(int64_t), fits);
    term.teacher_sizes = (int64_t *)xdi_arena_array(arena, count, sizeof(int64_t), fits);
    term.order = (int64_t *)xdi_arena_array(arena, count, sizeof(int64_t), fits);
    term.place = (int64_t *)xdi_arena_array(arena, count, sizeof(int64_t), fits);
    term.shared = (int64_t *)xdi_arena_array(arena, b, sizeof(int64_t), fits);
    term.listed = (int64_t *)xdi_arena_array(arena, b, sizeof(int64_t), fits);
    term.student_rows.begin = (int64_t *)xdi_arena_array(arena, count + 1, sizeof(int64_t), fits);
    term.student_rows.rows = (int64_t *)xdi_arena_array(arena, d->student.rows, sizeof(int64_t), fits);
    term.teacher_rows.begin = (int64_t *)xdi_arena_array(arena, count + 1, sizeof(int64_t), fits);
    term.teacher_rows.rows = (int64_t *)xdi_arena_array(arena, t->logits.rows, sizeof(int64_t), fits);
    return term;
}

/* What the host works with: rows, and terms with their chunks. */
static void xdi_xtoken_layout_host(xdi_xtoken *x, xd_arena *arena, bool *fits) {
    const xd_xtoken_desc *d = &x->d;
    const int64_t rows = d->student.rows, teachers = d->teacher_count;
    x->argmax = (int64_t *)xdi_arena_array(arena, rows, sizeof(int64_t), fits);
    x->log_probs = (double *)xdi_arena_array(arena, rows, sizeof(double), fits);
    x->row_weight = (double *)xdi_arena_array(arena, rows, sizeof(double), fits);
    x->written = (uint8_t *)xdi_arena_array(arena, rows, 1, fits);
    x->row_sums = (double *)xdi_arena_array(arena, rows + 1, sizeof(xd_fixed), fits);
    x->sums = (double *)xdi_arena_array(arena, XDI_XTOKEN_FIRST + XDI_XTOKEN_PER_TEACHER * teachers,
                                        sizeof(xd_fixed), fits);
    xdi_xtoken_term *terms = (xdi_xtoken_term *)xdi_arena_array(arena, teachers, sizeof *terms, fits);
    for (int i = 0; i < d->teacher_count; i++) {
        const xdi_xtoken_term term = xdi_xtoken_layout_chunks(d, &d->teachers[i], arena, fits);
        if (terms) terms[i] = term;
    }
    x->terms = terms;
}

/* Rows at work, and the matrix in J. */
static void xdi_xtoken_layout_matrix(xdi_xtoken *x, xd_arena *arena, const xdi_xtoken_sizes *s, bool *fits) {
    x->rows = (int64_t *)xdi_arena_array(arena, s->held, sizeof(int64_t), fits);
    x->places = (int64_t *)xdi_arena_array(arena, s->held, sizeof(int64_t), fits);
    x->chunks = (xd_xtoken_chunk *)xdi_arena_array(arena, s->tile, sizeof(xd_xtoken_chunk), fits);
    x->slots = (int32_t *)xdi_arena_array(arena, s->slots, sizeof(int32_t), fits);
    x->row_begin = (int64_t *)xdi_arena_array(arena, s->begin, sizeof(int64_t), fits);
    x->entry_student = (int32_t *)xdi_arena_array(arena, s->entries, sizeof(int32_t), fits);
    x->entry_slot = (int32_t *)xdi_arena_array(arena, s->entries, sizeof(int32_t), fits);
    x->entry_weight = (float *)xdi_arena_array(arena, s->entries, sizeof(float), fits);
    x->scratch = (float *)xdi_arena_array(arena, s->scratch, sizeof(float), fits);
}

/* What the kernels of a CPU work on. */
static void xdi_xtoken_layout_work(xdi_xtoken *x, xd_arena *arena, const xdi_xtoken_sizes *s, bool *fits) {
    const int64_t rows = x->d.student.rows;
    x->lse = (double *)xdi_arena_array(arena, rows, sizeof(double), fits);
    x->lse_one = (double *)xdi_arena_array(arena, rows, sizeof(double), fits);
    x->ce_factor = (double *)xdi_arena_array(arena, rows, sizeof(double), fits);
    x->row_delta = (double *)xdi_arena_array(arena, x->held, sizeof(xd_fixed), fits);
    x->u = (float *)xdi_arena_array(arena, x->columns, sizeof(float), fits);
    x->ids = (int64_t *)xdi_arena_array(arena, s->ids, sizeof(int64_t), fits);
    x->mask = (uint8_t *)xdi_arena_array(arena, s->mask, 1, fits);
    x->student = (double *)xdi_arena_array(arena, s->student, sizeof(xd_fixed), fits);
    x->teacher = (double *)xdi_arena_array(arena, s->teacher, sizeof(xd_fixed), fits);
    x->tails = (double *)xdi_arena_array(arena, s->tail, sizeof(double), fits);
    x->all_tails = (double *)xdi_arena_array(arena, x->vocab.ranks > 1 ? x->vocab.ranks * s->tail : 0,
                                             sizeof(double), fits);
    x->other_tail = (double *)xdi_arena_array(arena, s->tail, sizeof(double), fits);
    x->tail_ids = (int64_t *)xdi_arena_array(arena, 2 * s->tail, sizeof(int64_t), fits);
    xdi_xtoken_layout_matrix(x, arena, s, fits);
}

/* Every block: from `work`, memory of the context's device, and where that is not the host's from `host` too.
 * With planning arenas this is the size query. False when it does not fit. */
static bool xdi_xtoken_layout(xdi_xtoken *x, xd_arena *work, xd_arena *host) {
    xdi_xtoken_sizes s;
    bool fits = true;
    memset(&s, 0, sizeof s);
    s.held = xdi_xtoken_most(x->held, x->vocab.ranks);
    for (int i = 0; i < x->d.teacher_count; i++) xdi_xtoken_size_teacher(x, &x->d.teachers[i], &s);
    xdi_xtoken_layout_host(x, x->on_device ? host : work, &fits);
    if (x->on_device) return fits && xdi_xtoken_device_layout(x, &s, host, work);
    xdi_xtoken_layout_work(x, work, &s, &fits);
    return fits;
}

static void xdi_xtoken_open(xdi_xtoken *x, xd_ctx *ctx, const xd_xtoken_desc *d) {
    memset(x, 0, sizeof *x);
    x->ctx = ctx;
    x->d = *d;
    x->launch = xd_ctx_launch(ctx);
    x->device.kernels = xd_ctx_kernels(ctx);
    x->kernels = x->device.kernels->xtoken;
    x->on_device = x->device.kernels->device != XD_DEVICE_CPU;
    x->vocab = xd_vocab_describe(d->vocab);
    x->held = d->student.rows / d->sequences;
    x->columns = x->vocab.end - x->vocab.begin;
    x->selected = -1;
    x->kd_weight = d->kd_weight;
    x->ce_weight = d->ce_weight;
    x->fixed = xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT;
    x->owner = !d->sequence_comm || xd_comm_rank(d->sequence_comm) == 0;
}

static void xdi_xtoken_open_term(xdi_xtoken *x, int index) {
    const xd_xtoken_teacher *t = &x->d.teachers[index];
    xdi_xtoken_term *term = &x->terms[index];
    term->teacher = t;
    term->held = t->logits.rows / x->d.sequences;
    term->vocabulary = xdi_xtoken_vocabulary(t);
    term->k = xdi_xtoken_columns(&x->d, t, x->vocab.size);
    term->tile = xdi_xtoken_tile_size(&x->d, t, term->k);
    term->cell = XDI_XTOKEN_FIRST + XDI_XTOKEN_PER_TEACHER * index;
    term->weight = t->weight == 0.0 ? 1.0 : t->weight;
}

static xd_result xdi_xtoken_provide(xdi_xtoken *x, const xd_xtoken_desc *desc) {
    xd_arena plan = xd_arena_over(NULL, 0), host_plan = plan, work, host = plan;
    void *memory = desc->workspace;
    size_t bytes = desc->workspace_bytes;
    XD_REQUIRE(x->ctx, xdi_xtoken_layout(x, &plan, &host_plan), XD_ERROR_ARGUMENT,
               "the workspace would not fit into memory");
    if (x->on_device) {
        x->memory = xd_allocate(x->ctx, host_plan.peak);
        XD_REQUIRE(x->ctx, x->memory, XD_ERROR_MEMORY, "no room for lists of %zu bytes", host_plan.peak);
        host = xd_arena_over(x->memory, host_plan.peak);
    }
    if (!memory) {
        bytes = plan.peak;
        if (x->on_device)
            memory = x->device.memory = x->device.kernels->memory.allocate(x->ctx, bytes);
        else
            memory = x->memory = xd_allocate(x->ctx, bytes);
        XD_REQUIRE(x->ctx, memory, XD_ERROR_MEMORY, "no room for a workspace of %zu bytes", bytes);
    }
    work = xd_arena_over(memory, bytes);
    XD_REQUIRE(x->ctx, xdi_xtoken_layout(x, &work, &host), XD_ERROR_ARGUMENT,
               "workspace has %zu bytes but the loss needs %zu", bytes, plan.peak);
    return XD_OK;
}

/* Everything up to the first exchange, on this rank alone. */
static xd_result xdi_xtoken_prepare(xd_ctx *ctx, const xd_xtoken_desc *desc, xdi_xtoken *x) {
    const xd_xtoken_desc d = xdi_xtoken_defaults(desc);
    XD_TRY(xdi_xtoken_validate(ctx, &d));
    xdi_xtoken_open(x, ctx, &d);
    XD_TRY(xdi_xtoken_provide(x, desc));
    for (int i = 0; i < d.teacher_count; i++) xdi_xtoken_open_term(x, i);
    return x->on_device ? xdi_xtoken_device_open(x) : XD_OK;
}

/* ---- rows ---- */

/* Does the row count, and how much? A label outside the vocabulary is found here. */
static double xdi_xtoken_row_weight(xdi_xtoken *x, int64_t row) {
    const double weight = x->d.row_weight ? (double)x->d.row_weight[row] : 1.0;
    if (!x->d.labels) return weight;
    const int64_t label = x->d.labels[row];
    if (label == x->d.ignore_index || weight == 0.0) return 0.0;
    if (label >= 0 && label < x->vocab.size) return weight;
    if (x->found.label_out_of_range++ == 0 && x->found.not_finite == 0) {
        x->found.first_row = row;
        x->found.first_value = (double)label;
    }
    return 0.0;
}

/* log-sum-exp of every row. In INVARIANT mode relative to the whole row's maximum, so that the terms are
 * those of one rank. */
static xd_result xdi_xtoken_lse(xdi_xtoken *x, double temperature, double *lse, int64_t *argmax) {
    const xd_rows *z = &x->d.student;
    XD_TRY(xd_row_stats(x->ctx, x->d.vocab, *z, temperature, lse, argmax));
    if (!x->fixed) return XD_OK;
    for (int64_t row = 0; row < z->rows; row++) {
        lse[row] = -INFINITY;
        for (int64_t v = 0; v < x->columns; v++)
            if (!(xdi_loss_load(z, row, v) / temperature <= lse[row]))
                lse[row] = xdi_loss_load(z, row, v) / temperature;
    }
    if (x->vocab.tp) XD_TRY(xd_all_reduce(x->vocab.tp, lse, lse, z->rows, XD_DTYPE_F64, XD_MAX));
    xdi_xtoken_zero(x, x->row_sums, z->rows);
    for (int64_t row = 0; row < z->rows; row++)
        for (int64_t v = 0; v < x->columns; v++)
            xdi_xtoken_add(x, x->row_sums, row, exp(xdi_loss_load(z, row, v) / temperature - lse[row]));
    XD_TRY(xdi_xtoken_join(x, x->row_sums, z->rows, x->vocab.tp, NULL));
    for (int64_t row = 0; row < z->rows; row++) lse[row] += log(x->row_sums[row]);
    return XD_OK;
}

/* Statistics of the student's rows, and the log-probabilities of their labels. */
static xd_result xdi_xtoken_stats(xdi_xtoken *x) {
    const xd_xtoken_desc *d = &x->d;
    XD_TRY(xdi_xtoken_lse(x, d->temperature, x->lse, x->argmax));
    if (!d->labels) return XD_OK;
    if (d->temperature == 1.0)
        memcpy(x->lse_one, x->lse, (size_t)d->student.rows * sizeof *x->lse);
    else
        XD_TRY(xdi_xtoken_lse(x, 1.0, x->lse_one, x->argmax));
    XD_TRY(xd_gather_columns(x->ctx, d->vocab, d->student, d->labels, 1, 1, x->log_probs));
    for (int64_t row = 0; row < d->student.rows; row++) x->log_probs[row] -= x->lse_one[row];
    return XD_OK;
}

/* Which rows count, and by how much their cross entropy does. */
static xd_result xdi_xtoken_rows(xdi_xtoken *x) {
    const xd_xtoken_desc *d = &x->d;
    XD_TRY(x->on_device ? xdi_xtoken_device_stats(x) : xdi_xtoken_stats(x));
    for (int64_t row = 0; row < d->student.rows; row++) {
        const double weight = x->row_weight[row] = xdi_xtoken_row_weight(x, row);
        x->ce_factor[row] = 0.0;
        if (!d->labels || weight == 0.0) continue;
        if (isfinite(x->log_probs[row]))
            x->ce_factor[row] = weight;
        else
            xdi_xtoken_found(x, row, x->log_probs[row]);
    }
    return XD_OK;
}

/* What rows add to the sums. */
static void xdi_xtoken_add_rows(const xdi_xtoken *x) {
    for (int64_t row = 0; row < x->d.student.rows; row++) {
        const double weight = x->row_weight[row];
        const bool right = x->d.labels && x->argmax[row] == x->d.labels[row];
        xdi_xtoken_add(x, x->sums, XDI_XTOKEN_TOKENS, weight);
        xdi_xtoken_add(x, x->sums, XDI_XTOKEN_RIGHT, right ? weight : 0.0);
        if (x->ce_factor[row] != 0.0) xdi_xtoken_add(x, x->sums, XDI_XTOKEN_CE, -weight * x->log_probs[row]);
    }
}

/* ---- denominators and scores ---- */

/* Chunks of every teacher and who works on them, over sequence_comm; the ids were checked. */
static xd_result xdi_xtoken_count_chunks(xdi_xtoken *x, xdi_xtoken_term *term) {
    const xd_xtoken_teacher *t = term->teacher;
    const xd_chunk_map student = { t->student_chunks, x->d.sequences, x->held, t->chunks,
                                   x->d.sequence_comm };
    const xd_chunk_map teacher = { t->teacher_chunks, x->d.sequences, term->held, t->chunks,
                                   x->d.sequence_comm };
    if (t->kind == XD_XTOKEN_SAME) return XD_OK;
    XD_TRY(xd_chunk_sizes(x->ctx, &student, term->student_sizes));
    XD_TRY(xd_chunk_sizes(x->ctx, &teacher, term->teacher_sizes));
    return t->kind == XD_XTOKEN_LIKELIHOOD ? XD_OK : xdi_xtoken_share(x, term);
}

/* This rank's part of D in a cell: sample weights of counted chunks, or their number. */
static void xdi_xtoken_count(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t cell) {
    if (term->teacher->kind == XD_XTOKEN_SAME || !x->owner) return;
    for (int64_t b = 0; b < x->d.sequences; b++)
        for (int64_t c = 0; c < term->teacher->chunks; c++)
            if (xdi_xtoken_counts(x, term, b, c))
                xdi_xtoken_add(x, x->sums, cell, x->d.compat ? 1.0 : xdi_xtoken_sample(x, b));
}

static double xdi_xtoken_denominator(const xdi_xtoken *x, const xdi_xtoken_term *term, double counted) {
    if (term->teacher->kind == XD_XTOKEN_SAME) return x->token_denominator;
    if (term->teacher->denominator_value > 0.0) return term->teacher->denominator_value;
    return x->d.compat && counted < 1.0 ? 1.0 : counted;
}

/* One exchange over comm: tokens, D and scores; then weights of teachers and factors of rows. */
static xd_result xdi_xtoken_denominators(xdi_xtoken *x) {
    const int n = x->d.teacher_count;
    const xd_xtoken_score score = x->d.mode == XD_XTOKEN_SELECT ? XD_XTOKEN_SCORE_CE : x->d.score;
    double all = 0.0;
    xdi_xtoken_zero(x, x->sums, 1 + 3 * n);
    for (int64_t row = 0; row < x->d.student.rows; row++) xdi_xtoken_add(x, x->sums, 0, x->row_weight[row]);
    for (int i = 0; i < n; i++) {
        XD_TRY(xdi_xtoken_count_chunks(x, &x->terms[i]));
        xdi_xtoken_count(x, &x->terms[i], 1 + i);
        if (score != XD_XTOKEN_SCORE_NONE)
            XD_TRY(xdi_xtoken_score_sums(x, &x->terms[i], score, 1 + n + 2 * i));
    }
    XD_TRY(xdi_xtoken_join(x, x->sums, 1 + 3 * n, x->d.comm, NULL));
    x->token_denominator = x->d.token_denominator > 0.0 ? x->d.token_denominator : x->sums[0];
    for (int i = 0; i < n; i++) {
        x->terms[i].denominator = xdi_xtoken_denominator(x, &x->terms[i], x->sums[1 + i]);
        all += x->sums[1 + i];
    }
    if (all == 0.0 && x->sums[0] == 0.0) x->found.nothing_counted = 1;
    for (int64_t row = 0; row < x->d.student.rows && x->token_denominator > 0.0; row++)
        x->ce_factor[row] /= x->token_denominator;
    xdi_xtoken_weigh(x, x->sums + 1 + n);
    return XD_OK;
}

/* ---- passes ---- */

static xd_result xdi_xtoken_pass(xdi_xtoken *x, bool write) {
    x->write = write;
    x->found = x->found_in_rows;
    memset(x->written, 0, (size_t)x->d.student.rows);
    xdi_xtoken_zero(x, x->sums, XDI_XTOKEN_FIRST + XDI_XTOKEN_PER_TEACHER * x->d.teacher_count);
    xdi_xtoken_add_rows(x);
    if (x->on_device) return xdi_xtoken_device_pass(x);
    for (int i = 0; i < x->d.teacher_count; i++) {
        xdi_xtoken_term *term = &x->terms[i];
        if (!term->active) continue;
        if (term->teacher->kind == XD_XTOKEN_PROJECTED) XD_TRY(xdi_xtoken_projected(x, term));
        if (term->teacher->kind == XD_XTOKEN_GOLD) XD_TRY(xdi_xtoken_gold(x, term));
        if (term->teacher->kind == XD_XTOKEN_SAME) XD_TRY(xdi_xtoken_same(x, term));
        if (term->teacher->kind == XD_XTOKEN_CACHED) XD_TRY(xdi_xtoken_cached(x, term));
        if (term->teacher->kind == XD_XTOKEN_LIKELIHOOD) XD_TRY(xdi_xtoken_likelihood(x, term));
    }
    for (int64_t row = 0; row < x->d.student.rows && write; row++)
        if (!x->written[row]) XD_TRY(xdi_xtoken_write(x, row, NULL, 0.0));
    return XD_OK;
}

/* Where several ranks found something, all name what the first of them did. */
static xd_result xdi_xtoken_agree_found(xdi_xtoken *x) {
    xd_comm *comm = x->d.comm;
    const bool any = x->sums[XDI_XTOKEN_LABEL] != 0.0 || x->sums[XDI_XTOKEN_NOT_FINITE] != 0.0;
    const bool mine = x->found.label_out_of_range > 0 || x->found.not_finite > 0;
    if (!any || !comm || xd_comm_size(comm) == 1) return XD_OK;
    int64_t first = mine ? xd_comm_rank(comm) : xd_comm_size(comm);
    double named[2] = { (double)x->found.first_row, x->found.first_value };
    XD_TRY(xd_all_reduce(comm, &first, &first, 1, XD_DTYPE_I64, XD_MIN));
    XD_TRY(xd_broadcast(comm, named, 2, XD_DTYPE_F64, (int)first));
    x->found.first_row = (int64_t)named[0];
    x->found.first_value = named[1];
    return XD_OK;
}

/* The sums of a pass over all of comm. */
static xd_result xdi_xtoken_finish(xdi_xtoken *x) {
    xdi_xtoken_add(x, x->sums, XDI_XTOKEN_LABEL, (double)x->found.label_out_of_range);
    xdi_xtoken_add(x, x->sums, XDI_XTOKEN_NOT_FINITE, (double)x->found.not_finite);
    XD_TRY(xdi_xtoken_join(x, x->sums, XDI_XTOKEN_FIRST + XDI_XTOKEN_PER_TEACHER * x->d.teacher_count,
                           x->d.comm, NULL));
    return xdi_xtoken_agree_found(x);
}

static xd_xtoken_teacher_values xdi_xtoken_teacher_result(const xdi_xtoken *x, int index) {
    const xdi_xtoken_term *term = &x->terms[index];
    const double *one = x->sums + term->cell;
    xd_xtoken_teacher_values v;
    v.kd = (one[XDI_XTOKEN_DIVERGENCE] + one[XDI_XTOKEN_TAIL]) * xdi_xtoken_scale(x, term);
    v.weight = term->weight;
    v.divergence = one[XDI_XTOKEN_DIVERGENCE];
    v.tail = one[XDI_XTOKEN_TAIL];
    v.denominator = term->denominator;
    v.agreeing = one[XDI_XTOKEN_AGREEING];
    v.compared = one[XDI_XTOKEN_COMPARED];
    return v;
}

static xd_xtoken_values xdi_xtoken_result(const xdi_xtoken *x) {
    xd_xtoken_values v;
    memset(&v, 0, sizeof v);
    for (int i = 0; i < x->d.teacher_count; i++)
        v.kd += xdi_xtoken_omega(x, &x->terms[i]) * xdi_xtoken_teacher_result(x, i).kd;
    v.ce = x->token_denominator > 0.0 ? x->sums[XDI_XTOKEN_CE] / x->token_denominator : 0.0;
    v.kd_weight = x->kd_weight;
    v.loss = x->kd_weight * v.kd + x->ce_weight * v.ce;
    v.balance = v.kd != 0.0 ? fabs(v.ce) / fabs(v.kd) : 1.0;
    v.right = x->sums[XDI_XTOKEN_RIGHT];
    v.tokens = x->sums[XDI_XTOKEN_TOKENS];
    v.token_denominator = x->token_denominator;
    v.selected = x->selected;
    return v;
}

/* Adds what was found to the caller's status, or makes an error of it. */
static xd_result xdi_xtoken_report(const xdi_xtoken *x) {
    xd_status found = x->found, *status = x->d.status;
    found.label_out_of_range = (int64_t)x->sums[XDI_XTOKEN_LABEL];
    found.not_finite = (int64_t)x->sums[XDI_XTOKEN_NOT_FINITE];
    if (!status) return xd_status_check(x->ctx, &found);
    if (status->label_out_of_range == 0 && status->not_finite == 0) {
        status->first_row = found.first_row;
        status->first_value = found.first_value;
    }
    status->label_out_of_range += found.label_out_of_range;
    status->not_finite += found.not_finite;
    status->nothing_counted += found.nothing_counted;
    return XD_OK;
}

static xd_result xdi_xtoken_run(xdi_xtoken *x, xd_xtoken_values *out) {
    const bool write = x->d.gradient.data != NULL;
    xd_xtoken_values values;
    XD_TRY(xdi_xtoken_rows(x));
    XD_TRY(xdi_xtoken_denominators(x));
    if (x->on_device) XD_TRY(xdi_xtoken_device_begin(x));
    x->found_in_rows = x->found;
    if (x->d.balance) x->kd_weight = x->ce_weight = 1.0;
    XD_TRY(xdi_xtoken_pass(x, write && !x->d.balance));
    XD_TRY(xdi_xtoken_finish(x));
    values = xdi_xtoken_result(x);
    if (x->d.balance) {
        x->kd_weight = values.balance;
        if (write) XD_TRY(xdi_xtoken_pass(x, true));
        if (write) XD_TRY(xdi_xtoken_finish(x));
        values = xdi_xtoken_result(x);
    }
    XD_TRY(xdi_xtoken_report(x));
    for (int i = 0; i < x->d.teacher_count && x->d.teacher_values; i++)
        x->d.teacher_values[i] = xdi_xtoken_teacher_result(x, i);
    *out = values;
    return XD_OK;
}

/* Are the sizes such that the workspace can be computed? */
static bool xdi_xtoken_is_sized(const xd_xtoken_desc *d) {
    if (!d->vocab || !d->teachers || d->student.rows < 0 || d->sequences < 0 || d->sequences > INT32_MAX)
        return false;
    if (d->tile < 0 || d->tile > XDI_XTOKEN_TILE_MAX) return false;
    for (int i = 0; i < d->teacher_count; i++)
        if (d->teachers[i].chunks < 0 || d->teachers[i].chunks > INT32_MAX || d->teachers[i].logits.rows < 0)
            return false;
    return d->teacher_count > 0;
}

XD_API size_t xd_xtoken_workspace_bytes(const xd_xtoken_desc *desc) {
    xdi_xtoken x;
    xd_arena work = xd_arena_over(NULL, 0), host = work;
    if (!xdi_xtoken_is_sized(desc)) return 0;
    const xd_xtoken_desc d = xdi_xtoken_defaults(desc);
    xdi_xtoken_open(&x, xdi_vocab_ctx(d.vocab), &d);
    return xdi_xtoken_layout(&x, &work, &host) ? work.peak : 0;
}

XD_API xd_result xd_xtoken_loss(xd_ctx *ctx, const xd_xtoken_desc *desc, xd_xtoken_values *out) {
    xdi_xtoken x;
    memset(&x, 0, sizeof x);
    xd_result result = xdi_xtoken_prepare(ctx, desc, &x);
    result = xdi_vocab_agree(desc->vocab ? xd_vocab_describe(desc->vocab).tp : NULL,
                             desc->comm ? desc->comm : desc->sequence_comm, result);
    if (result == XD_OK) result = xdi_xtoken_run(&x, out);
    if (x.on_device) xdi_xtoken_device_close(&x, result);
    xd_release(ctx, x.memory);
    return result;
}
