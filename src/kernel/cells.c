/* Sums that are doubles or, in INVARIANT mode, integers. */

#include "kernel/cells.h"

XD_PRIVATE void xdi_cells_add(bool fixed, double *cells, int64_t i, double term) {
    if (fixed)
        xd_cell_put((xd_fixed *)(void *)cells + i, term);
    else
        cells[i] += term;
}

XD_PRIVATE double xdi_cells_value(bool fixed, const double *cells, int64_t i) {
    return fixed ? xd_cell_read(((const xd_fixed *)(const void *)cells)[i]) : cells[i];
}
