#ifndef XDI_TRAIN_CLIP_H
#define XDI_TRAIN_CLIP_H

#include "base/context.h"
#include "comm/collective.h"
#include "kernel/types.h"
#include "train/param.h"

/* What a gradient norm covers. */
typedef struct xd_gradient_norm_desc {
    const xd_param *params; /* required; [param_count]; frozen ones and buffers add nothing */
    int64_t param_count;
    xd_norm_type type; /* 0 -> XD_NORM_L2 */
    double max_norm;   /* 0 -> coefficient 1 */
    xd_clip_form form;
    /* Records findings of all ranks (non-finite elements, a refused norm), for xd_optimizer_step. NULL -> none. */
    xd_status *status;
    double refuse_above; /* larger norms are findings; 0 -> none are */
} xd_gradient_norm_desc;

/* A result, the same on every rank; in device memory, as its status: xd_read. */
typedef struct xd_gradient_norm {
    double norm;        /* infinity or NaN if an element is */
    int64_t not_finite; /* elements of all ranks, with replicas */
    float coefficient;  /* for gradient_scale or xd_clip_gradients */
    xd_norm_sum sum;    /* over ranks; devices only */
} xd_gradient_norm;

/* Computes the norm of a whole model's gradient, without replicas.
 *
 *    comm   all ranks that step together, with pipeline stages; NULL -> this rank, without replicas
 *
 * Collective over comm: one small all-reduce, two for XD_NORM_MAX; on a device an agreement and at most two. Lists may
 * differ and be empty. Allocates nothing. The same bits on every rank; in INVARIANT mode for every split.
 * Errors: ARGUMENT (type, form; max_norm, refuse_above: negative, NaN; replica with comm NULL), DTYPE, STATE (gradient
 * waits), MISMATCH (type, form, max_norm, refuse_above; not on a device). */
XD_API xd_result xd_gradient_norm_compute(xd_ctx *ctx, xd_comm *comm, const xd_gradient_norm_desc *desc,
                                          xd_gradient_norm *out);

/* Reports what a norm found, the same on every rank. It names the first parameter and rank with a non-finite element, or the
 * place of the largest element of a refused norm. Skip that step.
 *
 *    comm, desc   of xd_gradient_norm_compute; gradients unchanged
 *    norm         its result, device memory; a finding overwrites `sum`
 *
 * Collective over comm, with exchanges only after a finding. Waits for a device. Allocates nothing.
 * Errors: DATA (the finding); those of xd_gradient_norm_compute. */
XD_API xd_result xd_gradient_norm_check(xd_ctx *ctx, xd_comm *comm, const xd_gradient_norm_desc *desc,
                                        xd_gradient_norm *norm);

/* Multiplies every gradient in place, unless by 1. Local. Errors, nothing written: DTYPE, STATE (gradient waits). */
XD_API xd_result xd_clip_gradients(xd_ctx *ctx, const xd_param *params, int64_t param_count,
                                   float coefficient);

#endif
