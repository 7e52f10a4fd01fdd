#ifndef XDI_LOSS_ESTIMATOR_H
#define XDI_LOSS_ESTIMATOR_H

#include "base/context.h"

/* Estimators of KL(student || reference) from sampled tokens, rho = reference - student: docs/decisions.md. */
typedef enum xd_kl_estimator {
    XD_KL_K1 = 0, /* -rho: unbiased */
    XD_KL_K2,     /* rho^2 / 2: biased, >= 0 */
    XD_KL_K3      /* e^rho - 1 - rho: unbiased, >= 0 */
} xd_kl_estimator;

/* Each array is [count]. */
typedef struct xd_kl_estimate_desc {
    const float *logprobs;  /* student, sampled tokens */
    const float *reference; /* the same tokens */
    const float *weight;    /* of sum and gradient, 0: in neither; NULL -> 1 */
    int64_t count;
    xd_kl_estimator kind;
    double input_clamp;  /* of rho to +-this; 0 -> none */
    double output_clamp; /* of the estimate; 0 -> none */
    float *values;       /* without weight, of all tokens; or NULL */
    float *gradient;     /* d sum / d logprobs, 0 at a clamp; may be logprobs; or NULL */
} xd_kl_estimate_desc;

/* Computes *sum of weight times estimate, in double; divide it, and add it over ranks. Arrays are device memory, *sum
 * is host memory, so the call waits. Local; takes 4 KB; the same bits on every run.
 * Errors: ARGUMENT (clamp, kind, count), MEMORY, DATA (estimate, gradient or nonzero weight not finite or beyond f32;
 * names the first token). DATA: values and gradient are written, 0 for such tokens. */
XD_API xd_result xd_kl_estimate(xd_ctx *ctx, const xd_kl_estimate_desc *desc, double *sum);

#endif
