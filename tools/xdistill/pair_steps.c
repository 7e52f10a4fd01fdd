/* pair_steps.c - what each rank does: the teacher on each row, the loss over a part of the student's columns, an update. */
#include "pair_steps.h"
#include "../../examples/common/sample.h"
#include "../../examples/nn/nn_transformer.h"
#include "losses.h"
#include "ranks.h"

#include <string.h>

enum { STEPS_PLACES = PAIRING_PLACES * PAIR_STEPS_ROW, STEPS_HELD = PAIR_STEPS_ROWS * PAIR_STEPS_ROW };

typedef struct steps_job {
    const pair_steps_desc *desc;
    pair_steps *out;
    nn_model teacher;
    float *teacher_weights; /* read only, so all ranks share them */
} steps_job;

typedef struct steps_rank {
    steps_job *job;
    xd_ctx *ctx;
    xd_comm *world;
    nn_model model;
    nn_batch batch;
    xd_vocab *columns;
    xd_param *params;
    xd_optimizer *optimizer;
    float *weights, *gradient, *workspace, *logits;
    float *teacher_workspace, *teacher_logits; /* logits [rows, PLACES, vocabulary] */
    int32_t *ids, *labels;
    int64_t *student_chunks, *teacher_chunks, *places;
    uint8_t *mask;
    loss_room losses;
} steps_rank;

/* A decoder just large enough to be one; the teacher's columns are rounded up as released models do. */
static nn_config steps_config(int64_t vocab, int padding) {
    nn_config c;
    memset(&c, 0, sizeof c);
    c.vocab = (int)((vocab + padding - 1) / padding * padding);
    c.hidden = 64;
    c.layers = 1;
    c.heads = c.kv_heads = 2;
    c.head_dim = 32;
    c.ffn = 128;
    c.rope_theta = 10000.0f;
    c.norm_eps = 1e-5f;
    c.tied = true;
    return c;
}

/* ---- a rank ---- */

static xd_result steps_rooms(steps_rank *r) {
    const nn_batch one = { .sequences = 1, .positions = STEPS_PLACES };
    const nn_model *teacher = &r->job->teacher;
    const int64_t beside = (int64_t)PAIR_STEPS_ROWS * STEPS_PLACES;
    bool failed = false;
    r->weights = (float *)ranks_room(r->ctx, r->model.float_count, sizeof(float), &failed);
    r->gradient = (float *)ranks_room(r->ctx, r->model.float_count, sizeof(float), &failed);
    r->params = (xd_param *)ranks_room(r->ctx, r->model.param_count, sizeof *r->params, &failed);
    r->workspace =
        (float *)ranks_room(r->ctx, nn_workspace_floats(&r->model, &r->batch, true), sizeof(float), &failed);
    r->logits =
        (float *)ranks_room(r->ctx, (int64_t)STEPS_HELD * r->model.share.vocab_count, sizeof(float), &failed);
    r->teacher_workspace =
        (float *)ranks_room(r->ctx, nn_workspace_floats(teacher, &one, false), sizeof(float), &failed);
    r->teacher_logits = (float *)ranks_room(r->ctx, beside * teacher->config.vocab, sizeof(float), &failed);
    r->ids = (int32_t *)ranks_room(r->ctx, STEPS_HELD, sizeof(int32_t), &failed);
    r->labels = (int32_t *)ranks_room(r->ctx, STEPS_HELD, sizeof(int32_t), &failed);
    r->student_chunks = (int64_t *)ranks_room(r->ctx, STEPS_HELD, sizeof(int64_t), &failed);
    r->teacher_chunks = (int64_t *)ranks_room(r->ctx, beside, sizeof(int64_t), &failed);
    r->places = (int64_t *)ranks_room(r->ctx, beside, sizeof(int64_t), &failed);
    r->mask = (uint8_t *)ranks_room(r->ctx, STEPS_HELD, 1, &failed);
    XD_REQUIRE(r->ctx, !failed, XD_ERROR_MEMORY, "no room for %d rows of two vocabularies",
               (int)PAIR_STEPS_ROWS);
    r->batch.ids = r->ids;
    return XD_OK;
}

static void steps_list_params(steps_rank *r) {
    for (int i = 0; i < r->model.param_count; i++) {
        const nn_param *from = &r->model.params[i];
        xd_param *to = &r->params[i];
        to->name = from->name;
        to->value = r->weights + from->offset;
        to->gradient = r->gradient + from->offset;
        to->dtype = XD_DTYPE_F32;
        to->count = nn_param_count(from);
        to->no_decay = !nn_param_decays(from);
        to->replica = from->dims == 1 && xd_comm_rank(r->world) > 0;
    }
}

static xd_result steps_create(steps_rank *r) {
    const nn_group tp = ranks_group(r->world);
    const nn_config config = steps_config(r->job->desc->projection->student_size, 1);
    const char *problem = nn_model_init(&config, &tp, NULL, &r->model);
    XD_REQUIRE(r->ctx, !problem, XD_ERROR_ARGUMENT, "model: %s", problem);
    r->batch.sequences = PAIR_STEPS_ROWS;
    r->batch.positions = PAIR_STEPS_ROW;
    XD_TRY(steps_rooms(r));
    nn_model_randomize(&r->model, r->job->desc->seed, r->weights);
    steps_list_params(r);
    xd_optimizer_desc desc = xd_adamw_defaults(r->params, r->model.param_count);
    desc.learning_rate = 3e-3;
    return xd_optimizer_create(r->ctx, &desc, &r->optimizer);
}

/* Collective. */
static xd_result steps_columns(steps_rank *r) {
    const nn_share *share = &r->model.share;
    const xd_interval columns = { share->vocab_begin, share->vocab_begin + share->vocab_count };
    const xd_vocab_desc desc = { .size = r->model.config.vocab, .tp = r->world, .columns = &columns };
    return xd_vocab_create(r->ctx, &desc, &r->columns);
}

static void steps_free(steps_rank *r) {
    void *rooms[] = { r->weights,       r->gradient,         r->params,
                      r->workspace,     r->logits,           r->labels,
                      r->ids,           r->student_chunks,   r->places,
                      r->mask,          r->teacher_chunks,   r->teacher_logits,
                      r->losses.memory, r->teacher_workspace };
    xd_optimizer_destroy(r->optimizer);
    xd_vocab_destroy(r->columns);
    for (size_t i = 0; i < sizeof rooms / sizeof rooms[0]; i++) xd_release(r->ctx, rooms[i]);
    nn_model_free(&r->model);
}

/* ---- a step ---- */

/* One row of both, from a random place. Every rank reads all rows, and runs the teacher on them. */
static xd_result steps_read_row(steps_rank *r, int step, int number) {
    const pair_steps_desc *d = r->job->desc;
    const tokens *student = d->text->student;
    const int64_t places = student->count - PAIR_STEPS_ROW;
    const double drawn = sample_random(d->seed, 4, (uint64_t)step * PAIR_STEPS_ROWS + (uint64_t)number);
    const int64_t start = (int64_t)(drawn * (double)places);
    pairing_row row = { .length = PAIR_STEPS_ROW,
                        .places = STEPS_PLACES,
                        .student_chunks = r->student_chunks + (int64_t)number * PAIR_STEPS_ROW,
                        .teacher_chunks = r->teacher_chunks + (int64_t)number * STEPS_PLACES,
                        .cache_positions = r->places + (int64_t)number * STEPS_PLACES,
                        .mask = r->mask + (int64_t)number * PAIR_STEPS_ROW };
    for (int t = 0; t < PAIR_STEPS_ROW; t++) {
        r->ids[number * PAIR_STEPS_ROW + t] = student->ids[start + t];
        r->labels[number * PAIR_STEPS_ROW + t] = student->ids[start + t + 1];
    }
    pairing_read_row(d->text, 0, start, &row);
    if (row.held == 0) return XD_OK;
    const nn_model *teacher = &r->job->teacher;
    const nn_batch batch = { .sequences = 1, .positions = row.held, .ids = d->text->teacher->ids + row.from };
    return (xd_result)nn_forward(teacher, r->job->teacher_weights, &batch, false, r->teacher_workspace,
                                 r->teacher_logits + (int64_t)number * STEPS_PLACES * teacher->config.vocab);
}

static xd_result steps_loss(steps_rank *r, double *loss) {
    xd_xtoken_teacher teacher = xd_xtoken_teacher_defaults(XD_XTOKEN_PROJECTED);
    xd_xtoken_desc desc = xd_xtoken_defaults();
    xd_xtoken_values values;
    teacher.logits = xd_rows_of(r->teacher_logits, XD_DTYPE_F32, (int64_t)PAIR_STEPS_ROWS * STEPS_PLACES,
                                r->job->teacher.config.vocab);
    teacher.student_chunks = r->student_chunks;
    teacher.teacher_chunks = r->teacher_chunks;
    teacher.chunks = PAIR_STEPS_ROW;
    teacher.chunk_mask = r->mask;
    teacher.projected.projection = r->job->desc->projection;
    desc.student = xd_rows_of(r->logits, XD_DTYPE_F32, STEPS_HELD, r->model.share.vocab_count);
    desc.vocab = r->columns;
    desc.sequences = PAIR_STEPS_ROWS;
    desc.common.labels = xd_ids_of(r->labels, XD_DTYPE_I32);
    desc.common.gradient = desc.student;
    desc.teachers = &teacher;
    desc.teacher_count = 1;
    desc.kd_weight = desc.ce_weight = 0.5;
    XD_TRY(loss_of_xtoken(r->ctx, &r->losses, &desc, &values));
    *loss = values.loss;
    return XD_OK;
}

static xd_result steps_update(steps_rank *r) {
    const xd_gradient_norm_desc clip = { .params = r->params,
                                         .param_count = r->model.param_count,
                                         .max_norm = 1.0 };
    xd_gradient_norm norm;
    xd_optimizer_step_desc desc;
    memset(&desc, 0, sizeof desc);
    XD_TRY(xd_gradient_norm_compute(r->ctx, r->world, &clip, &norm));
    desc.gradient_scale = &norm.coefficient;
    return xd_optimizer_step(r->optimizer, &desc, NULL);
}

static xd_result steps_step(steps_rank *r, int step, double *loss) {
    for (int row = 0; row < PAIR_STEPS_ROWS; row++) XD_TRY(steps_read_row(r, step, row));
    XD_TRY((xd_result)nn_forward(&r->model, r->weights, &r->batch, true, r->workspace, r->logits));
    XD_TRY(steps_loss(r, loss));
    memset(r->gradient, 0, (size_t)r->model.float_count * sizeof *r->gradient);
    XD_TRY((xd_result)nn_backward(&r->model, r->weights, &r->batch, r->workspace, r->logits, r->gradient));
    return steps_update(r);
}

static xd_result steps_loop(steps_rank *r) {
    const int steps = r->job->desc->steps;
    const double start = xd_now(r->ctx);
    meter line = meter_begin(r->ctx, "training", "steps", 0, steps);
    double loss = 0.0;
    for (int step = 0; step < steps; step++) {
        XD_TRY(steps_step(r, step, &loss));
        if (xd_comm_rank(r->world) > 0) continue;
        if (step == 0) r->job->out->first_loss = loss;
        meter_show(r->ctx, &line, step + 1, NULL);
    }
    if (xd_comm_rank(r->world) > 0) return XD_OK;
    r->job->out->last_loss = loss;
    r->job->out->seconds = xd_now(r->ctx) - start;
    return XD_OK;
}

static xd_result steps_run_rank(xd_comm *world, void *job) {
    steps_rank r;
    memset(&r, 0, sizeof r);
    r.job = (steps_job *)job;
    r.world = world;
    r.ctx = xd_comm_ctx(world);
    xd_result result = xd_agree(world, steps_create(&r));
    if (result == XD_OK) result = steps_columns(&r);
    if (result == XD_OK) result = steps_loop(&r);
    steps_free(&r);
    return result;
}

xd_result pair_steps_run(xd_ctx *ctx, const pair_steps_desc *desc, pair_steps *out) {
    const nn_config teacher = steps_config(desc->projection->teacher_size, 256);
    steps_job job = { .desc = desc, .out = out };
    bool failed = false;
    memset(out, 0, sizeof *out);
    XD_REQUIRE(ctx, desc->text->student->count > PAIR_STEPS_ROW + 1, XD_ERROR_DATA,
               "the text has %lld tokens, a row takes %d", (long long)desc->text->student->count,
               (int)PAIR_STEPS_ROW + 1);
    const char *problem = nn_model_init(&teacher, NULL, NULL, &job.teacher);
    XD_REQUIRE(ctx, !problem, XD_ERROR_ARGUMENT, "model: %s", problem);
    job.teacher_weights = (float *)ranks_room(ctx, job.teacher.float_count, sizeof(float), &failed);
    if (!failed) nn_model_randomize(&job.teacher, 7, job.teacher_weights);
    const xd_result result = failed ? XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a teacher")
                                    : ranks_run(ctx, desc->ranks, steps_run_rank, &job);
    xd_release(ctx, job.teacher_weights);
    nn_model_free(&job.teacher);
    return result;
}
