/* nn_small.h - products of matrices of a few rows and columns, which would be longer packed than multiplied. */
#ifndef NN_SMALL_H
#define NN_SMALL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Sizes and strides, in floats. */
typedef struct nn_small {
    int64_t rows; /* those behind the last multiple of 4 take longer */
    int64_t cols; /* a multiple of 8 */
    int64_t terms;
    int64_t row, term; /* of a: from one row to the next, from one term to the next */
    int64_t b_row, out_row;
} nn_small;

/* out[i * out_row + j] = the sum over p, in order, of a[i * row + p * term] b[p * b_row + j]. The same bits on every machine
 * that rounds each operation. out must not overlap a or b. */
void nn_small_product(const nn_small *sizes, const float *a, const float *b, float *out);

#ifdef __cplusplus
}
#endif

#endif /* NN_SMALL_H */
