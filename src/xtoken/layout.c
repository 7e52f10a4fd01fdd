/* A call's memory: lists, blocks of the host and of the device, from the caller's workspace or taken for the call. */

#include "xtoken/internal.h"

#include <string.h>

/* Cells of x->host.sums before the passes and after. */
static int64_t xdi_layout_sums(const xd_xtoken_desc *d) {
    return XDI_XTOKEN_FIRST + XDI_XTOKEN_PER_TEACHER * (int64_t)d->teacher_count;
}

/* Chunks, or positions, that a term works on at once. */
static int64_t xdi_layout_tile(const xdi_xtoken *x, const xdi_xtoken_term *term) {
    int64_t tile = xdi_xtoken_fits((int64_t)1 << 18, term->k);
    if (tile > 32) tile = 32;
    if (x->d.tile > 0) tile = x->d.tile;
    return term->kind->tile ? term->kind->tile(x, term, tile) : tile;
}

static xdi_xtoken_term xdi_layout_term(const xdi_xtoken *x, int index) {
    const xd_xtoken_teacher *t = &x->d.teachers[index];
    xdi_xtoken_term term;
    memset(&term, 0, sizeof term);
    term.teacher = t;
    term.kind = xdi_xtoken_kind_of(t->kind);
    term.held = t->logits.rows / x->d.sequences;
    term.vocabulary = xdi_xtoken_vocabulary(t);
    term.k = xdi_xtoken_columns(&x->d, t, x->vocab.size);
    term.places.chunks = t->chunks;
    term.places.tile = xdi_layout_tile(x, &term);
    term.reads = xdi_xtoken_reads_logits(t);
    term.weight = t->weight;
    term.cell = XDI_XTOKEN_FIRST + XDI_XTOKEN_PER_TEACHER * index;
    return term;
}

static void xdi_layout_side(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t rows,
                            xdi_xtoken_side *side, xdi_xtoken_arenas *a) {
    const int64_t chunks = x->d.sequences * term->teacher->chunks;
    side->begin = (int64_t *)xdi_xtoken_list(a, chunks + 1, sizeof(int64_t));
    side->rows = (int64_t *)xdi_xtoken_list(a, rows, sizeof(int64_t));
    side->places = (int64_t *)xdi_xtoken_list(a, rows, sizeof(int64_t));
}

static void xdi_layout_places(xdi_xtoken_places *places, int64_t sequences, xdi_xtoken_arenas *a) {
    const int64_t count = sequences * places->chunks;
    places->order = (int64_t *)xdi_arena_array(a->host, count, sizeof(int64_t), &a->fits);
    places->place = (int64_t *)xdi_arena_array(a->host, count, sizeof(int64_t), &a->fits);
    places->shared = (int64_t *)xdi_arena_array(a->host, sequences, sizeof(int64_t), &a->fits);
    places->listed = (int64_t *)xdi_arena_array(a->host, sequences, sizeof(int64_t), &a->fits);
}

/* What is copied back to the host is contiguous. */
static void xdi_layout_chunks(const xdi_xtoken *x, xdi_xtoken_term *term, xdi_xtoken_arenas *a) {
    const int64_t b = x->d.sequences, count = b * term->teacher->chunks;
    const bool positions = (term->kind->traits & XDI_KIND_POSITIONS) != 0;
    if (!positions) {
        term->student_sizes = (int64_t *)xdi_arena_array(a->host, count, sizeof(int64_t), &a->fits);
        term->teacher_sizes = (int64_t *)xdi_arena_array(a->host, count, sizeof(int64_t), &a->fits);
    }
    if (term->kind->traits & XDI_KIND_APART) return;
    term->chunk_count = positions ? x->d.student.rows : count;
    term->chunks = (xd_xtoken_chunk *)xdi_xtoken_list(a, term->chunk_count, sizeof *term->chunks);
    if (positions) return;
    xdi_layout_places(&term->places, b, a);
    xdi_layout_side(x, term, x->d.student.rows, &term->student_rows, a);
    xdi_layout_side(x, term, term->teacher->logits.rows, &term->teacher_rows, a);
}

/* The private blocks of every teacher, and the maximum size of the blocks that they share. */
static void xdi_layout_teachers(xdi_xtoken *x, xdi_xtoken_sizes *s, xdi_xtoken_arenas *a) {
    const bool scored = x->d.score != XD_XTOKEN_SCORE_NONE || x->d.mode == XD_XTOKEN_SELECT;
    x->terms = (xdi_xtoken_term *)xdi_arena_array(a->host, x->d.teacher_count, sizeof *x->terms, &a->fits);
    for (int i = 0; i < x->d.teacher_count; i++) {
        xdi_xtoken_term term = xdi_layout_term(x, i);
        xdi_layout_chunks(x, &term, a);
        term.kind->size(x, &term, s);
        term.kind->layout(x, &term, a);
        if (scored && term.reads) s->moments = xdi_xtoken_most(s->moments, term.teacher->logits.rows);
        if (x->terms) x->terms[i] = term;
    }
}

/* Statistics of rows: on a CPU the host reads the same memory that the kernels write. */
static void xdi_layout_rows(xdi_xtoken *x, const xdi_xtoken_sizes *s, xdi_xtoken_arenas *a) {
    const int64_t rows = x->d.student.rows, away = x->on_device ? rows : 0;
    xdi_xtoken_host *h = &x->host;
    xdi_xtoken_work *w = &x->work;
    h->row_weight = (double *)xdi_arena_array(a->host, rows, sizeof(double), &a->fits);
    h->ce_factor = (double *)xdi_xtoken_list(a, rows, sizeof(double));
    h->sums = (double *)xdi_arena_array(a->host, xdi_layout_sums(&x->d), sizeof(xd_total), &a->fits);
    h->asked = (int64_t *)xdi_xtoken_list(a, s->moments, sizeof(int64_t));
    w->lse = (double *)xdi_arena_array(a->work, rows, sizeof(double), &a->fits);
    w->lse_one = (double *)xdi_arena_array(a->work, rows, sizeof(double), &a->fits);
    w->argmax = (int64_t *)xdi_arena_array(a->work, rows, sizeof(int64_t), &a->fits);
    w->log_probs = (double *)xdi_arena_array(a->work, rows, sizeof(double), &a->fits);
    w->written = (uint8_t *)xdi_arena_array(a->work, rows, 1, &a->fits);
    w->moments = (double *)xdi_arena_array(a->work, s->moments, XD_XTOKEN_MOMENTS * sizeof(double), &a->fits);
    w->labels = xdi_arena_array(a->work, away, sizeof(int64_t), &a->fits);
    h->argmax = w->argmax;
    h->log_probs = w->log_probs;
    h->moments = w->moments;
    if (!x->on_device) return;
    w->moment_labels = xdi_arena_array(a->work, s->moments, sizeof(int64_t), &a->fits);
    h->argmax = (int64_t *)xdi_arena_array(a->host, rows, sizeof(int64_t), &a->fits);
    h->log_probs = (double *)xdi_arena_array(a->host, rows, sizeof(double), &a->fits);
    h->moments = (double *)xdi_arena_array(a->host, s->moments, XD_XTOKEN_MOMENTS * sizeof(double), &a->fits);
}

/* Cells, preceded by memory for their doubles. */
static void xdi_layout_cells(xdi_xtoken *x, const xdi_xtoken_sizes *s, xdi_xtoken_arenas *a) {
    const int64_t rows = x->fixed ? x->d.student.rows : 0;
    const int64_t cells = xdi_xtoken_most(s->cells, rows) * xdi_xtoken_wide(x);
    x->room = xdi_xtoken_settle_room(x, s->settled);
    const int64_t words = xdi_xtoken_most(x->room + cells, s->doubles);
    x->work.cells = (double *)xdi_arena_array(a->work, words, sizeof(double), &a->fits);
    if (x->work.cells) x->work.cells += x->room;
}

/* Blocks that teachers use one after the other. */
static void xdi_layout_shared(xdi_xtoken *x, const xdi_xtoken_sizes *s, xdi_xtoken_arenas *a) {
    const int64_t ranks = x->vocab.ranks, k = s->tail;
    xdi_xtoken_work *w = &x->work;
    w->delta = (double *)xdi_arena_array(a->work, x->held, sizeof(double), &a->fits);
    w->ids = (int64_t *)xdi_arena_array(a->work, s->ids, sizeof(int64_t), &a->fits);
    w->voters = (uint8_t *)xdi_arena_array(a->work, s->voters, 1, &a->fits);
    w->maxima = (float *)xdi_arena_array(a->work, s->maxima, sizeof(float), &a->fits);
    w->values = (double *)xdi_arena_array(a->work, s->ids, sizeof(double), &a->fits);
    w->slots = (int32_t *)xdi_arena_array(a->work, s->slots, sizeof(int32_t), &a->fits);
    w->matrix = xdi_arena_array(a->work, (int64_t)s->matrix, 1, &a->fits);
    w->u = (float *)xdi_arena_array(a->work, s->means, sizeof(float), &a->fits);
    w->tails = (double *)xdi_arena_array(a->work, k, sizeof(double), &a->fits);
    w->all_tails = (double *)xdi_arena_array(a->work, ranks > 1 ? ranks * k : 0, sizeof(double), &a->fits);
    w->other_tail = (double *)xdi_arena_array(a->work, k, sizeof(double), &a->fits);
    w->tail_ids = (int64_t *)xdi_arena_array(a->work, k > 0 ? 2 * k + ranks : 0, sizeof(int64_t), &a->fits);
    w->merged = (double *)xdi_arena_array(a->work, s->merged, sizeof(double), &a->fits);
    w->scratch = (float *)xdi_arena_array(a->work, s->scratch, sizeof(float), &a->fits);
}

/* Every block. On a CPU all arenas are the same one; with planning arenas this is the size query. */
static bool xdi_layout_all(xdi_xtoken *x, xdi_xtoken_arenas *a) {
    xdi_xtoken_sizes s;
    memset(&s, 0, sizeof s);
    x->lists.here = a->lists->base;
    xdi_layout_teachers(x, &s, a);
    xdi_layout_rows(x, &s, a);
    xdi_layout_cells(x, &s, a);
    xdi_layout_shared(x, &s, a);
    x->lists.there = x->lists.here;
    x->lists.bytes = a->lists->used;
    if (x->on_device)
        x->lists.there = (unsigned char *)xdi_arena_array(a->work, (int64_t)x->lists.bytes, 1, &a->fits);
    return a->fits;
}

XD_PRIVATE void xdi_xtoken_open(xdi_xtoken *x, xd_ctx *ctx, const xd_xtoken_desc *d) {
    memset(x, 0, sizeof *x);
    x->ctx = ctx;
    x->d = *d;
    x->launch = xd_ctx_launch(ctx);
    x->kernels = xd_ctx_kernels(ctx);
    x->on_device = x->kernels->device != XD_DEVICE_CPU;
    x->vocab = xd_vocab_describe(d->vocab);
    x->held = d->student.rows / d->sequences;
    x->columns = x->vocab.end - x->vocab.begin;
    x->selected = -1;
    x->weights.factor = 1.0;
    x->weights.kd = d->kd_weight;
    x->weights.ce = d->ce_weight;
    x->fixed = xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT;
    x->owner = !d->sequence_comm || xd_comm_rank(d->sequence_comm) == 0;
}

XD_PRIVATE bool xdi_xtoken_plan(xdi_xtoken *x, size_t *work, size_t *host, size_t *lists) {
    xd_arena arenas[3];
    xdi_xtoken_arenas a;
    for (int i = 0; i < 3; i++) arenas[i] = xd_arena_over(NULL, 0);
    a.work = &arenas[0];
    a.host = x->on_device ? &arenas[1] : a.work;
    a.lists = x->on_device ? &arenas[2] : a.work;
    a.fits = true;
    const bool fits = xdi_layout_all(x, &a);
    *work = arenas[0].peak;
    *host = arenas[1].peak;
    *lists = arenas[2].peak;
    return fits;
}

XD_PRIVATE xd_result xdi_xtoken_provide(xdi_xtoken *x, const xd_xtoken_desc *desc) {
    size_t work, host, lists, bytes = desc->common.workspace_bytes;
    void *memory = desc->common.workspace;
    xd_arena arenas[3];
    xdi_xtoken_arenas a;
    XD_REQUIRE(x->ctx, xdi_xtoken_plan(x, &work, &host, &lists), XD_ERROR_ARGUMENT,
               "the workspace would not fit into memory");
    if (x->on_device) {
        x->memory.host = xd_allocate(x->ctx, host + 1);
        x->memory.lists = xd_allocate(x->ctx, lists + 1);
        XD_REQUIRE(x->ctx, x->memory.host && x->memory.lists, XD_ERROR_MEMORY,
                   "no room for lists of %zu bytes", host + lists);
    }
    if (!memory) {
        memory = x->memory.work = x->kernels->memory.allocate(x->ctx, bytes = work);
        XD_REQUIRE(x->ctx, memory, XD_ERROR_MEMORY, "no room for a workspace of %zu bytes", bytes);
    }
    arenas[0] = xd_arena_over(memory, bytes);
    arenas[1] = xd_arena_over(x->memory.host, host);
    arenas[2] = xd_arena_over(x->memory.lists, lists);
    a.work = &arenas[0];
    a.host = x->on_device ? &arenas[1] : a.work;
    a.lists = x->on_device ? &arenas[2] : a.work;
    a.fits = true;
    XD_REQUIRE(x->ctx, xdi_layout_all(x, &a), XD_ERROR_ARGUMENT,
               "workspace has %zu bytes but the loss needs %zu", bytes, work);
    return XD_OK;
}

XD_PRIVATE void xdi_xtoken_close(xdi_xtoken *x, xd_result result) {
    if (!x->ctx) return;
    if (result != XD_OK) x->kernels->memory.synchronize(&x->launch);
    for (int i = 0; i < x->d.teacher_count && x->terms; i++)
        if (x->terms[i].kind->close && x->terms[i].own) x->terms[i].kind->close(x, &x->terms[i]);
    x->kernels->memory.release(x->ctx, x->memory.work);
    xd_release(x->ctx, x->memory.lists);
    xd_release(x->ctx, x->memory.host);
}
