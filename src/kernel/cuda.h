#ifndef XDI_KERNEL_CUDA_H
#define XDI_KERNEL_CUDA_H

#include "base/context.h"

/* The CUDA unit: nvcc compiles xdistill_cuda.cu. */
#if !defined(XDISTILL_STATIC)

/* A context's GPU. */
typedef struct xd_cuda xd_cuda;

/* Settings of a GPU. */
typedef struct xd_cuda_desc {
    xd_allocator allocator; /* device memory; zero -> cudaMalloc, cudaFree */
    /* Losses always read rows twice. By default a row that fits stays in the shared memory of a cluster and is read once. This
     * needs compute capability 9.0 and a build for it: docs/performance.md. Both agree within the CPU's bounds. */
    bool two_sweeps;
    /* NVIDIA's cuBLASLt for matrix products, mainly of heads: path or name. NULL or "" -> the build toolkit's
     * (libcublasLt.so.13), by its name or beside libcudart. Where that does not load, products are the unit's own, as with
     * "none", and the log says so (INFO). Holds 128 MiB from the first product on. Ranks of a world use one version or none.
     * Errors, of a path or name: UNSUPPORTED (not loadable, missing function, other major version than cublasLt.h, build
     * without it). */
    const char *cublas;
} xd_cuda_desc;

/* Graph capture: docs/performance.md. Losses and optimizers do not wait or copy to the host; only xd_read does.
 * These allocate device memory in each call: xd_log_probs without a workspace, xd_vocab_topk over several ranks and
 * xd_vocab_topk_columns. */

/* Makes ctx compute on the calling thread's current device: pointers to elements, statistics, results and statuses are then
 * device addresses. Descs and lists stay on the host. Loads every kernel; warns in the log if another -arch has faster
 * ones.
 *
 *   ctx    has no GPU yet; its stream orders the work
 *   desc   NULL -> defaults
 *
 * Local. Waits for the device. Concurrent streams need a context each. Ranks of one process may share a GPU. No call
 * changes the thread's current device.
 * Errors: STATE, UNSUPPORTED (compute capability below 8.0, cublas, a unit compiled with -use_fast_math, -ftz=true or
 * -prec-div=false), MEMORY, DEVICE (with CUDA's or cuBLASLt's text; also a build without code for the GPU). */
XD_API xd_result xd_cuda_create(xd_ctx *ctx, const xd_cuda_desc *desc, xd_cuda **out);

/* Waits for the work and returns the context to the CPU. Destroy GPU objects first. */
XD_API void xd_cuda_destroy(xd_cuda *cuda);

#endif

#endif
