#ifndef XDI_MODEL_PASS_H
#define XDI_MODEL_PASS_H

#include "model/model.h"

/* The caller's loop over a model: it opens a block before it computes with it and closes it afterwards. What it computes, and
 * in which order, is its own; a wrapper (model/parallel.h) sees to it that between begin and end the block's weights are
 * whole on this rank, and that its gradients go where they are summed. */

/* What the caller is about to do with a block. */
typedef enum xd_pass_kind {
    XD_PASS_FORWARD = 0, /* a backward of this leaf follows later; several forwards may be before it */
    XD_PASS_BACKWARD,
    XD_PASS_RECOMPUTE, /* the forward again, right before or inside the backward */
    XD_PASS_INFERENCE  /* a forward that no backward follows */
} xd_pass_kind;

/* One pass. Passed by value: (xd_pass){ XD_PASS_BACKWARD, .leaf = 2 }. */
typedef struct xd_pass {
    xd_pass_kind kind;
    int64_t leaf; /* BACKWARD: which of this rank's leaves of the step, 0 first, ascending for each block,
                   * and in turn for blocks that are summed together where leaves are kept apart, see
                   * parallel.h */
    bool more;    /* BACKWARD: the block will be opened again for a backward of this leaf */
} xd_pass;

/* The memory of an open block. Arrays have an entry for each of its own weights, buffers and ties, in the order in which they
 * were added; those of its children are in the children's views. Valid until xd_block_end. */
typedef struct xd_block_view {
    int64_t count;
    void *const *values;    /* [count]; each dense, of the size that its desc says */
    void *const *gradients; /* [count]; BACKWARD: zero when the leaf's first backward begins; add to them.
                             * NULL for what is not trained, and all NULL in other passes and for leaves
                             * beyond this rank's own (xd_parallel_leaf) */
    const xd_dtype *value_dtypes;    /* [count]; of the weight's desc, or the wrapper's view_dtype */
    const xd_dtype *gradient_dtypes; /* [count]; NONE where a gradient is NULL */
} xd_block_view;

/* Opens a block. A parent may stay open around its children; a block may be open several times at once.
 *
 *   view    out; untouched on failure
 *
 * Collective over the data group when the model is sharded by xd_fsdp_create, with the same blocks and passes in the same
 * order on all its ranks: for `opened` leaves (xd_parallel_leaves), of which a rank computes its own. Of units beside each other
 * one is open at a time, and one more for each that is gathered ahead; a group of one rank refuses the others too. Local
 * otherwise. Without a wrapper FORWARD, RECOMPUTE and INFERENCE show the model's own storage. Allocates nothing.
 * Errors: STATE (no storage, or a backward without a wrapper; outside of a step; a leaf that is not the next one, with both
 * numbers; a leaf while another block that is summed together with this one has not ended one before, where leaves are kept apart,
 * naming both leaves and both blocks; more units open at once than were planned, naming both blocks), ARGUMENT (an unknown
 * pass; a leaf that this rank does not have), those of xd_all_gather. */
XD_API xd_result xd_block_begin(xd_block *block, xd_pass pass, xd_block_view *view);

/* Closes what the last xd_block_begin of this block opened. After the last backward of a leaf the gradients are taken as they
 * are. Collective as above, and where a queue of DDP begins sums (xd_ddp_desc.reductions). Errors: STATE for a block that
 * is not open, and for a second end of a leaf's last backward, with the leaf; those of the reductions. */
XD_API xd_result xd_block_end(xd_block *block);

/* Instead of a backward: the block has no part in a leaf, and adds nothing to the gradients of its weights. Weights that are
 * skipped in all leaves have none in this step: see xd_parallel_reduce. Nothing is gathered.
 *
 * Collective as above. Errors: as xd_block_begin with XD_PASS_BACKWARD. */
XD_API xd_result xd_block_skip(xd_block *block, int64_t leaf);

#endif
