/* nn_describe.c - blocks and weights of the small transformer. */
#include "nn_describe.h"

#include <stdio.h>
#include <string.h>

static void nn_layer_name(int layer, char name[32]) {
    snprintf(name, 32, "model.layers.%d", layer);
}

/* ---- shares ---- */

/* What every rank of the group holds; the first `made` are to be freed. */
typedef struct nn_ranks {
    nn_model part[NN_MOST_RANKS];
    int made;
} nn_ranks;

static const char *nn_make_ranks(const nn_model *model, nn_ranks *ranks) {
    const char *problem = NULL;
    ranks->made = 0;
    while (ranks->made < model->tp.size && !problem) {
        nn_group tp;
        memset(&tp, 0, sizeof tp);
        tp.size = model->tp.size;
        tp.rank = ranks->made;
        tp.invariant = model->tp.invariant;
        problem = nn_model_init(&model->config, &tp, NULL, &ranks->part[ranks->made]);
        ranks->made += !problem;
    }
    return problem;
}

/* Rows or columns of a weight are split; both are whole on every rank where none is. */
static xd_placement nn_placement_of(const nn_ranks *ranks, int64_t param,
                                    int64_t offsets[NN_MOST_RANKS + 1]) {
    xd_placement placement;
    memset(&placement, 0, sizeof placement);
    for (int r = 0; r < ranks->made; r++) {
        const nn_param *p = &ranks->part[r].params[param];
        if (p->rows != p->full_rows) placement.kind = XD_SHARD;
        if (p->cols != p->full_cols) placement.kind = XD_SHARD, placement.dim = 1;
    }
    for (int r = 0; r < ranks->made; r++) {
        const nn_param *p = &ranks->part[r].params[param];
        offsets[r] = placement.dim == 1 ? p->col_begin : p->row_begin;
        offsets[r + 1] = placement.dim == 1 ? p->full_cols : p->full_rows;
    }
    if (placement.kind == XD_SHARD) placement.offsets = offsets;
    return placement;
}

static xd_result nn_make_layout(nn_description *d, const nn_model *model, const nn_ranks *ranks,
                                int64_t param) {
    const nn_param *p = &model->params[param];
    int64_t offsets[NN_MOST_RANKS + 1];
    xd_layout_desc desc;
    xd_topology topology;
    memset(&desc, 0, sizeof desc);
    memset(&topology, 0, sizeof topology);
    topology.axis_count = 1;
    topology.size[0] = topology.rank_count = ranks->made;
    desc.ndim = p->dims;
    desc.shape[0] = p->full_rows;
    desc.shape[1] = p->dims == 2 ? p->full_cols : 0;
    desc.topology = &topology;
    desc.placement[0] = nn_placement_of(ranks, param, offsets);
    XD_TRY(xd_layout_create(d->ctx, &desc, &d->layouts[d->layout_count]));
    d->layout_count++;
    return XD_OK;
}

/* A layout for each weight of the table; none where one rank has all. */
static xd_result nn_make_layouts(nn_description *d, const nn_model *model) {
    if (model->tp.size == 1) return XD_OK;
    nn_ranks *ranks = (nn_ranks *)xd_allocate(d->ctx, sizeof *ranks);
    d->layouts = (xd_layout **)xd_allocate(d->ctx, (size_t)model->param_count * sizeof *d->layouts);
    const char *problem = ranks && d->layouts ? nn_make_ranks(model, ranks) : "out of memory";
    xd_result result = problem ? XD_FAIL(d->ctx, XD_ERROR_MEMORY, "shares of %d tensor-parallel ranks: %s",
                                         model->tp.size, problem)
                               : XD_OK;
    for (int i = 0; i < model->param_count && result == XD_OK; i++)
        result = nn_make_layout(d, model, ranks, i);
    for (int r = 0; ranks && r < ranks->made; r++) nn_model_free(&ranks->part[r]);
    xd_release(d->ctx, ranks);
    return result;
}

/* ---- weights and blocks ---- */

static xd_weight_desc nn_weight_of(const nn_model *model, const nn_param *p, const char *name,
                                   xd_dtype dtype) {
    xd_weight_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.name = name;
    desc.dtype = dtype;
    desc.ndim = p->dims;
    desc.shape[0] = p->full_rows;
    desc.shape[1] = p->dims == 2 ? p->full_cols : 0;
    desc.init.kind = p->dims == 2 ? XD_INIT_NORMAL : XD_INIT_CONSTANT;
    desc.init.center = p->dims == 2 ? 0.0f : 1.0f;
    desc.init.scale = nn_param_deviation(model, p);
    desc.traits.decay = nn_param_decays(p) ? XD_DECAY_ALWAYS : XD_DECAY_NEVER;
    return desc;
}

/* The head that is the embedding: another name of it, without settings of its own. */
static xd_weight_desc nn_tied_head(const nn_param *embed, xd_dtype dtype) {
    xd_weight_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.name = "lm_head.weight";
    desc.dtype = dtype;
    desc.ndim = 2;
    desc.shape[0] = embed->full_rows;
    desc.shape[1] = embed->full_cols;
    desc.tied_to = embed->name;
    return desc;
}

/* Weights are added by their numbers, so that those are their places in an xd_block_view. */
static xd_result nn_describe_block(const nn_description *d, const nn_model *model, int number,
                                   xd_block *block) {
    const char *name = xd_block_describe(block).name;
    const size_t inside = name[0] ? strlen(name) + 1 : 0;
    for (int i = 0; i < nn_block_weights(model, number); i++) {
        const nn_param *p = nn_block_param(model, number, i);
        if (!nn_cut_has(&model->cut, number, i)) continue;
        const bool tied = number == NN_ROOT && i == NN_HEAD && model->config.tied;
        xd_weight_desc desc =
            tied ? nn_tied_head(p, d->dtype) : nn_weight_of(model, p, p->name + inside, d->dtype);
        if (d->layouts && !tied) desc.layout = d->layouts[p - model->params];
        if (number == NN_ROOT && i != NN_NORM && model->cut.copies) desc.traits.shared_embedding = true;
        if (number == NN_ROOT && i == NN_HEAD && model->cut.copies) desc.traits.shared = true;
        XD_TRY(xd_weight_add(block, &desc, NULL));
    }
    return XD_OK;
}

static xd_result nn_describe_all(const nn_description *d, const nn_model *model) {
    xd_block *root = xd_model_root(d->model);
    XD_TRY(nn_describe_block(d, model, NN_ROOT, root));
    for (int i = nn_layers_begin(model); i < nn_layers_end(model); i++) {
        char name[32];
        xd_block_desc desc;
        xd_block *block = NULL;
        memset(&desc, 0, sizeof desc);
        nn_layer_name(i, name);
        desc.name = name;
        desc.type = NN_LAYER_TYPE;
        desc.recompute = model->recompute;
        XD_TRY(xd_block_add(root, &desc, &block));
        XD_TRY(nn_describe_block(d, model, i, block));
    }
    return xd_model_seal(d->model);
}

xd_result nn_describe(xd_ctx *ctx, const nn_model *model, uint64_t seed, xd_dtype dtype,
                      nn_description *out) {
    xd_model_desc desc;
    memset(&desc, 0, sizeof desc);
    memset(out, 0, sizeof *out);
    desc.seed = seed;
    XD_REQUIRE(ctx, model->config.extra == NN_NO_EXTRA, XD_ERROR_UNSUPPORTED,
               "biases and norms of queries are not described: nn_blocks.h shows %d weights a layer",
               (int)NN_LAYER_WEIGHTS);
    desc.rank = model->tp.rank;
    out->ctx = ctx;
    out->dtype = dtype;
    XD_TRY(nn_make_layouts(out, model));
    XD_TRY(xd_model_create(ctx, &desc, &out->model));
    return nn_describe_all(out, model);
}

void nn_description_free(nn_description *d) {
    xd_model_destroy(d->model);
    for (int i = 0; i < d->layout_count; i++) xd_layout_destroy(d->layouts[i]);
    if (d->layouts) xd_release(d->ctx, (void *)d->layouts);
    memset(d, 0, sizeof *d);
}

xd_block *nn_find_block(const xd_model *model, int block) {
    char name[32];
    if (block == NN_ROOT) return xd_model_root(model);
    nn_layer_name(block, name);
    return xd_model_find_block(model, name);
}
