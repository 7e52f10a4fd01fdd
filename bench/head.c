/* Losses from hidden states and the head on one core, compared with the same losses with all logits in memory. The floor
 * (smallest possible time) is the number of operations over the rate at which this machine multiplies from registers.
 *
 *     make bench-all  or      build/bench/head [-J FILE]
 */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "bench.h"

#if defined(XDI_X86)
#    include <immintrin.h>
#endif

enum { ROWS = 512, VOCABULARY = 8192, WIDTH = 1024 };

typedef struct head_case {
    xd_ctx *ctx;
    xd_vocab *vocab;
    xd_head_loss_desc d;
    float *logits, *teacher_logits, *hidden_gradient, *weight_gradient;
    void *product;
    xd_loss_values values;
} head_case;

static bench_machine machine;

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

/* ---- how fast products can be ---- */

#if defined(XDI_X86)
__attribute__((target("avx512f,avx512bf16"))) static float dots(int64_t n) {
    __m512 sum[16];
    const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (int i = 0; i < 16; i++) sum[i] = _mm512_set1_ps((float)i);
    for (int64_t k = 0; k < n; k++)
#    pragma GCC unroll 16
        for (int i = 0; i < 16; i++) sum[i] = _mm512_dpbf16_ps(sum[i], one, one);
    for (int i = 1; i < 16; i++) sum[0] = _mm512_add_ps(sum[0], sum[i]);
    return _mm512_reduce_add_ps(sum[0]);
}

__attribute__((target("avx512f"))) static float products(int64_t n) {
    __m512 sum[16];
    const __m512 factor = _mm512_set1_ps(0.5f);
    for (int i = 0; i < 16; i++) sum[i] = _mm512_set1_ps((float)i);
    for (int64_t k = 0; k < n; k++)
#    pragma GCC unroll 16
        for (int i = 0; i < 16; i++) sum[i] = _mm512_fmadd_ps(sum[i], factor, factor);
    for (int i = 1; i < 16; i++) sum[0] = _mm512_add_ps(sum[0], sum[i]);
    return _mm512_reduce_add_ps(sum[0]);
}
#endif

/* Operations per second of the instruction that the product uses; 0 if this bench does not know it. */
static double peak(bool bf16) {
#if defined(XDI_X86)
    const bool narrow = bf16 && xd_cpu_supports(XD_CPU_AVX512_BF16);
    double best = 0.0;
    volatile float keep = 0.0f;
    if ((int)xd_cpu_best() < (int)XD_CPU_AVX512) return 0.0;
    for (int round = 0; round < 5; round++) {
        const int64_t n = 1000000;
        const double begin = bench_now();
        keep = keep + (narrow ? dots(n) : products(n));
        best = fmax(best, (double)n * 16.0 * (narrow ? 64.0 : 32.0) / (bench_now() - begin));
    }
    return best;
#else
    (void)bf16;
    return 0.0;
#endif
}

/* ---- the two arms ---- */

static void run_head(void *state) {
    head_case *c = (head_case *)state;
    require(c->ctx, xd_head_loss(c->ctx, &c->d, &c->values));
}

static void multiply(head_case *c, xd_matrix a, xd_matrix b, float *out, bool accumulate) {
    const xd_matmul_args args = { a, b, out, b.cols, accumulate, c->d.bf16, XD_DTYPE_NONE };
    require(c->ctx, xd_matmul(c->ctx, &args, c->product));
}

static void run_logits(void *state) {
    head_case *c = (head_case *)state;
    const xd_rows logits = { c->logits, XD_DTYPE_F32, ROWS, VOCABULARY, 0 };
    const xd_rows teacher = { c->teacher_logits, XD_DTYPE_F32, ROWS, VOCABULARY, 0 };
    const xd_matrix weight = xd_matrix_of_rows(&c->d.student.weight), g = xd_matrix_of_rows(&logits);
    xd_loss_desc d = c->d.loss;
    multiply(c, xd_matrix_of_rows(&c->d.student.hidden), xd_matrix_transposed(weight), c->logits, false);
    if (c->d.teacher.hidden.data) {
        multiply(c, xd_matrix_of_rows(&c->d.teacher.hidden),
                 xd_matrix_transposed(xd_matrix_of_rows(&c->d.teacher.weight)), c->teacher_logits, false);
        d.teacher = teacher;
    }
    d.student = d.common.gradient = logits;
    require(c->ctx, xd_loss(c->ctx, &d, &c->values));
    multiply(c, g, weight, c->hidden_gradient, false);
    multiply(c, xd_matrix_transposed(g), xd_matrix_of_rows(&c->d.student.hidden), c->weight_gradient, true);
}

/* ---- rows ---- */

static xd_rows random_rows(int64_t rows, int64_t cols, xd_dtype dtype, uint64_t seed) {
    xd_rows x = { allocate((size_t)(rows * cols) * xd_dtype_size(dtype)), dtype, rows, cols, 0 };
    for (int64_t i = 0; i < rows * cols; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        xd_store_f64(x.data, dtype, i, (double)(int64_t)(seed >> 11) / 4503599627370496.0 - 1.0);
    }
    return x;
}

static void open_case(head_case *c, bool kl, bool bf16) {
    const xd_dtype dtype = bf16 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    const xd_ctx_desc desc = { .timeout_seconds = 600 };
    int64_t *labels = (int64_t *)allocate(ROWS * sizeof *labels);
    memset(c, 0, sizeof *c);
    for (int i = 0; i < ROWS; i++) labels[i] = i * 13 % VOCABULARY;
    require(NULL, xd_ctx_create(&desc, &c->ctx));
    require(c->ctx, xd_vocab_create(c->ctx, &(xd_vocab_desc){ .size = VOCABULARY }, &c->vocab));
    c->logits = (float *)allocate((size_t)ROWS * VOCABULARY * sizeof(float));
    c->teacher_logits = (float *)allocate((size_t)ROWS * VOCABULARY * sizeof(float));
    c->hidden_gradient = (float *)allocate((size_t)ROWS * WIDTH * sizeof(float));
    c->weight_gradient = (float *)allocate((size_t)VOCABULARY * WIDTH * sizeof(float));
    c->product = allocate(XD_MATMUL_WORKSPACE_BYTES);
    c->d.student.hidden = random_rows(ROWS, WIDTH, dtype, 1);
    c->d.student.weight = random_rows(VOCABULARY, WIDTH, dtype, 2);
    if (kl) {
        c->d.teacher.hidden = random_rows(ROWS, WIDTH, dtype, 3);
        c->d.teacher.weight = random_rows(VOCABULARY, WIDTH, dtype, 4);
    }
    const xd_rows gradient = { c->hidden_gradient, XD_DTYPE_F32, ROWS, WIDTH, 0 };
    c->d.hidden_gradient = gradient;
    c->d.weight_gradient = c->weight_gradient;
    c->d.bf16 = bf16;
    c->d.loss.vocab = c->vocab;
    c->d.loss.common.labels = xd_ids_of(labels, XD_DTYPE_I64);
    c->d.loss.hard_weight = kl ? 0.0 : 1.0;
    c->d.loss.soft_weight = kl ? 1.0 : 0.0;
    xd_planned planned;
    require(c->ctx, xd_plan_begin(c->ctx, NULL));
    require(c->ctx, xd_head_loss(c->ctx, &c->d, &c->values));
    require(c->ctx, xd_plan_end(c->ctx, &planned));
    c->d.workspace_bytes = planned.workspace;
    c->d.workspace = allocate(c->d.workspace_bytes);
}

/* Memory is not freed: the process ends with the bench. */
static bool bench_head(FILE *json, bool kl, bool bf16) {
    head_case head, logits;
    open_case(&head, kl, bf16);
    open_case(&logits, kl, bf16);
    const double operations = (kl ? 8.0 : 6.0) * ROWS * (double)VOCABULARY * WIDTH, rate = peak(bf16);
    bench_row row = { "head",
                      kl ? "KL, teacher's head" : "CE",
                      "\"N\":512,\"V\":8192,\"H\":1024",
                      bf16 ? "bf16" : "f32",
                      rate > 0.0 ? operations : 0.0,
                      rate,
                      "multiply-adds from registers",
                      0.0,
                      1e-5,
                      0.60,
                      (double)head.d.workspace_bytes };
    const bench_arm ours = { "xdistill", &head, run_head, NULL },
                    other = { "logits in memory", &logits, run_logits, NULL };
    run_head(&head);
    run_logits(&logits);
    row.error = fabs(head.values.loss - logits.values.loss) / logits.values.loss;
    const bool right = bench_run(json, &machine, &row, &ours, &other);
    printf("#   workspace %.1f MB, logits in memory %.1f MB\n", (double)head.d.workspace_bytes * 1e-6,
           (kl ? 2.0 : 1.0) * ROWS * VOCABULARY * sizeof(float) * 1e-6);
    return right;
}

int main(int argc, char **argv) {
    FILE *json = bench_open_json(argc, argv);
    int wrong = 0;
    machine = bench_measure_machine((size_t)64 << 20);
    bench_header(&machine, "losses with their head, one core; GB/s counts operations here");
    for (int kl = 0; kl < 2; kl++)
        for (int bf16 = 0; bf16 < 2; bf16++) wrong += !bench_head(json, kl != 0, bf16 != 0);
    printf("# wrong results: %d\n", wrong);
    if (json) fclose(json);
    return wrong == 0 ? 0 : 1;
}
