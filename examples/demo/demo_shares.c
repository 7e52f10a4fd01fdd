/* demo_shares.c - the way between whole weights and what tensor-parallel ranks hold. */
#include "demo.h"

#include <string.h>

/* Copies a weight's part out of the whole (or back, when `back`). */
static void demo_copy_part(float *whole, const nn_param *full, float *part, const nn_param *p, bool back) {
    for (int r = 0; r < p->rows; r++) {
        float *inside = whole + full->offset + (int64_t)(p->row_begin + r) * full->cols + p->col_begin;
        float *own = part + (int64_t)r * p->cols;
        memcpy(back ? inside : own, back ? own : inside, (size_t)p->cols * sizeof *own);
    }
}

void demo_take_share(const nn_model *whole, const float *whole_weights, const nn_model *part,
                     float *weights) {
    for (int i = 0; i < part->param_count; i++)
        demo_copy_part((float *)whole_weights, &whole->params[i], weights + part->params[i].offset,
                       &part->params[i], false);
}

/* All ranks' buffers one after the other; where each rank's begins follows from the model's shape alone. */
static xd_result demo_place_shares(xd_ctx *ctx, const nn_model *whole, int ranks, float *gathered,
                                   float *whole_weights) {
    for (int r = 0; r < ranks; r++) {
        nn_group group;
        nn_model part;
        memset(&group, 0, sizeof group);
        group.size = ranks;
        group.rank = r;
        const char *problem = nn_model_init(&whole->config, &group, NULL, &part);
        if (problem) return XD_FAIL(ctx, XD_ERROR_MEMORY, "rank %d's share: %s", r, problem);
        for (int i = 0; i < part.param_count; i++)
            demo_copy_part(whole_weights, &whole->params[i], gathered + part.params[i].offset,
                           &part.params[i], true);
        gathered += part.float_count;
        nn_model_free(&part);
    }
    return XD_OK;
}

xd_result demo_gather_shares(xd_ctx *ctx, xd_comm *tp, const nn_model *part, const float *weights,
                             const nn_model *whole, float *whole_weights) {
    const int ranks = tp ? xd_comm_size(tp) : 1, rank = tp ? xd_comm_rank(tp) : 0;
    int64_t counts[NN_MOST_RANKS], total = 0;
    if (ranks == 1) {
        memcpy(whole_weights, weights, (size_t)part->float_count * sizeof *weights);
        return XD_OK;
    }
    for (int r = 0; r < ranks; r++) counts[r] = 0;
    counts[rank] = part->float_count;
    XD_TRY(xd_all_reduce(tp, counts, counts, ranks, XD_DTYPE_I64, XD_SUM));
    for (int r = 0; r < ranks; r++) total += counts[r];
    float *gathered = (float *)xd_allocate(ctx, (size_t)total * sizeof *gathered);
    xd_result result =
        gathered ? XD_OK : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld weights", (long long)total);
    result = xd_agree(tp, result);
    if (result == XD_OK) result = xd_gather(tp, weights, gathered, counts, XD_DTYPE_F32, 0);
    if (result == XD_OK && rank == 0) result = demo_place_shares(ctx, whole, ranks, gathered, whole_weights);
    xd_release(ctx, gathered);
    return xd_agree(tp, result);
}
