#ifndef XDI_CHECKPOINT_INHERIT_H
#define XDI_CHECKPOINT_INHERIT_H

#include "checkpoint/checkpoint.h"

/* Recovers training state from the memory of surviving ranks, without a file: docs/checkpoints.md.
 *
 *     xd_comm_shrink(broken, 0.0, &world);                  // old networks still exist
 *     ... wrap the model, make optimizer and averages over `world` ...
 *     result = xd_state_inherit(world, &desc, &step, NULL);
 *     if (result == XD_ERROR_MISSING) result = xd_checkpoint_load(world, ...);
 *     xd_parallel_publish(parallel); */

/* Source and destination: tensors of the same names, types and shapes on all ranks.
 *
 *   from      [network_count] what this rank held, of any world and cut; `replica` is not read. Parts of two ranks are equal or
 *             disjoint. NULL -> nothing
 *   networks  [network_count] required; destinations over comm, in memory of their own
 *   step      optimizer steps that `from` has done, with averages. Ignored without `from`
 *   state     of that step: a JSON object of at most 48 levels; NULL -> none */
typedef struct xd_state_inherit_desc {
    const xd_checkpoint_network *from, *networks;
    int network_count;
    int64_t step;
    const char *state;
    size_t staging_bytes; /* of tensors in memory at once, the same on all ranks; 0 -> 16 MiB */
} xd_state_inherit_desc;

/* Recovers the highest step of which the ranks at that step hold all elements: weights, buffers, optimizers (states, step
 * counts, learning rates), averages (with counters). Collective. Keeps bits.
 *
 *   step    the step
 *   state   of the lowest rank with that step, NUL-terminated, for xd_release; NULL when it has none; may be NULL
 *
 * Nothing changes before all ranks agree.
 * Errors: ARGUMENT (PEER on the others), MISMATCH (between ranks, or `from` and `networks`), MISSING (no complete step), STATE
 * (another kind of optimizer), FORMAT (state), MEMORY. */
XD_API xd_result xd_state_inherit(xd_comm *comm, const xd_state_inherit_desc *desc, int64_t *step,
                                  char **state);

#endif
