/* Halos: memory, agreement, and the exchange with its backward. */

#include "comm/internal.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"
#include "tensor/halo_internal.h"

#include <inttypes.h>
#include <string.h>

struct xd_halo {
    xd_ctx *ctx;
    xd_comm *comm;
    xd_dtype dtype;
    xd_halo_gradient gradient;
    int ndim;
    int64_t shape[XD_DIMS_MAX]; /* with halo */
    int64_t part_numel, wide_numel;
    bool moves; /* some rank sends something to another */
    xdi_halo_plan plan;
    void *memory; /* of the device, and in it: */
    void *send, *recv, *terms, *zero;
    const void **pieces; /* [term_most] */
};

/* ---- making ---- */

static void xdi_halo_making_release(xd_ctx *ctx, xdi_halo_making *m) {
    xd_release(ctx, m->blocks);
    xd_release(ctx, m->order);
    xd_release(ctx, m->cuts);
    xd_release(ctx, m->totals);
}

/* Lists for as many blocks as have been counted. */
static xd_result xdi_halo_making_room(xd_ctx *ctx, xdi_halo_making *m) {
    const size_t blocks = (size_t)m->block_count, dims = (size_t)m->scene->ndim;
    m->block_room = m->block_count;
    m->blocks = (xdi_halo_block *)xd_allocate(ctx, (blocks + 1) * sizeof *m->blocks);
    m->order = (const xdi_halo_block **)xd_allocate(ctx, (blocks + 1) * sizeof *m->order);
    m->cuts = (int64_t *)xd_allocate(ctx, (2 * blocks * dims + 1) * sizeof *m->cuts);
    m->totals = (int64_t *)xd_allocate(ctx, (blocks + 2) * sizeof *m->totals);
    XD_REQUIRE(ctx, m->blocks && m->order && m->cuts && m->totals, XD_ERROR_MEMORY,
               "no room to plan a halo on %d ranks with %d blocks", m->scene->ranks, m->block_count);
    return XD_OK;
}

/* Distributes memory, whose sizes follow from the counts of a plan; arenas without memory tell how much it is. */
static bool xdi_halo_lay_out(xd_halo *h, int ranks, xd_arena *host, xd_arena *device) {
    const size_t size = xd_dtype_size(h->dtype);
    xdi_halo_plan *p = &h->plan;
    const xdi_halo_lane *lane = p->lane;
    bool fits = true;
    xdi_arena_array(host, 1, sizeof *h, &fits);
    for (int i = 0; i < XDI_HALO_LANES; i++) {
        p->lane[i].counts = (int64_t *)xdi_arena_array(host, ranks, sizeof(int64_t), &fits);
        p->lane[i].displacements = (int64_t *)xdi_arena_array(host, ranks, sizeof(int64_t), &fits);
    }
    for (int i = 0; i < XDI_HALO_LISTS; i++)
        p->copies[i] = (xd_copy *)xdi_arena_array(host, p->copy_count[i], sizeof(xd_copy), &fits);
    p->sums = (xdi_halo_sum *)xdi_arena_array(host, p->sum_count, sizeof *p->sums, &fits);
    h->pieces = (const void **)xdi_arena_array(host, p->term_most, sizeof *h->pieces, &fits);
    int64_t count[2] = { 0, 0 };
    for (int i = 0; i < XDI_HALO_LANES; i++)
        if (!lane[i].direct && lane[i].total > count[i % 2]) count[i % 2] = lane[i].total;
    h->send = xdi_arena_array(device, count[XDI_HALO_SEND], size, &fits);
    h->recv = xdi_arena_array(device, count[XDI_HALO_RECV], size, &fits);
    h->terms = xdi_arena_array(device, p->term_count, size, &fits);
    h->zero = xdi_arena_array(device, 8, 1, &fits);
    return fits;
}

/* Whether a dimension is cut in which a rank needs indices of others; the answer is the same on all ranks. */
static bool xdi_halo_cuts(const xdi_halo_scene *s) {
    const bool turns = s->pole >= 0 && (s->desc.before[s->pole] || s->desc.after[s->pole]);
    for (int d = 0; d < s->ndim; d++) {
        if (!s->desc.before[d] && !s->desc.after[d] && !(turns && d == s->desc.longitude)) continue;
        for (int r = 0; r < s->ranks; r++) {
            const int64_t length = xdi_halo_length(s->part[r].own[d]);
            if (length > 0 && length < s->shape[d]) return true;
        }
    }
    return false;
}

/* A plan's facts and counts, without memory of its own. */
static xd_result xdi_halo_count(xd_ctx *ctx, const xdi_halo_scene *s, xdi_halo_making *m, xd_halo *h) {
    const xdi_halo_part *me = &s->part[s->rank];
    memset(h, 0, sizeof *h);
    h->ctx = ctx;
    h->dtype = s->desc.dtype;
    h->gradient = s->desc.gradient;
    h->ndim = s->ndim;
    h->part_numel = h->wide_numel = me->takes_part;
    for (int d = 0; d < s->ndim; d++) {
        h->shape[d] = xdi_halo_length(me->wide[d]);
        h->part_numel *= xdi_halo_length(me->own[d]);
        h->wide_numel *= h->shape[d];
    }
    h->moves = xdi_halo_cuts(s);
    memset(m, 0, sizeof *m);
    m->scene = s;
    m->plan = &h->plan;
    xdi_halo_make(m);
    XD_TRY(xdi_halo_making_room(ctx, m));
    xdi_halo_make(m);
    return XD_OK;
}

static xd_result xdi_halo_take_memory(xd_ctx *ctx, xdi_halo_making *m, int ranks, xd_halo *counted,
                                      xd_halo **out) {
    const xd_launch launch = xd_ctx_launch(ctx);
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    xd_arena host = xd_arena_over(NULL, 0), device = xd_arena_over(NULL, 0);
    const bool fits = xdi_halo_lay_out(counted, ranks, &host, &device);
    xd_halo *h = fits ? XDI_OBJECT(xd_halo, ctx, host.peak) : NULL;
    void *block = h ? memory->allocate(ctx, device.peak) : NULL;
    if (!block) xd_release(ctx, h);
    XD_REQUIRE(ctx, block, XD_ERROR_MEMORY, "no room for a halo: %zu bytes, and %zu of the device", host.peak,
               device.peak);
    *h = *counted;
    h->memory = block;
    host = xd_arena_over(h, host.peak);
    device = xd_arena_over(block, device.peak);
    (void)xdi_halo_lay_out(h, ranks, &host, &device);
    m->plan = &h->plan;
    xdi_halo_make(m);
    *out = h;
    return memory->fill(&launch, h->zero, 0, 8);
}

/* Makes a plan of one rank; with out NULL only its sizes. */
static xd_result xdi_halo_plan_rank(xd_ctx *ctx, xdi_halo_scene *s, xd_planned *bytes, xd_halo **out) {
    xdi_halo_making m;
    xd_halo counted;
    memset(&m, 0, sizeof m);
    s->part = (xdi_halo_part *)xd_allocate(ctx, (size_t)s->ranks * sizeof *s->part);
    XD_REQUIRE(ctx, s->part, XD_ERROR_MEMORY, "no room to plan a halo on %d ranks", s->ranks);
    xd_result result = xdi_halo_parts(ctx, s);
    if (result == XD_OK) result = xdi_halo_count(ctx, s, &m, &counted);
    if (result == XD_OK && out) result = xdi_halo_take_memory(ctx, &m, s->ranks, &counted, out);
    if (result == XD_OK && bytes) {
        xd_arena host = xd_arena_over(NULL, 0), device = xd_arena_over(NULL, 0);
        const size_t size = xd_dtype_size(s->desc.dtype);
        if (!xdi_halo_lay_out(&counted, s->ranks, &host, &device))
            result =
                XD_FAIL(ctx, XD_ERROR_MEMORY, "a halo on %d ranks needs more bytes than there are", s->ranks);
        bytes->memory.host = host.peak;
        bytes->memory.device = device.peak;
        bytes->forward_sent = (uint64_t)counted.plan.lane[XDI_HALO_SEND].total * size;
        bytes->backward_sent = (uint64_t)counted.plan.lane[XDI_HALO_BACK_SEND].total * size;
    }
    xdi_halo_making_release(ctx, &m);
    xd_release(ctx, s->part);
    return result;
}

/* What a create of the open plan's rank would take and send. */
static xd_result xdi_halo_add_to_plan(const xd_comm *comm, const xd_halo_desc *desc) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    int ranks = xd_comm_size(comm), rank = xd_comm_rank(comm);
    xdi_halo_scene scene;
    xd_planned bytes;
    (void)xdi_plan_place(ctx, &rank, &ranks);
    XD_TRY(xdi_halo_check(ctx, desc, ranks, rank, &scene));
    XD_TRY(xdi_halo_plan_rank(ctx, &scene, &bytes, NULL));
    XD_TRY(xdi_plan_take(ctx, bytes.memory.host, bytes.memory.device));
    xdi_plan_add_sent(ctx, bytes.forward_sent, bytes.backward_sent);
    return XD_OK;
}

static xd_result xdi_halo_agree(xd_comm *comm, const xdi_halo_scene *s) {
    const xd_halo_desc *d = &s->desc;
    xdi_facts facts;
    xdi_facts_begin(&facts);
    facts.part = "layout";
    xdi_facts_layout(&facts, d->layout);
    facts.part = NULL;
    xdi_fact_dtype(&facts, "dtype", d->dtype);
    for (int i = 0; i < s->ndim; i++) {
        xdi_facts_item(&facts, "before", i);
        xdi_fact_integer(&facts, "", d->before[i]);
        xdi_facts_item(&facts, "after", i);
        xdi_fact_integer(&facts, "", d->after[i]);
        xdi_facts_item(&facts, "boundary", i);
        xdi_fact_integer(&facts, "", (int64_t)d->boundary[i]);
    }
    xdi_facts_item(&facts, NULL, 0);
    xdi_fact_integer(&facts, "longitude", s->pole < 0 ? 0 : d->longitude);
    xdi_fact_integer(&facts, "gradient", (int64_t)d->gradient);
    return xdi_agree_facts(comm, &facts, "halo");
}

XD_API xd_result xd_halo_create(xd_comm *comm, const xd_halo_desc *desc, xd_halo **out) {
    XDI_GIVEN_COMM_IN_PLAN(comm, desc, out);
    xd_ctx *ctx = xd_comm_ctx(comm);
    xdi_halo_scene scene;
    xd_halo *h = NULL;
    if (xdi_plan_is_open(ctx)) {
        *out = NULL;
        return xdi_halo_add_to_plan(comm, desc);
    }
    xd_result result = xdi_halo_check(ctx, desc, xd_comm_size(comm), xd_comm_rank(comm), &scene);
    if (result == XD_OK) result = xdi_halo_plan_rank(ctx, &scene, NULL, &h);
    result = xd_agree(comm, result);
    if (result == XD_OK) result = xdi_halo_agree(comm, &scene);
    if (result != XD_OK) {
        xd_halo_destroy(h);
        return result;
    }
    h->comm = comm;
    *out = h;
    return XD_OK;
}

XD_API void xd_halo_destroy(xd_halo *halo) {
    if (!halo || XDI_IS_GONE(xd_halo, halo)) return;
    xd_ctx *ctx = halo->ctx;
    xd_ctx_kernels(ctx)->memory.release(ctx, halo->memory);
    xd_release(ctx, halo);
}

XD_API void xd_halo_shape(const xd_halo *halo, int64_t *shape) {
    XD_ASSERT(halo);
    memcpy(shape, halo->shape, (size_t)halo->ndim * sizeof *shape);
}

/* ---- running ---- */

static xd_result xdi_halo_run_copies(xd_halo *h, xdi_halo_list list, const void *src, void *dst) {
    const xd_launch launch = xd_ctx_launch(h->ctx);
    const int64_t count = h->plan.copy_count[list];
    if (count == 0) return XD_OK;
    return xd_ctx_kernels(h->ctx)->copies(&launch, h->plan.copies[list], count, src, dst,
                                          xd_dtype_size(h->dtype));
}

/* Sends and receives; `mine` is what this rank has failed of, which the others are told. */
static xd_result xdi_halo_move(xd_halo *h, int sends, const void *send, int receives, void *recv,
                               xd_result mine) {
    const xdi_halo_lane *s = &h->plan.lane[sends], *r = &h->plan.lane[receives];
    xd_collective c;
    if (!h->moves) return mine;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_TO_ALL;
    c.dtype = h->dtype;
    c.send = s->direct ? send : h->send;
    c.recv = r->direct ? recv : h->recv;
    c.send_counts = s->counts;
    c.send_displacements = s->displacements;
    c.recv_counts = r->counts;
    c.recv_displacements = r->displacements;
    return xdi_comm_collective_as(h->comm, &c, mine);
}

static xd_result xdi_halo_check_arrays(const xd_halo *h, const void *part, const void *wide) {
    XD_REQUIRE(h->ctx, part || h->part_numel == 0, XD_ERROR_ARGUMENT,
               "halo: the part of %" PRId64 " elements is NULL", h->part_numel);
    XD_REQUIRE(h->ctx, wide || h->wide_numel == 0, XD_ERROR_ARGUMENT,
               "halo: the part with halo, %" PRId64 " elements, is NULL", h->wide_numel);
    return XD_OK;
}

XD_API xd_result xd_halo_exchange(xd_halo *halo, const void *part, void *wide) {
    XDI_LIVE(xd_halo, halo);
    XDI_GIVEN(halo ? halo->ctx : NULL, halo);
    xd_result result = xdi_halo_check_arrays(halo, part, wide);
    if (result == XD_OK) result = xdi_halo_run_copies(halo, XDI_HALO_PACK, part, halo->send);
    XD_TRY(xdi_halo_move(halo, XDI_HALO_SEND, part, XDI_HALO_RECV, wide, result));
    XD_TRY(xdi_halo_run_copies(halo, XDI_HALO_LOCAL, part, wide));
    XD_TRY(xdi_halo_run_copies(halo, XDI_HALO_ZEROS, halo->zero, wide));
    return xdi_halo_run_copies(halo, XDI_HALO_UNPACK, halo->recv, wide);
}

static xd_result xdi_halo_check_sums(const xd_halo *h) {
    XD_REQUIRE(h->ctx, xd_reduce_supports(h->dtype, XD_SUM), XD_ERROR_DTYPE,
               "halo: %s has no sums for a backward", xd_dtype_name(h->dtype));
    XD_REQUIRE(
        h->ctx,
        h->gradient == XD_HALO_COMPLETE || !xd_dtype_is_floating(h->dtype) ||
            xd_ctx_settings(h->ctx)->reduction != XD_REDUCTION_INVARIANT,
        XD_ERROR_UNSUPPORTED,
        "halo: in INVARIANT mode a gradient of %s must be COMPLETE: sums of PARTIAL ones depend on the cut",
        xd_dtype_name(h->dtype));
    return XD_OK;
}

/* Every sum, over the first of its terms. */
static xd_result xdi_halo_add(xd_halo *h) {
    const size_t size = xd_dtype_size(h->dtype);
    for (int i = 0; i < h->plan.sum_count; i++) {
        const xdi_halo_sum *sum = &h->plan.sums[i];
        char *first = (char *)h->terms + (size_t)sum->at * size;
        for (int k = 0; k < sum->terms; k++) h->pieces[k] = first + (size_t)(k * sum->count) * size;
        XD_TRY(xd_reduce_pieces(h->ctx, first, h->pieces, sum->terms, sum->count, h->dtype, XD_SUM));
    }
    return XD_OK;
}

XD_API xd_result xd_halo_exchange_backward(xd_halo *halo, const void *wide, void *part) {
    XDI_LIVE(xd_halo, halo);
    XDI_GIVEN(halo ? halo->ctx : NULL, halo);
    XD_TRY(xdi_halo_check_sums(halo)); /* the same on every rank */
    xd_result result = xdi_halo_check_arrays(halo, part, wide);
    if (result == XD_OK) result = xdi_halo_run_copies(halo, XDI_HALO_BACK_PACK, wide, halo->send);
    XD_TRY(xdi_halo_move(halo, XDI_HALO_BACK_SEND, wide, XDI_HALO_BACK_RECV, NULL, result));
    XD_TRY(xdi_halo_run_copies(halo, XDI_HALO_BACK_OWN, wide, part));
    XD_TRY(xdi_halo_run_copies(halo, XDI_HALO_BACK_LOCAL, wide, halo->terms));
    XD_TRY(xdi_halo_run_copies(halo, XDI_HALO_BACK_RECEIVED, halo->recv, halo->terms));
    XD_TRY(xdi_halo_add(halo));
    return xdi_halo_run_copies(halo, XDI_HALO_BACK_SUMS, halo->terms, part);
}
