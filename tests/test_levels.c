/* INVARIANT mode's losses and gradients have the same bits on every CPU level. */
#include "xdistill.h"
#include "vocab_calls.h"
#include "xd_test.h"
#include "xd_test_cpu.h"

enum { ROWS = 9, SIZE = 1003, CELLS = ROWS * SIZE };

typedef struct inputs {
    float student[CELLS], teacher[CELLS];
    uint16_t student_narrow[CELLS], teacher_narrow[CELLS];
    int64_t labels[ROWS];
} inputs;

/* Rows of logits up to 2, 4, 8 and so on. */
static void fill(inputs *in) {
    uint64_t state = 3;
    for (int i = 0; i < 2 * CELLS; i++) {
        float *to = i < CELLS ? in->student : in->teacher;
        state = state * 6364136223846793005u + 1442695040888963407u;
        to[i % CELLS] = (float)ldexp((double)(state >> 11) / 4503599627370496.0 - 1.0, i % CELLS / SIZE + 1);
    }
    for (int i = 0; i < CELLS; i++) {
        in->student_narrow[i] = xd_bf16_from_f32(in->student[i]);
        in->teacher_narrow[i] = xd_bf16_from_f32(in->teacher[i]);
    }
    for (int r = 0; r < ROWS; r++) in->labels[r] = r * 97;
}

/* The loss of kind `which` on a level. */
static double run(inputs *in, int level, int which, bool narrow, float *gradient) {
    static const xd_divergence kinds[5] = { XD_KL_FORWARD, XD_KL_FORWARD, XD_KL_REVERSE, XD_JSD, XD_SOFT_CE };
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    xd_vocab *vocab = NULL;
    xd_loss_desc d;
    xd_loss_values values;
    memset(&desc, 0, sizeof desc);
    memset(&d, 0, sizeof d);
    desc.cpu = (xd_cpu_level)level;
    desc.reduction = XD_REDUCTION_INVARIANT;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK && vocab_even(ctx, NULL, SIZE, &vocab) == XD_OK);
    const xd_dtype dtype = narrow ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    d.student = xd_rows_of(narrow ? (void *)in->student_narrow : (void *)in->student, dtype, ROWS, SIZE);
    d.vocab = vocab;
    d.temperature = which == 3 ? 1.7 : 1.0;
    d.common.labels = xd_ids_of(in->labels, XD_DTYPE_I64);
    d.common.gradient = xd_rows_of(gradient, dtype, ROWS, SIZE);
    d.hard_weight = which == 2 ? 0.0 : 0.5;
    d.label_smoothing = which == 3 ? 0.1 : 0.0;
    if (which > 0) {
        d.teacher = xd_rows_of(narrow ? (void *)in->teacher_narrow : (void *)in->teacher, dtype, ROWS, SIZE);
        d.soft_weight = 1.0;
        d.divergence = kinds[which];
        d.beta = 0.3;
    }
    CHECK(xd_loss(ctx, &d, &values) == XD_OK);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
    return values.loss;
}

XD_TEST(invariant_gradients_have_the_same_bits_on_every_level) {
    static inputs in;
    static float expected[CELLS], gradient[CELLS];
    fill(&in);
    for (int which = 0; which < 10; which++) {
        const bool narrow = which >= 5;
        memset(expected, 0, sizeof expected);
        const double loss = run(&in, XD_CPU_PLAIN, which % 5, narrow, expected);
        XD_TEST_LEVELS(level, XD_CPU_PORTABLE) {
            memset(gradient, 0, sizeof gradient);
            CHECK(run(&in, level, which % 5, narrow, gradient) == loss);
            CHECK(memcmp(gradient, expected, sizeof gradient) == 0);
        }
    }
}

XD_TEST_MAIN()
