/* A toy with layers of experts: each token goes to the expert that a learnt gate likes best, on whichever rank holds it, and its
 * output comes back scaled by the gate's probability. Wrapped in every way, trained some steps. */
#ifndef EXPERT_SCENE_H
#define EXPERT_SCENE_H

#include "wrap_weights.h"
#include "xd_test_topology.h"
#include "wrap_calls.h"

#include <stdlib.h>

enum {
    EXPERT_LAYERS = 2,
    EXPERT_WIDTH = 3,
    EXPERT_HIDDEN = 4,
    EXPERT_MOST = 6,   /* experts of a layer */
    EXPERT_TOKENS = 5, /* of a leaf, at most */
    EXPERT_RANKS = 8,
    EXPERT_LEAVES = 16,
    EXPERT_STEPS = 3,
    EXPERT_ROOM = 640,
    EXPERT_WEIGHTS = 8
};

typedef enum expert_kind { EXPERT_DDP, EXPERT_SHARDED, EXPERT_FSDP, EXPERT_FSDP_WHOLE } expert_kind;

/* One run. */
typedef struct expert_run {
    expert_kind kind;
    int ranks, ep, groups;
    int experts;
    int idle; /* an expert that no token goes to; 0 -> none */
    int64_t leaves;
    xd_reduction reduction;
    int queues; /* 1 inline, 2 workers, 0 none */
    int prefetch, reshard;
    bool offloaded;
    xd_dtype sent;
    bool skips; /* under DDP, where ranks need not do alike, leaves without tokens are skipped */
    xd_gradient_divisors divide;
    const char *frozen; /* a weight that is thawed in step 1; NULL -> none */
    const char *root;   /* a checkpoint is saved there before step 1, or loaded */
    bool save, load;
    /* What came out, written by the ranks that count. */
    float values[EXPERT_ROOM], moments[EXPERT_ROOM], squares[EXPERT_ROOM];
    double losses[EXPERT_STEPS][EXPERT_LEAVES], norms[EXPERT_STEPS];
    int64_t tokens[EXPERT_LAYERS][EXPERT_MOST];
    int64_t count, written;
} expert_run;

typedef struct expert_layer {
    xd_block *gate, *experts;
    /* Of this rank's leaf, by token; `order`: tokens as they are sent. */
    float input[EXPERT_TOKENS][EXPERT_WIDTH], output[EXPERT_TOKENS][EXPERT_WIDTH];
    float likes[EXPERT_TOKENS][EXPERT_MOST];
    int choice[EXPERT_TOKENS], order[EXPERT_TOKENS];
    /* Of what came here, from each member in turn, and for each of this rank's experts. */
    int64_t sent[EXPERT_RANKS], came[EXPERT_RANKS], counts[EXPERT_RANKS * EXPERT_MOST];
    float tokens[EXPERT_RANKS * EXPERT_TOKENS][EXPERT_WIDTH];
} expert_layer;

typedef struct expert_rank {
    expert_run *run;
    xd_ctx *ctx, *home;
    xd_comm *world, *over;
    xd_grid *grid;
    const xd_groups *groups;
    xd_layout *layouts[2];
    xd_model *model;
    xd_parallel *parallel;
    xd_memory_plan plan;
    xd_queue *queues[4];
    expert_layer layers[EXPERT_LAYERS];
    xd_interval mine; /* experts */
    int step;
    int64_t k, leaf, count; /* the round; its leaf here, -1 for none; tokens of it */
} expert_rank;

/* ---- the model ---- */

static void expert_weight(xd_block *block, const char *name, const int64_t *shape, const xd_layout *layout) {
    xd_weight_desc d = { .name = name, .dtype = XD_DTYPE_F32, .ndim = 3, .layout = layout };
    memcpy(d.shape, shape, 3 * sizeof *shape);
    d.traits.expert = true;
    d.init = (xd_init){ XD_INIT_NORMAL, 0.0f, 0.5f };
    CHECK(xd_weight_add(block, &d, NULL) == XD_OK);
}

static void expert_describe(expert_rank *r) {
    const int experts = r->run->experts;
    const int64_t shapes[2][3] = { { experts, EXPERT_HIDDEN, EXPERT_WIDTH },
                                   { experts, EXPERT_WIDTH, EXPERT_HIDDEN } };
    const xd_topology topology = line_of("ep", r->run->ep);
    CHECK(xd_model_create(r->ctx, &(xd_model_desc){ 4, xd_comm_rank(r->groups->ep) }, &r->model) == XD_OK);
    for (int i = 0; i < 2; i++) {
        xd_layout_desc d = { .ndim = 3, .topology = &topology, .placement = { { XD_SHARD } } };
        memcpy(d.shape, shapes[i], sizeof shapes[i]);
        CHECK(xd_layout_create(r->ctx, &d, &r->layouts[i]) == XD_OK);
    }
    for (int i = 0; i < EXPERT_LAYERS; i++) {
        char name[16];
        snprintf(name, sizeof name, "layers.%d", i);
        expert_layer *layer = &r->layers[i];
        layer->gate = wrap_child(xd_model_root(r->model), name, "layer");
        wrap_weight(layer->gate, "gate", experts, EXPERT_WIDTH);
        layer->experts = wrap_child(layer->gate, "experts", "experts");
        expert_weight(layer->experts, "up", shapes[0], r->layouts[0]);
        expert_weight(layer->experts, "down", shapes[1], r->layouts[1]);
    }
    wrap_weight(xd_model_root(r->model), "head", EXPERT_WIDTH, 0);
    if (r->run->frozen)
        CHECK(xd_weight_set_frozen(xd_model_find_weight(r->model, r->run->frozen), true) == XD_OK);
    CHECK(xd_model_seal(r->model) == XD_OK);
}

/* ---- tokens ---- */

static float expert_number(int64_t a, int64_t b, int64_t c) {
    return sinf((float)(17 * a + 5 * b + 3 * c + 1));
}

/* Some leaves have no token at all. */
static int64_t expert_tokens_of(int64_t leaf) {
    return leaf < 0 ? 0 : (leaf * 3 + 2) % (EXPERT_TOKENS + 1);
}

static int expert_member_of(const expert_rank *r, int expert) {
    for (int m = 0; m < r->run->ep; m++)
        if (expert < xd_chunk(r->run->experts, r->run->ep, m).end) return m;
    return -1;
}

/* Rows of tokens to the ranks of their experts, or back. */
static xd_result expert_move(expert_rank *r, const expert_layer *l, const float *from, float *to, bool back) {
    int64_t send[EXPERT_RANKS], receive[EXPERT_RANKS];
    for (int m = 0; m < r->run->ep; m++) {
        send[m] = EXPERT_WIDTH * (back ? l->came[m] : l->sent[m]);
        receive[m] = EXPERT_WIDTH * (back ? l->sent[m] : l->came[m]);
    }
    return xd_all_to_all(r->groups->ep, from, send, to, receive, XD_DTYPE_F32);
}

/* A row for each token in the order in which they are sent, moved, and what came here; or the other way. */
static xd_result expert_send(expert_rank *r, const expert_layer *l, float (*rows)[EXPERT_WIDTH], float *to) {
    float sent[EXPERT_TOKENS][EXPERT_WIDTH];
    for (int64_t i = 0; i < r->count; i++) memcpy(sent[i], rows[l->order[i]], sizeof sent[i]);
    return expert_move(r, l, &sent[0][0], to, false);
}

static xd_result expert_bring(expert_rank *r, const expert_layer *l, const float *from,
                              float (*rows)[EXPERT_WIDTH]) {
    float came[EXPERT_TOKENS][EXPERT_WIDTH];
    XD_TRY(expert_move(r, l, from, &came[0][0], true));
    for (int64_t i = 0; i < r->count; i++) memcpy(rows[l->order[i]], came[i], sizeof came[i]);
    return XD_OK;
}

/* What the gate likes, and who gets which tokens. */
static xd_result expert_route(expert_rank *r, expert_layer *l, const float *gate) {
    int64_t counts[EXPERT_MOST] = { 0 }, most[EXPERT_RANKS], mine[EXPERT_RANKS];
    const int experts = r->run->experts, here = (int)(r->mine.end - r->mine.begin);
    int n = 0;
    for (int64_t t = 0; t < r->count; t++) {
        float sum = 0.0f;
        l->choice[t] = 0;
        for (int e = 0; e < experts; e++) {
            float like = 0.0f;
            for (int i = 0; i < EXPERT_WIDTH; i++) like += gate[e * EXPERT_WIDTH + i] * l->input[t][i];
            sum += l->likes[t][e] = expf(e > 0 && e == r->run->idle ? -90.0f : like);
            if (l->likes[t][e] > l->likes[t][l->choice[t]]) l->choice[t] = e;
        }
        for (int e = 0; e < experts; e++) l->likes[t][e] /= sum;
    }
    for (int e = 0; e < experts; e++)
        for (int t = 0; t < r->count; t++)
            if (l->choice[t] == e) l->order[n++] = t, counts[e]++;
    memset(l->sent, 0, sizeof l->sent);
    memset(l->came, 0, sizeof l->came);
    for (int m = 0; m < r->run->ep; m++) {
        const xd_interval theirs = xd_chunk(experts, r->run->ep, m);
        most[m] = theirs.end - theirs.begin;
        mine[m] = here;
    }
    for (int e = 0; e < experts; e++) l->sent[expert_member_of(r, e)] += counts[e];
    XD_TRY(xd_all_to_all(r->groups->ep, counts, most, l->counts, mine, XD_DTYPE_I64));
    for (int m = 0; m < r->run->ep; m++)
        for (int e = 0; e < here; e++) {
            l->came[m] += l->counts[m * here + e];
            __atomic_fetch_add(&r->run->tokens[l - r->layers][r->mine.begin + e], l->counts[m * here + e],
                               __ATOMIC_RELAXED);
        }
    return XD_OK;
}

/* ---- experts ---- */

/* One expert's weights and gradients, NULL for those that do not train. */
typedef struct expert_matrices {
    const float *up, *down;
    float *d_up, *d_down;
} expert_matrices;

static void expert_hidden(const expert_matrices *m, const float *x, float *hidden) {
    for (int h = 0; h < EXPERT_HIDDEN; h++) {
        float sum = 0.0f;
        for (int i = 0; i < EXPERT_WIDTH; i++) sum += m->up[h * EXPERT_WIDTH + i] * x[i];
        hidden[h] = sum > 0.0f ? sum : 0.0f;
    }
}

/* y = down max(up x, 0) for one token. */
static void expert_token(const expert_matrices *m, const float *x, float *y) {
    float hidden[EXPERT_HIDDEN];
    expert_hidden(m, x, hidden);
    for (int i = 0; i < EXPERT_WIDTH; i++) {
        y[i] = 0.0f;
        for (int h = 0; h < EXPERT_HIDDEN; h++) y[i] += m->down[i * EXPERT_HIDDEN + h] * hidden[h];
    }
}

/* Adds to gradients; d, of y, becomes that of x. */
static void expert_token_backward(const expert_matrices *m, const float *x, float *d) {
    float hidden[EXPERT_HIDDEN], out[EXPERT_WIDTH] = { 0 };
    expert_hidden(m, x, hidden);
    for (int h = 0; h < EXPERT_HIDDEN; h++) {
        float through = 0.0f;
        for (int i = 0; i < EXPERT_WIDTH; i++) {
            through += m->down[i * EXPERT_HIDDEN + h] * d[i];
            if (m->d_down) m->d_down[i * EXPERT_HIDDEN + h] += d[i] * hidden[h];
        }
        for (int i = 0; i < EXPERT_WIDTH && hidden[h] > 0.0f; i++) {
            if (m->d_up) m->d_up[h * EXPERT_WIDTH + i] += through * x[i];
            out[i] += through * m->up[h * EXPERT_WIDTH + i];
        }
    }
    memcpy(d, out, sizeof out);
}

static float *expert_at(void *matrices, int64_t expert) {
    return matrices ? (float *)matrices + expert * EXPERT_HIDDEN * EXPERT_WIDTH : NULL;
}

/* The tokens of one member, among those that came here. */
static void expert_tokens(const expert_rank *r, expert_layer *l, const xd_block_view *view, int member,
                          float (*rows)[EXPERT_WIDTH], bool backward) {
    const int64_t here = r->mine.end - r->mine.begin;
    int64_t at = 0;
    for (int m = 0; m < member; m++) at += l->came[m];
    for (int64_t e = 0; e < here; e++)
        for (int64_t n = 0; n < l->counts[member * here + e]; n++, at++) {
            const expert_matrices one = { expert_at(view->values[0], e), expert_at(view->values[1], e),
                                          expert_at(view->gradients[0], e),
                                          expert_at(view->gradients[1], e) };
            if (backward)
                expert_token_backward(&one, l->tokens[at], rows[at]);
            else
                expert_token(&one, l->tokens[at], rows[at]);
        }
}

static xd_result expert_forward(expert_rank *r, expert_layer *l, float (*rows)[EXPERT_WIDTH]) {
    xd_block_view view;
    XD_TRY(xd_block_begin(l->experts, (xd_pass){ XD_PASS_FORWARD }, &view));
    for (int m = 0; m < r->run->ep; m++) expert_tokens(r, l, &view, m, rows, false);
    return xd_block_end(l->experts);
}

/* A backward for each member's leaf. */
static xd_result expert_backward(expert_rank *r, expert_layer *l, float (*rows)[EXPERT_WIDTH]) {
    xd_block_view view;
    for (int m = 0; m < r->run->ep; m++) {
        const int64_t k = r->k * r->run->ep + m, leaf = xd_parallel_expert_micro_batch(r->parallel, k);
        CHECK(leaf >= 0 || l->came[m] == 0);
        if (r->run->skips && r->run->kind < EXPERT_FSDP && l->came[m] == 0) {
            XD_TRY(xd_block_skip(l->experts, k));
            continue;
        }
        XD_TRY(xd_block_begin(l->experts, (xd_pass){ XD_PASS_BACKWARD, .micro_batch = k }, &view));
        CHECK((leaf >= 0) == (view.gradients[1] != NULL));
        expert_tokens(r, l, &view, m, rows, true);
        XD_TRY(xd_block_end(l->experts));
    }
    return XD_OK;
}

/* ---- layers ---- */

static xd_result expert_layer_forward(expert_rank *r, expert_layer *l, float (*x)[EXPERT_WIDTH]) {
    float rows[EXPERT_RANKS * EXPERT_TOKENS][EXPERT_WIDTH];
    xd_block_view view;
    memcpy(l->input, x, sizeof l->input);
    XD_TRY(xd_block_begin(l->gate, (xd_pass){ XD_PASS_FORWARD }, &view));
    XD_TRY(expert_route(r, l, (const float *)view.values[0]));
    XD_TRY(xd_block_end(l->gate));
    XD_TRY(expert_send(r, l, l->input, l->tokens[0]));
    XD_TRY(expert_forward(r, l, rows));
    XD_TRY(expert_bring(r, l, rows[0], l->output));
    for (int64_t t = 0; t < r->count; t++)
        for (int i = 0; i < EXPERT_WIDTH; i++) x[t][i] += l->likes[t][l->choice[t]] * l->output[t][i];
    return XD_OK;
}

/* d: of the layer's output, then of its input. */
static void expert_gate_token(const expert_rank *r, const expert_layer *l, const float *gate, float *gradient,
                              int64_t t, float through, float *d) {
    for (int e = 0; e < r->run->experts; e++) {
        const float like = l->likes[t][l->choice[t]] * ((e == l->choice[t] ? 1.0f : 0.0f) - l->likes[t][e]);
        for (int i = 0; i < EXPERT_WIDTH; i++) {
            gradient[e * EXPERT_WIDTH + i] += through * like * l->input[t][i];
            d[i] += through * like * gate[e * EXPERT_WIDTH + i];
        }
    }
}

static xd_result expert_gate_backward(expert_rank *r, expert_layer *l, const float *through,
                                      float (*d)[EXPERT_WIDTH]) {
    xd_block_view view;
    if (r->k >= xd_parallel_micro_batches(r->parallel).opened) return XD_OK;
    XD_TRY(xd_block_begin(l->gate, (xd_pass){ XD_PASS_BACKWARD, .micro_batch = r->k }, &view));
    for (int64_t t = 0; t < r->count; t++)
        expert_gate_token(r, l, (const float *)view.values[0], (float *)view.gradients[0], t, through[t],
                          d[t]);
    return xd_block_end(l->gate);
}

static xd_result expert_layer_backward(expert_rank *r, expert_layer *l, float (*d)[EXPERT_WIDTH]) {
    float rows[EXPERT_RANKS * EXPERT_TOKENS][EXPERT_WIDTH], through[EXPERT_TOKENS] = { 0 };
    float out[EXPERT_TOKENS][EXPERT_WIDTH];
    for (int64_t t = 0; t < r->count; t++)
        for (int i = 0; i < EXPERT_WIDTH; i++) {
            through[t] += d[t][i] * l->output[t][i];
            out[t][i] = l->likes[t][l->choice[t]] * d[t][i];
        }
    XD_TRY(expert_send(r, l, out, rows[0]));
    XD_TRY(expert_backward(r, l, rows));
    XD_TRY(expert_bring(r, l, rows[0], out));
    for (int64_t t = 0; t < r->count; t++)
        for (int i = 0; i < EXPERT_WIDTH; i++) d[t][i] += out[t][i];
    return expert_gate_backward(r, l, through, d);
}

/* ---- a step ---- */

/* The loss of a leaf, and its gradient of the last layer's output. */
static xd_result expert_loss(expert_rank *r, float (*x)[EXPERT_WIDTH]) {
    xd_block *root = xd_model_root(r->model);
    xd_block_view view;
    double loss = 0.0;
    if (r->k >= xd_parallel_micro_batches(r->parallel).opened) return XD_OK;
    XD_TRY(xd_block_begin(root, (xd_pass){ XD_PASS_BACKWARD, .micro_batch = r->k }, &view));
    for (int64_t t = 0; t < r->count; t++) {
        const float *head = (const float *)view.values[0];
        float *gradient = (float *)view.gradients[0], d = -expert_number(r->leaf, t, 9);
        for (int i = 0; i < EXPERT_WIDTH; i++) d += head[i] * x[t][i];
        loss += 0.5 * (double)d * (double)d;
        for (int i = 0; i < EXPERT_WIDTH; i++) {
            gradient[i] += d * x[t][i];
            x[t][i] = d * head[i];
        }
    }
    if (r->leaf >= 0) r->run->losses[r->step][r->leaf] = loss;
    return xd_block_end(root);
}

static xd_result expert_round(expert_rank *r, int64_t k) {
    float x[EXPERT_TOKENS][EXPERT_WIDTH] = { { 0 } };
    r->k = k;
    r->leaf = xd_parallel_micro_batch(r->parallel, k);
    r->count = expert_tokens_of(r->leaf);
    for (int64_t t = 0; t < r->count; t++)
        for (int i = 0; i < EXPERT_WIDTH; i++) x[t][i] = expert_number(r->leaf + 40 * r->step, t, i);
    for (int i = 0; i < EXPERT_LAYERS; i++) XD_TRY(expert_layer_forward(r, &r->layers[i], x));
    XD_TRY(expert_loss(r, x));
    for (int i = EXPERT_LAYERS; i-- > 0;) XD_TRY(expert_layer_backward(r, &r->layers[i], x));
    return XD_OK;
}

static xd_result expert_step(expert_rank *r, const xd_param *params, int64_t count, xd_optimizer *optimizer) {
    const xd_gradient_norm_desc clip = { .params = params, .param_count = count, .max_norm = 0.5 };
    xd_gradient_norm norm;
    for (int64_t k = 0; k < xd_parallel_micro_batches(r->parallel).max; k++) XD_TRY(expert_round(r, k));
    XD_TRY(xd_parallel_reduce(r->parallel));
    XD_TRY(xd_gradient_norm_compute(r->home, r->over, &clip, &norm));
    if (xd_comm_rank(r->world) == 0) r->run->norms[r->step] = norm.norm;
    const xd_optimizer_step_desc scaled = { .gradient_scale = &norm.coefficient };
    XD_TRY(xd_optimizer_step(optimizer, &scaled, NULL));
    return xd_parallel_publish(r->parallel);
}

/* ---- a run ---- */

static xd_result expert_queues(expert_rank *r, xd_comm *data, xd_comm *experts) {
    const xd_queue_desc d = { .form = r->run->queues == 2 ? XD_QUEUE_WORKER : XD_QUEUE_INLINE,
                              .capacity = 32 };
    for (int i = 0; i < 4 && r->run->queues; i++)
        XD_TRY(xd_queue_create(i < 2 ? data : experts, &d, &r->queues[i]));
    return XD_OK;
}

/* What a plan says of this rank before it is wrapped. */
static void expert_plan(expert_rank *r, const xd_ddp_desc *ddp, const xd_fsdp_desc *fsdp) {
    const int groups = r->run->groups > 1 ? r->run->groups : 1, ranks = r->run->ranks / groups;
    const xd_memory_plan_desc d = {
        .ddp = ddp, .fsdp = fsdp, .ranks = ranks, .groups = groups, .expert_ranks = ranks / r->run->ep
    };
    CHECK(xd_plan_memory(r->model, &d, xd_comm_rank(r->world), &r->plan) == XD_OK);
}

static xd_result expert_wrap(expert_rank *r) {
    static const char *const types[] = { "layer", "experts" };
    const expert_run *run = r->run;
    const xd_groups *g = r->groups;
    const bool several = run->groups > 1;
    xd_expert_ranks experts = { .data = several ? g->intra_expert_dp : g->expert_dp,
                                .replicas = several ? g->inter_expert_instances : NULL };
    xd_comm *data = several ? g->intra_dp_cp : g->dp_cp, *replicas = several ? g->inter_instances : NULL;
    XD_TRY(expert_queues(r, data, experts.data));
    experts.gathers = r->queues[2];
    experts.reductions = r->queues[3];
    if (run->kind == EXPERT_DDP || run->kind == EXPERT_SHARDED) {
        const xd_ddp_desc d = { .micro_batches = run->leaves,
                                .sharded_optimizer = run->kind == EXPERT_SHARDED,
                                .gathers = r->queues[0],
                                .reductions = r->queues[1],
                                .bucket_size = 16,
                                .divide = run->divide,
                                .reserve_frozen = run->frozen,
                                .replicas = replicas,
                                .experts = experts };
        expert_plan(r, &d, NULL);
        return wrap_over_ddp(r->model, data, &d, &r->parallel);
    }
    const xd_fsdp_desc d = { .micro_batches = run->leaves,
                             .unit_types = types,
                             .unit_type_count = 2,
                             .replicas = replicas,
                             .accumulate_whole = run->kind == EXPERT_FSDP_WHOLE,
                             .sent_dtype = run->sent,
                             .view_dtype = XD_DTYPE_F32,
                             .reshard_ranks = run->reshard,
                             .gathers = r->queues[0],
                             .reductions = r->queues[1],
                             .prefetch = run->prefetch,
                             .divide = run->divide,
                             .reserve_frozen = run->frozen,
                             .host = run->offloaded ? r->home : NULL,
                             .experts = experts };
    expert_plan(r, NULL, &d);
    return wrap_over_fsdp(r->model, data, &d, &r->parallel);
}

/* What this rank counts, at its place among all weights one after another. */
static void expert_keep(expert_rank *r, const xd_tensor_part *parts, int64_t count, xd_optimizer *optimizer) {
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        const xd_tensor_part *p = &parts[i];
        const xd_optimizer_state state = xd_optimizer_state_at(optimizer, i);
        int64_t numel = 1, row;
        for (int d = 0; d < p->ndim; d++) numel *= p->shape[d];
        row = p->ndim == 3 ? numel / p->shape[0] * p->region->interval[0][0].begin : 0;
        for (int64_t j = p->range.begin; j < p->range.end && !p->replica; j++) {
            const int64_t here = j - p->range.begin, there = at + row + j;
            r->run->values[there] = ((const float *)p->data)[here];
            r->run->moments[there] = state.exp_avg[here];
            r->run->squares[there] = state.exp_avg_sq[here];
            __atomic_fetch_add(&r->run->written, 1, __ATOMIC_RELAXED);
        }
        at += numel;
    }
    if (xd_comm_rank(r->world) == 0) r->run->count = at;
}

static xd_result expert_files(expert_rank *r, const xd_tensor_part *parts, int64_t count,
                              xd_optimizer *optimizer) {
    const xd_checkpoint_network network = {
        .name = "model", .parts = parts, .part_count = count, .optimizer = optimizer
    };
    const xd_checkpoint_save_desc save = {
        .root = r->run->root, .step = 1, .networks = &network, .network_count = 1
    };
    const xd_checkpoint_load_desc load = {
        .root = r->run->root, .step = 1, .networks = &network, .network_count = 1
    };
    if (r->run->save) XD_TRY(xd_checkpoint_save(r->over, &save));
    if (!r->run->load) return XD_OK;
    XD_TRY(xd_checkpoint_load(r->over, &load, NULL, NULL));
    return xd_parallel_publish(r->parallel);
}

static xd_result expert_thaw(expert_rank *r, xd_param *params, int64_t count, xd_optimizer *optimizer) {
    if (!r->run->frozen || r->step != 1) return XD_OK;
    XD_TRY(xd_parallel_thaw(r->parallel, xd_model_find_weight(r->model, r->run->frozen)));
    for (int64_t i = 0; i < count; i++) {
        if (strcmp(params[i].name, r->run->frozen) != 0) continue;
        params[i].frozen = false;
        XD_TRY(xd_optimizer_thaw(optimizer, i));
    }
    return XD_OK;
}

static xd_result expert_train(expert_rank *r) {
    xd_param params[EXPERT_WEIGHTS];
    xd_tensor_part parts[EXPERT_WEIGHTS];
    xd_optimizer *optimizer = NULL;
    int64_t count = 0;
    XD_TRY(xd_parallel_params(r->parallel, EXPERT_WEIGHTS, params, &count));
    XD_TRY(xd_parallel_parts(r->parallel, EXPERT_WEIGHTS, parts, &count));
    xd_optimizer_desc d = xd_adamw_defaults(params, count);
    d.learning_rate = 0.02;
    d.reserve_frozen = r->run->frozen;
    const xd_parallel_bytes bytes = xd_parallel_memory(r->parallel);
    CHECK(memcmp(&bytes, &r->plan.wrapper, sizeof bytes) == 0);
    XD_TRY(xd_optimizer_create(r->home, &d, &optimizer));
    xd_result result = XD_OK;
    for (r->step = 0; r->step < EXPERT_STEPS && result == XD_OK; r->step++) {
        if (r->step == 1) result = expert_files(r, parts, count, optimizer);
        if (result == XD_OK) result = expert_thaw(r, params, count, optimizer);
        if (result == XD_OK && (r->step > 0 || !r->run->load))
            result = expert_step(r, params, count, optimizer);
    }
    if (result == XD_OK) expert_keep(r, parts, count, optimizer);
    xd_optimizer_destroy(optimizer);
    return result;
}

static xd_result expert_home(expert_rank *r) {
    const xd_ctx_desc desc = { .reduction = r->run->reduction, .timeout_seconds = 60 };
    r->home = r->ctx;
    r->over = r->world;
    if (!r->run->offloaded) return XD_OK;
    XD_TRY(xd_ctx_create(&desc, &r->home));
    return xd_comm_fork(r->world, r->home, &r->over);
}

static void expert_close(expert_rank *r) {
    xd_parallel_destroy(r->parallel);
    for (int i = 0; i < 4; i++) xd_queue_destroy(r->queues[i]);
    xd_model_destroy(r->model);
    for (int i = 0; i < 2; i++) xd_layout_destroy(r->layouts[i]);
    xd_grid_destroy(r->grid);
    if (r->over != r->world) xd_comm_destroy(r->over);
    if (r->home != r->ctx) xd_ctx_destroy(r->home);
}

static xd_result expert_open(expert_rank *r, xd_comm *world, expert_run *run) {
    memset(r, 0, sizeof *r);
    r->run = run;
    r->world = world;
    r->ctx = xd_comm_ctx(world);
    XD_TRY(expert_home(r));
    const xd_expert_desc sizes = { .ep = run->ep, .optimizer_instances = run->groups };
    XD_TRY(xd_grid_create(world, &sizes, &r->grid));
    r->groups = xd_grid_groups(r->grid);
    r->mine = xd_chunk(run->experts, run->ep, xd_comm_rank(r->groups->ep));
    expert_describe(r);
    return XD_OK;
}

static inline xd_result expert_rank_run(xd_comm *world, void *argument) {
    expert_rank *r = (expert_rank *)calloc(1, sizeof *r);
    xd_result result = expert_open(r, world, (expert_run *)argument);
    if (result == XD_OK) result = expert_wrap(r);
    if (result == XD_OK) result = expert_train(r);
    expert_close(r);
    free(r);
    return result;
}

static inline xd_result expert_execute(expert_run *run) {
    const xd_ctx_desc desc = { .reduction = run->reduction, .timeout_seconds = 60 };
    xd_error error;
    const xd_result result = xd_run_threads(run->ranks, &desc, expert_rank_run, run, &error);
    if (result != XD_OK) printf("%s\n", error.message);
    return result;
}

#endif
