/* demo_rank.c - a rank's place in the mesh, its models and buffers, and what a step has in common however it trains. */
#include "demo_rank.h"

#include "../nn/nn_blocks.h"

#include <math.h>
#include <string.h>

/* ---- the mesh ---- */

static int demo_sum(void *user, float *x, int64_t count) {
    return (int)xd_all_reduce((xd_comm *)user, x, x, count, XD_DTYPE_F32, XD_SUM);
}

static int demo_gather(void *user, const float *send, float *received, const int64_t *counts) {
    return (int)xd_all_gather((xd_comm *)user, send, received, counts, XD_DTYPE_F32);
}

static nn_group demo_group(xd_comm *comm, bool fixed_sums) {
    nn_group group;
    memset(&group, 0, sizeof group);
    group.size = comm ? xd_comm_size(comm) : 1;
    group.rank = comm ? xd_comm_rank(comm) : 0;
    group.user = comm;
    group.all_reduce_sum = demo_sum;
    group.all_gather_v = demo_gather;
    group.invariant = fixed_sums;
    group.sum_pieces = nn_blocks_sum_pieces;
    return group;
}

bool demo_is_invariant(const demo_rank *r) {
    return xd_ctx_settings(r->ctx)->reduction == XD_REDUCTION_INVARIANT;
}

/* The group over `axes`, or NULL when it has one rank. */
static xd_result demo_axis(demo_rank *r, const char *axes, int size, xd_comm **out) {
    *out = NULL;
    return size > 1 ? xd_mesh_group(r->mesh, axes, out) : XD_OK;
}

static xd_result demo_make_mesh(demo_rank *r) {
    const demo_job *job = r->job;
    xd_mesh_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.axes[0].name = "dp";
    desc.axes[0].size = job->dp;
    desc.axes[1].name = "cp";
    desc.axes[1].size = job->cp;
    desc.axes[2].name = "tp";
    desc.axes[2].size = job->tp;
    desc.world_size = xd_comm_size(r->world);
    XD_TRY(xd_mesh_create(r->world, &desc, &r->mesh));
    XD_TRY(xd_mesh_coordinate(r->mesh, "dp", &r->dp_rank));
    XD_TRY(xd_mesh_coordinate(r->mesh, "cp", &r->cp_rank));
    XD_TRY(xd_mesh_coordinate(r->mesh, "tp", &r->tp_rank));
    XD_TRY(demo_axis(r, "cp", job->cp, &r->cp));
    /* In INVARIANT mode leaves and pieces are summed over a group of one rank, too. */
    XD_TRY(job->fixed_sums ? xd_mesh_group(r->mesh, "tp", &r->tp) : demo_axis(r, "tp", job->tp, &r->tp));
    return demo_is_invariant(r) ? xd_mesh_group(r->mesh, "dp,cp", &r->rows)
                                : demo_axis(r, "dp,cp", job->dp * job->cp, &r->rows);
}

static xd_result demo_make_vocab(demo_rank *r, const nn_model *model, xd_vocab **out) {
    const nn_share *share = &model->share;
    const xd_interval columns = { share->vocab_begin, share->vocab_begin + share->vocab_count };
    const xd_vocab_desc desc = { .size = model->config.vocab, .tp = r->tp, .columns = &columns };
    return xd_vocab_create(r->ctx, &desc, out);
}

static xd_result demo_make_models(demo_rank *r) {
    const nn_group tp = demo_group(r->tp, r->job->fixed_sums), cp = demo_group(r->cp, r->job->fixed_blocks);
    const char *problem = nn_model_init(r->job->config, &tp, &cp, &r->model);
    if (!problem && r->job->teacher) problem = nn_model_init(&r->job->teacher->config, &tp, &cp, &r->teacher);
    if (problem) return XD_FAIL(r->ctx, XD_ERROR_ARGUMENT, "model: %s", problem);
    XD_TRY(demo_make_vocab(r, &r->model, &r->logits.vocab));
    return r->job->teacher ? demo_make_vocab(r, &r->teacher, &r->teacher_logits.vocab) : XD_OK;
}

/* First of part `part` when `total` things are cut into `parts` even ones. */
static int demo_cut(int total, int part, int parts) {
    return (int)((int64_t)total * part / parts);
}

void *demo_room(demo_rank *r, int64_t count, size_t size, bool *failed) {
    void *memory = xd_allocate(r->ctx, ((size_t)count + 1) * size);
    if (!memory) *failed = true;
    return memory;
}

int64_t demo_rank_rows(const demo_rank *r) {
    return (int64_t)r->batch.sequences * r->batch.positions;
}

float *demo_floats(demo_rank *r, int64_t count, bool *failed) {
    return (float *)demo_room(r, count, sizeof(float), failed);
}

static int64_t *demo_integers(demo_rank *r, int64_t count, bool *failed) {
    return (int64_t *)demo_room(r, count, sizeof(int64_t), failed);
}

static void demo_place_positions(demo_rank *r) {
    for (int i = 0; i < r->batch.positions; i++)
        r->position[i] = demo_cut(DEMO_ROW, r->cp_rank, r->job->cp) + i;
    for (int c = 0; c < r->job->cp; c++)
        r->cp_count[c] = demo_cut(DEMO_ROW, c + 1, r->job->cp) - demo_cut(DEMO_ROW, c, r->job->cp);
    for (int i = 0; i < DEMO_ROW; i++) r->cp_position[i] = i;
    r->batch.position = r->position;
    r->batch.cp_count = r->cp_count;
    r->batch.cp_position = r->cp_position;
    r->part = r->batch;
    r->part.sequences = r->batch.sequences / r->passes;
}

static xd_result demo_make_batch(demo_rank *r) {
    const demo_job *job = r->job;
    bool failed = false;
    r->batch.positions =
        demo_cut(DEMO_ROW, r->cp_rank + 1, job->cp) - demo_cut(DEMO_ROW, r->cp_rank, job->cp);
    const int64_t rows = demo_rank_rows(r);
    r->position = (int32_t *)demo_room(r, r->batch.positions, sizeof(int32_t), &failed);
    r->cp_count = (int32_t *)demo_room(r, job->cp, sizeof(int32_t), &failed);
    r->cp_position = (int32_t *)demo_room(r, DEMO_ROW, sizeof(int32_t), &failed);
    r->ids = (int32_t *)demo_room(r, rows, sizeof(int32_t), &failed);
    r->teacher_ids = (int32_t *)demo_room(r, rows, sizeof(int32_t), &failed);
    r->labels = demo_integers(r, rows, &failed);
    r->teacher_labels = demo_integers(r, rows, &failed);
    r->chunks = demo_integers(r, rows, &failed);
    r->teacher_chunks = demo_integers(r, rows, &failed);
    r->heads = demo_integers(r, rows, &failed);
    r->teacher_heads = demo_integers(r, rows, &failed);
    r->places = demo_integers(r, rows, &failed);
    r->row_weight = demo_floats(r, rows, &failed);
    r->place_chunks = demo_integers(r, rows, &failed);
    if (failed) return XD_FAIL(r->ctx, XD_ERROR_MEMORY, "no room for %lld tokens", (long long)rows);
    demo_place_positions(r);
    return XD_OK;
}

static xd_result demo_make_student_buffers(demo_rank *r) {
    bool failed = false;
    if (r->staged) return XD_OK;
    r->part_workspace = nn_workspace_floats(&r->model, &r->part, true);
    r->workspace = demo_floats(r, r->passes * r->part_workspace, &failed);
    r->logits.own = demo_floats(r, demo_rank_rows(r) * r->model.share.vocab_count, &failed);
    return failed ? XD_FAIL(r->ctx, XD_ERROR_MEMORY, "no room for the student's %d passes", r->passes)
                  : XD_OK;
}

static xd_result demo_make_teacher_buffers(demo_rank *r) {
    const demo_job *job = r->job;
    const int64_t rows = demo_rank_rows(r);
    bool failed = false;
    if (!job->teacher || r->asks_nobody) return XD_OK;
    for (int i = 0; i < job->arm_count; i++)
        if (job->arms[i].signal != DEMO_TEXT_ALONE && job->arms[i].signal != DEMO_RECORDED)
            r->asks_teacher = true;
    r->teacher_weights = demo_floats(r, r->teacher.float_count, &failed);
    r->teacher_workspace = demo_floats(r, nn_workspace_floats(&r->teacher, &r->part, false), &failed);
    r->teacher_logits.own = demo_floats(r, rows * r->teacher.share.vocab_count, &failed);
    r->teacher_logits.whole = r->teacher_logits.own;
    if (r->tp) {
        r->teacher_logits.whole = demo_floats(r, rows * job->teacher->config.vocab, &failed);
        r->exchange = demo_floats(r, (int64_t)r->batch.positions * job->teacher->config.vocab, &failed);
    }
    if (failed) return XD_FAIL(r->ctx, XD_ERROR_MEMORY, "no room for the teacher");
    demo_take_share(job->teacher, job->teacher_weights, &r->teacher, r->teacher_weights);
    return XD_OK;
}

xd_result demo_rank_join(demo_rank *r, xd_comm *world, const demo_job *job) {
    memset(r, 0, sizeof *r);
    r->job = job;
    r->world = world;
    r->ctx = xd_comm_ctx(world);
    XD_TRY(demo_make_mesh(r));
    return demo_make_models(r);
}

void demo_rank_take_range(demo_rank *r) {
    const int first = demo_cut(DEMO_BATCH, r->dp_rank, r->job->dp);
    r->batch.sequences = demo_cut(DEMO_BATCH, r->dp_rank + 1, r->job->dp) - first;
    for (int s = 0; s < r->batch.sequences; s++) r->sequences[s] = first + s;
    r->passes = r->most_passes = demo_is_invariant(r) ? r->batch.sequences : 1;
}

xd_result demo_rank_make_buffers(demo_rank *r) {
    XD_TRY(demo_make_batch(r));
    XD_TRY(demo_make_student_buffers(r));
    XD_TRY(demo_make_teacher_buffers(r));
    return demo_make_loss_workspace(r);
}

void demo_rank_close(demo_rank *r) {
    void *buffers[] = { r->position,
                        r->cp_count,
                        r->cp_position,
                        r->ids,
                        r->teacher_ids,
                        r->labels,
                        r->teacher_labels,
                        r->chunks,
                        r->teacher_chunks,
                        r->teacher_weights,
                        r->workspace,
                        r->exchange,
                        r->teacher_workspace,
                        r->logits.own,
                        r->teacher_logits.own,
                        r->loss_workspace,
                        r->heads,
                        r->teacher_heads,
                        r->places,
                        r->place_chunks,
                        r->row_weight };
    if (r->tp) xd_release(r->ctx, r->teacher_logits.whole);
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++) xd_release(r->ctx, buffers[i]);
    xd_vocab_destroy(r->logits.vocab);
    xd_vocab_destroy(r->teacher_logits.vocab);
    nn_model_free(&r->model);
    nn_model_free(&r->teacher);
    xd_mesh_destroy(r->mesh);
}

/* ---- one step ---- */

/* A failed communication comes back from the model as the code it left with. */
static xd_result demo_code(int code) {
    return (xd_result)code;
}

double demo_learning_rate(double peak, int step, int steps) {
    const int warm = steps / 15 > 0 ? steps / 15 : 1;
    if (step < warm) return peak * (step + 1) / warm;
    return peak * (0.05 + 0.475 * (1.0 + cos(3.14159265358979 * (step - warm) / (steps - warm))));
}

/* Points r->part at part `pass` of the batch; returns the first of its rows. */
static int64_t demo_enter_part(demo_rank *r, const int32_t *ids, int pass) {
    const int64_t rows = (int64_t)r->part.sequences * r->part.positions;
    r->part.ids = ids + pass * rows;
    return pass * rows;
}

xd_result demo_forward(demo_rank *r, const nn_model *model, const nn_source *source, const int32_t *ids,
                       bool training, float *workspace, float *logits) {
    for (int pass = 0; pass < r->passes; pass++) {
        float *room = workspace + (training ? pass * r->part_workspace : 0);
        const int64_t at = demo_enter_part(r, ids, pass) * model->share.vocab_count;
        XD_TRY(demo_code(nn_forward_from(model, source, &r->part, training, room, logits + at)));
    }
    for (int pass = r->passes; pass < r->most_passes; pass++)
        XD_TRY(demo_code(nn_pass_by(model, source, training ? NN_FORWARD : NN_INFERENCE)));
    return XD_OK;
}

xd_result demo_backward(demo_rank *r, const nn_source *source, int pass) {
    if (pass >= r->passes) return demo_code(nn_pass_by(&r->model, source, NN_BACKWARD));
    const int64_t at = demo_enter_part(r, r->ids, pass) * r->model.share.vocab_count;
    return demo_code(nn_backward_from(&r->model, source, &r->part, r->workspace + pass * r->part_workspace,
                                      r->logits.own + at));
}

xd_result demo_ask_teacher(demo_rank *r) {
    const double start = xd_now(r->ctx);
    nn_flat flat = { &r->teacher, r->teacher_weights, NULL };
    const nn_source source = nn_flat_source(&flat);
    if (!r->asks_teacher) return XD_OK;
    XD_TRY(demo_forward(r, &r->teacher, &source, r->teacher_ids, false, r->teacher_workspace,
                        r->teacher_logits.own));
    XD_TRY(demo_complete_teacher(r));
    r->teacher_seconds += xd_now(r->ctx) - start;
    return XD_OK;
}

xd_result demo_update(xd_ctx *ctx, xd_comm *comm, xd_optimizer *optimizer, xd_ema *average, demo_step *out) {
    const xd_optimizer_desc *settings = xd_optimizer_settings(optimizer);
    xd_gradient_norm total;
    xd_gradient_norm_desc clip;
    xd_optimizer_step_desc step;
    memset(&clip, 0, sizeof clip);
    memset(&step, 0, sizeof step);
    clip.params = settings->params;
    clip.param_count = settings->param_count;
    clip.max_norm = 1.0;
    XD_TRY(xd_gradient_norm_compute(ctx, comm, &clip, &total));
    XD_TRY(xd_optimizer_set_learning_rate(optimizer, out->learning_rate));
    step.gradient_scale = &total.coefficient;
    step.averages = &average;
    step.average_count = average ? 1 : 0;
    out->gradient_norm = total.norm;
    return xd_optimizer_step(optimizer, &step, NULL);
}

xd_optimizer_desc demo_optimizer_of(const xd_param *params, int64_t count) {
    xd_optimizer_desc desc = xd_adamw_defaults(params, count);
    desc.beta2 = 0.95;
    desc.weight_decay = 0.1;
    return desc;
}
