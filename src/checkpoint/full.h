#ifndef XDI_CHECKPOINT_FULL_H
#define XDI_CHECKPOINT_FULL_H

#include "checkpoint/checkpoint.h"

/* Moves the whole state of sharded networks through rank 0, with a checkpoint's groups and names: docs/checkpoints.md. */

/* A tensor. */
typedef struct xd_state_tensor {
    const char *group, *name;
    xd_dtype dtype; /* step counts: I64 scalars; moments and masters: F32 */
    int ndim;
    const int64_t *shape; /* [ndim] */
    const void *data;     /* host, dense; NULL for pieces */
} xd_state_tensor;

/* Takes elements of a tensor, [elements.end - elements.begin] at `data`, in ascending order; an empty tensor has one empty
 * piece. A result other than XD_OK ends the call. */
typedef xd_result (*xd_state_take)(void *user, const xd_state_tensor *tensor, xd_interval elements,
                                   const void *data);

/* What to gather. */
typedef struct xd_state_gather_desc {
    const xd_checkpoint_network *networks; /* [network_count] required */
    int network_count;
    const char *group;     /* only its tensors; NULL -> all */
    bool average;          /* only that of one network with one average; `group` is NULL */
    xd_ema_record *record; /* with `average`: out on every rank, to save too; NULL -> none */
    size_t staging_bytes;  /* of a tensor on rank 0, the same on all; 0 -> 16 MiB */
    xd_state_take take;    /* required and called on rank 0 only */
    void *user;
} xd_state_gather_desc;

/* Gathers the state on rank 0, tensor by tensor: weights, optimizer states, averages of each network in the order of its parts.
 * Collective. Keeps bits.
 * Errors: before the first piece ARGUMENT, MISMATCH (between ranks; an element with no owner or two); MISSING (group), STATE
 * (a swapped average), MEMORY; that of `take` (PEER on others). */
XD_API xd_result xd_state_gather(xd_comm *comm, const xd_state_gather_desc *desc);

/* What to scatter. */
typedef struct xd_state_scatter_desc {
    const xd_checkpoint_network *networks; /* [network_count] required; destinations */
    int network_count;
    const char *group; /* only its tensors; NULL -> all */
    bool average;      /* as in xd_state_gather_desc */
    /* With `average`, of rank 0; NULL -> the iteration stays; initialized if all shadows were filled. */
    const xd_ema_record *record;
    const xd_state_tensor *tensors; /* [tensor_count] of rank 0, in any order */
    int64_t tensor_count;
    bool lenient;         /* as in xd_checkpoint_load_desc */
    bool convert;         /* floating point, and step counts in F32, F64; false -> DTYPE */
    size_t staging_bytes; /* of elements on rank 0, the same on all; 0 -> 16 MiB */
} xd_state_scatter_desc;

/* Findings, the same on every rank. */
typedef struct xd_state_report {
    int64_t loaded;      /* of the list */
    int64_t missing;     /* only requested */
    int64_t unexpected;  /* only in the list */
    int64_t wrong_shape; /* in both */
    int64_t wrong_type;  /* in both, not convertible */
    int64_t converted;   /* of loaded */
    int64_t synthesised; /* new optimizer states */
    /* First five missing, unexpected or wrong, ", " between. */
    char names[200];
    char converted_names[200]; /* first five */
} xd_state_report;

/* Scatters a list of rank 0 into weights, optimizer states and averages. Collective.
 *
 *   report   also filled in if its counts are the error; may be NULL
 *
 * A parameter without states gets zero moments and step 0; a missing master comes from the weight. Settings, learning rates
 * and counters (but `record`) stay. Nothing changes before all ranks agree.
 * Errors: ARGUMENT (also a tensor twice), MISMATCH (between ranks), MISSING, UNEXPECTED, SHAPE (unless lenient), DTYPE, STATE
 * (no data), DATA (a step count), FORMAT (version of record), MEMORY. */
XD_API xd_result xd_state_scatter(xd_comm *comm, const xd_state_scatter_desc *desc, xd_state_report *report);

#endif
