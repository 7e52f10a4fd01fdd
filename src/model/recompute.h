#ifndef XDI_MODEL_RECOMPUTE_H
#define XDI_MODEL_RECOMPUTE_H

#include "model/pass.h"

/* Blocks whose forward runs again in their backward, instead of keeping what it computed: of a block that says so
 * (xd_block_desc.recompute), only the input is kept from one to the other, in memory that is planned beforehand. What the
 * forward computes stays the caller's: since no two blocks need theirs at once, they may share it.
 *
 *     xd_inputs_create(model, &(xd_inputs_desc){ .bytes = rows * hidden * 4 }, &inputs);
 *     forward of leaf k:    xd_block_begin(block, (xd_pass){ XD_PASS_FORWARD }, &view);
 *                           xd_inputs_keep(block, k, x, bytes);   ... x -> y ...
 *                           xd_block_end(block);
 *     backward of leaf k:   xd_block_begin(block, (xd_pass){ XD_PASS_BACKWARD, .leaf = k }, &view);
 *                           xd_recompute(block, k, forward);      ... d_y -> d_x, gradients ...
 *                           xd_block_end(block);
 *
 * The second forward sees the weights of the backward that is open: the same values, gathered once for both. */
typedef struct xd_inputs xd_inputs;

/* Settings. Zero is the default of every field but bytes. */
typedef struct xd_inputs_desc {
    size_t bytes;  /* required; of the largest input */
    int in_flight; /* forwards of one block whose backward has not come; 0 -> 1 */
} xd_inputs_desc;

/* What xd_inputs_create takes. Of a sealed model; zero for one without such blocks, and half of SIZE_MAX
 * for more than can be counted. Local. */
XD_API xd_memory_bytes xd_inputs_bytes(const xd_model *model, const xd_inputs_desc *desc);

/* Takes memory for the inputs of all blocks with `recompute`. One for a model at a time, wrapped or not; destroyed before it.
 *
 * Local. Memory: that of the call above, at once; nothing later. Errors: ARGUMENT (bytes is 0, in_flight negative, no block has
 * `recompute`), STATE (not sealed; the model has inputs already), MEMORY. */
XD_API xd_result xd_inputs_create(xd_model *model, const xd_inputs_desc *desc, xd_inputs **out);

/* Frees them. NULL is fine. */
XD_API void xd_inputs_destroy(xd_inputs *inputs);

/* Copies the input of a block that is open for a FORWARD, until xd_recompute of this leaf or, under a wrapper, the end of the step.
 *
 *   leaf    the number that the backward will have
 *   input   [bytes] in memory of the context's device; overwritten afterwards as the caller likes
 *
 * Local. Errors, naming block and leaf: STATE (no inputs; a block without `recompute`, not open, or open for another pass;
 * this leaf's input is kept already; in_flight are kept, naming one of them), ARGUMENT (more bytes than planned, with both;
 * leaf negative). */
XD_API xd_result xd_inputs_keep(xd_block *block, int64_t leaf, const void *input, size_t bytes);

/* A forward to be run again: computes from the input what the backward needs. `view` has the block's values and no gradients; the
 * input is the library's and is valid during the call. Children are opened by the caller's forward, as XD_PASS_RECOMPUTE. */
typedef struct xd_forward {
    xd_result (*run)(void *user, const xd_block_view *view, const void *input);
    void *user;
} xd_forward;

/* Runs a block's forward again on the input that was kept for this leaf, whose place is then free. Under a wrapper inside the
 * block's backward of the leaf, whose gathered weights it sees; without one, anywhere that the block is not
 * open.
 *
 * Local, as far as `forward` is. Allocates nothing. Errors, naming block and leaf: STATE (as above; no input of this leaf is
 * kept, with the last one that was and its block; the backward that is open is of another leaf, or none is), and what
 * `forward` returns. */
XD_API xd_result xd_recompute(xd_block *block, int64_t leaf, xd_forward forward);

#endif
