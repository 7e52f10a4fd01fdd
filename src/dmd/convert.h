#ifndef XDI_DMD_CONVERT_H
#define XDI_DMD_CONVERT_H

#include "dmd/noise_schedule.h"

/* The forward process and conversions between what networks predict. Each is a sum of two tensors (xd_mix): a pure function gives
 * the factors of one sample, in double, and xd_mix_rows applies those of all samples with one rounding. Nothing is collective:
 * samples may be split in any way. */

/* What a network predicts of x_t = alpha x0 + sigma eps. */
typedef enum xd_prediction {
    XD_PREDICT_X0 = 0,
    XD_PREDICT_EPS,
    XD_PREDICT_V, /* alpha eps - sigma x0, where alpha^2 + sigma^2 = 1: VP, TRIG, CUSTOM if so within 0.01 */
    XD_PREDICT_FLOW, /* alpha' x0 + sigma' eps, where the schedule has rates; under rectified flow eps - x0 */
    XD_PREDICT_SCORE /* -eps / sigma */
} xd_prediction;

/* A conversion at one time. */
typedef struct xd_conversion {
    xd_prediction from, to;
    /* V means FLOW: under rectified flow alone, where some trainers call it so. There V has no other meaning and is refused. */
    bool v_is_flow;
    /* compat: to x0 first and from there on, as other trainers do, from V to FLOW that mean the same too. Differs where a divisor
     * is below `least`: then x0 no longer has what the second conversion divides again, and for example flow -> eps at t = 0
     * is 0. */
    bool through_x0;
} xd_conversion;

/* Factors of: out = c0 prediction + c1 x_t, in one step in double. A divisor (sigma from x0, alpha from eps and score, sigma for
 * score) whose magnitude is below schedule.least is least, with its sign. From a type to itself it is { 1, 0 } and nothing is
 * checked. c0 is the derivative by the prediction. Local. Errors, with *out untouched: those of xd_noise_level_at; ARGUMENT for an
 * unknown type, V or FLOW where they have no meaning (above), and v_is_flow under another schedule. */
XD_API xd_result xd_prediction_mix(xd_ctx *ctx, const xd_noise_schedule *schedule,
                                   const xd_conversion *conversion, double t, xd_mix *out);

/* Whether networks of this type can be trained under the schedule over its whole range: both directions between it and x0 exist
 * and, for EPS and SCORE, alpha is above `least` at max_t. For set-ups. Local. Errors: those of xd_prediction_mix and
 * xd_noise_check. */
XD_API xd_result xd_prediction_check(xd_ctx *ctx, const xd_noise_schedule *schedule, xd_prediction type,
                                     bool v_is_flow);

/* Factors of the forward process: x_t = c0 x0 + c1 eps; c0 is its derivative by x0. Local. Errors: those of xd_noise_level_at. */
XD_API xd_result xd_noise_mix(xd_ctx *ctx, const xd_noise_schedule *schedule, double t, xd_mix *out);

/* Factors of what a network should have predicted: target = c0 x0 + c1 eps, for the type conversion->to; v_is_flow is read, the
 * other fields are not. Local. Errors: those of xd_prediction_mix. */
XD_API xd_result xd_target_mix(xd_ctx *ctx, const xd_noise_schedule *schedule,
                               const xd_conversion *conversion, double t, xd_mix *out);

/* Factors of classifier-free guidance: out = c0 conditional + c1 unconditional = unconditional + scale (conditional -
 * unconditional). Scale 1 is the conditional prediction alone. Where a trainer writes conditional + w (conditional -
 * unconditional), scale is w + 1. Pure. */
XD_API xd_mix xd_guidance_mix(double scale);

/* Guidance of one network within a distillation. What it says of x_t, as clean samples, with the condition, P, and with the
 * negative one, N, is mixed to G by `scale`; and then, so that a large scale does not widen the range of values (Lin et al.,
 * "Common Diffusion Noise Schedules and Sample Steps Are Flawed", 2024), by sample
 *
 *   out = (rescale std(P) / std(G) + 1 - rescale) G
 *
 * with standard deviations over all elements of the sample, over every rank that has some of them. A G without deviation stays as
 * it is. */
typedef struct xd_guidance {
    bool on;
    double scale;   /* as in xd_guidance_mix; 0 is the negative prediction alone */
    double rescale; /* in [0, 1]; 0 -> G */
} xd_guidance;

/* out = c0 p + c1 q row by row, each row with the factors desc->mix[row]; kernel/dmd.h has the arithmetic, which is double with
 * one rounding and has the same bits on every CPU level, thread count and GPU. All arrays are in memory of the context's device;
 * the call does not wait for a GPU and allocates nothing. Local. Errors, with nothing written: ARGUMENT for a missing array,
 * DTYPE for a type that is not F32, F16, BF16 or F64, SHAPE when shapes differ, a stride is smaller than a row or a size is
 * negative. NaN and infinity go through. */
XD_API xd_result xd_mix_rows(xd_ctx *ctx, const xd_mix_desc *desc);

#endif
