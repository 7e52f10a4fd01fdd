/* The library behind a handful of C calls, for bench/torch/compare.py: an operation and a context of so many threads, on
 * memory that the caller gives. Built into a shared library by `make bench-torch`. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "../ceilings.h"
#include "../units.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct shim shim;

/* An operation. */
struct shim {
    xd_ctx *ctx;
    void (*run)(shim *s);
    xd_result result;
    xd_vocab *vocab;
    xd_loss_desc loss;
    int64_t k; /* selections */
    float *top;
    int64_t *ids;
    xd_param param; /* optimizer, average, norm */
    xd_optimizer *optimizer;
    xd_ema *ema, *second; /* a second average follows the same parameter */
    int together;         /* averages that the optimizer updates in its pass */
    xd_head_loss_desc head;
    union {
        xd_vsd_desc vsd;
        xd_denoise_desc denoise;
        xd_gan_desc gan;
        xd_mix_desc mix;
    } samples; /* shim_samples.h */
    void *factors, *workspace;
    double value; /* the loss or norm */
    bool running;
    size_t allocated;            /* bytes that runs have asked for, all told */
    void *swept;                 /* what a probe sweeps: the operation's largest array of its own */
    int64_t swept_lines, window; /* of 64 bytes: all of a thread, those of one run */
    int64_t at;                  /* where it begins */
    int turn;                    /* of the ways through memory */
};

/* The library's own way, counting what is asked for while an operation runs. */
static void *shim_allocate(void *user, size_t bytes) {
    shim *s = (shim *)user;
    if (s->running) s->allocated += bytes;
    return xdi_ctx_allocate(NULL, bytes);
}

static void shim_check(const shim *s) {
    if (s->result == XD_OK) return;
    fprintf(stderr, "%s: %s\n", xd_result_name(s->result), xd_last_error(s->ctx)->message);
    exit(2);
}

static shim *shim_open(int threads, void (*run)(shim *s)) {
    shim *s = (shim *)calloc(1, sizeof *s);
    if (!s) exit(2);
    s->run = run;
    const xd_ctx_desc settings = { .allocator = { shim_allocate, xdi_ctx_release, s }, .threads = threads };
    if (xd_ctx_create(&settings, &s->ctx) != XD_OK) exit(2);
    return s;
}

void shim_run(shim *s) {
    s->running = true;
    s->run(s);
    s->running = false;
    shim_check(s);
}

void shim_close(shim *s) {
    xd_ema_destroy(s->ema);
    xd_ema_destroy(s->second);
    xd_optimizer_destroy(s->optimizer);
    xd_vocab_destroy(s->vocab);
    free(s->loss.common.workspace);
    free(s->head.workspace);
    free(s->factors);
    free(s->workspace);
    free(s->top);
    free(s->ids);
    xd_ctx_destroy(s->ctx);
    free(s);
}

static int shim_threads(const shim *s) {
    return xd_ctx_settings(s->ctx)->threads;
}

/* What probes sweep: a share of it for each thread. */
static void shim_sweeps(shim *s, void *data, int64_t bytes) {
    s->swept = data;
    s->swept_lines = bytes / 64 / shim_threads(s);
}

static void shim_whole_vocab(shim *s, int64_t cols) {
    s->result = xd_vocab_create(s->ctx, &(xd_vocab_desc){ .size = cols }, &s->vocab);
    shim_check(s);
}

/* The workspace of the call that the shim times. */
static size_t shim_planned(shim *s) {
    xd_planned planned = { { 0, 0 }, 0, 0, 0 };
    s->result = xd_plan_begin(s->ctx, NULL);
    if (s->result == XD_OK) s->run(s);
    if (s->result == XD_OK) s->result = xd_plan_end(s->ctx, &planned);
    shim_check(s);
    return planned.workspace;
}

/* ---- losses ---- */

static void shim_run_loss(shim *s) {
    xd_loss_values values = { 0 };
    s->result = xd_loss(s->ctx, &s->loss, &values);
    s->value = values.loss;
}

/* Cross entropy where there are labels, KL or the Jensen-Shannon divergence where there is a teacher; mean over rows;
 * dtype as XD_DTYPE_*. */
shim *shim_loss(int threads, int dtype, int64_t rows, int64_t cols, void *student, void *teacher,
                const int64_t *labels, void *gradient, double temperature, bool jsd) {
    shim *s = shim_open(threads, shim_run_loss);
    xd_loss_desc *d = &s->loss;
    const xd_rows matrix = { student, (xd_dtype)dtype, rows, cols, 0 };
    shim_whole_vocab(s, cols);
    d->vocab = s->vocab;
    d->student = d->common.gradient = matrix;
    d->common.gradient.data = gradient;
    shim_sweeps(s, gradient, rows * cols * (int64_t)xd_dtype_size(matrix.dtype));
    if (teacher) d->teacher = matrix;
    d->teacher.data = teacher;
    if (jsd) d->divergence = XD_JSD;
    d->beta = 0.5;
    d->hard_weight = labels ? 1.0 : 0.0;
    d->soft_weight = teacher ? 1.0 : 0.0;
    d->common.labels = xd_ids_of(labels, XD_DTYPE_I64);
    d->temperature = temperature;
    d->common.denominator_value = (double)rows;
    d->common.workspace_bytes = shim_planned(s);
    d->common.workspace = malloc(d->common.workspace_bytes);
    if (!d->common.workspace) exit(2);
    return s;
}

/* ---- selection ---- */

static void shim_run_select(shim *s) {
    s->result = xd_vocab_topk(s->ctx, s->vocab, s->loss.student, s->k, s->top, s->ids);
}

/* The k largest of every row. */
shim *shim_select(int threads, int dtype, int64_t rows, int64_t cols, void *data, int64_t k) {
    shim *s = shim_open(threads, shim_run_select);
    const xd_rows matrix = { data, (xd_dtype)dtype, rows, cols, 0 };
    shim_whole_vocab(s, cols);
    s->loss.student = matrix;
    s->k = k;
    s->top = (float *)malloc((size_t)(rows * k) * sizeof *s->top);
    s->ids = (int64_t *)malloc((size_t)(rows * k) * sizeof *s->ids);
    if (!s->top || !s->ids) exit(2);
    return s;
}

/* Ids of all rows in order. */
void shim_ids(const shim *s, int64_t *ids) {
    memcpy(ids, s->ids, (size_t)(s->loss.student.rows * s->k) * sizeof *ids);
}

/* ---- parameters ---- */

static void shim_param(shim *s, int64_t count, int dtype, void *value, int gradient_dtype, void *gradient) {
    s->param.name = "weight";
    s->param.dtype = (xd_dtype)dtype;
    s->param.gradient_dtype = (xd_dtype)gradient_dtype;
    s->param.value = value;
    s->param.gradient = gradient;
    s->param.count = count;
}

static void shim_make_ema(shim *s, double decay, xd_ema **ema) {
    xd_ema_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.decay = decay;
    desc.init_from_current = true;
    desc.params = &s->param;
    desc.param_count = 1;
    s->result = xd_ema_create(s->ctx, &desc, ema);
    shim_check(s);
}

static void shim_run_ema(shim *s) {
    s->result = xd_ema_update(s->ema, XD_EMA_NEXT, NULL);
}

/* An f32 average of count values, which begins as they are. */
shim *shim_ema(int threads, int64_t count, int dtype, void *value, double decay) {
    shim *s = shim_open(threads, shim_run_ema);
    shim_param(s, count, dtype, value, XD_DTYPE_F32, NULL);
    shim_make_ema(s, decay, &s->ema);
    const xd_param shadow = xd_ema_view(s->ema, 0).shadow;
    shim_sweeps(s, shadow.value, shadow.count * (int64_t)sizeof(float));
    return s;
}

static void shim_run_adamw(shim *s) {
    xd_ema *const averages[2] = { s->ema, s->second };
    xd_optimizer_step_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.averages = averages;
    desc.average_count = s->together;
    s->result = xd_optimizer_step(s->optimizer, &desc, NULL);
}

/* AdamW as PyTorch's defaults have it; decay 0 -> without an average. */
shim *shim_adamw(int threads, int64_t count, int dtype, void *value, int gradient_dtype, void *gradient,
                 double decay) {
    shim *s = shim_open(threads, shim_run_adamw);
    shim_param(s, count, dtype, value, gradient_dtype, gradient);
    const xd_optimizer_desc desc = xd_adamw_defaults(&s->param, 1);
    s->result = xd_optimizer_create(s->ctx, &desc, &s->optimizer);
    shim_check(s);
    shim_sweeps(s, value, count * (int64_t)xd_dtype_size(s->param.dtype));
    s->together = decay > 0.0;
    if (s->together) shim_make_ema(s, decay, &s->ema);
    return s;
}

/* The same of f32 with two averages, of decay and of a tenth of its distance from 1. */
shim *shim_adamw_two(int threads, int64_t count, float *value, float *gradient, double decay) {
    shim *s = shim_adamw(threads, count, XD_DTYPE_F32, value, XD_DTYPE_F32, gradient, decay);
    shim_make_ema(s, 1.0 - 0.1 * (1.0 - decay), &s->second);
    s->together = 2;
    return s;
}

/* Copies the average's elements out. */
void shim_average(const shim *s, float *out) {
    const xd_param shadow = xd_ema_view(s->ema, 0).shadow;
    memcpy(out, shadow.value, (size_t)shadow.count * sizeof *out);
}

static void shim_run_norm(shim *s) {
    xd_gradient_norm_desc desc;
    xd_gradient_norm norm;
    memset(&desc, 0, sizeof desc);
    desc.params = &s->param;
    desc.param_count = 1;
    s->result = xd_gradient_norm_compute(s->ctx, NULL, &desc, &norm);
    s->value = norm.norm * norm.norm;
}

shim *shim_norm(int threads, int64_t count, int dtype, void *gradient) {
    shim *s = shim_open(threads, shim_run_norm);
    shim_param(s, count, XD_DTYPE_F32, NULL, dtype, gradient);
    shim_sweeps(s, gradient, count * (int64_t)xd_dtype_size((xd_dtype)dtype));
    return s;
}

/* What the last run gave: the loss, or the squared norm. */
double shim_value(const shim *s) {
    return s->value;
}

/* ---- losses with their head ---- */

static void shim_run_head(shim *s) {
    xd_loss_values values = { 0 };
    s->result = xd_head_loss(s->ctx, &s->head, &values);
    s->value = values.loss;
}

/* Cross entropy from hidden states [rows, width] and a head [cols, width] of bf16; the gradients are f32, that of the
 * head is added to. */
shim *shim_head(int threads, int64_t rows, int64_t cols, int64_t width, void *hidden, void *weight,
                const int64_t *labels, float *hidden_gradient, float *weight_gradient) {
    shim *s = shim_open(threads, shim_run_head);
    xd_head_loss_desc *d = &s->head;
    const xd_rows x = { hidden, XD_DTYPE_BF16, rows, width, 0 },
                  w = { weight, XD_DTYPE_BF16, cols, width, 0 };
    const xd_rows gradient = { hidden_gradient, XD_DTYPE_F32, rows, width, 0 };
    shim_whole_vocab(s, cols);
    d->student.hidden = x;
    d->student.weight = w;
    d->hidden_gradient = gradient;
    d->weight_gradient = weight_gradient;
    d->bf16 = true;
    d->loss.vocab = s->vocab;
    d->loss.common.labels = xd_ids_of(labels, XD_DTYPE_I64);
    d->loss.hard_weight = 1.0;
    d->workspace_bytes = shim_planned(s);
    d->workspace = malloc(d->workspace_bytes);
    if (!d->workspace) exit(2);
    return s;
}

#include "shim_samples.h"

/* Bytes that the operation needs beyond its arrays, once it has run: what the threads have of their own among them. */
int64_t shim_extra_bytes(const shim *s) {
    return (int64_t)(s->loss.common.workspace_bytes + s->head.workspace_bytes + s->allocated +
                     (size_t)(shim_threads(s) - 1) * XDI_POOL_SCRATCH);
}

/* ---- ceilings ---- */

/* A probe runs one piece a thread: long enough for each to be taken by another one. */
static void shim_each(shim *s, xdi_piece body) {
    s->result = xdi_parallel(s->ctx, shim_threads(s), body, s);
    s->turn++;
}

/* A run of a probe sweeps this much on every thread, some milliseconds, and the next run what lies behind it: short enough
 * to fit between two interruptions, far more than what the caches hold. */
enum { SHIM_WINDOW = (64 << 20) / 64 };

/* The lines of this run for a piece. */
static const char *shim_window(const shim *s, int64_t piece) {
    return (const char *)s->swept + (piece * s->swept_lines + s->at) * 64;
}

static void shim_next_window(shim *s) {
    s->at += s->window;
    if (s->at + s->window > s->swept_lines) s->at = 0;
}

static void shim_read_piece(void *argument, int64_t piece, int slot) {
    const shim *s = (const shim *)argument;
    volatile double sum; /* nobody else wants it */
    (void)slot;
    sum = (double)bench_read((const bench_words *)(const void *)shim_window(s, piece), s->window,
                             bench_ways[s->turn % BENCH_WAYS]);
    (void)sum;
}

static void shim_run_read(shim *s) {
    shim_each(s, shim_read_piece);
    shim_next_window(s);
}

static void shim_in_place_piece(void *argument, int64_t piece, int slot) {
    const shim *s = (const shim *)argument;
    (void)slot;
    bench_in_place((bench_floats *)(void *)(uintptr_t)shim_window(s, piece), s->window,
                   bench_ways[s->turn % BENCH_WAYS]);
}

static void shim_run_in_place(shim *s) {
    shim_each(s, shim_in_place_piece);
    shim_next_window(s);
}

/* Rate probes over the memory of another operation, which is left with other values: in place (each byte counts
 * twice), or read only. Every run is one window, and takes the next way. */
shim *shim_probe(int threads, const shim *of, bool in_place) {
    shim *s = shim_open(threads, in_place ? shim_run_in_place : shim_run_read);
    s->swept = of->swept;
    s->swept_lines = of->swept_lines / (4 * BENCH_TURN) * (4 * BENCH_TURN);
    s->window = s->swept_lines < SHIM_WINDOW ? s->swept_lines : SHIM_WINDOW;
    return s;
}

/* Of one run. */
int64_t shim_probed_bytes(const shim *s) {
    return s->window * shim_threads(s) * 64;
}

/* How fast exponentials, logarithms and products are, from the first cache; one call does `shim_unit_count`
 * of them on every thread: about a millisecond. */
enum { SHIM_UNITS = 3200 };
static float shim_numbers[XDI_TILE];

static void shim_units(const shim *s, bool logarithms) {
    const xdi_simd_array x = { shim_numbers, false };
    double (*const units)(xdi_simd_array) = bench_units_of(xd_ctx_settings(s->ctx)->cpu, logarithms);
    volatile double kept;
    double sum = 0.0;
    for (int i = 0; i < SHIM_UNITS; i++) sum += units(x);
    kept = sum;
    (void)kept;
}

static void shim_exponentials_piece(void *argument, int64_t piece, int slot) {
    (void)piece, (void)slot;
    shim_units((const shim *)argument, false);
}

static void shim_run_exponentials(shim *s) {
    shim_each(s, shim_exponentials_piece);
}

static void shim_logarithms_piece(void *argument, int64_t piece, int slot) {
    (void)piece, (void)slot;
    shim_units((const shim *)argument, true);
}

static void shim_run_logarithms(shim *s) {
    shim_each(s, shim_logarithms_piece);
}

shim *shim_unit(int threads, bool logarithms) {
    for (int i = 0; i < XDI_TILE; i++) shim_numbers[i] = 1.0f + (float)(i * 37 % 101) * 0.06f;
    return shim_open(threads, logarithms ? shim_run_logarithms : shim_run_exponentials);
}

int64_t shim_unit_count(void) {
    return (int64_t)SHIM_UNITS * XDI_TILE;
}

/* ---- products ---- */

#if defined(XDI_X86)
__attribute__((target("avx512f,avx512bf16"))) static void shim_dots_piece(void *argument, int64_t piece,
                                                                          int slot) {
    __m512 sum[16];
    const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (int i = 0; i < 16; i++) sum[i] = _mm512_set1_ps((float)i);
    for (int64_t k = 0; k < 100000; k++)
#    pragma GCC unroll 16
        for (int i = 0; i < 16; i++) sum[i] = _mm512_dpbf16_ps(sum[i], one, one);
    for (int i = 1; i < 16; i++) sum[0] = _mm512_add_ps(sum[0], sum[i]);
    volatile float kept = _mm512_reduce_add_ps(sum[0]);
    (void)kept, (void)argument, (void)piece, (void)slot;
}

__attribute__((target("avx512f"))) static void shim_products_512_piece(void *argument, int64_t piece,
                                                                       int slot) {
    __m512 sum[16];
    const __m512 half = _mm512_set1_ps(0.5f);
    for (int i = 0; i < 16; i++) sum[i] = _mm512_set1_ps((float)i);
    for (int64_t k = 0; k < 100000; k++)
#    pragma GCC unroll 16
        for (int i = 0; i < 16; i++) sum[i] = _mm512_fmadd_ps(sum[i], half, half);
    for (int i = 1; i < 16; i++) sum[0] = _mm512_add_ps(sum[0], sum[i]);
    volatile float kept = _mm512_reduce_add_ps(sum[0]);
    (void)kept, (void)argument, (void)piece, (void)slot;
}

__attribute__((target("avx2,fma"))) static void shim_products_256_piece(void *argument, int64_t piece,
                                                                        int slot) {
    __m256 sum[8];
    float lanes[8];
    const __m256 half = _mm256_set1_ps(0.5f);
    for (int i = 0; i < 8; i++) sum[i] = _mm256_set1_ps((float)i);
    for (int64_t k = 0; k < 200000; k++)
#    pragma GCC unroll 8
        for (int i = 0; i < 8; i++) sum[i] = _mm256_fmadd_ps(sum[i], half, half);
    for (int i = 1; i < 8; i++) sum[0] = _mm256_add_ps(sum[0], sum[i]);
    _mm256_storeu_ps(lanes, sum[0]);
    volatile float kept = lanes[0];
    (void)kept, (void)argument, (void)piece, (void)slot;
}

static void shim_run_dots(shim *s) {
    shim_each(s, shim_dots_piece);
}

static void shim_run_products_512(shim *s) {
    shim_each(s, shim_products_512_piece);
}

static void shim_run_products_256(shim *s) {
    shim_each(s, shim_products_256_piece);
}
#endif

/* Sums of products from registers, shim_dot_count operations a call: of bf16 where the processor has an instruction
 * for them, else of f32, which the head's products are then; NULL where neither is known. */
shim *shim_dots(int threads) {
#if defined(XDI_X86)
    switch (xd_cpu_best()) {
    case XD_CPU_AVX512_BF16: return shim_open(threads, shim_run_dots);
    case XD_CPU_AVX512: return shim_open(threads, shim_run_products_512);
    case XD_CPU_AVX2: return shim_open(threads, shim_run_products_256);
    default: break;
    }
#endif
    (void)threads;
    return NULL;
}

int64_t shim_dot_count(void) {
    const int lanes = xd_cpu_best() == XD_CPU_AVX2 ? 8 : 16,
              terms = xd_cpu_best() == XD_CPU_AVX512_BF16 ? 2 : 1;
    return (int64_t)100000 * 16 * lanes * terms * 2;
}

/* What callers pass as a dtype: bf16, or else f32. */
int shim_dtype(bool narrow) {
    return narrow ? XD_DTYPE_BF16 : XD_DTYPE_F32;
}

/* Name of the CPU level that contexts take by default. */
const char *shim_level(void) {
    return xd_cpu_level_name(xd_cpu_best());
}
