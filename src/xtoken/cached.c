/* CACHED: from a file of a teacher's likeliest tokens. */

#include "teacher/internal.h"
#include "xtoken/internal.h"

#include <math.h>
#include <string.h>

/* Entries of a tile: ids of all its chunks together, as long as no single chunk has more. */
enum { XDI_XCACHED_ROOM = 16384 };

/* What the kind needs beside the workspace, and the tile at work. */
typedef struct xdi_xcached {
    xdi_xcached_places in;
    int64_t room;   /* entries */
    double *slopes; /* [columns] zero between uses: scratch of the kernels */
    xdi_xtoken_tile tile;
    int64_t row_count;
    int64_t *rows, *places;  /* [held] student rows of the tile, and their chunks' places in it */
    xd_xtoken_chunk *chunks; /* [C] of the tile */
    double *deltas;          /* [held] cells */
    int64_t *offset;         /* [C + 1] where the entries of the tile's chunks begin */
    int32_t *columns;        /* [room] J of one chunk after the other */
    double *target;          /* [room] a */
    double *q;               /* [room] cells; after the chunk: d loss / d y, y = p M */
} xdi_xcached;

/* ---- teachers without logits ---- */

XD_PRIVATE bool xdi_xtoken_reads_logits(const xd_xtoken_teacher *t) {
    if (t->kind == XD_XTOKEN_LIKELIHOOD) return !t->cache && !t->target_log_probs;
    return t->kind != XD_XTOKEN_CACHED;
}

XD_PRIVATE double xdi_xtoken_known(const xd_xtoken_teacher *t, int64_t row) {
    if (t->kind == XD_XTOKEN_LIKELIHOOD && t->target_log_probs) return (double)t->target_log_probs[row];
    return t->cache_positions[row] < 0 ? -INFINITY : xdi_cache_next(t->cache, t->cache_positions[row]);
}

static xd_result xdi_xcached_check_cache(xd_ctx *ctx, const xd_xtoken_desc *d, int index) {
    const xd_xtoken_teacher *t = &d->teachers[index];
    const xd_teacher_cache_info info = xd_teacher_cache_describe(t->cache);
    XD_REQUIRE(ctx, t->cache_positions || t->logits.rows == 0, XD_ERROR_ARGUMENT,
               "teacher %d has a cache but no positions", index);
    XD_TRY(xdi_cache_check_origin(ctx, t->cache, t->origin));
    XD_REQUIRE(ctx, t->kind == XD_XTOKEN_LIKELIHOOD || info.desc.temperature == d->temperature,
               XD_ERROR_ARGUMENT, "teacher %d was cached at temperature %g, the loss is at %g", index,
               info.desc.temperature, d->temperature);
    XD_REQUIRE(ctx, t->vocabulary == 0 || t->vocabulary == info.desc.vocabulary, XD_ERROR_SHAPE,
               "teacher %d has a vocabulary of %lld ids but its cache %lld", index, (long long)t->vocabulary,
               (long long)info.desc.vocabulary);
    for (int64_t i = 0; i < t->logits.rows; i++) {
        const int64_t at = t->cache_positions[i];
        const bool chunk = t->teacher_chunks && t->teacher_chunks[i] >= 0;
        XD_REQUIRE(ctx, at >= (chunk ? 0 : -1) && at < info.positions, XD_ERROR_ARGUMENT,
                   "teacher %d: row %lld is position %lld of a cache of %lld", index, (long long)i,
                   (long long)at, (long long)info.positions);
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_check_known(xd_ctx *ctx, const xd_xtoken_desc *d, int index) {
    const xd_xtoken_teacher *t = &d->teachers[index];
    const bool scored = d->score != XD_XTOKEN_SCORE_NONE && d->score != XD_XTOKEN_SCORE_CE;
    XD_REQUIRE(ctx, t->logits.rows >= 0 && t->logits.rows % d->sequences == 0 && !t->logits.data,
               XD_ERROR_SHAPE, "teacher %d has %lld rows%s for %lld sequences", index,
               (long long)t->logits.rows, t->logits.data ? " of logits beside its cache" : "",
               (long long)d->sequences);
    XD_REQUIRE(ctx, t->cache || t->kind == XD_XTOKEN_LIKELIHOOD, XD_ERROR_ARGUMENT, "teacher %d has no cache",
               index);
    XD_REQUIRE(ctx, !scored, XD_ERROR_UNSUPPORTED, "teacher %d has no logits to be scored by %s", index,
               d->score == XD_XTOKEN_SCORE_ENTROPY ? "entropy" : "its largest probability");
    return t->cache ? xdi_xcached_check_cache(ctx, d, index) : XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_check_cached(xd_ctx *ctx, const xd_xtoken_desc *d, int index, int64_t size) {
    const xd_xtoken_teacher *t = &d->teachers[index];
    const int64_t vocabulary = xdi_xtoken_vocabulary(t);
    XD_REQUIRE(ctx, !t->projection || t->projection->student_size == size, XD_ERROR_SHAPE,
               "the projection of teacher %d has %lld rows but the student's vocabulary %lld ids", index,
               t->projection ? (long long)t->projection->student_size : 0LL, (long long)size);
    XD_REQUIRE(ctx, !t->projection || t->projection->teacher_size == vocabulary, XD_ERROR_SHAPE,
               "the projection of teacher %d has %lld columns but its cache %lld ids", index,
               t->projection ? (long long)t->projection->teacher_size : 0LL, (long long)vocabulary);
    return XD_OK;
}

/* ---- places in the cache ---- */

XD_PRIVATE int64_t xdi_xcached_bound(const xdi_xtoken_term *term, const xdi_xcached_places *p, int64_t slot) {
    const int64_t entries = term->teacher_sizes[slot] * p->k;
    return entries < term->vocabulary ? entries : term->vocabulary;
}

XD_PRIVATE xd_result xdi_xcached_size_places(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                             xdi_xcached_places *p) {
    const int64_t slots = x->d.sequences * term->teacher->chunks;
    p->k = xd_teacher_cache_describe(term->teacher->cache).desc.k;
    p->most = term->teacher->logits.rows;
    p->total = 0;
    for (int64_t i = 0; i < slots; i++) p->total += term->teacher_sizes[i];
    if (!x->d.sequence_comm) return XD_OK;
    return xd_all_reduce(x->d.sequence_comm, &p->most, &p->most, 1, XD_DTYPE_I64, XD_MAX);
}

XD_PRIVATE void xdi_xcached_layout_places(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                          xdi_xcached_places *p, xd_arena *arena, bool *fits) {
    const int64_t slots = x->d.sequences * term->teacher->chunks;
    const int64_t ranks = x->d.sequence_comm ? xd_comm_size(x->d.sequence_comm) : 1;
    p->mine = (int64_t *)xdi_arena_array(arena, 2 * p->most, sizeof(int64_t), fits);
    p->all = (int64_t *)xdi_arena_array(arena, 2 * p->most * ranks, sizeof(int64_t), fits);
    p->begin = (int64_t *)xdi_arena_array(arena, slots + 1, sizeof(int64_t), fits);
    p->filled = (int64_t *)xdi_arena_array(arena, slots, sizeof(int64_t), fits);
    p->places = (int64_t *)xdi_arena_array(arena, p->total, sizeof(int64_t), fits);
    p->mass = (double *)xdi_arena_array(arena, term->vocabulary, sizeof(double), fits);
    p->ids = (int32_t *)xdi_arena_array(arena, p->k, sizeof(int32_t), fits);
    p->probabilities = (double *)xdi_arena_array(arena, p->k, sizeof(double), fits);
}

/* Room for one tile at least. */
static void xdi_xcached_size(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h) {
    int64_t longest = 1;
    for (int64_t i = 0; i < x->d.sequences * term->teacher->chunks; i++) {
        const int64_t bound = xdi_xcached_bound(term, &h->in, i);
        if (bound > longest) longest = bound;
    }
    h->room = h->in.total * h->in.k;
    if (h->room > XDI_XCACHED_ROOM) h->room = XDI_XCACHED_ROOM;
    if (h->room < longest) h->room = longest;
}

static bool xdi_xcached_layout(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h,
                               xd_arena *arena) {
    const int64_t chunks = term->teacher->chunks;
    bool fits = true;
    xdi_xcached_layout_places(x, term, &h->in, arena, &fits);
    h->slopes = (double *)xdi_arena_array(arena, x->columns, sizeof(double), &fits);
    h->rows = (int64_t *)xdi_arena_array(arena, x->held, sizeof(int64_t), &fits);
    h->places = (int64_t *)xdi_arena_array(arena, x->held, sizeof(int64_t), &fits);
    h->chunks = (xd_xtoken_chunk *)xdi_arena_array(arena, chunks, sizeof(xd_xtoken_chunk), &fits);
    h->deltas = (double *)xdi_arena_array(arena, x->held, sizeof(xd_fixed), &fits);
    h->offset = (int64_t *)xdi_arena_array(arena, chunks + 1, sizeof(int64_t), &fits);
    h->columns = (int32_t *)xdi_arena_array(arena, h->room, sizeof(int32_t), &fits);
    h->target = (double *)xdi_arena_array(arena, h->room, sizeof(double), &fits);
    h->q = (double *)xdi_arena_array(arena, h->room, sizeof(xd_fixed), &fits);
    return fits;
}

/* Every rank gets the places of all positions; it reads the cache by itself. */
static xd_result xdi_xcached_exchange(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached_places *p,
                                      const int64_t **all, int64_t *count) {
    const xd_xtoken_teacher *t = term->teacher;
    xd_comm *comm = x->d.sequence_comm;
    const bool alone = !comm || xd_comm_size(comm) == 1;
    for (int64_t i = 0; i < p->most; i++) {
        const bool held = i < t->logits.rows && t->teacher_chunks[i] >= 0;
        p->mine[2 * i] = held ? i / term->held * t->chunks + t->teacher_chunks[i] : -1;
        p->mine[2 * i + 1] = held ? t->cache_positions[i] : -1;
    }
    *all = alone ? p->mine : p->all;
    *count = p->most * (alone ? 1 : xd_comm_size(comm));
    return alone ? XD_OK : xdi_comm_all_gather_equal(comm, p->mine, p->all, 2 * p->most, XD_DTYPE_I64);
}

/* They are sorted by chunk and place, so that sums do not depend on which rank held what. */
XD_PRIVATE xd_result xdi_xcached_find_places(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                             xdi_xcached_places *p) {
    const int64_t slots = x->d.sequences * term->teacher->chunks, *all;
    int64_t count;
    XD_TRY(xdi_xcached_exchange(x, term, p, &all, &count));
    p->begin[0] = 0;
    for (int64_t i = 0; i < slots; i++) p->begin[i + 1] = p->begin[i] + term->teacher_sizes[i];
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = all[2 * i], place = all[2 * i + 1];
        if (slot < 0) continue;
        int64_t at = p->begin[slot] + p->filled[slot]++;
        for (; at > p->begin[slot] && p->places[at - 1] > place; at--) p->places[at] = p->places[at - 1];
        p->places[at] = place;
    }
    return XD_OK;
}

/* ---- the sums of a tile ---- */

XD_PRIVATE int64_t xdi_xcached_target(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached_places *p,
                                      int64_t slot, int32_t *columns, double *target) {
    const xd_teacher_cache *cache = term->teacher->cache;
    const double positions = (double)term->teacher_sizes[slot];
    int64_t count = 0;
    for (int64_t i = p->begin[slot]; i < p->begin[slot + 1]; i++) {
        xd_teacher_cache_entries(x->ctx, cache, p->places[i], p->ids, p->probabilities);
        for (int64_t j = 0; j < p->k; j++) {
            const int32_t id = p->ids[j];
            if (p->probabilities[j] == 0.0) continue;
            if (p->mass[id] == 0.0) columns[count++] = id;
            p->mass[id] += p->probabilities[j];
        }
    }
    for (int64_t i = 0; i < count; i++) {
        target[i] = p->mass[columns[i]] / positions;
        p->mass[columns[i]] = 0.0;
    }
    return count;
}

/* As many chunks from place `first` of sequence b on as there is room for, with their targets. */
static void xdi_xcached_next_tile(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h, int64_t b,
                                  int64_t first) {
    const int64_t chunks = term->teacher->chunks, most = x->d.tile > 0 ? x->d.tile : chunks;
    const bool together = first < term->shared[b];
    const int64_t end = together ? term->shared[b] : term->listed[b];
    xdi_xtoken_tile tile = { b, first, 0, together ? x->d.sequence_comm : NULL };
    h->offset[0] = 0;
    for (; first + tile.count < end && tile.count < most; tile.count++) {
        const int64_t slot = b * chunks + term->order[b * chunks + first + tile.count];
        const int64_t at = h->offset[tile.count];
        if (at + xdi_xcached_bound(term, &h->in, slot) > h->room) break;
        h->offset[tile.count + 1] =
            at + xdi_xcached_target(x, term, &h->in, slot, h->columns + at, h->target + at);
    }
    h->tile = tile;
}

/* What the kernels are told of the tile's rows. */
static xd_xtoken_args xdi_xcached_args(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                       const xdi_xcached *h) {
    const xd_projection *m = term->teacher->projection;
    xd_xtoken_args a = xdi_xtoken_student_args(x, h->row_count);
    a.rows = h->rows;
    a.places = h->places;
    a.place_count = h->tile.count;
    a.offset = h->offset;
    a.list = h->columns;
    a.k = h->offset[a.place_count];
    a.student = h->q;
    a.teacher = h->target;
    a.chunks = h->chunks;
    a.vocabulary = term->vocabulary;
    a.reverse = x->d.reverse;
    if (!m) return a;
    a.matrix.column_begin = m->column_begin;
    a.matrix.column_student = m->student_id;
    a.matrix.column_weight = m->column_weight;
    return a;
}

static xd_result xdi_xcached_sums(xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h) {
    const int64_t count = h->offset[h->tile.count];
    xdi_xtoken_zero(x, h->q, count);
    h->row_count = xdi_xtoken_tile_rows(term, &term->student_rows, &h->tile, h->rows, h->places);
    xd_xtoken_args a = xdi_xcached_args(x, term, h);
    a.cells = h->q;
    XD_TRY(x->kernels.list_project(&x->launch, &a));
    return xdi_xtoken_join(x, h->q, count, x->vocab.tp, h->tile.comm);
}

/* ---- chunks ---- */

XD_PRIVATE xd_xtoken_chunk xdi_xcached_chunk(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t b,
                                             int64_t c, bool compared) {
    xd_xtoken_chunk chunk;
    memset(&chunk, 0, sizeof chunk);
    chunk.compared = compared;
    chunk.student = (double)term->student_sizes[b * term->teacher->chunks + c];
    if (compared)
        chunk.factor = xdi_xtoken_weight(x, term, b, c) * xdi_xtoken_factor(x, term) / chunk.student;
    return chunk;
}

static xd_result xdi_xcached_divergence(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_xcached *h) {
    const xd_xtoken_args a = xdi_xcached_args(x, term, h);
    const int64_t b = h->tile.b, *order = term->order + b * term->teacher->chunks + h->tile.first;
    for (int64_t i = 0; i < a.place_count; i++)
        a.chunks[i] = xdi_xcached_chunk(x, term, b, order[i], h->offset[i] != h->offset[i + 1]);
    XD_TRY(x->kernels.list_divergence(&x->launch, &a));
    for (int64_t i = 0; i < a.place_count; i++) xdi_projected_add_chunk(x, term, &a.chunks[i], b, order[i]);
    return XD_OK;
}

/* ---- gradient ---- */

/* dz = p (h - delta) / tau for the rows of the tile, h = M dy and delta = sum_v p_v h_v; delta is summed in units of
 * the largest |dy|, for fixed point. */
static xd_result xdi_xcached_gradient(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_xcached *h) {
    xd_xtoken_args a = xdi_xcached_args(x, term, h);
    a.cells = h->deltas;
    xdi_xtoken_zero(x, h->deltas, h->row_count);
    XD_TRY(x->kernels.list_delta(&x->launch, &a));
    XD_TRY(xdi_xtoken_join(x, h->deltas, h->row_count, x->vocab.tp, NULL));
    a.cells = h->slopes;
    a.slope = x->u;
    a.count = 1;
    for (int64_t r = 0; r < h->row_count; r++) {
        const double unit = h->chunks[h->places[r]].largest;
        if (unit == 0.0) continue;
        a.rows = h->rows + r;
        a.places = h->places + r;
        XD_TRY(x->kernels.list_slopes(&x->launch, &a));
        XD_TRY(xdi_xtoken_write(x, h->rows[r], x->u, h->deltas[r] * unit / x->d.temperature));
    }
    return XD_OK;
}

static xd_result xdi_xcached_run(xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h) {
    XD_TRY(xdi_xcached_find_places(x, term, &h->in));
    for (int64_t b = 0; b < x->d.sequences; b++)
        for (int64_t first = 0; first < term->listed[b]; first += h->tile.count) {
            xdi_xcached_next_tile(x, term, h, b, first);
            XD_TRY(xdi_xcached_sums(x, term, h));
            XD_TRY(xdi_xcached_divergence(x, term, h));
            if (x->write) XD_TRY(xdi_xcached_gradient(x, term, h));
        }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_cached(xdi_xtoken *x, xdi_xtoken_term *term) {
    xd_arena arena = xd_arena_over(NULL, 0);
    xd_result result = XD_OK;
    xdi_xcached h;
    memset(&h, 0, sizeof h);
    XD_TRY(xdi_xcached_size_places(x, term, &h.in));
    xdi_xcached_size(x, term, &h);
    void *memory = xdi_xcached_layout(x, term, &h, &arena) ? xd_allocate(x->ctx, arena.peak + 1) : NULL;
    if (!memory)
        result = XD_FAIL(x->ctx, XD_ERROR_MEMORY, "no room for %lld cached positions", (long long)h.in.total);
    result = xdi_vocab_agree(x->vocab.tp, x->d.comm, result);
    arena = xd_arena_over(memory, arena.peak);
    if (result == XD_OK && xdi_xcached_layout(x, term, &h, &arena)) result = xdi_xcached_run(x, term, &h);
    xd_release(x->ctx, memory);
    return result;
}
