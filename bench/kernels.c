/* Losses, optimizer, average, norm and checksum on one core, each compared with a naive reference or with its default mode.
 *
 *     make bench-all  or      build/bench/kernels [-J FILE]
 *
 * The naive losses are written as a framework executes them eagerly: whole log-softmax matrices in f32, then the loss,
 * then the gradient. The naive others are the textbook loop. The compiler may vectorize both. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "bench.h"
#include "gradient.h"
#include "units.h"

enum { ROWS = 8, VOCABULARY = 128256, LOGITS = ROWS * VOCABULARY, K = 64, ELEMENTS = 1 << 23 };

static bench_machine machine;
static double exponentials, logarithms; /* per second, by the loops of the best level on data in the cache */
static FILE *json;
static int wrong;

static void *allocate(size_t bytes) {
    void *memory = malloc(bytes);
    if (!memory) exit(2);
    memset(memory, 0, bytes); /* touches the pages before anything is timed */
    return memory;
}

static void require(xd_ctx *ctx, xd_result result) {
    if (result == XD_OK) return;
    fprintf(stderr, "%s: %s\n", xd_result_name(result), xd_last_error(ctx)->message);
    exit(2);
}

/* A number in [-1, 1) that looks random; the same on every run. */
static float noise(uint64_t i) {
    uint64_t x = (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
    x ^= x >> 29;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    return (float)(int32_t)(x >> 32) * (1.0f / 2147483648.0f);
}

static xd_ctx *context(xd_reduction reduction) {
    const xd_ctx_desc desc = { .reduction = reduction };
    xd_ctx *ctx = NULL;
    require(ctx, xd_ctx_create(&desc, &ctx));
    return ctx;
}

static void report(const bench_row *row, const bench_arm *ours, const bench_arm *reference) {
    if (!bench_run(json, &machine, row, ours, reference)) wrong++;
}

/* ---- losses ---- */

typedef enum loss_kind { CROSS_ENTROPY, KL, JSD, TOPK } loss_kind;

typedef struct loss_case {
    loss_kind kind;
    xd_dtype dtype;
    double temperature;
    xd_ctx *ctx;
    xd_vocab *vocab;
    void *student, *teacher, *gradient; /* [ROWS, VOCABULARY] of dtype */
    void *naive_gradient;
    float *log_student, *log_teacher; /* [ROWS, VOCABULARY] of the naive loss */
    int64_t label[ROWS], ids[ROWS * K];
    float values[ROWS * K]; /* teacher log-probabilities at ids */
    void *workspace;
    size_t workspace_bytes;
    double loss, naive_loss;
} loss_case;

static void run_loss(void *state) {
    loss_case *c = (loss_case *)state;
    const xd_rows student = { c->student, c->dtype, ROWS, VOCABULARY, 0 };
    const xd_rows teacher = { c->teacher, c->dtype, ROWS, VOCABULARY, 0 };
    const xd_rows gradient = { c->gradient, c->dtype, ROWS, VOCABULARY, 0 };
    xd_loss_values values;
    if (c->kind == TOPK) {
        const xd_topk_desc desc = { .student = student,
                                    .vocab = c->vocab,
                                    .k = K,
                                    .ids.data = c->ids,
                                    .values = c->values,
                                    .mode = XD_TOPK_TAIL,
                                    .common.gradient = gradient,
                                    .common.denominator_value = ROWS };
        require(c->ctx, xd_topk_kl_loss(c->ctx, &desc, &values));
    } else {
        xd_loss_desc desc = { .student = student,
                              .vocab = c->vocab,
                              .common.gradient = gradient,
                              .common.denominator_value = ROWS,
                              .temperature = c->temperature };
        desc.hard_weight = c->kind == CROSS_ENTROPY ? 1.0 : 0.0;
        desc.soft_weight = 1.0 - desc.hard_weight;
        desc.beta = 0.5;
        if (c->kind == CROSS_ENTROPY)
            desc.common.labels = xd_ids_of(c->label, XD_DTYPE_I64);
        else
            desc.teacher = teacher;
        if (c->kind == JSD) desc.divergence = XD_JSD;
        if (!c->workspace) {
            xd_planned planned;
            require(c->ctx, xd_plan_begin(c->ctx, NULL));
            require(c->ctx, xd_loss(c->ctx, &desc, &values));
            require(c->ctx, xd_plan_end(c->ctx, &planned));
            c->workspace_bytes = planned.workspace;
            c->workspace = allocate(c->workspace_bytes);
        }
        desc.common.workspace = c->workspace;
        desc.common.workspace_bytes = c->workspace_bytes;
        require(c->ctx, xd_loss(c->ctx, &desc, &values));
    }
    c->loss = values.loss;
}

static void naive_log_softmax(const void *logits, xd_dtype dtype, float scale, float *out) {
    for (int64_t r = 0; r < ROWS; r++) {
        float *row = out + r * VOCABULARY, max = -INFINITY;
        for (int64_t v = 0; v < VOCABULARY; v++) {
            const int64_t i = r * VOCABULARY + v;
            row[v] = scale * (dtype == XD_DTYPE_F32 ? ((const float *)logits)[i]
                                                    : xd_f32_from_bf16(((const uint16_t *)logits)[i]));
            max = row[v] > max ? row[v] : max;
        }
        double sum = 0.0;
        for (int64_t v = 0; v < VOCABULARY; v++) sum += (double)expf(row[v] - max);
        const float log_sum = max + (float)log(sum);
        for (int64_t v = 0; v < VOCABULARY; v++) row[v] -= log_sum;
    }
}

static void naive_store(loss_case *c, int64_t i, float gradient) {
    if (c->dtype == XD_DTYPE_F32)
        ((float *)c->naive_gradient)[i] = gradient;
    else
        ((uint16_t *)c->naive_gradient)[i] = xd_bf16_from_f32(gradient);
}

static double naive_cross_entropy_row(loss_case *c, int64_t r) {
    const float *s = c->log_student + r * VOCABULARY;
    for (int64_t v = 0; v < VOCABULARY; v++)
        naive_store(c, r * VOCABULARY + v, (expf(s[v]) - (v == c->label[r] ? 1.0f : 0.0f)) / ROWS);
    return -(double)s[c->label[r]];
}

static double naive_kl_row(loss_case *c, int64_t r) {
    const float *s = c->log_student + r * VOCABULARY, *t = c->log_teacher + r * VOCABULARY;
    const float tau = (float)c->temperature;
    double sum = 0.0;
    for (int64_t v = 0; v < VOCABULARY; v++) sum += (double)(expf(t[v]) * (t[v] - s[v]));
    for (int64_t v = 0; v < VOCABULARY; v++)
        naive_store(c, r * VOCABULARY + v, tau * (expf(s[v]) - expf(t[v])) / ROWS);
    return sum * c->temperature * c->temperature;
}

static double naive_jsd_row(loss_case *c, int64_t r) {
    const float *s = c->log_student + r * VOCABULARY, *t = c->log_teacher + r * VOCABULARY;
    double teacher = 0.0, student = 0.0;
    for (int64_t v = 0; v < VOCABULARY; v++) {
        const float p = expf(s[v]), q = expf(t[v]), m = logf(0.5f * p + 0.5f * q);
        teacher += (double)(q * (t[v] - m));
        student += (double)(p * (s[v] - m));
    }
    for (int64_t v = 0; v < VOCABULARY; v++) {
        const float p = expf(s[v]), m = logf(0.5f * p + 0.5f * expf(t[v]));
        naive_store(c, r * VOCABULARY + v, 0.5f * p * (s[v] - m - (float)student) / ROWS);
    }
    return 0.5 * teacher + 0.5 * student;
}

/* The ids, and one more entry for everything else. */
static double naive_topk_row(loss_case *c, int64_t r) {
    const float *s = c->log_student + r * VOCABULARY;
    const int64_t *ids = c->ids + r * K;
    const float *t = c->values + r * K;
    double p = 0.0, q = 0.0, sum = 0.0;
    for (int j = 0; j < K; j++) {
        p += exp((double)s[ids[j]]);
        q += exp((double)t[j]);
        sum += exp((double)t[j]) * ((double)t[j] - (double)s[ids[j]]);
    }
    const float outside = (float)(1.0 - (1.0 - q) / (1.0 - p));
    for (int64_t v = 0; v < VOCABULARY; v++) naive_store(c, r * VOCABULARY + v, expf(s[v]) * outside / ROWS);
    for (int j = 0; j < K; j++)
        naive_store(c, r * VOCABULARY + ids[j], (expf(s[ids[j]]) - expf(t[j])) / ROWS);
    return sum + (1.0 - q) * log((1.0 - q) / (1.0 - p));
}

static void run_naive_loss(void *state) {
    static double (*const rows[])(loss_case *, int64_t) = { naive_cross_entropy_row, naive_kl_row,
                                                            naive_jsd_row, naive_topk_row };
    loss_case *c = (loss_case *)state;
    const float scale = (float)(1.0 / c->temperature);
    naive_log_softmax(c->student, c->dtype, scale, c->log_student);
    if (c->kind == KL || c->kind == JSD) naive_log_softmax(c->teacher, c->dtype, scale, c->log_teacher);
    c->naive_loss = 0.0;
    for (int64_t r = 0; r < ROWS; r++) c->naive_loss += rows[c->kind](c, r) / ROWS;
}

static void open_loss(loss_case *c, loss_kind kind, xd_dtype dtype, double temperature,
                      xd_reduction reduction) {
    const size_t bytes = LOGITS * xd_dtype_size(dtype);
    memset(c, 0, sizeof *c);
    c->kind = kind;
    c->dtype = dtype;
    c->temperature = temperature;
    c->ctx = context(reduction);
    require(c->ctx, xd_vocab_create(c->ctx, &(xd_vocab_desc){ .size = VOCABULARY }, &c->vocab));
    c->student = allocate(bytes);
    c->teacher = allocate(bytes);
    c->gradient = allocate(bytes);
    c->naive_gradient = allocate(bytes);
    c->log_student = (float *)allocate(LOGITS * sizeof(float));
    c->log_teacher = (float *)allocate(LOGITS * sizeof(float));
    for (int64_t i = 0; i < LOGITS; i++) {
        const double x = 8.0 * (double)noise((uint64_t)i);
        xd_store_f64(c->student, dtype, i, x);
        xd_store_f64(c->teacher, dtype, i, x + 2.0 * (double)noise((uint64_t)(i + LOGITS)));
    }
    for (int64_t r = 0; r < ROWS; r++) c->label[r] = (r * 7919) % VOCABULARY;
    if (kind != TOPK) return;
    float values[ROWS * K];
    const xd_rows teacher = { c->teacher, dtype, ROWS, VOCABULARY, 0 };
    require(c->ctx, xd_vocab_topk(c->ctx, c->vocab, teacher, K, values, c->ids));
    naive_log_softmax(c->teacher, dtype, 1.0f, c->log_teacher);
    for (int64_t i = 0; i < ROWS * K; i++) c->values[i] = c->log_teacher[i / K * VOCABULARY + c->ids[i]];
}

static void close_loss(loss_case *c) {
    void *const all[] = { c->student,     c->teacher,     c->gradient, c->naive_gradient,
                          c->log_student, c->log_teacher, c->workspace };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    xd_vocab_destroy(c->vocab);
    xd_ctx_destroy(c->ctx);
}

/* Value and gradient together: the larger of their errors. The gradient at a label, or at the k ids, is compared apart. */
static double loss_error(const loss_case *c, const void *expected, double expected_loss) {
    const int64_t *apart = c->kind == CROSS_ENTROPY ? c->label : c->kind == TOPK ? c->ids : NULL;
    const int64_t k = c->kind == CROSS_ENTROPY ? 1 : c->kind == TOPK ? K : 0;
    return bench_larger(bench_gradient_error(c->gradient, expected, c->dtype, ROWS, VOCABULARY, apart, k),
                        fabs(c->loss - expected_loss) / fabs(expected_loss));
}

/* Maximum rate per second: windows of a fraction of a millisecond over a fifth of a second. */
static double measure_units(bool are_logarithms) {
    static float x[XDI_TILE];
    const xdi_simd_array array = { x, false };
    double (*const units)(xdi_simd_array) = bench_units_of(xd_cpu_best(), are_logarithms);
    double best = INFINITY, sum = 0.0;
    const double start = bench_now();
    for (uint64_t i = 0; i < XDI_TILE; i++) x[i] = 2.0f + noise(i);
    if (!units) return 0.0;
    while (bench_now() - start < 0.2) {
        const double begin = bench_now();
        for (int i = 0; i < 200; i++) sum += units(array);
        best = fmin(best, bench_now() - begin);
    }
    return sum > 0.0 ? 200.0 * XDI_TILE / best : 0.0;
}

/* Minimal bytes: each matrix of logits read once, the gradient written once. If the exponentials and logarithms of
 * all sweeps take longer, they are the lower bound of the time. */
static bench_row loss_row(loss_kind kind, const char *variant, xd_dtype dtype) {
    static const char *const names[] = { "ce_fwd_bwd", "kl_fwd_bwd", "jsd_fwd_bwd", "kl_topk_fwd_bwd" };
    static char shape[64];
    static const int powers[] = { 2, 4, 7, 2 }, logs[] = { 0, 0, 2, 0 };
    static const double targets[] = { 0.68, 0.80, 0.65, 0.68 };
    const int units = kind == KL || kind == JSD ? 3 : 2;
    const double bytes = (double)units * LOGITS * (double)xd_dtype_size(dtype);
    const double limit = bytes / (LOGITS * (powers[kind] / exponentials + logs[kind] / logarithms));
    snprintf(shape, sizeof shape, "\"N\":%d,\"V\":%d,\"K\":%d", ROWS, VOCABULARY, kind == TOPK ? K : 0);
    const bench_row row = { names[kind],
                            variant,
                            shape,
                            dtype == XD_DTYPE_F32 ? "f32" : "bf16",
                            bytes,
                            fmin(limit, machine.copy),
                            limit < machine.copy ? "exp" : "copy",
                            0.0,
                            dtype == XD_DTYPE_F32 ? 1e-5 : 4e-3,
                            kind == CROSS_ENTROPY && dtype == XD_DTYPE_F32 ? 0.75 : targets[kind],
                            0.0 };
    return row;
}

static void bench_loss(loss_kind kind, const char *variant, xd_dtype dtype, double temperature) {
    loss_case c;
    bench_row row = loss_row(kind, variant, dtype);
    open_loss(&c, kind, dtype, temperature, XD_REDUCTION_DETERMINISTIC);
    const bench_arm ours = { "xdistill", &c, run_loss, NULL }, naive = { "naive", &c, run_naive_loss, NULL };
    run_loss(&c);
    run_naive_loss(&c);
    row.error = loss_error(&c, c.naive_gradient, c.naive_loss);
    row.extra_bytes = (double)c.workspace_bytes;
    report(&row, &ours, &naive);
    close_loss(&c);
}

/* ---- selection ---- */

enum { SELECT_OF = 50000, SELECT = 8192 };
#define SELECT_BYTES (4.0 * SELECT_OF + 16.0 * SELECT) /* the target is a time, not a rate */

typedef struct select_case {
    xd_ctx *ctx;
    xd_vocab *vocab;
    float logits[SELECT_OF], sorted[SELECT_OF];
    float values[SELECT];
    int64_t ids[SELECT];
} select_case;

static void run_select(void *state) {
    select_case *c = (select_case *)state;
    const xd_rows row = { c->logits, XD_DTYPE_F32, 1, SELECT_OF, 0 };
    require(c->ctx, xd_vocab_topk(c->ctx, c->vocab, row, SELECT, c->values, c->ids));
}

static int descending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

static void run_sort(void *state) {
    select_case *c = (select_case *)state;
    memcpy(c->sorted, c->logits, sizeof c->sorted);
    qsort(c->sorted, SELECT_OF, sizeof *c->sorted, descending);
}

static void bench_select(void) {
    select_case *c = (select_case *)allocate(sizeof *c);
    const bench_arm ours = { "xdistill", c, run_select, NULL }, sort = { "qsort", c, run_sort, NULL };
    bench_row row = { "select",
                      "8192 of 50000",
                      "\"N\":1,\"V\":50000,\"K\":8192",
                      "f32",
                      SELECT_BYTES,
                      SELECT_BYTES / 60e-6,
                      "60 us",
                      0.0,
                      0.0,
                      1.0,
                      0.0 };
    c->ctx = context(XD_REDUCTION_DETERMINISTIC);
    require(c->ctx, xd_vocab_create(c->ctx, &(xd_vocab_desc){ .size = SELECT_OF }, &c->vocab));
    for (uint64_t i = 0; i < SELECT_OF; i++)
        c->logits[i] = noise(i) + noise(i + SELECT_OF) + noise(i + 2 * SELECT_OF);
    run_select(c);
    run_sort(c);
    for (int i = 0; i < SELECT; i++) row.error += fabs((double)(c->values[i] - c->sorted[i]));
    report(&row, &ours, &sort);
    xd_vocab_destroy(c->vocab);
    xd_ctx_destroy(c->ctx);
    free(c);
}

/* The cost of INVARIANT mode: the reference is the default mode, so the speed-up is below 1. */
static void bench_invariant_loss(loss_kind kind) {
    loss_case invariant, plain;
    bench_row row = loss_row(kind, "invariant against default", XD_DTYPE_F32);
    open_loss(&invariant, kind, XD_DTYPE_F32, 1.0, XD_REDUCTION_INVARIANT);
    open_loss(&plain, kind, XD_DTYPE_F32, 1.0, XD_REDUCTION_DETERMINISTIC);
    const bench_arm ours = { "xdistill", &invariant, run_loss, NULL };
    const bench_arm reference = { "xdistill default", &plain, run_loss, NULL };
    run_loss(&invariant);
    run_loss(&plain);
    row.error = loss_error(&invariant, plain.gradient, plain.loss);
    row.target = 0.0; /* there is none */
    row.extra_bytes = (double)invariant.workspace_bytes;
    report(&row, &ours, &reference);
    close_loss(&plain);
    close_loss(&invariant);
}

/* ---- parameters ---- */

typedef struct param_case {
    xd_ctx *ctx;
    xd_param param;
    float *value, *gradient, *naive_value, *first, *second, *shadow;
    int64_t step;
    xd_optimizer *optimizer;
    xd_ema *ema;
    double norm, naive_norm;
} param_case;

static void open_param(param_case *c, xd_reduction reduction) {
    const size_t bytes = ELEMENTS * sizeof(float);
    memset(c, 0, sizeof *c);
    c->ctx = context(reduction);
    c->value = (float *)allocate(bytes);
    c->gradient = (float *)allocate(bytes);
    c->naive_value = (float *)allocate(bytes);
    c->first = (float *)allocate(bytes);
    c->second = (float *)allocate(bytes);
    for (uint64_t i = 0; i < ELEMENTS; i++) {
        c->value[i] = c->naive_value[i] = noise(i);
        c->gradient[i] = noise(i + ELEMENTS);
    }
    c->param.name = "weight";
    c->param.value = c->value;
    c->param.gradient = c->gradient;
    c->param.dtype = XD_DTYPE_F32;
    c->param.count = ELEMENTS;
}

static void close_param(param_case *c) {
    xd_ema_destroy(c->ema);
    xd_optimizer_destroy(c->optimizer);
    float *const all[] = { c->value, c->gradient, c->naive_value, c->first, c->second, c->shadow };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    xd_ctx_destroy(c->ctx);
}

static bench_row param_row(const char *op, const char *variant, double bytes, double ceiling,
                           const char *name, double target) {
    static char shape[32];
    snprintf(shape, sizeof shape, "\"P\":%d", ELEMENTS);
    const bench_row row = {
        op, variant, shape, "f32", bytes * ELEMENTS, ceiling, name, 0.0, 1e-6, target, 0.0
    };
    return row;
}

static void run_adamw(void *state) {
    param_case *c = (param_case *)state;
    require(c->ctx, xd_optimizer_step(c->optimizer, NULL, NULL));
}

static void run_naive_adamw(void *state) {
    param_case *c = (param_case *)state;
    const float rate = 1e-3f, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, decay = 1e-2f;
    c->step++;
    const float correction1 = (float)(1.0 - pow(0.9, (double)c->step));
    const float correction2 = (float)(1.0 - pow(0.999, (double)c->step));
    for (int64_t i = 0; i < ELEMENTS; i++) {
        const float g = c->gradient[i];
        c->first[i] = beta1 * c->first[i] + (1.0f - beta1) * g;
        c->second[i] = beta2 * c->second[i] + (1.0f - beta2) * g * g;
        const float update = c->first[i] / correction1 / (sqrtf(c->second[i] / correction2) + eps);
        c->naive_value[i] -= rate * (update + decay * c->naive_value[i]);
    }
}

static void bench_adamw(void) {
    param_case c;
    bench_row row = param_row("adamw", "", 28.0, machine.in_place, "in place", 0.94);
    open_param(&c, XD_REDUCTION_DETERMINISTIC);
    const xd_optimizer_desc desc = xd_adamw_defaults(&c.param, 1);
    require(c.ctx, xd_optimizer_create(c.ctx, &desc, &c.optimizer));
    const bench_arm ours = { "xdistill", &c, run_adamw, NULL },
                    naive = { "naive", &c, run_naive_adamw, NULL };
    run_adamw(&c);
    run_naive_adamw(&c);
    row.error = bench_distance(c.value, c.naive_value, XD_DTYPE_F32, ELEMENTS);
    report(&row, &ours, &naive);
    close_param(&c);
}

static void run_ema(void *state) {
    param_case *c = (param_case *)state;
    require(c->ctx, xd_ema_update(c->ema, XD_EMA_NEXT, NULL));
}

/* The shadow of the naive average is `first`. */
static void run_naive_ema(void *state) {
    param_case *c = (param_case *)state;
    for (int64_t i = 0; i < ELEMENTS; i++) c->first[i] = 0.999f * c->first[i] + 0.001f * c->value[i];
}

static void bench_ema(void) {
    param_case c;
    bench_row row = param_row("ema", "", 12.0, machine.in_place, "in place", 0.95);
    open_param(&c, XD_REDUCTION_DETERMINISTIC);
    xd_ema_desc desc = { .decay = 0.999, .init_from_current = true };
    desc.params = &c.param;
    desc.param_count = 1;
    require(c.ctx, xd_ema_create(c.ctx, &desc, &c.ema));
    memcpy(c.first, c.value, ELEMENTS * sizeof(float));
    memcpy(c.value, c.gradient, ELEMENTS * sizeof(float)); /* the live value moves away from its average */
    const bench_arm ours = { "xdistill", &c, run_ema, NULL }, naive = { "naive", &c, run_naive_ema, NULL };
    run_ema(&c);
    run_naive_ema(&c);
    row.error = bench_distance(xd_ema_view(c.ema, 0).shadow.value, c.first, XD_DTYPE_F32, ELEMENTS);
    report(&row, &ours, &naive);
    close_param(&c);
}

/* A format that the plain kernels average element by element: the reference is that level. */
static void bench_ema_format(const char *variant, xd_ema_desc desc, double bytes) {
    static const xd_ctx_desc plain = { .cpu = XD_CPU_PLAIN };
    param_case c, p;
    bench_row row = param_row("ema", variant, bytes, machine.in_place, "in place", 0.0);
    open_param(&c, XD_REDUCTION_DETERMINISTIC);
    p = c;
    require(c.ctx, xd_ctx_create(&plain, &p.ctx));
    desc.param_count = 1;
    desc.params = &c.param;
    require(c.ctx, xd_ema_create(c.ctx, &desc, &c.ema));
    desc.params = &p.param;
    require(p.ctx, xd_ema_create(p.ctx, &desc, &p.ema));
    memcpy(c.value, c.gradient, ELEMENTS * sizeof(float));
    const bench_arm ours = { "xdistill", &c, run_ema, NULL }, reference = { "plain", &p, run_ema, NULL };
    run_ema(&c);
    run_ema(&p);
    const xd_param shadow = xd_ema_view(c.ema, 0).shadow;
    row.error = bench_distance(shadow.value, xd_ema_view(p.ema, 0).shadow.value, shadow.dtype, ELEMENTS);
    row.error_limit = 0.0;
    report(&row, &ours, &reference);
    xd_ema_destroy(p.ema);
    xd_ctx_destroy(p.ctx);
    close_param(&c);
}

static void bench_ema_formats(void) {
    const xd_ema_desc compensated = { .decay = 0.999, .init_from_current = true, .compensated = true };
    const xd_ema_desc random = { .decay = 0.999, .init_from_current = true, .stochastic_bf16 = true };
    bench_ema_format("compensated", compensated, 16.0);
    bench_ema_format("bf16 at random", random, 8.0);
}

/* The parameter's average in the same pass; the naive one takes two, with `shadow` as the average. */
static void run_adamw_ema(void *state) {
    param_case *c = (param_case *)state;
    const xd_optimizer_step_desc desc = { .averages = &c->ema, .average_count = 1 };
    require(c->ctx, xd_optimizer_step(c->optimizer, &desc, NULL));
}

static void run_naive_adamw_ema(void *state) {
    param_case *c = (param_case *)state;
    run_naive_adamw(state);
    for (int64_t i = 0; i < ELEMENTS; i++) c->shadow[i] += 0.001f * (c->naive_value[i] - c->shadow[i]);
}

static void bench_adamw_ema(void) {
    param_case c;
    bench_row row = param_row("adamw+ema", "one pass", 36.0, machine.in_place, "in place", 0.94);
    open_param(&c, XD_REDUCTION_DETERMINISTIC);
    const xd_optimizer_desc desc = xd_adamw_defaults(&c.param, 1);
    xd_ema_desc average = { .decay = 0.999, .init_from_current = true };
    require(c.ctx, xd_optimizer_create(c.ctx, &desc, &c.optimizer));
    average.params = &c.param;
    average.param_count = 1;
    require(c.ctx, xd_ema_create(c.ctx, &average, &c.ema));
    c.shadow = (float *)allocate(ELEMENTS * sizeof(float));
    memcpy(c.shadow, c.value, ELEMENTS * sizeof(float));
    const bench_arm ours = { "xdistill", &c, run_adamw_ema, NULL },
                    naive = { "naive", &c, run_naive_adamw_ema, NULL };
    run_adamw_ema(&c);
    run_naive_adamw_ema(&c);
    row.error = bench_distance(xd_ema_view(c.ema, 0).shadow.value, c.shadow, XD_DTYPE_F32, ELEMENTS);
    report(&row, &ours, &naive);
    close_param(&c);
}

static void run_norm(void *state) {
    param_case *c = (param_case *)state;
    const xd_gradient_norm_desc desc = { .params = &c->param, .param_count = 1 };
    xd_gradient_norm norm;
    require(c->ctx, xd_gradient_norm_compute(c->ctx, NULL, &desc, &norm));
    c->norm = norm.norm;
}

static void run_naive_norm(void *state) {
    param_case *c = (param_case *)state;
    double sum = 0.0;
    for (int64_t i = 0; i < ELEMENTS; i++) sum += (double)c->gradient[i] * (double)c->gradient[i];
    c->naive_norm = sqrt(sum);
}

static void bench_norm(void) {
    param_case plain, invariant;
    bench_row row = param_row("grad_norm", "", 4.0, machine.read, "read", 0.90);
    open_param(&plain, XD_REDUCTION_DETERMINISTIC);
    open_param(&invariant, XD_REDUCTION_INVARIANT);
    const bench_arm ours = { "xdistill", &plain, run_norm, NULL },
                    naive = { "naive", &plain, run_naive_norm, NULL };
    run_norm(&plain);
    run_naive_norm(&plain);
    row.error = fabs(plain.norm - plain.naive_norm) / plain.naive_norm;
    report(&row, &ours, &naive);

    const bench_arm exact = { "xdistill", &invariant, run_norm, NULL };
    const bench_arm reference = { "xdistill default", &plain, run_norm, NULL };
    run_norm(&invariant);
    row.variant = "invariant against default";
    row.target = 0.0;
    row.error = fabs(invariant.norm - plain.norm) / plain.norm;
    report(&row, &exact, &reference);
    close_param(&invariant);
    close_param(&plain);
}

/* ---- checksum ---- */

enum { CHECKED = 1 << 26 };

typedef struct crc_case {
    xd_cpu_level level;
    unsigned char *data, *copy; /* [CHECKED] */
    uint32_t crc;
} crc_case;

static void run_crc(void *state) {
    crc_case *c = (crc_case *)state;
    c->crc = xd_crc32c_level(c->level, 0, c->data, CHECKED);
}

static void run_copy(void *state) {
    crc_case *c = (crc_case *)state;
    memcpy(c->copy, c->data, CHECKED);
}

/* Levels that differ: the processor's instruction, and tables. */
static void bench_crc(void) {
    static const xd_cpu_level levels[] = { XD_CPU_BEST, XD_CPU_PORTABLE };
    crc_case c = { .level = XD_CPU_PLAIN,
                   .data = (unsigned char *)allocate(CHECKED),
                   .copy = (unsigned char *)allocate(CHECKED) };
    for (size_t i = 0; i < CHECKED; i++) c.data[i] = (unsigned char)(i * 2654435761u >> 24);
    run_crc(&c);
    const uint32_t plain = c.crc;
    for (int i = 0; i < 2; i++) {
        bench_row row = { .op = "crc32c",
                          .shape = "\"bytes\":67108864",
                          .dtype = "u8",
                          .bytes = CHECKED,
                          .ceiling = machine.read,
                          .ceiling_name = "read" };
        const bench_arm ours = { .name = "xdistill", .state = &c, .run = run_crc };
        const bench_arm copy = { .name = "memcpy", .state = &c, .run = run_copy };
        c.level = levels[i];
        row.variant = levels[i] == XD_CPU_BEST ? "against memcpy" : "tables against memcpy";
        run_crc(&c);
        row.error = c.crc == plain ? 0.0 : 1.0;
        report(&row, &ours, &copy);
    }
    free(c.data);
    free(c.copy);
}

int main(int argc, char **argv) {
    json = bench_open_json(argc, argv);
    machine = bench_measure_machine((size_t)128 << 20);
    exponentials = measure_units(false);
    logarithms = measure_units(true);
    bench_header(&machine, "kernels, one core");
    printf("# level %s, %.1f G exponentials, %.1f G logarithms a second\n", xd_cpu_level_name(xd_cpu_best()),
           exponentials * 1e-9, logarithms * 1e-9);
    bench_loss(CROSS_ENTROPY, "", XD_DTYPE_F32, 1.0);
    bench_loss(CROSS_ENTROPY, "", XD_DTYPE_BF16, 1.0);
    bench_loss(KL, "forward", XD_DTYPE_F32, 1.0);
    bench_loss(KL, "forward, temperature 2", XD_DTYPE_BF16, 2.0);
    bench_loss(JSD, "beta 0.5", XD_DTYPE_F32, 1.0);
    bench_loss(TOPK, "64 ids and a tail", XD_DTYPE_F32, 1.0);
    bench_select();
    bench_ema();
    bench_ema_formats();
    bench_adamw();
    bench_adamw_ema();
    bench_norm();
    bench_crc();
    bench_invariant_loss(CROSS_ENTROPY);
    bench_invariant_loss(KL);
    printf("# wrong results: %d\n", wrong);
    if (json) fclose(json);
    return wrong == 0 ? 0 : 1;
}
