#ifndef XDI_TRAIN_CLIP_H
#define XDI_TRAIN_CLIP_H

#include "base/context.h"
#include "comm/collective.h"
#include "kernel/optimizer.h"
#include "train/param.h"

/* How a total norm becomes the factor on the gradients; c = max_norm / (norm + 1e-6). */
typedef enum xd_clip_form {
    XD_CLIP_ABOVE = 0,  /* the default: c when c < 1; 1 for a norm that is not finite: that step is skipped */
    XD_CLIP_ABOVE_NEMO, /* c when c < 1: an infinite norm gives 0, a NaN norm 1 */
    XD_CLIP_ALWAYS      /* PyTorch, FastGen: min(1, c), NaN for a NaN norm; multiply even by 1 */
} xd_clip_form;

/* What a gradient norm covers. Zero is the default of every field. */
typedef struct xd_gradient_norm_desc {
    const xd_param *params; /* required; [param_count]; without gradient, frozen or a buffer: adds nothing */
    int64_t param_count;
    xd_norm_type type; /* 0 -> XD_NORM_L2 */
    double max_norm;   /* 0 -> no clipping, the coefficient is 1 */
    xd_clip_form form;
    xd_status *status; /* receives the count of non-finite elements of all ranks; NULL -> not recorded */
} xd_gradient_norm_desc;

/* The norm and what follows from it, the same on every rank. */
typedef struct xd_gradient_norm {
    double norm;        /* infinity or NaN when an element is */
    int64_t not_finite; /* elements over all ranks, replicas counted each */
    float coefficient;  /* for xd_optimizer_step_desc.gradient_scale or xd_clip_gradients */
} xd_gradient_norm;

/* The norm of a whole model's gradient, each logical element counted once: shards add their elements, of
 * replicas only the one that does not say `replica`.
 *
 *   comm   every rank that shares the decision to step: all shards and, under pipelines, all stages;
 *          NULL -> this rank alone
 *
 * Collective over comm: one all-reduce of a few numbers, two for XD_NORM_MAX. Ranks may hold different lists
 * and empty shards. Allocates nothing. The same bits on every rank; in INVARIANT mode the same bits for every
 * split.
 * Errors, on every rank alike: ARGUMENT (max_norm negative or NaN, unknown type or form), DTYPE. */
XD_API xd_result xd_gradient_norm_compute(xd_ctx *ctx, xd_comm *comm, const xd_gradient_norm_desc *desc,
                                          xd_gradient_norm *out);

/* The factor for a norm that is known already. Pure. Here max_norm 0 means zero. */
XD_API float xd_clip_coefficient(xd_clip_form form, double max_norm, double norm);

/* Multiplies every gradient of the list by the coefficient in place; does nothing when it is 1. Local.
 * Errors: DTYPE, before anything is written. */
XD_API xd_result xd_clip_gradients(xd_ctx *ctx, const xd_param *params, int64_t param_count,
                                   float coefficient);

#endif
