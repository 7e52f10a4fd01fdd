#ifndef XDI_MODEL_PARALLEL_INTERNAL_H
#define XDI_MODEL_PARALLEL_INTERNAL_H

#include "base/internal.h"
#include "model/describe_internal.h"
#include "model/parallel.h"
#include "model/place_internal.h"
#include "model/step_internal.h"
#include "model/store_internal.h"

/* A wrapper: who this rank is in it, what it keeps, and where it is in its step. */
struct xd_parallel {
    xdi_place place;
    xdi_store store;
    xdi_step step;
    struct xd_parallel *experts; /* the wrapper of experts inside that of the others; NULL -> none */
};

/* parallel_place.c: an empty wrapper at a place; NULL without memory. */
XD_PRIVATE xd_parallel *xdi_parallel_at(const xdi_place *place);
/* parallel_place.c: the wrapper of a block; NULL without one. */
XD_PRIVATE xd_parallel *xdi_block_parallel(const xd_block *block);

/* parallel_experts.c: the wrapper of experts of one that has its place among the data ranks, as a rank of theirs and, where
 * that is not NULL, of a group; and one that stands among `ranks` of them without any group. None where the model has no
 * experts. On failure the wrapper is to be destroyed. */
XD_PRIVATE xd_result xdi_experts_open(xd_parallel *p, const xd_fsdp_desc *d);
XD_PRIVATE xd_result xdi_experts_place(xd_parallel *p, const xd_fsdp_desc *d, int ranks);

/* parallel.c: lays everything out, without memory and other ranks; then the experts. */
XD_PRIVATE xd_result xdi_parallel_lay(xd_parallel *p, const xd_fsdp_desc *d);
XD_PRIVATE xd_result xdi_experts_lay(xd_parallel *p, const xd_fsdp_desc *d);

/* parallel_gradient.c: wrappers whose micro-batches are computed side by side, [count] with NULL for none. Where ranks
 * have different numbers of them and some wrapper gathers for those that a rank does not have, or rows come to its
 * experts for them, DDP begins its sums in xd_parallel_reduce: after a rank's own last one they would come before that
 * here, and behind it on other ranks. Local. */
XD_PRIVATE void xdi_gradient_align(xd_parallel *const *parallels, int count);

/* parallel.c: the micro-batches of a step that failed before its end are as if they had not been; not while a block is
 * open, or a queue has begun a sum of them. Local. */
XD_PRIVATE void xdi_parallel_drop_micro_batches(xd_parallel *p);
/* parallel.c: closes all blocks and forgets micro-batches, sums and gathered values of the step, on all data ranks alike,
 * so that it begins again. */
XD_PRIVATE void xdi_parallel_drop_step(xd_parallel *p);

/* parallel.c: what xd_parallel_reduce does over the data ranks; and its end: a step that could not be reduced is dropped,
 * one that was before stays. */
XD_PRIVATE xd_result xdi_parallel_reduce_data(xd_parallel *p);
XD_PRIVATE xd_result xdi_parallel_end_reduce(xd_parallel *p, xd_result result);

/* parallel_replicas.c: MISMATCH, with the weight, where ranks that should hold the same values do not; counts the steps,
 * and compares in some of them. Collective. */
XD_PRIVATE xd_result xdi_replicas_check(xd_parallel *p);

#endif
