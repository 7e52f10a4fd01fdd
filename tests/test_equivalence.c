/* Every loss over every mesh of 1, 2, 3, 4, 6 and 8 ranks, vocabulary and positions cut unevenly, against one
 * rank: within 1e-6 of the largest element, and the same bits in INVARIANT mode. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "vocab_calls.h"
#include "xd_test.h"
#include "xd_test_cpu.h"

#include <stdlib.h>

enum { ROWS = 23, VOCAB = 37, K = 5, CASES = 15, PADDING = 2 };

/* What all ranks of one run see: the whole batch, and where they put their parts of the result. */
typedef struct batch {
    int cp, tp; /* ranks of the two axes */
    int which;  /* the loss */
    float student[ROWS * VOCAB], teacher[ROWS * VOCAB], values[ROWS * K], row_weight[ROWS];
    int64_t labels[ROWS], ids[ROWS * K];
    uint8_t mask[ROWS];
    float gradient[ROWS * VOCAB], row_loss[ROWS];
    double loss[8];
} batch;

static double uniform(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)(*state >> 11) / 4503599627370496.0 - 1.0;
}

static void batch_fill(batch *b) {
    uint64_t state = 11;
    memset(b, 0, sizeof *b);
    for (int i = 0; i < ROWS * VOCAB; i++) {
        b->student[i] = (float)(4.0 * uniform(&state));
        b->teacher[i] = (float)(4.0 * uniform(&state));
    }
    for (int r = 0; r < ROWS; r++) {
        b->labels[r] = r % 7 == 3 ? XD_IGNORE_INDEX : (r * 11) % VOCAB;
        b->mask[r] = r % 5 != 2;
        b->row_weight[r] = 1.0f + 0.1f * (float)r;
        for (int j = 0; j < K; j++) {
            b->ids[r * K + j] = (r * 3 + j * 8) % VOCAB;
            b->values[r * K + j] = (float)(-1.7 - 0.3 * j - 0.01 * r); /* log-probabilities of mass below 1 */
        }
    }
    b->student[1 * VOCAB] = 60.0f; /* nearly one-hot */
    b->teacher[4 * VOCAB + 9] = 70.0f;
}

/* Uneven cut: rank i of n begins at i^2 size / n^2, so the first ranks may hold nothing. */
static int64_t cut(int64_t size, int i, int n) {
    return size * i * i / ((int64_t)n * n);
}

/* This rank's part of the batch: positions [first, last) and columns [begin, end), with columns of
 * padding. */
typedef struct part {
    int64_t first, rows, begin, columns, width;
    float *student, *teacher, *gradient;
} part;

static float *copy_part(const part *p, const float *whole) {
    float *data = (float *)calloc((size_t)(p->rows * p->width) + 1, sizeof *data);
    for (int64_t i = 0; i < p->rows * p->width; i++) data[i] = 1e30f; /* padding that nobody may read */
    for (int64_t r = 0; whole && r < p->rows; r++)
        for (int64_t c = 0; c < p->columns; c++)
            data[r * p->width + c] = whole[(p->first + r) * VOCAB + p->begin + c];
    return data;
}

static xd_rows rows_of(const part *p, float *data) {
    xd_rows rows;
    rows.data = data;
    rows.dtype = XD_DTYPE_F32;
    rows.rows = p->rows;
    rows.cols = p->width;
    rows.stride = 0;
    return rows;
}

/* Cases 0 to 7: xd_loss. */
static void full_desc(const batch *b, xd_loss_desc *d) {
    static const xd_divergence kinds[8] = { XD_KL_FORWARD, XD_KL_FORWARD, XD_KL_REVERSE, XD_JSD,
                                            XD_SOFT_CE,    XD_KL_REVERSE, XD_JSD,        XD_KL_FORWARD };
    d->divergence = kinds[b->which];
    d->beta = 0.5;
    d->hard_weight = 1.0;
    d->soft_weight = b->which == 0 ? 0.0 : 1.0;
    if (b->which == 0) d->teacher.data = NULL; /* cross entropy */
    if (b->which == 1) d->label_smoothing = 0.1;
    if (b->which >= 5) {
        d->temperature = 2.0;
        d->hard_weight = 0.3;
        d->soft_weight = 0.7;
        d->beta = 0.2;
    }
}

/* Cases 8 to 14: xd_topk_kl_loss. */
static void topk_desc(const batch *b, const part *p, xd_topk_desc *d) {
    static const xd_divergence kinds[7] = { XD_KL_FORWARD, XD_KL_REVERSE, XD_JSD,       XD_KL_MIXED,
                                            XD_KL_MIXED,   XD_JSD,        XD_KL_FORWARD };
    static const xd_topk_mode modes[7] = { XD_TOPK_RENORMALISE,  XD_TOPK_TAIL, XD_TOPK_TRUNCATE, XD_TOPK_TAIL,
                                           XD_TOPK_ZERO_OUTSIDE, XD_TOPK_TAIL, XD_TOPK_TAIL };
    const int i = b->which - 8;
    d->k = K;
    d->divergence = kinds[i];
    d->mode = modes[i];
    d->beta = 0.5;
    if (i < 5) { /* shipped values; else the student's own ids and teacher logits */
        d->ids = xd_ids_of(b->ids + p->first * K, XD_DTYPE_I64);
        d->values = b->values + p->first * K;
        memset(&d->teacher, 0, sizeof d->teacher);
    } else {
        d->temperature = 1.5;
    }
}

static xd_result run_case(xd_ctx *ctx, const batch *b, const part *p, const xd_vocab *vocab, xd_comm *cp,
                          float *row_loss, xd_loss_values *values) {
    xd_status status;
    xd_loss_desc full;
    xd_topk_desc topk;
    memset(&status, 0, sizeof status);
    memset(&full, 0, sizeof full);
    memset(&topk, 0, sizeof topk);
    full.student = topk.student = rows_of(p, p->student);
    full.teacher = topk.teacher = rows_of(p, p->teacher);
    full.common.gradient = topk.common.gradient = rows_of(p, p->gradient);
    full.vocab = topk.vocab = vocab;
    full.common.labels = topk.common.labels = xd_ids_of(b->labels + p->first, XD_DTYPE_I64);
    full.common.mask = topk.common.mask = b->mask + p->first;
    full.common.row_weight = topk.common.row_weight = b->row_weight + p->first;
    full.common.row_loss = topk.common.row_loss = row_loss;
    full.common.comm = topk.common.comm = cp;
    full.common.status = topk.common.status = &status;
    if (b->which < 8)
        full_desc(b, &full);
    else
        topk_desc(b, p, &topk);
    const xd_result result = b->which < 8 ? xd_loss(ctx, &full, values) : xd_topk_kl_loss(ctx, &topk, values);
    CHECK(xd_status_check(ctx, &status) == XD_OK);
    return result;
}

static xd_result rank_main(xd_comm *world, void *argument) {
    batch *b = (batch *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    const int rank = xd_comm_rank(world), cp_rank = rank / b->tp, tp_rank = rank % b->tp;
    xd_comm *tp = NULL, *cp = NULL;
    xd_vocab *vocab = NULL;
    xd_loss_values values = { 0.0, 0.0, 0.0, 0 };
    float row_loss[ROWS];
    part p;
    CHECK(xd_comm_split(world, cp_rank, tp_rank, &tp) == XD_OK);
    CHECK(xd_comm_split(world, tp_rank, cp_rank, &cp) == XD_OK);
    p.first = cut(ROWS, cp_rank, b->cp);
    p.rows = cut(ROWS, cp_rank + 1, b->cp) - p.first;
    p.begin = cut(VOCAB, tp_rank, b->tp);
    p.columns = cut(VOCAB, tp_rank + 1, b->tp) - p.begin;
    p.width = p.columns + PADDING;
    p.student = copy_part(&p, b->student);
    p.teacher = copy_part(&p, b->teacher);
    p.gradient = copy_part(&p, NULL);
    CHECK(vocab_of(ctx, tp, (xd_interval){ p.begin, p.begin + p.columns }, VOCAB, &vocab) == XD_OK);
    const xd_result result = run_case(ctx, b, &p, vocab, cp, row_loss, &values);
    if (tp_rank == 0)
        memcpy(b->row_loss + p.first, row_loss, (size_t)p.rows * sizeof *row_loss); /* all have it */
    b->loss[rank] = values.loss;
    for (int64_t r = 0; r < p.rows; r++)
        for (int64_t c = 0; c < p.width; c++) {
            const float g = p.gradient[r * p.width + c];
            if (c < p.columns)
                b->gradient[(p.first + r) * VOCAB + p.begin + c] = g;
            else
                CHECK(g == 0.0f);
        }
    xd_vocab_destroy(vocab);
    xd_comm_destroy(tp);
    xd_comm_destroy(cp);
    free(p.student);
    free(p.teacher);
    free(p.gradient);
    return result;
}

static void run_mesh(batch *b, int which, int cp, int tp, xd_reduction mode) {
    xd_ctx_desc desc;
    xd_error error;
    memset(&desc, 0, sizeof desc);
    desc.reduction = mode;
    desc.cpu = xd_test_cpu();
    b->which = which;
    b->cp = cp;
    b->tp = tp;
    memset(b->row_loss, 0, sizeof b->row_loss);
    const xd_result result = xd_run_threads(cp * tp, &desc, rank_main, b, &error);
    CHECK(result == XD_OK);
    if (result != XD_OK) printf("case %d cp %d tp %d: %s\n", which, cp, tp, error.message);
    for (int i = 1; i < cp * tp; i++) CHECK(memcmp(&b->loss[i], &b->loss[0], sizeof b->loss[0]) == 0);
}

static void compare(const batch *one, const batch *many, bool bits) {
    double most = 0.0;
    for (int i = 0; i < ROWS * VOCAB; i++) most = fmax(most, fabs((double)one->gradient[i]));
    for (int i = 0; i < ROWS * VOCAB; i++)
        CHECK_NEAR(many->gradient[i], one->gradient[i], bits ? 0 : 1e-6 * most);
    for (int r = 0; r < ROWS; r++) {
        const double expected = (double)one->row_loss[r];
        CHECK_NEAR(many->row_loss[r], expected, bits ? 0 : 1e-6 * fabs(expected) + 1e-12);
    }
    CHECK_NEAR(many->loss[0], one->loss[0], bits ? 0 : 1e-6 * fabs(one->loss[0]));
    if (!bits) return;
    CHECK(memcmp(one->gradient, many->gradient, sizeof one->gradient) == 0);
    CHECK(memcmp(one->row_loss, many->row_loss, sizeof one->row_loss) == 0);
}

static void all_meshes(xd_reduction mode) {
    static const int worlds[6] = { 1, 2, 3, 4, 6, 8 };
    batch *one = (batch *)malloc(sizeof *one), *many = (batch *)malloc(sizeof *many);
    for (int which = 0; which < CASES; which++) {
        batch_fill(one);
        run_mesh(one, which, 1, 1, mode);
        CHECK(one->loss[0] != 0.0);
        for (int w = 1; w < 6; w++)
            for (int tp = 1; tp <= worlds[w]; tp++) {
                if (worlds[w] % tp != 0) continue;
                batch_fill(many);
                run_mesh(many, which, worlds[w] / tp, tp, mode);
                compare(one, many, mode == XD_REDUCTION_INVARIANT);
            }
    }
    free(one);
    free(many);
}

XD_TEST(every_loss_on_every_mesh_agrees_with_one_rank) {
    all_meshes(XD_REDUCTION_DETERMINISTIC);
}

XD_TEST(every_loss_on_every_mesh_has_the_bits_of_one_rank_in_invariant_mode) {
    all_meshes(XD_REDUCTION_INVARIANT);
}

/* One rank passes something wrong: nobody hangs, nobody succeeds. */
static xd_result one_bad_rank(xd_comm *world, void *argument) {
    batch *b = (batch *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    const int rank = xd_comm_rank(world);
    xd_vocab *vocab = NULL;
    xd_loss_values values = { 7.0, 7.0, 7.0, 7 };
    xd_loss_desc d;
    part p;
    CHECK(vocab_even(ctx, world, VOCAB, &vocab) == XD_OK);
    const xd_vocab_info info = xd_vocab_describe(vocab);
    p.first = 0;
    p.rows = ROWS;
    p.begin = info.begin;
    p.width = p.columns = info.end - info.begin;
    p.student = copy_part(&p, b->student);
    memset(&d, 0, sizeof d);
    d.student = rows_of(&p, p.student);
    d.common.labels = xd_ids_of(b->labels, XD_DTYPE_I64);
    d.vocab = vocab;
    d.hard_weight = 1.0;
    if (rank == 1) d.label_smoothing = 3.0;
    CHECK(xd_loss(ctx, &d, &values) != XD_OK);
    CHECK(values.loss == 7.0);
    d.label_smoothing = 0.0;
    if (rank == 0) p.student[0] = NAN; /* a data error: known to all ranks of the vocabulary */
    xd_status status;
    memset(&status, 0, sizeof status);
    d.common.status = &status;
    CHECK(xd_loss(ctx, &d, &values) == XD_OK);
    CHECK_EQ_INT(status.not_finite, 1);
    free(p.student);
    xd_vocab_destroy(vocab);
    CHECK(vocab_of(ctx, world, (xd_interval){ rank * 10, rank * 10 + 11 }, 31, &vocab) == XD_ERROR_SHAPE);
    CHECK(strstr(xd_last_error(ctx)->message, "begins at column 10 but the shards before it end at 11") !=
          NULL);
    CHECK(vocab_of(ctx, world, (xd_interval){ rank * 12, rank * 12 + 11 }, 35, &vocab) == XD_ERROR_SHAPE);
    CHECK(strstr(xd_last_error(ctx)->message, "columns 11 to 12 are in no shard") != NULL);
    return XD_OK;
}

XD_TEST(an_error_on_one_rank_is_an_error_on_all) {
    batch *b = (batch *)malloc(sizeof *b);
    batch_fill(b);
    CHECK(xd_run_threads(3, NULL, one_bad_rank, b, NULL) == XD_OK);
    free(b);
}

XD_TEST_MAIN()
