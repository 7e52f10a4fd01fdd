/* nn_matmul.h - the one matrix product of the small models. */
#ifndef NN_MATMUL_H
#define NN_MATMUL_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A matrix of floats somewhere in memory, read only. Element (r, c) is data[r * row_stride + c * col_stride], so a
 * transposed matrix is the same memory with the two strides exchanged. */
typedef xd_matrix nn_view;

/* rows x cols numbers stored row after row; `stride` floats from one row to the next (>= cols). */
nn_view nn_block(const float *data, int64_t rows, int64_t cols, int64_t stride);

/* The same without gaps: stride = cols. */
nn_view nn_dense(const float *data, int64_t rows, int64_t cols);

/* The transposed matrix, without moving anything. */
nn_view nn_transpose(nn_view matrix);

/* out = a * b, or out += a * b when `accumulate`.
 *
 *   a    [m, k], b [k, n]: views, any strides
 *   out  [m, n], row after row, `out_stride` floats from one row to the next; must not overlap a or b
 *
 * xd_matmul_cpu with its workspace on the stack, 0.6 MB; no heap. */
void nn_matmul(nn_view a, nn_view b, float *out, int64_t out_stride, bool accumulate);

#ifdef __cplusplus
}
#endif

#endif /* NN_MATMUL_H */
