#ifndef XDI_TENSOR_REDISTRIBUTE_H
#define XDI_TENSOR_REDISTRIBUTE_H

#include "tensor/tensor.h"

/* Moves a tensor between layouts on one mesh, or on two meshes of one world.
 *
 * A plan depends on the two layouts only. A rank copies from its own part if it can, or receives from a holder, replicas in
 * turn. No data passes through a third rank; padding is never sent. Partial values are reduced at the destination in rank
 * order by xd_reduce_pieces. If that moves fewer bytes, they are reduced into equal parts and gathered. */

/* Describes a plan. Read during the call only. */
typedef struct xd_redistribution_desc {
    const xd_layout *from, *to; /* same global shape; must outlive the plan */
    xd_dtype dtype;
    int ranks;               /* of the world */
    int rank;                /* the plan's rank */
    const xd_region *window; /* these indices only, destination dense over its part; NULL -> all */
    const int64_t *from_stride, *to_stride; /* [ndim] elements, local parts; NULL -> dense */
} xd_redistribution_desc;

/* One rank's plan: immutable, reusable. */
typedef struct xd_redistribution xd_redistribution;

/* Computes the plan of any rank. Local and pure.
 * Errors: ARGUMENT (dtype, ranks), SHAPE (shapes differ; more than 2^63 bytes), TOPOLOGY (mesh ranks outside the world),
 * DTYPE (cannot be reduced), UNSUPPORTED (shard or another op made partial; partial on another mesh; float sum in INVARIANT
 * mode), MEMORY. */
XD_API xd_result xd_redistribution_create(xd_ctx *ctx, const xd_redistribution_desc *desc,
                                          xd_redistribution **out);

/* Frees it. Local. NULL is fine. */
XD_API void xd_redistribution_destroy(xd_redistribution *plan);

/* Arguments of one all-to-all over the world. Blocks are in rank order without gaps. */
typedef struct xd_redistribution_step {
    const int64_t *send_counts, *send_displacements; /* [ranks] elements; 0 for this rank */
    const int64_t *recv_counts, *recv_displacements;
    int64_t send_count, recv_count; /* their sums */
    int64_t recv_capacity;          /* elements of recv; own blocks of a reduction come last */
    int64_t copy_count;             /* strided blocks to pack, unpack and move here */
    int64_t total_count;            /* elements moved between ranks, over all ranks; 0 -> no communication */
    bool reduces;                   /* partial values are reduced on arrival */
} xd_redistribution_step;

/* Number of steps. Local. */
XD_API int xd_redistribution_step_count(const xd_redistribution *plan);
/* Returns step `step`; all zero out of range. Local. */
XD_API xd_redistribution_step xd_redistribution_step_at(const xd_redistribution *plan, int step);

/* Payload bytes that this rank sends over all steps, as the transport counts them. */
XD_API uint64_t xd_redistribution_bytes_sent(const xd_redistribution *plan);

/* Extents of this rank's destination: `to`, or its part of the window. */
XD_API void xd_redistribution_shape(const xd_redistribution *plan, int64_t *shape);

/* Compares plans over the world. mine: XD_OK, or the error of xd_redistribution_create (plan is then NULL). Collective.
 * Errors: PEER, MISMATCH. */
XD_API xd_result xd_redistribution_agree(const xd_redistribution *plan, xd_comm *world, xd_result mine);

/* Executes a plan. Source, destination and the plan's buffers are device memory; source and destination do not overlap. A
 * rank outside a layout passes NULL for it. Collective over the world. Allocates nothing. Errors: as xd_collective_run; the
 * destination is undefined if data had moved. */
XD_API xd_result xd_redistribution_execute(xd_redistribution *plan, xd_comm *world, const void *source,
                                           void *destination);

/* Run the two local halves of a step, for other transports. Step 0 reads `source`, later ones plan buffers. send and recv
 * hold send_count and recv_capacity elements; a reduction uses recv as scratch. Errors: ARGUMENT (step), and errors of the
 * device. */
XD_API xd_result xd_redistribution_pack(const xd_redistribution *plan, int step, const void *source,
                                        void *send);
XD_API xd_result xd_redistribution_unpack(const xd_redistribution *plan, int step, const void *source,
                                          void *recv, void *destination);

/* Plans, agrees and executes. from and to are views with layouts; outside the source's layout pass the view of
 * xd_tensor_view. Collective over the world.
 * Errors: as above; SHAPE or DTYPE (view does not fit its layout). `to` changes only if the exchange itself fails. */
XD_API xd_result xd_redistribute(xd_comm *world, const xd_tensor *from, const xd_tensor *to);

/* Returns the whole dense tensor on every rank of its mesh, partial values reduced; full holds xd_layout_numel elements
 * (NULL outside the mesh). Collective over the world. Errors: as xd_redistribute. */
XD_API xd_result xd_tensor_full(xd_comm *world, const xd_tensor *tensor, void *full);

/* Gathers the whole tensor or a window of it, dense, on one rank.
 *
 *    window   [ndim] intervals, the same on every rank; NULL -> all
 *    out      on root: the window's elements; NULL elsewhere
 *
 * Ranks outside the mesh pass their empty view. Collective over the world. Root allocates staging for what arrives; windows
 * bound it. Errors: as xd_redistribute; ARGUMENT (window outside the shape). */
XD_API xd_result xd_tensor_gather(xd_comm *world, const xd_tensor *tensor, const xd_interval *window,
                                  int root, void *out);

#endif
