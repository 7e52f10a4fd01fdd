#ifndef XDI_KERNEL_CELLS_H
#define XDI_KERNEL_CELLS_H

#include "base/internal.h"
#include "kernel/fixed.h"

/* cells.c: cells are doubles or, when fixed, xd_fixed in the same memory, which is large enough for either.
 * -infinity is a legal term; NaN, and in fixed point a term that is too large, makes the cell NaN. The value of a
 * fixed cell may be NaN or -infinity too. */
XD_PRIVATE double xdi_cells_value(bool fixed, const double *cells, int64_t i);
XD_PRIVATE void xdi_cells_add(bool fixed, double *cells, int64_t i, double term);

#endif
