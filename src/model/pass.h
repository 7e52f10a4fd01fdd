#ifndef XDI_MODEL_PASS_H
#define XDI_MODEL_PASS_H

#include "model/model.h"

/* Brackets around the caller's passes. */

/* What the caller does with an open block. */
typedef enum xd_pass_kind {
    XD_PASS_FORWARD = 0, /* a backward follows */
    XD_PASS_BACKWARD,
    XD_PASS_RECOMPUTE, /* the forward again */
    XD_PASS_INFERENCE  /* no backward follows */
} xd_pass_kind;

/* One pass. */
typedef struct xd_pass {
    xd_pass_kind kind;
    int64_t micro_batch; /* BACKWARD: of this rank, from 0, ascending in each block (docs/wrappers.md) */
    bool more;           /* BACKWARD: another backward of this micro-batch follows */
} xd_pass;

/* An open block's own weights, buffers and ties, as they were added. Valid until xd_block_end. */
typedef struct xd_block_view {
    int64_t count;
    void *const *values; /* [count]; dense */
    /* [count]; BACKWARD: add to them, zero at first. NULL for what is not trained, in other passes, and beyond this
     * rank's micro-batches */
    void *const *gradients;
    const xd_dtype *value_dtypes;    /* [count]; the desc's, or the wrapper's view_dtype */
    const xd_dtype *gradient_dtypes; /* [count]; NONE where a gradient is NULL */
} xd_block_view;

/* Opens a block. It may be open already, and so may its parents.
 *
 * Under FSDP collective over the data group, in one order, for the `opened` micro-batches of xd_parallel_micro_batches.
 * Local otherwise. Allocates nothing. Errors: STATE (no storage; a backward without a wrapper; outside of a step; not
 * the next micro-batch; ahead of blocks summed with it; too many units open), ARGUMENT (pass; micro-batch), those of
 * xd_all_gather. */
XD_API xd_result xd_block_begin(xd_block *block, xd_pass pass, xd_block_view *view);

/* Closes the last xd_block_begin of a block. The last backward of a micro-batch hands over the gradients. Collective as
 * xd_block_begin, and if it starts a sum of DDP. Errors: STATE (not open; a micro-batch ended twice), those of the
 * reductions. */
XD_API xd_result xd_block_end(xd_block *block);

/* Replaces a block's backward of a micro-batch: adds nothing, gathers nothing. Collective and errors as xd_block_begin
 * with XD_PASS_BACKWARD. */
XD_API xd_result xd_block_skip(xd_block *block, int64_t micro_batch);

#endif
