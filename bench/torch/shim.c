/* The library behind a handful of C calls, for bench/torch/compare.py: every operation cut over a few
 * threads, each with a context of its own, on memory that the caller gives. Built into a shared library by
 * `make bench-torch`. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "../ceilings.h"
#include "../units.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SHIM_THREADS = 16, SHIM_LOOKS = 2000 };

typedef struct shim shim;
typedef struct shim_part shim_part;

/* One thread's share of an operation. */
struct shim_part {
    shim *owner;
    xd_ctx *ctx;
    void (*run)(shim_part *part);
    xd_result result;
    int64_t rows, cols, k; /* selections */
    xd_vocab *vocab;
    xd_loss_desc loss; /* of all rows; a thread takes some at a time */
    xd_param param;    /* optimizer, average, norm */
    xd_optimizer *optimizer;
    xd_ema *ema;
    bool together; /* optimizer and average in one pass */
    double value;  /* this part's loss or norm */
    double *top;
    int64_t *ids;
    xd_head_loss_desc head;
    size_t allocated;                /* bytes that runs have asked for, all told */
    void *swept;                     /* what a probe sweeps: the operation's largest array of its own */
    int64_t swept_lines, window, at; /* of 64 bytes: all, those of one run, where it begins */
    int turn;                        /* of the ways through memory */
};

/* An operation, and the threads that run it: the caller is the first of them. */
struct shim {
    int threads;
    shim_part parts[SHIM_THREADS];
    pthread_t workers[SHIM_THREADS];
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    int64_t round; /* raised by one for each run; -1: leave */
    int64_t busy;
    int64_t taken; /* rows of a loss in this run */
};

/* ---- threads ---- */

/* Looks for a while before a thread goes to sleep, as the workers of OpenMP do. */
static bool shim_looks(const int64_t *value, int64_t unwanted) {
    for (int i = 0; i < SHIM_LOOKS; i++) {
        if (__atomic_load_n(value, __ATOMIC_ACQUIRE) != unwanted) return true;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    return false;
}

static void *shim_work(void *argument) {
    shim_part *part = (shim_part *)argument;
    shim *s = part->owner;
    int64_t seen = 0;
    for (;;) {
        if (!shim_looks(&s->round, seen)) {
            pthread_mutex_lock(&s->lock);
            while (s->round == seen) pthread_cond_wait(&s->wake, &s->lock);
            pthread_mutex_unlock(&s->lock);
        }
        seen = __atomic_load_n(&s->round, __ATOMIC_ACQUIRE);
        if (seen < 0) return NULL;
        part->run(part);
        pthread_mutex_lock(&s->lock);
        __atomic_store_n(&s->busy, s->busy - 1, __ATOMIC_RELEASE);
        if (s->busy == 0) pthread_cond_signal(&s->done);
        pthread_mutex_unlock(&s->lock);
    }
}

/* The library's own way, counting what is asked for while an operation runs. */
static void *shim_allocate(void *user, size_t bytes) {
    shim_part *part = (shim_part *)user;
    if (part->owner->round > 0) part->allocated += bytes;
    return xdi_ctx_allocate(NULL, bytes);
}

static shim *shim_open(int threads, void (*run)(shim_part *part)) {
    shim *s = (shim *)calloc(1, sizeof *s);
    if (!s || threads < 1 || threads > SHIM_THREADS) exit(2);
    s->threads = threads;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wake, NULL);
    pthread_cond_init(&s->done, NULL);
    for (int i = 0; i < threads; i++) {
        s->parts[i].owner = s;
        s->parts[i].run = run;
        const xd_ctx_desc settings = { .allocator = { shim_allocate, xdi_ctx_release, &s->parts[i] } };
        if (xd_ctx_create(&settings, &s->parts[i].ctx) != XD_OK) exit(2);
    }
    for (int i = 1; i < threads; i++)
        if (pthread_create(&s->workers[i], NULL, shim_work, &s->parts[i]) != 0) exit(2);
    return s;
}

static void shim_check(const shim_part *part) {
    if (part->result == XD_OK) return;
    fprintf(stderr, "%s: %s\n", xd_result_name(part->result), xd_last_error(part->ctx)->message);
    exit(2);
}

void shim_run(shim *s) {
    pthread_mutex_lock(&s->lock);
    s->busy = s->threads - 1;
    s->taken = 0;
    __atomic_store_n(&s->round, s->round + 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&s->wake);
    pthread_mutex_unlock(&s->lock);
    s->parts[0].run(&s->parts[0]);
    for (int64_t left = s->threads - 1; left > 0 && shim_looks(&s->busy, left); left--) continue;
    pthread_mutex_lock(&s->lock);
    while (s->busy > 0) pthread_cond_wait(&s->done, &s->lock);
    pthread_mutex_unlock(&s->lock);
    for (int i = 0; i < s->threads; i++) shim_check(&s->parts[i]);
}

void shim_close(shim *s) {
    pthread_mutex_lock(&s->lock);
    __atomic_store_n(&s->round, -1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&s->wake);
    pthread_mutex_unlock(&s->lock);
    for (int i = 1; i < s->threads; i++) pthread_join(s->workers[i], NULL);
    for (int i = 0; i < s->threads; i++) {
        shim_part *part = &s->parts[i];
        xd_ema_destroy(part->ema);
        xd_optimizer_destroy(part->optimizer);
        xd_vocab_destroy(part->vocab);
        free(part->loss.common.workspace);
        free(part->head.workspace);
        free(part->top);
        free(part->ids);
        xd_ctx_destroy(part->ctx);
    }
    free(s);
}

/* Part i of n items begins here; a multiple of 16 elements, so that parts do not share cache lines. */
static int64_t shim_cut(int64_t n, int threads, int i) {
    return i == threads ? n : n / threads * i / 16 * 16;
}

static void shim_sweeps(shim_part *part, void *data, int64_t bytes) {
    part->swept = data;
    part->swept_lines = bytes / 64;
}

static char *shim_at(void *data, xd_dtype dtype, int64_t index) {
    return data ? (char *)data + (size_t)index * xd_dtype_size(dtype) : NULL;
}

/* ---- losses ---- */

/* Rows that a thread takes at a time: who is slowed down takes fewer, and nobody waits for long. */
enum { SHIM_ROWS = 4 };

/* The rows [begin, begin + count) of a matrix, if there is one. */
static xd_rows shim_rows(xd_rows matrix, int64_t begin, int64_t count) {
    matrix.data = shim_at(matrix.data, matrix.dtype, begin * matrix.cols);
    matrix.rows = count;
    return matrix;
}

/* The loss of some rows of those of d. */
static xd_loss_desc shim_block(const xd_loss_desc *d, int64_t begin, int64_t count) {
    xd_loss_desc block = *d;
    block.student = shim_rows(d->student, begin, count);
    block.common.gradient = shim_rows(d->common.gradient, begin, count);
    if (d->teacher.data) block.teacher = shim_rows(d->teacher, begin, count);
    if (d->common.labels) block.common.labels = d->common.labels + begin;
    return block;
}

static void shim_run_loss(shim_part *part) {
    const int64_t rows = part->loss.student.rows;
    part->value = 0.0;
    while (part->result == XD_OK) {
        const int64_t begin = __atomic_fetch_add(&part->owner->taken, SHIM_ROWS, __ATOMIC_RELAXED);
        if (begin >= rows) break;
        const xd_loss_desc block =
            shim_block(&part->loss, begin, rows - begin < SHIM_ROWS ? rows - begin : SHIM_ROWS);
        xd_loss_values values;
        part->result = xd_loss(part->ctx, &block, &values);
        part->value += values.loss;
    }
}

/* Cross entropy where there are labels, KL or the Jensen-Shannon divergence where there is a teacher; mean over rows;
 * dtype as XD_DTYPE_*. */
shim *shim_loss(int threads, int dtype, int64_t rows, int64_t cols, void *student, void *teacher,
                const int64_t *labels, void *gradient, double temperature, bool jsd) {
    shim *s = shim_open(threads, shim_run_loss);
    for (int i = 0; i < threads; i++) {
        shim_part *part = &s->parts[i];
        xd_loss_desc *d = &part->loss;
        const xd_rows matrix = { student, (xd_dtype)dtype, rows, cols, 0 };
        const int64_t begin = rows * i / threads, end = rows * (i + 1) / threads;
        part->result = xd_vocab_create(part->ctx, NULL, 0, cols, cols, &part->vocab);
        shim_check(part);
        d->vocab = part->vocab;
        d->student = d->common.gradient = matrix;
        d->common.gradient.data = gradient;
        shim_sweeps(part, shim_rows(d->common.gradient, begin, 0).data,
                    (end - begin) * cols * (int64_t)xd_dtype_size(matrix.dtype));
        if (teacher) d->teacher = matrix;
        d->teacher.data = teacher;
        if (jsd) d->divergence = XD_JSD;
        d->beta = 0.5;
        d->hard_weight = labels ? 1.0 : 0.0;
        d->soft_weight = teacher ? 1.0 : 0.0;
        d->common.labels = labels;
        d->temperature = temperature;
        d->common.denominator_value = (double)rows;
        const xd_loss_desc block = shim_block(d, 0, SHIM_ROWS);
        d->common.workspace_bytes = xd_loss_workspace_bytes(&block);
        d->common.workspace = malloc(d->common.workspace_bytes);
        if (!d->common.workspace) exit(2);
    }
    return s;
}

/* ---- selection ---- */

static void shim_run_select(shim_part *part) {
    part->result = xd_vocab_topk(part->ctx, part->vocab, part->loss.student, part->k, part->top, part->ids);
}

/* The k largest of every row. */
shim *shim_select(int threads, int dtype, int64_t rows, int64_t cols, void *data, int64_t k) {
    shim *s = shim_open(threads, shim_run_select);
    for (int i = 0; i < threads; i++) {
        shim_part *part = &s->parts[i];
        const int64_t begin = rows * i / threads, end = rows * (i + 1) / threads;
        const xd_rows matrix = { shim_at(data, (xd_dtype)dtype, begin * cols), (xd_dtype)dtype, end - begin,
                                 cols, 0 };
        part->result = xd_vocab_create(part->ctx, NULL, 0, cols, cols, &part->vocab);
        shim_check(part);
        part->loss.student = matrix;
        part->k = k;
        part->rows = end - begin;
        part->top = (double *)malloc((size_t)(part->rows * k) * sizeof *part->top);
        part->ids = (int64_t *)malloc((size_t)(part->rows * k) * sizeof *part->ids);
        if (!part->top || !part->ids) exit(2);
    }
    return s;
}

/* Ids of all rows in order. */
void shim_ids(const shim *s, int64_t *ids) {
    for (int i = 0; i < s->threads; i++) {
        const int64_t n = s->parts[i].rows * s->parts[i].k;
        memcpy(ids, s->parts[i].ids, (size_t)n * sizeof *ids);
        ids += n;
    }
}

/* ---- parameters ---- */

static void shim_param(shim_part *part, int i, int64_t count, int dtype, void *value, int gradient_dtype,
                       void *gradient) {
    const int threads = part->owner->threads;
    const int64_t begin = shim_cut(count, threads, i);
    part->param.name = "weight";
    part->param.dtype = (xd_dtype)dtype;
    part->param.gradient_dtype = (xd_dtype)gradient_dtype;
    part->param.value = shim_at(value, (xd_dtype)dtype, begin);
    part->param.gradient = shim_at(gradient, (xd_dtype)gradient_dtype, begin);
    part->param.count = shim_cut(count, threads, i + 1) - begin;
}

static void shim_make_ema(shim_part *part, double decay) {
    xd_ema_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.decay = decay;
    desc.init_from_current = true;
    part->result = xd_ema_create(part->ctx, &part->param, 1, &desc, &part->ema);
    shim_check(part);
}

static void shim_run_ema(shim_part *part) {
    part->result = xd_ema_update(part->ema, XD_EMA_NEXT, NULL);
}

/* An f32 average of count values, which begins as they are. */
shim *shim_ema(int threads, int64_t count, int dtype, void *value, double decay) {
    shim *s = shim_open(threads, shim_run_ema);
    for (int i = 0; i < threads; i++) {
        shim_param(&s->parts[i], i, count, dtype, value, XD_DTYPE_F32, NULL);
        shim_make_ema(&s->parts[i], decay);
        const xd_param shadow = xd_ema_view(s->parts[i].ema, 0);
        shim_sweeps(&s->parts[i], shadow.value, shadow.count * (int64_t)sizeof(float));
    }
    return s;
}

static void shim_run_adamw(shim_part *part) {
    xd_optimizer_step_desc desc;
    memset(&desc, 0, sizeof desc);
    if (part->together) desc.ema = part->ema;
    part->result = xd_optimizer_step(part->optimizer, &desc, NULL);
}

/* AdamW as PyTorch's defaults have it; decay 0 -> without an average. */
shim *shim_adamw(int threads, int64_t count, int dtype, void *value, int gradient_dtype, void *gradient,
                 double decay) {
    shim *s = shim_open(threads, shim_run_adamw);
    for (int i = 0; i < threads; i++) {
        shim_part *part = &s->parts[i];
        shim_param(part, i, count, dtype, value, gradient_dtype, gradient);
        const xd_optimizer_desc desc = xd_adamw_defaults(&part->param, 1);
        part->result = xd_optimizer_create(part->ctx, &desc, &part->optimizer);
        shim_check(part);
        shim_sweeps(part, part->param.value, part->param.count * (int64_t)xd_dtype_size(part->param.dtype));
        part->together = decay > 0.0;
        if (part->together) shim_make_ema(part, decay);
    }
    return s;
}

/* Copies the average's elements out. */
void shim_average(const shim *s, float *out) {
    for (int i = 0; i < s->threads; i++) {
        const xd_param shadow = xd_ema_view(s->parts[i].ema, 0);
        memcpy(out, shadow.value, (size_t)shadow.count * sizeof *out);
        out += shadow.count;
    }
}

static void shim_run_norm(shim_part *part) {
    xd_gradient_norm_desc desc;
    xd_gradient_norm norm;
    memset(&desc, 0, sizeof desc);
    desc.params = &part->param;
    desc.param_count = 1;
    part->result = xd_gradient_norm_compute(part->ctx, NULL, &desc, &norm);
    part->value = norm.norm * norm.norm;
}

shim *shim_norm(int threads, int64_t count, int dtype, void *gradient) {
    shim *s = shim_open(threads, shim_run_norm);
    for (int i = 0; i < threads; i++) {
        shim_part *part = &s->parts[i];
        shim_param(part, i, count, XD_DTYPE_F32, NULL, dtype, gradient);
        shim_sweeps(part, part->param.gradient, part->param.count * (int64_t)xd_dtype_size((xd_dtype)dtype));
    }
    return s;
}

/* Sum of what the parts of the last run gave: the loss, or the squared norm. */
double shim_value(const shim *s) {
    double sum = 0.0;
    for (int i = 0; i < s->threads; i++) sum += s->parts[i].value;
    return sum;
}

/* ---- losses with their head ---- */

static void shim_run_head(shim_part *part) {
    xd_loss_values values;
    part->result = xd_head_loss(part->ctx, &part->head, &values);
    part->value = values.loss;
}

/* Cross entropy from hidden states [rows, width] and a head [cols, width] of bf16, on one thread; the gradients are
 * f32, that of the head is added to. */
shim *shim_head(int threads, int64_t rows, int64_t cols, int64_t width, void *hidden, void *weight,
                const int64_t *labels, float *hidden_gradient, float *weight_gradient) {
    shim *s = shim_open(threads, shim_run_head);
    shim_part *part = &s->parts[0];
    xd_head_loss_desc *d = &part->head;
    const xd_rows x = { hidden, XD_DTYPE_BF16, rows, width, 0 },
                  w = { weight, XD_DTYPE_BF16, cols, width, 0 };
    const xd_rows gradient = { hidden_gradient, XD_DTYPE_F32, rows, width, 0 };
    part->result = xd_vocab_create(part->ctx, NULL, 0, cols, cols, &part->vocab);
    shim_check(part);
    d->student.hidden = x;
    d->student.weight = w;
    d->hidden_gradient = gradient;
    d->weight_gradient = weight_gradient;
    d->bf16 = true;
    d->loss.vocab = part->vocab;
    d->loss.common.labels = labels;
    d->loss.hard_weight = 1.0;
    d->workspace_bytes = xd_head_loss_workspace_bytes(d);
    d->workspace = malloc(d->workspace_bytes);
    if (!d->workspace) exit(2);
    return s;
}

/* Bytes that the operation needs beyond its arrays, once it has run. */
int64_t shim_extra_bytes(const shim *s) {
    int64_t bytes = 0;
    for (int i = 0; i < s->threads; i++)
        bytes += (int64_t)(s->parts[i].loss.common.workspace_bytes + s->parts[i].head.workspace_bytes +
                           s->parts[i].allocated);
    return bytes;
}

/* ---- ceilings ---- */

/* A run of a probe sweeps this much on every thread, some milliseconds, and the next run what lies behind it: short enough
 * to fit between two interruptions, far more than what the caches hold. */
enum { SHIM_WINDOW = (64 << 20) / 64 };

/* The lines of this run and the way through them. */
static const char *shim_window(shim_part *part, bench_way *way) {
    const char *begin = (const char *)part->swept + part->at * 64;
    *way = bench_ways[part->turn++ % BENCH_WAYS];
    part->at += part->window;
    if (part->at + part->window > part->swept_lines) part->at = 0;
    return begin;
}

static void shim_run_read(shim_part *part) {
    bench_way way;
    const char *begin = shim_window(part, &way);
    part->value = (double)bench_read((const bench_words *)(const void *)begin, part->window, way);
}

static void shim_run_in_place(shim_part *part) {
    bench_way way;
    const char *begin = shim_window(part, &way);
    bench_in_place((bench_floats *)(void *)(uintptr_t)begin, part->window, way);
}

/* Rate probes over the memory of another operation, which is left with other values: in place (each byte counts
 * twice), or read only. Every run is one window, and takes the next way. */
shim *shim_probe(int threads, const shim *of, bool in_place) {
    shim *s = shim_open(threads, in_place ? shim_run_in_place : shim_run_read);
    for (int i = 0; i < threads; i++) {
        shim_part *part = &s->parts[i];
        const int64_t lines = of->parts[i].swept_lines / (4 * BENCH_TURN) * (4 * BENCH_TURN);
        part->swept = of->parts[i].swept;
        part->swept_lines = lines;
        part->window = lines < SHIM_WINDOW ? lines : SHIM_WINDOW;
    }
    return s;
}

/* Of one run. */
int64_t shim_probed_bytes(const shim *s) {
    int64_t lines = 0;
    for (int i = 0; i < s->threads; i++) lines += s->parts[i].window;
    return lines * 64;
}

/* How fast exponentials, logarithms and products are, from the first cache; one call does `shim_unit_count`
 * of them on every thread: about a millisecond. */
enum { SHIM_UNITS = 3200 };
static float shim_numbers[XDI_TILE];

static void shim_run_units(shim_part *part, bool logarithms) {
    const xdi_simd_array x = { shim_numbers, false };
    double (*const units)(xdi_simd_array) = bench_units_of(xd_ctx_settings(part->ctx)->cpu, logarithms);
    double sum = 0.0;
    for (int i = 0; i < SHIM_UNITS && units; i++) sum += units(x);
    part->value = sum;
}

static void shim_run_exponentials(shim_part *part) {
    shim_run_units(part, false);
}

static void shim_run_logarithms(shim_part *part) {
    shim_run_units(part, true);
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
__attribute__((target("avx512f,avx512bf16"))) static void shim_run_dots(shim_part *part) {
    __m512 sum[16];
    const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (int i = 0; i < 16; i++) sum[i] = _mm512_set1_ps((float)i);
    for (int64_t k = 0; k < 100000; k++)
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) sum[i] = _mm512_dpbf16_ps(sum[i], one, one);
    for (int i = 1; i < 16; i++) sum[0] = _mm512_add_ps(sum[0], sum[i]);
    part->value += (double)_mm512_reduce_add_ps(sum[0]);
}

__attribute__((target("avx512f"))) static void shim_run_products_512(shim_part *part) {
    __m512 sum[16];
    const __m512 half = _mm512_set1_ps(0.5f);
    for (int i = 0; i < 16; i++) sum[i] = _mm512_set1_ps((float)i);
    for (int64_t k = 0; k < 100000; k++)
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) sum[i] = _mm512_fmadd_ps(sum[i], half, half);
    for (int i = 1; i < 16; i++) sum[0] = _mm512_add_ps(sum[0], sum[i]);
    part->value += (double)_mm512_reduce_add_ps(sum[0]);
}

__attribute__((target("avx2,fma"))) static void shim_run_products_256(shim_part *part) {
    __m256 sum[8];
    float lanes[8];
    const __m256 half = _mm256_set1_ps(0.5f);
    for (int i = 0; i < 8; i++) sum[i] = _mm256_set1_ps((float)i);
    for (int64_t k = 0; k < 200000; k++)
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) sum[i] = _mm256_fmadd_ps(sum[i], half, half);
    for (int i = 1; i < 8; i++) sum[0] = _mm256_add_ps(sum[0], sum[i]);
    _mm256_storeu_ps(lanes, sum[0]);
    part->value += (double)lanes[0];
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
    const int lanes = xd_cpu_best() == XD_CPU_AVX2 ? 8 : 16, terms = xd_cpu_best() == XD_CPU_AVX512_BF16 ? 2 : 1;
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
