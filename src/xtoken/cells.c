/* Cells: sums over rows and ranks, in host and device memory. */

#include "kernel/cells.h"
#include "xtoken/internal.h"

#include <math.h>
#include <string.h>

XD_PRIVATE size_t xdi_xtoken_cell(const xdi_xtoken *x) {
    return x->fixed ? sizeof(xd_fixed) : sizeof(double);
}

XD_PRIVATE int64_t xdi_xtoken_wide(const xdi_xtoken *x) {
    return x->fixed ? 2 : 1;
}

XD_PRIVATE void xdi_xtoken_zero(const xdi_xtoken *x, double *cells, int64_t count) {
    memset(cells, 0, (size_t)count * xdi_xtoken_cell(x));
}

XD_PRIVATE void xdi_xtoken_add(const xdi_xtoken *x, double *cells, int64_t i, double term) {
    xdi_cells_add(x->fixed, cells, i, term);
}

XD_PRIVATE void xdi_xtoken_clear(const xdi_xtoken *x, int64_t count) {
    memset(x->host.sums, 0, (size_t)count * (x->fixed ? sizeof(xd_total) : sizeof(double)));
}

XD_PRIVATE void xdi_xtoken_tally(const xdi_xtoken *x, int64_t i, double term) {
    xd_total *totals = (xd_total *)(void *)x->host.sums;
    if (!x->fixed)
        x->host.sums[i] += term;
    else if (!xd_total_put(&totals[i], term))
        totals[i].rest.high = XD_CELL_NAN;
}

/* From the front, in place: a double is a third as wide. */
XD_PRIVATE xd_result xdi_xtoken_total(const xdi_xtoken *x, int64_t count, xd_comm *comm) {
    double *sums = x->host.sums;
    const int64_t words = (int64_t)(sizeof(xd_total) / sizeof(int64_t));
    if (!x->fixed) return xdi_xtoken_reduce(x, comm, sums, count);
    if (comm && xd_comm_size(comm) > 1)
        XD_TRY(xd_all_reduce(comm, sums, sums, words * count, XD_DTYPE_I64, XD_SUM));
    for (int64_t i = 0; i < count; i++) {
        xd_total total;
        memcpy(&total, sums + words * i, sizeof total);
        sums[i] = total.rest.high >= XD_CELL_NAN / 2 ? (double)NAN : xd_total_read(total);
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_reduce(const xdi_xtoken *x, xd_comm *comm, double *cells, int64_t count) {
    if (!comm || xd_comm_size(comm) == 1 || count == 0) return XD_OK;
    if (x->fixed) return xd_all_reduce(comm, cells, cells, 2 * count, XD_DTYPE_I64, XD_SUM);
    return xd_all_reduce(comm, cells, cells, count, XD_DTYPE_F64, XD_SUM);
}

/* From the front, in place: a double is half as wide as a cell. */
XD_PRIVATE xd_result xdi_xtoken_join(const xdi_xtoken *x, double *cells, int64_t count, xd_comm *comm) {
    XD_TRY(xdi_xtoken_reduce(x, comm, cells, count));
    for (int64_t i = 0; i < count && x->fixed; i++) {
        const double value = xdi_cells_value(true, cells, i);
        memcpy(&cells[i], &value, sizeof value);
    }
    return XD_OK;
}

/* On a GPU in a single step, because a launch costs more than memory. */
XD_PRIVATE int64_t xdi_xtoken_settle_room(const xdi_xtoken *x, int64_t count) {
    const int64_t steps = x->on_device ? 1 : 6;
    return x->fixed ? count / ((1 << steps) - 1) + 1 : 0;
}

/* A step is as long as the gap between its doubles and its cells, so it overwrites only cells that were read before. */
XD_PRIVATE xd_result xdi_xtoken_settle(const xdi_xtoken *x, double *cells, int64_t room, int64_t count,
                                       double **out) {
    int64_t step;
    *out = x->fixed ? cells - room : cells;
    for (int64_t done = 0; done < count && x->fixed; done += step) {
        step = count - done < room + done ? count - done : room + done;
        XD_TRY(x->kernels->xtoken.settle(&x->launch, cells + 2 * done, step, *out + done));
    }
    return XD_OK;
}
