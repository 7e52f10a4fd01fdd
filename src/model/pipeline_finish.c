/* The end of a pipeline's step: what sums of single stages leave out. */

#include "comm/internal.h"
#include "model/finish_internal.h"
#include "model/parallel_internal.h"
#include "model/pipeline_internal.h"

#include <inttypes.h>
#include <string.h>

/* ---- what must fit ---- */

static xd_result xdi_finish_check(xd_ctx *ctx, const xd_pipeline_finish_desc *d) {
    XD_REQUIRE(ctx, d->groups && d->built, XD_ERROR_ARGUMENT,
               "the end of a step without %s: 1 of 2 is required as well", d->groups ? "built" : "groups");
    XD_REQUIRE(ctx, !d->per_token || d->tokens >= 0, XD_ERROR_ARGUMENT, "%" PRId64 " tokens", d->tokens);
    for (int i = 0; i < xd_built_stage_count(d->built); i++) {
        const xd_parallel *parallel = xd_built_stage(d->built, i).parallel;
        XD_REQUIRE(ctx, parallel, XD_ERROR_STATE, "stage %d of %d has no wrapper", i,
                   xd_built_stage_count(d->built));
        XD_REQUIRE(ctx, !parallel->step.finished, XD_ERROR_STATE,
                   "the step of stage %d of %d was finished already: xd_parallel_publish ends it", i,
                   xd_built_stage_count(d->built));
        XD_REQUIRE(ctx, parallel->place.on_host == xd_built_stage(d->built, 0).parallel->place.on_host,
                   XD_ERROR_UNSUPPORTED,
                   "the gradients of %s of stages 0 and %d are on the host: all or none",
                   parallel->place.on_host ? "the second" : "the first", i);
    }
    return XD_OK;
}

/* The same weights in every stage of this rank. */
static xd_result xdi_finish_check_stages(xd_ctx *ctx, const xdi_finish *f) {
    int64_t count, elements, first_count, first_elements;
    const xd_stage first = xdi_finish_stage(f, 0);
    (void)xdi_finish_find(&first, XDI_FINISH_OVER_STAGES, -1, &first_count, &first_elements);
    for (int i = 1; i < xdi_finish_stage_count(f); i++) {
        const xd_stage stage = xdi_finish_stage(f, i);
        (void)xdi_finish_find(&stage, XDI_FINISH_OVER_STAGES, -1, &count, &elements);
        XD_REQUIRE(ctx, count == first_count && elements == first_elements, XD_ERROR_MISMATCH,
                   "stage %d has %" PRId64 " weights of all stages with %" PRId64
                   " elements, stage 0 has %" PRId64 " with %" PRId64,
                   i, count, elements, first_count, first_elements);
    }
    return XD_OK;
}

static xd_result xdi_finish_compare_all(xd_comm *world, const xdi_finish *f) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_result mine = xdi_finish_check_stages(ctx, f);
    XD_TRY(xd_agree(world, xdi_finish_compare(f->groups.pp, f, XDI_FINISH_OVER_STAGES, mine)));
    XD_TRY(xd_agree(world, xdi_finish_compare(f->groups.tp, f, XDI_FINISH_OVER_TENSORS, XD_OK)));
    return xd_agree(world, xdi_finish_compare_copies(ctx, f, XD_OK));
}

/* ---- sums ---- */

/* The tokens of all last stages. */
static xd_result xdi_finish_tokens(const xd_pipeline_finish_desc *d, int64_t *tokens) {
    const xd_groups *g = d->groups;
    xd_comm *data = g->dp_cp ? g->dp_cp : g->dp;
    *tokens = d->tokens;
    if (g->pp) XD_TRY(xd_broadcast(g->pp, tokens, 1, XD_DTYPE_I64, xd_comm_size(g->pp) - 1));
    if (data) XD_TRY(xd_all_reduce(data, tokens, tokens, 1, XD_DTYPE_I64, XD_SUM));
    return XD_OK;
}

static xd_result xdi_finish_gradients(const xdi_finish *f, const xd_pipeline_finish_desc *d) {
    int64_t tokens = 0;
    XD_TRY(xdi_finish_traits(f));
    if (!d->per_token) return XD_OK;
    XD_TRY(xdi_finish_tokens(d, &tokens));
    return xdi_finish_each(NULL, f, XDI_FINISH_ALL, (float)(1.0 / (double)(tokens > 1 ? tokens : 1)));
}

/* Over the data ranks, of each stage once. */
static xd_result xdi_finish_data(const xd_built *built) {
    for (int i = 0; i < xd_built_stage_count(built); i++) {
        xd_parallel *parallel = xd_built_stage(built, i).parallel;
        if (parallel->step.reduced) continue;
        XD_TRY(xdi_parallel_end_reduce(parallel,
                                       xdi_parallel_reduce_data(parallel))); /* alike on all data ranks */
    }
    return XD_OK;
}

XD_API xd_result xd_pipeline_finish(xd_comm *world, const xd_pipeline_finish_desc *desc) {
    XDI_GIVEN_COMM(world, desc);
    xdi_finish f;
    XD_TRY(xd_agree(world, xdi_finish_check(xd_comm_ctx(world), desc)));
    memset(&f, 0, sizeof f);
    f.call = "xd_pipeline_finish";
    f.groups = *desc->groups;
    f.built = desc->built;
    xd_result result = xd_agree(world, xdi_finish_data(desc->built));
    if (result == XD_OK) result = xdi_finish_compare_all(world, &f);
    if (result == XD_OK) result = xd_agree(world, xdi_finish_gradients(&f, desc));
    if (result != XD_OK) xdi_pipeline_drop(desc->built);
    for (int i = 0; i < xd_built_stage_count(desc->built) && result == XD_OK; i++) {
        xd_parallel *parallel = xd_built_stage(desc->built, i).parallel;
        parallel->step.summed = parallel->step.finished = true;
    }
    return result;
}
