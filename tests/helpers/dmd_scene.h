/* A distillation of small networks on any number of ranks: y = down tanh(up [x, t, 1]); the teacher's feature is what tanh gives,
 * the discriminator is linear in it. */
#ifndef DMD_SCENE_H
#define DMD_SCENE_H

#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/state.h"
#endif
#include "wrap_calls.h"

#include "xd_test.h"
#include "averages.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    DMD_ELEMENTS = 6,
    DMD_WIDTH = 5,
    DMD_HEADS = 3,
    DMD_LEAVES = 8,
    DMD_IN_LEAF = 2,
    DMD_STEPS_MAX = 16,
    DMD_BINS_MAX = 16,
    DMD_SLOTS = 3
};

typedef struct dmd_net {
    xd_model *model;
    xd_block *block[2];
    xd_parallel *parallel;
    xd_optimizer *optimizer;
    xd_ema *average;
    xd_param params[2];
    xd_tensor_part parts[2];
    int64_t count;
    int forwards, backwards, penalties;
    uint64_t seen; /* of a discriminator: hash of the weights that its last forward had */
    int changes;   /* how often a forward had others than the one before, the first too */
} dmd_net;

/* What a run is given, and what it leaves. */
typedef struct dmd_run {
    xd_dmd_desc desc; /* networks, trainers, data and sizes are filled in here */
    bool fsdp, gan;
    bool mixed;           /* fake score and teacher under FSDP, the others not; all sums on one queue */
    int steps, resume_at; /* 0: never */
    int warm_ups, resume_warm_at; /* steps of warm-up first */
    bool like_teacher;            /* the student begins with the teacher's weights */
    int poisoned;                 /* a step whose batch holds a NaN, -1: none */
    uint64_t hash;                /* of weights, moments and averages of all roles */
    uint64_t judges[2][8];        /* of the discriminator's parameters on each rank, first and last */
    int judge_changes;            /* dmd_net.changes of rank 0 */
    int judge_penalties;          /* dmd_net.penalties of rank 0 */
    float judge_first[DMD_HEADS * DMD_WIDTH]; /* its weights before the first step, under DDP */
    int64_t judge_steps;                      /* of its optimizer */
    xd_dmd_values values[DMD_STEPS_MAX], warm[DMD_STEPS_MAX];
    xd_dmd_record record;
    double bins[DMD_BINS_MAX];         /* of f-distill, in the end */
    bool forget_bins;                  /* a resumed run begins with new ones */
    int64_t allocated, taken_by_steps; /* calls of the allocator, when the run counts them; those of
                                        * xd_dmd_step on one rank */
} dmd_run;

/* ---- networks ---- */

static xd_pass dmd_pass(const xd_network_call *call, bool backward) {
    xd_pass pass = { .kind = backward ? XD_PASS_BACKWARD : XD_PASS_FORWARD,
                     .micro_batch = call->micro_batch,
                     .more = call->more };
    if (backward ? !call->weights : !call->keep) pass = (xd_pass){ .kind = XD_PASS_INFERENCE };
    return pass;
}

static void dmd_hidden(const float *up, const float *x, double t, float *h) {
    for (int j = 0; j < DMD_WIDTH; j++) {
        const float *row = up + j * (DMD_ELEMENTS + 2);
        float sum = row[DMD_ELEMENTS] * (float)t + row[DMD_ELEMENTS + 1];
        for (int i = 0; i < DMD_ELEMENTS; i++) sum += row[i] * x[i];
        h[j] = tanhf(sum);
    }
}

static xd_result dmd_open(dmd_net *net, xd_pass pass, xd_block_view view[2]) {
    XD_TRY(xd_block_begin(net->block[0], pass, &view[0]));
    return xd_block_begin(net->block[1], pass, &view[1]);
}

static xd_result dmd_close(dmd_net *net) {
    XD_TRY(xd_block_end(net->block[1]));
    return xd_block_end(net->block[0]);
}

static xd_result dmd_forward(void *user, const xd_network_call *call) {
    dmd_net *net = (dmd_net *)user;
    const float *x = (const float *)call->hidden;
    float *raw = (float *)call->raw, h[DMD_WIDTH];
    xd_block_view view[2];
    net->forwards++;
    XD_TRY(dmd_open(net, dmd_pass(call, false), view));
    const float *up = (const float *)view[0].values[0], *down = (const float *)view[1].values[0];
    for (int64_t b = 0; b < call->samples; b++) {
        dmd_hidden(up, x + b * DMD_ELEMENTS, call->times[b], h);
        for (int i = 0; i < DMD_ELEMENTS; i++) {
            float sum = 0.0f;
            for (int j = 0; j < DMD_WIDTH; j++) sum += down[i * DMD_WIDTH + j] * h[j];
            raw[b * DMD_ELEMENTS + i] = sum;
        }
        if (call->features) memcpy(call->features[0] + b * DMD_WIDTH, h, sizeof h);
    }
    return dmd_close(net);
}

/* One sample: slopes of the hidden layer are those that come from above, through tanh. */
static void dmd_sample_backward(const xd_network_call *call, const xd_block_view *view, int64_t b) {
    const float *up = (const float *)view[0].values[0], *down = (const float *)view[1].values[0];
    float *d_up = (float *)view[0].gradients[0], *d_down = (float *)view[1].gradients[0];
    const float *x = (const float *)call->hidden + b * DMD_ELEMENTS;
    const float *g = call->raw_gradient ? call->raw_gradient + b * DMD_ELEMENTS : NULL;
    float h[DMD_WIDTH], d_x[DMD_ELEMENTS] = { 0 };
    dmd_hidden(up, x, call->times[b], h);
    for (int j = 0; j < DMD_WIDTH; j++) {
        float above = call->feature_gradients ? call->feature_gradients[0][b * DMD_WIDTH + j] : 0.0f;
        for (int i = 0; g && i < DMD_ELEMENTS; i++) {
            above += g[i] * down[i * DMD_WIDTH + j];
            if (d_down) d_down[i * DMD_WIDTH + j] += g[i] * h[j];
        }
        above *= 1.0f - h[j] * h[j];
        const float *row = up + j * (DMD_ELEMENTS + 2);
        float *d_row = d_up ? d_up + j * (DMD_ELEMENTS + 2) : NULL;
        for (int i = 0; i < DMD_ELEMENTS; i++) {
            d_x[i] += above * row[i];
            if (d_row) d_row[i] += above * x[i];
        }
        if (d_row) d_row[DMD_ELEMENTS] += above * (float)call->times[b], d_row[DMD_ELEMENTS + 1] += above;
    }
    if (call->hidden_gradient) memcpy(call->hidden_gradient + b * DMD_ELEMENTS, d_x, sizeof d_x);
}

static xd_result dmd_backward(void *user, const xd_network_call *call) {
    dmd_net *net = (dmd_net *)user;
    xd_block_view view[2];
    net->backwards++;
    XD_TRY(dmd_open(net, dmd_pass(call, true), view));
    for (int64_t b = 0; b < call->samples; b++) dmd_sample_backward(call, view, b);
    return dmd_close(net);
}

static xd_result dmd_judge_forward(void *user, const xd_network_call *call) {
    dmd_net *net = (dmd_net *)user;
    float *logits = (float *)call->raw;
    xd_block_view view;
    net->forwards++;
    XD_TRY(xd_block_begin(net->block[0], dmd_pass(call, false), &view));
    const float *v = (const float *)view.values[0];
    const uint64_t seen = xd_hash(1, v, sizeof(float) * DMD_HEADS * DMD_WIDTH);
    net->changes += seen != net->seen;
    net->seen = seen;
    for (int64_t k = 0; k < call->samples * DMD_HEADS; k++) {
        const float *h = call->features[0] + k / DMD_HEADS * DMD_WIDTH;
        logits[k] = 0.0f;
        for (int j = 0; j < DMD_WIDTH; j++) logits[k] += v[k % DMD_HEADS * DMD_WIDTH + j] * h[j];
    }
    return xd_block_end(net->block[0]);
}

static xd_result dmd_judge_backward(void *user, const xd_network_call *call) {
    dmd_net *net = (dmd_net *)user;
    xd_block_view view;
    net->backwards++;
    XD_TRY(xd_block_begin(net->block[0], dmd_pass(call, true), &view));
    const float *v = (const float *)view.values[0];
    float *d_v = (float *)view.gradients[0];
    for (int64_t k = 0; k < call->samples * DMD_WIDTH; k++) {
        const int64_t b = k / DMD_WIDTH, j = k % DMD_WIDTH;
        float sum = 0.0f;
        for (int head = 0; head < DMD_HEADS; head++) {
            const float g = call->raw_gradient[b * DMD_HEADS + head];
            sum += g * v[head * DMD_WIDTH + j];
            if (d_v) d_v[head * DMD_WIDTH + j] += g * call->features[0][k];
        }
        if (call->input_gradients) call->input_gradients[0][k] = sum;
    }
    return xd_block_end(net->block[0]);
}

/* Logits are linear in the features, so that the derivative along v is too: head k has v_b h_k of every sample b. */
static xd_result dmd_judge_penalty(void *user, const xd_network_call *call) {
    dmd_net *net = (dmd_net *)user;
    xd_block_view view;
    net->penalties++;
    XD_TRY(xd_block_begin(net->block[0], dmd_pass(call, true), &view));
    float *d_v = (float *)view.gradients[0];
    for (int64_t k = 0; k < call->samples * DMD_WIDTH; k++)
        for (int head = 0; head < DMD_HEADS; head++)
            d_v[head * DMD_WIDTH + k % DMD_WIDTH] += call->directions[0][k];
    return xd_block_end(net->block[0]);
}

/* ---- making ---- */

static xd_result dmd_add(xd_block *parent, const char *name, int64_t rows, int64_t columns, xd_block **out) {
    xd_weight_desc w = { .name = "weight", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { rows, columns } };
    w.init = (xd_init){ XD_INIT_NORMAL, .scale = 0.4f };
    XD_TRY(xd_block_add(parent, &(xd_block_desc){ .name = name, .unit = XD_UNIT_ALWAYS }, out));
    return xd_weight_add(*out, &w, NULL);
}

static xd_result dmd_wrap(dmd_net *net, xd_comm *world, xd_dmd_role role, const dmd_run *run,
                          xd_queue *sums) {
    const bool apart = run->mixed && (role == XD_DMD_FAKE_SCORE || role == XD_DMD_TEACHER);
    const xd_ddp_desc ddp = { .micro_batches = DMD_LEAVES, .reductions = sums };
    const xd_fsdp_desc fsdp = { .micro_batches = DMD_LEAVES,
                                .reductions = sums,
                                .accumulate_whole = run->mixed };
    return run->fsdp || apart ? wrap_over_fsdp(net->model, world, &fsdp, &net->parallel)
                              : wrap_over_ddp(net->model, world, &ddp, &net->parallel);
}

static xd_result dmd_make_net(dmd_net *net, xd_comm *world, xd_dmd_role role, const dmd_run *run,
                              xd_queue *sums) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const bool judge = role == XD_DMD_DISCRIMINATOR;
    const bool copy = role == XD_DMD_FAKE_SCORE || (role == XD_DMD_STUDENT && run->like_teacher);
    XD_TRY(xd_model_create(ctx, &(xd_model_desc){ .seed = (uint64_t)(copy ? XD_DMD_TEACHER : role) + 1 },
                           &net->model));
    xd_block *root = xd_model_root(net->model);
    XD_TRY(dmd_add(root, "up", judge ? DMD_HEADS : DMD_WIDTH, judge ? DMD_WIDTH : DMD_ELEMENTS + 2,
                   &net->block[0]));
    if (!judge) XD_TRY(dmd_add(net->block[0], "down", DMD_ELEMENTS, DMD_WIDTH, &net->block[1]));
    XD_TRY(xd_model_seal(net->model));
    XD_TRY(dmd_wrap(net, world, role, run, sums));
    XD_TRY(xd_parallel_params(net->parallel, 2, net->params, &net->count));
    XD_TRY(xd_parallel_parts(net->parallel, 2, net->parts, &net->count));
    if (role == XD_DMD_TEACHER) return XD_OK;
    xd_optimizer_desc adamw = xd_adamw_defaults(net->params, net->count);
    adamw.learning_rate = 0.02;
    XD_TRY(xd_optimizer_create(ctx, &adamw, &net->optimizer));
    xd_ema_desc ema = xd_ema_defaults(XD_EMA_CONSTANT);
    ema.decay = 0.5;
    return average_create(ctx, net->params, net->count, &ema, &net->average);
}

static void dmd_free_net(dmd_net *net) {
    xd_ema_destroy(net->average);
    xd_optimizer_destroy(net->optimizer);
    xd_parallel_destroy(net->parallel);
    xd_model_destroy(net->model);
}

static xd_network dmd_network(dmd_net *net, xd_dmd_role role) {
    static const int64_t feature = DMD_WIDTH;
    xd_network n = {
        .user = net, .predicts = XD_PREDICT_FLOW, .forward = dmd_forward, .backward = dmd_backward
    };
    if (role == XD_DMD_TEACHER) n.feature_count = 1, n.feature_elements = &feature;
    if (role == XD_DMD_DISCRIMINATOR)
        n = (xd_network){
            .user = net, .heads = DMD_HEADS, .forward = dmd_judge_forward, .backward = dmd_judge_backward
        };
    if (role == XD_DMD_DISCRIMINATOR) n.penalty = dmd_judge_penalty;
    return n;
}

static const double dmd_rungs_one[] = { 0.999, 0.0 }, dmd_rungs_three[] = { 0.999, 0.7, 0.3, 0.0 };

/* Settings with three rungs, or one; networks are filled in by the run. */
static xd_dmd_desc dmd_settings(xd_dmd_recipe recipe, int steps) {
    xd_dmd_desc d = xd_dmd_defaults(recipe);
    d.frequency = 2;
    d.rungs.steps = steps;
    d.rungs.list = steps == 1 ? dmd_rungs_one : dmd_rungs_three;
    d.sizes.samples = DMD_IN_LEAF;
    d.sizes.step_samples = DMD_IN_LEAF * DMD_LEAVES;
    d.sizes.elements = DMD_ELEMENTS;
    d.seed = 11;
    return d;
}

/* ---- running ---- */

typedef struct dmd_rank {
    dmd_run *run;
    float real[DMD_IN_LEAF * DMD_ELEMENTS];
    int step;
} dmd_rank;

static xd_result dmd_batch(void *user, int64_t leaf, xd_dmd_batch *batch) {
    dmd_rank *rank = (dmd_rank *)user;
    for (int i = 0; i < DMD_IN_LEAF * DMD_ELEMENTS; i++)
        rank->real[i] = sinf((float)(leaf * 31 + i * 7 + rank->step));
    if (rank->step == rank->run->poisoned && leaf == 5) rank->real[3] = NAN;
    batch->samples = DMD_IN_LEAF;
    batch->first = leaf * DMD_IN_LEAF;
    batch->real = rank->real;
    batch->negative = rank->run->desc.guided ? rank->real : NULL;
    return XD_OK;
}

static xd_result dmd_hash(void *user, const xd_state_tensor *tensor, xd_interval elements, const void *data) {
    uint64_t *hash = (uint64_t *)user;
    *hash = xd_hash(*hash, data, (size_t)(elements.end - elements.begin) * xd_dtype_size(tensor->dtype));
    return XD_OK;
}

static xd_result dmd_hash_all(xd_comm *world, dmd_net *nets, dmd_run *run) {
    uint64_t hash = 0;
    for (int role = 0; role < XD_DMD_TEACHER; role++) {
        if (role == XD_DMD_DISCRIMINATOR && !run->gan) continue;
        const xd_checkpoint_average average = { "slow", nets[role].average };
        const xd_checkpoint_network network = { .parts = nets[role].parts,
                                                .part_count = nets[role].count,
                                                .optimizer = nets[role].optimizer,
                                                .averages = &average,
                                                .average_count = 1 };
        xd_state_gather_desc d = { .networks = &network, .network_count = 1, .user = &hash };
        d.take = xd_comm_rank(world) == 0 ? dmd_hash : NULL;
        XD_TRY(xd_state_gather(world, &d));
    }
    if (xd_comm_rank(world) == 0) run->hash = hash;
    return XD_OK;
}

/* What this rank has of the discriminator. */
static void dmd_note_judge(xd_comm *world, const dmd_net *net, dmd_run *run, int last) {
    uint64_t *hash = &run->judges[last][xd_comm_rank(world)];
    *hash = 0;
    for (int64_t i = 0; i < net->count; i++)
        *hash = xd_hash(*hash, net->params[i].value, (size_t)net->params[i].count * sizeof(float));
    if (xd_comm_rank(world) != 0) return;
    if (!last && !run->fsdp) memcpy(run->judge_first, net->params[0].value, sizeof run->judge_first);
    if (!last) return;
    run->judge_penalties = net->penalties;
    run->judge_changes = net->changes;
    run->judge_steps = *xd_optimizer_state_at(net->optimizer, 0).step;
}

static xd_result dmd_make_anew(xd_comm *world, const xd_dmd_desc *desc, bool forget_bins, xd_dmd **dmd) {
    const xd_dmd_record record = xd_dmd_describe(*dmd);
    const bool on = desc->gan.fdistill.on && !forget_bins;
    double bins[DMD_BINS_MAX];
    if (on) XD_TRY(xdi_dmd_bins(*dmd, bins));
    xd_dmd_destroy(*dmd);
    *dmd = NULL;
    XD_TRY(xd_dmd_create(xd_comm_ctx(world), desc, dmd));
    if (on) XD_TRY(xdi_dmd_set_bins(*dmd, bins, desc->gan.fdistill.bins));
    return xd_dmd_resume(*dmd, &record);
}

static xd_result dmd_steps(xd_comm *world, dmd_rank *rank, const xd_dmd_desc *desc) {
    dmd_run *run = rank->run;
    xd_dmd_values values;
    xd_dmd *dmd;
    XD_TRY(xd_dmd_create(xd_comm_ctx(world), desc, &dmd));
    for (rank->step = 0; rank->step < run->warm_ups; rank->step++) {
        if (run->resume_warm_at > 0 && rank->step == run->resume_warm_at)
            XD_TRY(dmd_make_anew(world, desc, run->forget_bins, &dmd));
        const int64_t before = run->allocated;
        XD_TRY(xd_dmd_warm_up_step(dmd, dmd_batch, rank, &values));
        if (xd_comm_rank(world) != 0) continue;
        run->taken_by_steps += run->allocated - before;
        run->warm[rank->step] = values;
    }
    for (rank->step = 0; rank->step < run->steps; rank->step++) {
        if (run->resume_at > 0 && rank->step == run->resume_at)
            XD_TRY(dmd_make_anew(world, desc, run->forget_bins, &dmd));
        const int64_t before = run->allocated;
        XD_TRY(xd_dmd_step(dmd, dmd_batch, rank, &values));
        if (xd_comm_rank(world) != 0) continue;
        run->taken_by_steps += run->allocated - before;
        run->values[rank->step] = values;
    }
    if (xd_comm_rank(world) == 0) run->record = xd_dmd_describe(dmd);
    if (xd_comm_rank(world) == 0 && desc->gan.fdistill.on) XD_TRY(xdi_dmd_bins(dmd, run->bins));
    xd_dmd_destroy(dmd);
    return XD_OK;
}

/* The networks of a run on one rank, and where they stand in the settings, which are the run's. `nets` hold what was made in any
 * case. */
static xd_result dmd_make_all(xd_comm *world, const dmd_run *run, xd_queue *sums, dmd_net *nets,
                              xd_dmd_desc *desc) {
    xd_result result = XD_OK;
    memset(nets, 0, XD_DMD_ROLES * sizeof *nets);
    *desc = run->desc;
    desc->data = world;
    for (int role = 0; role < XD_DMD_ROLES && result == XD_OK; role++) {
        if (role == XD_DMD_DISCRIMINATOR && !run->gan) continue;
        result = dmd_make_net(&nets[role], world, (xd_dmd_role)role, run, sums);
        desc->networks[role] = dmd_network(&nets[role], (xd_dmd_role)role);
        desc->trainers[role] =
            (xd_dmd_trainer){ nets[role].parallel, nets[role].optimizer, &nets[role].average, 1, 1.0, NULL };
    }
    return result;
}

static void dmd_free_all(dmd_net *nets) {
    for (int role = 0; role < XD_DMD_ROLES; role++) dmd_free_net(&nets[role]);
}

/* What a checkpoint has of the three that train. */
static inline int dmd_records(dmd_net *nets, xd_checkpoint_network *networks,
                              xd_checkpoint_average *averages) {
    static const char *const names[] = { NULL, "fake", "judge" };
    memset(networks, 0, XD_DMD_TEACHER * sizeof *networks);
    for (int role = 0; role < XD_DMD_TEACHER; role++) {
        averages[role] = (xd_checkpoint_average){ "slow", nets[role].average };
        networks[role].name = names[role];
        networks[role].parts = nets[role].parts;
        networks[role].part_count = nets[role].count;
        networks[role].optimizer = nets[role].optimizer;
        networks[role].averages = &averages[role];
        networks[role].average_count = 1;
    }
    return XD_DMD_TEACHER;
}

static xd_result dmd_run_rank(xd_comm *world, void *argument) {
    dmd_run *run = (dmd_run *)argument;
    dmd_net nets[XD_DMD_ROLES];
    dmd_rank rank = { .run = run };
    xd_dmd_desc desc;
    xd_queue *sums = NULL;
    if (run->mixed) XD_TRY(xd_queue_create(world, &(xd_queue_desc){ .form = XD_QUEUE_INLINE }, &sums));
    xd_result result = dmd_make_all(world, run, sums, nets, &desc);
    if (run->gan) dmd_note_judge(world, &nets[XD_DMD_DISCRIMINATOR], run, 0);
    if (result == XD_OK) result = dmd_steps(world, &rank, &desc);
    if (run->gan && result == XD_OK) dmd_note_judge(world, &nets[XD_DMD_DISCRIMINATOR], run, 1);
    if (result == XD_OK) result = dmd_hash_all(world, nets, run);
    dmd_free_all(nets);
    xd_queue_destroy(sums);
    return result;
}

static void *dmd_allocate(void *user, size_t bytes) {
    dmd_run *run = (dmd_run *)user;
    __atomic_add_fetch(&run->allocated, 1, __ATOMIC_RELAXED);
    return malloc(bytes ? bytes : 1);
}

static void dmd_release(void *user, void *memory) {
    (void)user;
    free(memory);
}

static inline xd_result dmd_execute(dmd_run *run, int ranks, xd_reduction reduction) {
    xd_ctx_desc desc = { .reduction = reduction };
    if (ranks == 1) desc.allocator = (xd_allocator){ dmd_allocate, dmd_release, run };
    xd_error error = { 0 };
    const xd_result result = xd_run_threads(ranks, &desc, dmd_run_rank, run, &error);
    if (result != XD_OK) printf("rank %d: %s\n", error.rank, error.message);
    return result;
}

#endif
