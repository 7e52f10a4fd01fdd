#ifndef XDI_KERNEL_CELLS_H
#define XDI_KERNEL_CELLS_H

#include "base/internal.h"
#include "kernel/fixed.h"

/* cells.c: cells are doubles or, when fixed, xd_fixed in the same memory, which has room for either.
 * -infinity is a legal term; NaN, and in fixed point what does not fit, makes the cell NaN. The value of a
 * fixed one is NaN or -infinity again. */
XD_PRIVATE double xdi_cells_value(bool fixed, const double *cells, int64_t i);
XD_PRIVATE void xdi_cells_add(bool fixed, double *cells, int64_t i, double term);

#endif
