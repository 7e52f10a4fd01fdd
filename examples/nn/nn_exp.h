/* nn_exp.h - exponentials and sigmoids of many numbers. */
#ifndef NN_EXP_H
#define NN_EXP_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* y[i] = exp(x[i]) within two units in the last place; 0 below -87 (denormals begin at -87.3), infinity above 88,
 * NaN of a NaN. y may be x. */
void nn_exp(int64_t count, const float *x, float *y);

/* y[i] = 1 / (1 + exp(-x[i])), with that exponential. */
void nn_sigmoid(int64_t count, const float *x, float *y);

#ifdef __cplusplus
}
#endif

#endif /* NN_EXP_H */
