/* The sums of gradients that traits of weights ask for, beside those over data ranks. */

#include "base/internal.h"
#include "comm/internal.h"
#include "kernel/kernels.h"
#include "model/build_internal.h"
#include "model/finish_internal.h"
#include "model/parallel_internal.h"

#include <inttypes.h>
#include <string.h>

XD_PRIVATE int xdi_finish_stage_count(const xdi_finish *f) {
    return f->built ? xd_built_stage_count(f->built) : 1;
}

XD_PRIVATE xd_stage xdi_finish_stage(const xdi_finish *f, int index) {
    return f->built ? xd_built_stage(f->built, index) : f->one;
}

/* Whether a trait asks for such a sum, and xd_parallel_reduce has not made it. */
static bool xdi_finish_has(const xd_weight *w, xdi_finish_kind kind) {
    const xd_weight_traits *t = &w->desc.traits;
    if (w->owner != w || !xdi_weight_is_trained(w)) return false;
    if (kind != XDI_FINISH_ALL && w->model->parallel->step.summed) return false;
    switch (kind) {
    case XDI_FINISH_OVER_STAGES: return t->pipeline_parallel;
    case XDI_FINISH_OVER_TENSORS: return t->sequence_parallel || t->averaged_over_tensor_parallel;
    case XDI_FINISH_EMBEDDING: return t->shared_embedding;
    default: return true;
    }
}

XD_PRIVATE const xd_weight *xdi_finish_find(const xd_stage *stage, xdi_finish_kind kind, int64_t number,
                                            int64_t *count, int64_t *elements) {
    const xd_weight *found = NULL;
    *count = *elements = 0;
    for (int64_t i = 0; i < stage->model->weight_count; i++) {
        const xd_weight *w = stage->model->weights[i];
        if (!xdi_finish_has(w, kind)) continue;
        if ((*count)++ == number) found = w;
        *elements += xdi_weight_kept_param(w).count;
    }
    return found;
}

/* This rank's part of a gradient; all zero for none. */
typedef struct xdi_finish_part {
    const xdi_place *place;
    float *gradient; /* [count] where the wrapper keeps it */
    float *passage; /* [count] in memory of the device, where it passes to other ranks; NULL -> it is there */
    int64_t count, first;
} xdi_finish_part;

static xdi_finish_part xdi_finish_part_of(const xd_weight *w) {
    const xd_param param = xdi_weight_kept_param(w);
    const xdi_bucket *b = xdi_flat_bucket(w);
    xdi_finish_part part;
    memset(&part, 0, sizeof part);
    part.place = w->flat->place;
    part.gradient = (float *)param.gradient;
    part.count = param.count;
    part.first = param.first;
    if (part.place->on_host && b && b->landed) part.passage = b->landed + (part.gradient - b->sum);
    return part;
}

static xdi_finish_part xdi_finish_take(const xd_stage *stage, xdi_finish_kind kind, int64_t number) {
    int64_t count, elements;
    xdi_finish_part none;
    const xd_weight *w = xdi_finish_find(stage, kind, number, &count, &elements);
    memset(&none, 0, sizeof none);
    return w ? xdi_finish_part_of(w) : none;
}

/* ---- what must fit ---- */

/* How many weights of a kind all stages of this rank have, and their elements here. */
static int64_t xdi_finish_total(const xdi_finish *f, xdi_finish_kind kind, int64_t *elements) {
    int64_t count = 0;
    *elements = 0;
    for (int i = 0; i < xdi_finish_stage_count(f); i++) {
        const xd_stage stage = xdi_finish_stage(f, i);
        int64_t n, e;
        (void)xdi_finish_find(&stage, kind, -1, &n, &e);
        count += n;
        *elements += e;
    }
    return count;
}

XD_PRIVATE xd_result xdi_finish_compare(xd_comm *comm, const xdi_finish *f, xdi_finish_kind kind,
                                        xd_result mine) {
    int64_t elements = 0;
    const int64_t count = xdi_finish_total(f, kind, &elements);
    if (!comm) return mine;
    XD_TRY(xdi_comm_agree_number(comm, mine, f->call, "weights to sum", count));
    return xdi_comm_agree_number(comm, XD_OK, f->call, "elements to sum", elements);
}

/* The copies that this rank has of the embedding: of the first stage, and of the last. */
typedef struct xdi_finish_copies {
    int64_t count; /* all over the rank's stages */
    xdi_finish_part first, last;
} xdi_finish_copies;

static xdi_finish_copies xdi_finish_find_copies(const xdi_finish *f) {
    xdi_finish_copies c;
    memset(&c, 0, sizeof c);
    for (int i = 0; i < xdi_finish_stage_count(f); i++) {
        const xd_stage stage = xdi_finish_stage(f, i);
        int64_t n, e;
        (void)xdi_finish_find(&stage, XDI_FINISH_EMBEDDING, -1, &n, &e);
        c.count += n;
        if (stage.place.first && n > 0) c.first = xdi_finish_take(&stage, XDI_FINISH_EMBEDDING, 0);
        if (stage.place.last && n > 0) c.last = xdi_finish_take(&stage, XDI_FINISH_EMBEDDING, n - 1);
    }
    return c;
}

/* Two copies on one rank, or one on each of two, with equal parts. */
XD_PRIVATE xd_result xdi_finish_compare_copies(xd_ctx *ctx, const xdi_finish *f, xd_result before) {
    xd_comm *embedding = f->groups.embedding;
    const xdi_finish_copies c = xdi_finish_find_copies(f);
    const bool apart = xdi_group_size(embedding) > 1;
    const xdi_finish_part *mine = c.first.gradient ? &c.first : &c.last;
    const bool alone =
        xdi_group_size(f->groups.pp) == 1 && c.count == 1; /* one copy of one stage: nothing to add */
    xd_result result = before;
    if (result == XD_OK && !alone && c.count > 0 && c.count != (apart ? 1 : 2))
        result =
            XD_FAIL(ctx, XD_ERROR_MISMATCH, "%" PRId64 " weights with shared_embedding on a rank that has %d",
                    c.count, apart ? 1 : 2);
    else if (result == XD_OK && !apart && (c.first.count != c.last.count || c.first.first != c.last.first))
        result = XD_FAIL(ctx, XD_ERROR_UNSUPPORTED,
                         "copies of an embedding in parts of %" PRId64 " elements from %" PRId64
                         " and of %" PRId64 " from %" PRId64 ": each must be a unit of its own",
                         c.first.count, c.first.first, c.last.count, c.last.first);
    if (!apart) return result;
    XD_TRY(xdi_comm_agree_number(embedding, result, f->call, "weights with shared_embedding", c.count));
    const xd_result parts[] = {
        xdi_comm_agree_number(embedding, XD_OK, f->call, "elements of an embedding's part", mine->count),
        xdi_comm_agree_number(embedding, XD_OK, f->call, "first element of it", mine->first)
    };
    XD_REQUIRE(ctx, parts[0] == XD_OK && parts[1] == XD_OK, XD_ERROR_UNSUPPORTED,
               "copies of an embedding in unequal parts, here %" PRId64 " elements from %" PRId64
               ": each must be a unit of its own",
               mine->count, mine->first);
    return XD_OK;
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
    XD_TRY(xdi_parts_read(part->place, part->passage, part->gradient, bytes));
    XD_TRY(xdi_finish_all_reduce(comm, part->passage, part->count));
    return xdi_parts_write(part->place, part->gradient, part->passage, bytes);
}

/* a = a + b, both where the wrappers keep them. */
static xd_result xdi_finish_add(const xdi_finish_part *a, const xdi_finish_part *b) {
    if (a->count == 0) return XD_OK;
    xd_ctx *parts = a->place->parts_ctx;
    const xd_launch launch = xd_ctx_launch(parts);
    const void *pair[2];
    pair[0] = a->gradient;
    pair[1] = b->gradient;
    return xd_ctx_kernels(parts)->reduce.pieces(&launch, a->gradient, pair, 2, a->count, XD_DTYPE_F32,
                                                XD_SUM);
}

static xd_result xdi_finish_copy(const xdi_finish_part *from, const xdi_finish_part *to) {
    if (from->count == 0) return XD_OK;
    xd_ctx *parts = to->place->parts_ctx;
    const xd_launch launch = xd_ctx_launch(parts);
    return xd_ctx_kernels(parts)->memory.copy(&launch, to->gradient, from->gradient,
                                              (size_t)from->count * sizeof(float), XD_COPY_ON_DEVICE);
}

static xd_result xdi_finish_scale(const xdi_finish_part *part, float factor) {
    xd_scale_args args;
    if (part->count == 0 || factor == 1.0f) return XD_OK;
    xd_ctx *parts = part->place->parts_ctx;
    const xd_launch launch = xd_ctx_launch(parts);
    memset(&args, 0, sizeof args);
    args.data = part->gradient;
    args.count = part->count;
    args.dtype = XD_DTYPE_F32;
    args.factor = factor;
    return xd_ctx_kernels(parts)->optimizer.scale(&launch, &args);
}

/* Over this rank's stages, over the ranks, and back. */
static xd_result xdi_finish_over_stages(const xdi_finish *f) {
    const int stages = xdi_finish_stage_count(f);
    const xd_stage first = xdi_finish_stage(f, 0);
    int64_t count, elements;
    (void)xdi_finish_find(&first, XDI_FINISH_OVER_STAGES, -1, &count, &elements);
    for (int64_t k = 0; k < count; k++) {
        const xdi_finish_part sum = xdi_finish_take(&first, XDI_FINISH_OVER_STAGES, k);
        for (int i = 1; i < stages; i++) {
            const xd_stage stage = xdi_finish_stage(f, i);
            const xdi_finish_part part = xdi_finish_take(&stage, XDI_FINISH_OVER_STAGES, k);
            XD_TRY(xdi_finish_add(&sum, &part));
        }
        XD_TRY(xdi_finish_sum(f->groups.pp, &sum));
        for (int i = 1; i < stages; i++) {
            const xd_stage stage = xdi_finish_stage(f, i);
            const xdi_finish_part part = xdi_finish_take(&stage, XDI_FINISH_OVER_STAGES, k);
            XD_TRY(xdi_finish_copy(&sum, &part));
        }
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_finish_each(xd_comm *tp, const xdi_finish *f, xdi_finish_kind kind, float factor) {
    for (int i = 0; i < xdi_finish_stage_count(f); i++) {
        const xd_stage stage = xdi_finish_stage(f, i);
        for (int64_t k = 0; k < stage.model->weight_count; k++) {
            const xd_weight *w = stage.model->weights[k];
            const bool averages =
                kind == XDI_FINISH_OVER_TENSORS && w->desc.traits.averaged_over_tensor_parallel;
            if (!xdi_finish_has(w, kind)) continue;
            const xdi_finish_part part = xdi_finish_part_of(w);
            XD_TRY(xdi_finish_sum(tp, &part));
            XD_TRY(xdi_finish_scale(&part, averages ? 1.0f / (float)xdi_group_size(tp) : factor));
        }
    }
    return XD_OK;
}

static xd_result xdi_finish_embedding(const xdi_finish *f) {
    const xdi_finish_copies c = xdi_finish_find_copies(f);
    if (c.count == 0) return XD_OK;
    if (c.count == 1) return xdi_finish_sum(f->groups.embedding, c.first.gradient ? &c.first : &c.last);
    XD_TRY(xdi_finish_add(&c.first, &c.last));
    return xdi_finish_copy(&c.first, &c.last);
}

/* What traits say, of all kinds. */
XD_PRIVATE xd_result xdi_finish_traits(const xdi_finish *f) {
    XD_TRY(xdi_finish_over_stages(f));
    XD_TRY(xdi_finish_each(f->groups.tp, f, XDI_FINISH_OVER_TENSORS, 1.0f));
    return xdi_finish_embedding(f);
}

/* ---- one stage, reduced by itself ---- */

/* The trait of a weight that asks for a sum of a kind; NULL -> none. */
static const char *xdi_finish_trait(const xd_weight *w, xdi_finish_kind kind) {
    if (!xdi_finish_has(w, kind)) return NULL;
    if (kind == XDI_FINISH_OVER_STAGES) return "pipeline_parallel";
    if (kind == XDI_FINISH_EMBEDDING) return "shared_embedding";
    return w->desc.traits.sequence_parallel ? "sequence_parallel" : "averaged_over_tensor_parallel";
}

static xd_result xdi_finish_check_weight(const xdi_place *place, const xd_weight *w, xdi_finish_kind kind) {
    const char *trait = xdi_finish_trait(w, kind);
    if (!trait) return XD_OK;
    XD_REQUIRE(
        place->ctx, place->settings.has_groups, XD_ERROR_STATE,
        "weight \"%.80s\" of %lld elements has the trait %s, and its wrapper has no groups to sum over: set "
        "groups of xd_ddp_desc or xd_fsdp_desc, or build by xd_build and call xd_pipeline_finish",
        w->name, (long long)w->count, trait);
    XD_REQUIRE(place->ctx, place->settings.stages <= 1 || kind == XDI_FINISH_OVER_TENSORS, XD_ERROR_STATE,
               "weight \"%.80s\" has the trait %s, whose sum is over all %d stages of this rank: call "
               "xd_pipeline_finish instead of xd_parallel_reduce",
               w->name, trait, place->settings.stages);
    return XD_OK;
}

static xd_result xdi_finish_check_reduce(const xdi_place *place) {
    for (int64_t i = 0; i < place->model->weight_count; i++)
        for (int kind = XDI_FINISH_OVER_STAGES; kind < XDI_FINISH_ALL; kind++)
            XD_TRY(xdi_finish_check_weight(place, place->model->weights[i], (xdi_finish_kind)kind));
    return XD_OK;
}

static xdi_finish xdi_finish_of(xd_parallel *p) {
    xdi_finish f;
    memset(&f, 0, sizeof f);
    f.call = "xd_parallel_reduce";
    f.groups = p->place.settings.groups;
    f.one.model = p->place.model;
    f.one.parallel = p;
    f.one.place.first = xdi_group_rank(f.groups.pp) == 0;
    f.one.place.last = xdi_group_rank(f.groups.pp) == xdi_group_size(f.groups.pp) - 1;
    return f;
}

/* Whether the ranks of a group compare: where this rank has something to sum; and once, so that one with nothing is found. */
static bool xdi_finish_meets(const xdi_finish *f, xdi_finish_kind kind, const xd_comm *comm) {
    int64_t elements = 0;
    const xd_parallel *p = f->one.parallel;
    if (kind != XDI_FINISH_OVER_TENSORS && p->place.settings.stages > 1) return false;
    if (xdi_finish_total(f, kind, &elements) > 0) return true;
    return xdi_group_size(comm) > 1 && !p->step.compared[kind];
}

/* The ranks of one group, which all fail where one has failed before. */
static xd_result xdi_finish_meet(const xdi_finish *f, xdi_finish_kind kind, xd_comm *comm, xd_result mine) {
    xd_parallel *p = f->one.parallel;
    if (!xdi_finish_meets(f, kind, comm)) return mine;
    XD_TRY(kind == XDI_FINISH_EMBEDDING ? xdi_finish_compare_copies(p->place.ctx, f, mine)
                                        : xdi_finish_compare(comm, f, kind, mine));
    p->step.compared[kind] = true;
    return XD_OK;
}

/* Stages meet last, so that none waits for one that has failed. */
static xd_result xdi_finish_reduce(xd_parallel *p, xd_result mine) {
    const xdi_finish f = xdi_finish_of(p);
    if (!p->place.settings.has_groups) return mine;
    mine = xdi_finish_meet(&f, XDI_FINISH_OVER_TENSORS, f.groups.tp, mine);
    mine = xdi_finish_meet(&f, XDI_FINISH_EMBEDDING, f.groups.embedding, mine);
    mine = xdi_finish_meet(&f, XDI_FINISH_OVER_STAGES, f.groups.pp, mine);
    XD_TRY(mine);
    XD_TRY(xdi_finish_traits(&f));
    p->step.summed = true;
    return XD_OK;
}

XD_API xd_result xd_parallel_reduce(xd_parallel *p) {
    XDI_LIVE(xd_parallel, p);
    XDI_GIVEN(p ? p->place.ctx : NULL, p);
    XD_TRY(xdi_finish_check_reduce(&p->place));
    return xdi_parallel_end_reduce(p, xdi_finish_reduce(p, xdi_parallel_reduce_data(p)));
}
