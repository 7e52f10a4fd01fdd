/* share.c - see share.h. */
#include "share.h"

#include <stdlib.h>
#include <string.h>

/* ---- layouts ---- */

/* Shape of what is stored, and the dimension that is cut, -1 none. */
static int cut_of(const share_sizes *z, share_cut cut, xd_layout_desc *d) {
    static const int dims[SHARE_CUTS] = { -1, 0, 0, 0, -1, 1, 0 };
    const int64_t shapes[SHARE_CUTS][2] = { { 0, 0 },       { z->stored, z->hidden }, { z->inner, z->hidden },
                                            { z->inner, 0 }, { z->hidden, 0 },         { z->hidden, z->inner },
                                            { 0, z->hidden } };
    static const int ndims[SHARE_CUTS] = { 0, 2, 2, 1, 1, 2, 2 };
    d->ndim = ndims[cut];
    memcpy(d->shape, shapes[cut], sizeof shapes[cut]);
    return dims[cut];
}

static xd_result make_layouts(sharing *s) {
    const xd_axis axes[2] = { { "cp", xd_comm_size(s->cp) }, { "tp", xd_comm_size(s->tp) } };
    const xd_topology_desc ranks = { .axes = axes, .axis_count = 2, .world_size = axes[0].size * axes[1].size };
    xd_topology topology;
    if (ranks.world_size == 1) return XD_OK;
    s->rank = xd_comm_rank(s->cp) * axes[1].size + xd_comm_rank(s->tp);
    XD_TRY(xd_topology_create(s->ctx, &ranks, &topology));
    for (int i = 0; i < SHARE_CUTS; i++) {
        xd_layout_desc d;
        memset(&d, 0, sizeof d);
        const int dim = cut_of(&s->size, (share_cut)i, &d);
        d.topology = &topology;
        if (dim >= 0) d.placement[1].kind = XD_SHARD;
        if (dim >= 0) d.placement[1].dim = dim;
        XD_TRY(xd_layout_create(s->ctx, &d, &s->layouts[i]));
    }
    return XD_OK;
}

/* ---- sums ---- */

static xd_leaves leaves_of(xd_interval here, int64_t total) {
    const xd_leaves leaves = { here.begin, here.end - here.begin, total };
    return leaves;
}

static xd_interval chunk_of(int64_t n, const xd_comm *comm) {
    return xd_chunk(n, xd_comm_size(comm), xd_comm_rank(comm));
}

/* Elements that cross, all rows together. */
static int64_t elements_of(const sharing *s, share_kind kind) {
    return (int64_t)s->size.rows * (s->size.width + (kind == SHARE_LOGITS));
}

static xd_result make_crossing(sharing *s, share_kind kind) {
    static const xd_crossing_kind kinds[SHARE_KINDS] = { XD_CROSSING_REDUCE, XD_CROSSING_ALL_GATHER,
                                                         XD_CROSSING_COPY, XD_CROSSING_REDUCE,
                                                         XD_CROSSING_COPY };
    const xd_crossing_desc d = { .kind = kinds[kind],
                                 .dtype = XD_DTYPE_F32,
                                 .ndim = 2,
                                 .shape = { s->size.rows, s->size.width + (kind == SHARE_LOGITS) },
                                 .leaves = s->leaves[kind] };
    XD_TRY(xd_leaf_stack_create(s->ctx, d.leaves, elements_of(s, kind), &s->stacks[kind]));
    return xd_crossing_create(kind == SHARE_SEE ? s->cp : s->tp, &d, &s->crossings[kind]);
}

static xd_result make_sums(sharing *s) {
    const share_sizes *z = &s->size;
    const int64_t inner = s->inner.end - s->inner.begin;
    const int64_t hidden = z->hidden;
    const xd_leaves rows = leaves_of(s->rows, z->rows);
    const xd_leaves ranks = { xd_comm_rank(s->tp), 1, xd_comm_size(s->tp) };
    s->leaves[SHARE_LOOK] = ranks;
    s->leaves[SHARE_SEE] = rows;
    s->leaves[SHARE_ENTER] = s->leaves[SHARE_LEAVE] = leaves_of(s->inner, z->inner);
    s->leaves[SHARE_LOGITS] = leaves_of(s->vocab, z->vocab);
    for (int i = 0; i < SHARE_KINDS; i++) XD_TRY(make_crossing(s, (share_kind)i));
    s->counts[SHARE_OF_EMBED] = (s->vocab.end - s->vocab.begin) * hidden;
    s->counts[SHARE_OF_LAYER] = 2 * inner * hidden + inner + hidden;
    s->counts[SHARE_OF_HEAD] = 1 + s->counts[SHARE_OF_EMBED];
    for (int i = 0; i < SHARE_WEIGHTS; i++)
        XD_TRY(xd_leaf_stack_create(s->ctx, rows, s->counts[i], &s->weights[i]));
    const int64_t most = s->counts[SHARE_OF_LAYER] > s->counts[SHARE_OF_HEAD] ? s->counts[SHARE_OF_LAYER]
                                                                             : s->counts[SHARE_OF_HEAD];
    s->sum = (float *)calloc((size_t)most, sizeof *s->sum);
    return XD_OK;
}

static xd_result make_all(sharing *s) {
    const int64_t vocab = s->size.vocab;
    const xd_interval stored = chunk_of(s->size.stored, s->tp);
    s->stored = stored.end - stored.begin;
    s->vocab.begin = stored.begin < vocab ? stored.begin : vocab;
    s->vocab.end = stored.end < vocab ? stored.end : vocab;
    s->inner = chunk_of(s->size.inner, s->tp);
    s->rows = chunk_of(s->size.rows, s->cp);
    XD_TRY(make_layouts(s));
    return make_sums(s);
}

xd_result share_create(xd_comm *tp, xd_comm *cp, const share_sizes *sizes, sharing **out) {
    sharing *s = (sharing *)calloc(1, sizeof *s);
    s->ctx = xd_comm_ctx(tp);
    s->tp = tp;
    s->cp = cp;
    s->size = *sizes;
    *out = s;
    return make_all(s);
}

void share_destroy(sharing *s) {
    if (!s) return;
    for (int i = 0; i < SHARE_CUTS; i++) xd_layout_destroy(s->layouts[i]);
    for (int i = 0; i < SHARE_KINDS; i++) xd_crossing_destroy(s->crossings[i]);
    for (int i = 0; i < SHARE_KINDS; i++) xd_leaf_stack_destroy(s->stacks[i]);
    for (int i = 0; i < SHARE_WEIGHTS; i++) xd_leaf_stack_destroy(s->weights[i]);
    free(s->sum);
    free(s);
}

xd_result share_place(xd_leaf_stack *stack, int64_t elements, float **place) {
    XD_TRY(xd_leaf_stack_next(stack, place));
    memset(*place, 0, (size_t)elements * sizeof **place);
    return XD_OK;
}

xd_result share_forward(sharing *s, share_kind kind, float *out) {
    const xd_result result =
        xd_crossing_forward(s->crossings[kind], xd_leaf_stack_forest(s->stacks[kind]), out);
    xd_leaf_stack_reset(s->stacks[kind]);
    return result;
}

xd_result share_backward(sharing *s, share_kind kind, float *out) {
    const xd_result result =
        xd_crossing_backward(s->crossings[kind], xd_leaf_stack_forest(s->stacks[kind]), out);
    xd_leaf_stack_reset(s->stacks[kind]);
    return result;
}

xd_result share_join(sharing *s, share_weights of) {
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = xd_leaf_stack_forest(s->weights[of]);
    c.recv = s->sum;
    c.count = s->counts[of];
    c.dtype = XD_DTYPE_F32;
    c.op = XD_SUM;
    c.leaves = s->leaves[SHARE_SEE];
    const xd_result result = xd_collective_run(s->cp, &c);
    xd_leaf_stack_reset(s->weights[of]);
    return result;
}

int64_t share_whole_place(const xd_tensor_part *part, int64_t at) {
    int64_t place = 0, stride = 1;
    if (!part->region) return at;
    for (int d = part->ndim - 1; d >= 0; d--) {
        const xd_interval here = part->region->interval[d][0];
        const int64_t extent = here.end - here.begin;
        place += (here.begin + at % extent) * stride;
        at /= extent;
        stride *= part->shape[d];
    }
    return place;
}
