#ifndef XDI_TENSOR_REDISTRIBUTE_INTERNAL_H
#define XDI_TENSOR_REDISTRIBUTE_INTERNAL_H

#include "base/internal.h"
#include "tensor/redistribute.h"

/* Describes a plan. Read during the call only. */
typedef struct xdi_redistribution_desc {
    const xd_layout *from, *to; /* same global shape; must outlive the plan */
    xd_dtype dtype;
    int ranks;               /* of the world */
    int rank;                /* the plan's rank */
    const xd_region *window; /* these indices only, destination dense over its part; NULL -> all */
    const int64_t *from_stride, *to_stride; /* [ndim] elements, local parts; NULL -> dense */
} xdi_redistribution_desc;

/* One rank's plan: immutable, reusable. */
typedef struct xdi_redistribution xdi_redistribution;

/* Computes the plan of any rank. Local and pure.
 * Errors: ARGUMENT (dtype, ranks), SHAPE (shapes differ; more than 2^63 bytes), TOPOLOGY (mesh ranks outside the world),
 * DTYPE (cannot be reduced), UNSUPPORTED (shard or another op made partial; partial on another mesh; float sum in INVARIANT
 * mode), MEMORY. */
XD_PRIVATE xd_result xdi_redistribution_create(xd_ctx *ctx, const xdi_redistribution_desc *desc,
                                               xdi_redistribution **out);

/* Frees it. Local. NULL is fine. */
XD_PRIVATE void xdi_redistribution_destroy(xdi_redistribution *plan);

/* Arguments of one all-to-all over the world. Blocks are in rank order without gaps. */
typedef struct xdi_redistribution_step {
    const int64_t *send_counts, *send_displacements; /* [ranks] elements; 0 for this rank */
    const int64_t *recv_counts, *recv_displacements;
    int64_t send_count, recv_count; /* their sums */
    int64_t recv_capacity;          /* elements of recv; own blocks of a reduction come last */
    int64_t copy_count;             /* strided blocks to pack, unpack and move here */
    int64_t total_count;            /* elements moved between ranks, over all ranks; 0 -> no communication */
    bool reduces;                   /* partial values are reduced on arrival */
} xdi_redistribution_step;

/* Number of steps. Local. */
XD_PRIVATE int xdi_redistribution_step_count(const xdi_redistribution *plan);
/* Returns step `step`; all zero out of range. Local. */
XD_PRIVATE xdi_redistribution_step xdi_redistribution_step_at(const xdi_redistribution *plan, int step);

/* Payload bytes that this rank sends over all steps, as the transport counts them. */
XD_PRIVATE uint64_t xdi_redistribution_bytes_sent(const xdi_redistribution *plan);

/* Extents of this rank's destination: `to`, or its part of the window. */
XD_PRIVATE void xdi_redistribution_shape(const xdi_redistribution *plan, int64_t *shape);

/* Compares plans over the world. mine: XD_OK, or the error of xdi_redistribution_create (plan is then NULL). Collective.
 * Errors: PEER, MISMATCH. */
XD_PRIVATE xd_result xdi_redistribution_agree(const xdi_redistribution *plan, xd_comm *world, xd_result mine);

/* Executes a plan. Source, destination and the plan's buffers are device memory; source and destination do not overlap. A
 * rank outside a layout passes NULL for it. Collective over the world. Allocates nothing. Errors: as xd_collective_run; the
 * destination is undefined if data had moved. */
XD_PRIVATE xd_result xdi_redistribution_execute(xdi_redistribution *plan, xd_comm *world, const void *source,
                                                void *destination);

/* Run the two local halves of a step, before and after its all-to-all. Step 0 reads `source`, later ones plan buffers. send and recv
 * hold send_count and recv_capacity elements; a reduction uses recv as scratch. Errors: ARGUMENT (step), and errors of the
 * device. */
XD_PRIVATE xd_result xdi_redistribution_pack(const xdi_redistribution *plan, int step, const void *source,
                                             void *send);
XD_PRIVATE xd_result xdi_redistribution_unpack(const xdi_redistribution *plan, int step, const void *source,
                                               void *recv, void *destination);

#endif
