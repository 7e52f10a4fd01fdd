/* One distillation on four ranks, which are threads of this process: two data ranks times two vocabulary ranks.
 *
 *     cc -std=c99 -O2 examples/01_quickstart.c -o quickstart -lm -lpthread
 *
 * The student is a table: one row of logits for every token. Its forward pass copies rows and its backward pass adds
 * them up; a real model replaces these two functions. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { VOCABULARY = 50, COLUMNS = VOCABULARY / 2, POSITIONS = 75, STEPS = 200 };

typedef struct rank_memory {
    float table[VOCABULARY * COLUMNS]; /* the student: this rank's columns */
    float table_gradient[VOCABULARY * COLUMNS];
    float student[POSITIONS * COLUMNS], teacher[POSITIONS * COLUMNS], gradient[POSITIONS * COLUMNS];
    int64_t token[POSITIONS], label[POSITIONS];
} rank_memory;

/* The teacher's logits for the token after `token`: one clearly most probable token, different values for the others. */
static int64_t favourite(int64_t token) { return (5 * token + 3) % VOCABULARY; }

static float teacher_logit(int64_t token, int64_t next) {
    return (next == favourite(token) ? 4.0f : 0.0f) + cosf((float)(token + 3 * next));
}

/* This data rank's text, and the teacher's logits for the columns that start at `begin`. */
static void prepare(rank_memory *m, int data_rank, int64_t begin) {
    for (int64_t t = 0; t < POSITIONS; t++) {
        m->token[t] = (data_rank * POSITIONS + t) % VOCABULARY;
        m->label[t] = favourite(m->token[t]);
        for (int64_t c = 0; c < COLUMNS; c++) m->teacher[t * COLUMNS + c] = teacher_logit(m->token[t], begin + c);
    }
}

static void forward(rank_memory *m) {
    for (int64_t t = 0; t < POSITIONS; t++)
        memcpy(m->student + t * COLUMNS, m->table + m->token[t] * COLUMNS, COLUMNS * sizeof(float));
}

static void backward(rank_memory *m) {
    memset(m->table_gradient, 0, sizeof m->table_gradient);
    for (int64_t t = 0; t < POSITIONS; t++)
        for (int64_t c = 0; c < COLUMNS; c++)
            m->table_gradient[m->token[t] * COLUMNS + c] += m->gradient[t * COLUMNS + c];
}

/* What every rank runs. A call that fails on one rank fails on all of them, so each just returns. */
static xd_result run_rank(xd_comm *world, void *argument) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_mesh *mesh;
    xd_comm *dp, *tp;
    xd_vocab *vocab;
    xd_denominator denominator;
    xd_optimizer *optimizer;
    xd_loss_values loss;
    rank_memory memory = { 0 }, *m = &memory;
    (void)argument;
    XD_TRY(xd_mesh_create(world, &(xd_mesh_desc){ .axes = { { "dp", 2 }, { "tp", 2 } } }, &mesh));
    XD_TRY(xd_mesh_group(mesh, "dp", &dp));
    XD_TRY(xd_mesh_group(mesh, "tp", &tp));
    XD_TRY(xd_vocab_create_even(ctx, tp, VOCABULARY, &vocab));
    prepare(m, xd_comm_rank(dp), xd_vocab_describe(vocab).begin);
    /* The mean is over the counted positions of the whole batch, not of this rank. */
    XD_TRY(xd_denominator_count(ctx, dp, &(xd_positions){ POSITIONS, .labels.data = m->label }, 1, &denominator));
    const xd_param param = { "table", m->table, m->table_gradient, XD_DTYPE_F32, .count = VOCABULARY * COLUMNS };
    xd_optimizer_desc adamw = xd_adamw_defaults(&param, 1);
    adamw.learning_rate = 0.05;
    XD_TRY(xd_optimizer_create(ctx, &adamw, &optimizer));
    const xd_loss_desc desc = {
        .student = { m->student, XD_DTYPE_F32, POSITIONS, COLUMNS, 0 },
        .teacher = { m->teacher, XD_DTYPE_F32, POSITIONS, COLUMNS, 0 },
        .common.gradient = { m->gradient, XD_DTYPE_F32, POSITIONS, COLUMNS, 0 },
        .common.labels.data = m->label, .vocab = vocab, .common.comm = dp, .common.denominator = &denominator,
        .hard_weight = 0.1, .soft_weight = 0.9,
    };
    for (int step = 0; step <= STEPS; step++) {
        forward(m);
        XD_TRY(xd_loss(ctx, &desc, &loss));
        backward(m);
        XD_TRY(xd_all_reduce(dp, m->table_gradient, m->table_gradient, param.count, XD_DTYPE_F32, XD_SUM));
        XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
        if (xd_comm_rank(world) == 0 && step % 50 == 0)
            printf("step %3d   cross entropy %.4f   KL to the teacher %.4f\n", step, loss.hard, loss.soft);
    }
    xd_optimizer_destroy(optimizer);
    xd_vocab_destroy(vocab);
    xd_mesh_destroy(mesh);
    return loss.soft < 0.01 ? XD_OK : XD_FAIL(ctx, XD_ERROR_DATA, "the KL divergence is still %g", loss.soft);
}

int main(void) {
    xd_error error;
    if (xd_run_threads(4, NULL, run_rank, NULL, &error) == XD_OK) return 0;
    fprintf(stderr, "rank %d: %s: %s\n", error.rank, xd_result_name(error.result), error.message);
    return 1;
}
