/* nn_blocks.c - a block is opened where a pass enters it, and closed where the pass leaves. */
#include "nn_blocks.h"

#include "nn_patch_positions.h"

#include <string.h>

/* What a stage has not is NULL. */
static void nn_blocks_show(const nn_cut *cut, const xd_block_view *view, int block, nn_weights *out) {
    int at = 0;
    for (int i = 0; i < (block == NN_ROOT ? (int)NN_ROOT_WEIGHTS : (int)NN_LAYER_WEIGHTS); i++) {
        const bool has = !cut || nn_cut_has(cut, block, i);
        out->value[i] = has ? (const float *)view->values[at] : NULL;
        out->gradient[i] = has ? (float *)view->gradients[at] : NULL;
        at += has;
    }
}

static int nn_blocks_begin(void *user, int block, nn_pass pass, nn_weights *out) {
    static const xd_pass_kind kinds[] = { XD_PASS_FORWARD, XD_PASS_INFERENCE, XD_PASS_BACKWARD };
    const nn_blocks *blocks = (const nn_blocks *)user;
    xd_block_view view;
    xd_pass what;
    memset(&what, 0, sizeof what);
    what.kind = kinds[pass];
    what.micro_batch = pass == NN_BACKWARD ? blocks->micro_batch : 0;
    const xd_result result = xd_block_begin(nn_find_block(blocks->model, block), what, &view);
    if (result != XD_OK) return (int)result;
    nn_blocks_show(blocks->cut, &view, block, out);
    return 0;
}

static int nn_blocks_end(void *user, int block) {
    return (int)xd_block_end(nn_find_block(((const nn_blocks *)user)->model, block));
}

static int nn_blocks_keep(void *user, int block, const float *input, int64_t count) {
    const nn_blocks *blocks = (const nn_blocks *)user;
    return (int)xd_inputs_keep(nn_find_block(blocks->model, block), blocks->micro_batch, input,
                               (size_t)count * sizeof *input);
}

/* A forward of the transformer as the library calls one. */
typedef struct nn_rerun {
    int block;
    nn_again forward;
    void *argument;
} nn_rerun;

static xd_result nn_blocks_rerun(void *user, const xd_block_view *view, const void *input) {
    const nn_rerun *r = (const nn_rerun *)user;
    nn_weights weights;
    nn_blocks_show(NULL, view, r->block, &weights); /* a layer is whole */
    return (xd_result)r->forward(r->argument, &weights, (const float *)input);
}

static int nn_blocks_recompute(void *user, int block, nn_again forward, void *argument) {
    const nn_blocks *blocks = (const nn_blocks *)user;
    nn_rerun rerun = { block, forward, argument };
    const xd_forward again = { nn_blocks_rerun, &rerun };
    return (int)xd_recompute(nn_find_block(blocks->model, block), blocks->micro_batch, again);
}

nn_source nn_blocks_source(nn_blocks *blocks) {
    const nn_source source = { blocks, nn_blocks_begin, nn_blocks_end, nn_blocks_keep, nn_blocks_recompute };
    return source;
}

xd_result nn_blocks_check(xd_ctx *ctx, const nn_model *model, const nn_batch *batch) {
    const nn_group *cp = &model->cp;
    int all = 0;
    if (nn_batch_fits(model, batch)) return XD_OK;
    for (int r = 0; r < cp->size && cp->size > 1; r++) all += batch->cp_count[r];
    const nn_positions at = nn_positions_share(cp->size, 0, all);
    for (int r = 0; r < cp->size && cp->size > 1; r++) {
        const xd_interval tokens = nn_positions_tokens(&at, r);
        XD_REQUIRE(ctx, batch->cp_count[r] == tokens.end - tokens.begin, XD_ERROR_UNSUPPORTED,
                   "rank %d of %d has %d of %d positions, its blocks have %lld", r, cp->size,
                   batch->cp_count[r], all, (long long)(tokens.end - tokens.begin));
    }
    return XD_FAIL(ctx, XD_ERROR_UNSUPPORTED, "positions of %d ranks are not runs of blocks, in their order",
                   cp->size);
}

int nn_blocks_sum_pieces(void *comm, const float *forest, nn_pieces pieces, int64_t count, float *x) {
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = forest;
    c.recv = x;
    c.count = count;
    c.dtype = XD_DTYPE_F32;
    c.leaves.first = pieces.first;
    c.leaves.count = pieces.count;
    c.leaves.total = pieces.total;
    return (int)xd_collective_run((xd_comm *)comm, &c);
}
