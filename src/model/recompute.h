#ifndef XDI_MODEL_RECOMPUTE_H
#define XDI_MODEL_RECOMPUTE_H

#include "model/pass.h"

/* Inputs of blocks with xd_block_desc.recompute, whose forwards run again: docs/wrappers.md. */
typedef struct xd_inputs xd_inputs;

/* Settings of xd_inputs. */
typedef struct xd_inputs_desc {
    size_t bytes;  /* required; of the largest input */
    int in_flight; /* forwards of one block without their backward; 0 -> 1 */
} xd_inputs_desc;

/* Allocates memory for inputs of all blocks with `recompute`. One for a model, wrapped or not. Local.
 * Errors: ARGUMENT (bytes; in_flight; no such block), STATE (not sealed; the model has inputs), MEMORY. */
XD_API xd_result xd_inputs_create(xd_model *model, const xd_inputs_desc *desc, xd_inputs **out);

/* Frees the inputs. */
XD_API void xd_inputs_destroy(xd_inputs *inputs);

/* Copies the input of a block that is open for a FORWARD. Keeps it until xd_recompute or, under a wrapper, the end of
 * the step. Local.
 *
 *   micro_batch   that of the backward
 *   input         [bytes] on the context's device
 *
 * Errors: STATE (no inputs; no `recompute`; not open for a FORWARD; kept already; in_flight inputs are kept), ARGUMENT
 * (bytes; micro_batch). */
XD_API xd_result xd_inputs_keep(xd_block *block, int64_t micro_batch, const void *input, size_t bytes);

/* A forward to run again; its arguments are valid during the call. Opens children as XD_PASS_RECOMPUTE. */
typedef struct xd_forward {
    xd_result (*run)(void *user, const xd_block_view *view, const void *input);
    void *user;
} xd_forward;

/* Runs a block's forward again on the kept input and frees its place. Under a wrapper call it inside the block's
 * backward, otherwise while the block is not open. Local, if `forward` is. Allocates nothing.
 * Errors: STATE (as xd_inputs_keep; no such input; not in its backward), ARGUMENT (micro_batch), those of `forward`. */
XD_API xd_result xd_recompute(xd_block *block, int64_t micro_batch, xd_forward forward);

#endif
