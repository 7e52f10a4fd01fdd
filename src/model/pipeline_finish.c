/* The end of a pipeline's step: what sums of single stages leave out. */

#include "base/internal.h"
#include "comm/internal.h"
#include "kernel/kernels.h"
#include "model/internal.h"

#include <inttypes.h>
#include <string.h>

/* What is done with the gradients of some weights. */
typedef enum xdi_finish_kind {
    XDI_FINISH_OVER_STAGES = 0,
    XDI_FINISH_OVER_TENSORS,
    XDI_FINISH_EMBEDDING,
    XDI_FINISH_ALL
} xdi_finish_kind;

static bool xdi_finish_has(const xd_weight *w, xdi_finish_kind kind) {
    const xd_weight_traits *t = &w->desc.traits;
    if (w->owner != w || !xdi_weight_is_trained(w)) return false;
    switch (kind) {
    case XDI_FINISH_OVER_STAGES: return t->pipeline_parallel;
    case XDI_FINISH_OVER_TENSORS: return t->sequence_parallel || t->averaged_over_tensor_parallel;
    case XDI_FINISH_EMBEDDING: return t->shared_embedding;
    default: return true;
    }
}

/* Such weights of one stage: the one with this number, or NULL; `count` receives their number, `elements` those of this
 * rank's parts. */
static const xd_weight *xdi_finish_find(const xd_stage *stage, xdi_finish_kind kind, int64_t number,
                                        int64_t *count, int64_t *elements) {
    const xd_weight *found = NULL;
    *count = *elements = 0;
    for (int64_t i = 0; i < stage->model->weight_count; i++) {
        const xd_weight *w = stage->model->weights[i];
        if (!xdi_finish_has(w, kind)) continue;
        if ((*count)++ == number) found = w;
        *elements += xdi_parallel_param(stage->parallel, w).count;
    }
    return found;
}

/* This rank's part of a gradient; all zero for none. */
typedef struct xdi_finish_part {
    const xd_parallel *parallel;
    float *gradient; /* [count] where the wrapper keeps it */
    float *passage; /* [count] in memory of the device, where it passes to other ranks; NULL -> it is there */
    int64_t count, first;
} xdi_finish_part;

static xdi_finish_part xdi_finish_part_of(const xd_parallel *parallel, const xd_weight *w) {
    const xd_param param = xdi_parallel_param(parallel, w);
    const xdi_bucket *b = xdi_flat_bucket(w);
    xdi_finish_part part;
    memset(&part, 0, sizeof part);
    part.parallel = parallel;
    part.gradient = (float *)param.gradient;
    part.count = param.count;
    part.first = param.first;
    if (parallel->offloaded && b && b->landed) part.passage = b->landed + (part.gradient - b->sum);
    return part;
}

static xdi_finish_part xdi_finish_take(const xd_stage *stage, xdi_finish_kind kind, int64_t number) {
    int64_t count, elements;
    xdi_finish_part none;
    const xd_weight *w = xdi_finish_find(stage, kind, number, &count, &elements);
    memset(&none, 0, sizeof none);
    return w ? xdi_finish_part_of(stage->parallel, w) : none;
}

/* ---- what must fit ---- */

static xd_result xdi_finish_check(xd_ctx *ctx, const xd_pipeline_finish_desc *d) {
    XD_REQUIRE(ctx, d->groups && d->built, XD_ERROR_ARGUMENT,
               "the end of a step without %s: 1 of 2 is required as well", d->groups ? "built" : "groups");
    XD_REQUIRE(ctx, !d->per_token || d->tokens >= 0, XD_ERROR_ARGUMENT, "%" PRId64 " tokens", d->tokens);
    for (int i = 0; i < xd_built_stage_count(d->built); i++) {
        const xd_parallel *parallel = xd_built_stage(d->built, i).parallel;
        XD_REQUIRE(ctx, parallel, XD_ERROR_STATE, "stage %d of %d has no wrapper", i,
                   xd_built_stage_count(d->built));
        XD_REQUIRE(ctx, parallel->offloaded == xd_built_stage(d->built, 0).parallel->offloaded,
                   XD_ERROR_UNSUPPORTED,
                   "the gradients of %s of stages 0 and %d are on the host: all or none",
                   parallel->offloaded ? "the second" : "the first", i);
    }
    return XD_OK;
}

/* The same weights in every stage of this rank. */
static xd_result xdi_finish_check_stages(xd_ctx *ctx, const xd_built *built) {
    int64_t count, elements, first_count, first_elements;
    const xd_stage first = xd_built_stage(built, 0);
    (void)xdi_finish_find(&first, XDI_FINISH_OVER_STAGES, -1, &first_count, &first_elements);
    for (int i = 1; i < xd_built_stage_count(built); i++) {
        const xd_stage stage = xd_built_stage(built, i);
        (void)xdi_finish_find(&stage, XDI_FINISH_OVER_STAGES, -1, &count, &elements);
        XD_REQUIRE(ctx, count == first_count && elements == first_elements, XD_ERROR_MISMATCH,
                   "stage %d has %" PRId64 " weights of all stages with %" PRId64
                   " elements, stage 0 has %" PRId64 " with %" PRId64,
                   i, count, elements, first_count, first_elements);
    }
    return XD_OK;
}

static xd_result xdi_finish_compare(xd_comm *comm, const xd_built *built, xdi_finish_kind kind,
                                    xd_result mine) {
    int64_t count = 0, elements = 0;
    for (int i = 0; i < xd_built_stage_count(built) && mine == XD_OK; i++) {
        const xd_stage stage = xd_built_stage(built, i);
        int64_t n, e;
        (void)xdi_finish_find(&stage, kind, -1, &n, &e);
        count += n;
        elements += e;
    }
    if (!comm) return mine;
    XD_TRY(xdi_comm_agree_number(comm, mine, "xd_pipeline_finish", "weights to sum", count));
    return xdi_comm_agree_number(comm, XD_OK, "xd_pipeline_finish", "elements to sum", elements);
}

/* The copies that this rank has of the embedding: of the first stage, and of the last. */
typedef struct xdi_finish_copies {
    int64_t count; /* all over the rank's stages */
    xdi_finish_part first, last;
} xdi_finish_copies;

static xdi_finish_copies xdi_finish_find_copies(const xd_built *built) {
    xdi_finish_copies c;
    memset(&c, 0, sizeof c);
    for (int i = 0; i < xd_built_stage_count(built); i++) {
        const xd_stage stage = xd_built_stage(built, i);
        int64_t n, e;
        (void)xdi_finish_find(&stage, XDI_FINISH_EMBEDDING, -1, &n, &e);
        c.count += n;
        if (stage.place.first && n > 0) c.first = xdi_finish_take(&stage, XDI_FINISH_EMBEDDING, 0);
        if (stage.place.last && n > 0) c.last = xdi_finish_take(&stage, XDI_FINISH_EMBEDDING, n - 1);
    }
    return c;
}

/* Two copies on one rank, or one on each of two, with equal parts. */
static xd_result xdi_finish_compare_copies(xd_ctx *ctx, xd_comm *embedding, const xd_built *built) {
    const xdi_finish_copies c = xdi_finish_find_copies(built);
    const bool apart = embedding && xd_comm_size(embedding) > 1;
    const xdi_finish_part *mine = c.first.gradient ? &c.first : &c.last;
    xd_result result = XD_OK;
    if (c.count > 0 && c.count != (apart ? 1 : 2))
        result =
            XD_FAIL(ctx, XD_ERROR_MISMATCH, "%" PRId64 " weights with shared_embedding on a rank that has %d",
                    c.count, apart ? 1 : 2);
    else if (!apart && (c.first.count != c.last.count || c.first.first != c.last.first))
        result = XD_FAIL(ctx, XD_ERROR_UNSUPPORTED,
                         "copies of an embedding in parts of %" PRId64 " elements from %" PRId64
                         " and of %" PRId64 " from %" PRId64 ": each must be a unit of its own",
                         c.first.count, c.first.first, c.last.count, c.last.first);
    if (!apart) return result;
    XD_TRY(xdi_comm_agree_number(embedding, result, "xd_pipeline_finish", "weights with shared_embedding",
                                 c.count));
    const xd_result parts[] = { xdi_comm_agree_number(embedding, XD_OK, "xd_pipeline_finish",
                                                      "elements of an embedding's part", mine->count),
                                xdi_comm_agree_number(embedding, XD_OK, "xd_pipeline_finish",
                                                      "first element of it", mine->first) };
    XD_REQUIRE(ctx, parts[0] == XD_OK && parts[1] == XD_OK, XD_ERROR_UNSUPPORTED,
               "copies of an embedding in unequal parts, here %" PRId64 " elements from %" PRId64
               ": each must be a unit of its own",
               mine->count, mine->first);
    return XD_OK;
}

static xd_result xdi_finish_compare_all(xd_comm *world, const xd_pipeline_finish_desc *d) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_result mine = xdi_finish_check_stages(ctx, d->built);
    XD_TRY(xd_agree(world, xdi_finish_compare(d->groups->pp, d->built, XDI_FINISH_OVER_STAGES, mine)));
    XD_TRY(xd_agree(world, xdi_finish_compare(d->groups->tp, d->built, XDI_FINISH_OVER_TENSORS, XD_OK)));
    return xd_agree(world, xdi_finish_compare_copies(ctx, d->groups->embedding, d->built));
}

/* ---- sums ---- */

/* data = the sum over the ranks, in their order, in every mode. */
static xd_result xdi_finish_all_reduce(xd_comm *comm, float *data, int64_t count) {
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = c.recv = data;
    c.count = count;
    c.dtype = XD_DTYPE_F32;
    c.known_leaves = xdi_comm_one_each(comm);
    c.leaves = c.known_leaves[xd_comm_rank(comm)];
    return xd_collective_run(comm, &c);
}

static xd_result xdi_finish_sum(xd_comm *comm, const xdi_finish_part *part) {
    const size_t bytes = (size_t)part->count * sizeof(float);
    if (!comm || xd_comm_size(comm) == 1 || part->count == 0) return XD_OK;
    if (!part->passage) return xdi_finish_all_reduce(comm, part->gradient, part->count);
    XD_TRY(xdi_parallel_take_out(part->parallel, part->passage, part->gradient, bytes));
    XD_TRY(xdi_finish_all_reduce(comm, part->passage, part->count));
    return xdi_parallel_bring_home(part->parallel, part->gradient, part->passage, bytes);
}

/* a = a + b, both where the wrappers keep them. */
static xd_result xdi_finish_add(const xdi_finish_part *a, const xdi_finish_part *b) {
    if (a->count == 0) return XD_OK;
    xd_ctx *home = a->parallel->home;
    const xd_launch launch = xd_ctx_launch(home);
    const void *pair[2];
    pair[0] = a->gradient;
    pair[1] = b->gradient;
    return xd_ctx_kernels(home)->reduce.pieces(&launch, a->gradient, pair, 2, a->count, XD_DTYPE_F32, XD_SUM);
}

static xd_result xdi_finish_copy(const xdi_finish_part *from, const xdi_finish_part *to) {
    if (from->count == 0) return XD_OK;
    xd_ctx *home = to->parallel->home;
    const xd_launch launch = xd_ctx_launch(home);
    return xd_ctx_kernels(home)->memory.copy(&launch, to->gradient, from->gradient,
                                             (size_t)from->count * sizeof(float), XD_COPY_ON_DEVICE);
}

static xd_result xdi_finish_scale(const xdi_finish_part *part, float factor) {
    xd_scale_args args;
    if (part->count == 0 || factor == 1.0f) return XD_OK;
    xd_ctx *home = part->parallel->home;
    const xd_launch launch = xd_ctx_launch(home);
    memset(&args, 0, sizeof args);
    args.data = part->gradient;
    args.count = part->count;
    args.dtype = XD_DTYPE_F32;
    args.factor = factor;
    return xd_ctx_kernels(home)->optimizer.scale(&launch, &args);
}

/* Over this rank's stages, over the ranks, and back. */
static xd_result xdi_finish_over_stages(xd_comm *pp, const xd_built *built) {
    const int stages = xd_built_stage_count(built);
    const xd_stage first = xd_built_stage(built, 0);
    int64_t count, elements;
    (void)xdi_finish_find(&first, XDI_FINISH_OVER_STAGES, -1, &count, &elements);
    for (int64_t k = 0; k < count; k++) {
        const xdi_finish_part sum = xdi_finish_take(&first, XDI_FINISH_OVER_STAGES, k);
        for (int i = 1; i < stages; i++) {
            const xd_stage stage = xd_built_stage(built, i);
            const xdi_finish_part part = xdi_finish_take(&stage, XDI_FINISH_OVER_STAGES, k);
            XD_TRY(xdi_finish_add(&sum, &part));
        }
        XD_TRY(xdi_finish_sum(pp, &sum));
        for (int i = 1; i < stages; i++) {
            const xd_stage stage = xd_built_stage(built, i);
            const xdi_finish_part part = xdi_finish_take(&stage, XDI_FINISH_OVER_STAGES, k);
            XD_TRY(xdi_finish_copy(&sum, &part));
        }
    }
    return XD_OK;
}

/* Every weight of a kind, in all stages. */
static xd_result xdi_finish_each(xd_comm *tp, const xd_built *built, xdi_finish_kind kind, float factor) {
    for (int i = 0; i < xd_built_stage_count(built); i++) {
        const xd_stage stage = xd_built_stage(built, i);
        for (int64_t k = 0; k < stage.model->weight_count; k++) {
            const xd_weight *w = stage.model->weights[k];
            const bool averages =
                kind == XDI_FINISH_OVER_TENSORS && w->desc.traits.averaged_over_tensor_parallel;
            if (!xdi_finish_has(w, kind)) continue;
            const xdi_finish_part part = xdi_finish_part_of(stage.parallel, w);
            XD_TRY(xdi_finish_sum(tp, &part));
            XD_TRY(xdi_finish_scale(&part, averages ? 1.0f / (float)xdi_group_size(tp) : factor));
        }
    }
    return XD_OK;
}

static xd_result xdi_finish_embedding(xd_comm *embedding, const xd_built *built) {
    const xdi_finish_copies c = xdi_finish_find_copies(built);
    if (c.count == 0) return XD_OK;
    if (c.count == 1) return xdi_finish_sum(embedding, c.first.gradient ? &c.first : &c.last);
    XD_TRY(xdi_finish_add(&c.first, &c.last));
    return xdi_finish_copy(&c.first, &c.last);
}

/* The tokens of all last stages. */
static xd_result xdi_finish_tokens(const xd_pipeline_finish_desc *d, int64_t *tokens) {
    const xd_groups *g = d->groups;
    xd_comm *data = g->dp_cp ? g->dp_cp : g->dp;
    *tokens = d->tokens;
    if (g->pp) XD_TRY(xd_broadcast(g->pp, tokens, 1, XD_DTYPE_I64, xd_comm_size(g->pp) - 1));
    if (data) XD_TRY(xd_all_reduce(data, tokens, tokens, 1, XD_DTYPE_I64, XD_SUM));
    return XD_OK;
}

static xd_result xdi_finish_gradients(const xd_pipeline_finish_desc *d) {
    int64_t tokens = 0;
    XD_TRY(xdi_finish_over_stages(d->groups->pp, d->built));
    XD_TRY(xdi_finish_each(d->groups->tp, d->built, XDI_FINISH_OVER_TENSORS, 1.0f));
    XD_TRY(xdi_finish_embedding(d->groups->embedding, d->built));
    if (!d->per_token) return XD_OK;
    XD_TRY(xdi_finish_tokens(d, &tokens));
    return xdi_finish_each(NULL, d->built, XDI_FINISH_ALL, (float)(1.0 / (double)(tokens > 1 ? tokens : 1)));
}

XD_API xd_result xd_pipeline_finish(xd_comm *world, const xd_pipeline_finish_desc *desc) {
    XDI_GIVEN_COMM(world, desc);
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_result result = XD_OK;
    XD_TRY(xd_agree(world, xdi_finish_check(ctx, desc)));
    for (int i = 0; i < xd_built_stage_count(desc->built) && result == XD_OK; i++)
        result = xd_parallel_reduce(xd_built_stage(desc->built, i).parallel); /* alike on all data ranks */
    result = xd_agree(world, result);
    if (result == XD_OK) result = xdi_finish_compare_all(world, desc);
    if (result == XD_OK) result = xd_agree(world, xdi_finish_gradients(desc));
    if (result != XD_OK) xdi_pipeline_drop(desc->built);
    return result;
}
