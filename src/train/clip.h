#ifndef XDI_TRAIN_CLIP_H
#define XDI_TRAIN_CLIP_H

#include "base/context.h"
#include "comm/collective.h"
#include "kernel/types.h"
#include "train/param.h"

/* What a gradient norm covers. Zero is the default of every field. */
typedef struct xd_gradient_norm_desc {
    const xd_param *params; /* required; [param_count]; those without gradient, frozen or a buffer add
                             * nothing */
    int64_t param_count;
    xd_norm_type type; /* 0 -> XD_NORM_L2 */
    double max_norm;   /* 0 -> no clipping, the coefficient is 1 */
    xd_clip_form form;
    xd_status *status;   /* receives what all ranks have found: the count of non-finite elements, and a norm
                          * that is refused. Given to xd_optimizer_step it skips the step, on every rank. NULL
                          * -> not recorded */
    double refuse_above; /* a larger norm is a finding, as an infinity is: large gradients; 0 -> none is */
} xd_gradient_norm_desc;

/* The norm and what follows from it, the same on every rank. In memory of the context's device, like the status that
 * receives its errors: a step needs none of it on the host; xd_read copies it there. */
typedef struct xd_gradient_norm {
    double norm;        /* infinity or NaN when an element is */
    int64_t not_finite; /* elements over all ranks, replicas included */
    float coefficient;  /* for xd_optimizer_step_desc.gradient_scale or xd_clip_gradients */
    xd_norm_sum sum;    /* the sum over the ranks; used on devices only */
} xd_gradient_norm;

/* The norm of a whole model's gradient, each logical element counted once: shards add their elements; among
 * replicas, only the one whose xd_param.replica is false.
 *
 *   comm   every rank that shares the decision to step: all shards and, under pipelines, all stages;
 *          NULL -> this rank alone; no parameter may be a replica then
 *
 * Collective over comm: one all-reduce of a few numbers, two for XD_NORM_MAX, one more on a device. Ranks may hold
 * different lists and empty shards. Allocates nothing. The same bits on every rank; in INVARIANT mode the same bits for
 * every split.
 * Errors, on every rank alike: ARGUMENT (max_norm or refuse_above negative or NaN, unknown type or form; a replica where comm is
 * NULL), DTYPE, STATE (a gradient waits for xd_parallel_reduce: xd_param.state), MISMATCH for type, form, max_norm or
 * refuse_above that ranks pass differently, which a device does not compare. */
XD_API xd_result xd_gradient_norm_compute(xd_ctx *ctx, xd_comm *comm, const xd_gradient_norm_desc *desc,
                                          xd_gradient_norm *out);

/* Says what a norm has found, in the same words on every rank: the first parameter of the lists with an element that is not finite,
 * by name, and the first rank with one there; or, of a norm that is refused, where its largest element is. The step is the
 * caller's: it is skipped when it is given the status, or is not called.
 *
 *   comm, desc   as of xd_gradient_norm_compute; gradients have not changed since
 *   norm         its result, in memory of the context's device; `sum` is written over where something was found
 *
 * Collective over comm, with exchanges only where something was found. Waits for the norm on a device. Allocates nothing.
 * Errors, on every rank alike: DATA with what was found; those of xd_gradient_norm_compute. */
XD_API xd_result xd_gradient_norm_check(xd_ctx *ctx, xd_comm *comm, const xd_gradient_norm_desc *desc,
                                        xd_gradient_norm *norm);

/* Multiplies every gradient of the list by the coefficient in place; does nothing when it is 1. Local.
 * Errors: DTYPE, and STATE as above, before anything is written. */
XD_API xd_result xd_clip_gradients(xd_ctx *ctx, const xd_param *params, int64_t param_count,
                                   float coefficient);

#endif
