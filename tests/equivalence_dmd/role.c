/* role.c - networks are made, wrapped and given what trains them. */
#include "role.h"
#include "../helpers/wrap_calls.h"

#include <string.h>

/* ---- ranks ---- */

/* The same for both groups, which may be one. */
static xd_result role_make_queues(const run_config *config, xd_comm *comm, xd_queue **queues) {
    xd_queue_desc d;
    memset(&d, 0, sizeof d);
    d.form = config->queues;
    d.capacity = 4 * ROLE_WEIGHTS;
    if (config->queues == XD_QUEUE_AUTO) return XD_OK;
    for (int i = 0; i < ROLE_QUEUES; i++) XD_TRY(xd_queue_create(comm, &d, &queues[i]));
    return XD_OK;
}

xd_result role_ranks_open(xd_comm *world, const run_config *config, role_ranks *out) {
    const int me = xd_comm_rank(world), cut = config->cp * config->tp, d = me / cut;
    out->world = world;
    XD_TRY(xd_comm_split(world, me % cut, me, &out->data));
    XD_TRY(xd_comm_split(world, me / config->tp, me, &out->cut.tp));
    XD_TRY(xd_comm_split(world, d * config->tp + me % config->tp, me, &out->cut.cp));
    XD_TRY(role_make_queues(config, out->data, out->queues[0]));
    if (config->net == RUN_PIECES) XD_TRY(nn_split_create(out->cut.tp, out->cut.cp, &out->split));
    if (config->groups < 2) return XD_OK;
    const int each = config->dp / config->groups;
    XD_TRY(xd_comm_split(out->data, d / each, d, &out->group));
    XD_TRY(xd_comm_split(out->data, d % each, d, &out->replicas));
    return role_make_queues(config, out->group, out->queues[1]);
}

void role_ranks_close(role_ranks *ranks) {
    nn_split_destroy(ranks->split);
    for (int i = 0; i < 2 * ROLE_QUEUES; i++) xd_queue_destroy(ranks->queues[i / 2][i % 2]);
    if (ranks->replicas) xd_comm_destroy(ranks->replicas);
    if (ranks->group) xd_comm_destroy(ranks->group);
    if (ranks->cut.cp) xd_comm_destroy(ranks->cut.cp);
    if (ranks->cut.tp) xd_comm_destroy(ranks->cut.tp);
    if (ranks->data) xd_comm_destroy(ranks->data);
}

/* ---- networks ---- */

static nn_patch_config role_patch(const role_ranks *ranks) {
    const nn_patch_config whole = { PATCH_SIDE, 1, 8, 2, 1, 12, 4, PATCH_LABELS, ranks->cut.cp, NULL };
    const nn_patch_config pieces = { PATCH_SIDE,   1,           32, 2, 4, 18, 4, PATCH_LABELS,
                                     ranks->cut.cp, ranks->split };
    return ranks->split ? pieces : whole;
}

xd_interval role_pixels(const role_ranks *ranks) {
    const nn_patch_config c = role_patch(ranks);
    return nn_patch_pixels(&c);
}

/* The fake score begins as a copy of the teacher. */
static uint64_t role_seed(xd_dmd_role which) {
    return which == XD_DMD_FAKE_SCORE ? XD_DMD_TEACHER + 1 : (uint64_t)which + 1;
}

static xd_result role_describe(const role_ranks *ranks, const run_config *config, xd_dmd_role which,
                               role *r) {
    const nn_patch_config patch = role_patch(ranks);
    xd_ctx *ctx = xd_comm_ctx(ranks->world);
    const int64_t feature =
        config->net == RUN_STRIP ? STRIP_ELEMENTS : (int64_t)PATCH_SIDE * PATCH_SIDE * patch.width;
    if (which == XD_DMD_DISCRIMINATOR) {
        XD_TRY(judge_create(ctx, &ranks->cut, role_seed(which), feature, &r->judge));
        r->network = judge_network(r->judge);
        r->model = judge_model(r->judge);
        return XD_OK;
    }
    if (config->net != RUN_STRIP) return nn_patch_describe(ctx, &patch, role_seed(which), &r->model);
    XD_TRY(strip_create(ctx, &ranks->cut, role_seed(which), RUN_SAMPLES / config->leaves, &r->strip));
    r->network = strip_network(r->strip);
    r->model = strip_model(r->strip);
    return XD_OK;
}

static xd_result role_wrap(const role_ranks *ranks, const run_config *config, run_wrap wrap, role *r) {
    static const char *const units[] = { "layer" };
    const bool hybrid = wrap >= RUN_HSDP;
    xd_queue *const *queues = ranks->queues[hybrid];
    xd_ddp_desc ddp;
    xd_fsdp_desc fsdp;
    memset(&ddp, 0, sizeof ddp);
    memset(&fsdp, 0, sizeof fsdp);
    ddp.micro_batches = fsdp.micro_batches = config->leaves;
    ddp.gathers = fsdp.gathers = queues[0];
    ddp.reductions = fsdp.reductions = queues[1];
    ddp.sharded_optimizer = wrap == RUN_SHARDED;
    ddp.bucket_size = 200;
    fsdp.unit_types = units;
    fsdp.unit_type_count = 1;
    fsdp.replicas = hybrid ? ranks->replicas : NULL;
    fsdp.accumulate_whole = wrap == RUN_WHOLE || wrap == RUN_HSDP_WHOLE;
    fsdp.prefetch = queues[0] != NULL;
    return wrap <= RUN_SHARDED
               ? wrap_over_ddp(r->model, ranks->data, &ddp, &r->parallel)
               : wrap_over_fsdp(r->model, hybrid ? ranks->group : ranks->data, &fsdp, &r->parallel);
}

/* Much of the patch transformer begins as zeros: here it gets numbers of each element's place in its weight. */
static xd_result role_fill(xd_ctx *ctx, role *r, xd_dmd_role which) {
    const xd_init normal = { XD_INIT_NORMAL, 0.0f, 0.3f };
    xd_philox random;
    memset(&random, 0, sizeof random);
    random.seed = role_seed(which);
    random.stream = XD_STREAM_USER;
    for (int64_t i = 0; i < r->count; i++) {
        random.sample = (uint32_t)i;
        XD_TRY(xd_tensor_part_fill(ctx, &r->parts[i], &normal, &random));
    }
    return xd_parallel_publish(r->parallel);
}

static xd_result role_train(xd_ctx *ctx, role *r) {
    xd_optimizer_desc adamw = xd_adamw_defaults(r->params, r->count);
    xd_ema_desc ema = xd_ema_defaults(XD_EMA_CONSTANT);
    adamw.learning_rate = 0.01;
    ema.decay = 0.8;
    ema.init_from_current = true;
    XD_TRY(xd_optimizer_create(ctx, &adamw, &r->optimizer));
    ema.params = r->params;
    ema.param_count = r->count;
    return xd_ema_create(ctx, &ema, &r->average);
}

xd_result role_open(const role_ranks *ranks, const run_config *config, xd_dmd_role which, bool fresh,
                    role *r) {
    const nn_patch_config patch = role_patch(ranks);
    xd_ctx *ctx = xd_comm_ctx(ranks->world);
    XD_TRY(role_describe(ranks, config, which, r));
    XD_TRY(role_wrap(ranks, config, config->wraps[which], r));
    XD_TRY(xd_parallel_params(r->parallel, ROLE_WEIGHTS, r->params, &r->count));
    XD_TRY(xd_parallel_parts(r->parallel, ROLE_WEIGHTS, r->parts, &r->count));
    if (!r->judge && !r->strip) {
        for (int64_t i = 0; i < r->count && !ranks->split && xd_comm_rank(ranks->cut.cp) > 0; i++)
            r->params[i].replica = r->parts[i].replica = true;
        XD_TRY(nn_patch_create(ctx, &patch, r->model, RUN_SAMPLES / config->leaves, STRIP_SLOTS, &r->patch));
        r->network = nn_patch_network(r->patch);
        if (fresh || which == XD_DMD_TEACHER) XD_TRY(role_fill(ctx, r, which));
    }
    return which == XD_DMD_TEACHER ? XD_OK : role_train(ctx, r);
}

void role_close(role *r) {
    xd_ema_destroy(r->average);
    xd_optimizer_destroy(r->optimizer);
    nn_patch_destroy(r->patch);
    xd_parallel_destroy(r->parallel);
    if (!r->judge && !r->strip) xd_model_destroy(r->model);
    strip_destroy(r->strip);
    judge_destroy(r->judge);
}

xd_checkpoint_network role_saved(const role *r, xd_dmd_role which, xd_checkpoint_average *average) {
    static const char *const names[] = { NULL, "fake_score", "discriminator" };
    xd_checkpoint_network network;
    memset(&network, 0, sizeof network);
    average->name = "slow";
    average->ema = r->average;
    network.name = names[which];
    network.parts = r->parts;
    network.part_count = r->count;
    network.optimizer = r->optimizer;
    network.averages = average;
    network.average_count = 1;
    return network;
}
