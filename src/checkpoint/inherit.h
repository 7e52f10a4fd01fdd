#ifndef XDI_CHECKPOINT_INHERIT_H
#define XDI_CHECKPOINT_INHERIT_H

#include "checkpoint/checkpoint.h"

/* After ranks were lost: the state that those who are left still have in memory becomes that of what they have made over their new
 * world, without a file.
 *
 *     xd_comm_shrink(broken, 0.0, &world);                  // the old networks are still there
 *     ... wrap the model, make optimizer and averages over `world` ...
 *     result = xd_state_inherit(world, &desc, &step, NULL);
 *     if (result == XD_ERROR_MISSING) result = xd_checkpoint_load(world, ...);
 *     xd_parallel_publish(parallel);
 *
 * Everything is there where ranks hold copies: under DDP in every rank, under HSDP, or with copies along any other axis, as long as
 * somebody has each element. Ranks need not have done the same steps: the one that was lost may have kept some from their last. */

/* What ranks have, and where it goes: the same tensors, whose names, types and shapes are the same on all ranks. Zero is the
 * default of the fields that are not required.
 *
 *   from      [network_count] what this rank held before, of any world and in any cut; who speaks for copies does not matter. Parts
 *             of two ranks are the same elements of a tensor or have none in common. NULL -> it has nothing
 *   networks  [network_count] required; where everything goes, in its cut over comm, in memory of its own
 *   step      optimizer steps that `from` has done, counted after each one: a step, with its averages, is local, and so done or
 *             not done. Ignored without `from`
 *   state     the caller's own of that step: a JSON object of at most 48 levels, which is handed back; NULL -> none */
typedef struct xd_state_inherit_desc {
    const xd_checkpoint_network *from, *networks;
    int network_count;
    int64_t step;
    const char *state;
    size_t staging_bytes; /* of tensors in memory of this rank at once, the same on all ranks; 0 -> 16 MiB */
} xd_state_inherit_desc;

/* Takes the highest step of which every element is held by some rank that has done exactly so many: weights, buffers, states of
 * optimizers with their step counts and learning rates, averages with their counters. Bits are kept. What changes beside the
 * optimizer's step, as buffers do in a forward pass, must be of that step too.
 *
 *   step    that it is
 *   state   of the lowest rank with that step, NUL-terminated, to be released with xd_release; NULL when it has none; may be NULL
 *
 * Collective. Memory: staging_bytes, or the largest tensor when that is less, 17 KiB and 8 bytes a part for each rank, 70 KiB, and
 * lists of the tensors. What a rank has itself it copies, the rest crosses once. Nothing is changed before all ranks have agreed.
 * Errors, on every rank, except that one with wrong arguments returns its own and the others PEER: ARGUMENT; MISMATCH when ranks
 * pass other lists, or `from` is another than `networks`; MISSING when no step is whole, and then a file has to do; STATE when an
 * optimizer is of another kind; FORMAT for a state that is no JSON object; MEMORY. */
XD_API xd_result xd_state_inherit(xd_comm *comm, const xd_state_inherit_desc *desc, int64_t *step,
                                  char **state);

#endif
