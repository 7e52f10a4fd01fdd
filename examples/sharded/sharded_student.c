/* sharded_student.c - the student as a rank holds it: described, wrapped or not, with its optimizer and its average. */
#include "sharded.h"

#include "../nn/nn_describe.h"

#include <string.h>

/* ---- the wrapper ---- */

/* HSDP: ranks side by side are a group. */
static xd_result sharded_split(sharded_student *s, xd_comm *all) {
    const int rank = xd_comm_rank(all), each = xd_comm_size(all) / SHARDED_GROUPS;
    XD_TRY(xd_comm_split(all, rank / each, rank, &s->data));
    s->owns_groups = true;
    return xd_comm_split(all, rank % each, rank, &s->replicas);
}

/* Every sequence of the batch is a micro-batch, every layer a unit. */
static xd_result sharded_wrap_model(sharded_student *s, sharded_wrap wrap) {
    static const char *const units[] = { NN_LAYER_TYPE };
    xd_fsdp_desc fsdp;
    xd_ddp_desc ddp;
    memset(&fsdp, 0, sizeof fsdp);
    memset(&ddp, 0, sizeof ddp);
    XD_TRY(xd_mesh_group(s->rank->mesh, "dp", &s->data));
    if (wrap == SHARDED_HSDP) XD_TRY(sharded_split(s, s->data));
    ddp.data = fsdp.data = s->data;
    ddp.micro_batches = fsdp.micro_batches = DEMO_BATCH;
    ddp.sharded_optimizer = wrap == SHARDED_OPTIMIZER;
    fsdp.unit_types = units;
    fsdp.unit_type_count = 1;
    fsdp.replicas = s->replicas;
    return wrap == SHARDED_FSDP || wrap == SHARDED_HSDP ? xd_fsdp_create(s->model, &fsdp, &s->parallel)
                                                        : xd_ddp_create(s->model, &ddp, &s->parallel);
}

/* Under FSDP every rank opens blocks as often as the one with most micro-batches. */
void sharded_take_leaves(sharded_student *s, const xd_parallel *parallel) {
    const xd_parallel_micro_batch_count count = xd_parallel_micro_batches(parallel);
    demo_rank *r = s->rank;
    r->batch.sequences = r->passes = (int)count.own;
    r->most_passes = (int)count.opened;
    for (int k = 0; k < r->passes; k++) r->sequences[k] = xd_parallel_micro_batch(parallel, k);
}

/* ---- timed blocks ---- */

static int sharded_begin(void *user, int block, nn_pass pass, nn_weights *out) {
    sharded_blocks *b = (sharded_blocks *)user;
    sharded_student *s = b->student;
    const double start = xd_now(s->rank->ctx);
    const nn_source source = nn_blocks_source(&b->blocks);
    const int code = source.begin(source.user, block, pass, out);
    s->wrapper_seconds += xd_now(s->rank->ctx) - start;
    return code;
}

static int sharded_end(void *user, int block) {
    sharded_blocks *b = (sharded_blocks *)user;
    sharded_student *s = b->student;
    const double start = xd_now(s->rank->ctx);
    const nn_source source = nn_blocks_source(&b->blocks);
    const int code = source.end(source.user, block);
    s->wrapper_seconds += xd_now(s->rank->ctx) - start;
    return code;
}

nn_source sharded_blocks_source(sharded_blocks *blocks) {
    const nn_source source = { blocks, sharded_begin, sharded_end, NULL, NULL };
    return source;
}

/* ---- lists ---- */

/* Ranks that share sequences hold the same elements; the first of them speaks for these. */
static void sharded_mark_copies(sharded_student *s) {
    for (int64_t i = 0; i < s->count && s->rank->cp_rank > 0; i++)
        s->params[i].replica = s->parts[i].replica = true;
}

xd_result sharded_make_lists(sharded_student *s) {
    bool failed = false;
    const int64_t most = s->rank->model.param_count;
    s->params = (xd_param *)demo_room(s->rank, most, sizeof *s->params, &failed);
    s->parts = (xd_tensor_part *)demo_room(s->rank, most, sizeof *s->parts, &failed);
    return failed ? XD_FAIL(s->rank->ctx, XD_ERROR_MEMORY, "no room for %lld weights", (long long)most)
                  : XD_OK;
}

static xd_result sharded_open_wrapped(sharded_student *s, sharded_wrap wrap) {
    const int64_t before = sharded_counted();
    XD_TRY(sharded_wrap_model(s, wrap));
    s->counted += (uint64_t)(sharded_counted() - before);
    const xd_parallel_bytes bytes = xd_parallel_memory(s->parallel);
    s->planned += bytes.values + bytes.gradients + bytes.gathered + bytes.whole_gradients;
    sharded_take_leaves(s, s->parallel);
    s->blocks.blocks.model = s->model;
    s->blocks.student = s;
    s->source = sharded_blocks_source(&s->blocks);
    XD_TRY(sharded_make_lists(s));
    XD_TRY(xd_parallel_params(s->parallel, s->rank->model.param_count, s->params, &s->count));
    XD_TRY(xd_parallel_parts(s->parallel, s->rank->model.param_count, s->parts, &s->count));
    sharded_mark_copies(s);
    return XD_OK;
}

/* ---- without a wrapper ---- */

/* The first values that a wrapper gives the model, in one buffer; the model keeps no memory of its own. */
static xd_result sharded_first_values(sharded_student *s) {
    const nn_model *m = &s->rank->model;
    xd_result result = xd_model_allocate(s->model);
    if (result == XD_OK) result = xd_model_init_weights(s->model);
    for (int i = 0; i < m->param_count && result == XD_OK; i++) {
        const xd_weight_info info = xd_weight_describe(xd_model_find_weight(s->model, m->params[i].name));
        memcpy(s->weights + m->params[i].offset, info.value, (size_t)info.count * sizeof(float));
    }
    s->model = NULL; /* none of it is needed any more */
    nn_description_free(&s->description);
    return result;
}

/* Parts that are whole tensors. */
static void sharded_list_parts(sharded_student *s) {
    const nn_model *m = &s->rank->model;
    s->count = m->param_count;
    demo_flat_list_params(s->rank, s->weights, s->params);
    for (int i = 0; i < m->param_count; i++) {
        const nn_param *p = &m->params[i];
        xd_tensor_part *part = &s->parts[i];
        memset(part, 0, sizeof *part);
        part->name = p->name;
        part->dtype = XD_DTYPE_F32;
        part->ndim = p->dims;
        part->shape[0] = p->rows;
        part->shape[1] = p->dims == 2 ? p->cols : 0;
        part->range.end = nn_param_count(p);
        part->data = s->weights + p->offset;
    }
}

static xd_result sharded_open_plain(sharded_student *s) {
    demo_rank *r = s->rank;
    bool failed = false;
    const int64_t before = sharded_counted();
    demo_rank_take_range(r);
    XD_TRY(demo_flat_open(r));
    s->weights = demo_floats(r, r->model.float_count, &failed);
    XD_REQUIRE(r->ctx, !failed, XD_ERROR_MEMORY, "no room for %lld weights", (long long)r->model.float_count);
    s->counted += (uint64_t)(sharded_counted() - before);
    s->planned += 2 * (uint64_t)r->model.float_count * sizeof(float);
    if (r->stack) {
        xd_leaf_stack *none;
        xd_leaf_stack_desc stack;
        xd_planned planned;
        memset(&stack, 0, sizeof stack);
        stack.leaves = r->leaves;
        stack.elements = r->model.float_count;
        XD_TRY(xd_plan_begin(r->ctx, NULL));
        XD_TRY(xd_leaf_stack_create(r->ctx, &stack, &none));
        XD_TRY(xd_plan_end(r->ctx, &planned));
        s->planned += planned.memory.host;
    }
    XD_TRY(sharded_first_values(s));
    s->flat.model = &r->model;
    s->flat.weights = s->weights;
    s->source = nn_flat_source(&s->flat);
    XD_TRY(sharded_make_lists(s));
    sharded_list_parts(s);
    return XD_OK;
}

/* ---- life ---- */

static xd_result sharded_make_optimizer(sharded_student *s) {
    xd_ctx *ctx = s->rank->ctx;
    const xd_optimizer_desc adamw = demo_optimizer_of(s->params, s->count);
    xd_ema_desc ema = xd_ema_defaults(XD_EMA_CONSTANT);
    xd_planned planned;
    const int64_t before = sharded_counted();
    ema.decay = 0.99;
    ema.init_from_current = true;
    ema.params = s->params;
    ema.param_count = s->count;
    XD_TRY(xd_plan_begin(ctx, NULL));
    XD_TRY(xd_optimizer_create(ctx, &adamw, &s->optimizer)); /* NULL: a plan makes nothing */
    XD_TRY(xd_ema_create(ctx, &ema, &s->average));
    XD_TRY(xd_plan_end(ctx, &planned));
    XD_TRY(xd_optimizer_create(ctx, &adamw, &s->optimizer));
    XD_TRY(xd_ema_create(ctx, &ema, &s->average));
    s->planned += planned.memory.host;
    s->counted += (uint64_t)(sharded_counted() - before);
    return XD_OK;
}

xd_result sharded_student_open(sharded_student *s, demo_rank *rank, const sharded_leg *leg, uint64_t seed) {
    s->rank = rank;
    XD_TRY(nn_describe(rank->ctx, &rank->model, seed, XD_DTYPE_F32, &s->description));
    s->model = s->description.model;
    XD_TRY(leg->pp > 1                  ? sharded_stages_open(s, leg, seed)
           : leg->wrap == SHARDED_PLAIN ? sharded_open_plain(s)
                                        : sharded_open_wrapped(s, leg->wrap));
    return sharded_make_optimizer(s);
}

void sharded_student_close(sharded_student *s) {
    if (!s->rank) return;
    xd_ema_destroy(s->average);
    xd_optimizer_destroy(s->optimizer);
    xd_release(s->rank->ctx, s->params);
    xd_release(s->rank->ctx, s->parts);
    xd_release(s->rank->ctx, s->weights);
    xd_parallel_destroy(s->parallel);
    sharded_stages_close(s);
    nn_description_free(&s->description);
    if (s->owns_groups) xd_comm_destroy(s->data);
    if (s->owns_groups) xd_comm_destroy(s->replicas);
    demo_flat_close(s->rank);
}

/* ---- a step ---- */

xd_result sharded_student_backward(sharded_student *s) {
    demo_rank *r = s->rank;
    if (!s->parallel) {
        XD_TRY(demo_flat_backward(r, s->weights));
        return demo_flat_sum(r);
    }
    for (int k = 0; k < r->most_passes; k++) {
        s->blocks.blocks.micro_batch = k;
        XD_TRY(demo_backward(r, &s->source, k));
    }
    const double start = xd_now(r->ctx);
    XD_TRY(xd_parallel_reduce(s->parallel));
    s->wrapper_seconds += xd_now(r->ctx) - start;
    return XD_OK;
}

xd_result sharded_student_publish(sharded_student *s) {
    const double start = xd_now(s->rank->ctx);
    if (s->parallel) XD_TRY(xd_parallel_publish(s->parallel));
    XD_TRY(sharded_stages_publish(s));
    s->wrapper_seconds += xd_now(s->rank->ctx) - start;
    return XD_OK;
}

xd_result sharded_student_update(sharded_student *s, demo_step *out) {
    const bool alone = !s->parallel && !s->stages.built;
    XD_TRY(demo_update(s->rank->ctx, alone ? NULL : s->world, s->optimizer, s->average, out));
    s->done++;
    return sharded_student_publish(s);
}

xd_result sharded_student_gather(sharded_student *s, float *weights) {
    const nn_model *m = &s->rank->model;
    for (int block = NN_ROOT; block < m->config.layers; block++) {
        nn_weights open;
        int code = s->source.begin(s->source.user, block, NN_INFERENCE, &open);
        for (int i = 0; i < nn_block_weights(m, block) && !code; i++) {
            const nn_param *p = nn_block_param(m, block, i);
            memcpy(weights + p->offset, open.value[i], (size_t)nn_param_count(p) * sizeof *weights);
        }
        if (!code) code = s->source.end(s->source.user, block);
        if (code) return (xd_result)code;
    }
    return XD_OK;
}
