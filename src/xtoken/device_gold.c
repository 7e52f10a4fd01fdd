/* GOLD on a device: chunk after chunk, each in some twenty launches, without the host. */

#include "xtoken/internal.h"

#include <string.h>

/* One chunk: its rows on both sides, and where its sums are. */
typedef struct xdi_staged_gold {
    xd_xtoken_args student, teacher;
    xd_xtoken_chunk *chunk; /* in the lists */
    xd_comm *comm;          /* of its rows; NULL: they are all here */
    const double *means, *others;
    double *sums; /* cells [2]: the KL of the pairs, and the sum of its derivatives */
    int64_t tail;
} xdi_staged_gold;

/* Tile `index` of all. */
static xdi_staged_gold xdi_staged_gold_of(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                          const xdi_xtoken_lists *l, const xdi_xtoken_tile *tile,
                                          int64_t index) {
    const int64_t at = l->first[index], teacher_at = l->teacher_first[index], wide = x->fixed ? 2 : 1;
    xdi_staged_gold g;
    g.chunk = xdi_xtoken_device_chunks(term, l, tile);
    g.comm = tile->comm;
    g.student = xdi_xtoken_device_args(x, l->rows + at, l->places + at, l->first[index + 1] - at);
    g.student.cells = x->student;
    g.student.scale = 1.0 / g.chunk->student;
    g.teacher = xdi_xtoken_device_args(x, l->teacher_rows + teacher_at, l->teacher_places + teacher_at,
                                       l->teacher_first[index + 1] - teacher_at);
    g.teacher.logits = term->teacher->logits;
    g.teacher.columns = term->vocabulary;
    g.teacher.lse = NULL;
    g.teacher.cells = x->student + wide * x->columns;
    g.teacher.scale = 1.0 / g.chunk->teacher;
    g.sums = g.teacher.cells + wide * term->vocabulary;
    g.means = x->fixed ? x->device.settled : g.student.cells;
    g.others = g.means + x->columns;
    g.tail = xdi_xtoken_tail(&x->d, term->teacher->map);
    return g;
}

static xd_result xdi_staged_gold_means(const xdi_xtoken *x, const xdi_staged_gold *g) {
    const int64_t count = g->student.columns + g->teacher.columns;
    xd_xtoken_args a = g->student;
    XD_TRY(x->kernels.log_probs(&x->launch, &g->student));
    XD_TRY(x->kernels.log_probs(&x->launch, &g->teacher));
    XD_TRY(xdi_xtoken_reduce(x, g->comm, g->student.cells, count));
    if (!x->fixed) return XD_OK;
    a.count = count;
    a.out = x->device.settled;
    return x->kernels.settle(&x->launch, &a);
}

/* The KL of the pairs, by x->u its derivative, and this shard's likeliest in x->tails. */
static xd_result xdi_staged_gold_pairs(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                       const xdi_xtoken_lists *l, const xdi_staged_gold *g) {
    xd_xtoken_args a = g->student;
    a.cells = g->sums;
    a.means = g->means;
    a.others = g->others;
    a.pair = (const int32_t *)xdi_xtoken_there(x, l->pair);
    a.other = (const int32_t *)xdi_xtoken_there(x, l->other);
    a.pairs = term->teacher->map->pairs;
    a.reverse = x->d.reverse;
    a.slope = x->u;
    a.best = x->tails;
    const size_t cell = x->fixed ? sizeof(xd_fixed) : sizeof(double);
    XD_TRY(x->device.kernels->memory.fill(&x->launch, g->sums, 0, 2 * cell));
    return x->kernels.pair(&x->launch, &a);
}

static xd_result xdi_staged_gold_tails(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                       const xdi_xtoken_lists *l, const xdi_staged_gold *g) {
    return xdi_gold_tails(x, term, g->tail, g->means, g->others,
                          (const int32_t *)xdi_xtoken_there(x, l->rest),
                          (const int32_t *)xdi_xtoken_there(x, l->other_rest));
}

/* The chunk's results, and its gradient. */
static xd_result xdi_staged_gold_finish(const xdi_xtoken *x, const xdi_staged_gold *g) {
    xd_xtoken_args a = g->student;
    a.cells = g->sums + (x->fixed ? 2 : 1);
    a.u = x->u;
    a.scale = g->chunk->factor / x->d.temperature;
    XD_TRY(x->kernels.total(&x->launch, &a));
    XD_TRY(xdi_xtoken_reduce(x, x->vocab.tp, g->sums, 2));
    a.cells = g->sums;
    a.delta = x->device.merged;
    a.chunks = (xd_xtoken_chunk *)xdi_xtoken_there(x, g->chunk);
    a.out = x->device.delta;
    XD_TRY(x->kernels.close(&x->launch, &a));
    a.delta = a.out;
    return x->write ? x->kernels.gradient(&x->launch, &a) : XD_OK;
}

/* Those of several ranks, or this rank's own, of all sequences. */
static xd_result xdi_staged_gold_tiles(xdi_xtoken *x, const xdi_xtoken_term *term, const xdi_xtoken_lists *l,
                                       bool together) {
    int64_t before = 0; /* tiles of the sequences before */
    for (int64_t b = 0; b < x->d.sequences; b++) {
        const int64_t shared = xdi_xtoken_shared_tiles(term, b), all = xdi_xtoken_tiles(term, b);
        for (int64_t i = together ? 0 : shared; i < (together ? shared : all); i++) {
            const xdi_xtoken_tile tile = xdi_xtoken_tile_at(x, term, b, i);
            const xdi_staged_gold g = xdi_staged_gold_of(x, term, l, &tile, before + i);
            XD_TRY(xdi_staged_gold_means(x, &g));
            XD_TRY(xdi_staged_gold_pairs(x, term, l, &g));
            if (g.tail > 0) XD_TRY(xdi_staged_gold_tails(x, term, l, &g));
            XD_TRY(xdi_gold_merge(x, g.tail, x->device.merged));
            XD_TRY(xdi_staged_gold_finish(x, &g));
        }
        before += all;
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_device_gold(xdi_xtoken *x, const xdi_xtoken_term *term,
                                            const xdi_xtoken_lists *l) {
    XD_TRY(xdi_staged_gold_tiles(x, term, l, true));
    return xdi_staged_gold_tiles(x, term, l, false);
}
