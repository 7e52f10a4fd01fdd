/* demo_run.c - what each rank does: train the arms, measure the held-out text, write a sample.
 *
 * The mesh has three axes. "dp" splits the rows of a batch, "cp" the positions of a row, "tp" the weights and
 * the vocabulary. All a rank must know beyond one rank's program is here:
 *
 *   - the loss takes the vocabulary's group (inside xd_vocab) and the group of all positions ("dp,cp");
 *   - gradients are summed over "dp,cp", because the loss is the mean over the whole batch already;
 *   - the norm of the gradient is one over "tp", where weights that every rank holds are counted once.
 *
 * In INVARIANT mode every sequence of the batch is a gradient leaf: it goes through the model alone, and the
 * leaves' gradients are added along one tree whatever rank they come from. Losses and norms need nothing: the
 * library adds those exactly. So every dp mesh has the bits of one rank. */
#include "demo.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* One rank's place and memory. Buffers are made once; nothing is allocated in a step. */
typedef struct demo_rank {
    const demo_job *job;
    xd_ctx *ctx;
    xd_comm *world, *tp, *cp, *rows; /* rows = "dp,cp"; NULL for a group of one */
    xd_mesh *mesh;
    xd_vocab *vocab;
    int dp_rank, cp_rank, tp_rank;

    nn_model model, teacher;
    nn_batch batch;     /* this rank's sequences and positions */
    int first_sequence; /* of the batch of DEMO_BATCH */
    int passes;         /* the model takes the batch in that many equal parts */
    nn_batch part;      /* one of them; its ids are set before each pass */
    int64_t
        part_workspace;   /* floats of the student's workspace for one part, kept from forward to backward */
    xd_leaves leaves;     /* INVARIANT mode: this rank's sequences */
    xd_leaf_stack *stack; /* and their gradients; NULL in the other modes */
    int32_t *ids, *position, *cp_count, *cp_position;
    int64_t *labels;

    float *weights, *gradient, *teacher_weights;
    float *workspace, *teacher_workspace;
    float *logits, *teacher_logits;
    void *loss_workspace;
    size_t loss_workspace_bytes;
    xd_param *params;
    xd_optimizer *optimizer;
} demo_rank;

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
    XDI_TRY(xd_mesh_create(r->world, &desc, &r->mesh));
    XDI_TRY(xd_mesh_coordinate(r->mesh, "dp", &r->dp_rank));
    XDI_TRY(xd_mesh_coordinate(r->mesh, "cp", &r->cp_rank));
    XDI_TRY(xd_mesh_coordinate(r->mesh, "tp", &r->tp_rank));
    XDI_TRY(demo_axis(r, "cp", job->cp, &r->cp));
    XDI_TRY(demo_axis(r, "tp", job->tp, &r->tp));
    /* In INVARIANT mode leaves are summed over a group of one rank, too. */
    return demo_is_invariant(r) ? xd_mesh_group(r->mesh, "dp,cp", &r->rows)
                                : demo_axis(r, "dp,cp", job->dp * job->cp, &r->rows);
}

static xd_result demo_make_models(demo_rank *r) {
    const nn_group tp = demo_group(r->tp), cp = demo_group(r->cp);
    const char *problem = nn_model_init(r->job->config, &tp, &cp, &r->model);
    if (!problem && r->job->teacher) problem = nn_model_init(&r->job->teacher->config, &tp, &cp, &r->teacher);
    if (problem) return XDI_FAIL(r->ctx, XD_ERROR_ARGUMENT, "model: %s", problem);
    const nn_share *share = &r->model.share;
    return xd_vocab_create(r->ctx, r->tp, share->vocab_begin, share->vocab_begin + share->vocab_count,
                           r->job->config->vocab, &r->vocab);
}

/* First of part `part` when `total` things are cut into `parts` even ones. */
static int demo_cut(int total, int part, int parts) {
    return (int)((int64_t)total * part / parts);
}

/* Takes `count` things of `size` bytes; *failed remembers that one could not be had. */
static void *demo_room(demo_rank *r, int64_t count, size_t size, bool *failed) {
    void *memory = xd_allocate(r->ctx, ((size_t)count + 1) * size);
    if (!memory) *failed = true;
    return memory;
}

static void demo_place_positions(demo_rank *r) {
    for (int i = 0; i < r->batch.positions; i++)
        r->position[i] = demo_cut(DEMO_ROW, r->cp_rank, r->job->cp) + i;
    for (int c = 0; c < r->job->cp; c++)
        r->cp_count[c] = demo_cut(DEMO_ROW, c + 1, r->job->cp) - demo_cut(DEMO_ROW, c, r->job->cp);
    for (int i = 0; i < DEMO_ROW; i++) r->cp_position[i] = i;
    r->batch.ids = r->ids;
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

static xd_result demo_make_buffers(demo_rank *r) {
    const demo_job *job = r->job;
    bool failed = false;
    r->first_sequence = demo_cut(DEMO_BATCH, r->dp_rank, job->dp);
    r->batch.sequences = demo_cut(DEMO_BATCH, r->dp_rank + 1, job->dp) - r->first_sequence;
    r->batch.positions =
        demo_cut(DEMO_ROW, r->cp_rank + 1, job->cp) - demo_cut(DEMO_ROW, r->cp_rank, job->cp);
    r->passes = demo_is_invariant(r) ? r->batch.sequences : 1;
    const int64_t rows = (int64_t)r->batch.sequences * r->batch.positions;
    r->position = (int32_t *)demo_room(r, r->batch.positions, sizeof(int32_t), &failed);
    r->cp_count = (int32_t *)demo_room(r, job->cp, sizeof(int32_t), &failed);
    r->cp_position = (int32_t *)demo_room(r, DEMO_ROW, sizeof(int32_t), &failed);
    r->ids = (int32_t *)demo_room(r, rows, sizeof(int32_t), &failed);
    r->labels = (int64_t *)demo_room(r, rows, sizeof(int64_t), &failed);
    r->weights = (float *)demo_room(r, r->model.float_count, sizeof(float), &failed);
    r->gradient = (float *)demo_room(r, r->model.float_count, sizeof(float), &failed);
    r->logits = (float *)demo_room(r, rows * r->model.share.vocab_count, sizeof(float), &failed);
    r->params = (xd_param *)demo_room(r, r->model.param_count, sizeof(xd_param), &failed);
    if (failed)
        return XDI_FAIL(r->ctx, XD_ERROR_MEMORY, "no room for the model's %lld weights",
                        (long long)r->model.float_count);
    demo_place_positions(r);
    r->part_workspace = nn_workspace_floats(&r->model, &r->part, true);
    r->workspace = (float *)demo_room(r, r->passes * r->part_workspace, sizeof(float), &failed);
    if (job->teacher) {
        r->teacher_weights = (float *)demo_room(r, r->teacher.float_count, sizeof(float), &failed);
        r->teacher_logits = (float *)demo_room(r, rows * r->model.share.vocab_count, sizeof(float), &failed);
        r->teacher_workspace =
            (float *)demo_room(r, nn_workspace_floats(&r->teacher, &r->part, false), sizeof(float), &failed);
    }
    if (failed) return XDI_FAIL(r->ctx, XD_ERROR_MEMORY, "no room for %lld tokens", (long long)rows);
    if (job->teacher) demo_take_share(job->teacher, job->teacher_weights, &r->teacher, r->teacher_weights);
    return XD_OK;
}

static void demo_list_params(demo_rank *r) {
    for (int i = 0; i < r->model.param_count; i++) {
        const nn_param *p = &r->model.params[i];
        xd_param *out = &r->params[i];
        memset(out, 0, sizeof *out);
        out->name = p->name;
        out->value = r->weights + p->offset;
        out->gradient = r->gradient + p->offset;
        out->dtype = XD_DTYPE_F32;
        out->count = nn_param_count(p);
        out->no_decay = !nn_param_decays(p);
        out->replica =
            p->dims == 1 && r->tp_rank > 0; /* norms: every tensor-parallel rank holds them whole */
    }
}

static void demo_close(demo_rank *r) {
    void *buffers[] = {
        r->ids,     r->position,       r->cp_count,        r->cp_position, r->labels,
        r->weights, r->gradient,       r->teacher_weights, r->workspace,   r->teacher_workspace,
        r->logits,  r->teacher_logits, r->loss_workspace,  r->params
    };
    xd_optimizer_destroy(r->optimizer);
    xd_leaf_stack_destroy(r->stack);
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++) xd_release(r->ctx, buffers[i]);
    xd_vocab_destroy(r->vocab);
    nn_model_free(&r->model);
    nn_model_free(&r->teacher);
    xd_mesh_destroy(r->mesh);
}

/* ---- the loss ---- */

static xd_rows demo_rows(const demo_rank *r, float *logits) {
    xd_rows rows;
    memset(&rows, 0, sizeof rows);
    rows.data = logits;
    rows.dtype = XD_DTYPE_F32;
    rows.rows = (int64_t)r->batch.sequences * r->batch.positions;
    rows.cols = r->model.share.vocab_count;
    return rows;
}

/* The desc of a loss over this rank's rows; `tokens` = all tokens of the batch, which the loss divides by. */
static xd_loss_desc demo_loss_desc(const demo_rank *r, float *logits, double tokens) {
    xd_loss_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.student = demo_rows(r, logits);
    desc.labels = r->labels;
    desc.vocab = r->vocab;
    desc.denominator_value = tokens;
    desc.comm = r->rows;
    desc.workspace = r->loss_workspace;
    desc.workspace_bytes = r->loss_workspace_bytes;
    return desc;
}

static xd_result demo_make_loss_workspace(demo_rank *r) {
    bool failed = false;
    xd_loss_desc desc = demo_loss_desc(r, r->logits, 1.0);
    desc.gradient = desc.student;
    if (r->job->teacher) desc.teacher = demo_rows(r, r->teacher_logits);
    r->loss_workspace_bytes = xd_loss_workspace_bytes(&desc);
    r->loss_workspace = demo_room(r, (int64_t)r->loss_workspace_bytes, 1, &failed);
    return failed ? XDI_FAIL(r->ctx, XD_ERROR_MEMORY, "no room for the loss") : XD_OK;
}

/* ---- one step ---- */

/* A failed communication comes back from the model as the code it left with. */
static xd_result demo_code(int code) {
    return (xd_result)code;
}

static void demo_read_batch(demo_rank *r, uint64_t seed, int step) {
    const demo_text *text = r->job->text;
    int64_t at = 0;
    for (int s = 0; s < r->batch.sequences; s++) {
        const int64_t start = demo_row_start(text, seed, step, r->first_sequence + s);
        for (int i = 0; i < r->batch.positions; i++, at++) {
            r->ids[at] = text->ids[start + r->position[i]];
            r->labels[at] = text->ids[start + r->position[i] + 1];
        }
    }
}

/* Warm-up over the first fifteenth, then a cosine down to a twentieth. */
static double demo_learning_rate(double peak, int step, int steps) {
    const int warm = steps / 15 > 0 ? steps / 15 : 1;
    if (step < warm) return peak * (step + 1) / warm;
    return peak * (0.05 + 0.475 * (1.0 + cos(3.14159265358979 * (step - warm) / (steps - warm))));
}

/* logits -> loss, and the gradient over the logits. */
static xd_result demo_arm_loss(demo_rank *r, const demo_arm *arm, xd_loss_values *values) {
    xd_loss_desc desc = demo_loss_desc(r, r->logits, (double)DEMO_BATCH * DEMO_ROW);
    desc.gradient = desc.student;
    desc.hard_weight = arm->hard_weight;
    if (arm->soft_weight > 0.0) {
        desc.teacher = demo_rows(r, r->teacher_logits);
        desc.soft_weight = arm->soft_weight;
    }
    return xd_loss(r->ctx, &desc, values);
}

/* Points r->part at part `pass` of the batch; returns where its logits begin. */
static int64_t demo_enter_part(demo_rank *r, int pass) {
    const int64_t rows = (int64_t)r->part.sequences * r->part.positions;
    r->part.ids = r->ids + pass * rows;
    return pass * rows * r->model.share.vocab_count;
}

/* The whole batch through a model, part by part. When `training` each part keeps a workspace of its own. */
static xd_result demo_forward(demo_rank *r, const nn_model *model, const float *weights, bool training,
                              float *workspace, float *logits) {
    for (int pass = 0; pass < r->passes; pass++) {
        float *room = workspace + (training ? pass * r->part_workspace : 0);
        const int64_t at = demo_enter_part(r, pass);
        XDI_TRY(demo_code(nn_forward(model, weights, &r->part, training, room, logits + at)));
    }
    return XD_OK;
}

/* This rank's gradient: in r->gradient, or as leaves on the stack. */
static xd_result demo_backward(demo_rank *r) {
    if (r->stack) xd_leaf_stack_reset(r->stack);
    for (int pass = 0; pass < r->passes; pass++) {
        const int64_t at = demo_enter_part(r, pass);
        memset(r->gradient, 0, (size_t)r->model.float_count * sizeof *r->gradient);
        XDI_TRY(demo_code(nn_backward(&r->model, r->weights, &r->part,
                                      r->workspace + pass * r->part_workspace, r->logits + at, r->gradient)));
        if (r->stack) XDI_TRY(xd_leaf_stack_push(r->stack, r->gradient));
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

static xd_result demo_update(demo_rank *r, double learning_rate, double *norm) {
    xd_gradient_norm total;
    xd_gradient_norm_desc clip;
    xd_optimizer_step_desc step;
    memset(&clip, 0, sizeof clip);
    memset(&step, 0, sizeof step);
    XDI_TRY(demo_sum_gradients(r));
    clip.params = r->params;
    clip.param_count = r->model.param_count;
    clip.max_norm = 1.0;
    XDI_TRY(xd_gradient_norm_compute(r->ctx, r->tp, &clip, &total));
    XDI_TRY(xd_optimizer_set_learning_rate(r->optimizer, learning_rate));
    step.gradient_scale = &total.coefficient;
    *norm = total.norm;
    return xd_optimizer_step(r->optimizer, &step, NULL);
}

static xd_result demo_step_once(demo_rank *r, const demo_arm *arm, uint64_t seed, int step, demo_step *out) {
    xd_loss_values values;
    demo_read_batch(r, seed, step);
    if (arm->soft_weight > 0.0)
        XDI_TRY(
            demo_forward(r, &r->teacher, r->teacher_weights, false, r->teacher_workspace, r->teacher_logits));
    XDI_TRY(demo_forward(r, &r->model, r->weights, true, r->workspace, r->logits));
    XDI_TRY(demo_arm_loss(r, arm, &values));
    XDI_TRY(demo_backward(r));
    out->learning_rate = demo_learning_rate(arm->learning_rate, step, r->job->steps);
    out->loss = values.loss;
    out->hard = values.hard;
    out->soft = values.soft;
    return demo_update(r, out->learning_rate, &out->gradient_norm);
}

static xd_result demo_make_optimizer(demo_rank *r) {
    xd_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.params = r->params;
    desc.param_count = r->model.param_count;
    desc.beta2 = 0.95;
    desc.weight_decay = 0.1;
    return xd_optimizer_create(r->ctx, &desc, &r->optimizer);
}

static void demo_state_path(const demo_job *job, uint64_t seed, int arm, char path[512]) {
    snprintf(path, 512, "%s/%llu-%d.safetensors", job->resume_directory, (unsigned long long)seed, arm);
}

/* States of an earlier run must not meet those of this one. */
static void demo_forget_states(const demo_rank *r) {
    const xd_files *files = &xd_ctx_settings(r->ctx)->files;
    char path[512];
    for (int seed = 0; seed < r->job->seeds; seed++)
        for (int arm = 0; arm < r->job->arm_count; arm++) {
            demo_state_path(r->job, r->job->seed + (uint64_t)seed, arm, path);
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
    XDI_TRY(xd_agree(r->world, result));
    return demo_state_save(r->ctx, state);
}

/* Random weights and a new optimizer, or where an interrupted run left them. */
static xd_result demo_begin_arm(demo_rank *r, demo_state *state) {
    xd_result result = XD_OK;
    nn_model_randomize(&r->model, state->seed, r->weights);
    demo_list_params(r);
    xd_optimizer_destroy(r->optimizer);
    r->optimizer = NULL;
    XDI_TRY(demo_make_optimizer(r));
    state->job = r->job;
    state->world = r->world;
    state->tp = r->tp;
    state->part = &r->model;
    state->weights = r->weights;
    state->optimizer = r->optimizer;
    if (!r->job->resume) return XD_OK;
    XDI_TRY(demo_state_load(r->ctx, state));
    if (state->losses && state->done)
        result = demo_report_go_to(r->ctx, r->job->report, state->metrics_bytes);
    return xd_agree(r->world, result);
}

static xd_result demo_train(demo_rank *r, int arm_index, uint64_t seed, demo_result *result) {
    const demo_arm *arm = &r->job->arms[arm_index];
    const bool first = xd_comm_rank(r->world) == 0;
    char path[512];
    demo_step step;
    demo_state state;
    memset(&step, 0, sizeof step);
    memset(&state, 0, sizeof state);
    demo_state_path(r->job, seed, arm_index, path);
    state.path = path;
    state.arm = step.arm = arm->name;
    state.seed = step.seed = seed;
    step.steps = r->job->steps;
    state.losses = first ? result->losses : NULL;
    XDI_TRY(demo_begin_arm(r, &state));
    const double start = xd_now(r->ctx) - state.seconds;
    for (int i = state.done; i < r->job->steps; i++) {
        XDI_TRY(demo_step_once(r, arm, seed, i, &step));
        step.step = i;
        step.seconds = xd_now(r->ctx) - start;
        if (first) {
            result->losses[i] = (float)step.hard;
            XDI_TRY(demo_report_step(r->ctx, r->job->report, &step));
        }
        XDI_TRY(demo_save_state(r, &state, i + 1, step.seconds));
    }
    if (first) result->seconds = xd_now(r->ctx) - start;
    return XD_OK;
}

/* ---- held-out text ---- */

/* Row `row` of the held-out text begins at row * DEMO_ROW; a token is predicted once, from what precedes it
 * in its row. What lies past the end does not count. */
static void demo_read_heldout(demo_rank *r, int64_t first_row) {
    const demo_text *text = r->job->heldout;
    int64_t at = 0;
    for (int s = 0; s < r->batch.sequences; s++)
        for (int i = 0; i < r->batch.positions; i++, at++) {
            const int64_t place = (first_row + r->first_sequence + s) * DEMO_ROW + r->position[i];
            const bool inside = place + 1 < text->count;
            r->ids[at] = inside ? text->ids[place] : 0;
            r->labels[at] = inside ? text->ids[place + 1] : XD_IGNORE_INDEX;
        }
}

static xd_result demo_evaluate(demo_rank *r, const nn_model *model, const float *weights, float *workspace,
                               double *bits_per_byte) {
    const demo_text *text = r->job->heldout;
    double nats = 0.0;
    for (int64_t row = 0; row * DEMO_ROW + 1 < text->count; row += DEMO_BATCH) {
        xd_loss_values values;
        demo_read_heldout(r, row);
        XDI_TRY(demo_forward(r, model, weights, false, workspace, r->logits));
        const xd_loss_desc desc = demo_loss_desc(r, r->logits, 1.0);
        XDI_TRY(xd_loss(r->ctx, &desc, &values));
        nats += values.hard;
    }
    *bits_per_byte = nats / log(2.0) / (double)text->bytes;
    return XD_OK;
}

/* ---- a sample ---- */

/* An entry drawn from softmax(logits / 0.8). */
static int32_t demo_draw(const float *logits, int count, double uniform) {
    double max = -INFINITY, sum = 0.0, passed = 0.0;
    for (int i = 0; i < count; i++) max = fmax(max, (double)logits[i]);
    for (int i = 0; i < count; i++) sum += exp(((double)logits[i] - max) / 0.8);
    for (int i = 0; i < count; i++) {
        passed += exp(((double)logits[i] - max) / 0.8);
        if (passed > uniform * sum) return i;
    }
    return count - 1;
}

/* Appends an entry's bytes to the sample, as long as they fit. */
static void demo_append(const bpe *vocabulary, int32_t id, char sample[DEMO_SAMPLE]) {
    size_t bytes = 0;
    const uint8_t *text = bpe_spelling(vocabulary, id, &bytes);
    const size_t length = strlen(sample);
    if (!text || length + bytes >= DEMO_SAMPLE) return;
    memcpy(sample + length, text, bytes);
    sample[length + bytes] = 0;
}

/* One rank with whole weights continues a fixed beginning. The whole text is run again for every token: at
 * this size that costs less than the code to keep keys and values would. */
static xd_result demo_write_sample(demo_rank *r, const nn_model *whole, const float *weights, uint64_t seed,
                                   char sample[DEMO_SAMPLE]) {
    static const char beginning[] = "And it came to pass";
    enum { LENGTH = 64 };
    int32_t ids[LENGTH];
    nn_batch batch;
    bool failed = false;
    memset(&batch, 0, sizeof batch);
    batch.sequences = 1;
    batch.positions = LENGTH;
    batch.ids = ids;
    const int vocab = whole->config.vocab;
    float *workspace =
        (float *)demo_room(r, nn_workspace_floats(whole, &batch, false), sizeof(float), &failed);
    float *logits = (float *)demo_room(r, (int64_t)LENGTH * vocab, sizeof(float), &failed);
    snprintf(sample, DEMO_SAMPLE, "%s", beginning);
    int count = failed ? LENGTH : (int)bpe_encode(r->job->vocabulary, beginning, strlen(beginning), ids);
    for (; count < LENGTH; count++) {
        batch.positions = count;
        (void)nn_forward(whole, weights, &batch, false, workspace, logits); /* one rank: nothing can fail */
        ids[count] =
            demo_draw(logits + (int64_t)(count - 1) * vocab, vocab, demo_random(seed, 2, (uint64_t)count));
        demo_append(r->job->vocabulary, ids[count], sample);
    }
    xd_release(r->ctx, workspace);
    xd_release(r->ctx, logits);
    return failed ? XDI_FAIL(r->ctx, XD_ERROR_MEMORY, "no room for a sample") : XD_OK;
}

/* The trained model whole on rank 0: rounded to bf16 as the file will hold it when it is saved, a sample from
 * it. */
static xd_result demo_finish_whole(demo_rank *r, uint64_t seed, bool save, demo_result *result) {
    const demo_job *job = r->job;
    nn_model whole;
    bool failed = false;
    const char *problem = nn_model_init(job->config, NULL, NULL, &whole);
    float *weights = problem ? NULL : (float *)demo_room(r, whole.float_count, sizeof(float), &failed);
    xd_result status =
        problem || failed ? XDI_FAIL(r->ctx, XD_ERROR_MEMORY, "no room for the whole model") : XD_OK;
    status = xd_agree(r->world, status);
    if (status == XD_OK) status = demo_gather_shares(r->ctx, r->tp, &r->model, r->weights, &whole, weights);
    if (status == XD_OK && xd_comm_rank(r->world) == 0) {
        if (save)
            status = demo_model_save(r->ctx, job->save_directory, &whole, weights, job->tokenizer,
                                     bpe_special(job->vocabulary, "<|endoftext|>"));
        if (status == XD_OK) status = demo_write_sample(r, &whole, weights, seed, result->sample);
    }
    xd_release(r->ctx, weights);
    nn_model_free(&whole);
    return xd_agree(r->world, status);
}

/* ---- the whole program of a rank ---- */

static xd_result demo_run_arm(demo_rank *r, int seed_index, int arm_index) {
    const demo_job *job = r->job;
    const uint64_t seed = job->seed + (uint64_t)seed_index;
    demo_result *result = &job->results[seed_index * job->arm_count + arm_index];
    const bool save = seed_index == 0 && arm_index == job->arm_count - 1 && job->save_directory;
    double bits = 0.0;
    XDI_TRY(demo_train(r, arm_index, seed, result));
    /* What is saved is measured as it is saved: every weight rounded to bf16. */
    for (int64_t i = 0; save && i < r->model.float_count; i++)
        r->weights[i] = xd_f32_from_bf16(xd_bf16_from_f32(r->weights[i]));
    XDI_TRY(demo_evaluate(r, &r->model, r->weights, r->workspace, &bits));
    if (xd_comm_rank(r->world) == 0) result->bits_per_byte = bits;
    return demo_finish_whole(r, job->seed, save, result);
}

static xd_result demo_run_teacher(demo_rank *r) {
    demo_result *result = r->job->teacher_result;
    double bits = 0.0;
    xd_result status = XD_OK;
    XDI_TRY(demo_evaluate(r, &r->teacher, r->teacher_weights, r->teacher_workspace, &bits));
    if (xd_comm_rank(r->world) == 0) {
        result->bits_per_byte = bits;
        status = demo_write_sample(r, r->job->teacher, r->job->teacher_weights, r->job->seed, result->sample);
    }
    return xd_agree(r->world, status);
}

static xd_result demo_run_all(demo_rank *r) {
    const demo_job *job = r->job;
    XDI_TRY(demo_make_mesh(r));
    XDI_TRY(demo_make_models(r));
    XDI_TRY(xd_agree(r->world, demo_make_buffers(r)));
    XDI_TRY(xd_agree(r->world, demo_make_leaves(r)));
    XDI_TRY(xd_agree(r->world, demo_make_loss_workspace(r)));
    if (!job->resume && xd_comm_rank(r->world) == 0) demo_forget_states(r);
    if (job->teacher && job->teacher_result) XDI_TRY(demo_run_teacher(r));
    for (int seed = 0; seed < job->seeds; seed++)
        for (int arm = 0; arm < job->arm_count; arm++) XDI_TRY(demo_run_arm(r, seed, arm));
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
