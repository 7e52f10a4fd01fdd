/* INVARIANT mode's sums at their limits: terms that fit add up to totals of any size, and what does not fit into a sum has no
 * gradient. 0.1 seconds of processor at -O2. */

#define _POSIX_C_SOURCE 200809L /* barriers of threads */

#include "poison_xtoken.h"
#include "vocab_calls.h"

/* ---- losses over rows ---- */

enum { TOTALS_ROWS = 42, TOTALS_V = 2 };

typedef struct totals_job {
    xd_loss_values values;
    xd_status status;
    double gradient; /* of the first row at its label */
} totals_job;

/* Cross entropies of ln 2 with a weight of 4e6: each term is below 2^22, their sum above 2^25. Rows are split evenly. */
static xd_result totals_rank(xd_comm *world, void *argument) {
    totals_job *job = (totals_job *)argument;
    static const float logits[TOTALS_ROWS * TOTALS_V];
    static const int64_t labels[TOTALS_ROWS];
    float gradient[TOTALS_ROWS * TOTALS_V], weight[TOTALS_ROWS];
    const int64_t rows = TOTALS_ROWS / xd_comm_size(world);
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_vocab *vocab;
    xd_loss_desc d;
    totals_job mine;
    memset(&d, 0, sizeof d);
    memset(&mine, 0, sizeof mine);
    for (int i = 0; i < TOTALS_ROWS; i++) weight[i] = 4e6f;
    CHECK_EQ_INT(vocab_even(ctx, NULL, TOTALS_V, &vocab), XD_OK);
    d.vocab = vocab;
    d.student = xd_rows_of((void *)(uintptr_t)logits, XD_DTYPE_F32, rows, TOTALS_V);
    d.hard_weight = 1.0;
    d.common.labels = xd_ids_of(labels, XD_DTYPE_I64);
    d.common.row_weight = weight;
    d.common.denominator_value = 4e6;
    d.common.comm = world;
    d.common.status = &mine.status;
    d.common.gradient = xd_rows_of(gradient, XD_DTYPE_F32, rows, TOTALS_V);
    CHECK_EQ_INT(xd_loss(ctx, &d, &mine.values), XD_OK);
    mine.gradient = (double)gradient[0];
    if (xd_comm_rank(world) == 0) *job = mine;
    xd_vocab_destroy(vocab);
    return XD_OK;
}

XD_TEST(a_total_of_terms_that_fit_is_no_finding_on_any_number_of_ranks) {
    totals_job one, three;
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.reduction = XD_REDUCTION_INVARIANT;
    CHECK_EQ_INT(xd_run_threads(1, &desc, totals_rank, &one, NULL), XD_OK);
    CHECK_EQ_INT(xd_run_threads(3, &desc, totals_rank, &three, NULL), XD_OK);
    CHECK_EQ_INT(one.status.overflow, 0);
    CHECK_EQ_INT(three.status.overflow, 0);
    CHECK_NEAR(one.values.loss, TOTALS_ROWS * log(2.0), 1e-9);
    CHECK(memcmp(&one.values, &three.values, sizeof one.values) == 0);
    CHECK_NEAR(one.gradient, -0.5, 1e-7);
}

XD_TEST(a_total_has_the_bits_of_a_sum_in_fixed_point_and_any_size) {
    xd_total total, parts[2];
    xd_fixed sum = { 0, 0 };
    memset(&total, 0, sizeof total);
    memset(parts, 0, sizeof parts);
    for (int i = 0; i < 4000; i++) {
        const double term = ldexp(poison_noise(5, i, 0), i % 90 - 76);
        CHECK(xd_total_put(&total, term) && xd_fixed_put(&sum, term) && xd_total_put(&parts[i % 2], term));
    }
    const double value = xd_fixed_read(sum), read = xd_total_read(total);
    CHECK(memcmp(&value, &read, sizeof value) == 0);
    for (int i = 0; i < 2000; i++)
        CHECK(xd_total_put(&parts[0], 4194303.5) && xd_total_put(&total, 4194303.5));
    CHECK_NEAR(xd_total_read(total), value + 2000.0 * 4194303.5, 1e-3);
    parts[0].rest.high += parts[1].rest.high;
    parts[0].rest.low += parts[1].rest.low;
    parts[0].eights += parts[1].eights;
    CHECK(xd_total_read(parts[0]) == xd_total_read(total));
    CHECK(!xd_total_put(&total, 4194304.0) && !xd_total_put(&total, -INFINITY) && !xd_total_put(&total, NAN));
}

/* ---- losses across tokenizers ---- */

typedef struct totals_scene {
    poison_scene s;
    unsigned char *memory;
} totals_scene;

static poison_xtoken *open_scene(totals_scene *t, xd_ctx *ctx, int variant) {
    memset(t, 0, sizeof *t);
    t->memory = (unsigned char *)calloc(1, POISON_BLOCK);
    t->s.block = t->memory;
    t->s.family = &poison_family_xtoken;
    t->s.ctx = ctx;
    t->s.ranks = 1;
    t->s.variant = variant;
    CHECK(poison_xtoken_build(&t->s));
    poison_xtoken *p = (poison_xtoken *)t->s.own;
    p->desc.common.status = &p->status;
    return p;
}

static void close_scene(totals_scene *t) {
    poison_release_xtoken(&t->s);
    free(t->memory);
}

static bool row_is_zero(const xd_rows *rows, int64_t row) {
    for (int64_t c = 0; c < rows->cols; c++)
        if (((const float *)rows->data)[row * rows->stride + c] != 0.0f) return false;
    return true;
}

/* Sharp students, so that every divergence is above 1.1: with a weight of 4e6 it is above 2^22. */
static xd_xtoken_values run_heavy(poison_xtoken *p, xd_ctx *ctx, float weight) {
    float *student = (float *)p->desc.student.data, *rows = (float *)(uintptr_t)p->desc.common.row_weight;
    for (int64_t i = 0; i < p->desc.student.rows * p->desc.student.cols; i++) student[i] *= 30.0f;
    for (int r = 0; r < POISON_XS; r++) rows[r] = weight;
    ((float *)(uintptr_t)p->desc.sample_weight)[0] = weight;
    p->desc.common.labels.data = NULL;
    CHECK_EQ_INT(xd_xtoken_loss(ctx, &p->desc, &p->values), XD_OK);
    return p->values;
}

/* Sequence 0 is too heavy: its chunks or positions are findings, each with a gradient of 0; the other sequence keeps its bits. */
static void check_heavy(xd_ctx *ctx, int variant) {
    totals_scene heavy, light;
    poison_xtoken *p = open_scene(&heavy, ctx, variant), *q = open_scene(&light, ctx, variant);
    const bool same = poison_xtoken_same(&heavy.s);
    const xd_rows *gradient = &p->desc.common.gradient, *other = &q->desc.common.gradient;
    int64_t zero = 0, rows = 0;
    CHECK(isfinite(run_heavy(p, ctx, 4e6f).loss));
    run_heavy(q, ctx, 1.0f);
    CHECK_EQ_INT(q->status.not_finite, 0);
    for (int64_t r = 0; r < POISON_XS; r++) {
        if (!same && p->student_chunks[r] < 0) continue;
        CHECK(!row_is_zero(other, r));
        rows++;
        zero += row_is_zero(gradient, r);
    }
    CHECK_EQ_INT(zero, rows);
    CHECK_EQ_INT(p->status.not_finite, same ? POISON_XS : POISON_XC);
    const size_t bytes = (size_t)(POISON_XS * gradient->stride) * sizeof(float);
    CHECK(memcmp((char *)gradient->data + bytes, (char *)other->data + bytes, bytes) == 0);
    close_scene(&heavy);
    close_scene(&light);
}

XD_TEST(a_divergence_too_large_for_the_sums_has_no_gradient) {
    for (int level = (int)XD_CPU_PLAIN; level <= (int)XD_CPU_AVX512_BF16; level++) {
        xd_ctx_desc desc;
        xd_ctx *ctx;
        if (!xd_cpu_supports((xd_cpu_level)level)) continue;
        memset(&desc, 0, sizeof desc);
        desc.cpu = (xd_cpu_level)level;
        desc.reduction = XD_REDUCTION_INVARIANT;
        CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
        for (int v = 0; v < POISON_XTOKEN_VARIANTS; v++) {
            const poison_xtoken_variant *one = poison_xtoken_variants + v;
            if (one->teachers == 1 && !one->split && one->kind != XD_XTOKEN_LIKELIHOOD) check_heavy(ctx, v);
        }
        xd_ctx_destroy(ctx);
    }
}

/* Ten rows of weight 4e6 count 4e7, more than an xd_fixed holds; their cross entropies are small enough. */
XD_TEST(weights_that_add_up_to_more_than_2_to_the_25_are_counted) {
    xd_ctx_desc desc;
    xd_ctx *ctx;
    totals_scene t;
    memset(&desc, 0, sizeof desc);
    desc.reduction = XD_REDUCTION_INVARIANT;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    poison_xtoken *p = open_scene(&t, ctx, 0);
    float *student = (float *)p->desc.student.data, *rows = (float *)(uintptr_t)p->desc.common.row_weight;
    int64_t counted = 0;
    for (int64_t r = 0; r < p->desc.student.rows; r++) {
        rows[r] = 4e6f;
        for (int64_t c = 0; c < POISON_XV; c++) student[r * POISON_XV + c] = c == p->labels[r] ? 3.0f : 0.0f;
        counted += p->labels[r] >= 0;
    }
    p->desc.common.denominator_value = 0.0;
    CHECK_EQ_INT(xd_xtoken_loss(ctx, &p->desc, &p->values), XD_OK);
    CHECK_EQ_INT(p->status.not_finite, 0);
    CHECK(p->values.tokens == 4e6 * (double)counted && p->values.tokens > 33554432.0);
    CHECK(p->values.token_denominator == p->values.tokens);
    CHECK_NEAR(p->values.ce, 0.75 * log(1.0 + 12.0 * exp(-3.0)), 1e-6);
    close_scene(&t);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
