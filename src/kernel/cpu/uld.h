#ifndef XDI_KERNEL_CPU_ULD_H
#define XDI_KERNEL_CPU_ULD_H

#include "kernel/cpu/internal.h"

/* The plain table, the specification of the others. */
XD_PRIVATE const xd_uld_kernels *xdi_uld_kernels_plain(void);

/* uld.c: the gradient of a row of a chunk: scale p (d - mean), where d is the slope or, when `only` is not negative,
 * 1 at that column and 0 elsewhere. */
typedef struct xdi_uld_scale {
    double scale, mean;
    int64_t only;
} xdi_uld_scale;
typedef void (*xdi_uld_row_writer)(const xd_launch *launch, const xd_uld_args *a, int64_t row);

/* uld.c: the entry compare for one chunk; the entry gradient with a writer of the rows of chunks, and the plain
 * one. */
XD_PRIVATE void xdi_uld_compare_chunk(const xd_uld_args *a, int64_t i);
XD_PRIVATE xdi_uld_scale xdi_uld_row_scale(const xd_uld_args *a, const xd_uld_chunk *chunk, int64_t row);
XD_PRIVATE void xdi_uld_gradient_row(const xd_uld_args *a, int64_t row);
XD_PRIVATE xd_result xdi_uld_gradient_rows(const xd_launch *launch, const xd_uld_args *a,
                                           xdi_uld_row_writer writer);

#endif
