/* Distributes the rows and arrays of an entry over the threads of the launch's context. */

#include "kernel/internal.h"

/* Elements for which waking a thread pays. */
enum { XDI_SPREAD_LEAST = 1 << 16, XDI_SPREAD_TILE = 4096 };

typedef struct xdi_spread {
    const xd_launch *launch;
    const void *args;
    xdi_spread_body body;
} xdi_spread;

static void xdi_spread_piece(void *argument, int64_t begin, int64_t end, int slot) {
    const xdi_spread *s = (const xdi_spread *)argument;
    s->body(s->launch, s->args, begin, end, slot);
}

XD_PRIVATE xd_result xdi_spread_items(const xd_launch *launch, int64_t count, int64_t grain,
                                      xdi_spread_body body, const void *args) {
    xdi_spread s = { launch, args, body };
    return xdi_parallel_range(launch->ctx, count, grain, xdi_spread_piece, &s);
}

XD_PRIVATE xd_result xdi_spread_rows(const xd_launch *launch, int64_t rows, int64_t columns,
                                     xdi_spread_body body, const void *args) {
    int64_t grain = XDI_SPREAD_LEAST / (columns > 0 ? columns : 1);
    if (grain < 4) grain = rows < 32 ? 1 : 4; /* consecutive rows prefetch for each other */
    return xdi_spread_items(launch, rows, grain, body, args);
}

XD_PRIVATE xd_result xdi_spread_rooms(const xd_launch *launch, int64_t rows, int64_t columns, size_t bytes,
                                      xdi_spread_body body, const void *args) {
    if (bytes <= XDI_POOL_SCRATCH) return xdi_spread_rows(launch, rows, columns, body, args);
    return xdi_spread_items(launch, rows, rows, body, args);
}

XD_PRIVATE void *xdi_spread_room(const xd_launch *launch, void *own, int slot) {
    return slot > 0 ? xdi_parallel_scratch(launch->ctx, slot) : own;
}

/* Pieces consist of whole tiles, for any number of arrays. */
XD_PRIVATE xd_result xdi_spread_elements(const xd_launch *launch, int64_t count, int64_t arrays,
                                         xdi_spread_body body, const void *args) {
    const int64_t tile = XDI_SPREAD_TILE, grain = XDI_SPREAD_LEAST / (arrays > 0 ? arrays : 1) / tile * tile;
    return xdi_spread_items(launch, count, grain > tile ? grain : tile, body, args);
}
