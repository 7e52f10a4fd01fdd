#ifndef XDI_LOSS_ESTIMATOR_H
#define XDI_LOSS_ESTIMATOR_H

#include "base/context.h"

/* Estimators of KL(student || reference) from log-probabilities of sampled tokens, rho = reference - student (Schulman,
 * "Approximating KL divergence", 2020). */
typedef enum xd_kl_estimator {
    XD_KL_K1 = 0, /* -rho: unbiased, may be negative */
    XD_KL_K2,     /* rho^2 / 2: biased, never negative */
    XD_KL_K3      /* e^rho - 1 - rho: unbiased, never negative */
} xd_kl_estimator;

/* Inputs and outputs of xd_kl_estimate, each [count]. */
typedef struct xd_kl_estimate_desc {
    const float *logprobs;  /* of the student, for the sampled tokens */
    const float *reference; /* of the reference, for the same tokens */
    const float *weight;    /* in sum and gradient; NULL -> 1; 0: in neither */
    int64_t count;
    xd_kl_estimator kind;
    double input_clamp; /* rho is clamped to +-this; 0 -> none. NeMo-RL: 20 */
    /* The estimate is clamped to +-this; 0 -> none. NeMo-RL: 10, which makes far tokens' gradient 0. */
    double output_clamp;
    float *values;   /* estimates without weight, of all tokens; or NULL */
    float *gradient; /* d sum / d logprobs, 0 at a clamp; may be logprobs; or NULL */
} xd_kl_estimate_desc;

/* Computes *sum of weight times estimate; the caller divides and adds over ranks. Arrays are device memory, *sum is host
 * memory: the call waits. Local; takes 4 KB; computes in double; the same bits on every run.
 * Errors: ARGUMENT (clamp negative or NaN; kind), MEMORY, DATA (estimate, gradient or nonzero weight not finite or beyond
 * f32; names the first token). With DATA values and gradient are written, 0 for such tokens; *sum is not. */
XD_API xd_result xd_kl_estimate(xd_ctx *ctx, const xd_kl_estimate_desc *desc, double *sum);

#endif
