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

#include <stdio.h>
#include <string.h>

/* ---- learners ---- */

static xd_result demo_make_learners(demo_rank *r) {
    bool failed = false;
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

static void demo_free_learners(demo_rank *r) {
    for (int i = 0; i < r->job->arm_count && r->learners; i++) {
        xd_optimizer_destroy(r->learners[i].optimizer);
        xd_release(r->ctx, r->learners[i].weights);
        xd_release(r->ctx, r->learners[i].params);
    }
    xd_release(r->ctx, r->learners);
}

static xd_result demo_make_optimizer(demo_rank *r, demo_learner *learner) {
    const xd_optimizer_desc desc = demo_optimizer_of(learner->params, r->model.param_count);
    xd_optimizer_destroy(learner->optimizer);
    learner->optimizer = NULL;
    return xd_optimizer_create(r->ctx, &desc, &learner->optimizer);
}

/* ---- one step ---- */

static xd_result demo_learn(demo_rank *r, const demo_arm *arm, demo_learner *learner, int step,
                            demo_step *out) {
    const double start = xd_now(r->ctx);
    nn_flat flat = { &r->model, learner->weights, NULL };
    const nn_source source = nn_flat_source(&flat);
    out->learning_rate = demo_learning_rate(arm->learning_rate, step, r->job->steps);
    XD_TRY(demo_forward(r, &r->model, &source, r->ids, true, r->workspace, r->logits.own));
    XD_TRY(demo_arm_loss(r, arm, out));
    XD_TRY(demo_flat_backward(r, learner->weights));
    XD_TRY(demo_flat_sum(r));
    XD_TRY(demo_update(r->ctx, r->tp, learner->optimizer, NULL, out));
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
        demo_flat_list_params(r, learner->weights, learner->params);
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
        nn_flat flat = { &r->model, learner->weights, NULL };
        const nn_source source = nn_flat_source(&flat);
        XD_TRY(demo_glance_at_student(r, &source, &bits, &bytes));
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

static xd_result demo_finish_arm(demo_rank *r, int seed_index, int arm_index) {
    const demo_job *job = r->job;
    demo_result *result = &job->results[seed_index * job->arm_count + arm_index];
    const demo_learner *learner = &r->learners[arm_index];
    const bool save = seed_index == 0 && arm_index == job->saved_arm && job->save_directory;
    double bits = 0.0;
    /* What is saved is measured as it is saved: every weight rounded to bf16. */
    if (save) demo_round_to_bf16(learner->weights, r->model.float_count);
    nn_flat flat = { &r->model, learner->weights, NULL };
    const nn_source source = nn_flat_source(&flat);
    XD_TRY(demo_evaluate_student(r, &source, &bits));
    xd_result status = XD_OK;
    if (xd_comm_rank(r->world) == 0) {
        const demo_moment at = { job->seed + (uint64_t)seed_index, job->steps - 1, r->seconds };
        result->bits_per_byte = bits;
        result->seconds = learner->seconds;
        status =
            demo_report_heldout(r->ctx, job->report, &job->arms[arm_index], &at, bits, job->heldout->bytes);
    }
    XD_TRY(xd_agree(r->world, status));
    return demo_keep_student(r, learner->weights, save, result->sample);
}

static xd_result demo_run_teacher(demo_rank *r) {
    const demo_job *job = r->job;
    demo_result *result = job->teacher_result;
    double bits = 0.0;
    xd_result status = XD_OK;
    XD_TRY(demo_evaluate_teacher(r, &bits));
    if (xd_comm_rank(r->world) == 0) {
        result->bits_per_byte = bits;
        status = sample_write(r->ctx, job->teacher, job->teacher_weights, job->teacher_tokenizer,
                              DEMO_BEGINNING, job->seed, result->sample);
    }
    return xd_agree(r->world, status);
}

static xd_result demo_make_buffers(demo_rank *r) {
    demo_rank_take_range(r);
    XD_TRY(demo_rank_make_buffers(r));
    XD_TRY(demo_flat_open(r));
    return demo_make_learners(r);
}

static xd_result demo_run_all(demo_rank *r) {
    const demo_job *job = r->job;
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
    xd_result result = demo_rank_join(&r, world, (const demo_job *)job);
    if (result == XD_OK) result = demo_run_all(&r);
    demo_free_learners(&r);
    demo_flat_close(&r);
    demo_rank_close(&r);
    return result;
}
