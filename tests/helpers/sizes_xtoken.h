/* sizes_xtoken.h - a stage of calls across tokenizers: two sequences of four student and three teacher positions in two chunks,
 * vocabularies of twelve and ten ids, and what stands beside them: a cache, a route, ULD, projections. */
#ifndef SIZES_XTOKEN_H
#define SIZES_XTOKEN_H

#include "sizes.h"
#include "xd_private.h"
#include "vocab_calls.h"
#include "makers.h"

#include <unistd.h>

enum {
    XB = 2,         /* sequences */
    XS = 4,         /* student positions of one */
    XT = 3,         /* teacher positions of one */
    XC = 2,         /* chunks of one */
    XV = 12,        /* student vocabulary */
    XU = 10,        /* teacher vocabulary */
    XK = 3,         /* entries of rows, ids of a cache */
    XR = XB * XS,   /* student rows */
    XQ = XB * XT,   /* teacher rows */
    XW = XV + 4,    /* columns of memory */
    XALL = 12 * XW, /* elements: four rows more than any call has */
    XKINDS = 5
};

/* Everything that the calls read and write. */
typedef struct xsizes_memory {
    float student[XALL], same[XALL], teacher[XALL], gradient[XALL], window[XALL];
    double sums[XALL], weight[XALL], averages[XALL], loss;
    int64_t labels[XALL], student_chunks[XALL], teacher_chunks[XALL], sizes[XALL], out_sizes[XALL], ids[XALL];
    int64_t cache_positions[XALL], columns[XU], matched[2];
    float sample_weight[XB], target_log_probs[XALL], chunk_length[XALL];
    uint8_t mask[XALL], valid[XALL];
    int32_t cache_ids[XALL], cache_next[XALL], shard_next[XALL];
    xd_token_span spans[XALL];
    xd_aligned_chunk chunks[2];
    xd_xtoken_values values;
    xd_xtoken_teacher_values teacher_values;
    xd_uld_values uld_values;
    xd_status status;
} xsizes_memory;

typedef struct xsizes {
    sizes_base base;
    xd_vocab *vocab;                  /* the student's, split */
    xd_projection projection, matrix; /* matrix: a copy of the struct, which cases change */
    xd_exact_map map;
    xd_teacher_cache *cache;
    xsizes_memory *m;
    char path[64];
    bool no_cache; /* set before xsizes_open, which then writes no file */
    xd_xtoken_desc xtoken[XKINDS];
    xd_xtoken_teacher teacher[XKINDS];
    xd_uld_desc uld;
    xdi_chunk_map chunk_map;
    xdi_project_desc project;
    xd_teacher_cache_block block, shards; /* whole rows; this rank's columns */
    xd_teacher_cache_desc cache_desc;
    xd_route_desc route;
    xdi_teacher_piece piece;
    xdi_teacher_route_desc plan;
    xdi_teacher_shard shard;
    xdi_similarity_desc similarity;
    xd_rows one, two, three; /* of calls that take matrices themselves */
    xd_rows similarities, route_rows, shard_rows, window_rows;
    int64_t chunks, n;    /* of xdi_chunk_averages */
    int64_t first, count; /* of xd_teacher_cache_read */
} xsizes;

static inline xd_rows xrows(const float *data, int64_t rows, int64_t cols) {
    return xd_rows_of(data, XD_DTYPE_F32, rows, cols);
}

static inline xd_interval xcolumns(const xsizes *s) {
    const xd_vocab_info info = xd_vocab_describe(s->vocab);
    return (xd_interval){ info.begin, info.end };
}

/* ---- what is filled before each call ---- */

static inline void xsizes_fill(xsizes_memory *m) {
    static const int64_t student[XS] = { 0, 1, 1, -1 }, teacher[XT] = { 0, 0, 1 };
    memset(m, 0, sizeof *m);
    for (int i = 0; i < XALL; i++) {
        m->student[i] = 3.0f * sinf(0.7f * (float)i);
        m->same[i] = 3.0f * sinf(0.4f * (float)i);
        m->teacher[i] = 0.9f * cosf(0.3f * (float)i);
        m->weight[i] = 1.0;
        m->labels[i] = i % XU;
        m->mask[i] = 1;
        m->student_chunks[i] = student[i % XS];
        m->teacher_chunks[i] = teacher[i % XT];
        m->sizes[i] = 1;
        m->cache_positions[i] = i % XQ;
        m->cache_ids[i] = i % XU;
        m->cache_next[i] = i == XQ - 1 ? -1 : (i + 1) % XU;
        m->shard_next[i] = (i + 1) % XU; /* the document goes on */
        m->spans[i].begin = i;
        m->spans[i].end = i + 1;
        m->target_log_probs[i] = -1.0f;
        m->chunk_length[i] = 1.0f;
    }
    for (int i = 0; i < XU; i++) m->columns[i] = i;
    for (int i = 0; i < XB; i++) m->sample_weight[i] = 1.0f;
    m->matched[1] = 2;
    m->chunks[0] = (xd_aligned_chunk){ 1, 2, 1, 2, 0 };
    m->chunks[1] = (xd_aligned_chunk){ 2, 4, 2, 3, 0 };
}

static inline void xsizes_set_xtoken(xsizes *s, int kind) {
    xsizes_memory *m = s->m;
    const xd_interval columns = xcolumns(s);
    xd_xtoken_teacher *t = &s->teacher[kind];
    xd_xtoken_desc *d = &s->xtoken[kind];
    *t = xd_xtoken_teacher_defaults((xd_xtoken_kind)kind);
    t->logits = kind == XD_XTOKEN_SAME ? xrows(m->same, XR, XV) : xrows(m->teacher, XQ, XU);
    t->vocabulary = t->logits.cols;
    t->student_chunks = m->student_chunks;
    t->teacher_chunks = m->teacher_chunks;
    t->chunks = XC;
    t->chunk_mask = m->mask;
    t->projected.projection = &s->projection;
    t->gold.map = &s->map;
    t->labels = xd_ids_of(m->labels, XD_DTYPE_I64);
    if (kind == XD_XTOKEN_CACHED) {
        t->logits = (xd_rows){ NULL, XD_DTYPE_NONE, XQ, 0, 0 };
        t->cached.cache = s->cache;
        t->cached.positions = m->cache_positions;
        t->cached.projection = &s->projection;
    }
    *d = xd_xtoken_defaults();
    d->student = xrows(m->student, XR, columns.end - columns.begin);
    d->vocab = s->vocab;
    d->sequences = XB;
    d->sample_weight = m->sample_weight;
    d->common.labels = xd_ids_of(m->labels, XD_DTYPE_I64);
    d->common.gradient = xrows(m->gradient, XR, columns.end - columns.begin);
    d->common.status = &m->status;
    d->teachers = t;
    d->teacher_count = 1;
    d->teacher_values = &m->teacher_values;
    d->columns = 8;
    d->tail = 3;
}

static inline void xsizes_set_uld(xsizes *s) {
    xsizes_memory *m = s->m;
    xd_uld_desc *d = &s->uld;
    memset(d, 0, sizeof *d);
    d->student = (xd_uld_side){ xrows(m->student, XS, XV), XV, m->labels, 1.0 };
    d->teacher = (xd_uld_side){ xrows(m->teacher, XT, XU), XU, m->labels, 1.0 };
    d->chunks = m->chunks;
    d->chunk_count = 2;
    d->matched_student = d->matched_teacher = m->matched;
    d->matched_count = 2;
    d->matched_weight = d->unmatched_weight = 0.5;
    d->scale = 1.0;
    d->gradient = xrows(m->gradient, XS, XV);
}

static inline void xsizes_set_cache(xsizes *s) {
    xsizes_memory *m = s->m;
    s->cache_desc = (xd_teacher_cache_desc){ .vocabulary = XU, .k = XK, .spans = true };
    s->block = (xd_teacher_cache_block){ xrows(m->teacher, XQ, XU), m->cache_ids, m->cache_next, m->spans };
    s->shards = s->block;
    s->shards.logits = xrows(m->teacher, XQ, xcolumns(s).end - xcolumns(s).begin);
    s->shards.next = m->shard_next;
    s->first = 1;
    s->count = 2;
}

static inline void xsizes_set_route(xsizes *s) {
    xd_route_desc *d = &s->route;
    memset(d, 0, sizeof *d);
    d->samples = 2;
    d->length = XT;
    d->columns = XU;
    d->slots = 2;
    if (s->base.rank == s->base.ranks - 1) d->teacher.sample_count = 2;
    if (s->base.rank == 0) d->student.sample_count = 2;
    s->piece = (xdi_teacher_piece){ 0, 0, 0, 0, 0, XT, XU };
    s->shard = (xdi_teacher_shard){ 0, XT, 0, XU };
    s->plan = (xdi_teacher_route_desc){ &s->shard, 1, 0, XT, XU };
}

static inline void xsizes_set(void *memory) {
    xsizes *s = (xsizes *)memory;
    xsizes_memory *m = s->m;
    const xd_interval columns = xcolumns(s);
    xsizes_fill(m);
    s->matrix = s->projection;
    for (int kind = 0; kind < XKINDS; kind++) xsizes_set_xtoken(s, kind);
    xsizes_set_uld(s);
    xsizes_set_cache(s);
    xsizes_set_route(s);
    s->chunk_map = (xdi_chunk_map){ m->student_chunks, XB, XS, XC, s->base.world };
    s->project = (xdi_project_desc){ s->vocab, &s->matrix, m->columns, XU };
    s->similarity = (xdi_similarity_desc){ XK, 0.0 };
    s->one = xrows(m->student, XR, columns.end - columns.begin);
    s->two = xrows(m->teacher, XR, columns.end - columns.begin);
    s->three = xrows(m->gradient, XR, columns.end - columns.begin);
    s->similarities = xrows(m->teacher, XV, XU);
    s->route_rows = xrows(m->teacher, 2 * XT, XU);
    s->shard_rows = xrows(m->teacher, XT, XU);
    s->window_rows = xrows(m->window, XT, XU);
    s->chunks = XB * XC;
    s->n = XU;
}

/* ---- the calls ---- */

static inline xd_result xcall_xtoken(void *memory, xd_xtoken_kind kind) {
    xsizes *s = (xsizes *)memory;
    return xd_xtoken_loss(s->base.ctx, &s->xtoken[kind], &s->m->values);
}
static inline xd_result xcall_projected(void *s) {
    return xcall_xtoken(s, XD_XTOKEN_PROJECTED);
}
static inline xd_result xcall_gold(void *s) {
    return xcall_xtoken(s, XD_XTOKEN_GOLD);
}
static inline xd_result xcall_same(void *s) {
    return xcall_xtoken(s, XD_XTOKEN_SAME);
}
static inline xd_result xcall_cached(void *s) {
    return xcall_xtoken(s, XD_XTOKEN_CACHED);
}
static inline xd_result xcall_likelihood(void *s) {
    return xcall_xtoken(s, XD_XTOKEN_LIKELIHOOD);
}
static inline xd_result xcall_uld(void *memory) {
    xsizes *s = (xsizes *)memory;
    return xd_uld_loss(s->base.ctx, &s->uld, &s->m->uld_values);
}
static inline xd_result xcall_chunk_sums(void *memory) {
    xsizes *s = (xsizes *)memory;
    return xdi_chunk_sums(s->base.ctx, &s->chunk_map, s->one, s->m->sums, s->m->out_sizes);
}
static inline xd_result xcall_chunk_sizes(void *memory) {
    xsizes *s = (xsizes *)memory;
    return xdi_chunk_sizes(s->base.ctx, &s->chunk_map, s->m->out_sizes);
}
static inline xd_result xcall_chunk_averages(void *memory) {
    xsizes *s = (xsizes *)memory;
    return xdi_chunk_averages(s->base.ctx, s->m->weight, s->m->sizes, s->chunks, s->n, s->m->averages);
}
static inline xd_result xcall_chunk_backward(void *memory) {
    xsizes *s = (xsizes *)memory;
    return xdi_chunk_averages_backward(s->base.ctx, &s->chunk_map, s->m->sizes, s->m->weight, s->three);
}
static inline xd_result xcall_jsd(void *memory) {
    xsizes *s = (xsizes *)memory;
    return xdi_compat_jsd_of_probabilities(s->base.ctx, s->one, s->two, 0.5, 2.0, s->three, &s->m->loss);
}
static inline xd_result xcall_project(void *memory) {
    xsizes *s = (xsizes *)memory;
    return xdi_project(s->base.ctx, &s->project, s->one, s->m->sums);
}
static inline xd_result xcall_project_backward(void *memory) {
    xsizes *s = (xsizes *)memory;
    return xdi_project_backward(s->base.ctx, &s->project, s->m->weight, s->three);
}
static inline xd_result xcall_embeddings(void *memory) {
    xsizes *s = (xsizes *)memory;
    xd_projection_rows rows;
    XD_TRY(xdi_projection_rows_from_embeddings(s->base.ctx, s->one, s->two, &s->similarity, &rows));
    xd_projection_rows_destroy(s->base.ctx, &rows);
    return XD_OK;
}
static inline xd_result xcall_similarities(void *memory) {
    xsizes *s = (xsizes *)memory;
    xd_projection_rows rows;
    XD_TRY(xdi_projection_rows_from_similarities(s->base.ctx, s->similarities, &s->similarity, &rows));
    xd_projection_rows_destroy(s->base.ctx, &rows);
    return XD_OK;
}
static inline xd_result xcall_piece(void *memory) {
    xsizes *s = (xsizes *)memory;
    return xdi_teacher_piece_copy(s->base.ctx, &s->piece, s->shard_rows, s->window_rows);
}
static inline xd_result xcall_plan(void *memory) {
    xsizes *s = (xsizes *)memory;
    xdi_teacher_piece pieces[2];
    int64_t count;
    return xdi_teacher_route(s->base.ctx, &s->plan, pieces, &count);
}
/* A cache with one document, given up at the end. */
static inline xd_result xcall_append(void *memory) {
    xsizes *s = (xsizes *)memory;
    xd_teacher_cache_writer *writer = NULL;
    XD_TRY(cache_writer_create(s->base.ctx, s->path, &s->cache_desc, &writer));
    xd_result result = xd_teacher_cache_writer_document(writer, "a document", 10);
    if (result == XD_OK) result = xd_teacher_cache_writer_append(writer, &s->block);
    xd_teacher_cache_writer_abort(writer);
    return result;
}
static inline xd_result xcall_read(void *memory) {
    xsizes *s = (xsizes *)memory;
    xd_cached_position out[XQ];
    return cache_read(s->base.ctx, s->cache, s->first, s->count, out);
}
/* The same from logits whose columns the ranks share. */
static inline xd_result xcall_append_shards(void *memory) {
    xsizes *s = (xsizes *)memory;
    s->cache_desc.vocab = s->vocab;
    s->cache_desc.vocabulary = XV;
    s->block = s->shards;
    return xcall_append(memory);
}
/* Rows of this rank's teacher side, to itself. */
static inline xd_result xcall_send(void *memory) {
    xsizes *s = (xsizes *)memory;
    xd_route *route = NULL;
    xd_route_window window;
    XD_TRY(xd_route_create(s->base.comm, &s->route, &route));
    xd_result result = xd_route_send(route, s->route_rows, NULL);
    if (result == XD_OK) result = xd_route_take(route, &window);
    if (result == XD_OK) result = xd_route_release(route);
    xd_route_destroy(route);
    return result;
}
static inline xd_result xcall_route(void *memory) {
    xsizes *s = (xsizes *)memory;
    xd_route *route = NULL;
    XD_TRY(xd_route_create(s->base.comm, &s->route, &route));
    xd_route_destroy(route);
    return XD_OK;
}

/* ---- objects ---- */

/* A cache of XQ positions in one document, which each rank writes for itself. */
static inline void xsizes_open_cache(xsizes *s) {
    xd_teacher_cache_writer *writer = NULL;
    CHECK_EQ_INT(cache_writer_create(s->base.ctx, s->path, &s->cache_desc, &writer), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_document(writer, "a document", 10), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_append(writer, &s->block), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_commit(writer), XD_OK);
    CHECK_EQ_INT(cache_open(s->base.ctx, s->path, NULL, &s->cache), XD_OK);
    remove(s->path);
}

static inline void xsizes_open(void *memory) {
    xsizes *s = (xsizes *)memory;
    int32_t ids[XV * 2];
    float weights[XV * 2];
    const xd_projection_rows rows = { ids, weights, XV, 2 };
    s->m = (xsizes_memory *)calloc(1, sizeof *s->m);
    s->base.memory = s->m;
    s->base.bytes = sizeof *s->m;
    for (int v = 0; v < XV; v++) {
        const bool exact = v % 3 == 0;
        ids[2 * v] = v * 3 % XU;
        ids[2 * v + 1] = exact ? -1 : (v * 3 + 1) % XU;
        weights[2 * v] = exact ? 1.0f : 0.7f;
        weights[2 * v + 1] = exact ? 0.0f : 0.3f;
    }
    CHECK_EQ_INT(vocab_even(s->base.ctx, s->base.world, XV, &s->vocab), XD_OK);
    CHECK_EQ_INT(xd_projection_from_rows(s->base.ctx, &rows, XV, XU, &s->projection), XD_OK);
    CHECK_EQ_INT(exact_map_create(s->base.ctx, &rows, XU, false, &s->map), XD_OK);
    xsizes_fill(s->m);
    xsizes_set_cache(s);
    snprintf(s->path, sizeof s->path, "/tmp/xdistill-test-sizes-%ld-%d", (long)getpid(), s->base.rank);
    if (!s->no_cache) xsizes_open_cache(s);
}

static inline void xsizes_close(void *memory) {
    xsizes *s = (xsizes *)memory;
    xd_teacher_cache_close(s->cache);
    xd_exact_map_destroy(s->base.ctx, &s->map);
    xd_projection_destroy(s->base.ctx, &s->projection);
    xd_vocab_destroy(s->vocab);
    free(s->m);
}

#endif
