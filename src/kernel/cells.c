/* Sums that are doubles or, in INVARIANT mode, integers. */

#include "kernel/cells.h"

#include <math.h>

/* A cell in fixed point: -infinity is a number below all sums of log-probabilities; a NaN stays above every
 * sum, also when those of up to 63 ranks are added up. */
#define XDI_CELLS_MINUS_INFINITY (-2097152.0)
#define XDI_CELLS_NAN ((int64_t)1 << 57)

XD_PRIVATE void xdi_cells_add(bool fixed, double *cells, int64_t i, double term) {
    if (!fixed) {
        cells[i] += term;
        return;
    }
    xd_fixed *cell = (xd_fixed *)(void *)cells + i;
    const double low = XDI_CELLS_MINUS_INFINITY;
    if (cell->high >= XDI_CELLS_NAN / 2 || (term == -INFINITY && xd_fixed_value(*cell) < low / 2.0)) return;
    if (!xd_fixed_add(cell, term == -INFINITY ? low : term)) cell->high = XDI_CELLS_NAN;
}

XD_PRIVATE double xdi_cells_value(bool fixed, const double *cells, int64_t i) {
    if (!fixed) return cells[i];
    const xd_fixed cell = ((const xd_fixed *)(const void *)cells)[i];
    const double value = xd_fixed_value(cell);
    if (cell.high >= XDI_CELLS_NAN / 2) return (double)NAN;
    return value < XDI_CELLS_MINUS_INFINITY / 2.0 ? -INFINITY : value;
}
