/* Losses from hidden states and the head against the same loss over logits that exist. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "vocab_calls.h"
#include "planned.h"
#include "xd_test.h"

#include <math.h>
#include <stdlib.h>

enum { ROWS = 300, VOCAB = 320, WIDTH = 24, TEACHER_WIDTH = 17 };

/* One problem, and what is learned about it. */
typedef struct problem {
    int which; /* the loss */
    bool bias, invariant, fast;
    int64_t chunk_rows;
    xd_dtype dtype;
    float hidden[ROWS * WIDTH], weight[VOCAB * WIDTH], offset[VOCAB];
    float teacher_hidden[ROWS * TEACHER_WIDTH], teacher_weight[VOCAB * TEACHER_WIDTH];
    uint16_t hidden_bf16[ROWS * WIDTH], weight_bf16[VOCAB * WIDTH];
    int64_t labels[ROWS];
    /* results of the head, whole */
    float d_hidden[ROWS * WIDTH], d_weight[VOCAB * WIDTH], d_offset[VOCAB], row_loss[ROWS];
    xd_loss_values values;
    /* results of logits that exist */
    double e_hidden[ROWS * WIDTH], e_weight[VOCAB * WIDTH], e_offset[VOCAB];
    xd_loss_values expected;
} problem;

static float uniform(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(int64_t)(*state >> 11) / 4503599627370496.0 - 1.0);
}

static void fill(float *values, int64_t count, uint64_t seed, bool narrow) {
    for (int64_t i = 0; i < count; i++) {
        values[i] = uniform(&seed);
        if (narrow) values[i] = xd_f32_from_bf16(xd_bf16_from_f32(values[i]));
    }
}

static problem *problem_new(int which, xd_dtype dtype) {
    problem *p = (problem *)calloc(1, sizeof *p);
    p->which = which;
    p->dtype = dtype;
    p->bias = which % 2 == 1;
    fill(p->hidden, ROWS * WIDTH, 1, dtype == XD_DTYPE_BF16);
    fill(p->weight, VOCAB * WIDTH, 2, dtype == XD_DTYPE_BF16);
    fill(p->offset, VOCAB, 3, false);
    fill(p->teacher_hidden, ROWS * TEACHER_WIDTH, 4, false);
    fill(p->teacher_weight, VOCAB * TEACHER_WIDTH, 5, false);
    for (int i = 0; i < ROWS * WIDTH; i++) p->hidden_bf16[i] = xd_bf16_from_f32(p->hidden[i]);
    for (int i = 0; i < VOCAB * WIDTH; i++) p->weight_bf16[i] = xd_bf16_from_f32(p->weight[i]);
    for (int r = 0; r < ROWS; r++) p->labels[r] = r % 7 == 3 ? XD_IGNORE_INDEX : (r * 11) % VOCAB;
    return p;
}

/* The loss itself, without its inputs: cross entropy, forward KL, JSD, reverse KL with hard loss. */
static void loss_of(const problem *p, xd_loss_desc *d) {
    static const xd_divergence kinds[4] = { XD_KL_FORWARD, XD_KL_FORWARD, XD_JSD, XD_KL_REVERSE };
    d->common.labels = xd_ids_of(p->labels, XD_DTYPE_I64);
    d->divergence = kinds[p->which];
    d->hard_weight = p->which == 1 || p->which == 2 ? 0.0 : 0.4;
    d->soft_weight = p->which == 0 ? 0.0 : 0.6;
    d->temperature = p->which == 3 ? 2.0 : 1.0;
    d->label_smoothing = p->which == 0 ? 0.1 : 0.0;
    d->common.row_loss = (float *)p->row_loss;
}

/* Cuts of the vocabulary at multiples of the tile, uneven; the last of 3 ranks holds most. */
static int64_t cut(int rank, int ranks) {
    const int64_t tiles = (VOCAB + XD_HEAD_TILE - 1) / XD_HEAD_TILE;
    return rank == ranks ? VOCAB : tiles * rank * rank / (ranks * ranks) * XD_HEAD_TILE;
}

static xd_result head_rank(xd_comm *world, void *argument) {
    problem *p = (problem *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    const int rank = xd_comm_rank(world), ranks = xd_comm_size(world);
    const int64_t begin = cut(rank, ranks), columns = cut(rank + 1, ranks) - begin;
    const bool narrow = p->dtype == XD_DTYPE_BF16;
    float *mine = rank == 0 ? p->d_hidden : (float *)calloc(ROWS * WIDTH, sizeof *mine);
    xd_vocab *vocab = NULL;
    xd_head_loss_desc d;
    xd_loss_values values;
    memset(&d, 0, sizeof d);
    XD_TRY(vocab_of(ctx, world, (xd_interval){ begin, begin + columns }, VOCAB, &vocab));
    loss_of(p, &d.loss);
    d.loss.vocab = vocab;
    const xd_rows hidden = { narrow ? (void *)p->hidden_bf16 : (void *)p->hidden, p->dtype, ROWS, WIDTH, 0 };
    const xd_rows weight = { narrow ? (void *)(p->weight_bf16 + begin * WIDTH)
                                    : (void *)(p->weight + begin * WIDTH),
                             p->dtype, columns, WIDTH, 0 };
    const xd_rows gradient = { mine, XD_DTYPE_F32, ROWS, WIDTH, 0 };
    const xd_rows t_hidden = { p->teacher_hidden, XD_DTYPE_F32, ROWS, TEACHER_WIDTH, 0 };
    const xd_rows t_weight = { p->teacher_weight + begin * TEACHER_WIDTH, XD_DTYPE_F32, columns,
                               TEACHER_WIDTH, 0 };
    d.student.hidden = hidden;
    d.student.weight = weight;
    d.student.bias = p->bias ? p->offset + begin : NULL;
    if (p->which != 0) {
        d.teacher.hidden = t_hidden;
        d.teacher.weight = t_weight;
    }
    d.hidden_gradient = gradient;
    d.weight_gradient = p->d_weight + begin * WIDTH;
    d.bias_gradient = p->bias ? p->d_offset + begin : NULL;
    d.chunk_rows = p->chunk_rows;
    d.bf16 = p->fast;
    if (rank > 0) d.loss.common.row_loss = NULL;
    d.workspace_bytes = PLANNED_WORKSPACE(ctx, xd_head_loss(ctx, &d, &values));
    d.workspace = malloc(d.workspace_bytes);
    const xd_result result = xd_head_loss(ctx, &d, &values);
    free(d.workspace);
    if (rank == 0) p->values = values;
    if (rank > 0) {
        /* every rank of the vocabulary has the whole gradient; rank 0's is complete behind the barrier */
        if (result == XD_OK) XD_TRY(xd_barrier(world));
        CHECK(memcmp(mine, p->d_hidden, sizeof p->d_hidden) == 0);
        free(mine);
    } else if (result == XD_OK) {
        XD_TRY(xd_barrier(world));
    }
    xd_vocab_destroy(vocab);
    return result;
}

static void run_head(problem *p, int ranks) {
    xd_error error;
    const xd_ctx_desc desc = { .reduction =
                                   p->invariant ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC };
    memset(p->d_weight, 0, sizeof p->d_weight);
    memset(p->d_offset, 0, sizeof p->d_offset);
    memset(&error, 0, sizeof error);
    CHECK_EQ_INT(xd_run_threads(ranks, &desc, head_rank, p, &error), XD_OK);
    if (error.message[0]) printf("        %s\n", error.message);
}

/* out[m, n] = a[m, k] b[n, k]^T in double. */
static void product(const float *a, const float *b, const float *bias, int m, int n, int k, float *out) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = bias ? (double)bias[j] : 0.0;
            for (int l = 0; l < k; l++) sum += (double)a[i * k + l] * (double)b[j * k + l];
            out[i * n + j] = (float)sum;
        }
}

/* The same with logits in memory, one rank. */
static void run_logits(problem *p) {
    static float student[ROWS * VOCAB], teacher[ROWS * VOCAB], gradient[ROWS * VOCAB];
    xd_ctx *ctx = NULL;
    xd_vocab *vocab = NULL;
    xd_loss_desc d;
    memset(&d, 0, sizeof d);
    product(p->hidden, p->weight, p->bias ? p->offset : NULL, ROWS, VOCAB, WIDTH, student);
    product(p->teacher_hidden, p->teacher_weight, NULL, ROWS, VOCAB, TEACHER_WIDTH, teacher);
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(vocab_even(ctx, NULL, VOCAB, &vocab), XD_OK);
    const xd_rows x = { student, XD_DTYPE_F32, ROWS, VOCAB, 0 },
                  y = { teacher, XD_DTYPE_F32, ROWS, VOCAB, 0 };
    const xd_rows g = { gradient, XD_DTYPE_F32, ROWS, VOCAB, 0 };
    loss_of(p, &d);
    d.vocab = vocab;
    d.student = x;
    if (p->which != 0) d.teacher = y;
    d.common.gradient = g;
    d.common.row_loss = NULL;
    CHECK_EQ_INT(xd_loss(ctx, &d, &p->expected), XD_OK);
    memset(p->e_hidden, 0, sizeof p->e_hidden);
    memset(p->e_weight, 0, sizeof p->e_weight);
    memset(p->e_offset, 0, sizeof p->e_offset);
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VOCAB; v++) {
            const double share = (double)gradient[r * VOCAB + v];
            p->e_offset[v] += share;
            for (int i = 0; i < WIDTH; i++) {
                p->e_hidden[r * WIDTH + i] += share * (double)p->weight[v * WIDTH + i];
                p->e_weight[v * WIDTH + i] += share * (double)p->hidden[r * WIDTH + i];
            }
        }
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
}

static void check_near(const char *name, const float *got, const double *expected, int count, double bound) {
    double largest = 0.0, worst = 0.0;
    for (int i = 0; i < count; i++) {
        largest = fmax(largest, fabs(expected[i]));
        worst = fmax(worst, fabs((double)got[i] - expected[i]));
    }
    CHECK(worst <= bound * largest);
    if (worst > bound * largest) printf("        %s is off by %g of %g\n", name, worst, largest);
}

XD_TEST(value_and_gradients_are_those_of_logits_on_every_mesh) {
    for (int which = 0; which < 4; which++)
        for (int ranks = 1; ranks <= 3; ranks++) {
            problem *p = problem_new(which, ranks == 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32);
            run_logits(p);
            run_head(p, ranks);
            CHECK(fabs(p->values.loss - p->expected.loss) <= 1e-6 * fabs(p->expected.loss));
            CHECK_EQ_INT(p->values.counted, p->expected.counted);
            check_near("hidden", p->d_hidden, p->e_hidden, ROWS * WIDTH, 3e-6);
            check_near("weight", p->d_weight, p->e_weight, VOCAB * WIDTH, 3e-6);
            if (p->bias) check_near("bias", p->d_offset, p->e_offset, VOCAB, 3e-6);
            free(p);
        }
}

XD_TEST(bf16_products_are_as_good_as_bf16) {
    problem *p = problem_new(3, XD_DTYPE_BF16);
    p->fast = true;
    run_logits(p);
    run_head(p, 1);
    CHECK(fabs(p->values.loss - p->expected.loss) <= 4e-3 * fabs(p->expected.loss)); /* the teacher is f32 */
    check_near("hidden", p->d_hidden, p->e_hidden, ROWS * WIDTH, 1e-2);
    check_near("weight", p->d_weight, p->e_weight, VOCAB * WIDTH, 1e-2);
    check_near("bias", p->d_offset, p->e_offset, VOCAB, 1e-2);
    free(p);
}

XD_TEST(gradients_of_the_head_do_not_depend_on_the_chunk) {
    problem *a = problem_new(3, XD_DTYPE_F32), *b = problem_new(3, XD_DTYPE_F32);
    b->chunk_rows = 512;
    run_head(a, 1);
    run_head(b, 1);
    CHECK(memcmp(a->d_hidden, b->d_hidden, sizeof a->d_hidden) == 0);
    CHECK(memcmp(a->d_weight, b->d_weight, sizeof a->d_weight) == 0);
    CHECK(memcmp(a->d_offset, b->d_offset, sizeof a->d_offset) == 0);
    CHECK(memcmp(a->row_loss, b->row_loss, sizeof a->row_loss) == 0);
    CHECK(a->values.loss == b->values.loss);
    free(a);
    free(b);
}

XD_TEST(invariant_mode_has_the_same_bits_for_every_cut_at_a_tile) {
    problem *one = problem_new(3, XD_DTYPE_F32);
    one->invariant = true;
    run_head(one, 1);
    for (int ranks = 2; ranks <= 4; ranks++) {
        problem *p = problem_new(3, XD_DTYPE_F32);
        p->invariant = true;
        run_head(p, ranks);
        CHECK(memcmp(one->d_hidden, p->d_hidden, sizeof p->d_hidden) == 0);
        CHECK(memcmp(one->d_weight, p->d_weight, sizeof p->d_weight) == 0);
        CHECK(memcmp(one->d_offset, p->d_offset, sizeof p->d_offset) == 0);
        CHECK(one->values.loss == p->values.loss);
        free(p);
    }
    free(one);
}

/* ---- refusals ---- */

static void refuse(xd_ctx *ctx, const xd_head_loss_desc *d, xd_result result, const char *words) {
    xd_loss_values values = { 7.0, 0.0, 0.0, 0 };
    CHECK_EQ_INT(xd_head_loss(ctx, d, &values), result);
    CHECK(strstr(xd_last_error(ctx)->message, words) != NULL);
    if (!strstr(xd_last_error(ctx)->message, words)) printf("        %s\n", xd_last_error(ctx)->message);
    CHECK(values.loss == 7.0);
}

XD_TEST(heads_that_do_not_fit_are_refused_with_both_numbers) {
    problem *p = problem_new(0, XD_DTYPE_F32);
    xd_ctx *ctx = NULL;
    xd_vocab *vocab = NULL;
    xd_head_loss_desc d;
    memset(&d, 0, sizeof d);
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(vocab_even(ctx, NULL, VOCAB, &vocab), XD_OK);
    const xd_rows hidden = { p->hidden, XD_DTYPE_F32, ROWS, WIDTH, 0 };
    const xd_rows weight = { p->weight, XD_DTYPE_F32, VOCAB, WIDTH, 0 };
    d.student.hidden = hidden;
    d.student.weight = weight;
    refuse(ctx, &d, XD_ERROR_ARGUMENT, "no vocabulary");
    loss_of(p, &d.loss);
    d.loss.vocab = vocab;
    d.student.weight.rows = VOCAB - 1;
    refuse(ctx, &d, XD_ERROR_SHAPE, "student weight has 319 rows, this rank's part of the vocabulary 320");
    d.student.weight = weight;
    d.student.hidden.cols = 23;
    refuse(ctx, &d, XD_ERROR_SHAPE, "student hidden is 23 wide, its weight 24");
    d.student.hidden = hidden;
    d.chunk_rows = 100;
    refuse(ctx, &d, XD_ERROR_ARGUMENT, "chunk_rows 100 is not a multiple of 256");
    d.chunk_rows = 0;
    d.hidden_gradient = hidden;
    d.hidden_gradient.rows = 1;
    refuse(ctx, &d, XD_ERROR_SHAPE, "the gradient of hidden is [1, 24], not [300, 24]");
    d.hidden_gradient.rows = ROWS;
    d.teacher.hidden = hidden;
    d.teacher.hidden.rows = 2;
    d.teacher.weight = weight;
    refuse(ctx, &d, XD_ERROR_SHAPE, "teacher hidden has 2 rows, the student 300");
    memset(&d.teacher, 0, sizeof d.teacher);
    float small[16];
    d.hidden_gradient.data = p->d_hidden;
    d.workspace = small;
    d.workspace_bytes = sizeof small;
    refuse(ctx, &d, XD_ERROR_ARGUMENT, "workspace has 64 bytes but the loss needs");
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
    free(p);
}

XD_TEST_MAIN()
