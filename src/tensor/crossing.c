/* Activations that enter or leave a region whose ranks share the work. */

#include "tensor/crossing.h"

#include "comm/internal.h"
#include "comm/mesh.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"
#include "tensor/internal.h"

#include <inttypes.h>
#include <string.h>

/* One direction of a crossing. */
typedef enum xdi_crossing_act {
    XDI_CROSSING_SAME = 0, /* itself */
    XDI_CROSSING_SUM,      /* whole, summed */
    XDI_CROSSING_CUT,      /* whole -> part */
    XDI_CROSSING_JOIN,     /* parts -> whole */
    XDI_CROSSING_SUM_CUT,  /* summed, -> part */
    XDI_CROSSING_TURN      /* part of one dimension -> part of another */
} xdi_crossing_act;

typedef struct xdi_crossing_step {
    xdi_crossing_act act;
    int dim;                /* of the parts; TURN: of those before */
    int64_t nodes;          /* terms that this rank has of a sum */
    int64_t in, out;        /* elements; `in` of one node */
    int64_t *sends, *recvs; /* [ranks] elements to and from each rank, where the act has them */
    xd_copy *copies;        /* packs, then unpacks */
    int64_t pack_count, copy_count;
    int64_t staged_in, staged_out; /* elements that are packed, and unpacked */
} xdi_crossing_step;

struct xd_crossing {
    xd_ctx *ctx;
    xd_comm *comm;
    xd_crossing_desc desc;
    int ranks, rank;
    int64_t shape[2][XD_DIMS_MAX]; /* of the input and of the output */
    xdi_crossing_step step[2];     /* forward, backward */
    void *memory, *send, *recv;    /* of the device */
};

/* ---- settings ---- */

static bool xdi_crossing_sums(xd_crossing_kind kind) {
    return kind == XD_CROSSING_COPY || kind == XD_CROSSING_REDUCE || kind == XD_CROSSING_ALL_GATHER ||
           kind == XD_CROSSING_REDUCE_SCATTER;
}

static bool xdi_crossing_cuts(xd_crossing_kind kind) {
    return kind != XD_CROSSING_COPY && kind != XD_CROSSING_REDUCE;
}

static xd_result xdi_crossing_check_dims(xd_ctx *ctx, xd_crossing_desc *d) {
    int64_t numel = 1;
    XD_REQUIRE(ctx, d->ndim >= 0 && d->ndim <= XD_DIMS_MAX, XD_ERROR_ARGUMENT,
               "a crossing of %d dimensions, from 0 to %d are possible", d->ndim, (int)XD_DIMS_MAX);
    XD_TRY(xdi_shape_check_rest(ctx, "", d->ndim, d->shape));
    for (int i = 0; i < d->ndim; i++) {
        XD_REQUIRE(ctx, d->shape[i] >= 0, XD_ERROR_SHAPE, "dimension %d of a crossing has extent %" PRId64, i,
                   d->shape[i]);
        XD_REQUIRE(ctx, d->shape[i] == 0 || numel <= ((int64_t)1 << 56) / d->shape[i], XD_ERROR_SHAPE,
                   "dimension %d of a crossing, of extent %" PRId64 ", makes more than 2^56 elements", i,
                   d->shape[i]);
        numel *= d->shape[i] ? d->shape[i] : 1;
    }
    if (!xdi_crossing_cuts(d->kind)) return XD_OK;
    const int dim = d->dim, other = d->other_dim;
    if (d->dim < 0) d->dim += d->ndim;
    XD_REQUIRE(ctx, d->dim >= 0 && d->dim < d->ndim, XD_ERROR_ARGUMENT, "a crossing along dimension %d of %d",
               dim, d->ndim);
    if (d->kind != XD_CROSSING_ALL_TO_ALL) return XD_OK;
    if (d->other_dim < 0) d->other_dim += d->ndim;
    XD_REQUIRE(ctx, d->other_dim >= 0 && d->other_dim < d->ndim && d->other_dim != d->dim, XD_ERROR_ARGUMENT,
               "a crossing from dimension %d to %d, of %d", dim, other, d->ndim);
    return XD_OK;
}

static xd_result xdi_crossing_check_sums(xd_ctx *ctx, const xd_crossing_desc *d) {
    const xd_leaves l = d->leaves;
    const bool invariant = xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT;
    if (!xdi_crossing_sums(d->kind)) {
        XD_REQUIRE(ctx, l.total == 0, XD_ERROR_ARGUMENT,
                   "a crossing of kind %d adds nothing, and has %" PRId64 " leaves", (int)d->kind, l.total);
        return XD_OK;
    }
    XD_REQUIRE(ctx, xd_reduce_supports(d->dtype, XD_SUM), XD_ERROR_DTYPE, "%s has no sums",
               xd_dtype_name(d->dtype));
    XD_REQUIRE(ctx,
               l.total >= 0 && l.first >= 0 && l.count >= 0 && l.count <= l.total &&
                   l.first <= l.total - l.count,
               XD_ERROR_ARGUMENT, "leaves [%" PRId64 ", +%" PRId64 ") lie outside [0, %" PRId64 ")", l.first,
               l.count, l.total);
    XD_REQUIRE(ctx, l.total == 0 || d->dtype == XD_DTYPE_F32 || d->dtype == XD_DTYPE_F64, XD_ERROR_DTYPE,
               "%" PRId64 " leaves of %s: F32 or F64 is needed", l.total, xd_dtype_name(d->dtype));
    XD_REQUIRE(ctx, l.total > 0 || !invariant || !xd_dtype_is_floating(d->dtype), XD_ERROR_UNSUPPORTED,
               "a crossing of kind %d adds %s, which needs leaves in INVARIANT mode", (int)d->kind,
               xd_dtype_name(d->dtype));
    return XD_OK;
}

static xd_result xdi_crossing_check(xd_ctx *ctx, xd_crossing_desc *d, int ranks, int rank) {
    XD_REQUIRE(ctx, rank >= 0 && rank < ranks, XD_ERROR_ARGUMENT, "rank %d of %d", rank, ranks);
    XD_REQUIRE(ctx, (int)d->kind >= 0 && d->kind <= XD_CROSSING_ALL_TO_ALL, XD_ERROR_ARGUMENT,
               "crossing %d does not exist", (int)d->kind);
    XD_REQUIRE(ctx, xd_dtype_size(d->dtype) > 0, XD_ERROR_DTYPE, "dtype %d does not exist", (int)d->dtype);
    XD_TRY(xdi_crossing_check_dims(ctx, d));
    return xdi_crossing_check_sums(ctx, d);
}

/* ---- plan ---- */

/* A dense tensor seen from one of its dimensions. */
typedef struct xdi_crossing_view {
    int64_t outer, extent, inner;
} xdi_crossing_view;

static xdi_crossing_view xdi_crossing_view_of(int ndim, const int64_t *shape, int dim) {
    xdi_crossing_view v = { 1, shape[dim], 1 };
    for (int i = 0; i < dim; i++) v.outer *= shape[i];
    for (int i = dim + 1; i < ndim; i++) v.inner *= shape[i];
    return v;
}

/* The copy between a block of a dimension and dense memory at `at`, in one of the two directions; returns its elements. */
static int64_t xdi_crossing_block(xdi_crossing_view v, xd_interval block, int64_t at, bool packs,
                                  xd_copy *copy) {
    const int64_t row = (block.end - block.begin) * v.inner, from = block.begin * v.inner;
    memset(copy, 0, sizeof *copy);
    copy->ndim = 2;
    copy->extent[0] = v.outer;
    copy->extent[1] = row;
    copy->src_offset = packs ? from : at;
    copy->dst_offset = packs ? at : from;
    copy->src_stride[0] = packs ? v.extent * v.inner : row;
    copy->dst_stride[0] = packs ? row : v.extent * v.inner;
    copy->src_stride[1] = copy->dst_stride[1] = 1;
    return v.outer * row;
}

/* Appends the copies of all ranks' blocks of a dimension of `extent`; with copies NULL counts them. Empty ones are left out. */
static int64_t xdi_crossing_blocks(const xd_crossing *c, xdi_crossing_view v, int64_t shift, int64_t at,
                                   bool packs, xdi_crossing_step *step) {
    for (int r = 0; r < c->ranks; r++) {
        xd_copy copy;
        const int64_t numel = xdi_crossing_block(v, xd_chunk(v.extent, c->ranks, r), at, packs, &copy);
        at += numel;
        copy.src_offset += packs ? shift : 0;
        if (numel == 0) continue;
        if (step->copies) step->copies[step->copy_count] = copy;
        step->copy_count++;
    }
    return at;
}

static void xdi_crossing_counts(const xd_crossing *c, xdi_crossing_view v, int64_t *counts) {
    for (int r = 0; r < c->ranks && counts; r++) {
        const xd_interval chunk = xd_chunk(v.extent, c->ranks, r);
        counts[r] = v.outer * (chunk.end - chunk.begin) * v.inner;
    }
}

/* The act of a direction; alone there is nothing to do but to add leaves. */
static xdi_crossing_act xdi_crossing_act_of(const xd_crossing *c, bool backward) {
    xdi_crossing_act act = XDI_CROSSING_TURN;
    switch (c->desc.kind) {
    case XD_CROSSING_COPY: act = backward ? XDI_CROSSING_SUM : XDI_CROSSING_SAME; break;
    case XD_CROSSING_REDUCE: act = backward ? XDI_CROSSING_SAME : XDI_CROSSING_SUM; break;
    case XD_CROSSING_SCATTER: act = backward ? XDI_CROSSING_JOIN : XDI_CROSSING_CUT; break;
    case XD_CROSSING_GATHER: act = backward ? XDI_CROSSING_CUT : XDI_CROSSING_JOIN; break;
    case XD_CROSSING_ALL_GATHER: act = backward ? XDI_CROSSING_SUM_CUT : XDI_CROSSING_JOIN; break;
    case XD_CROSSING_REDUCE_SCATTER: act = backward ? XDI_CROSSING_JOIN : XDI_CROSSING_SUM_CUT; break;
    default: break;
    }
    const bool adds = act == XDI_CROSSING_SUM || act == XDI_CROSSING_SUM_CUT;
    return c->ranks == 1 && !(adds && c->desc.leaves.total) ? XDI_CROSSING_SAME : act;
}

/* Counts of a direction, and its copies where there is room for them. Packing is needed unless the dimension is the first
 * that is longer than one. */
static void xdi_crossing_plan(xd_crossing *c, bool backward) {
    xdi_crossing_step *s = &c->step[backward];
    const xd_crossing_desc *d = &c->desc;
    const int64_t *in = c->shape[backward], *out = c->shape[!backward];
    const int to = backward ? d->dim : d->other_dim;
    xdi_crossing_view v = { 1, 1, 1 };
    s->act = xdi_crossing_act_of(c, backward);
    s->dim = backward && d->kind == XD_CROSSING_ALL_TO_ALL ? d->other_dim : d->dim;
    s->nodes = s->act == XDI_CROSSING_SUM || s->act == XDI_CROSSING_SUM_CUT ? xdi_comm_nodes(&d->leaves) : 1;
    s->in = s->out = 1;
    for (int i = 0; i < d->ndim; i++) {
        s->in *= in[i];
        s->out *= out[i];
    }
    s->copy_count = s->pack_count = s->staged_in = s->staged_out = 0;
    if (s->act == XDI_CROSSING_SUM_CUT || s->act == XDI_CROSSING_TURN) {
        v = xdi_crossing_view_of(d->ndim, in, s->act == XDI_CROSSING_TURN ? to : s->dim);
        xdi_crossing_counts(c, v, s->sends);
        for (int64_t node = 0; node < s->nodes && v.outer > 1; node++)
            s->staged_in = xdi_crossing_blocks(c, v, node * s->in, s->staged_in, true, s);
    }
    s->pack_count = s->copy_count;
    if (s->act == XDI_CROSSING_JOIN || s->act == XDI_CROSSING_TURN) {
        v = xdi_crossing_view_of(d->ndim, out, s->dim);
        xdi_crossing_counts(c, v, s->recvs);
        if (v.outer > 1) s->staged_out = xdi_crossing_blocks(c, v, 0, 0, false, s);
    }
    if (s->act == XDI_CROSSING_CUT) {
        xd_copy copy;
        v = xdi_crossing_view_of(d->ndim, in, s->dim);
        if (xdi_crossing_block(v, xd_chunk(v.extent, c->ranks, c->rank), 0, true, &copy) > 0)
            s->copy_count = 1;
        if (s->copies && s->copy_count) s->copies[0] = copy;
    }
}

/* Extents on this rank: whole, but for the dimension that is cut there. */
static void xdi_crossing_shapes(xd_crossing *c) {
    const xd_crossing_desc *d = &c->desc;
    for (int side = 0; side < 2; side++) {
        int cut = -1;
        if (d->kind == XD_CROSSING_ALL_TO_ALL) cut = side ? d->other_dim : d->dim;
        if (d->kind == XD_CROSSING_SCATTER || d->kind == XD_CROSSING_REDUCE_SCATTER) cut = side ? d->dim : -1;
        if (d->kind == XD_CROSSING_GATHER || d->kind == XD_CROSSING_ALL_GATHER) cut = side ? -1 : d->dim;
        memcpy(c->shape[side], d->shape, sizeof d->shape);
        if (cut < 0) continue;
        const xd_interval own = xd_chunk(d->shape[cut], c->ranks, c->rank);
        c->shape[side][cut] = own.end - own.begin;
    }
}

/* Distributes memory, whose sizes follow from the counts of both directions. */
static bool xdi_crossing_lay_out(xd_crossing *c, xd_arena *host, xd_arena *device) {
    const size_t size = xd_dtype_size(c->desc.dtype);
    int64_t send = 0, recv = 0;
    bool fits = true;
    xdi_arena_array(host, 1, sizeof *c, &fits);
    for (int i = 0; i < 2; i++) {
        xdi_crossing_step *s = &c->step[i];
        s->sends = (int64_t *)xdi_arena_array(host, c->ranks, sizeof(int64_t), &fits);
        s->recvs = (int64_t *)xdi_arena_array(host, c->ranks, sizeof(int64_t), &fits);
        s->copies = (xd_copy *)xdi_arena_array(host, s->copy_count, sizeof *s->copies, &fits);
        if (s->staged_in > send) send = s->staged_in;
        if (s->staged_out > recv) recv = s->staged_out;
    }
    c->send = xdi_arena_array(device, send, size, &fits);
    c->recv = xdi_arena_array(device, recv, size, &fits);
    return fits;
}

/* Everything but memory; the arenas have its sizes. */
static xd_result xdi_crossing_count(xd_ctx *ctx, const xd_crossing_desc *desc, int ranks, int rank,
                                    xd_crossing *c, xd_arena *arenas) {
    memset(c, 0, sizeof *c);
    c->ctx = ctx;
    c->desc = *desc;
    c->ranks = ranks;
    c->rank = rank;
    XD_TRY(xdi_crossing_check(ctx, &c->desc, ranks, rank));
    xdi_crossing_shapes(c);
    for (int i = 0; i < 2; i++) xdi_crossing_plan(c, i != 0);
    arenas[0] = arenas[1] = xd_arena_over(NULL, 0);
    XD_REQUIRE(ctx, xdi_crossing_lay_out(c, &arenas[0], &arenas[1]), XD_ERROR_MEMORY,
               "a crossing on %d ranks needs more bytes than there are", ranks);
    return XD_OK;
}

/* Elements that this rank sends to others; the same as what a communicator counts. */
static int64_t xdi_crossing_sent(const xd_crossing *c, const xdi_crossing_step *s) {
    const int64_t others = c->ranks - 1;
    int64_t begin = 0, end = 0;
    xdi_crossing_view v = { 1, 1, 1 };
    xd_interval own = { 0, 0 };
    switch (s->act) {
    case XDI_CROSSING_SUM:
        xdi_comm_piece(s->in, c->ranks, c->rank, &begin, &end);
        return (s->in - (end - begin)) * s->nodes + (end - begin) * others;
    case XDI_CROSSING_JOIN: return s->in * others;
    case XDI_CROSSING_SUM_CUT: return (s->in - s->out) * s->nodes;
    case XDI_CROSSING_TURN:
        v = xdi_crossing_view_of(c->desc.ndim, c->shape[s != c->step],
                                 s->dim == c->desc.dim ? c->desc.other_dim : c->desc.dim);
        own = xd_chunk(v.extent, c->ranks, c->rank);
        return s->in - v.outer * (own.end - own.begin) * v.inner;
    default: return 0;
    }
}

/* What a create of the open plan's rank would take and send. */
static xd_result xdi_crossing_add_to_plan(const xd_comm *comm, const xd_crossing_desc *desc) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    int ranks = xd_comm_size(comm), rank = xd_comm_rank(comm);
    xd_crossing c;
    xd_arena arenas[2];
    (void)xdi_plan_place(ctx, &rank, &ranks);
    XD_TRY(xdi_crossing_count(ctx, desc, ranks, rank, &c, arenas));
    XD_TRY(xdi_plan_take(ctx, arenas[0].peak, arenas[1].peak));
    const uint64_t size = xd_dtype_size(desc->dtype);
    xdi_plan_add_sent(ctx, (uint64_t)xdi_crossing_sent(&c, &c.step[0]) * size,
                      (uint64_t)xdi_crossing_sent(&c, &c.step[1]) * size);
    return XD_OK;
}

static xd_result xdi_crossing_make(xd_comm *comm, const xd_crossing_desc *desc, xd_crossing **out) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    xd_crossing counted;
    xd_arena arenas[2];
    XD_TRY(xdi_crossing_count(ctx, desc, xd_comm_size(comm), xd_comm_rank(comm), &counted, arenas));
    const size_t host_bytes = arenas[0].peak, device_bytes = arenas[1].peak;
    xd_crossing *c = XDI_OBJECT(xd_crossing, ctx, host_bytes);
    void *block = c && device_bytes ? memory->allocate(ctx, device_bytes) : NULL;
    const bool fits = c && (block || device_bytes == 0);
    if (!fits) xd_release(ctx, c);
    XD_REQUIRE(ctx, fits, XD_ERROR_MEMORY, "no room for a crossing: %zu bytes, and %zu of the device",
               host_bytes, device_bytes);
    *c = counted;
    c->comm = comm;
    c->memory = block;
    arenas[0] = xd_arena_over(c, host_bytes);
    arenas[1] = xd_arena_over(block, device_bytes);
    (void)xdi_crossing_lay_out(c, &arenas[0], &arenas[1]);
    for (int i = 0; i < 2; i++) xdi_crossing_plan(c, i != 0);
    *out = c;
    return XD_OK;
}

static xd_result xdi_crossing_agree(xd_comm *comm, const xd_crossing_desc *d) {
    xdi_facts facts;
    xdi_facts_begin(&facts);
    xdi_fact_integer(&facts, "kind", (int64_t)d->kind);
    xdi_fact_dtype(&facts, "dtype", d->dtype);
    xdi_fact_integer(&facts, "ndim", d->ndim);
    xdi_fact_integer(&facts, "dim", xdi_crossing_cuts(d->kind) ? d->dim : 0);
    xdi_fact_integer(&facts, "other_dim", d->kind == XD_CROSSING_ALL_TO_ALL ? d->other_dim : 0);
    xdi_fact_integer(&facts, "leaves.total", d->leaves.total);
    for (int i = 0; i < d->ndim; i++) {
        xdi_facts_item(&facts, "shape", i);
        xdi_fact_integer(&facts, "", d->shape[i]);
    }
    return xdi_agree_facts(comm, &facts, "crossing");
}

XD_API xd_result xd_crossing_create(xd_comm *comm, const xd_crossing_desc *desc, xd_crossing **out) {
    XDI_GIVEN_COMM_IN_PLAN(comm, desc, out);
    xd_crossing *c = NULL;
    if (xdi_plan_is_open(xd_comm_ctx(comm))) {
        *out = NULL;
        return xdi_crossing_add_to_plan(comm, desc);
    }
    xd_result result = xd_agree(comm, xdi_crossing_make(comm, desc, &c));
    if (result == XD_OK) result = xdi_crossing_agree(comm, &c->desc);
    if (result != XD_OK) {
        xd_crossing_destroy(c);
        return result;
    }
    *out = c;
    return XD_OK;
}

XD_API void xd_crossing_destroy(xd_crossing *crossing) {
    if (!crossing || XDI_IS_GONE(xd_crossing, crossing)) return;
    xd_ctx *ctx = crossing->ctx;
    xd_ctx_kernels(ctx)->memory.release(ctx, crossing->memory);
    xd_release(ctx, crossing);
}

XD_API void xd_crossing_shape(const xd_crossing *crossing, int64_t *in, int64_t *out) {
    XD_ASSERT(crossing);
    const size_t bytes = (size_t)crossing->desc.ndim * sizeof *in;
    memcpy(in, crossing->shape[0], bytes);
    memcpy(out, crossing->shape[1], bytes);
}

/* ---- running ---- */

static xd_result xdi_crossing_copies(xd_crossing *c, const xdi_crossing_step *s, bool packs, const void *src,
                                     void *dst) {
    const xd_launch launch = xd_ctx_launch(c->ctx);
    const int64_t begin = packs ? 0 : s->pack_count, end = packs ? s->pack_count : s->copy_count;
    if (begin == end) return XD_OK;
    return xd_ctx_kernels(c->ctx)->copies(&launch, s->copies + begin, end - begin, src, dst,
                                          xd_dtype_size(c->desc.dtype));
}

/* What an act that communicates passes on. */
static xd_collective xdi_crossing_record(const xd_crossing *c, const xdi_crossing_step *s, const void *in,
                                         void *out) {
    xd_collective r;
    memset(&r, 0, sizeof r);
    r.kind = s->act == XDI_CROSSING_SUM       ? XD_COLLECTIVE_ALL_REDUCE
             : s->act == XDI_CROSSING_JOIN    ? XD_COLLECTIVE_ALL_GATHER
             : s->act == XDI_CROSSING_SUM_CUT ? XD_COLLECTIVE_REDUCE_SCATTER
                                              : XD_COLLECTIVE_ALL_TO_ALL;
    r.send = s->staged_in ? c->send : in;
    r.recv = s->staged_out ? c->recv : out;
    r.count = s->act == XDI_CROSSING_SUM ? s->in : 0;
    r.send_counts = s->sends;
    r.recv_counts = s->recvs;
    r.dtype = c->desc.dtype;
    r.op = XD_SUM;
    r.leaves = c->desc.leaves;
    return r;
}

static xd_result xdi_crossing_check_arrays(const xd_crossing *c, const xdi_crossing_step *s, const void *in,
                                           const void *out) {
    XD_REQUIRE(c->ctx, in || s->in * s->nodes == 0, XD_ERROR_ARGUMENT,
               "crossing: the input of %" PRId64 " elements is NULL", s->in * s->nodes);
    XD_REQUIRE(c->ctx, out || s->out == 0, XD_ERROR_ARGUMENT,
               "crossing: the output of %" PRId64 " elements is NULL", s->out);
    return XD_OK;
}

static xd_result xdi_crossing_run(xd_crossing *c, const xdi_crossing_step *s, const void *in, void *out) {
    const xd_launch launch = xd_ctx_launch(c->ctx);
    const size_t bytes = (size_t)s->in * xd_dtype_size(c->desc.dtype);
    xd_result result = xdi_crossing_check_arrays(c, s, in, out);
    if (s->act == XDI_CROSSING_SAME) {
        if (result != XD_OK || in == out || bytes == 0) return result;
        return xd_ctx_kernels(c->ctx)->memory.copy(&launch, out, in, bytes, XD_COPY_ON_DEVICE);
    }
    if (s->act != XDI_CROSSING_CUT) {
        const xd_collective record = xdi_crossing_record(c, s, in, out);
        if (result == XD_OK) result = xdi_crossing_copies(c, s, true, in, c->send);
        XD_TRY(xdi_comm_collective_as(c->comm, &record, result));
    }
    XD_TRY(result);
    return xdi_crossing_copies(c, s, false, s->act == XDI_CROSSING_CUT ? in : c->recv, out);
}

XD_API xd_result xd_crossing_forward(xd_crossing *crossing, const void *in, void *out) {
    XDI_LIVE(xd_crossing, crossing);
    XDI_GIVEN(crossing ? crossing->ctx : NULL, crossing);
    return xdi_crossing_run(crossing, &crossing->step[0], in, out);
}

XD_API xd_result xd_crossing_backward(xd_crossing *crossing, const void *d_out, void *d_in) {
    XDI_LIVE(xd_crossing, crossing);
    XDI_GIVEN(crossing ? crossing->ctx : NULL, crossing);
    return xdi_crossing_run(crossing, &crossing->step[1], d_out, d_in);
}
