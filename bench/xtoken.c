/* Losses across tokenizers at real sizes on one core, value and gradient, compared with the plain level's double loops.
 * A row is one call; times are the thread's processor time, so that other work on the machine counts less.
 *
 *     make bench-all  or      build/bench/xtoken [-J FILE]
 */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "bench.h"

enum { ROWS = 16, STUDENT = 128256, TEACHER = 151936, PAIRS = 109000, ENTRIES = 4 };

/* One call and its data. */
typedef struct xtoken_case {
    xd_ctx *ctx;
    xd_vocab *vocab;
    xd_projection projection;
    xd_exact_map map;
    xd_xtoken_teacher teacher;
    xd_xtoken_desc d;
    xd_xtoken_values values;
    int64_t student_chunks[ROWS], teacher_chunks[ROWS], labels[ROWS];
    float *gradient;
    double reference;
} xtoken_case;

static bench_machine machine;
static size_t allocated, most_allocated;

/* Counts what a call allocates besides its workspace. A block stores its size. */
static void *counting_allocate(void *user, size_t bytes) {
    unsigned char *memory = (unsigned char *)malloc(bytes + 64);
    (void)user;
    if (!memory) return NULL;
    memcpy(memory, &bytes, sizeof bytes);
    allocated += bytes;
    if (allocated > most_allocated) most_allocated = allocated;
    return memory + 64;
}

static void counting_release(void *user, void *memory) {
    unsigned char *block = (unsigned char *)memory - 64;
    size_t bytes;
    (void)user;
    memcpy(&bytes, block, sizeof bytes);
    allocated -= bytes;
    free(block);
}

static void *allocate(size_t bytes) {
    void *memory = calloc(bytes, 1);
    if (!memory) exit(2);
    return memory;
}

static void require(xd_ctx *ctx, xd_result result) {
    if (result == XD_OK) return;
    fprintf(stderr, "%s: %s\n", xd_result_name(result), xd_last_error(ctx)->message);
    exit(2);
}

static uint64_t seed = 1;

static double uniform(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(seed >> 11) / 9007199254740992.0;
}

/* Logits of a model: normally distributed, with a few large ones. */
static xd_rows random_logits(int64_t cols) {
    xd_rows x = { allocate((size_t)(ROWS * cols) * sizeof(float)), XD_DTYPE_F32, ROWS, cols, 0 };
    float *z = (float *)x.data;
    for (int64_t i = 0; i < ROWS * cols; i++)
        z[i] = (float)(2.0 * (uniform() + uniform() + uniform() + uniform() - 2.0) +
                       (uniform() < 1e-4 ? 8.0 : 0.0));
    return x;
}

/* Most ids have one partner; the others are spelled with a few ids, and the shorter tokens (the lower ids) are
 * in every second row. */
static void make_projection(xtoken_case *c) {
    int32_t *ids = (int32_t *)allocate((size_t)STUDENT * ENTRIES * sizeof *ids);
    float *weights = (float *)allocate((size_t)STUDENT * ENTRIES * sizeof *weights);
    const xd_projection_rows rows = { ids, weights, STUDENT, ENTRIES };
    for (int64_t v = 0; v < STUDENT; v++)
        for (int e = 0; e < ENTRIES; e++) {
            const bool exact = v < PAIRS;
            ids[v * ENTRIES + e] = (int32_t)(uniform() * uniform() * uniform() * TEACHER);
            weights[v * ENTRIES + e] = exact ? 1.0f : 0.25f;
            if (exact) ids[v * ENTRIES + e] = e == 0 ? (int32_t)(v * 7 % TEACHER) : -1;
        }
    const xd_exact_map_desc map = { &rows, TEACHER, false };
    require(c->ctx, xd_exact_map_create(c->ctx, &map, &c->map));
    for (int64_t v = 0; v < PAIRS; v++) /* as in the reference's file: every row is full */
        for (int e = 0; e < ENTRIES; e++) {
            if (e > 0) ids[v * ENTRIES + e] = (int32_t)(uniform() * uniform() * uniform() * TEACHER);
            weights[v * ENTRIES + e] = e == 0 ? 0.9f : 0.1f / (ENTRIES - 1);
        }
    require(c->ctx, xd_projection_from_rows(c->ctx, &rows, STUDENT, TEACHER, &c->projection));
    free(ids);
    free(weights);
}

/* Four positions of five are separate chunks. */
static void make_chunks(xtoken_case *c) {
    int64_t chunk = 0;
    for (int64_t i = 0; i < ROWS; i++) {
        c->student_chunks[i] = i % 5 == 4 ? chunk - 1 : chunk++;
        c->labels[i] = i * 997 % STUDENT;
    }
    for (int64_t i = 0; i < ROWS; i++) c->teacher_chunks[i] = i * chunk / ROWS;
    c->teacher.chunks = chunk;
}

static void open_case(xtoken_case *c, xd_xtoken_kind kind) {
    const xd_ctx_desc desc = { .timeout_seconds = 600,
                               .allocator = { counting_allocate, counting_release, NULL } };
    memset(c, 0, sizeof *c);
    require(NULL, xd_ctx_create(&desc, &c->ctx));
    require(c->ctx, xd_vocab_create(c->ctx, &(xd_vocab_desc){ .size = STUDENT }, &c->vocab));
    make_projection(c);
    make_chunks(c);
    c->teacher.kind = kind;
    c->teacher.weight = 1.0;
    c->d = xd_xtoken_defaults();
    c->teacher.logits = random_logits(TEACHER);
    c->teacher.student_chunks = c->student_chunks;
    c->teacher.teacher_chunks = c->teacher_chunks;
    c->teacher.projected.projection = &c->projection;
    c->teacher.gold.map = &c->map;
    c->gradient = (float *)allocate((size_t)ROWS * STUDENT * sizeof(float));
    c->d.student = random_logits(STUDENT);
    c->d.common.gradient = c->d.student;
    c->d.common.gradient.data = c->gradient;
    c->d.vocab = c->vocab;
    c->d.teachers = &c->teacher;
    c->d.teacher_count = 1;
    c->d.common.labels.data = c->labels;
}

static void run_ours(void *state) {
    xtoken_case *c = (xtoken_case *)state;
    require(c->ctx, xd_xtoken_loss(c->ctx, &c->d, &c->values));
}

/* The same call on the plain level: doubles, one element after the other. */
static void run_plain(void *state) {
    xtoken_case *c = (xtoken_case *)state;
    const xd_ctx_desc desc = { .timeout_seconds = 600, .cpu = XD_CPU_PLAIN };
    xd_xtoken_values values;
    xd_ctx *ctx = NULL;
    xd_xtoken_desc d = c->d;
    xd_vocab *vocab = NULL;
    require(NULL, xd_ctx_create(&desc, &ctx));
    require(ctx, xd_vocab_create(ctx, &(xd_vocab_desc){ .size = STUDENT }, &vocab));
    d.vocab = vocab;
    require(ctx, xd_xtoken_loss(ctx, &d, &values));
    c->reference = values.loss;
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
}

static double thread_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static double measure_ours(void *state) {
    const double begin = thread_seconds();
    run_ours(state);
    return thread_seconds() - begin;
}

static double measure_plain(void *state) {
    const double begin = thread_seconds();
    run_plain(state);
    return thread_seconds() - begin;
}

static bool bench_kind(FILE *json, xd_xtoken_kind kind, const char *name) {
    xtoken_case c;
    open_case(&c, kind);
    run_ours(&c);
    run_plain(&c);
    bench_row row;
    memset(&row, 0, sizeof row);
    row.op = "cross-tokenizer loss";
    row.variant = name;
    row.shape = "\"T\":16,\"Vs\":128256,\"Vt\":151936,\"K\":8192";
    row.dtype = "f32";
    row.bytes = (double)ROWS * (3.0 * STUDENT + 2.0 * TEACHER) * sizeof(float);
    row.ceiling = machine.read;
    row.ceiling_name = "read";
    row.error = fabs(c.values.loss - c.reference) / c.reference;
    row.error_limit = 1e-6;
    const bench_arm ours = { "xdistill", &c, NULL, measure_ours },
                    other = { "plain", &c, NULL, measure_plain };
    most_allocated = allocated;
    const size_t before = allocated;
    run_ours(&c);
    const size_t extra = most_allocated - before;
    row.extra_bytes = (double)extra;
    const bool right = bench_run(json, &machine, &row, &ours, &other);
    printf("#   %lld entries or pairs; memory of the call %.1f MB\n",
           (long long)(kind == XD_XTOKEN_GOLD ? c.map.pairs : c.projection.entries), (double)extra * 1e-6);
    c.d.student.rows = c.d.common.gradient.rows = c.teacher.logits.rows = 2048;
    c.teacher.chunks = 1640;
    xd_planned planned;
    require(c.ctx, xd_plan_begin(c.ctx, NULL));
    require(c.ctx, xd_xtoken_loss(c.ctx, &c.d, &c.values));
    require(c.ctx, xd_plan_end(c.ctx, &planned));
    printf("#   at T = 2048 the workspace is %.1f MB\n", (double)planned.workspace * 1e-6);
    return right;
}

int main(int argc, char **argv) {
    FILE *json = bench_open_json(argc, argv);
    int wrong = 0;
    machine = bench_measure_machine((size_t)64 << 20);
    bench_header(&machine, "losses across tokenizers, one core");
    wrong += !bench_kind(json, XD_XTOKEN_PROJECTED, "projected");
    wrong += !bench_kind(json, XD_XTOKEN_GOLD, "gold");
    printf("# wrong results: %d\n", wrong);
    if (json) fclose(json);
    return wrong == 0 ? 0 : 1;
}
