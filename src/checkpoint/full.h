#ifndef XDI_CHECKPOINT_FULL_H
#define XDI_CHECKPOINT_FULL_H

#include "checkpoint/checkpoint.h"

/* Moves the whole state of sharded networks through rank 0, with groups and names of a checkpoint. They are NAME in "model",
 * optim.exp_avg.NAME in "optim", NAME and ema.compensation.NAME in "ema-AVERAGE". The library holds no whole tensor. */

/* A whole tensor of the state. */
typedef struct xd_state_tensor {
    const char *group, *name;
    xd_dtype dtype; /* step counts: I64 scalars; moments and masters: F32 */
    int ndim;
    const int64_t *shape; /* [ndim] */
    const void *data;     /* on the host, dense; NULL for pieces */
} xd_state_tensor;

/* Takes elements of a tensor in ascending order, [elements.end - elements.begin] at `data`. Pieces come in order; an empty
 * tensor has one without elements. A result other than XD_OK ends the call. */
typedef xd_result (*xd_state_take)(void *user, const xd_state_tensor *tensor, xd_interval elements,
                                   const void *data);

/* What to gather. */
typedef struct xd_state_gather_desc {
    const xd_checkpoint_network *networks; /* [network_count] required; as for a save */
    int network_count;
    const char *group; /* only its tensors; NULL -> all */
    bool average;      /* only the average of one network with one average; `group` is NULL */
    xd_ema_record
        *record; /* with `average`: out, on every rank: store it with the shadows; NULL -> not wanted */
    size_t staging_bytes; /* of a tensor on rank 0 at once, the same on all ranks; 0 -> 16 MiB */
    xd_state_take take;   /* required on rank 0, not called on others */
    void *user;
} xd_state_gather_desc;

/* Gathers the state on rank 0, tensor by tensor: weights, optimizer states, averages of each network in the order of its parts.
 * Collective. Keeps bits.
 * Errors: ARGUMENT, MISMATCH (between ranks; an element with no owner or two), both before the first piece; MISSING (unknown
 * group), STATE (an average is swapped), MEMORY; that of `take` (PEER on the others). */
XD_API xd_result xd_state_gather(xd_comm *comm, const xd_state_gather_desc *desc);

/* What to scatter. */
typedef struct xd_state_scatter_desc {
    const xd_checkpoint_network *networks; /* [network_count] required; destinations, as for a load */
    int network_count;
    const char *group; /* only its tensors; NULL -> all */
    bool average;      /* as in xd_state_gather_desc */
    /* With `average`, of rank 0: the counters; NULL -> the iteration stays; initialized if all shadows were filled. */
    const xd_ema_record *record;
    const xd_state_tensor *tensors; /* [tensor_count] of rank 0 only, in any order */
    int64_t tensor_count;
    bool lenient;         /* accept missing, unexpected, wrongly shaped; they stay unchanged */
    bool convert;         /* floating-point types, step counts in f32 or f64; false -> DTYPE */
    size_t staging_bytes; /* of elements on rank 0 at once, the same on all ranks; 0 -> 16 MiB */
} xd_state_scatter_desc;

/* What a scatter found; the same on every rank. */
typedef struct xd_state_report {
    int64_t loaded;      /* of the list */
    int64_t missing;     /* only requested */
    int64_t unexpected;  /* only in the list */
    int64_t wrong_shape; /* in both, with other shapes */
    int64_t wrong_type;  /* in both, not convertible */
    int64_t converted;   /* of those loaded */
    int64_t synthesised; /* new optimizer states: see xd_state_scatter */
    /* First five missing, unexpected or of wrong shape or type, ", " between. */
    char names[200];
    char converted_names[200]; /* first five converted */
} xd_state_report;

/* Scatters a list of rank 0 into weights, optimizer states and averages. Collective.
 *
 *   report   also filled in when its counts make the call fail; may be NULL
 *
 * Sends an element only to its holders. A parameter without states gets zero moments and step 0; a missing master comes from
 * the weight. Settings, learning rates and counters (see `average`) stay. Nothing changes before all ranks agree.
 * Errors: ARGUMENT (also a tensor twice), MISMATCH (between ranks), MISSING, UNEXPECTED, SHAPE (unless lenient), DTYPE, STATE
 * (no data), DATA (a count of steps), FORMAT (another version of record), MEMORY, PEER. */
XD_API xd_result xd_state_scatter(xd_comm *comm, const xd_state_scatter_desc *desc, xd_state_report *report);

#endif
