#ifndef XDI_KERNEL_MATMUL_H
#define XDI_KERNEL_MATMUL_H

#include "base/cpu.h"
#include "kernel/types.h"

/* A borrowed matrix, read only: element (r, c) is data[r * row_stride + c * col_stride], so the transposed
 * matrix is the same memory with the strides exchanged. */
typedef struct xd_matrix {
    const void *data;
    xd_dtype dtype; /* F32 or BF16 */
    int64_t rows, cols;
    int64_t row_stride, col_stride; /* elements */
} xd_matrix;

/* out = a b, or out += a b. */
typedef struct xd_matmul_args {
    xd_matrix a; /* [m, k] */
    xd_matrix b; /* [k, n] */
    float *out;  /* [m, n]; must not overlap a or b */
    int64_t out_stride;
    bool accumulate; /* add to what out holds */
    /* Both operands are rounded to bf16 as they are read, products and sums stay f32: for backends that multiply
     * bf16 faster. Other backends ignore it. */
    bool bf16;
    /* Of out: 0 -> F32. BF16 (behind the same pointer, sums rounded once) where xd_product_kernels.narrow, without
     * accumulate. */
    xd_dtype out_dtype;
} xd_matmul_args;

/* What a table says of its products; zero on the CPU. */
typedef struct xd_product_kernels {
    bool narrow;      /* out may be BF16 */
    uint32_t library; /* version of another library that makes them; 0: they are the table's own */
    /* Allocates what the first product would; NULL -> nothing. Local. Errors: MEMORY. */
    xd_result (*prepare)(const xd_launch *launch);
    void (*own)(xd_ctx *ctx); /* later products are the table's own; NULL -> they are */
} xd_product_kernels;

/* Bytes of workspace that one product needs, whatever its size. */
#define XD_MATMUL_WORKSPACE_BYTES ((size_t)(640 * 1024))

/* The rows as a matrix, and the transposed matrix; both are views. */
XD_API xd_matrix xd_matrix_of_rows(const xd_rows *rows);
XD_API xd_matrix xd_matrix_transposed(xd_matrix matrix);

/* The matrix product of a context's kernel table, on its threads.
 *
 *   workspace  XD_MATMUL_WORKSPACE_BYTES, aligned for floats, for any number of threads; NULL -> allocated by the
 *              context's allocator
 *
 * An element's sum runs over k in blocks of 256 terms, in an order that depends on k alone: a row of the
 * result has the same bits whichever rows and columns are computed with it, and `accumulate` over blocks of
 * k whose lengths are multiples of 256 gives the bits of one call. XD_SGEMM, when the implementation is compiled
 * with it (the argument list of cblas_sgemm without the leading order), is used for F32 by contexts that are not
 * INVARIANT; it has a different order, as has a GPU's cuBLASLt (xd_cuda_desc.cublas). Local. Errors:
 * ARGUMENT for shapes that do not fit, DTYPE, MEMORY. */
XD_API xd_result xd_matmul(xd_ctx *ctx, const xd_matmul_args *args, void *workspace);

/* The product on a CPU level, without a context: nothing is checked, workspace is required, XD_SGEMM is not used. The
 * machine must have the level (xd_cpu_best). Pure. */
XD_API void xd_matmul_cpu(xd_cpu_level level, const xd_matmul_args *args, void *workspace);

#endif
