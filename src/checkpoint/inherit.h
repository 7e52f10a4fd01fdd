#ifndef XDI_CHECKPOINT_INHERIT_H
#define XDI_CHECKPOINT_INHERIT_H

#include "checkpoint/checkpoint.h"

/* Source and destination, with the same names, types and shapes on all ranks.
 *
 *   from       [network_count] what this rank held, of any world and cut; parts of two ranks are equal or disjoint, `replica` is
 *              not read. NULL -> nothing
 *   networks   [network_count] required; over comm, in other memory
 *   step       of `from`: optimizer steps and averages done
 *   state      of that step: a JSON object, at most 48 levels; NULL -> none */
typedef struct xd_state_inherit_desc {
    const xd_checkpoint_network *from, *networks;
    int network_count;
    int64_t step;
    const char *state;
    size_t staging_bytes; /* of tensors, the same on all ranks; 0 -> 16 MiB */
} xd_state_inherit_desc;

/* Recovers state from surviving ranks (docs/checkpoints.md): the highest step of which the ranks at that step hold all elements.
 * Takes weights, buffers, optimizers, averages, as xd_checkpoint_load. Collective. Keeps bits.
 *
 *   step    out
 *   state   of the lowest rank with that step, NUL-terminated, for xd_release; NULL if none; may be NULL
 *
 * Nothing changes before all ranks agree.
 * Errors: ARGUMENT (PEER on others), MISMATCH (between ranks, or `from` and `networks`), MISSING (no complete step), STATE
 * (kind of optimizer), FORMAT (state), MEMORY. */
XD_API xd_result xd_state_inherit(xd_comm *comm, const xd_state_inherit_desc *desc, int64_t *step,
                                  char **state);

#endif
