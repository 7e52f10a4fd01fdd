#ifndef XDI_KERNEL_CUDA_H
#define XDI_KERNEL_CUDA_H

#include "base/context.h"

/* Set-up of the CUDA unit: xdistill_cuda.cu, compiled by nvcc beside this header, has these functions. */
#if !defined(XDISTILL_STATIC)

/* A GPU that one context computes on. */
typedef struct xd_cuda xd_cuda;

/* Settings of a GPU. Zero is the default of every field. */
typedef struct xd_cuda_desc {
    xd_allocator allocator; /* of device memory, a pool of the caller's for example; zero -> cudaMalloc,
                             * cudaFree */
    /* Losses hold a row in the shared memory of a cluster of blocks, so that it is read once. Applies to rows of more than
     * 2048 columns that are aligned to 16 bytes and fit, where one rank has the whole vocabulary; other rows, and all in
     * INVARIANT mode, take the usual path. Needs compute capability 9.0 and a build for it, else there is a warning in
     * the log. Values agree with the other path's within the bounds of the CPU's. Default: off, not yet measured on a
     * GPU. */
    bool cluster;
    /* Path or name of NVIDIA's cuBLASLt, which xd_cuda_create then loads for matrix products, mainly those of heads; ""
     * -> the name for the toolkit of the build (libcublasLt.so.13). It computes products whose operands are both F32 or
     * both BF16, and, where bf16 is requested (xd_matmul_args, xd_head_loss_desc), any two: F32 operands are rounded into
     * memory of this context first, in blocks if need be. The unit's own kernel computes operands without a stride of 1,
     * empty products, products that the library has no algorithm for, and all in INVARIANT mode. Holds 128 MiB of device
     * memory. One build, library and GPU model give the same bits on every run; unlike the unit's, these bits depend on the
     * whole shape, the strides and the addresses' alignment up to 16 bytes. Run a shape once before a graph captures it,
     * since the library may load kernels then. UNSUPPORTED: it cannot be loaded, lacks a function, has another major
     * version than the build's header, or the build had no cublasLt.h. Default: NULL, no library; not yet measured on a
     * GPU. */
    const char *cublas;
} xd_cuda_desc;

/* Makes ctx compute on the calling thread's current device, and the tensors of its operations live there:
 * every pointer to elements, statistics, results and statuses is a device address from now on; descs and
 * lists stay on the host. Checks the device, loads every kernel, and warns in the log when another -arch
 * would give faster kernels.
 *
 *   ctx    work is ordered on its stream (xd_ctx_desc.stream, xd_ctx_set_stream); has no GPU yet
 *   desc   read during the call; NULL -> defaults
 *
 * Local. Waits for the device; xd_cuda_destroy does too. Between the two, losses and optimizers wait for nothing
 * and copy nothing to the host (only xd_read does), and with their workspace given they allocate nothing, so a
 * step can be captured into a graph; the device memory it points to must then not move. Optimizers and averages
 * store the list of their arrays on the device, and only its changes are copied there; once a graph reads such a list it
 * does not change any more, and steps over other arrays pass theirs as kernel arguments, in more launches. xd_row_stats
 * and the functions declared with it, and top-k selections, allocate device memory in each call. The thread's current
 * device is the same after every call. Work on two streams at once needs two contexts. Ranks of one process may share a
 * GPU.
 * Errors: STATE, UNSUPPORTED (compute capability below 8.0, cublas), MEMORY, DEVICE (with CUDA's or cuBLASLt's own
 * text, for example when this build has no code for the GPU). */
XD_API xd_result xd_cuda_create(xd_ctx *ctx, const xd_cuda_desc *desc, xd_cuda **out);

/* Waits for the context's work and takes the context back to the CPU. Destroy everything made on the GPU
 * first. NULL is fine. */
XD_API void xd_cuda_destroy(xd_cuda *cuda);

#endif

#endif
