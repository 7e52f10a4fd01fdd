#ifndef XDI_KERNEL_KERNELS_H
#define XDI_KERNEL_KERNELS_H

#include "base/cpu.h"
#include "kernel/copy.h"
#include "kernel/dmd.h"
#include "kernel/dmd_loss.h"
#include "kernel/estimate.h"
#include "kernel/fill.h"
#include "kernel/loss.h"
#include "kernel/matmul.h"
#include "kernel/mft.h"
#include "kernel/optimizer.h"
#include "kernel/reduce.h"
#include "kernel/rows.h"
#include "kernel/softmax.h"
#include "kernel/topk.h"
#include "kernel/uld.h"
#include "kernel/xtoken.h"

/* Where the tensors of a context are stored. */
typedef enum xd_device_type { XD_DEVICE_CPU = 0, XD_DEVICE_CUDA } xd_device_type;

/* Direction of a copy. */
typedef enum xd_copy_kind { XD_COPY_ON_DEVICE = 0, XD_COPY_TO_DEVICE, XD_COPY_TO_HOST } xd_copy_kind;

/* Identifies memory of a device to other processes of its node. */
typedef struct xd_device_handle {
    unsigned char bytes[64];
} xd_device_handle;

/* Memory of a device and the order of work on it. Copies and fills are ordered on launch->stream; host memory given to
 * a copy must not change until synchronize. On the CPU all of them are complete when they return. */
typedef struct xd_device_ops {
    void *(*allocate)(xd_ctx *ctx, size_t bytes); /* NULL when there is no room; the contents are undefined */
    void (*release)(xd_ctx *ctx, void *memory);   /* takes effect after work already launched; NULL is fine */
    xd_result (*copy)(const xd_launch *launch, void *to, const void *from, size_t bytes, xd_copy_kind kind);
    xd_result (*fill)(const xd_launch *launch, void *to, uint8_t value, size_t bytes);
    xd_result (*synchronize)(
        const xd_launch *launch); /* waits at most the context's timeout_seconds: TIMEOUT */
    bool (*owns)(xd_ctx *ctx,
                 const void *memory); /* true when the kernels can access it; false for host memory */
    /* Order between streams, of other contexts too: what is launched after `wait` runs after what was launched before
     * the last `record`. Destroying needs no context. The CPU has no events and does not need them. */
    void *(*event_create)(xd_ctx *ctx); /* NULL on failure and on the CPU */
    void (*event_destroy)(void *event);
    xd_result (*event_record)(const xd_launch *launch, void *event);
    xd_result (*event_wait)(const xd_launch *launch, void *event);
    /* Calls the function after what was launched before, on some thread of the host; it must not use a device. */
    xd_result (*call)(const xd_launch *launch, void (*function)(void *user), void *user);
    /* Memory for other processes of the node. NULL when the device has no memory that others could open, as on the CPU,
     * or when it cannot be opened here. Memory must be closed wherever it was opened before its creator destroys it. */
    void *(*share_create)(xd_ctx *ctx, size_t bytes, xd_device_handle *handle);
    void (*share_destroy)(xd_ctx *ctx, void *memory); /* no work on it may be pending; NULL is fine */
    void *(*share_open)(xd_ctx *ctx, const xd_device_handle *handle);
    void (*share_close)(xd_ctx *ctx, void *memory);
    /* A stream beside the caller's, for launch->stream: nothing orders it but events. NULL on failure and on the CPU, which
     * needs none. What has been launched on it is completed even when it is destroyed; NULL is fine. */
    void *(*stream_create)(xd_ctx *ctx);
    void (*stream_destroy)(xd_ctx *ctx, void *stream);
    /* Memory of the host that copies to and from the device reach directly (page-locked), for buffers that live long. NULL when
     * there is none; the contents are undefined. On the CPU that of the context. NULL: not offered. */
    void *(*host_allocate)(xd_ctx *ctx, size_t bytes);
    void (*host_release)(xd_ctx *ctx, void *memory); /* no copy of it may be pending; NULL is fine */
    /* Whether kernels can read memory of another context's device; `copy` always can. After event_create. NULL: always. */
    bool (*reaches)(xd_ctx *ctx, const void *memory);
} xd_device_ops;

/* All that a context computes with. Losses, optimizers and transports call nothing else, so another
 * processor is another table. */
typedef struct xd_kernels {
    const char *name; /* "plain", "avx2", "cuda", ... */
    xd_device_type device;
    xd_device_ops memory;
    xd_loss_kernels loss;
    xd_topk_kernels topk;
    xd_mft_kernels mft;
    xd_row_kernels rows;
    xd_softmax_kernels softmax;
    xd_xtoken_kernels xtoken;
    xd_uld_kernels uld;
    xd_optimizer_kernels optimizer;
    xd_result (*clip)(const xd_launch *launch, const xd_clip_args *args);
    xd_reduce_kernels reduce;
    /* the sum of weight times estimate, its derivative with respect to logprobs, and the first token whose weight is not
     * 0 and whose estimate is not finite */
    xd_result (*estimate)(const xd_launch *launch, const xd_estimate_args *args);
    xd_result (*copies)(const xd_launch *launch, const xd_copy *copies, int64_t count, const void *src,
                        void *dst, size_t size); /* performs each; blocks of one call do not overlap */
    xd_result (*matmul)(const xd_launch *launch, const xd_matmul_args *args); /* validated by xd_matmul */
    xd_result (*fill)(const xd_launch *launch,
                      const xd_fill_args *args); /* NULL -> the host forms the values and copies them */
    xd_dmd_kernels dmd;
    xd_dmd_loss_kernels dmd_loss;
    xd_product_kernels products;
} xd_kernels;

/* The table of a context: xd_ctx_desc.kernels, or that of its CPU level, which is created with the context and lives as
 * long as it. Local. */
XD_API const xd_kernels *xd_ctx_kernels(const xd_ctx *ctx);

/* The table of the context's CPU level, for memory of the host, even when its tensors are on a device: a transport that moves
 * memory of the host adds with it. Local. */
XD_API const xd_kernels *xd_ctx_host_kernels(const xd_ctx *ctx);

/* A launch on the context's stream, without workspace and status. Local. */
XD_API xd_launch xd_ctx_launch(xd_ctx *ctx);

#endif
