/* Training of the model of wrap_scene.h, whose gradients are made up from its values and the number of the leaf; what came out is
 * whole, so that runs on any ranks can be compared. */
#ifndef WRAP_TRAIN_H
#define WRAP_TRAIN_H

#include "wrap_scene.h"
#include "averages.h"

/* ---- one rank's passes ---- */

/* Any function of leaf and place will do; products round. */
static float wrap_number(int64_t leaf, int64_t weight, int64_t at) {
    uint64_t x = (uint64_t)(leaf * 7919 + weight * 104729 + at * 31 + 1) * 0x9e3779b97f4a7c15u;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    return (float)((double)(x >> 40) / 16777216.0 - 0.5);
}

static int64_t wrap_weight_count(const xd_block *block, const xd_model *model, int64_t *first) {
    int64_t n = 0;
    for (int64_t i = 0; i < xd_model_describe(model).weight_count; i++)
        if (xd_weight_describe(xd_model_weight_at(model, i)).block == block) {
            if (n == 0) *first = i;
            n++;
        }
    return n;
}

/* In which type a block shows a weight. */
static xd_dtype wrap_view_dtype(const wrap_run *run, const xd_weight_desc *d) {
    if (!xd_dtype_is_floating(d->dtype)) return d->dtype;
    return run->view ? run->view : d->dtype;
}

static float wrap_at(const void *values, xd_dtype dtype, int64_t i) {
    return dtype == XD_DTYPE_F32 ? ((const float *)values)[i]
                                 : xd_f32_from_bf16(((const uint16_t *)values)[i]);
}

static bool wrap_spoils(const wrap_rank *r, int64_t leaf, const char *name) {
    const wrap_run *run = r->run;
    return run->spoiled && r->step == run->spoiled_step &&
           (leaf == run->spoiled_leaf || run->spoiled_leaf < 0) && strcmp(run->spoiled, name) == 0;
}

/* Adds what the block sees to the leaf's activation, or the gradients that follow from it. */
static void wrap_compute(wrap_rank *r, const xd_block *block, const xd_block_view *view, int64_t k,
                         bool backward) {
    const int64_t leaf = xd_parallel_micro_batch(r->parallel, k);
    int64_t first = 0;
    CHECK_EQ_INT(wrap_weight_count(block, r->model, &first), view->count);
    for (int64_t w = 0; w < view->count; w++) {
        const xd_weight_info info = xd_weight_describe(xd_model_weight_at(r->model, first + w));
        const xd_dtype dtype = wrap_view_dtype(r->run, info.desc);
        float *gradient = (float *)view->gradients[w];
        const bool trains = !info.owner || (!xd_weight_describe(info.owner).desc->buffer &&
                                            !xd_weight_describe(info.owner).desc->traits.frozen);
        CHECK((gradient != NULL) == (backward && leaf >= 0 && trains));
        CHECK_EQ_INT(view->value_dtypes[w], dtype);
        CHECK_EQ_INT(view->gradient_dtypes[w], gradient ? XD_DTYPE_F32 : XD_DTYPE_NONE);
        if (leaf < 0 || !xd_dtype_is_floating(dtype)) continue;
        for (int64_t i = 0; i < info.count; i++) {
            const float value = wrap_at(view->values[w], dtype, i);
            if (!backward)
                r->activation[k] += value * wrap_number(leaf, first + w, i);
            else if (gradient)
                gradient[i] += r->activation[k] * wrap_number(leaf, first + w, i) + 0.01f * value;
        }
        if (gradient && wrap_spoils(r, leaf, info.name)) gradient[info.count - 1] = r->run->spoil;
    }
}

static xd_result wrap_visit(wrap_rank *r, xd_block *block, int64_t k, bool backward) {
    const xd_pass pass = { backward ? XD_PASS_BACKWARD : XD_PASS_FORWARD, k, false };
    xd_block_view view;
    XD_TRY(xd_block_begin(block, pass, &view));
    wrap_compute(r, block, &view, k, backward);
    return XD_OK;
}

static xd_result wrap_layer_pass(wrap_rank *r, int i, int64_t k, bool backward) {
    char name[32];
    snprintf(name, sizeof name, "layers.%d", i);
    xd_block *layer = xd_model_find_block(r->model, name);
    snprintf(name, sizeof name, "layers.%d.mlp", i);
    xd_block *mlp = xd_model_find_block(r->model, name);
    if (r->run->skips && (r->step + i) % WRAP_LAYERS == 0) {
        if (backward) XD_TRY(xd_block_skip(mlp, k));
        return backward ? xd_block_skip(layer, k) : XD_OK;
    }
    XD_TRY(wrap_visit(r, layer, k, backward));
    XD_TRY(wrap_visit(r, mlp, k, backward));
    XD_TRY(xd_block_end(mlp));
    return xd_block_end(layer);
}

static xd_result wrap_pass(wrap_rank *r, int64_t k, bool backward) {
    if (!backward) r->activation[k] = 0.0f;
    XD_TRY(wrap_visit(r, xd_model_root(r->model), k, backward));
    for (int i = 0; i < WRAP_LAYERS; i++)
        XD_TRY(wrap_layer_pass(r, backward ? WRAP_LAYERS - 1 - i : i, k, backward));
    return xd_block_end(xd_model_root(r->model));
}

static xd_result wrap_leaves(wrap_rank *r) {
    const int64_t most = r->run->kind == WRAP_DDP || r->run->kind == WRAP_SHARDED
                             ? xd_parallel_micro_batches(r->parallel).own
                             : xd_parallel_micro_batches(r->parallel).max;
    for (int64_t k = 0; k < most; k++) {
        XD_TRY(wrap_pass(r, k, false));
        if (!r->run->together) XD_TRY(wrap_pass(r, k, true));
    }
    for (int64_t k = 0; k < most && r->run->together; k++) XD_TRY(wrap_pass(r, k, true));
    return XD_OK;
}

/* ---- a run ---- */

static xd_result wrap_update(wrap_rank *r, const xd_param *params, int64_t count, xd_optimizer *optimizer,
                             xd_ema *ema, int step) {
    const xd_gradient_norm_desc clip = { .params = params,
                                         .param_count = count,
                                         .max_norm = 2.0,
                                         .refuse_above = r->run->refuse_above,
                                         .status = &r->found };
    const int rank = xd_comm_rank(r->world);
    bool skipped = false;
    xd_gradient_norm norm;
    memset(&r->found, 0, sizeof r->found);
    XD_TRY(xd_gradient_norm_compute(r->home, r->over, &clip, &norm));
    if (xd_gradient_norm_check(r->home, r->over, &clip, &norm) != XD_OK)
        memcpy(r->run->findings[rank], xd_last_error(r->home)->message, sizeof r->run->findings[rank] - 1);
    const xd_optimizer_step_desc modifiers = {
        .gradient_scale = &norm.coefficient, .status = &r->found, .averages = &ema, .average_count = 1
    };
    if (rank == 0) r->run->norms[step] = norm.norm;
    const xd_result result = xd_optimizer_step(optimizer, &modifiers, &skipped);
    r->run->skipped[rank] += skipped;
    return result;
}

/* Weights whose time has come: in the wrapper, in the list, in the optimizer. */
static xd_result wrap_thaw_weights(wrap_rank *r, xd_param *params, int64_t count, xd_optimizer *optimizer,
                                   int step) {
    for (int i = 0; i < 4 && r->run->thaws[i].name; i++) {
        xd_weight *weight = xd_model_find_weight(r->model, r->run->thaws[i].name);
        const char *name = xd_weight_describe(xd_weight_describe(weight).owner).name;
        if (r->run->thaws[i].step != step) continue;
        XD_TRY(xd_parallel_thaw(r->parallel, weight));
        for (int64_t k = 0; k < count; k++) {
            if (strcmp(params[k].name, name) != 0) continue;
            params[k].frozen = false;
            XD_TRY(xd_optimizer_thaw(optimizer, k));
        }
    }
    return XD_OK;
}

/* What this rank counts, at its place among all weights one after another. */
static void wrap_keep(wrap_rank *r, const xd_tensor_part *parts, int64_t count, xd_optimizer *optimizer,
                      xd_ema *ema) {
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        const xd_tensor_part *p = &parts[i];
        const xd_optimizer_state state = xd_optimizer_state_at(optimizer, i);
        int64_t numel = 1;
        for (int d = 0; d < p->ndim; d++) numel *= p->shape[d];
        for (int64_t j = p->range.begin; j < p->range.end && xd_dtype_is_floating(p->dtype); j++) {
            const int64_t here = j - p->range.begin;
            const float value = state.master ? state.master[here] : wrap_at(p->data, p->dtype, here);
            if (p->replica) continue;
            r->run->values[at + j] = value;
            r->run->averages[at + j] = ((const float *)xd_ema_view(ema, i).shadow.value)[here];
            if (state.exp_avg) r->run->moments[at + j] = state.exp_avg[here];
            if (state.exp_avg_sq) r->run->squares[at + j] = state.exp_avg_sq[here];
        }
        at += xd_dtype_is_floating(p->dtype) ? numel : 0;
    }
    if (xd_comm_rank(r->world) > 0) return;
    r->run->count = at;
    r->run->taken = *xd_optimizer_state_at(optimizer, 0).step;
}

static xd_result wrap_train(wrap_rank *r) {
    xd_param params[WRAP_WEIGHTS];
    xd_tensor_part parts[WRAP_WEIGHTS];
    xd_optimizer *optimizer = NULL;
    xd_ema *ema = NULL;
    int64_t count = 0;
    CHECK(xd_parallel_params(r->parallel, WRAP_WEIGHTS, params, &count) == XD_OK);
    CHECK(xd_parallel_parts(r->parallel, WRAP_WEIGHTS, parts, &count) == XD_OK);
    xd_optimizer_desc d = xd_adamw_defaults(params, count);
    d.learning_rate = 0.01;
    d.reserve_frozen = r->run->thaws[0].name;
    xd_ema_desc average = xd_ema_defaults(XD_EMA_CONSTANT);
    average.decay = 0.9;
    average.init_from_current = true;
    CHECK(xd_optimizer_create(r->home, &d, &optimizer) == XD_OK);
    CHECK(average_create(r->home, params, count, &average, &ema) == XD_OK);
    xd_result result = XD_OK;
    const int steps = r->run->steps ? r->run->steps : WRAP_STEPS;
    for (int step = 0; step < steps && result == XD_OK; step++) {
        r->step = step;
        result = wrap_thaw_weights(r, params, count, optimizer, step);
        if (result == XD_OK) result = wrap_leaves(r);
        if (result == XD_OK) result = xd_parallel_reduce(r->parallel);
        if (result == XD_OK) result = wrap_update(r, params, count, optimizer, ema, step);
        if (result == XD_OK) result = xd_parallel_publish(r->parallel);
    }
    if (result == XD_OK) wrap_keep(r, parts, count, optimizer, ema);
    xd_ema_destroy(ema);
    xd_optimizer_destroy(optimizer);
    return result;
}

static xd_result wrap_rank_run(xd_comm *world, void *argument) {
    wrap_rank r;
    memset(&r, 0, sizeof r);
    r.run = (wrap_run *)argument;
    r.world = world;
    r.ctx = xd_comm_ctx(world);
    r.model = wrap_describe(r.ctx, r.run->kept ? r.run->kept : XD_DTYPE_F32);
    for (int i = 0; i < 4 && r.run->thaws[i].name; i++)
        CHECK(xd_weight_set_frozen(xd_model_find_weight(r.model, r.run->thaws[i].name), true) == XD_OK);
    CHECK(xd_model_seal(r.model) == XD_OK);
    xd_result result = wrap_home(&r);
    if (result == XD_OK) result = wrap_groups(&r);
    if (result == XD_OK) result = wrap_create(&r);
    if (result == XD_OK) result = wrap_train(&r);
    wrap_close(&r);
    return result;
}

static inline xd_result wrap_execute(wrap_run *run) {
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.reduction = run->reduction;
    desc.timeout_seconds = 60;
    xd_error error;
    const xd_result result = xd_run_threads(run->ranks, &desc, wrap_rank_run, run, &error);
    if (result != XD_OK) printf("%s\n", error.message);
    return result;
}

static inline wrap_run *wrap_new(wrap_kind kind, int ranks, int64_t leaves, xd_reduction reduction) {
    wrap_run *run = (wrap_run *)calloc(1, sizeof *run);
    run->kind = kind;
    run->ranks = ranks;
    run->leaves = leaves;
    run->reduction = reduction;
    return run;
}

static inline bool wrap_equal(const wrap_run *a, const wrap_run *b) {
    return a->count == b->count && memcmp(a->values, b->values, sizeof a->values) == 0 &&
           memcmp(a->averages, b->averages, sizeof a->averages) == 0 &&
           memcmp(a->moments, b->moments, sizeof a->moments) == 0 &&
           memcmp(a->squares, b->squares, sizeof a->squares) == 0 &&
           memcmp(a->norms, b->norms, sizeof a->norms) == 0;
}

#endif
