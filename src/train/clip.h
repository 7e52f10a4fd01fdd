#ifndef XDI_TRAIN_CLIP_H
#define XDI_TRAIN_CLIP_H

#include "base/context.h"
#include "comm/collective.h"
#include "kernel/types.h"
#include "train/param.h"

/* What a gradient norm covers. */
typedef struct xd_gradient_norm_desc {
    const xd_param *params; /* required; [param_count]; without gradient, frozen, buffer: add nothing */
    int64_t param_count;
    xd_norm_type type; /* 0 -> XD_NORM_L2 */
    double max_norm;   /* 0 -> no clipping: coefficient 1 */
    xd_clip_form form;
    /* Receives the findings of all ranks: non-finite elements, or a refused norm. xd_optimizer_step then skips on every
     * rank. NULL -> not recorded. */
    xd_status *status;
    double refuse_above; /* a larger norm is a finding like an infinity; 0 -> none is */
} xd_gradient_norm_desc;

/* The norm and its consequences, the same on every rank; device memory, as its status. xd_read copies it to the host. */
typedef struct xd_gradient_norm {
    double norm;        /* infinity or NaN when an element is */
    int64_t not_finite; /* elements over all ranks, with replicas */
    float coefficient;  /* for gradient_scale of a step, or xd_clip_gradients */
    xd_norm_sum sum;    /* sum over ranks; devices only */
} xd_gradient_norm;

/* Computes the norm of a whole model's gradient. Each logical element counts once: entries with xd_param.replica add
 * nothing.
 *
 *    comm   all ranks that step together, pipeline stages included; NULL -> this rank alone, which may have no replica
 *
 * Collective over comm: one small all-reduce, two for XD_NORM_MAX, one more on a device. Lists may differ and be empty.
 * Allocates nothing. The same bits on every rank; in INVARIANT mode for every split.
 * Errors: ARGUMENT (max_norm or refuse_above negative or NaN; type; form; replica with comm NULL), DTYPE, STATE (gradient
 * waits for xd_parallel_reduce), MISMATCH (type, form, max_norm or refuse_above differ; not compared on a device). */
XD_API xd_result xd_gradient_norm_compute(xd_ctx *ctx, xd_comm *comm, const xd_gradient_norm_desc *desc,
                                          xd_gradient_norm *out);

/* Reports what a norm found, the same on every rank: the first parameter and rank with a non-finite element. For a refused
 * norm, where the largest element is. The caller skips the step: by the status, or without a call.
 *
 *    comm, desc   as xd_gradient_norm_compute; gradients unchanged
 *    norm         its result, device memory; a finding overwrites `sum`
 *
 * Collective over comm, with exchanges only after a finding. Waits for the norm on a device. Allocates nothing.
 * Errors: DATA (the finding); those of xd_gradient_norm_compute. */
XD_API xd_result xd_gradient_norm_check(xd_ctx *ctx, xd_comm *comm, const xd_gradient_norm_desc *desc,
                                        xd_gradient_norm *norm);

/* Multiplies every gradient in place by the coefficient; no effect if 1. Local. Errors, nothing written: DTYPE, STATE (as
 * above). */
XD_API xd_result xd_clip_gradients(xd_ctx *ctx, const xd_param *params, int64_t param_count,
                                   float coefficient);

#endif
