/* share.c - see share.h. */
#include "share.h"
#include "../helpers/xd_test_topology.h"

#include <stdlib.h>
#include <string.h>

enum { SHARE_MOST = 8 }; /* ranks */

/* ---- layouts ---- */

int share_shape(const share_sizes *z, share_cut cut, int64_t *shape) {
    static const int ndims[SHARE_CUTS] = { 0, 2, 2, 1, 1, 2, 2, 3, 2 };
    const int64_t shapes[SHARE_CUTS][3] = { { 0, 0, 0 },
                                            { z->vocab, z->hidden, 0 },
                                            { z->inner, z->hidden, 0 },
                                            { z->inner, 0, 0 },
                                            { z->hidden, 0, 0 },
                                            { z->hidden, z->inner, 0 },
                                            { 0, z->hidden, 0 },
                                            { z->experts, z->hidden, z->hidden },
                                            { z->experts, z->hidden, 0 } };
    memcpy(shape, shapes[cut], (size_t)ndims[cut] * sizeof *shape);
    return ndims[cut];
}

/* The ranks that have a weight once: those that share a leaf, or also the members of their group. `ranks` [SHARE_MOST] is used by
 * the topology. */
static xd_topology make_topology(const sharing *s, bool experts, int *ranks) {
    const share_ranks *r = &s->ranks;
    const int tp = xd_comm_size(r->tp), cp = xd_comm_size(r->cp), members = xd_comm_size(r->members);
    const int place = xd_comm_rank(r->cp) * tp + xd_comm_rank(r->tp);
    const int before = place + (experts ? xd_comm_rank(r->members) * tp * cp : 0);
    const xd_axis axes[3] = { { "ep", experts ? members : 1 }, { "cp", cp }, { "tp", tp } };
    for (int i = 0; i < axes[0].size * cp * tp; i++) ranks[i] = xd_comm_rank(r->world) - before + i;
    return grid_of(axes, 3, ranks);
}

static xd_result make_layouts(sharing *s) {
    const bool shared = xd_comm_size(s->ranks.tp) * xd_comm_size(s->ranks.cp) > 1;
    for (int i = 0; i < SHARE_CUTS; i++) {
        const bool experts = i >= SHARE_MATRICES;
        const int axis = experts ? 0 : 2;
        int ranks[SHARE_MOST];
        xd_layout_desc d;
        if (experts ? !s->size.experts : !shared) continue;
        const xd_topology topology = make_topology(s, experts, ranks);
        memset(&d, 0, sizeof d);
        d.ndim = share_shape(&s->size, (share_cut)i, d.shape);
        if (i == SHARE_VOCAB) d.shape[0] = s->size.stored;
        d.topology = &topology;
        if (i != SHARE_SCALAR && i != SHARE_SHIFT) d.placement[axis].kind = XD_SHARD;
        d.placement[axis].dim = i == SHARE_DOWN;
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
    const xd_leaf_stack_desc stack = { .leaves = d.leaves, .elements = elements_of(s, kind) };
    XD_TRY(xd_leaf_stack_create(s->ctx, &stack, &s->stacks[kind]));
    return xd_crossing_create(kind == SHARE_SEE ? s->ranks.cp : s->ranks.tp, &d, &s->crossings[kind]);
}

static xd_result make_sums(sharing *s) {
    const share_sizes *z = &s->size;
    const int64_t inner = s->inner.end - s->inner.begin;
    const int64_t hidden = z->hidden;
    const xd_leaves rows = leaves_of(s->rows, z->rows);
    const xd_leaves ranks = { xd_comm_rank(s->ranks.tp), 1, xd_comm_size(s->ranks.tp) };
    int64_t most = 0;
    s->leaves[SHARE_LOOK] = ranks;
    s->leaves[SHARE_SEE] = rows;
    s->leaves[SHARE_ENTER] = s->leaves[SHARE_LEAVE] = leaves_of(s->inner, z->inner);
    s->leaves[SHARE_LOGITS] = leaves_of(s->vocab, z->vocab);
    for (int i = 0; i < SHARE_KINDS; i++) XD_TRY(make_crossing(s, (share_kind)i));
    s->counts[SHARE_OF_EMBED] = (s->vocab.end - s->vocab.begin) * hidden;
    s->counts[SHARE_OF_LAYER] = 2 * inner * hidden + inner + hidden;
    s->counts[SHARE_OF_EXPERTS] = (s->experts.end - s->experts.begin) * (hidden + 1) * hidden;
    s->counts[SHARE_OF_HEAD] = 1 + s->counts[SHARE_OF_EMBED];
    for (int i = 0; i < SHARE_WEIGHTS; i++) {
        const xd_leaf_stack_desc stack = { .leaves = rows, .elements = s->counts[i] };
        XD_TRY(xd_leaf_stack_create(s->ctx, &stack, &s->weights[i]));
        if (s->counts[i] > most) most = s->counts[i];
    }
    s->sum = (float *)calloc((size_t)most, sizeof *s->sum);
    return XD_OK;
}

static xd_result make_all(sharing *s) {
    const int64_t vocab = s->size.vocab;
    const xd_interval stored = chunk_of(s->size.stored, s->ranks.tp);
    s->vocab.begin = stored.begin < vocab ? stored.begin : vocab;
    s->vocab.end = stored.end < vocab ? stored.end : vocab;
    s->inner = chunk_of(s->size.inner, s->ranks.tp);
    s->rows = chunk_of(s->size.rows, s->ranks.cp);
    s->experts = chunk_of(s->size.experts, s->ranks.members);
    XD_TRY(make_layouts(s));
    return make_sums(s);
}

xd_result share_create(const share_ranks *ranks, const share_sizes *sizes, sharing **out) {
    sharing *s = (sharing *)calloc(1, sizeof *s);
    s->ctx = xd_comm_ctx(ranks->world);
    s->ranks = *ranks;
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
    const xd_result result = xd_collective_run(s->ranks.cp, &c);
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
