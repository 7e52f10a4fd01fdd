/* A group of one: every collective copies this rank's block to itself. */

#include "comm/internal.h"
#include "kernel/kernels.h"

#include <string.h>

static const int xdi_self_world_rank = 0;

static xd_result xdi_self_control(xd_transport *transport, const xd_control *mine, const xd_collective *next,
                                  xd_control *all, double deadline) {
    (void)transport, (void)next, (void)deadline;
    all[0] = *mine;
    return XD_OK;
}

/* Offset and length of the block on both sides, and the copy. */
static xd_result xdi_self_execute(xd_transport *transport, const xd_collective *c, double deadline) {
    (void)deadline;
    if (c->kind == XD_COLLECTIVE_BROADCAST) return XD_OK;
    const bool scatters = c->kind == XD_COLLECTIVE_REDUCE_SCATTER || c->kind == XD_COLLECTIVE_ALL_TO_ALL ||
                          c->kind == XD_COLLECTIVE_SCATTER;
    const bool gathers = c->kind == XD_COLLECTIVE_ALL_GATHER || c->kind == XD_COLLECTIVE_ALL_TO_ALL ||
                         c->kind == XD_COLLECTIVE_GATHER;
    const size_t size = xd_dtype_size(c->dtype);
    const size_t from =
        scatters ? (size_t)xdi_comm_offset(c->send_counts, c->send_displacements, 0) * size : 0;
    const size_t to = gathers ? (size_t)xdi_comm_offset(c->recv_counts, c->recv_displacements, 0) * size : 0;
    const int64_t count = scatters ? c->send_counts[0] : gathers ? c->recv_counts[0] : c->count;
    if (count == 0) return XD_OK;
    const void *send = (const char *)c->send + from;
    void *recv = (char *)c->recv + to;
    const xd_kernels *kernels = xd_ctx_kernels(transport->ctx);
    const bool theirs =
        kernels->memory.owns(transport->ctx, recv); /* a context on a device may move host memory too */
    const xd_reduce_kernels *reduce = &(theirs ? kernels : xd_ctx_host_kernels(transport->ctx))->reduce;
    xd_launch launch = xd_ctx_launch(transport->ctx);
    if (c->stream) launch.stream = c->stream;
    if (c->leaves.total)
        return reduce->leaves(&launch, recv, &send, &c->leaves, 1, count, count, c->dtype, c->op);
    if (send == recv) return XD_OK;
    if (theirs) return kernels->memory.copy(&launch, recv, send, (size_t)count * size, XD_COPY_ON_DEVICE);
    memcpy(recv, send, (size_t)count * size);
    return XD_OK;
}

static xd_result xdi_self_create(xd_ctx *ctx, xd_transport **out);

static xd_result xdi_self_split(xd_transport *transport, const int *members, int size, int rank,
                                double deadline, xd_transport **out) {
    (void)members, (void)size, (void)rank, (void)deadline;
    return xdi_self_create(transport->ctx, out);
}

static xd_result xdi_self_fork(xd_transport *transport, xd_ctx *ctx, double deadline, xd_transport **out) {
    (void)deadline;
    const xd_result result = xdi_self_create(ctx, out);
    return result == XD_OK ? XD_OK : xdi_ctx_adopt(transport->ctx, xd_last_error(ctx));
}

static size_t xdi_self_fork_bytes(const xd_transport *transport) {
    return sizeof *transport;
}

static void xdi_self_abort(xd_transport *transport) {
    (void)transport;
}

static void xdi_self_destroy(xd_transport *transport) {
    xd_release(transport->ctx, transport);
}

static const xd_transport_ops xdi_self_ops = { "self",
                                               xdi_self_control,
                                               xdi_self_execute,
                                               xdi_self_split,
                                               xdi_self_abort,
                                               xdi_self_destroy,
                                               NULL,
                                               true,
                                               NULL,
                                               xdi_self_fork,
                                               NULL,
                                               xdi_self_fork_bytes,
                                               false,
                                               NULL,
                                               NULL,
                                               NULL };

static xd_result xdi_self_create(xd_ctx *ctx, xd_transport **out) {
    xd_transport *self = (xd_transport *)xd_allocate(ctx, sizeof *self);
    XD_REQUIRE(ctx, self, XD_ERROR_MEMORY, "no room for a group of one rank");
    self->ops = &xdi_self_ops;
    self->ctx = ctx;
    self->size = 1;
    self->world_ranks = &xdi_self_world_rank;
    *out = self;
    return XD_OK;
}

XD_API xd_result xd_comm_self(xd_ctx *ctx, xd_comm **out) {
    XDI_GIVEN(ctx, ctx, out);
    xd_transport *transport = NULL;
    XD_TRY(xdi_self_create(ctx, &transport));
    return xd_comm_create(ctx, transport, out);
}
