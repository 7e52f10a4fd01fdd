#ifndef XDI_LOSS_ESTIMATOR_H
#define XDI_LOSS_ESTIMATOR_H

#include "base/context.h"

/* Estimators of KL(student || reference) from the log-probabilities of sampled tokens alone, with rho =
 * reference - student (Schulman, "Approximating KL divergence", 2020). */
typedef enum xd_kl_estimator {
    XD_KL_K1 = 0, /* -rho: unbiased, may be negative */
    XD_KL_K2,     /* rho^2 / 2: biased, never negative */
    XD_KL_K3      /* e^rho - 1 - rho: unbiased, never negative */
} xd_kl_estimator;

/* Inputs and outputs of xd_kl_estimate, each [count]. */
typedef struct xd_kl_estimate_desc {
    const float *logprobs;  /* of the student, for the tokens that were sampled */
    const float *reference; /* of the reference, for the same tokens */
    const float *weight;    /* of each token in sum and gradient; NULL -> 1; 0 leaves it out of both */
    int64_t count;
    xd_kl_estimator kind;
    double input_clamp;  /* rho is clamped to +-this; 0 -> not at all. NeMo-RL: 20 */
    double output_clamp; /* the estimate is clamped to +-this; 0 -> not at all. NeMo-RL: 10, which makes
                          * the gradient 0 where the two differ by much */
    float *values;       /* the estimates, without weight, also of tokens that are left out; or NULL */
    float *gradient;     /* d sum / d logprobs, 0 where a clamp holds; may be logprobs; or NULL */
} xd_kl_estimate_desc;

/* *sum = sum of weight times estimate over these tokens; the caller divides it and adds it over ranks. The
 * arrays are memory of the context's device, *sum is host memory: the call waits for it. Local; memory: 4 KB;
 * computed in double; the same bits on every run. Errors: ARGUMENT for a negative or NaN clamp or an unknown kind;
 * MEMORY; DATA, naming the first token, when a token of weight other than 0 has an estimate, a gradient or a weight that is
 * not finite or beyond f32. Values and gradient are then still written, 0 for such tokens; *sum is not. */
XD_API xd_result xd_kl_estimate(xd_ctx *ctx, const xd_kl_estimate_desc *desc, double *sum);

#endif
