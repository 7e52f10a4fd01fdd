/* GOLD: exact pairs of ids, and both sides' tails sorted. A CPU works on one chunk after another, and so does a GPU on chunks that
 * several ranks share; a GPU's own chunks come in tiles. */

#include "xtoken/internal.h"

#include <math.h>
#include <string.h>

/* The exact map, in memory that kernels read. */
typedef struct xdi_gold {
    int32_t *pair, *other, *rest, *other_rest; /* lists */
    int64_t tail;                              /* length of the tails */
} xdi_gold;

/* Are they ids of the vocabulary? Lists without partners ascend, so they have at most as many entries as there are
 * ids. */
static xd_result xdi_gold_check_ids(xd_ctx *ctx, const char *name, const int32_t *ids, int64_t count,
                                    int64_t size, bool ascending) {
    for (int64_t i = 0; i < count; i++)
        XD_REQUIRE(ctx, ids[i] >= 0 && ids[i] < size, XD_ERROR_ARGUMENT,
                   "the exact map has %s id %d, the vocabulary %lld", name, (int)ids[i], (long long)size);
    for (int64_t i = 1; i < count && ascending; i++)
        XD_REQUIRE(ctx, ids[i] > ids[i - 1], XD_ERROR_ARGUMENT, "the exact map has %s id %d after %d", name,
                   (int)ids[i], (int)ids[i - 1]);
    return XD_OK;
}

static xd_result xdi_gold_check(xd_ctx *ctx, const xd_xtoken_desc *d, int index, int64_t size) {
    const int64_t teacher = xdi_xtoken_vocabulary(&d->teachers[index]);
    const xd_exact_map *map = d->teachers[index].gold.map;
    XD_REQUIRE(ctx, map, XD_ERROR_ARGUMENT, "teacher %d has no exact map", index);
    XD_TRY(xdi_gold_check_ids(ctx, "student", map->student, map->pairs, size, true));
    XD_TRY(xdi_gold_check_ids(ctx, "teacher", map->teacher, map->pairs, teacher, false));
    XD_TRY(xdi_gold_check_ids(ctx, "student", map->student_rest, map->student_rest_count, size, true));
    return xdi_gold_check_ids(ctx, "teacher", map->teacher_rest, map->teacher_rest_count, teacher, true);
}

/* ---- memory ---- */

/* Derivatives of all chunks of a tile: floats at most. On a GPU a launch costs more than memory. */
enum { XDI_GOLD_MOST = 1 << 27 };

static int64_t xdi_gold_at_once(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t tile) {
    const int64_t chunks = xdi_xtoken_most(term->teacher->chunks, 1);
    const int64_t most = xdi_xtoken_fits(XDI_GOLD_MOST, xdi_xtoken_most(x->columns, 1));
    if (!x->kernels->xtoken.gold_bytes) return 1;
    if (x->d.tile == 0 || tile > most) tile = most;
    return tile < chunks ? tile : chunks;
}

static int64_t xdi_gold_tail(const xdi_xtoken *x, const xd_exact_map *map) {
    if (!map) return 0;
    const int64_t rest =
        map->student_rest_count < map->teacher_rest_count ? map->student_rest_count : map->teacher_rest_count;
    return rest < x->d.tail ? rest : x->d.tail;
}

/* What tiles take more than single chunks. */
static void xdi_gold_size_tile(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xtoken_sizes *s) {
    const xd_exact_map *map = term->teacher->gold.map;
    const int64_t tile = term->places.tile;
    xd_xtoken_gold_args a;
    memset(&a, 0, sizeof a);
    a.student.columns = x->columns;
    a.teacher.count = term->held;
    a.count = tile;
    a.map.rest_count = map ? map->student_rest_count : 0;
    a.map.other_rest_count = map ? map->teacher_rest_count : 0;
    a.fixed = x->fixed;
    s->cells = xdi_xtoken_most(s->cells, 2 * tile);
    s->tail = xdi_xtoken_most(s->tail, tile * (XD_XTOKEN_GOLD_WORDS + xdi_gold_tail(x, map)));
    s->merged = xdi_xtoken_most(s->merged, 2 * tile);
    s->means = xdi_xtoken_most(s->means, tile * x->columns);
    s->slots = xdi_xtoken_most(s->slots, x->columns + 11);
    s->scratch =
        xdi_xtoken_most(s->scratch, (int64_t)(x->kernels->xtoken.gold_bytes(&a) / sizeof(float)) + 1);
}

static void xdi_gold_size(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xtoken_sizes *s) {
    const int64_t sums = x->columns + term->vocabulary;
    s->settled = xdi_xtoken_most(s->settled, sums);
    s->cells = xdi_xtoken_most(s->cells, sums + 2);
    s->tail = xdi_xtoken_most(s->tail, XD_XTOKEN_BEST_WORDS + xdi_gold_tail(x, term->teacher->gold.map));
    s->merged = xdi_xtoken_most(s->merged, 2);
    s->means = xdi_xtoken_most(s->means, x->columns);
    if (x->kernels->xtoken.gold_bytes) xdi_gold_size_tile(x, term, s);
    s->scratch = xdi_xtoken_most(s->scratch, xdi_xtoken_most(x->columns, term->vocabulary));
    s->scratch = xdi_xtoken_most(s->scratch, XD_XTOKEN_SCRATCH);
}

static void xdi_gold_layout(const xdi_xtoken *x, xdi_xtoken_term *term, xdi_xtoken_arenas *a) {
    const xd_exact_map *map = term->teacher->gold.map;
    xdi_gold plan, *g = (xdi_gold *)xdi_xtoken_own(term, a, &plan, sizeof plan);
    if (!map) return;
    g->tail = xdi_gold_tail(x, map);
    g->pair = map->student;
    g->other = map->teacher;
    g->rest = map->student_rest;
    g->other_rest = map->teacher_rest;
    if (!x->on_device) return;
    g->pair = (int32_t *)xdi_xtoken_list(a, map->pairs, sizeof(int32_t));
    g->other = (int32_t *)xdi_xtoken_list(a, map->pairs, sizeof(int32_t));
    g->rest = (int32_t *)xdi_xtoken_list(a, map->student_rest_count, sizeof(int32_t));
    g->other_rest = (int32_t *)xdi_xtoken_list(a, map->teacher_rest_count, sizeof(int32_t));
}

/* ---- a pass ---- */

static void xdi_gold_fill_ids(int32_t *to, const int32_t *from, int64_t count) {
    if (to != from && count > 0) memcpy(to, from, (size_t)count * sizeof *to);
}

static xd_result xdi_gold_fill(xdi_xtoken *x, xdi_xtoken_term *term) {
    const xd_exact_map *map = term->teacher->gold.map;
    const xdi_gold *g = (const xdi_gold *)term->own;
    xdi_gold_fill_ids(g->pair, map->student, map->pairs);
    xdi_gold_fill_ids(g->other, map->teacher, map->pairs);
    xdi_gold_fill_ids(g->rest, map->student_rest, map->student_rest_count);
    xdi_gold_fill_ids(g->other_rest, map->teacher_rest, map->teacher_rest_count);
    for (int64_t b = 0; b < x->d.sequences; b++)
        for (int64_t place = 0; place < term->places.listed[b]; place++) {
            const int64_t at = b * term->teacher->chunks + place;
            term->chunks[at] = xdi_xtoken_chunk_of(x, term, b, term->places.order[at], XD_XTOKEN_EPSILON);
        }
    return XD_OK;
}

/* ---- one chunk ---- */

/* It is the only one of its tile. */
typedef struct xdi_gold_chunk {
    const xdi_gold *g;
    xd_xtoken_rows student, teacher;
    const xd_xtoken_chunk *chunk; /* in the lists */
    xd_comm *comm;                /* of its rows */
    double *means, *others;       /* alpha of this shard's ids, beta of all the teacher's */
    double *sums;                 /* cells [2]: the KL of the pairs, and the sum of its derivatives */
} xdi_gold_chunk;

static xd_result xdi_gold_means(const xdi_xtoken *x, xdi_gold_chunk *c) {
    const int64_t wide = xdi_xtoken_wide(x), count = c->student.columns + c->teacher.columns;
    double *cells = x->work.cells;
    const xd_xtoken_log_probs_args s = { c->student, 1.0 / c->chunk->student, cells, x->fixed,
                                         x->work.scratch };
    const xd_xtoken_log_probs_args t = { c->teacher, 1.0 / c->chunk->teacher, cells + wide * x->columns,
                                         x->fixed, x->work.scratch };
    XD_TRY(x->kernels->xtoken.log_probs(&x->launch, &s));
    XD_TRY(x->kernels->xtoken.log_probs(&x->launch, &t));
    XD_TRY(xdi_xtoken_reduce(x, c->comm, cells, count));
    XD_TRY(xdi_xtoken_settle(x, cells, x->room, count, &c->means));
    c->others = c->means + x->columns;
    c->sums = cells + wide * count;
    return XD_OK;
}

/* A list of the caller, used in place on a CPU. */
static const int32_t *xdi_gold_there(const xdi_xtoken *x, const int32_t *list) {
    return x->on_device ? (const int32_t *)xdi_xtoken_there(&x->lists, list) : list;
}

/* The KL of this shard's pairs in a cell, its derivative by alpha in u, and the most probable pair. */
static xd_result xdi_gold_pairs(const xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_gold_chunk *c) {
    xd_xtoken_pair_args a;
    memset(&a, 0, sizeof a);
    a.first = x->vocab.begin;
    a.columns = x->columns;
    a.means = c->means;
    a.others = c->others;
    a.pair = xdi_gold_there(x, c->g->pair);
    a.other = xdi_gold_there(x, c->g->other);
    a.pairs = term->teacher->gold.map->pairs;
    a.reverse = x->d.reverse;
    a.cells = c->sums;
    a.fixed = x->fixed;
    a.slope = x->work.u;
    a.best = x->work.tails;
    a.scratch = x->work.scratch;
    XD_TRY(x->kernels->memory.fill(&x->launch, c->sums, 0, 2 * xdi_xtoken_cell(x)));
    return x->kernels->xtoken.pair(&x->launch, &a);
}

/* The largest probabilities of this shard's ids without a partner, after its most probable pair, and of the teacher's. A
 * shorter list of this shard is filled with -1, which is below any probability. */
static xd_result xdi_gold_tails(const xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_gold_chunk *c) {
    const xd_exact_map *map = term->teacher->gold.map;
    const int64_t k = c->g->tail;
    xd_xtoken_tail t = { c->means,
                         xdi_gold_there(x, c->g->rest),
                         map->student_rest_count,
                         x->vocab.begin,
                         x->vocab.end,
                         k,
                         x->work.tails + XD_XTOKEN_BEST_WORDS,
                         x->work.tail_ids,
                         x->work.scratch,
                         x->fixed };
    if (k == 0) return XD_OK;
    XD_TRY(x->kernels->xtoken.tail(&x->launch, &t));
    t.means = c->others;
    t.ids = xdi_gold_there(x, c->g->other_rest);
    t.count = map->teacher_rest_count;
    t.begin = 0;
    t.end = term->vocabulary;
    t.values = x->work.other_tail;
    t.found = x->work.tail_ids + k;
    return x->kernels->xtoken.tail(&x->launch, &t);
}

/* Compares the tails and most probable pairs of all shards with the teacher's; u gets the derivative by alpha of this
 * shard's entries. */
static xd_result xdi_gold_merge(const xdi_xtoken *x, int64_t k) {
    xd_xtoken_merge m;
    memset(&m, 0, sizeof m);
    m.all = x->work.tails;
    m.stride = XD_XTOKEN_BEST_WORDS + k;
    m.k = k;
    m.shard = x->vocab.rank;
    m.shards = x->vocab.ranks;
    m.others = x->work.other_tail;
    m.found = x->work.tail_ids;
    m.slope = x->work.u;
    m.out = x->work.merged;
    m.places = x->work.tail_ids + 2 * k;
    if (x->vocab.tp) {
        XD_TRY(
            xdi_comm_all_gather_equal(x->vocab.tp, x->work.tails, x->work.all_tails, m.stride, XD_DTYPE_F64));
        m.all = x->work.all_tails;
    }
    return x->kernels->xtoken.merge(&x->launch, &m);
}

/* The chunk's results, and dz = (dlp - p sum dlp) / tau, dlp = u * factor. */
static xd_result xdi_gold_finish(const xdi_xtoken *x, const xdi_gold_chunk *c) {
    const double scale = c->chunk->factor / x->d.temperature;
    xd_xtoken_chunk *chunk = (xd_xtoken_chunk *)xdi_xtoken_there(&x->lists, c->chunk);
    const xd_xtoken_total_args total = { x->work.u, x->columns, c->sums + xdi_xtoken_wide(x), x->fixed,
                                         x->work.scratch };
    const xd_xtoken_close_args close = { c->sums,          x->fixed,      x->work.merged, scale,
                                         c->student.count, x->work.delta, chunk };
    const xd_xtoken_mean_gradient_args g = { xdi_xtoken_gradient_of(x, c->student), x->work.u, scale,
                                             x->work.delta, chunk };
    if (x->write) XD_TRY(x->kernels->xtoken.total(&x->launch, &total));
    XD_TRY(xdi_xtoken_reduce(x, x->vocab.tp, c->sums, 2));
    XD_TRY(x->kernels->xtoken.close(&x->launch, &close));
    return x->write ? x->kernels->xtoken.mean_gradient(&x->launch, &g) : XD_OK;
}

static xd_result xdi_gold_run_chunk(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                    const xdi_xtoken_tile *tile) {
    xdi_gold_chunk c;
    memset(&c, 0, sizeof c);
    c.g = (const xdi_gold *)term->own;
    c.student = xdi_xtoken_student_tile(x, term, tile);
    c.teacher = xdi_xtoken_teacher_tile(x, term, tile);
    c.chunk = term->chunks + xdi_xtoken_tile_start(&term->places, tile);
    c.comm = tile->comm;
    XD_TRY(xdi_gold_means(x, &c));
    XD_TRY(xdi_gold_pairs(x, term, &c));
    XD_TRY(xdi_gold_tails(x, term, &c));
    XD_TRY(xdi_gold_merge(x, c.g->tail));
    return xdi_gold_finish(x, &c);
}

/* ---- tiles ---- */

static xd_xtoken_gold_args xdi_gold_tile_of(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                            const xdi_xtoken_tile *tile) {
    const xdi_gold *g = (const xdi_gold *)term->own;
    const xd_exact_map *map = term->teacher->gold.map;
    xd_xtoken_gold_args a;
    memset(&a, 0, sizeof a);
    a.student = xdi_xtoken_student_tile(x, term, tile);
    a.teacher = xdi_xtoken_teacher_tile(x, term, tile);
    a.count = tile->count;
    a.chunks = (xd_xtoken_chunk *)xdi_xtoken_there(&x->lists,
                                                   term->chunks + xdi_xtoken_tile_start(&term->places, tile));
    a.map.pair = xdi_gold_there(x, g->pair);
    a.map.other = xdi_gold_there(x, g->other);
    a.map.pairs = map->pairs;
    a.map.rest = xdi_gold_there(x, g->rest);
    a.map.rest_count = map->student_rest_count;
    a.map.other_rest = xdi_gold_there(x, g->other_rest);
    a.map.other_rest_count = map->teacher_rest_count;
    a.k = g->tail;
    a.reverse = x->d.reverse;
    a.fixed = x->fixed;
    a.write = x->write;
    a.partner = x->work.slots;
    a.sums = x->work.cells;
    a.u = x->work.u;
    a.tails = x->work.tails;
    a.all = x->work.tails;
    a.shard = x->vocab.rank;
    a.shards = x->vocab.ranks;
    a.other_tail = x->work.other_tail;
    a.found = x->work.tail_ids;
    a.merged = x->work.merged;
    a.delta = x->work.delta;
    a.scratch = x->work.scratch;
    return a;
}

static xd_result xdi_gold_run_tile(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                   const xdi_xtoken_tile *tile) {
    const xd_xtoken_kernels *kernels = &x->kernels->xtoken;
    xd_xtoken_gold_args a = xdi_gold_tile_of(x, term, tile);
    const xd_xtoken_gradient to = xdi_xtoken_gradient_of(x, a.student);
    XD_TRY(kernels->gold_sums(&x->launch, &a));
    if (a.shards > 1) {
        XD_TRY(xdi_comm_all_gather_equal(x->vocab.tp, x->work.tails, x->work.all_tails,
                                         a.count * (XD_XTOKEN_GOLD_WORDS + a.k), XD_DTYPE_F64));
        a.all = x->work.all_tails;
        XD_TRY(kernels->gold_merge(&x->launch, &a));
        XD_TRY(xdi_xtoken_reduce(x, x->vocab.tp, a.sums, 2 * a.count));
        XD_TRY(kernels->gold_close(&x->launch, &a));
    }
    return x->write ? kernels->gold_gradient(&x->launch, &a, &to) : XD_OK;
}

/* The chunks of a tile, one after the other. */
static xd_result xdi_gold_run_chunks(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                     const xdi_xtoken_tile *tile) {
    for (int64_t i = 0; i < tile->count; i++) {
        const xdi_xtoken_tile one = { tile->b, tile->first + i, 1, tile->comm };
        XD_TRY(xdi_gold_run_chunk(x, term, &one));
    }
    return XD_OK;
}

/* Chunks that several ranks share, or those of this rank only, of all sequences. */
static xd_result xdi_gold_run_tiles(const xdi_xtoken *x, const xdi_xtoken_term *term, bool together) {
    for (int64_t b = 0; b < x->d.sequences; b++) {
        const int64_t shared = xdi_xtoken_shared_tiles(&term->places, b),
                      all = xdi_xtoken_tiles(&term->places, b);
        for (int64_t i = together ? 0 : shared; i < (together ? shared : all); i++) {
            const xdi_xtoken_tile tile = xdi_xtoken_tile_at(&term->places, x->d.sequence_comm, b, i);
            if (together || !x->kernels->xtoken.gold_sums)
                XD_TRY(xdi_gold_run_chunks(x, term, &tile));
            else
                XD_TRY(xdi_gold_run_tile(x, term, &tile));
        }
    }
    return XD_OK;
}

static xd_result xdi_gold_run(xdi_xtoken *x, xdi_xtoken_term *term) {
    xdi_xtoken_tile none;
    memset(&none, 0, sizeof none);
    if (x->kernels->xtoken.gold_partners) {
        const xd_xtoken_gold_args a = xdi_gold_tile_of(x, term, &none);
        XD_TRY(x->kernels->xtoken.gold_partners(&x->launch, &a));
    }
    XD_TRY(xdi_gold_run_tiles(x, term, true));
    return xdi_gold_run_tiles(x, term, false);
}

/* ---- results ---- */

static void xdi_gold_tell_chunk(xdi_xtoken *x, const xdi_xtoken_term *term, const xd_xtoken_chunk *chunk,
                                int64_t b, int64_t c) {
    const double weight = xdi_xtoken_weight(x, term, b, c), value = chunk->value + chunk->delta;
    const bool good = xdi_xtoken_is_good(x, term, weight, value);
    if (!xdi_xtoken_tells(x, term, b, c)) return;
    xdi_xtoken_tally(x, term->cell + XDI_XTOKEN_COMPARED, 1.0);
    xdi_xtoken_tally(x, term->cell + XDI_XTOKEN_AGREEING, good && chunk->agree ? 1.0 : 0.0);
    xdi_xtoken_tally(x, term->cell + XDI_XTOKEN_DIVERGENCE, good ? weight * chunk->value : 0.0);
    xdi_xtoken_tally(x, term->cell + XDI_XTOKEN_TAIL, good ? weight * chunk->delta : 0.0);
    if (!good) xdi_xtoken_found(x, b * term->teacher->chunks + c, value);
}

/* In the order in which they ran: chunks of several ranks first. */
static void xdi_gold_tell(xdi_xtoken *x, const xdi_xtoken_term *term) {
    for (int together = 1; together >= 0; together--)
        for (int64_t b = 0; b < x->d.sequences; b++) {
            const int64_t end = together ? term->places.shared[b] : term->places.listed[b];
            for (int64_t place = together ? 0 : term->places.shared[b]; place < end; place++) {
                const int64_t at = b * term->teacher->chunks + place;
                xdi_gold_tell_chunk(x, term, &term->chunks[at], b, term->places.order[at]);
            }
        }
}

XD_PRIVATE const xdi_xtoken_kind *xdi_gold_kind(void) {
    static const xdi_xtoken_kind kind = {
        XDI_KIND_EVEN_COMPAT, xdi_gold_check, xdi_gold_at_once, xdi_gold_size, xdi_gold_layout, NULL, NULL,
        xdi_gold_fill,        xdi_gold_run,   xdi_gold_tell,    NULL
    };
    return &kind;
}
