/* Universal logit distillation: sorted probabilities against sorted probabilities. */

#include "kernel/internal.h"
#include "kernel/kernels.h"
#include "loss/internal.h"
#include "xtoken/uld.h"

#include <math.h>
#include <string.h>

/* Maximum bytes of the chunks computed together on a device; a single chunk may take more. */
#define XDI_ULD_TILE_BYTES ((size_t)64 << 20)

/* ---- checks ---- */

static xd_result xdi_uld_check_side(xd_ctx *ctx, const char *name, const xd_uld_side *side) {
    XD_TRY(xdi_rows_check(ctx, name, &side->logits));
    XD_REQUIRE(ctx,
               side->vocabulary > 0 && side->vocabulary <= side->logits.cols && side->vocabulary <= INT32_MAX,
               XD_ERROR_SHAPE, "%s logits have %lld columns for a vocabulary of %lld", name,
               (long long)side->logits.cols, (long long)side->vocabulary);
    XD_REQUIRE(ctx, side->temperature > 0.0 && isfinite(side->temperature), XD_ERROR_ARGUMENT,
               "%s temperature %g must be positive and finite", name, side->temperature);
    XD_REQUIRE(ctx, side->ids || side->logits.rows == 0, XD_ERROR_ARGUMENT, "%s: no ids of %lld tokens", name,
               (long long)side->logits.rows);
    for (int64_t i = 0; i < side->logits.rows; i++)
        XD_REQUIRE(ctx, side->ids[i] >= 0 && side->ids[i] < side->vocabulary, XD_ERROR_ARGUMENT,
                   "%s token %lld has id %lld of a vocabulary of %lld", name, (long long)i,
                   (long long)side->ids[i], (long long)side->vocabulary);
    return XD_OK;
}

static bool xdi_uld_two_sided(const xd_aligned_chunk *c) {
    return c->student_begin < c->student_end && c->teacher_begin < c->teacher_end;
}

static xd_result xdi_uld_check_chunks(xd_ctx *ctx, const xd_uld_desc *d) {
    const int64_t first = d->merge == XD_ULD_BAYESIAN ? 1 : 0;
    int64_t s = first, t = first;
    XD_REQUIRE(ctx, d->chunk_count >= 0 && (d->chunks || d->chunk_count == 0), XD_ERROR_ARGUMENT,
               "%lld chunks%s", (long long)d->chunk_count, d->chunks ? "" : ", but no list of them");
    for (int64_t i = 0; i < d->chunk_count; i++) {
        const xd_aligned_chunk *c = &d->chunks[i];
        if (!xdi_uld_two_sided(c)) continue;
        XD_REQUIRE(ctx,
                   c->student_begin >= s && c->student_end <= d->student.logits.rows &&
                       c->teacher_begin >= t && c->teacher_end <= d->teacher.logits.rows,
                   XD_ERROR_ARGUMENT,
                   "chunk %lld, [%d, %d) and [%d, %d), does not lie in [%lld, %lld) and [%lld, %lld)",
                   (long long)i, (int)c->student_begin, (int)c->student_end, (int)c->teacher_begin,
                   (int)c->teacher_end, (long long)s, (long long)d->student.logits.rows, (long long)t,
                   (long long)d->teacher.logits.rows);
        s = c->student_end;
        t = c->teacher_end;
    }
    return XD_OK;
}

static xd_result xdi_uld_check_gradient(xd_ctx *ctx, const xd_rows *g, const xd_rows *x) {
    XD_TRY(xdi_rows_check(ctx, "the gradient", g));
    XD_REQUIRE(ctx, g->rows == x->rows && g->cols == x->cols, XD_ERROR_SHAPE,
               "the gradient is [%lld, %lld], the student's logits [%lld, %lld]", (long long)g->rows,
               (long long)g->cols, (long long)x->rows, (long long)x->cols);
    return XD_OK;
}

/* Gradients are at most the factor times a few: f32 must hold them. */
static xd_result xdi_uld_check_factor(xd_ctx *ctx, const xd_uld_desc *d) {
    const double below = d->denominator > 0.0 ? d->denominator : 1.0;
    const double weight = d->matched_count > 0 ? fabs(d->matched_weight) + fabs(d->unmatched_weight) : 1.0;
    const double least = fmin(1.0, d->student.temperature);
    XD_REQUIRE(ctx, fabs(d->scale) * weight / below / least <= 1e30, XD_ERROR_ARGUMENT,
               "scale %g, denominator %g, weights %g and %g: f32 does not hold such a gradient", d->scale,
               d->denominator, d->matched_weight, d->unmatched_weight);
    return XD_OK;
}

static xd_result xdi_uld_check_matched(xd_ctx *ctx, const xd_uld_desc *d) {
    XD_REQUIRE(ctx,
               d->matched_count >= 0 && (d->matched_count == 0 || (d->matched_student && d->matched_teacher)),
               XD_ERROR_ARGUMENT, "%lld matched ids%s", (long long)d->matched_count,
               d->matched_count < 0 ? "" : ", but no list of them");
    for (int64_t i = 0; i < d->matched_count; i++)
        XD_REQUIRE(ctx,
                   d->matched_student[i] >= 0 && d->matched_student[i] < d->student.vocabulary &&
                       d->matched_teacher[i] >= 0 && d->matched_teacher[i] < d->teacher.vocabulary,
                   XD_ERROR_ARGUMENT, "matched ids %lld and %lld are outside vocabularies of %lld and %lld",
                   (long long)d->matched_student[i], (long long)d->matched_teacher[i],
                   (long long)d->student.vocabulary, (long long)d->teacher.vocabulary);
    return XD_OK;
}

static xd_result xdi_uld_check(xd_ctx *ctx, const xd_uld_desc *d) {
    XD_TRY(xdi_uld_check_side(ctx, "student", &d->student));
    XD_TRY(xdi_uld_check_side(ctx, "teacher", &d->teacher));
    XD_REQUIRE(ctx, d->beta >= 0.0 && d->beta <= 1.0, XD_ERROR_ARGUMENT, "beta %g is outside [0, 1]",
               d->beta);
    XD_REQUIRE(ctx,
               d->scale != 0.0 &&
                   (d->matched_count == 0 || d->matched_weight != 0.0 || d->unmatched_weight != 0.0),
               XD_ERROR_ARGUMENT,
               "no term of the loss has a weight: scale is %g, matched_weight %g and unmatched_weight %g",
               d->scale, d->matched_weight, d->unmatched_weight);
    XD_REQUIRE(ctx, d->denominator >= 0.0 && isfinite(d->denominator) && isfinite(d->scale),
               XD_ERROR_ARGUMENT, "denominator %g and scale %g must be finite, the first not negative",
               d->denominator, d->scale);
    XD_TRY(xdi_uld_check_factor(ctx, d));
    XD_TRY(xdi_uld_check_matched(ctx, d));
    if (d->gradient.data) XD_TRY(xdi_uld_check_gradient(ctx, &d->gradient, &d->student.logits));
    return xdi_uld_check_chunks(ctx, d);
}

/* ---- lists ---- */

/* Lists of the whole sequence, made by the host; one copy moves them to a device. */
typedef struct xdi_uld_lists {
    xd_uld_chunk *chunks;           /* those with two sides; they come back */
    int64_t *ids[XD_ULD_SIDES];     /* [rows] the token that a row predicts */
    int32_t *owner;                 /* [rows of the student] */
    int32_t *matched[XD_ULD_SIDES]; /* [matched_count] */
    int32_t *list[XD_ULD_SIDES];    /* [vocabulary] the other ids; NULL without matched ones */
} xdi_uld_lists;

/* Other blocks of device memory. */
typedef struct xdi_uld_work {
    double *parts[XD_ULD_SIDES], *scores[XD_ULD_SIDES];
    uint64_t *sorted[XD_ULD_SIDES], *spare[XD_ULD_SIDES];
    float *slope;
    unsigned char *scratch;
} xdi_uld_work;

typedef struct xdi_uld {
    xd_ctx *ctx;
    const xd_kernels *kernels;
    xd_launch launch;
    xd_uld_desc d;
    const xd_uld_side *side[XD_ULD_SIDES];
    int64_t chunks, tile;        /* with two sides; computed together */
    int64_t count[XD_ULD_SIDES]; /* ids that are sorted */
    xdi_uld_lists here, there;   /* the host's, and the device's */
    xdi_uld_work work;
} xdi_uld;

static bool xdi_uld_layout_lists(const xdi_uld *x, xdi_uld_lists *l, xd_arena *arena) {
    const int64_t m = x->d.matched_count;
    bool fits = true;
    memset(l, 0, sizeof *l);
    l->chunks = (xd_uld_chunk *)xdi_arena_array(arena, x->chunks, sizeof *l->chunks, &fits);
    l->owner = (int32_t *)xdi_arena_array(arena, x->d.student.logits.rows, sizeof *l->owner, &fits);
    for (int i = 0; i < XD_ULD_SIDES; i++) {
        l->ids[i] = (int64_t *)xdi_arena_array(arena, x->side[i]->logits.rows, sizeof *l->ids[i], &fits);
        if (m == 0) continue;
        l->matched[i] = (int32_t *)xdi_arena_array(arena, m, sizeof *l->matched[i], &fits);
        l->list[i] = (int32_t *)xdi_arena_array(arena, x->side[i]->vocabulary, sizeof *l->list[i], &fits);
    }
    return fits;
}

static void xdi_uld_fill_chunk(const xdi_uld *x, const xd_aligned_chunk *c, int32_t number) {
    const bool bayesian = x->d.merge == XD_ULD_BAYESIAN;
    const int64_t shift = bayesian ? -1 : 0; /* from a token to the row that predicts it */
    xd_uld_chunk *chunk = &x->here.chunks[number];
    memset(chunk, 0, sizeof *chunk);
    chunk->begin[XD_ULD_STUDENT] = c->student_begin + shift;
    chunk->end[XD_ULD_STUDENT] = c->student_end + shift;
    chunk->begin[XD_ULD_TEACHER] = c->teacher_begin + shift;
    chunk->end[XD_ULD_TEACHER] = c->teacher_end + shift;
    for (int i = 0; i < XD_ULD_SIDES; i++) {
        chunk->base[i] = bayesian ? chunk->end[i] - 1 : chunk->begin[i];
        for (int64_t row = chunk->begin[i]; row < chunk->end[i]; row++)
            x->here.ids[i][row] = x->side[i]->ids[row - shift];
    }
    for (int64_t row = chunk->begin[XD_ULD_STUDENT]; row < chunk->end[XD_ULD_STUDENT]; row++)
        x->here.owner[row] = number;
}

/* The ids of a side without the matched ids, which are marked at their index first. */
static int64_t xdi_uld_fill_list(int32_t *list, int64_t vocabulary, const int64_t *matched, int32_t *pairs,
                                 int64_t count) {
    int64_t n = 0;
    for (int64_t c = 0; c < vocabulary; c++) list[c] = 1;
    for (int64_t i = 0; i < count; i++) {
        pairs[i] = (int32_t)matched[i];
        list[matched[i]] = 0;
    }
    for (int64_t c = 0; c < vocabulary; c++) {
        const bool rest = list[c] != 0; /* n is not above c */
        list[n] = (int32_t)c;
        n += rest;
    }
    return n;
}

static void xdi_uld_fill_lists(xdi_uld *x) {
    const int64_t *matched[XD_ULD_SIDES] = { x->d.matched_student, x->d.matched_teacher };
    int32_t number = 0;
    for (int64_t row = 0; row < x->d.student.logits.rows; row++) x->here.owner[row] = -1;
    for (int i = 0; i < XD_ULD_SIDES; i++) {
        memset(x->here.ids[i], 0, (size_t)x->side[i]->logits.rows * sizeof *x->here.ids[i]);
        x->count[i] = x->side[i]->vocabulary;
        if (x->d.matched_count > 0)
            x->count[i] = xdi_uld_fill_list(x->here.list[i], x->side[i]->vocabulary, matched[i],
                                            x->here.matched[i], x->d.matched_count);
    }
    for (int64_t i = 0; i < x->d.chunk_count; i++)
        if (xdi_uld_two_sided(&x->d.chunks[i])) xdi_uld_fill_chunk(x, &x->d.chunks[i], number++);
}

/* ---- work ---- */

/* Elements that a chunk's scratch is for. */
static int64_t xdi_uld_longest(const xdi_uld *x) {
    const int64_t s = x->count[XD_ULD_STUDENT], t = x->count[XD_ULD_TEACHER];
    return (s > t ? s : t) + x->d.matched_count;
}

static int64_t xdi_uld_tile_of(const xdi_uld *x) {
    const size_t lists = (size_t)(x->count[XD_ULD_STUDENT] + x->count[XD_ULD_TEACHER]) * 2 * sizeof(uint64_t);
    const size_t slope = (size_t)x->d.student.vocabulary * sizeof(float);
    const bool near = x->kernels->device == XD_DEVICE_CPU;
    const size_t scratch = near ? 0 : XD_ULD_SCRATCH(xdi_uld_longest(x));
    int64_t tile = (int64_t)(XDI_ULD_TILE_BYTES / (lists + slope + scratch + 1));
    if (near && tile > xd_ctx_settings(x->ctx)->threads) tile = xd_ctx_settings(x->ctx)->threads;
    if (tile < 1 || x->chunks < 1) return 1;
    return tile < x->chunks ? tile : x->chunks;
}

static bool xdi_uld_layout_work(xdi_uld *x, xd_arena *arena) {
    xdi_uld_work *w = &x->work;
    const int64_t slope = x->d.gradient.data ? x->d.student.vocabulary : 0;
    bool fits = true;
    for (int i = 0; i < XD_ULD_SIDES; i++) {
        const int64_t rows = x->side[i]->logits.rows, n = x->tile * x->count[i];
        w->parts[i] = (double *)xdi_arena_array(arena, rows, XD_SOFTMAX_PARTS * sizeof *w->parts[i], &fits);
        w->scores[i] = (double *)xdi_arena_array(arena, rows, sizeof *w->scores[i], &fits);
        w->sorted[i] = (uint64_t *)xdi_arena_array(arena, n, sizeof *w->sorted[i], &fits);
        w->spare[i] = (uint64_t *)xdi_arena_array(arena, n, sizeof *w->spare[i], &fits);
    }
    w->slope = (float *)xdi_arena_array(arena, x->tile * slope, sizeof *w->slope, &fits);
    if (x->kernels->device != XD_DEVICE_CPU)
        w->scratch =
            (unsigned char *)xdi_arena_array(arena, x->tile, XD_ULD_SCRATCH(xdi_uld_longest(x)), &fits);
    return fits;
}

/* ---- the loss ---- */

static xd_uld_args xdi_uld_args_of(const xdi_uld *x, int64_t first) {
    const int64_t left = x->chunks - first;
    xd_uld_args a;
    memset(&a, 0, sizeof a);
    for (int i = 0; i < XD_ULD_SIDES; i++) {
        xd_uld_rows *rows = &a.side[i];
        rows->logits = x->side[i]->logits;
        rows->columns = x->side[i]->vocabulary;
        rows->temperature = x->side[i]->temperature;
        rows->parts = x->work.parts[i];
        rows->scores = x->work.scores[i];
        rows->ids = x->there.ids[i];
        rows->list = x->there.list[i];
        rows->count = x->count[i];
        rows->sorted = x->work.sorted[i];
        rows->spare = x->work.spare[i];
        a.matched[i] = x->there.matched[i];
    }
    a.chunks = x->there.chunks + first;
    a.count = left < x->tile ? left : x->tile;
    a.matched_count = x->d.matched_count;
    a.matched_weight = x->d.matched_weight;
    a.unmatched_weight = x->d.matched_count > 0 ? x->d.unmatched_weight : 1.0;
    a.beta = x->d.beta;
    a.slope = x->d.gradient.data ? x->work.slope : NULL;
    a.gradient = x->d.gradient;
    a.owner = x->there.owner;
    a.first = (int32_t)first;
    a.scratch = x->work.scratch;
    return a;
}

/* Statistics of the rows of chunks [first, first + count), adjacent chunks in one launch. */
static xd_result xdi_uld_stats(const xdi_uld *x, int which, int64_t first, int64_t count) {
    const xd_rows *logits = &x->side[which]->logits;
    const int64_t stride = logits->stride ? logits->stride : logits->cols;
    xd_softmax_args s;
    memset(&s, 0, sizeof s);
    s.vocab.end = s.vocab.size = x->side[which]->vocabulary;
    s.temperature = x->side[which]->temperature;
    for (int64_t i = first; i < first + count;) {
        const int64_t begin = x->here.chunks[i].begin[which];
        int64_t end = begin;
        for (; i < first + count && x->here.chunks[i].begin[which] == end; i++)
            end = x->here.chunks[i].end[which];
        s.logits = *logits;
        s.logits.data =
            (unsigned char *)logits->data + (size_t)(begin * stride) * xd_dtype_size(logits->dtype);
        s.logits.rows = end - begin;
        s.parts = x->work.parts[which] + begin * XD_SOFTMAX_PARTS;
        XD_TRY(x->kernels->softmax.stats(&x->launch, &s));
    }
    return XD_OK;
}

/* Chunks [first, first + tile), and the rows of the gradient from the one before them on. */
static xd_result xdi_uld_tile_run(const xdi_uld *x, int64_t first, double share) {
    xd_uld_args a = xdi_uld_args_of(x, first);
    const bool last = first + a.count == x->chunks;
    const int64_t end =
        last ? x->d.student.logits.rows : x->here.chunks[first + a.count - 1].end[XD_ULD_STUDENT];
    for (int i = 0; i < XD_ULD_SIDES; i++) XD_TRY(xdi_uld_stats(x, i, first, a.count));
    if (a.count > 0) {
        XD_TRY(x->kernels->uld.merge(&x->launch, &a));
        XD_TRY(x->kernels->uld.sort(&x->launch, &a));
        XD_TRY(x->kernels->uld.compare(&x->launch, &a));
    }
    a.row = first > 0 ? x->here.chunks[first - 1].end[XD_ULD_STUDENT] : 0;
    a.rows = end - a.row;
    a.share = share;
    return a.slope ? x->kernels->uld.gradient(&x->launch, &a) : XD_OK;
}

static xd_result xdi_uld_finish(const xdi_uld *x, double below, xd_uld_values *out) {
    const xd_uld_desc *d = &x->d;
    double matched = 0.0, unmatched = 0.0;
    for (int64_t i = 0; i < x->chunks; i++) {
        const xd_uld_chunk *c = &x->here.chunks[i];
        const long long shift = d->merge == XD_ULD_BAYESIAN ? 1 : 0;
        XD_REQUIRE(x->ctx, c->finite, XD_ERROR_DATA,
                   "logits of student tokens [%lld, %lld) or teacher tokens [%lld, %lld) are not finite",
                   c->begin[XD_ULD_STUDENT] + shift, c->end[XD_ULD_STUDENT] + shift,
                   c->begin[XD_ULD_TEACHER] + shift, c->end[XD_ULD_TEACHER] + shift);
        matched += c->matched;
        unmatched += c->unmatched;
    }
    out->matched = matched / below;
    out->unmatched = unmatched / below;
    out->chunks = x->chunks;
    out->loss = d->matched_count > 0
                    ? d->scale * (d->matched_weight * out->matched + d->unmatched_weight * out->unmatched)
                    : d->scale * out->unmatched;
    return XD_OK;
}

static xd_result xdi_uld_run(xdi_uld *x, size_t bytes, xd_uld_values *out) {
    const xd_device_ops *memory = &x->kernels->memory;
    const double below = x->d.denominator > 0.0 ? x->d.denominator : x->chunks > 0 ? (double)x->chunks : 1.0;
    int64_t first = 0;
    XD_TRY(memory->copy(&x->launch, x->there.chunks, x->here.chunks, bytes, XD_COPY_TO_DEVICE));
    do {
        XD_TRY(xdi_uld_tile_run(x, first, x->d.scale / below));
        first += x->tile;
    } while (first < x->chunks);
    XD_TRY(xd_read(x->ctx, x->here.chunks, x->there.chunks, (size_t)x->chunks * sizeof *x->here.chunks));
    return xdi_uld_finish(x, below, out);
}

/* With the lists in `here`: device memory has a copy of them before its work blocks. After a failure the device may
 * still read the host's lists. */
static xd_result xdi_uld_with_lists(xdi_uld *x, size_t bytes, xd_uld_values *out) {
    const bool near = x->kernels->device == XD_DEVICE_CPU;
    xd_arena planning = xd_arena_over(NULL, 0);
    xdi_uld_fill_lists(x);
    x->tile = xdi_uld_tile_of(x);
    XD_REQUIRE(x->ctx,
               (near || xdi_uld_layout_lists(x, &x->there, &planning)) && xdi_uld_layout_work(x, &planning),
               XD_ERROR_MEMORY, "the workspace would not fit");
    void *work = xdi_call_memory(x->ctx, planning.peak);
    XD_REQUIRE(x->ctx, work, XD_ERROR_MEMORY, "no room for a workspace of %zu bytes", planning.peak);
    xd_arena arena = xd_arena_over(work, planning.peak);
    x->there = x->here;
    if (!near) xdi_uld_layout_lists(x, &x->there, &arena);
    xdi_uld_layout_work(x, &arena);
    const xd_result result = xdi_uld_run(x, bytes, out);
    if (result != XD_OK && !near) x->kernels->memory.synchronize(&x->launch);
    xdi_call_memory_done(x->ctx, work);
    return result;
}

static void xdi_uld_open(xd_ctx *ctx, const xd_uld_desc *desc, xdi_uld *x) {
    memset(x, 0, sizeof *x);
    x->ctx = ctx;
    x->kernels = xd_ctx_kernels(ctx);
    x->launch = xd_ctx_launch(ctx);
    x->d = *desc;
    if (x->d.student.temperature == 0.0) x->d.student.temperature = 1.0;
    if (x->d.teacher.temperature == 0.0) x->d.teacher.temperature = 1.0;
    x->side[XD_ULD_STUDENT] = &x->d.student;
    x->side[XD_ULD_TEACHER] = &x->d.teacher;
    for (int64_t i = 0; i < x->d.chunk_count; i++) x->chunks += xdi_uld_two_sided(&x->d.chunks[i]);
}

XD_API xd_result xd_uld_loss(xd_ctx *ctx, const xd_uld_desc *desc, xd_uld_values *out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    XDI_GIVEN_LIST(ctx, desc->chunks, desc->chunk_count);
    xd_arena planning = xd_arena_over(NULL, 0);
    xdi_uld x;
    xdi_uld_open(ctx, desc, &x);
    XD_TRY(xdi_uld_check(ctx, &x.d));
    XD_REQUIRE(ctx, xdi_uld_layout_lists(&x, &x.here, &planning), XD_ERROR_MEMORY, "the lists would not fit");
    void *memory = xdi_scratch_take(ctx, planning.peak);
    XD_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for lists of %zu bytes", planning.peak);
    xd_arena arena = xd_arena_over(memory, planning.peak);
    xdi_uld_layout_lists(&x, &x.here, &arena);
    const xd_result result = xdi_uld_with_lists(&x, planning.peak, out);
    xdi_scratch_give(ctx, memory);
    return result;
}
