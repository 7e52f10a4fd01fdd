#ifndef XDI_KERNEL_CUDA_H
#define XDI_KERNEL_CUDA_H

#include "base/context.h"

/* Set-up of the CUDA unit: xdistill_cuda.cu, compiled by nvcc beside this header, has these functions. */
#if !defined(XDISTILL_STATIC)

/* A GPU that one context computes on. */
typedef struct xd_cuda xd_cuda;

/* Settings of a GPU. Zero is the default of every field. */
typedef struct xd_cuda_desc {
    xd_allocator
        allocator; /* of device memory, a pool of the caller's for example; zero -> cudaMalloc, cudaFree */
    /* Losses hold a row in the shared memory of a cluster of blocks, so that it is read once. Takes rows of more than
     * 2048 columns that begin on 16 bytes and fit, where one rank has the whole vocabulary; the others, and all in
     * INVARIANT mode, are worked on as without it. Needs compute capability 9.0 and a build for it, else there is a
     * warning in the log. Values agree with the other path's as the CPU's do. Default: off, no GPU has measured it. */
    bool cluster;
    /* Matrix products, those of heads above all, by NVIDIA's cuBLASLt, which xd_cuda_create loads: its path or name; ""
     * -> the name for the toolkit of the build (libcublasLt.so.13). It takes products whose sides are both F32 or both
     * BF16, and where bf16 is asked for (xd_matmul_args, xd_head_loss_desc) any two: sides in F32 are rounded into memory
     * of this context first, in pieces if need be. Sides without a stride of 1, empty products, what it has nothing for,
     * and all in INVARIANT mode are the unit's own kernel's. Keeps 128 MiB of device memory. One build, library and kind
     * of GPU give the same bits on every run; unlike the unit's, they depend on the whole shape, the strides and the
     * addresses' alignment up to 16 bytes. Run a shape once before a graph captures it, since the library may load
     * kernels then. UNSUPPORTED: it cannot be loaded, lacks a function, has another major version than the build's
     * header, or there was no cublasLt.h at the build. Default: NULL, no library; no GPU has measured it. */
    const char *cublas;
} xd_cuda_desc;

/* Makes ctx compute on the calling thread's current device, and the tensors of its operations live there:
 * every pointer to elements, statistics, results and findings is a device address from now on; descs and
 * lists stay on the host. Checks the device, loads every kernel, and warns in the log when another -arch
 * would bring faster ones.
 *
 *   ctx    work is ordered on its stream (xd_ctx_desc.stream, xd_ctx_set_stream); has no GPU yet
 *   desc   read during the call; NULL -> defaults
 *
 * Local. Waits for the device, as does xd_cuda_destroy; between the two, losses and optimizers wait for nothing
 * and copy nothing to the host (only xd_read does), and with their workspace given they allocate nothing, so a
 * step can be captured into a graph; what it points to on the device must then stay where it is. Optimizers and averages
 * keep the list of their arrays on the device, and only changes of it travel; once a graph reads such a list it stays as
 * it is, and steps over other arrays bring theirs along, in more launches. Softmax pieces
 * and selections allocate device memory in each call. The thread's current device is the same
 * after every call. Work on two streams at once needs two contexts. Ranks of one process may share a GPU.
 * Errors: STATE, UNSUPPORTED (compute capability below 8.0, cublas), MEMORY, DEVICE (with CUDA's or cuBLASLt's own
 * text, as when this build has no code for the GPU). */
XD_API xd_result xd_cuda_create(xd_ctx *ctx, const xd_cuda_desc *desc, xd_cuda **out);

/* Waits for the context's work and takes the context back to the CPU. Destroy everything made on the GPU
 * first. NULL is fine. */
XD_API void xd_cuda_destroy(xd_cuda *cuda);

#endif

#endif
