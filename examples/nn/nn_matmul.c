/* nn_matmul.c - the matrix product of the small models: the library's own, on the best level of this machine. */
#include "nn_matmul.h"

nn_view nn_block(const float *data, int64_t rows, int64_t cols, int64_t stride) {
    nn_view view = { data, XD_DTYPE_F32, rows, cols, stride, 1 };
    return view;
}

nn_view nn_dense(const float *data, int64_t rows, int64_t cols) {
    return nn_block(data, rows, cols, cols);
}

nn_view nn_transpose(nn_view matrix) {
    return xd_matrix_transposed(matrix);
}

/* Inlined, the workspace would take room on the stack once for every call of a function. */
#if defined(__GNUC__)
__attribute__((noinline))
#endif
void nn_matmul(nn_view a, nn_view b, float *out, int64_t out_stride, bool accumulate) {
    float workspace[XD_MATMUL_WORKSPACE_BYTES / sizeof(float)];
    xd_matmul_args args;
    args.a = a;
    args.b = b;
    args.out = out;
    args.out_stride = out_stride;
    args.accumulate = accumulate;
    args.bf16 = false;
    xd_matmul_cpu(xd_cpu_best(), &args, workspace);
}
