#ifndef XDI_COMPAT_COMPAT_H
#define XDI_COMPAT_COMPAT_H

#include "loss/loss.h"

/* Forms of other trainers that the library does not recommend, for comparing numbers with them. */

/* Generalised JSD between rows that already hold probabilities (TRL GOLD): entries below 1e-8 are raised to
 * it, nothing is renormalised, so for rows that do not sum to 1 the value is not a divergence and may be negative.
 *
 *   student, teacher  [T, V] f32 or bf16, on one rank
 *   beta              0 is the forward and 1 the reverse KL; otherwise the JSD with this weight
 *   denominator       what the sum is divided by; not 0
 *   gradient          d loss / d student; data NULL -> none; may be student's memory
 *   loss              in host memory
 *
 * As in the reference nothing is told of NaN and infinity: they go into the loss and the gradient of their row, and no further.
 * The rows are memory of the context's device; the call waits for the loss. Local; memory: 4 KB; computed in double; the
 * same bits on every run. Errors: SHAPE, DTYPE, ARGUMENT, MEMORY. */
XD_API xd_result xd_compat_jsd_of_probabilities(xd_ctx *ctx, xd_rows student, xd_rows teacher, double beta,
                                                double denominator, xd_rows gradient, double *loss);

/* The denominators of TRL's generalised JSD over [B, T, V] logits; the loss itself is xd_loss with
 * denominator_value.
 *   counted  positions whose label counts, or B * T without labels */
typedef enum xd_compat_reduction {
    XD_COMPAT_BATCHMEAN = 0, /* counted positions with labels; the first axis, B, without */
    XD_COMPAT_SUM,
    XD_COMPAT_MEAN /* elements: positions times V */
} xd_compat_reduction;
XD_API double xd_compat_jsd_denominator(xd_compat_reduction reduction, int64_t batch, int64_t counted,
                                        int64_t vocabulary, bool labels);

/* The denominators of Model-Optimizer's logits loss over [N, V]: batchmean N, mean N * V, sum 1. */
XD_API double xd_compat_modelopt_denominator(xd_compat_reduction reduction, int64_t rows, int64_t vocabulary);

#endif
