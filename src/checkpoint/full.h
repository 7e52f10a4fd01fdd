#ifndef XDI_CHECKPOINT_FULL_H
#define XDI_CHECKPOINT_FULL_H

#include "checkpoint/checkpoint.h"

/* The whole state of sharded networks through one rank: to export it, to compare it, to bring it to or from another library.
 * Tensors have the groups and names that they have in a checkpoint: NAME in "model", optim.exp_avg.NAME and the like in "optim",
 * NAME in "ema-AVERAGE", and there ema.compensation.NAME for averages that have one. No rank ever holds a whole model, or even a
 * whole tensor, unless the caller of rank 0 keeps it. */

/* A whole tensor of the state. */
typedef struct xd_state_tensor {
    const char *group, *name;
    xd_dtype dtype; /* counts of steps are I64 scalars, moments and masters F32 */
    int ndim;
    const int64_t *shape; /* [ndim] */
    const void *data;     /* of the host, dense, in ascending order of the indices; NULL where pieces are
                           * handed out */
} xd_state_tensor;

/* Takes a piece of a tensor: the elements whose numbers are in `elements`, in ascending order, [elements.end - elements.begin] at
 * `data`. Pieces of a tensor follow one another from 0 to its end; an empty tensor has one of no elements. Whatever is not XD_OK
 * ends the call. */
typedef xd_result (*xd_state_take)(void *user, const xd_state_tensor *tensor, xd_interval elements,
                                   const void *data);

/* What to gather. Zero is the default of the fields that are not required. */
typedef struct xd_state_gather_desc {
    const xd_checkpoint_network *networks; /* [network_count] required; all ranks have the same list, as
                                            * for a save */
    int network_count;
    const char *group;    /* only the tensors of this one; NULL -> all */
    size_t staging_bytes; /* of a tensor on rank 0 at once, the same on all ranks; 0 -> 16 MiB */
    xd_state_take take;   /* required on rank 0, called on no other */
    void *user;
} xd_state_gather_desc;

/* Hands the state to rank 0, tensor by tensor in the order of the networks and, within each, of its parts: weights, states of
 * the optimizer, averages.
 *
 * Collective. Memory: about 10 KiB for each rank and 16 bytes for each parameter; on rank 0 twice staging_bytes, or three times
 * on a device; others send from where the elements lie. Bits are kept. Elements cross once.
 * Errors, on every rank: ARGUMENT; MISMATCH when ranks pass other lists, naming the tensor, when an element is held by no
 * rank or by two that are no replicas, or when ranks count other steps; all of these before the first piece. What `take`
 * returned, on rank 0, and PEER on the others; MISSING for an unknown group; MEMORY. */
XD_API xd_result xd_state_gather(xd_comm *comm, const xd_state_gather_desc *desc);

/* What to scatter. Zero is the default of the fields that are not required. */
typedef struct xd_state_scatter_desc {
    const xd_checkpoint_network *networks; /* [network_count] required; where everything goes, as for a
                                            * load */
    int network_count;
    const char *group;              /* only the tensors of this one; NULL -> all */
    const xd_state_tensor *tensors; /* [tensor_count], of rank 0 alone, in any order */
    int64_t tensor_count;
    bool lenient; /* tensors that are missing, unexpected or of another shape are reported, and what is
                   * here of them stays as it is; false -> they are errors */
    bool convert; /* floating-point tensors of another type are converted, and counts of steps in f32 or
                   * f64 taken; false -> DTYPE */
    size_t staging_bytes; /* of elements on rank 0 at once, the same on all ranks; 0 -> 16 MiB */
} xd_state_scatter_desc;

/* What a scatter found; the same on every rank. */
typedef struct xd_state_report {
    int64_t loaded;      /* tensors of the list that were taken */
    int64_t missing;     /* asked for, but not in the list */
    int64_t unexpected;  /* in the list, but not asked for */
    int64_t wrong_shape; /* in both, with other shapes */
    int64_t wrong_type;  /* in both, with types that are not converted */
    int64_t converted;   /* of those loaded */
    int64_t synthesised; /* states of an optimizer that nobody has formed yet: see xd_state_scatter */
    /* The first five that are missing, unexpected or of a wrong shape or type, ", " between. */
    char names[200];
    char converted_names[200]; /* the first five that were converted */
} xd_state_report;

/* Fills weights, states and averages from a list that only rank 0 has. Each element goes to the ranks that hold it and to no
 * other. A parameter of which the list has no state at all gets one that has never stepped: zero moments, step 0. A master
 * copy that is not in the list is formed from the weight.
 *
 *   report   filled in also when the list is refused for what it counts; may be NULL
 *
 * Collective. Memory: about 10 KiB for each rank and 8 bytes for each tensor; on rank 0 staging_bytes, twice on a device;
 * others receive where the elements lie. Nothing is changed before all ranks have agreed on all of the metadata.
 * Settings and learning rates stay as they are, and so do the counters of averages (see xd_ema_import).
 * Errors, on every rank: ARGUMENT (also a tensor twice in the list), MISMATCH when ranks pass other networks or settings; MISSING,
 * UNEXPECTED, SHAPE (all three when not lenient), DTYPE; STATE for a tensor that has elements but no data; DATA for a count of
 * steps that is none; MEMORY. What rank 0 alone can see is PEER on the others. */
XD_API xd_result xd_state_scatter(xd_comm *comm, const xd_state_scatter_desc *desc, xd_state_report *report);

/* Hands one average to rank 0.
 *
 *   desc     of one network with one average; `group` is NULL
 *   record   out, on every rank: the state to keep beside the shadows
 *
 * Collective. As xd_state_gather. */
XD_API xd_result xd_ema_export(xd_comm *comm, const xd_state_gather_desc *desc, xd_ema_record *record);

/* Fills one average from a list of rank 0, whose tensors are in the group "ema-AVERAGE".
 *
 *   desc     of one network with one average; `group` is NULL
 *   record   of rank 0: sets the counters; NULL -> the iteration does not change, and the average is initialized afterwards
 *            when every shadow was filled
 *
 * Collective. As xd_state_scatter. Further errors: FORMAT for a record of another version. */
XD_API xd_result xd_ema_import(xd_comm *comm, const xd_state_scatter_desc *desc, const xd_ema_record *record,
                               xd_state_report *report);

#endif
