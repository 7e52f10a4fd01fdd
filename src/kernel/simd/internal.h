#ifndef XDI_KERNEL_SIMD_INTERNAL_H
#define XDI_KERNEL_SIMD_INTERNAL_H

#include "kernel/cpu/internal.h"
#include "kernel/cpu/matmul.h"
#include "kernel/kernels.h"
#include "kernel/span.h"

/* The entries that are faster with vectors: kernels.c replaces those of the plain tables by them. across.h and dmd.h have those
 * of the wings. */
XD_PRIVATE void xdi_simd_loss_fill(xd_loss_kernels *kernels);
XD_PRIVATE void xdi_simd_loss_fill_plain(xd_loss_kernels *kernels); /* the plain level */
XD_PRIVATE void xdi_simd_topk_fill(xd_topk_kernels *kernels);
XD_PRIVATE void xdi_simd_rows_fill(xd_row_kernels *rows, xd_softmax_kernels *softmax);
XD_PRIVATE void xdi_simd_mft_fill(xd_mft_kernels *kernels);
XD_PRIVATE void xdi_simd_reduce_fill(xd_reduce_kernels *kernels);

/* topk.c: the entry select. */
XD_PRIVATE xd_result xdi_simd_select(const xd_launch *launch, const xd_select_args *a);

/* levels.c: the entries of a level, XD_CPU_PLAIN and above, and its spans and matrix product. */
XD_PRIVATE const xd_optimizer_kernels *xdi_optimizer_kernels_level(xd_cpu_level level);
XD_PRIVATE const xdi_span_kernels *xdi_span_kernels_level(xd_cpu_level level);
XD_PRIVATE xdi_matmul_kernel xdi_matmul_kernel_level(xd_cpu_level level, bool bf16);

/* matmul.c: the product on the level of the context; launch->workspace holds XD_MATMUL_WORKSPACE_BYTES. */
XD_PRIVATE xd_result xdi_matmul_cpu(const xd_launch *launch, const xd_matmul_args *args);

/* span_<level>.c: the spans of a level, and its table of entries; matmul.c: its matrix product. Spans finish their last
 * few elements with the plain ones. */
#define XDI_SPAN_LEVEL(level)                                          \
    XD_PRIVATE const xdi_span_kernels *xdi_span_kernels_##level(void); \
    XD_PRIVATE const xd_optimizer_kernels *xdi_optimizer_kernels_##level(void);
#if defined(XDI_PORTABLE)
XDI_SPAN_LEVEL(portable)
#endif
#if defined(XDI_X86)
XDI_SPAN_LEVEL(avx2)
XDI_SPAN_LEVEL(avx512)
XD_PRIVATE xdi_matmul_kernel xdi_matmul_kernel_avx2(bool bf16);
XD_PRIVATE xdi_matmul_kernel xdi_matmul_kernel_avx512(bool bf16);
XD_PRIVATE xdi_matmul_kernel xdi_matmul_kernel_avx512_bf16(bool bf16);
#endif

/* exact.c: the entries stats, mixture and topk_stats for sums in fixed point, on vectors. */
XD_PRIVATE xd_result xdi_exact_stats(const xd_launch *launch, const xd_loss_args *a);
XD_PRIVATE xd_result xdi_exact_mixtures(const xd_launch *launch, const xd_loss_args *a);
XD_PRIVATE xd_result xdi_exact_topk_stats(const xd_launch *launch, const xd_topk_args *a);

#endif
