#ifndef XDI_KERNEL_KERNELS_H
#define XDI_KERNEL_KERNELS_H

#include "base/cpu.h"
#include "kernel/loss.h"
#include "kernel/matmul.h"
#include "kernel/optimizer.h"

/* Whose memory the tensors of a context are. */
typedef enum xd_device_type { XD_DEVICE_CPU = 0, XD_DEVICE_CUDA } xd_device_type;

/* All that a context computes with. Losses, optimizers and transports call nothing else, so another
 * processor is another table. */
typedef struct xd_kernels {
    const char *name; /* "plain", "avx2", "cuda", ... */
    xd_device_type device;
    xd_loss_kernels loss;
    xd_optimizer_kernels optimizer;
    xd_result (*matmul)(const xd_launch *launch, const xd_matmul_args *args); /* validated by xd_matmul */
} xd_kernels;

/* The CPU's table of a level; XD_CPU_BEST is this machine's. The caller sees to it that the machine has the
 * level. Local. */
XD_API xd_kernels xd_kernels_cpu(xd_cpu_level level);

/* The table of a context: xd_ctx_desc.kernels, or that of its CPU level. Local. */
XD_API xd_kernels xd_ctx_kernels(const xd_ctx *ctx);

#endif
