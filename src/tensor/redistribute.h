#ifndef XDI_TENSOR_REDISTRIBUTE_H
#define XDI_TENSOR_REDISTRIBUTE_H

#include "tensor/tensor.h"

/* Moves a tensor from one layout to another, on the same mesh or on two meshes of one world.
 *
 * A plan is a pure function of the two layouts. Each rank copies what it needs from its own part where it can, else
 * it receives it from one of the ranks that hold it, the replicas in turn; nothing passes through a third rank and
 * padding is never sent. A partial value is reduced at its destination, in the order of the ranks, by the
 * arithmetic of xd_reduce_pieces; or, when that moves fewer bytes, in two steps: reduce into equal parts, then
 * gather. */

/* What to build a plan from. Read during the call only. */
typedef struct xd_redistribution_desc {
    const xd_layout *from, *to; /* of the same global shape; borrowed: they must outlive the plan */
    xd_dtype dtype;
    int ranks;               /* of the world */
    int rank;                /* whose part of the plan this is */
    const xd_region *window; /* only these indices; the destination is dense over its part; NULL -> all */
    const int64_t *from_stride, *to_stride; /* [ndim] of the local parts, in elements; NULL -> dense */
} xd_redistribution_desc;

/* The redistribution as planned for one rank: immutable, reusable. */
typedef struct xd_redistribution xd_redistribution;

/* Local and pure: any rank's plan can be computed on any rank.
 * Errors: ARGUMENT (dtype, ranks), SHAPE (the layouts' shapes differ; more than 2^63 bytes), TOPOLOGY (a mesh has ranks outside
 * the world), DTYPE (cannot be reduced), UNSUPPORTED (a shard or another partial op made partial; partial on
 * another mesh; a float sum in INVARIANT mode, which needs leaves), MEMORY. */
XD_API xd_result xd_redistribution_create(xd_ctx *ctx, const xd_redistribution_desc *desc,
                                          xd_redistribution **out);

/* Frees it. Local. NULL is fine. */
XD_API void xd_redistribution_destroy(xd_redistribution *plan);

/* One exchange of a plan: the arguments of an all-to-all over the world. Blocks lie in rank order without
 * gaps. */
typedef struct xd_redistribution_step {
    const int64_t *send_counts, *send_displacements; /* [ranks] elements; this rank's own count is 0 */
    const int64_t *recv_counts, *recv_displacements;
    int64_t send_count, recv_count; /* their sums */
    int64_t recv_capacity; /* elements of the recv buffer: this rank's own blocks of a reduction come last
                            * in it */
    int64_t copy_count;    /* strided blocks this rank packs, unpacks and moves locally */
    int64_t total_count; /* elements that move between ranks, all ranks together; 0 -> no rank communicates */
    bool reduces;        /* partial values are reduced on arrival */
} xd_redistribution_step;

/* How many steps the plan has, and step `index` of them. Local. */
XD_API int xd_redistribution_step_count(const xd_redistribution *plan);
/* Step `step` of the plan; all zero for a number that no step has. Local. */
XD_API xd_redistribution_step xd_redistribution_step_at(const xd_redistribution *plan, int step);

/* Payload bytes this rank sends to others, over all steps: what the transport will count. */
XD_API uint64_t xd_redistribution_bytes_sent(const xd_redistribution *plan);

/* Extents of the destination on this rank: those of `to`, or of its part of the window. */
XD_API void xd_redistribution_shape(const xd_redistribution *plan, int64_t *shape);

/* Compares the plan's metadata over the world. mine: XD_OK, or the error xd_redistribution_create gave (plan is then
 * NULL). Collective. Errors: PEER, MISMATCH. */
XD_API xd_result xd_redistribution_agree(const xd_redistribution *plan, xd_comm *world, xd_result mine);

/* Executes a plan; source and destination must not overlap. A rank outside a layout passes NULL for it. Data and
 * the plan's own buffers are in memory of the context's device.
 * Collective over the world. Allocates nothing. Errors: those of xd_collective_run; the destination is then
 * undefined only where the error came after data had moved. */
XD_API xd_result xd_redistribution_execute(xd_redistribution *plan, xd_comm *world, const void *source,
                                           void *destination);

/* The two local halves of a step, for programs that move the bytes by other means. `source` is the plan's
 * source for step 0; later steps read buffers of the plan. send and recv hold send_count and recv_capacity
 * elements; a step that reduces uses recv as scratch. Errors: ARGUMENT for a step that the plan lacks, and those of the
 * context's device. */
XD_API xd_result xd_redistribution_pack(const xd_redistribution *plan, int step, const void *source,
                                        void *send);
XD_API xd_result xd_redistribution_unpack(const xd_redistribution *plan, int step, const void *source,
                                          void *recv, void *destination);

/* Plan, agree and execute in one call. from and to are views with layouts; a rank outside the
 * source's layout passes the view that xd_tensor_view gives it. Collective over the world. Errors: as above;
 * SHAPE or DTYPE when a view does not fit its layout. `to` is untouched unless the exchange itself fails. */
XD_API xd_result xd_redistribute(xd_comm *world, const xd_tensor *from, const xd_tensor *to);

/* The whole tensor, dense, on every rank of the tensor's mesh; full holds xd_layout_numel elements (NULL
 * outside the mesh). Partial values are reduced. Collective over the world. Errors: as xd_redistribute. */
XD_API xd_result xd_tensor_full(xd_comm *world, const xd_tensor *tensor, void *full);

/* The whole tensor, or a window of it, dense, on one rank of the world.
 *
 *   window   [ndim] the indices of each dimension, the same on every rank; NULL -> all
 *   out      on root: as many elements as the window has; NULL elsewhere
 *
 * Ranks outside the tensor's mesh call too, with their empty view. Collective over the world. Takes staging
 * memory on root for what arrives; gather windows to bound it. Errors: as xd_redistribute; ARGUMENT for a
 * window outside the shape. */
XD_API xd_result xd_tensor_gather(xd_comm *world, const xd_tensor *tensor, const xd_interval *window,
                                  int root, void *out);

#endif
