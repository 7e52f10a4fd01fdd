#ifndef XDI_DMD_CONVERT_H
#define XDI_DMD_CONVERT_H

#include "dmd/noise_schedule.h"

/* Conversions between predictions: docs/diffusion.md. Samples may be split in any way. */

/* Predictions of x_t = alpha x0 + sigma eps. */
typedef enum xd_prediction {
    XD_PREDICT_X0 = 0,
    XD_PREDICT_EPS,
    XD_PREDICT_V,    /* alpha eps - sigma x0; alpha^2 + sigma^2 = 1: VP, TRIG, CUSTOM to 0.01 */
    XD_PREDICT_FLOW, /* alpha' x0 + sigma' eps; needs rates */
    XD_PREDICT_SCORE /* -eps / sigma */
} xd_prediction;

/* A conversion at one time. */
typedef struct xd_conversion {
    xd_prediction from, to;
    /* V means FLOW, its only meaning under a FLOW schedule. */
    bool v_is_flow;
    /* compat: converts by way of x0, as other trainers do, even from V to an equal FLOW; differs where a divisor is
     * below `least`. */
    bool through_x0;
} xd_conversion;

/* Returns the factors of out = c0 prediction + c1 x_t, in double. Divisors below schedule.clamp_min in magnitude become
 * least with their sign. Equal types return 1 and 0 unchecked. Local. Errors: ARGUMENT (schedule, t outside it by more
 * than one f32, type, V or FLOW without meaning, v_is_flow). */
XD_API xd_result xd_prediction_mix(xd_ctx *ctx, const xd_noise_schedule *schedule,
                                   const xd_conversion *conversion, double t, xd_mix *out);

/* Returns the factors of x_t = c0 x0 + c1 eps. Local. Errors: ARGUMENT (schedule, t). */
XD_API xd_result xd_noise_mix(xd_ctx *ctx, const xd_noise_schedule *schedule, double t, xd_mix *out);

/* Guidance: a mix of the x0 predicted under two conditions. */
typedef struct xd_guidance {
    bool on;
    double scale;   /* of the conditional x0; 1 - scale of the negative one */
    double rescale; /* limits the range, over whole samples; in [0, 1]; 0 -> none */
} xd_guidance;

/* Computes rows out = c0 p + c1 q with factors desc->mix[row], in double, rounded once. The same bits on every CPU
 * level, thread count and GPU. Device memory; no wait, no allocation. NaN and infinity pass. Local. Errors: ARGUMENT (a
 * missing array), DTYPE (not F32, F16, BF16, F64), SHAPE (sizes or strides). */
XD_API xd_result xd_mix_rows(xd_ctx *ctx, const xd_mix_desc *desc);

#endif
