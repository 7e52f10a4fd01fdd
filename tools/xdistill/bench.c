/* What a user can expect of this machine, in a minute: each operation on a line, beside the roof of the same run and a naive loop.
 *
 *     make bench      or      xdistill bench [-J FILE]
 *
 * One thread. Times are medians of five rounds, each of which runs the operation and the naive one after another. The naive losses
 * are what a framework does eagerly: log-softmax in memory, then the loss, then the gradient. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime, popen, fileno */
#include "command.h"

#define BENCH_ROUNDS 5
#define BENCH_WARMUP 1
#define BENCH_TIMES_ONLY
#include "../../bench/bench.h"

enum { ROWS = 32, VOCABULARY = 128256, LOGITS = ROWS * VOCABULARY, K = 64, ELEMENTS = 1 << 23 };
enum { HEAD_ROWS = 128, HIDDEN = 1024, HEAD_VOCABULARY = 32000 };

typedef struct bench_options {
    const char *tokenizer, *text, *json;
} bench_options;

/* A line of the table. */
typedef struct line {
    const char *name, *size, *unit;
    double amount; /* of the unit, a run */
    double roof;   /* of the unit, a second; below 0: the naive loop is the roof */
    int64_t tokens;
} line;

static xd_ctx *ctx;
static bench_machine machine;
static FILE *json;

static void *allocate(size_t bytes) {
    void *memory = malloc(bytes + 64);
    if (!memory) exit(2);
    memset(memory, 0, bytes + 64); /* touches the pages before anything is timed */
    return memory;
}

static void require(xd_result result) {
    if (result == XD_OK) return;
    fprintf(stderr, "%s: %s\n", xd_result_name(result), ctx ? xd_last_error(ctx)->message : "");
    exit(2);
}

/* A number in [-1, 1) that looks random; the same on every run. */
static float noise(uint64_t i) {
    uint64_t x = (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
    x ^= x >> 29;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    return (float)(int32_t)(x >> 32) * (1.0f / 2147483648.0f);
}

/* ---- the table ---- */

static void print_head(void) {
    printf("%.60s, one thread; reads %.1f, copies %.1f GB/s\n\n", machine.cpu, machine.read * 1e-9,
           machine.copy * 1e-9);
    printf("%-19s %-17s %8s %12s %6s %7s\n", "operation", "size", "ms", "rate", "roof", "naive");
}

static void print_line(const line *l, double seconds, double ratio) {
    char rate[32], naive[16] = "-", roof[16] = "-";
    snprintf(rate, sizeof rate, "%.1f %s", l->amount / seconds, l->unit);
    const double share = l->roof < 0.0 ? ratio : l->roof > 0.0 ? l->amount / seconds / l->roof : 0.0;
    if (ratio > 0.0 && l->roof >= 0.0) snprintf(naive, sizeof naive, "%.1f x", ratio);
    if (share > 0.0) snprintf(roof, sizeof roof, "%.2f", share);
    printf("%-19s %-17s %8.2f %12s %6s %7s\n", l->name, l->size, 1e3 * seconds, rate, roof, naive);
    if (json)
        fprintf(json,
                "{\"schema\":\"xdistill-quick/"
                "1\",\"op\":\"%s\",\"size\":\"%s\",\"ms\":%.4f,\"rate\":%.3f,\"unit\":\"%s\","
                "\"roof\":%.3f,\"naive\":%.2f,\"tokens_a_second\":%.0f,\"cpu\":\"%s\",\"commit\":\"%s\"}\n",
                l->name, l->size, 1e3 * seconds, l->amount / seconds, l->unit,
                share > 0.0 ? l->amount / seconds / share : 0.0, ratio, (double)l->tokens / seconds,
                machine.cpu, machine.commit);
    fflush(stdout);
}

static void print_legend(void) {
    printf("\nms     median of five runs      rate   minimal bytes, or operations, a second\n"
           "roof   share of what the same run reached: copies for losses and all-reduce,\n"
           "       updates in place, reads for norms, a product of 1024 for the head,\n"
           "       a plain write for checkpoints\n"
           "naive  how many times as long a plain loop took; make bench-all has more\n");
}

static void compare(const line *l, void *state, bench_function ours, bench_function naive) {
    const bench_arm a = { "xdistill", state, ours, NULL }, b = { "naive", state, naive ? naive : ours, NULL };
    const bench_times t = bench_interleave(&a, &b);
    print_line(l, t.ours.median, naive ? t.ratio.median : 0.0);
}

/* ---- losses ---- */

typedef enum loss_kind { CROSS_ENTROPY, KL, JSD, TOPK } loss_kind;

typedef struct loss_state {
    loss_kind kind;
    xd_vocab *vocab;
    float *student, *teacher, *gradient, *log_student, *log_teacher; /* [ROWS, VOCABULARY] */
    int64_t labels[ROWS], ids[ROWS * K];
    float values[ROWS * K];
} loss_state;

static xd_rows rows_of(float *data) {
    return xd_rows_of(data, XD_DTYPE_F32, ROWS, VOCABULARY);
}

static void run_loss(void *state) {
    loss_state *s = (loss_state *)state;
    xd_loss_values values;
    if (s->kind == TOPK) {
        const xd_topk_desc d = { .student = rows_of(s->student),
                                 .vocab = s->vocab,
                                 .k = K,
                                 .ids = { s->ids, XD_DTYPE_I64 },
                                 .values = s->values,
                                 .common.gradient = rows_of(s->gradient) };
        require(xd_topk_kl_loss(ctx, &d, &values));
        return;
    }
    const bool hard = s->kind == CROSS_ENTROPY;
    const xd_loss_desc d = { .student = rows_of(s->student),
                             .teacher = hard ? (xd_rows){ 0 } : rows_of(s->teacher),
                             .vocab = s->vocab,
                             .hard_weight = hard,
                             .soft_weight = !hard,
                             .divergence = s->kind == JSD ? XD_JSD : XD_KL_FORWARD,
                             .beta = s->kind == JSD ? 0.5 : 0.0,
                             .common.labels = { hard ? s->labels : NULL, XD_DTYPE_I64 },
                             .common.gradient = rows_of(s->gradient) };
    require(xd_loss(ctx, &d, &values));
}

static void naive_log_softmax(const float *logits, float *out) {
    for (int64_t r = 0; r < ROWS; r++, logits += VOCABULARY, out += VOCABULARY) {
        float max = -INFINITY;
        double sum = 0.0;
        for (int64_t v = 0; v < VOCABULARY; v++) max = logits[v] > max ? logits[v] : max;
        for (int64_t v = 0; v < VOCABULARY; v++) sum += (double)expf(logits[v] - max);
        const float log_sum = max + (float)log(sum);
        for (int64_t v = 0; v < VOCABULARY; v++) out[v] = logits[v] - log_sum;
    }
}

/* The gradients alone: the values cost little beside them. */
static void naive_loss(void *state) {
    loss_state *s = (loss_state *)state;
    const float *p = s->log_student, *q = s->log_teacher;
    naive_log_softmax(s->student, s->log_student);
    if (s->kind == KL || s->kind == JSD) naive_log_softmax(s->teacher, s->log_teacher);
    for (int64_t i = 0; i < LOGITS; i++) {
        const float a = expf(p[i]);
        if (s->kind == KL) {
            s->gradient[i] = (a - expf(q[i])) / ROWS;
        } else if (s->kind == JSD) {
            s->gradient[i] = 0.5f * a * (p[i] - logf(0.5f * a + 0.5f * expf(q[i]))) / ROWS;
        } else {
            s->gradient[i] = a / ROWS;
        }
    }
}

static void bench_losses(void) {
    static const char *const names[] = { "cross entropy", "KL", "JSD", "top-k KL, k = 64" };
    static const double bytes[] = { 8.0, 12.0, 12.0, 8.0 };
    loss_state *s = (loss_state *)allocate(sizeof *s);
    float **const arrays[] = { &s->student, &s->teacher, &s->gradient, &s->log_student, &s->log_teacher };
    require(xd_vocab_create(ctx, &(xd_vocab_desc){ .size = VOCABULARY }, &s->vocab));
    for (int i = 0; i < 5; i++) *arrays[i] = (float *)allocate((size_t)LOGITS * sizeof(float));
    for (int64_t i = 0; i < LOGITS; i++) {
        s->student[i] = 4.0f * noise((uint64_t)i);
        s->teacher[i] = 4.0f * noise((uint64_t)(i + LOGITS));
    }
    for (int r = 0; r < ROWS; r++) s->labels[r] = r * 3001 % VOCABULARY;
    for (int i = 0; i < ROWS * K; i++) {
        s->ids[i] = (i % K) * 1999 + i / K;
        s->values[i] = -4.5f - 0.01f * (float)(i % K);
    }
    for (int kind = 0; kind < 4; kind++) {
        const line l = {
            names[kind], "32 x 128,256 f32", "GB/s", 1e-9 * bytes[kind] * LOGITS, machine.copy * 1e-9, ROWS
        };
        s->kind = (loss_kind)kind;
        compare(&l, s, run_loss, naive_loss);
    }
    for (int i = 0; i < 5; i++) free(*arrays[i]);
    xd_vocab_destroy(s->vocab);
    free(s);
}

/* ---- two tokenizers ---- */

enum { TEACHER_VOCABULARY = 151936, CHUNKS = 16 };

typedef struct pair_state {
    xd_vocab *vocab;
    xd_projection projection;
    float *student, *teacher, *gradient;
    int64_t chunks[CHUNKS];
} pair_state;

static void run_pair(void *state) {
    pair_state *s = (pair_state *)state;
    xd_xtoken_teacher teacher = xd_xtoken_teacher_defaults(XD_XTOKEN_PROJECTED);
    xd_xtoken_desc d = xd_xtoken_defaults();
    xd_xtoken_values values;
    teacher.logits = xd_rows_of(s->teacher, XD_DTYPE_F32, CHUNKS, TEACHER_VOCABULARY);
    teacher.student_chunks = teacher.teacher_chunks = s->chunks;
    teacher.chunks = CHUNKS;
    teacher.projected.projection = &s->projection;
    d.student = xd_rows_of(s->student, XD_DTYPE_F32, CHUNKS, VOCABULARY);
    d.vocab = s->vocab;
    d.teachers = &teacher;
    d.teacher_count = 1;
    d.common.gradient = xd_rows_of(s->gradient, XD_DTYPE_F32, CHUNKS, VOCABULARY);
    require(xd_xtoken_loss(ctx, &d, &values));
}

/* Every student id stands for one teacher id. */
static void make_projection(pair_state *s) {
    int32_t *ids = (int32_t *)allocate((size_t)VOCABULARY * sizeof *ids);
    float *weights = (float *)allocate((size_t)VOCABULARY * sizeof *weights);
    const xd_projection_rows rows = { ids, weights, VOCABULARY, 1 };
    for (int64_t v = 0; v < VOCABULARY; v++) {
        ids[v] = (int32_t)(v * 7 % TEACHER_VOCABULARY);
        weights[v] = 1.0f;
    }
    require(xd_projection_from_rows(ctx, &rows, VOCABULARY, TEACHER_VOCABULARY, &s->projection));
    free(ids);
    free(weights);
}

static void bench_pair(void) {
    const int64_t own = (int64_t)CHUNKS * VOCABULARY, other = (int64_t)CHUNKS * TEACHER_VOCABULARY;
    const line l = { "P-KL, 152K teacher",
                     "16 x 128,256 f32",
                     "GB/s",
                     4e-9 * (double)(2 * own + other),
                     machine.copy * 1e-9,
                     CHUNKS };
    pair_state s;
    memset(&s, 0, sizeof s);
    require(xd_vocab_create(ctx, &(xd_vocab_desc){ .size = VOCABULARY }, &s.vocab));
    make_projection(&s);
    s.student = (float *)allocate((size_t)own * sizeof(float));
    s.gradient = (float *)allocate((size_t)own * sizeof(float));
    s.teacher = (float *)allocate((size_t)other * sizeof(float));
    for (int64_t i = 0; i < own; i++) s.student[i] = 4.0f * noise((uint64_t)i);
    for (int64_t i = 0; i < other; i++) s.teacher[i] = 4.0f * noise((uint64_t)(i + own));
    for (int i = 0; i < CHUNKS; i++) s.chunks[i] = i;
    compare(&l, &s, run_pair, NULL);
    xd_projection_destroy(ctx, &s.projection);
    xd_vocab_destroy(s.vocab);
    free(s.student), free(s.gradient), free(s.teacher);
}

/* ---- the head ---- */

typedef struct head_state {
    xd_vocab *vocab;
    float *hidden, *weight, *d_hidden, *d_weight;
    int64_t labels[HEAD_ROWS];
    int64_t size; /* of the square product */
} head_state;

static void run_head(void *state) {
    head_state *s = (head_state *)state;
    xd_head_loss_desc d;
    xd_loss_values values;
    memset(&d, 0, sizeof d);
    d.loss.vocab = s->vocab;
    d.loss.hard_weight = 1.0;
    d.loss.common.labels.data = s->labels;
    d.student.hidden = xd_rows_of(s->hidden, XD_DTYPE_F32, HEAD_ROWS, HIDDEN);
    d.student.weight = xd_rows_of(s->weight, XD_DTYPE_F32, HEAD_VOCABULARY, HIDDEN);
    d.hidden_gradient = xd_rows_of(s->d_hidden, XD_DTYPE_F32, HEAD_ROWS, HIDDEN);
    d.weight_gradient = s->d_weight;
    require(xd_head_loss(ctx, &d, &values));
}

static void run_product(void *state) {
    head_state *s = (head_state *)state;
    const int64_t n = s->size;
    const xd_matmul_args args = { .a = { s->hidden, XD_DTYPE_F32, n, n, n, 1 },
                                  .b = { s->weight, XD_DTYPE_F32, n, n, n, 1 },
                                  .out = s->d_weight,
                                  .out_stride = n };
    require(xd_matmul(ctx, &args, NULL));
}

static double product_rate(head_state *s) {
    const bench_arm arm = { "product", s, run_product, NULL };
    s->size = 1024;
    const bench_times t = bench_interleave(&arm, &arm);
    return 2e-9 * 1024.0 * 1024.0 * 1024.0 / t.ours.median;
}

static void bench_head(void) {
    head_state *s = (head_state *)allocate(sizeof *s);
    require(xd_vocab_create(ctx, &(xd_vocab_desc){ .size = HEAD_VOCABULARY }, &s->vocab));
    s->hidden = (float *)allocate((size_t)1024 * HIDDEN * sizeof(float));
    s->d_hidden = (float *)allocate((size_t)HEAD_ROWS * HIDDEN * sizeof(float));
    s->weight = (float *)allocate((size_t)HEAD_VOCABULARY * HIDDEN * sizeof(float));
    s->d_weight = (float *)allocate((size_t)HEAD_VOCABULARY * HIDDEN * sizeof(float));
    for (int64_t i = 0; i < 1024 * HIDDEN; i++) s->hidden[i] = noise((uint64_t)i);
    for (int64_t i = 0; i < (int64_t)HEAD_VOCABULARY * HIDDEN; i++) s->weight[i] = 0.05f * noise((uint64_t)i);
    for (int i = 0; i < HEAD_ROWS; i++) s->labels[i] = i * 241 % HEAD_VOCABULARY;
    const double flop = 6e-9 * HEAD_ROWS * (double)HIDDEN * HEAD_VOCABULARY;
    const line l = { "head with CE", "128x1024x32,000", "GFLOP/s", flop, product_rate(s), HEAD_ROWS };
    compare(&l, s, run_head, NULL);
    xd_vocab_destroy(s->vocab);
    free(s->hidden), free(s->d_hidden), free(s->weight), free(s->d_weight), free(s);
}

/* ---- training ---- */

typedef struct step_state {
    xd_param param;
    xd_optimizer *optimizer;
    xd_ema *average;
    float *value, *gradient, *naive, *first, *second, *shadow;
    double step, norm;
} step_state;

static void run_step(void *state) {
    step_state *s = (step_state *)state;
    const xd_optimizer_step_desc d = { .averages = &s->average, .average_count = 1 };
    require(xd_optimizer_step(s->optimizer, &d, NULL));
}

static void naive_step(void *state) {
    step_state *s = (step_state *)state;
    const float c1 = (float)(1.0 - pow(0.9, ++s->step)), c2 = (float)(1.0 - pow(0.999, s->step));
    for (int64_t i = 0; i < ELEMENTS; i++) {
        const float g = s->gradient[i];
        s->first[i] = 0.9f * s->first[i] + 0.1f * g;
        s->second[i] = 0.999f * s->second[i] + 0.001f * g * g;
        const float update = s->first[i] / c1 / (sqrtf(s->second[i] / c2) + 1e-8f);
        s->naive[i] -= 1e-3f * (update + 1e-2f * s->naive[i]);
    }
    for (int64_t i = 0; i < ELEMENTS; i++) s->shadow[i] += 1e-3f * (s->naive[i] - s->shadow[i]);
}

static void run_norm(void *state) {
    step_state *s = (step_state *)state;
    const xd_gradient_norm_desc d = { .params = &s->param, .param_count = 1 };
    xd_gradient_norm norm;
    require(xd_gradient_norm_compute(ctx, NULL, &d, &norm));
}

static void naive_norm(void *state) {
    step_state *s = (step_state *)state;
    double sum = 0.0;
    for (int64_t i = 0; i < ELEMENTS; i++) sum += (double)s->gradient[i] * (double)s->gradient[i];
    s->norm = sqrt(sum);
}

/* A run saves all weights: files of a step are written, synced and renamed. */
static void run_save(void *state) {
    step_state *s = (step_state *)state;
    const xd_weights_entry entry = {
        .name = "w", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = &(int64_t){ ELEMENTS }
    };
    const xd_weights_writer_desc d = { .file = "xdistill-bench.safetensors",
                                       .entries = &entry,
                                       .entry_count = 1 };
    xd_weights_writer *writer = NULL;
    require(xd_weights_writer_create(ctx, &d, &writer));
    require(xd_weights_writer_write(writer, 0, 0, XD_WEIGHTS_REST, s->value));
    require(xd_weights_writer_commit(writer));
}

static void naive_save(void *state) {
    step_state *s = (step_state *)state;
    FILE *file = fopen("xdistill-bench.raw", "wb");
    if (!file || fwrite(s->value, sizeof(float), ELEMENTS, file) != ELEMENTS || fflush(file) ||
        fsync(fileno(file)) || fclose(file))
        exit(2);
}

static void open_step(step_state *s) {
    float **const arrays[] = { &s->value, &s->gradient, &s->naive, &s->first, &s->second, &s->shadow };
    memset(s, 0, sizeof *s);
    for (int i = 0; i < 6; i++) *arrays[i] = (float *)allocate((size_t)ELEMENTS * sizeof(float));
    for (int64_t i = 0; i < ELEMENTS; i++) {
        s->value[i] = s->naive[i] = noise((uint64_t)i);
        s->gradient[i] = 1e-3f * noise((uint64_t)(i + ELEMENTS));
    }
    s->param = (xd_param){ "w", s->value, s->gradient, XD_DTYPE_F32, .count = ELEMENTS };
    const xd_optimizer_desc adamw = xd_adamw_defaults(&s->param, 1);
    require(xd_optimizer_create(ctx, &adamw, &s->optimizer));
    require(xd_ema_create(ctx, &(xd_ema_desc){ .params = &s->param, .param_count = 1, .decay = 0.999 },
                          &s->average));
}

static void bench_training(void) {
    step_state s;
    open_step(&s);
    const line step = {
        "AdamW and average", "8.4 M f32", "GB/s", 36e-9 * ELEMENTS, machine.in_place * 1e-9, 0
    };
    const line norm = { "gradient norm", "8.4 M f32", "GB/s", 4e-9 * ELEMENTS, machine.read * 1e-9, 0 };
    const line save = { "checkpoint save", "34 MB", "GB/s", 4e-9 * ELEMENTS, -1.0, 0 };
    compare(&step, &s, run_step, naive_step);
    compare(&norm, &s, run_norm, naive_norm);
    compare(&save, &s, run_save, naive_save);
    (void)remove("xdistill-bench.safetensors");
    (void)remove("xdistill-bench.raw");
    xd_ema_destroy(s.average);
    xd_optimizer_destroy(s.optimizer);
    free(s.value), free(s.gradient), free(s.naive), free(s.first), free(s.second), free(s.shadow);
}

/* ---- ranks ---- */

enum { SUMMED = 1 << 22 };

static xd_result sum_rank(xd_comm *world, void *seconds) {
    double samples[BENCH_ROUNDS];
    float *data = (float *)allocate((size_t)SUMMED * sizeof *data);
    for (int i = 0; i < BENCH_ROUNDS + 1; i++) {
        XD_TRY(xd_barrier(world));
        const double begin = bench_now();
        XD_TRY(xd_all_reduce(world, data, data, SUMMED, XD_DTYPE_F32, XD_SUM));
        if (i > 0) samples[i - 1] = bench_now() - begin;
    }
    if (xd_comm_rank(world) == 0) *(double *)seconds = bench_summary(samples, BENCH_ROUNDS).median;
    free(data);
    return XD_OK;
}

/* Bus bandwidth as nccl-tests counts it: 2 (n - 1) / n of the bytes. */
static void bench_ranks(void) {
    const line l = { "all-reduce, 2 ranks", "4.2 M f32", "GB/s", 4e-9 * SUMMED, machine.copy * 1e-9, 0 };
    double seconds = 0.0;
    xd_error error;
    if (xd_run_threads(2, NULL, sum_rank, &seconds, &error) != XD_OK) {
        fprintf(stderr, "%s\n", error.message);
        exit(2);
    }
    print_line(&l, seconds, 0.0);
}

/* ---- text ---- */

typedef struct text_state {
    xd_encoder *encoder;
    char *text;
    size_t bytes;
    int64_t tokens;
} text_state;

static void run_encode(void *state) {
    text_state *s = (text_state *)state;
    xd_encoding e;
    require(xd_encode(s->encoder, s->text, s->bytes, NULL, &e));
    s->tokens = e.count;
}

static void bench_text(const bench_options *o) {
    text_state s;
    xd_tokenizer *tokenizer = NULL;
    char size[32];
    memset(&s, 0, sizeof s);
    require(xd_tokenizer_load(ctx, &(xd_tokenizer_desc){ .path = o->tokenizer }, &tokenizer));
    require(xd_encoder_create(ctx, &(xd_encoder_desc){ .tokenizer = tokenizer }, &s.encoder));
    require(xd_file_load(ctx, o->text, 0, &s.text, &s.bytes));
    run_encode(&s);
    snprintf(size, sizeof size, "%.0f KB of text", 1e-3 * (double)s.bytes);
    const line l = { "tokenizer", size, "MB/s", 1e-6 * (double)s.bytes, 0.0, s.tokens };
    compare(&l, &s, run_encode, NULL);
    xd_release(ctx, s.text);
    xd_encoder_destroy(s.encoder);
    xd_tokenizer_destroy(tokenizer);
}

/* ---- the command ---- */

static const option bench_table[] = {
    { .name = "--tokenizer",
      .value = "PATH",
      .kind = OPTION_PATH,
      .field = offsetof(bench_options, tokenizer),
      .help = "a tokenizer.json; with --text, the table has a line of it" },
    { .name = "--text",
      .value = "FILE",
      .kind = OPTION_PATH,
      .field = offsetof(bench_options, text),
      .help = "UTF-8 text" },
    { .name = "-J",
      .value = "FILE",
      .kind = OPTION_PATH,
      .field = offsetof(bench_options, json),
      .help = "gets the table, a line of JSON each" },
};

static const command_line bench_command = {
    "bench",
    "[options]",
    "Prints what each operation takes on this machine, one thread, half a minute on\n"
    "a quiet machine; on a busy one the shares of the roof mean little.\n"
    "Writes 34 MB into the current directory, and removes them.",
    "xdistill bench --tokenizer tokenizer.json --text mine.txt",
    bench_table,
    (int)(sizeof bench_table / sizeof bench_table[0])
};

int command_bench(xd_ctx *tool_ctx, int count, char **words) {
    bench_options o;
    int status;
    memset(&o, 0, sizeof o);
    if (!command_parse(&bench_command, count, words, &o, &status)) return status;
    if (!o.tokenizer != !o.text) return command_lacks(&bench_command, o.text ? "--tokenizer" : "--text");
    json = o.json ? fopen(o.json, "a") : NULL;
    if (o.json && !json) {
        fprintf(stderr, "xdistill bench: cannot write %s\n", o.json);
        return COMMAND_BROKEN;
    }
    ctx = tool_ctx;
    machine = bench_measure_machine((size_t)1 << 28);
    print_head();
    bench_losses();
    bench_pair();
    bench_head();
    bench_training();
    bench_ranks();
    if (o.text) bench_text(&o);
    print_legend();
    if (json) fclose(json);
    return COMMAND_OK;
}
