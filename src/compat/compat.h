#ifndef XDI_COMPAT_COMPAT_H
#define XDI_COMPAT_COMPAT_H

#include "base/internal.h"
#include "loss/loss.h"

/* Forms of other trainers, for comparing numbers only. */

/* Computes the generalised JSD between rows of probabilities (TRL GOLD). Entries below 1e-8 become 1e-8, without normalising;
 * the value may be negative.
 *
 *   student, teacher  [T, V] f32 or bf16, on one rank
 *   beta              0: forward KL, 1: reverse KL; else of the JSD
 *   denominator       divides the sum; not 0
 *   gradient          d loss / d student; may be student's memory; data NULL -> none
 *   loss              in host memory; the call waits for it
 *
 * Rows are on the context's device. Local; takes 4 KB; computes in double; the same bits on every run. NaN and infinity stay in
 * the loss and their row's gradient. Errors: SHAPE, DTYPE, ARGUMENT, MEMORY. */
XD_PRIVATE xd_result xdi_compat_jsd_of_probabilities(xd_ctx *ctx, xd_rows student, xd_rows teacher,
                                                     double beta, double denominator, xd_rows gradient,
                                                     double *loss);

/* Returns TRL's denominators of the generalised JSD over [B, T, V] logits, for xd_loss.
 *   counted  positions whose label counts, or B * T without labels */
typedef enum xdi_compat_reduction {
    XDI_COMPAT_BATCHMEAN = 0, /* counted positions, or B without labels */
    XDI_COMPAT_SUM,
    XDI_COMPAT_MEAN /* elements: positions times V */
} xdi_compat_reduction;
XD_PRIVATE double xdi_compat_jsd_denominator(xdi_compat_reduction reduction, int64_t batch, int64_t counted,
                                             int64_t vocabulary, bool labels);

/* Returns the denominators of Model-Optimizer's logits loss over [N, V]: batchmean N, mean N * V, sum 1. */
XD_PRIVATE double xdi_compat_modelopt_denominator(xdi_compat_reduction reduction, int64_t rows,
                                                  int64_t vocabulary);

#endif
