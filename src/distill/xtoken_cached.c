#include <math.h>
#include <string.h>

/* Entries of a tile: ids of all its chunks together, as long as no single chunk has more. */
enum { XDI_XCACHED_ROOM = 16384 };

/* What the kind needs beside the workspace, and the tile at work: chunks [first, end) of sequence b. */
typedef struct xdi_xcached {
    int64_t k, most, total,
        room;                /* ids a position, teacher rows of a rank, those with a chunk on all, entries */
    int64_t *mine, *all;     /* [2 most] and those of all ranks: chunk and place in the cache of each row */
    int64_t *begin, *filled; /* [B C + 1] where a chunk's places begin; [B C] how many are there, first 0 */
    int64_t *places;         /* [total] ascending within a chunk */
    double *mass;            /* [V_t] zero between uses */
    double *slopes;          /* [columns] zero between uses: scratch of the kernels */
    int32_t *ids;            /* [k] of one position, and their probabilities */
    double *probabilities;
    int64_t b, first, end, row_count;
    int64_t *rows; /* [held] student rows of the tile, and their chunks in it */
    int64_t *chunk;
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
    XDI_REQUIRE(ctx, t->cache_positions || t->logits.rows == 0, XD_ERROR_ARGUMENT,
                "teacher %d has a cache but no positions", index);
    XDI_TRY(xdi_cache_check_origin(ctx, t->cache, t->origin));
    XDI_REQUIRE(ctx, t->kind == XD_XTOKEN_LIKELIHOOD || info.desc.temperature == d->temperature,
                XD_ERROR_ARGUMENT, "teacher %d was cached at temperature %g, the loss is at %g", index,
                info.desc.temperature, d->temperature);
    XDI_REQUIRE(ctx, t->vocabulary == 0 || t->vocabulary == info.desc.vocabulary, XD_ERROR_SHAPE,
                "teacher %d has a vocabulary of %lld ids but its cache %lld", index, (long long)t->vocabulary,
                (long long)info.desc.vocabulary);
    for (int64_t i = 0; i < t->logits.rows; i++) {
        const int64_t at = t->cache_positions[i];
        const bool chunk = t->teacher_chunks && t->teacher_chunks[i] >= 0;
        XDI_REQUIRE(ctx, at >= (chunk ? 0 : -1) && at < info.positions, XD_ERROR_ARGUMENT,
                    "teacher %d: row %lld is position %lld of a cache of %lld", index, (long long)i,
                    (long long)at, (long long)info.positions);
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_check_known(xd_ctx *ctx, const xd_xtoken_desc *d, int index) {
    const xd_xtoken_teacher *t = &d->teachers[index];
    const bool scored = d->score != XD_XTOKEN_SCORE_NONE && d->score != XD_XTOKEN_SCORE_CE;
    XDI_REQUIRE(ctx, t->logits.rows >= 0 && t->logits.rows % d->sequences == 0 && !t->logits.data,
                XD_ERROR_SHAPE, "teacher %d has %lld rows%s for %lld sequences", index,
                (long long)t->logits.rows, t->logits.data ? " of logits beside its cache" : "",
                (long long)d->sequences);
    XDI_REQUIRE(ctx, t->cache || t->kind == XD_XTOKEN_LIKELIHOOD, XD_ERROR_ARGUMENT,
                "teacher %d has no cache", index);
    XDI_REQUIRE(ctx, !scored, XD_ERROR_UNSUPPORTED, "teacher %d has no logits to be scored by %s", index,
                d->score == XD_XTOKEN_SCORE_ENTROPY ? "entropy" : "its largest probability");
    return t->cache ? xdi_xcached_check_cache(ctx, d, index) : XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_check_cached(xd_ctx *ctx, const xd_xtoken_desc *d, int index, int64_t size) {
    const xd_xtoken_teacher *t = &d->teachers[index];
    const int64_t vocabulary = xdi_xtoken_vocabulary(t);
    XDI_REQUIRE(ctx, !t->projection || t->projection->student_size == size, XD_ERROR_SHAPE,
                "the projection of teacher %d has %lld rows but the student's vocabulary %lld ids", index,
                t->projection ? (long long)t->projection->student_size : 0LL, (long long)size);
    XDI_REQUIRE(ctx, !t->projection || t->projection->teacher_size == vocabulary, XD_ERROR_SHAPE,
                "the projection of teacher %d has %lld columns but its cache %lld ids", index,
                t->projection ? (long long)t->projection->teacher_size : 0LL, (long long)vocabulary);
    return XD_OK;
}

/* ---- places in the cache ---- */

/* Entries that a chunk can have at most. */
static int64_t xdi_xcached_bound(const xdi_xtoken_term *term, const xdi_xcached *h, int64_t slot) {
    const int64_t entries = term->teacher_sizes[slot] * h->k;
    return entries < term->vocabulary ? entries : term->vocabulary;
}

static void xdi_xcached_size(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h) {
    const int64_t slots = x->d.sequences * term->teacher->chunks;
    int64_t longest = 1;
    for (int64_t i = 0; i < slots; i++) {
        const int64_t bound = xdi_xcached_bound(term, h, i);
        h->total += term->teacher_sizes[i];
        if (bound > longest) longest = bound;
    }
    h->room = h->total * h->k;
    if (h->room > XDI_XCACHED_ROOM) h->room = XDI_XCACHED_ROOM;
    if (h->room < longest) h->room = longest;
}

static bool xdi_xcached_layout(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h,
                               xd_arena *arena) {
    const int64_t chunks = term->teacher->chunks, slots = x->d.sequences * chunks;
    const int64_t ranks = x->d.sequence_comm ? xd_comm_size(x->d.sequence_comm) : 1;
    bool fits = true;
    h->mine = (int64_t *)xdi_xtoken_take(arena, 2 * h->most, sizeof(int64_t), &fits);
    h->all = (int64_t *)xdi_xtoken_take(arena, 2 * h->most * ranks, sizeof(int64_t), &fits);
    h->begin = (int64_t *)xdi_xtoken_take(arena, slots + 1, sizeof(int64_t), &fits);
    h->filled = (int64_t *)xdi_xtoken_take(arena, slots, sizeof(int64_t), &fits);
    h->places = (int64_t *)xdi_xtoken_take(arena, h->total, sizeof(int64_t), &fits);
    h->mass = (double *)xdi_xtoken_take(arena, term->vocabulary, sizeof(double), &fits);
    h->slopes = (double *)xdi_xtoken_take(arena, x->columns, sizeof(double), &fits);
    h->ids = (int32_t *)xdi_xtoken_take(arena, h->k, sizeof(int32_t), &fits);
    h->probabilities = (double *)xdi_xtoken_take(arena, h->k, sizeof(double), &fits);
    h->rows = (int64_t *)xdi_xtoken_take(arena, x->held, sizeof(int64_t), &fits);
    h->chunk = (int64_t *)xdi_xtoken_take(arena, x->held, sizeof(int64_t), &fits);
    h->chunks = (xd_xtoken_chunk *)xdi_xtoken_take(arena, chunks, sizeof(xd_xtoken_chunk), &fits);
    h->deltas = (double *)xdi_xtoken_take(arena, x->held, sizeof(xd_fixed), &fits);
    h->offset = (int64_t *)xdi_xtoken_take(arena, chunks + 1, sizeof(int64_t), &fits);
    h->columns = (int32_t *)xdi_xtoken_take(arena, h->room, sizeof(int32_t), &fits);
    h->target = (double *)xdi_xtoken_take(arena, h->room, sizeof(double), &fits);
    h->q = (double *)xdi_xtoken_take(arena, h->room, sizeof(xd_fixed), &fits);
    return fits;
}

/* Every rank gets the places of all positions; it reads the cache by itself. */
static xd_result xdi_xcached_exchange(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h,
                                      const int64_t **all, int64_t *count) {
    const xd_xtoken_teacher *t = term->teacher;
    xd_comm *comm = x->d.sequence_comm;
    const bool alone = !comm || xd_comm_size(comm) == 1;
    for (int64_t i = 0; i < h->most; i++) {
        const bool held = i < t->logits.rows && t->teacher_chunks[i] >= 0;
        h->mine[2 * i] = held ? i / term->held * t->chunks + t->teacher_chunks[i] : -1;
        h->mine[2 * i + 1] = held ? t->cache_positions[i] : -1;
    }
    *all = alone ? h->mine : h->all;
    *count = h->most * (alone ? 1 : xd_comm_size(comm));
    return alone ? XD_OK : xdi_comm_all_gather_equal(comm, h->mine, h->all, 2 * h->most, XD_DTYPE_I64);
}

/* Sorts them by chunk and place, so that sums do not depend on which rank held what. */
static void xdi_xcached_sort(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h,
                             const int64_t *all, int64_t count) {
    const int64_t slots = x->d.sequences * term->teacher->chunks;
    h->begin[0] = 0;
    for (int64_t i = 0; i < slots; i++) h->begin[i + 1] = h->begin[i] + term->teacher_sizes[i];
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = all[2 * i], place = all[2 * i + 1];
        if (slot < 0) continue;
        int64_t at = h->begin[slot] + h->filled[slot]++;
        for (; at > h->begin[slot] && h->places[at - 1] > place; at--) h->places[at] = h->places[at - 1];
        h->places[at] = place;
    }
}

/* ---- the sums of a tile ---- */

/* J and a of one chunk, at the tile's entry `at`. Returns the size of J. */
static int64_t xdi_xcached_target(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h,
                                  int64_t slot, int64_t at) {
    const xd_teacher_cache *cache = term->teacher->cache;
    const double positions = (double)term->teacher_sizes[slot];
    int64_t count = 0;
    for (int64_t i = h->begin[slot]; i < h->begin[slot + 1]; i++) {
        xd_teacher_cache_entries(x->ctx, cache, h->places[i], h->ids, h->probabilities);
        for (int64_t j = 0; j < h->k; j++) {
            const int32_t id = h->ids[j];
            if (h->probabilities[j] == 0.0) continue;
            if (h->mass[id] == 0.0) h->columns[at + count++] = id;
            h->mass[id] += h->probabilities[j];
        }
    }
    for (int64_t i = at; i < at + count; i++) {
        h->target[i] = h->mass[h->columns[i]] / positions;
        h->mass[h->columns[i]] = 0.0;
    }
    return count;
}

/* As many chunks from h->end on as there is room for, with their targets. */
static void xdi_xcached_next_tile(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h) {
    const int64_t chunks = term->teacher->chunks, most = x->d.tile > 0 ? x->d.tile : chunks;
    h->first = h->end;
    h->offset[0] = 0;
    for (; h->end < chunks && h->end - h->first < most; h->end++) {
        const int64_t slot = h->b * chunks + h->end, at = h->offset[h->end - h->first];
        const bool looks = xdi_xtoken_looks(x, term, h->b, h->end);
        if (looks && at + xdi_xcached_bound(term, h, slot) > h->room) break;
        h->offset[h->end - h->first + 1] = at + (looks ? xdi_xcached_target(x, term, h, slot, at) : 0);
    }
}

/* What the kernels are told of the tile's rows. */
static xd_xtoken_args xdi_xcached_args(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                       const xdi_xcached *h) {
    const xd_projection *m = term->teacher->projection;
    xd_xtoken_args a = xdi_xtoken_student_args(x, h->row_count);
    a.rows = h->rows;
    a.places = h->chunk;
    a.place_count = h->end - h->first;
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

/* The rows whose chunk has entries in the tile. */
static void xdi_xcached_rows(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h) {
    h->row_count = 0;
    for (int64_t row = h->b * x->held; row < (h->b + 1) * x->held; row++) {
        const int64_t c = term->teacher->student_chunks[row];
        if (c < h->first || c >= h->end || h->offset[c - h->first] == h->offset[c - h->first + 1]) continue;
        h->chunk[h->row_count] = c - h->first;
        h->rows[h->row_count++] = row;
    }
}

static xd_result xdi_xcached_sums(xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h) {
    const int64_t count = h->offset[h->end - h->first];
    xdi_xtoken_zero(x, h->q, count);
    xdi_xcached_rows(x, term, h);
    xd_xtoken_args a = xdi_xcached_args(x, term, h);
    a.cells = h->q;
    XDI_TRY(x->kernels.list_project(&x->launch, &a));
    return xdi_xtoken_join(x, h->q, count, x->vocab.tp, x->d.sequence_comm);
}

/* ---- chunks ---- */

static void xdi_xcached_open_chunk(const xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_xcached *h,
                                   int64_t c) {
    xd_xtoken_chunk *chunk = &h->chunks[c - h->first];
    memset(chunk, 0, sizeof *chunk);
    chunk->compared = h->offset[c - h->first] != h->offset[c - h->first + 1];
    chunk->student = (double)term->student_sizes[h->b * term->teacher->chunks + c];
    if (chunk->compared)
        chunk->factor = xdi_xtoken_weight(x, term, h->b, c) * xdi_xtoken_factor(x, term) / chunk->student;
}

/* What a chunk adds to the sums. */
static void xdi_xcached_add_chunk(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_xcached *h,
                                  int64_t c) {
    const xd_xtoken_chunk *chunk = &h->chunks[c - h->first];
    const double weight = xdi_xtoken_weight(x, term, h->b, c);
    const bool good = isfinite(chunk->value) != 0;
    if (!chunk->compared || !x->owner) return;
    if (!good && weight != 0.0) xdi_xtoken_found(x, h->b * term->teacher->chunks + c, chunk->value);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_DIVERGENCE, good ? weight * chunk->value : 0.0);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_AGREEING, chunk->agree ? 1.0 : 0.0);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_COMPARED, 1.0);
}

static xd_result xdi_xcached_divergence(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_xcached *h) {
    const xd_xtoken_args a = xdi_xcached_args(x, term, h);
    for (int64_t c = h->first; c < h->end; c++) xdi_xcached_open_chunk(x, term, h, c);
    XDI_TRY(x->kernels.list_divergence(&x->launch, &a));
    for (int64_t c = h->first; c < h->end; c++) xdi_xcached_add_chunk(x, term, h, c);
    return XD_OK;
}

/* ---- gradient ---- */

/* dz = p (h - delta) / tau for the rows of the tile, h = M dy and delta = sum_v p_v h_v; delta is summed in units of
 * the largest |dy|, for fixed point. */
static xd_result xdi_xcached_gradient(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_xcached *h) {
    xd_xtoken_args a = xdi_xcached_args(x, term, h);
    a.cells = h->deltas;
    xdi_xtoken_zero(x, h->deltas, h->row_count);
    XDI_TRY(x->kernels.list_delta(&x->launch, &a));
    XDI_TRY(xdi_xtoken_join(x, h->deltas, h->row_count, x->vocab.tp, NULL));
    a.cells = h->slopes;
    a.slope = x->u;
    a.count = 1;
    for (int64_t r = 0; r < h->row_count; r++) {
        const double unit = h->chunks[h->chunk[r]].largest;
        if (unit == 0.0) continue;
        a.rows = h->rows + r;
        a.places = h->chunk + r;
        XDI_TRY(x->kernels.list_slopes(&x->launch, &a));
        XDI_TRY(xdi_xtoken_write(x, h->rows[r], x->u, h->deltas[r] * unit / x->d.temperature));
    }
    return XD_OK;
}

static xd_result xdi_xcached_run(xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h) {
    const int64_t *all;
    int64_t count;
    XDI_TRY(xdi_xcached_exchange(x, term, h, &all, &count));
    xdi_xcached_sort(x, term, h, all, count);
    for (h->b = 0; h->b < x->d.sequences; h->b++)
        for (h->end = 0; h->end < term->teacher->chunks;) {
            xdi_xcached_next_tile(x, term, h);
            if (h->offset[h->end - h->first] == 0) continue; /* no chunk of it is looked at, on any rank */
            XDI_TRY(xdi_xcached_sums(x, term, h));
            XDI_TRY(xdi_xcached_divergence(x, term, h));
            if (x->write) XDI_TRY(xdi_xcached_gradient(x, term, h));
        }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_cached(xdi_xtoken *x, xdi_xtoken_term *term) {
    xd_arena arena = xd_arena_over(NULL, 0);
    xd_result result = XD_OK;
    xdi_xcached h;
    memset(&h, 0, sizeof h);
    h.k = xd_teacher_cache_describe(term->teacher->cache).desc.k;
    h.most = term->teacher->logits.rows;
    if (x->d.sequence_comm)
        XDI_TRY(xd_all_reduce(x->d.sequence_comm, &h.most, &h.most, 1, XD_DTYPE_I64, XD_MAX));
    xdi_xcached_size(x, term, &h);
    void *memory = xdi_xcached_layout(x, term, &h, &arena) ? xd_allocate(x->ctx, arena.peak + 1) : NULL;
    if (!memory)
        result = XDI_FAIL(x->ctx, XD_ERROR_MEMORY, "no room for %lld cached positions", (long long)h.total);
    result = xdi_vocab_agree(x->vocab.tp, x->d.comm, result);
    arena = xd_arena_over(memory, arena.peak);
    if (result == XD_OK && xdi_xcached_layout(x, term, &h, &arena)) result = xdi_xcached_run(x, term, &h);
    xd_release(x->ctx, memory);
    return result;
}
