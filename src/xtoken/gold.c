/* GOLD: exact pairs of ids, and both sides' tails sorted. */

#include "xtoken/internal.h"

#include <math.h>
#include <string.h>

/* ---- one chunk ---- */

/* Chunk c of the tile's sequence, which is all of the tile. */
typedef struct xdi_gold_chunk {
    xdi_xtoken_tile tile;
    int64_t c;
    int64_t at;   /* of [B, C] */
    int64_t tail; /* how long the tails are */
    double kl, l1;
    bool agree;
} xdi_gold_chunk;

static int64_t xdi_gold_student_rows(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                     const xdi_gold_chunk *chunk) {
    return xdi_xtoken_tile_rows(term, &term->student_rows, &chunk->tile, x->rows, x->places);
}

/* alpha of this shard's ids in x->student, beta of all the teacher's in x->teacher. */
static xd_result xdi_gold_means(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_gold_chunk *chunk) {
    xd_xtoken_args a = xdi_xtoken_student_args(x, xdi_gold_student_rows(x, term, chunk));
    a.cells = x->student;
    a.scale = 1.0 / ((double)term->student_sizes[chunk->at] + XD_XTOKEN_EPSILON);
    XD_TRY(x->kernels.log_probs(&x->launch, &a));
    a = xdi_xtoken_teacher_args(
        x, term, xdi_xtoken_tile_rows(term, &term->teacher_rows, &chunk->tile, x->rows, x->places));
    a.scale = 1.0 / ((double)term->teacher_sizes[chunk->at] + XD_XTOKEN_EPSILON);
    XD_TRY(x->kernels.log_probs(&x->launch, &a));
    XD_TRY(xdi_xtoken_join(x, x->student, x->columns, chunk->tile.comm, NULL));
    return xdi_xtoken_join(x, x->teacher, term->vocabulary, chunk->tile.comm, NULL);
}

/* The KL of this shard's pairs in a cell, by u its derivative by alpha, and the likeliest. */
static xd_result xdi_gold_pairs(xdi_xtoken *x, const xd_exact_map *map, double *kl) {
    xd_xtoken_args a = xdi_xtoken_student_args(x, 0);
    xdi_xtoken_zero(x, kl, 1);
    a.cells = kl;
    a.means = x->student;
    a.others = x->teacher;
    a.pair = map->student;
    a.other = map->teacher;
    a.pairs = map->pairs;
    a.reverse = x->d.reverse;
    a.slope = x->u;
    a.best = x->tails;
    return x->kernels.pair(&x->launch, &a);
}

XD_PRIVATE xd_result xdi_gold_tails(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t k,
                                    const double *means, const double *others, const int32_t *rest,
                                    const int32_t *other_rest) {
    const xd_exact_map *map = term->teacher->map;
    xd_xtoken_tail t = { means,        rest,    map->student_rest_count,         x->vocab.begin,
                         x->vocab.end, k,       x->tails + XD_XTOKEN_BEST_WORDS, x->tail_ids,
                         x->scratch,   x->fixed };
    XD_TRY(x->kernels.tail(&x->launch, &t));
    t.means = others;
    t.ids = other_rest;
    t.count = map->teacher_rest_count;
    t.begin = 0;
    t.end = term->vocabulary;
    t.values = x->other_tail;
    t.found = x->tail_ids + k;
    return x->kernels.tail(&x->launch, &t);
}

XD_PRIVATE xd_result xdi_gold_merge(const xdi_xtoken *x, int64_t k, double *out) {
    xd_xtoken_merge m;
    memset(&m, 0, sizeof m);
    m.all = x->tails;
    m.stride = XD_XTOKEN_BEST_WORDS + k;
    m.k = k;
    m.shard = x->vocab.rank;
    m.shards = x->vocab.ranks;
    m.others = x->other_tail;
    m.found = x->tail_ids;
    m.slope = x->u;
    m.out = out;
    m.places = x->rows;
    if (x->vocab.tp) {
        XD_TRY(xdi_comm_all_gather_equal(x->vocab.tp, x->tails, x->all_tails, m.stride, XD_DTYPE_F64));
        m.all = x->all_tails;
    }
    return x->kernels.merge(&x->launch, &m);
}

/* dz = (dlp - p sum dlp) / tau, dlp = u * factor. */
static xd_result xdi_gold_gradient(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_gold_chunk *chunk,
                                   double factor) {
    const int64_t count = xdi_gold_student_rows(x, term, chunk);
    xd_xtoken_args a = xdi_xtoken_student_args(x, count);
    double *sum = x->row_sums; /* one cell */
    xdi_xtoken_zero(x, sum, 1);
    a.cells = sum;
    a.u = x->u;
    a.scale = factor / x->d.temperature;
    XD_TRY(x->kernels.total(&x->launch, &a));
    XD_TRY(xdi_xtoken_join(x, sum, 1, x->vocab.tp, NULL));
    const double shift = sum[0] * a.scale;
    for (int64_t i = 0; i < count; i++) x->row_delta[i] = shift;
    a.delta = x->row_delta;
    return x->kernels.gradient(&x->launch, &a);
}

XD_PRIVATE void xdi_gold_add_chunk(xdi_xtoken *x, const xdi_xtoken_term *term, const xd_xtoken_chunk *chunk,
                                   int64_t b, int64_t c) {
    const double weight = xdi_xtoken_weight(x, term, b, c), value = chunk->value + chunk->delta;
    const bool good = isfinite(value) != 0;
    if (!chunk->compared || !xdi_xtoken_tells(x, term, b, c)) return;
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_COMPARED, 1.0);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_AGREEING, good && chunk->agree ? 1.0 : 0.0);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_DIVERGENCE, good ? weight * chunk->value : 0.0);
    xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_TAIL, good ? weight * chunk->delta : 0.0);
    if (!good) xdi_xtoken_found(x, b * term->teacher->chunks + c, value);
}

static xd_result xdi_gold_finish(xdi_xtoken *x, xdi_xtoken_term *term, const xdi_gold_chunk *chunk) {
    const int64_t b = chunk->tile.b;
    const double weight = xdi_xtoken_weight(x, term, b, chunk->c), value = chunk->kl + chunk->l1;
    xd_xtoken_chunk sums;
    memset(&sums, 0, sizeof sums);
    sums.compared = true;
    sums.value = chunk->kl;
    sums.delta = chunk->l1;
    sums.agree = chunk->agree;
    xdi_gold_add_chunk(x, term, &sums, b, chunk->c);
    if (!x->write || !isfinite(value)) return XD_OK;
    return xdi_gold_gradient(x, term, chunk,
                             weight * xdi_xtoken_factor(x, term) /
                                 ((double)term->student_sizes[chunk->at] + XD_XTOKEN_EPSILON));
}

static xd_result xdi_gold_run(xdi_xtoken *x, xdi_xtoken_term *term, xdi_gold_chunk *chunk) {
    const xd_exact_map *map = term->teacher->map;
    double *kl = x->row_sums, merged[2]; /* kl: one cell */
    XD_TRY(xdi_gold_means(x, term, chunk));
    XD_TRY(xdi_gold_pairs(x, map, kl));
    XD_TRY(xdi_xtoken_join(x, kl, 1, x->vocab.tp, NULL));
    chunk->kl = kl[0];
    if (chunk->tail > 0)
        XD_TRY(xdi_gold_tails(x, term, chunk->tail, x->student, x->teacher, map->student_rest,
                              map->teacher_rest));
    XD_TRY(xdi_gold_merge(x, chunk->tail, merged));
    chunk->l1 = merged[0];
    chunk->agree = merged[1] != 0.0;
    return xdi_gold_finish(x, term, chunk);
}

XD_PRIVATE int64_t xdi_xtoken_tail(const xd_xtoken_desc *d, const xd_exact_map *map) {
    const int64_t rest =
        map->student_rest_count < map->teacher_rest_count ? map->student_rest_count : map->teacher_rest_count;
    return rest < d->tail ? rest : d->tail;
}

/* Those of several ranks, or this rank's own, of all sequences. */
static xd_result xdi_gold_tiles(xdi_xtoken *x, xdi_xtoken_term *term, bool together) {
    for (int64_t b = 0; b < x->d.sequences; b++) {
        const int64_t shared = xdi_xtoken_shared_tiles(term, b), all = xdi_xtoken_tiles(term, b);
        for (int64_t i = together ? 0 : shared; i < (together ? shared : all); i++) {
            xdi_gold_chunk chunk;
            memset(&chunk, 0, sizeof chunk);
            chunk.tile = xdi_xtoken_tile_at(x, term, b, i);
            chunk.c = term->order[b * term->teacher->chunks + chunk.tile.first];
            chunk.at = b * term->teacher->chunks + chunk.c;
            chunk.tail = xdi_xtoken_tail(&x->d, term->teacher->map);
            XD_TRY(xdi_gold_run(x, term, &chunk));
        }
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_gold(xdi_xtoken *x, xdi_xtoken_term *term) {
    XD_TRY(xdi_gold_tiles(x, term, true));
    return xdi_gold_tiles(x, term, false);
}
