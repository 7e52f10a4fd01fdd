/* One distillation on four ranks: two data-parallel ranks times two vocabulary-parallel ranks.
 *
 * The ranks are threads of this process. The student is a table with one row of logits per token.
 * Its forward pass copies rows, and its backward pass adds them up. A real model replaces both.
 *
 *     cc -std=c99 -O2 examples/01_quickstart.c -o quickstart -lm -lpthread
 */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { VOCABULARY = 50, COLUMNS = VOCABULARY / 2, POSITIONS = 75, STEPS = 200 };

/* A tensor-parallel rank holds COLUMNS columns of every matrix. */
typedef struct rank_memory {
    float table[VOCABULARY * COLUMNS]; /* the weights of the student */
    float table_gradient[VOCABULARY * COLUMNS];
    float student[POSITIONS * COLUMNS]; /* logits */
    float teacher[POSITIONS * COLUMNS]; /* logits */
    float gradient[POSITIONS * COLUMNS];
    int64_t token[POSITIONS];
    int64_t label[POSITIONS];
} rank_memory;

/* The most probable next token of the teacher. */
static int64_t favourite(int64_t token) { return (5 * token + 3) % VOCABULARY; }

static float teacher_logit(int64_t token, int64_t next) {
    return (next == favourite(token) ? 4.0f : 0.0f) + cosf((float)(token + 3 * next));
}

/* Writes the text of this data rank, and the teacher's logits for the columns from `begin` on. */
static void prepare(rank_memory *m, int data_rank, int64_t begin) {
    for (int64_t t = 0; t < POSITIONS; t++) {
        m->token[t] = (data_rank * POSITIONS + t) % VOCABULARY;
        m->label[t] = favourite(m->token[t]);
        for (int64_t c = 0; c < COLUMNS; c++)
            m->teacher[t * COLUMNS + c] = teacher_logit(m->token[t], begin + c);
    }
}

static void forward(rank_memory *m) {
    for (int64_t t = 0; t < POSITIONS; t++) {
        const float *row = m->table + m->token[t] * COLUMNS;
        memcpy(m->student + t * COLUMNS, row, COLUMNS * sizeof(float));
    }
}

static void backward(rank_memory *m) {
    memset(m->table_gradient, 0, sizeof m->table_gradient);
    for (int64_t t = 0; t < POSITIONS; t++)
        for (int64_t c = 0; c < COLUMNS; c++)
            m->table_gradient[m->token[t] * COLUMNS + c] += m->gradient[t * COLUMNS + c];
}

static xd_result train(xd_comm *world, const xd_loss_desc *desc, xd_optimizer *optimizer,
                       rank_memory *m, xd_loss_values *loss) {
    xd_comm *dp = desc->common.comm;
    float *gradient = m->table_gradient;
    const int64_t count = VOCABULARY * COLUMNS;
    for (int step = 0; step <= STEPS; step++) {
        forward(m);
        XD_TRY(xd_loss(xd_comm_ctx(world), desc, loss));
        backward(m);
        XD_TRY(xd_all_reduce(dp, gradient, gradient, count, XD_DTYPE_F32, XD_SUM));
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
        if (xd_comm_rank(world) == 0 && step % 50 == 0)
            printf("step %3d   cross entropy %.4f   KL to the teacher %.4f\n", step, loss->hard,
                   loss->soft);
    }
    return XD_OK;
}

/* Every rank runs this function. A call that fails on one rank returns an error on all ranks. */
static xd_result run_rank(xd_comm *world, void *unused) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_mesh *mesh;
    xd_comm *dp, *tp;
    xd_vocab *vocab;
    xd_denominator denominator;
    xd_optimizer *optimizer;
    xd_loss_values loss;
    rank_memory memory = { 0 }, *m = &memory;
    (void)unused;

    const xd_mesh_desc mesh_desc = { .axes = { { "dp", 2 }, { "tp", 2 } } };
    XD_TRY(xd_mesh_create(world, &mesh_desc, &mesh));
    XD_TRY(xd_mesh_group(mesh, "dp", &dp));
    XD_TRY(xd_mesh_group(mesh, "tp", &tp));
    XD_TRY(xd_vocab_create(ctx, &(xd_vocab_desc){ .size = VOCABULARY, .tp = tp }, &vocab));
    prepare(m, xd_comm_rank(dp), xd_vocab_describe(vocab).begin);

    /* The mean is over the counted positions of the global batch, not only of this rank. */
    const xd_positions positions = { .count = POSITIONS, .labels.data = m->label };
    XD_TRY(xd_denominator_count(ctx, dp, &positions, 1, &denominator));

    const xd_param param = {
        .name = "table",
        .value = m->table,
        .gradient = m->table_gradient,
        .dtype = XD_DTYPE_F32,
        .count = VOCABULARY * COLUMNS,
    };
    xd_optimizer_desc adamw = xd_adamw_defaults(&param, 1);
    adamw.learning_rate = 0.05;
    XD_TRY(xd_optimizer_create(ctx, &adamw, &optimizer));

    const xd_loss_desc desc = {
        .student = { m->student, XD_DTYPE_F32, POSITIONS, COLUMNS, 0 },
        .teacher = { m->teacher, XD_DTYPE_F32, POSITIONS, COLUMNS, 0 },
        .common.gradient = { m->gradient, XD_DTYPE_F32, POSITIONS, COLUMNS, 0 },
        .common.labels.data = m->label,
        .common.comm = dp,
        .common.denominator = &denominator,
        .vocab = vocab,
        .hard_weight = 0.1,
        .soft_weight = 0.9,
    };
    XD_TRY(train(world, &desc, optimizer, m, &loss));

    xd_optimizer_destroy(optimizer);
    xd_vocab_destroy(vocab);
    xd_mesh_destroy(mesh);
    if (loss.soft < 0.01) return XD_OK;
    return XD_FAIL(ctx, XD_ERROR_DATA, "the KL divergence is still %g", loss.soft);
}

int main(void) {
    xd_error error;
    if (xd_run_threads(4, NULL, run_rank, NULL, &error) == XD_OK) return 0;
    fprintf(stderr, "rank %d: %s: %s\n", error.rank, xd_result_name(error.result), error.message);
    return 1;
}
