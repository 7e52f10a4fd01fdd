#ifndef XDI_KERNEL_CUDA_H
#define XDI_KERNEL_CUDA_H

#include "base/context.h"

/* Set-up of the CUDA unit: nvcc compiles xdistill_cuda.cu, which has these functions. */
#if !defined(XDISTILL_STATIC)

/* A GPU of one context. */
typedef struct xd_cuda xd_cuda;

/* Settings of a GPU. Zero is the default of every field. */
typedef struct xd_cuda_desc {
    xd_allocator allocator; /* device memory, such as a pool; zero -> cudaMalloc, cudaFree */
    /* Losses keep a row in the shared memory of a cluster of blocks and read it once. Needs compute capability 9.0 and a
     * build for it; the log warns otherwise. Applies to rows above 2048 columns, aligned to 16 bytes, that fit, on one rank
     * with the whole vocabulary, except in INVARIANT mode. Values agree within the CPU's bounds. Default: off. */
    bool cluster;
    /* Path or name of NVIDIA's cuBLASLt, loaded by xd_cuda_create for matrix products, mainly of heads. "" -> the build
     * toolkit's (libcublasLt.so.13); NULL -> none, the default. Holds 128 MiB of device memory.
     *
     * Computes F32 by F32, BF16 by BF16, and with bf16 requested (xd_matmul_args, xd_head_loss_desc) any two. It then rounds
     * F32 into context memory, in blocks if needed. The unit's kernel computes operands without a stride of 1, empty
     * products, those without a library algorithm, and INVARIANT mode.
     *
     * One build, library and GPU model give the same bits. These depend on shape, strides and alignment up to 16 bytes. Run a
     * shape before graph capture.
     * Errors: UNSUPPORTED (not loadable, missing function, other major version than cublasLt.h, build without it). */
    const char *cublas;
} xd_cuda_desc;

/* Graph capture: losses and optimizers do not wait or copy to the host; only xd_read does. With a workspace they allocate
 * nothing, so a graph can capture a step. Its device memory must not move. Optimizers and averages keep the list of their
 * arrays on the device and copy changes only. A list that a graph reads is fixed. Other arrays then go as kernel arguments,
 * in more launches. xd_log_probs and top-k selections allocate device memory in each call. */

/* Makes ctx compute on the calling thread's current device: pointers to elements, statistics, results and statuses are then
 * device addresses. Descs and lists stay on the host. Checks the device, loads every kernel, and logs a warning if another
 * -arch has faster ones.
 *
 *   ctx    has no GPU yet; its stream orders the work (xd_ctx_desc.stream, xd_ctx_set_stream)
 *   desc   NULL -> defaults
 *
 * Local. Waits for the device, and so does xd_cuda_destroy. Concurrent streams need a context each. Ranks of one process may
 * share a GPU. No call changes the thread's current device.
 * Errors: STATE, UNSUPPORTED (compute capability below 8.0, cublas), MEMORY, DEVICE (with CUDA's or cuBLASLt's text; also a
 * build without code for the GPU). */
XD_API xd_result xd_cuda_create(xd_ctx *ctx, const xd_cuda_desc *desc, xd_cuda **out);

/* Waits for the work and returns the context to the CPU; NULL is legal. Destroy GPU objects first. */
XD_API void xd_cuda_destroy(xd_cuda *cuda);

#endif

#endif
