/* nn_matmul.h - the one matrix product of the small models. */
#ifndef NN_MATMUL_H
#define NN_MATMUL_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A matrix somewhere in memory, read only. Element (r, c) is data[r * row_stride + c * col_stride], so a
 * transposed matrix is the same memory with the two strides exchanged. */
typedef struct nn_view {
    const float *data;
    int64_t rows, cols;
    int64_t row_stride, col_stride;
} nn_view;

/* rows x cols numbers stored row after row; `stride` floats from one row to the next (>= cols). */
nn_view nn_block(const float *data, int64_t rows, int64_t cols, int64_t stride);

/* The same without gaps: stride = cols. */
nn_view nn_dense(const float *data, int64_t rows, int64_t cols);

/* The transposed matrix, without moving anything. */
nn_view nn_transpose(nn_view matrix);

/* The instruction sets that have a kernel of their own. */
typedef enum nn_cpu_level { NN_CPU_PORTABLE, NN_CPU_AVX2, NN_CPU_AVX512 } nn_cpu_level;

/* The fastest level this processor runs. */
nn_cpu_level nn_cpu_best(void);

/* out = a * b, or out += a * b when `accumulate`.
 *
 *   a    [m, k], b [k, n]: views, any strides
 *   out  [m, n], row after row, `out_stride` floats from one row to the next; must not overlap a or b
 *
 * Uses no heap: about 0.6 MB of stack. An element's sum runs over k in an order that depends on k alone, so a
 * row of the result has the same bits whichever rows are computed with it. Single-threaded: the ranks are the
 * parallelism. With NN_USE_BLAS defined it calls cblas_sgemm instead (link a BLAS). */
void nn_matmul(nn_view a, nn_view b, float *out, int64_t out_stride, bool accumulate);

/* The same with a chosen kernel, for tests; `level` must not exceed nn_cpu_best(). */
void nn_matmul_at(nn_cpu_level level, nn_view a, nn_view b, float *out, int64_t out_stride, bool accumulate);

#ifdef __cplusplus
}
#endif

#endif /* NN_MATMUL_H */
