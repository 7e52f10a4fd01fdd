/* Losses against references in long double, on every CPU level: rows far from zero, nearly equal rows and rows whose
 * gradient nearly vanishes; and what must be exactly zero. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "vocab_calls.h"
#include "xd_test.h"
#include "xd_test_cpu.h"

enum { COLUMNS = 3001, KINDS = 9 };

static const char *const kind_names[KINDS] = { "far apart", "far from zero", "of two values",
                                               "wide",      "ordinary",      "unlike",
                                               "close",     "few at 80",     "two at 80" };

static double uniform(uint64_t *state) { /* in (-1, 1) */
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)(*state >> 11) / 4503599627370496.0 - 1.0;
}

/* A row of the student and one of the teacher, as their dtype stores them. */
typedef struct pair {
    xd_dtype dtype;
    float x[COLUMNS], y[COLUMNS];
    uint16_t narrow_x[COLUMNS], narrow_y[COLUMNS];
} pair;

static void pick(int kind, int i, uint64_t *state, double *x, double *y) {
    const double u = uniform(state), v = uniform(state), w = uniform(state);
    switch (kind) {
    case 0: *x = 1e4 + 3 * u, *y = -1e4 + 3 * v; break;
    case 1: *x = 1e4 + 3 * u, *y = 1e4 + 3 * v; break;
    case 2: *x = u > 0 ? 80 : -80, *y = v > 0 ? 80 : -80; break;
    case 3: *x = 40 * u, *y = 40 * v; break;
    case 4: *x = 5 * u, *y = *x + 3 * v; break;
    case 5: *x = 4e4 + 2 * u, *y = -100 + 30 * v; break;
    case 6: *x = 5 * u, *y = *x + 1e-4 * v; break;
    case 7: /* the teacher's logits at the student's ids are far below its largest, and nearly equal */
        *x = i % 1000 == 7 ? 80 : -80;
        *y = i % 1000 == 7 ? -80 + 1e-3 * w : i % 500 == 3 ? 80 : 0;
        break;
    default: *x = i < 2 ? 80 : -80, *y = i < 2 ? -80 : 80; break;
    }
}

static void fill(pair *p, int kind, xd_dtype dtype) {
    uint64_t state = (uint64_t)kind + 1;
    p->dtype = dtype;
    for (int i = 0; i < COLUMNS; i++) {
        double x, y;
        pick(kind, i, &state, &x, &y);
        p->x[i] = (float)x;
        p->y[i] = (float)y;
        p->narrow_x[i] = xd_bf16_from_f32(p->x[i]);
        p->narrow_y[i] = xd_bf16_from_f32(p->y[i]);
        if (dtype != XD_DTYPE_BF16) continue;
        p->x[i] = xd_f32_from_bf16(p->narrow_x[i]);
        p->y[i] = xd_f32_from_bf16(p->narrow_y[i]);
    }
}

/* ---- the reference ---- */

static long double log_sum(const float *x, long double temperature, long double *max) {
    long double sum = 0;
    *max = (long double)x[0];
    for (int i = 1; i < COLUMNS; i++) *max = fmaxl(*max, (long double)x[i]);
    for (int i = 0; i < COLUMNS; i++) sum += expl(((long double)x[i] - *max) / temperature);
    return logl(sum);
}

static long double term(xd_divergence divergence, long double beta, long double s, long double t,
                        long double *inner) {
    const long double p = expl(s), q = expl(t), m = logl((1 - beta) * p + beta * q);
    *inner = p > 0 ? p * (s - m) : 0;
    switch (divergence) {
    case XD_KL_FORWARD: return q > 0 ? q * (t - s) : 0;
    case XD_KL_REVERSE: return p > 0 ? p * (s - t) : 0;
    case XD_SOFT_CE: return -q * s;
    default: return (1 - beta) * *inner + (q > 0 ? beta * q * (t - m) : 0);
    }
}

static long double slope(xd_divergence divergence, long double beta, long double s, long double t,
                         long double loss, long double mean) {
    const long double p = expl(s), q = expl(t), m = logl((1 - beta) * p + beta * q);
    if (divergence == XD_KL_REVERSE) return p * (s - t - loss);
    if (divergence == XD_JSD) return p > 0 ? (1 - beta) * p * (s - m - mean) : 0;
    return p - q;
}

/* The loss of the row without tau^2; gradient [COLUMNS]. */
static double expected(const pair *p, const xd_loss_desc *d, double *gradient) {
    const long double tau = (long double)d->temperature, beta = (long double)d->beta;
    long double x_max, y_max, inner, loss = 0, mean = 0;
    const long double x_log = log_sum(p->x, tau, &x_max), y_log = log_sum(p->y, tau, &y_max);
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < COLUMNS; i++) {
            const long double s = ((long double)p->x[i] - x_max) / tau - x_log;
            const long double t = ((long double)p->y[i] - y_max) / tau - y_log;
            if (pass) {
                gradient[i] = (double)(slope(d->divergence, beta, s, t, loss, mean) / tau);
                continue;
            }
            loss += term(d->divergence, beta, s, t, &inner);
            mean += inner;
        }
    return (double)loss;
}

/* ---- the library ---- */

static xd_ctx *open_at(int level, xd_reduction reduction) {
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    memset(&desc, 0, sizeof desc);
    desc.cpu = (xd_cpu_level)level;
    desc.reduction = reduction;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    return ctx;
}

static xd_loss_desc desc_of(pair *p, xd_vocab *vocab, int64_t columns, xd_rows gradient) {
    const bool narrow = p->dtype == XD_DTYPE_BF16;
    xd_loss_desc d;
    memset(&d, 0, sizeof d);
    d.student = xd_rows_of(narrow ? (void *)p->narrow_x : (void *)p->x, p->dtype, 1, columns);
    d.teacher = xd_rows_of(narrow ? (void *)p->narrow_y : (void *)p->y, p->dtype, 1, columns);
    d.vocab = vocab;
    d.soft_weight = 1.0;
    d.temperature = 1.0;
    d.temperature_factor = XD_TEMPERATURE_FACTOR_ONE;
    d.beta = 0.3;
    d.common.gradient = gradient;
    return d;
}

static void compare(pair *p, int kind, xd_divergence divergence, double temperature) {
    static double truth[COLUMNS];
    static float gradient[COLUMNS];
    double most = 0.0, value = 0.0;
    XD_TEST_LEVELS(level, XD_CPU_PLAIN) {
        const long before = xd_test_failures;
        xd_ctx *ctx = open_at(level, XD_REDUCTION_DETERMINISTIC);
        xd_vocab *vocab = NULL;
        xd_loss_values out;
        double worst = 0.0;
        CHECK_EQ_INT(vocab_even(ctx, NULL, COLUMNS, &vocab), XD_OK);
        xd_loss_desc d = desc_of(p, vocab, COLUMNS, xd_rows_of(gradient, XD_DTYPE_F32, 1, COLUMNS));
        d.divergence = divergence;
        d.temperature = temperature;
        if (level == (int)XD_CPU_PLAIN) value = expected(p, &d, truth);
        for (int i = 0; i < COLUMNS; i++) most = fmax(most, fabs(truth[i]));
        CHECK_EQ_INT(xd_loss(ctx, &d, &out), XD_OK);
        CHECK_NEAR(out.loss, value, 1e-6 * fmax(1.0, fabs(value)));
        for (int i = 0; i < COLUMNS; i++) worst = fmax(worst, fabs((double)gradient[i] - truth[i]));
        CHECK_NEAR(worst, 0.0, 2e-6 * most + 2e-8);
        if (xd_test_failures > before)
            printf("  level %s, %s, divergence %d, temperature %g, rows %s, largest gradient %g\n",
                   xd_cpu_level_name((xd_cpu_level)level), xd_dtype_name(p->dtype), (int)divergence,
                   temperature, kind_names[kind], most);
        xd_vocab_destroy(vocab);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(divergences_are_within_their_bounds_wherever_the_logits_are) {
    static pair p;
    for (int kind = 0; kind < KINDS; kind++)
        for (int narrow = 0; narrow < 2; narrow++) {
            fill(&p, kind, narrow ? XD_DTYPE_BF16 : XD_DTYPE_F32);
            for (int divergence = 0; divergence <= (int)XD_SOFT_CE; divergence++)
                for (int warm = 0; warm < 2; warm++)
                    compare(&p, kind, (xd_divergence)divergence, warm ? 2.5 : 1.0);
        }
}

/* ---- exact zeros ---- */

/* What all ranks see. */
typedef struct scene {
    pair *p;
    xd_divergence divergence;
    int64_t columns;
} scene;

/* Value and gradient are 0, to the bit, on every rank. */
static xd_result expect_zero(xd_comm *world, void *argument) {
    const scene *s = (const scene *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_vocab *vocab = NULL;
    xd_loss_values out;
    float gradient[COLUMNS];
    XD_TRY(vocab_even(ctx, world, s->columns, &vocab));
    const xd_vocab_info part = xd_vocab_describe(vocab);
    const int64_t own = part.end - part.begin, size = (int64_t)xd_dtype_size(s->p->dtype);
    xd_loss_desc d = desc_of(s->p, vocab, own, xd_rows_of(gradient, XD_DTYPE_F32, 1, own));
    d.divergence = s->divergence;
    d.student.data = (char *)d.student.data + part.begin * size;
    d.teacher.data = (char *)d.teacher.data + part.begin * size;
    const xd_result result = xd_loss(ctx, &d, &out);
    CHECK_EQ_INT(result, XD_OK);
    CHECK(out.loss == 0.0);
    for (int64_t i = 0; i < own; i++) CHECK(gradient[i] == 0.0f);
    xd_vocab_destroy(vocab);
    return result;
}

/* Every divergence, mode, level and number of ranks. */
static void all_zero(scene *s) {
    for (int ranks = 1; ranks <= 3; ranks += 2)
        for (int mode = 0; mode < 2; mode++)
            for (int divergence = 0; divergence <= (int)XD_JSD; divergence++)
                XD_TEST_LEVELS(level, XD_CPU_PLAIN) {
                    const long before = xd_test_failures;
                    xd_ctx_desc desc;
                    memset(&desc, 0, sizeof desc);
                    desc.cpu = (xd_cpu_level)level;
                    desc.reduction = mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC;
                    s->divergence = (xd_divergence)divergence;
                    CHECK_EQ_INT(xd_run_threads(ranks, &desc, expect_zero, s, NULL), XD_OK);
                    if (xd_test_failures > before)
                        printf("  level %s, %s, divergence %d, %d ranks, mode %d, %lld columns\n",
                               xd_cpu_level_name((xd_cpu_level)level), xd_dtype_name(s->p->dtype), divergence,
                               ranks, mode, (long long)s->columns);
                }
}

XD_TEST(the_divergence_of_equal_rows_is_exactly_0) {
    static const int kinds[3] = { 3, 4, 0 };
    static const int64_t columns[3] = { COLUMNS, 70, 7 };
    static pair p;
    for (int i = 0; i < 3; i++)
        for (int narrow = 0; narrow < 2; narrow++) {
            scene s = { &p, XD_KL_FORWARD, columns[i] };
            fill(&p, kinds[i], narrow ? XD_DTYPE_BF16 : XD_DTYPE_F32);
            memcpy(p.y, p.x, sizeof p.y);
            memcpy(p.narrow_y, p.narrow_x, sizeof p.narrow_y);
            all_zero(&s);
        }
}

/* A vocabulary of one column, and one where all others are masked. */
XD_TEST(the_divergence_of_one_class_is_exactly_0) {
    static pair p;
    for (int masked = 0; masked < 2; masked++)
        for (int narrow = 0; narrow < 2; narrow++) {
            scene s = { &p, XD_KL_FORWARD, masked ? 70 : 1 };
            fill(&p, 4, narrow ? XD_DTYPE_BF16 : XD_DTYPE_F32);
            for (int i = 0; masked && i < COLUMNS; i++) {
                if (i == 41) continue;
                p.x[i] = p.y[i] = -INFINITY;
                p.narrow_x[i] = p.narrow_y[i] = xd_bf16_from_f32(-INFINITY);
            }
            all_zero(&s);
        }
}

XD_TEST(the_cross_entropy_of_one_class_is_exactly_0) {
    static const float logit = 3.7f;
    static const int64_t label = 0;
    XD_TEST_LEVELS(level, XD_CPU_PLAIN) {
        xd_ctx *ctx = open_at(level, XD_REDUCTION_DETERMINISTIC);
        xd_vocab *vocab = NULL;
        xd_loss_values out;
        xd_loss_desc d;
        memset(&d, 0, sizeof d);
        CHECK_EQ_INT(vocab_even(ctx, NULL, 1, &vocab), XD_OK);
        d.student = xd_rows_of((void *)(uintptr_t)&logit, XD_DTYPE_F32, 1, 1);
        d.vocab = vocab;
        d.hard_weight = 1.0;
        d.common.labels = xd_ids_of(&label, XD_DTYPE_I64);
        CHECK_EQ_INT(xd_loss(ctx, &d, &out), XD_OK);
        CHECK(out.loss == 0.0);
        xd_vocab_destroy(vocab);
        xd_ctx_destroy(ctx);
    }
}

/* ---- a tail from shipped values ---- */

enum { SHIPPED = 8, WIDE = 500 };

/* The forward KL of the entries and the tail; `values` the teacher's log-probabilities, at the first ids. */
static double shipped(const float *student, const float *values) {
    int64_t ids[SHIPPED];
    xd_ctx *ctx = open_at((int)XD_CPU_PLAIN, XD_REDUCTION_DETERMINISTIC);
    xd_vocab *vocab = NULL;
    xd_loss_values out;
    xd_topk_desc d;
    memset(&d, 0, sizeof d);
    for (int i = 0; i < SHIPPED; i++) ids[i] = i;
    CHECK_EQ_INT(vocab_even(ctx, NULL, WIDE, &vocab), XD_OK);
    d.student = xd_rows_of((void *)(uintptr_t)student, XD_DTYPE_F32, 1, WIDE);
    d.vocab = vocab;
    d.k = SHIPPED;
    d.ids = xd_ids_of(ids, XD_DTYPE_I64);
    d.values = values;
    d.mode = XD_TOPK_TAIL;
    CHECK_EQ_INT(xd_topk_kl_loss(ctx, &d, &out), XD_OK);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
    return out.loss;
}

XD_TEST(a_tail_from_values_shipped_as_f32_errs_by_no_more_than_the_header_says) {
    for (int round = 0; round < 40; round++) {
        uint64_t state = 50 + (uint64_t)round;
        float student[WIDE], values[SHIPPED];
        double t[SHIPPED], s[SHIPPED], sum = 0, all = 0, inside = 0, loss = 0, error = 0, read = 0;
        const double tail = pow(10.0, -1.0 - 0.14 * round); /* down to 3e-7 */
        for (int i = 0; i < WIDE; i++) all += exp((double)(student[i] = (float)(4.0 * uniform(&state))));
        for (int i = 0; i < SHIPPED; i++) sum += t[i] = exp(2.0 * uniform(&state));
        for (int i = 0; i < SHIPPED; i++) {
            t[i] = log(t[i] / sum * (1.0 - tail));
            s[i] = (double)student[i] - log(all);
            values[i] = (float)t[i];
            inside += exp(s[i]);
            read += exp((double)values[i]);
            loss += exp(t[i]) * (t[i] - s[i]);
            error += ldexp(fabs(t[i]), -24) * exp(t[i]);
        }
        const double least = fmax(1e-7, fmin(tail, 1.0 - read));
        const double bound = error * (1.0 + fabs(log(least / (1.0 - inside))));
        double entries = 0.0; /* rounding of the entries themselves */
        for (int i = 0; i < SHIPPED; i++)
            entries += ldexp(fabs(t[i]), -24) * exp(t[i]) * (1.0 + fabs(t[i] - s[i]));
        loss += tail * (log(tail) - log(1.0 - inside));
        CHECK_NEAR(shipped(student, values), loss, bound + entries + 1e-12);
        CHECK(bound < 2e-6);
    }
}

XD_TEST_MAIN()
