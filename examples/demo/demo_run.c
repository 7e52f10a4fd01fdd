/* demo_run.c - what each rank does: train the arms in lock-step, then measure them.
 *
 * In a step the teacher reads the batch once, in its own tokens; then every arm takes its turn: forward, loss,
 * backward, update. Arms have weights and an optimizer each, and share every buffer.
 *
 * The mesh has three axes. "dp" splits the rows of a batch, "cp" the positions of a row, "tp" the weights and
 * the vocabulary. All a rank must know beyond one rank's program is here and in demo_loss.c:
 *
 *   - a loss takes the vocabulary's group (inside xd_vocab), the group of a row's positions ("cp") and the one
 *     of all positions ("dp,cp"); across tokenizers the teacher's rows must be whole, so they are gathered;
 *   - gradients are summed over "dp,cp", because the loss is the mean over the whole batch already;
 *   - the norm of the gradient is one over "tp", where weights that every rank holds are counted once.
 *
 * In INVARIANT mode every sequence of the batch is a gradient leaf: it goes through the model alone, and the
 * leaves' gradients are added along one tree whatever rank they come from. Losses and norms need nothing: the
 * library adds those exactly. So every dp mesh has the bits of one rank. */
#include "demo_rank.h"

#include "../common/model_directory.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- set-up ---- */

static int demo_sum(void *user, float *x, int64_t count) {
    return (int)xd_all_reduce((xd_comm *)user, x, x, count, XD_DTYPE_F32, XD_SUM);
}

static int demo_gather(void *user, const float *send, float *received, const int64_t *counts) {
    return (int)xd_all_gather((xd_comm *)user, send, received, counts, XD_DTYPE_F32);
}

static nn_group demo_group(xd_comm *comm) {
    nn_group group;
    memset(&group, 0, sizeof group);
    group.size = comm ? xd_comm_size(comm) : 1;
    group.rank = comm ? xd_comm_rank(comm) : 0;
    group.user = comm;
    group.all_reduce_sum = demo_sum;
    group.all_gather_v = demo_gather;
    return group;
}

static bool demo_is_invariant(const demo_rank *r) {
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
    XD_TRY(demo_axis(r, "tp", job->tp, &r->tp));
    /* In INVARIANT mode leaves are summed over a group of one rank, too. */
    return demo_is_invariant(r) ? xd_mesh_group(r->mesh, "dp,cp", &r->rows)
                                : demo_axis(r, "dp,cp", job->dp * job->cp, &r->rows);
}

static xd_result demo_make_vocab(demo_rank *r, const nn_model *model, xd_vocab **out) {
    const nn_share *share = &model->share;
    const xd_interval columns = { share->vocab_begin, share->vocab_begin + share->vocab_count };
    return xd_vocab_create(r->ctx, r->tp, columns, model->config.vocab, out);
}

static xd_result demo_make_models(demo_rank *r) {
    const nn_group tp = demo_group(r->tp), cp = demo_group(r->cp);
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

static float *demo_floats(demo_rank *r, int64_t count, bool *failed) {
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

static xd_result demo_make_leaves(demo_rank *r) {
    if (!demo_is_invariant(r)) return XD_OK;
    r->leaves.first = r->first_sequence;
    r->leaves.count = r->batch.sequences;
    r->leaves.total = DEMO_BATCH;
    return xd_leaf_stack_create(r->ctx, r->leaves, r->model.float_count, &r->stack);
}

static xd_result demo_make_batch(demo_rank *r) {
    const demo_job *job = r->job;
    bool failed = false;
    r->first_sequence = demo_cut(DEMO_BATCH, r->dp_rank, job->dp);
    r->batch.sequences = demo_cut(DEMO_BATCH, r->dp_rank + 1, job->dp) - r->first_sequence;
    r->batch.positions =
        demo_cut(DEMO_ROW, r->cp_rank + 1, job->cp) - demo_cut(DEMO_ROW, r->cp_rank, job->cp);
    r->passes = demo_is_invariant(r) ? r->batch.sequences : 1;
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
    r->part_workspace = nn_workspace_floats(&r->model, &r->part, true);
    r->gradient = demo_floats(r, r->model.float_count, &failed);
    r->workspace = demo_floats(r, r->passes * r->part_workspace, &failed);
    r->logits.own = demo_floats(r, demo_rank_rows(r) * r->model.share.vocab_count, &failed);
    const size_t size = sizeof *r->learners;
    r->learners = (demo_learner *)demo_room(r, r->job->arm_count, size, &failed);
    for (int i = 0; i < r->job->arm_count && !failed; i++) {
        r->learners[i].weights = demo_floats(r, r->model.float_count, &failed);
        r->learners[i].params = (xd_param *)demo_room(r, r->model.param_count, sizeof(xd_param), &failed);
    }
    return failed ? XD_FAIL(r->ctx, XD_ERROR_MEMORY, "no room for %d models of %lld weights",
                            r->job->arm_count, (long long)r->model.float_count)
                  : XD_OK;
}

static xd_result demo_make_teacher_buffers(demo_rank *r) {
    const demo_job *job = r->job;
    const int64_t rows = demo_rank_rows(r);
    bool failed = false;
    if (!job->teacher) return XD_OK;
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

static xd_result demo_make_buffers(demo_rank *r) {
    XD_TRY(demo_make_batch(r));
    XD_TRY(demo_make_student_buffers(r));
    XD_TRY(demo_make_teacher_buffers(r));
    XD_TRY(demo_make_leaves(r));
    return demo_make_loss_workspace(r);
}

static void demo_list_params(demo_rank *r, const demo_learner *learner) {
    for (int i = 0; i < r->model.param_count; i++) {
        const nn_param *p = &r->model.params[i];
        xd_param *out = &learner->params[i];
        memset(out, 0, sizeof *out);
        out->name = p->name;
        out->value = learner->weights + p->offset;
        out->gradient = r->gradient + p->offset;
        out->dtype = XD_DTYPE_F32;
        out->count = nn_param_count(p);
        out->no_decay = !nn_param_decays(p);
        out->replica =
            p->dims == 1 && r->tp_rank > 0; /* norms: every tensor-parallel rank holds them whole */
    }
}

static void demo_close(demo_rank *r) {
    void *buffers[] = { r->position,        r->cp_count,
                        r->cp_position,     r->ids,
                        r->teacher_ids,     r->labels,
                        r->teacher_labels,  r->chunks,
                        r->teacher_chunks,  r->gradient,
                        r->teacher_weights, r->workspace,
                        r->exchange,        r->teacher_workspace,
                        r->logits.own,      r->teacher_logits.own,
                        r->loss_workspace,  r->heads,
                        r->teacher_heads,   r->places,
                        r->place_chunks,    r->row_weight };
    for (int i = 0; i < r->job->arm_count && r->learners; i++) {
        xd_optimizer_destroy(r->learners[i].optimizer);
        xd_release(r->ctx, r->learners[i].weights);
        xd_release(r->ctx, r->learners[i].params);
    }
    xd_release(r->ctx, r->learners);
    if (r->tp) xd_release(r->ctx, r->teacher_logits.whole);
    xd_leaf_stack_destroy(r->stack);
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

/* Warm-up over the first fifteenth, then a cosine down to a twentieth. */
static double demo_learning_rate(double peak, int step, int steps) {
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

xd_result demo_forward(demo_rank *r, const nn_model *model, const float *weights, const int32_t *ids,
                       bool training, float *workspace, float *logits) {
    for (int pass = 0; pass < r->passes; pass++) {
        float *room = workspace + (training ? pass * r->part_workspace : 0);
        const int64_t at = demo_enter_part(r, ids, pass) * model->share.vocab_count;
        XD_TRY(demo_code(nn_forward(model, weights, &r->part, training, room, logits + at)));
    }
    return XD_OK;
}

/* This rank's gradient: in r->gradient, or as leaves on the stack. */
static xd_result demo_backward(demo_rank *r, const float *weights) {
    if (r->stack) xd_leaf_stack_reset(r->stack);
    for (int pass = 0; pass < r->passes; pass++) {
        const int64_t at = demo_enter_part(r, r->ids, pass) * r->model.share.vocab_count;
        memset(r->gradient, 0, (size_t)r->model.float_count * sizeof *r->gradient);
        XD_TRY(demo_code(nn_backward(&r->model, weights, &r->part, r->workspace + pass * r->part_workspace,
                                     r->logits.own + at, r->gradient)));
        if (r->stack) XD_TRY(xd_leaf_stack_push(r->stack, r->gradient));
    }
    return XD_OK;
}

/* r->gradient = the gradient of the whole batch. */
static xd_result demo_sum_gradients(demo_rank *r) {
    xd_collective sum;
    if (!r->rows) return XD_OK;
    memset(&sum, 0, sizeof sum);
    sum.kind = XD_COLLECTIVE_ALL_REDUCE;
    sum.send = r->stack ? xd_leaf_stack_forest(r->stack) : r->gradient;
    sum.recv = r->gradient;
    sum.count = r->model.float_count;
    sum.dtype = XD_DTYPE_F32;
    sum.op = XD_SUM;
    sum.leaves = r->leaves; /* all zero without a stack: a plain sum */
    return xd_collective_run(r->rows, &sum);
}

static xd_result demo_update(demo_rank *r, const demo_learner *learner, demo_step *out) {
    xd_gradient_norm total;
    xd_gradient_norm_desc clip;
    xd_optimizer_step_desc step;
    memset(&clip, 0, sizeof clip);
    memset(&step, 0, sizeof step);
    XD_TRY(demo_sum_gradients(r));
    clip.params = learner->params;
    clip.param_count = r->model.param_count;
    clip.max_norm = 1.0;
    XD_TRY(xd_gradient_norm_compute(r->ctx, r->tp, &clip, &total));
    XD_TRY(xd_optimizer_set_learning_rate(learner->optimizer, out->learning_rate));
    step.gradient_scale = &total.coefficient;
    out->gradient_norm = total.norm;
    return xd_optimizer_step(learner->optimizer, &step, NULL);
}

/* The teacher's forward pass of a step. */
static xd_result demo_ask_teacher(demo_rank *r) {
    const double start = xd_now(r->ctx);
    if (!r->asks_teacher) return XD_OK;
    XD_TRY(demo_forward(r, &r->teacher, r->teacher_weights, r->teacher_ids, false, r->teacher_workspace,
                        r->teacher_logits.own));
    XD_TRY(demo_complete_teacher(r));
    r->teacher_seconds += xd_now(r->ctx) - start;
    return XD_OK;
}

static xd_result demo_learn(demo_rank *r, const demo_arm *arm, demo_learner *learner, int step,
                            demo_step *out) {
    const double start = xd_now(r->ctx);
    out->learning_rate = demo_learning_rate(arm->learning_rate, step, r->job->steps);
    XD_TRY(demo_forward(r, &r->model, learner->weights, r->ids, true, r->workspace, r->logits.own));
    XD_TRY(demo_arm_loss(r, arm, out));
    XD_TRY(demo_backward(r, learner->weights));
    XD_TRY(demo_update(r, learner, out));
    out->seconds = xd_now(r->ctx) - start;
    learner->seconds += out->seconds;
    if (learner->losses) learner->losses[step] = (float)out->hard;
    return XD_OK;
}

static xd_result demo_step_once(demo_rank *r, uint64_t seed, int step, demo_step *out) {
    double share = 1.0;
    demo_read_batch(r, share, seed, step);
    XD_TRY(demo_ask_teacher(r));
    for (int i = 0; i < r->job->arm_count; i++) {
        const demo_arm *arm = &r->job->arms[i];
        if (arm->share != share) {
            share = arm->share;
            demo_read_batch(r, share, seed, step);
        }
        XD_TRY(demo_learn(r, arm, &r->learners[i], step, &out[i]));
    }
    return XD_OK;
}

/* ---- a run ---- */

static xd_result demo_make_optimizer(demo_rank *r, demo_learner *learner) {
    xd_optimizer_desc desc = xd_adamw_defaults(learner->params, r->model.param_count);
    desc.beta2 = 0.95;
    desc.weight_decay = 0.1;
    xd_optimizer_destroy(learner->optimizer);
    learner->optimizer = NULL;
    return xd_optimizer_create(r->ctx, &desc, &learner->optimizer);
}

/* States of an earlier run must not meet those of this one. */
static void demo_forget_states(const demo_rank *r) {
    const xd_files *files = &xd_ctx_settings(r->ctx)->files;
    char path[512];
    for (int seed = 0; seed < r->job->seeds; seed++) {
        demo_state_path(r->job->resume_directory, r->job->seed + (uint64_t)seed, path);
        (void)files->remove(files->user, path); /* most often there is none */
    }
}

static xd_result demo_save_state(demo_rank *r, demo_state *state, int done, double seconds) {
    const demo_job *job = r->job;
    xd_result result = XD_OK;
    if (job->save_every == 0 || (done % job->save_every != 0 && done != job->steps)) return XD_OK;
    state->done = done;
    state->seconds = seconds;
    if (xd_comm_rank(r->world) == 0)
        result = demo_report_position(r->ctx, job->report, &state->metrics_bytes);
    XD_TRY(xd_agree(r->world, result));
    return demo_state_save(r->ctx, state);
}

/* Random weights and new optimizers, or where an interrupted run left them. */
static xd_result demo_begin_run(demo_rank *r, demo_state *state) {
    const bool first = xd_comm_rank(r->world) == 0;
    const int run = (int)(state->seed - r->job->seed) * r->job->arm_count;
    xd_result result = XD_OK;
    for (int i = 0; i < r->job->arm_count; i++) {
        demo_learner *learner = &r->learners[i];
        nn_model_randomize(&r->model, state->seed, learner->weights);
        demo_list_params(r, learner);
        XD_TRY(demo_make_optimizer(r, learner));
        learner->seconds = 0.0;
        learner->losses = first ? r->job->results[run + i].losses : NULL;
        learner->heldout = first ? r->job->results[run + i].heldout : NULL;
    }
    state->job = r->job;
    state->world = r->world;
    state->tp = r->tp;
    state->part = &r->model;
    state->learners = r->learners;
    if (!r->job->resume) return XD_OK;
    XD_TRY(demo_state_load(r->ctx, state));
    if (first && state->done) result = demo_report_go_to(r->ctx, r->job->report, state->metrics_bytes);
    return xd_agree(r->world, result);
}

/* What the students are worth on the way. */
static xd_result demo_glance(demo_rank *r, const demo_moment *at) {
    const int steps = r->job->steps, point = demo_point_at(at->step + 1, steps);
    if (point < 0) return XD_OK;
    for (int i = 0; i < r->job->arm_count; i++) {
        const demo_learner *learner = &r->learners[i];
        xd_result result = XD_OK;
        double bits = 0.0;
        int64_t bytes = 0;
        XD_TRY(demo_glance_at_student(r, learner->weights, &bits, &bytes));
        if (learner->heldout) {
            learner->heldout[point] = bits;
            result = demo_report_heldout(r->ctx, r->job->report, &r->job->arms[i], at, bits, bytes);
        }
        if (result != XD_OK) return result;
    }
    return XD_OK;
}

/* After a step of all students. */
static xd_result demo_tell(demo_rank *r, const demo_moment *at, const demo_step *steps) {
    const bool first = xd_comm_rank(r->world) == 0;
    if (first) XD_TRY(demo_report_step(r->ctx, r->job->report, r->job, at, steps));
    XD_TRY(demo_glance(r, at));
    if (first) demo_report_progress(r->job->report, r->job, at);
    return XD_OK;
}

static xd_result demo_train(demo_rank *r, uint64_t seed) {
    char path[512];
    demo_step steps[DEMO_MOST_ARMS];
    demo_state state;
    memset(&state, 0, sizeof state);
    memset(steps, 0, sizeof steps);
    demo_state_path(r->job->resume_directory, seed, path);
    state.path = path;
    state.seed = seed;
    XD_TRY(demo_begin_run(r, &state));
    const double start = xd_now(r->ctx) - state.seconds;
    for (int i = state.done; i < r->job->steps; i++) {
        XD_TRY(demo_step_once(r, seed, i, steps));
        const demo_moment at = { seed, i, xd_now(r->ctx) - start };
        XD_TRY(demo_tell(r, &at, steps));
        XD_TRY(demo_save_state(r, &state, i + 1, xd_now(r->ctx) - start));
    }
    r->seconds = xd_now(r->ctx) - start;
    return XD_OK;
}

/* ---- what came out ---- */

/* A finished model of another run is not replaced unless that was asked for; this run's own, which an interruption
 * came after, has the same bits. */
static xd_result demo_keep(demo_rank *r, const nn_model *whole, float *weights) {
    const demo_job *job = r->job;
    const int32_t end = xd_tokenizer_find_special(job->tokenizer, "<|endoftext|>");
    const model_extras extras = { job->tokenizer_path, end < 0 ? NULL : "<|endoftext|>", end, DEMO_ROW };
    if (!job->overwrite && model_directory_is_finished(job->save_directory)) {
        if (model_directory_holds(r->ctx, job->save_directory, whole, weights)) return XD_OK;
        return XD_FAIL(r->ctx, XD_ERROR_STATE,
                       "%s holds a finished model that this run did not make: "
                       "--overwrite replaces it",
                       job->save_directory);
    }
    return model_directory_save(r->ctx, job->save_directory, whole, weights, &extras);
}

/* The trained model whole on rank 0: rounded to bf16 as the file will hold it when it is saved, a sample from
 * it. */
static xd_result demo_finish_whole(demo_rank *r, const float *own, bool save, demo_result *result) {
    const demo_job *job = r->job;
    nn_model whole;
    bool failed = false;
    const char *problem = nn_model_init(job->config, NULL, NULL, &whole);
    float *weights = problem ? NULL : (float *)demo_room(r, whole.float_count, sizeof(float), &failed);
    xd_result status =
        problem || failed ? XD_FAIL(r->ctx, XD_ERROR_MEMORY, "no room for the whole model") : XD_OK;
    status = xd_agree(r->world, status);
    if (status == XD_OK) status = demo_gather_shares(r->ctx, r->tp, &r->model, own, &whole, weights);
    if (status == XD_OK && xd_comm_rank(r->world) == 0) {
        if (save) status = demo_keep(r, &whole, weights);
        if (status == XD_OK)
            status = sample_write(r->ctx, &whole, weights, job->tokenizer, job->seed, result->sample);
    }
    xd_release(r->ctx, weights);
    nn_model_free(&whole);
    return xd_agree(r->world, status);
}

static xd_result demo_finish_arm(demo_rank *r, int seed_index, int arm_index) {
    const demo_job *job = r->job;
    demo_result *result = &job->results[seed_index * job->arm_count + arm_index];
    const demo_learner *learner = &r->learners[arm_index];
    const bool save = seed_index == 0 && arm_index == job->saved_arm && job->save_directory;
    double bits = 0.0;
    /* What is saved is measured as it is saved: every weight rounded to bf16. */
    for (int64_t i = 0; save && i < r->model.float_count; i++)
        learner->weights[i] = xd_f32_from_bf16(xd_bf16_from_f32(learner->weights[i]));
    XD_TRY(demo_evaluate_student(r, learner->weights, &bits));
    xd_result status = XD_OK;
    if (xd_comm_rank(r->world) == 0) {
        const demo_moment at = { job->seed + (uint64_t)seed_index, job->steps - 1, r->seconds };
        result->bits_per_byte = bits;
        result->seconds = learner->seconds;
        status =
            demo_report_heldout(r->ctx, job->report, &job->arms[arm_index], &at, bits, job->heldout->bytes);
    }
    XD_TRY(xd_agree(r->world, status));
    return demo_finish_whole(r, learner->weights, save, result);
}

static xd_result demo_run_teacher(demo_rank *r) {
    const demo_job *job = r->job;
    demo_result *result = job->teacher_result;
    double bits = 0.0;
    xd_result status = XD_OK;
    XD_TRY(demo_evaluate_teacher(r, &bits));
    if (xd_comm_rank(r->world) == 0) {
        result->bits_per_byte = bits;
        status = sample_write(r->ctx, job->teacher, job->teacher_weights, job->teacher_tokenizer, job->seed,
                              result->sample);
    }
    return xd_agree(r->world, status);
}

static xd_result demo_run_all(demo_rank *r) {
    const demo_job *job = r->job;
    XD_TRY(demo_make_mesh(r));
    XD_TRY(demo_make_models(r));
    XD_TRY(xd_agree(r->world, demo_make_buffers(r)));
    if (!job->resume && xd_comm_rank(r->world) == 0) demo_forget_states(r);
    if (job->teacher && job->teacher_result) XD_TRY(demo_run_teacher(r));
    for (int seed = 0; seed < job->seeds; seed++) {
        XD_TRY(demo_train(r, job->seed + (uint64_t)seed));
        for (int arm = 0; arm < job->arm_count; arm++) XD_TRY(demo_finish_arm(r, seed, arm));
    }
    if (job->teacher_result && xd_comm_rank(r->world) == 0) job->teacher_result->seconds = r->teacher_seconds;
    return XD_OK;
}

xd_result demo_run_rank(xd_comm *world, void *job) {
    demo_rank r;
    memset(&r, 0, sizeof r);
    r.job = (const demo_job *)job;
    r.world = world;
    r.ctx = xd_comm_ctx(world);
    const xd_result result = demo_run_all(&r);
    demo_close(&r);
    return result;
}
