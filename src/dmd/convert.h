#ifndef XDI_DMD_CONVERT_H
#define XDI_DMD_CONVERT_H

#include "dmd/noise_schedule.h"

/* Conversions between predictions. Pure functions return one sample's factors (xd_mix) in double; xd_mix_rows applies them.
 * Nothing is collective: samples may be split in any way. A failed call leaves its output untouched. */

/* Predictions of x_t = alpha x0 + sigma eps. */
typedef enum xd_prediction {
    XD_PREDICT_X0 = 0,
    XD_PREDICT_EPS,
    XD_PREDICT_V,    /* alpha eps - sigma x0; alpha^2 + sigma^2 = 1: VP, TRIG, CUSTOM to 0.01 */
    XD_PREDICT_FLOW, /* alpha' x0 + sigma' eps; needs rates; FLOW: eps - x0 */
    XD_PREDICT_SCORE /* -eps / sigma */
} xd_prediction;

/* A conversion at one time. */
typedef struct xd_conversion {
    xd_prediction from, to;
    /* V means FLOW, its only meaning under FLOW schedules, as some trainers call it. */
    bool v_is_flow;
    /* compat: by way of x0, as other trainers, also from V to an equal FLOW. Differs if a divisor is below `least`: flow to
     * eps at t = 0 is 0. */
    bool through_x0;
} xd_conversion;

/* Returns the factors of out = c0 prediction + c1 x_t; c0 is the derivative by the prediction. Divisors (sigma from x0, alpha
 * from eps and score, sigma for score) below schedule.least in magnitude become least with their sign. Equal types return
 * c0 = 1, c1 = 0 unchecked. Local.
 * Errors: ARGUMENT (schedule, t outside it by more than one f32, type, V or FLOW without meaning, v_is_flow). */
XD_API xd_result xd_prediction_mix(xd_ctx *ctx, const xd_noise_schedule *schedule,
                                   const xd_conversion *conversion, double t, xd_mix *out);

/* Returns the factors of x_t = c0 x0 + c1 eps. Local. Errors: ARGUMENT (schedule, t). */
XD_API xd_result xd_noise_mix(xd_ctx *ctx, const xd_noise_schedule *schedule, double t, xd_mix *out);

/* Guidance in a distillation. `scale` mixes x0 with the condition, P, and x0 with the negative one to G. `rescale` then limits
 * the range (Lin et al., "Common Diffusion Noise Schedules and Sample Steps Are Flawed", 2024), by deviations over whole
 * samples:
 *
 *   out = (rescale std(P) / std(G) + 1 - rescale) G, or G if std(G) = 0 */
typedef struct xd_guidance {
    bool on;
    double scale; /* of c0 conditional + c1 negative: c0 = scale, c1 = 1 - scale; 0: the negative prediction.
                     * Trainers that add w (conditional - negative) to conditional have scale w + 1 */
    double rescale; /* in [0, 1]; 0 -> G */
} xd_guidance;

/* Computes rows out = c0 p + c1 q with factors desc->mix[row], in double with one rounding (kernel/dmd.h). Bits are the same
 * on every CPU level, thread count and GPU. Device memory; no wait, no allocation. NaN and infinity pass. Local.
 * Errors: ARGUMENT (a missing array), DTYPE (not F32, F16, BF16, F64), SHAPE (sizes or strides). */
XD_API xd_result xd_mix_rows(xd_ctx *ctx, const xd_mix_desc *desc);

#endif
