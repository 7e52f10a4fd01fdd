/* Where the elements of a part lie in the whole tensor, and work in rounds. */

#include "checkpoint/internal.h"
#include "tensor/interval.h"

#include <string.h>

/* The last dimension that is not whole: a run is rows of it, of `*row` elements. */
static int xdi_run_dimension(const xd_tensor_part *p, int64_t *row) {
    int d = p->ndim - 1;
    *row = 1;
    for (; d > 0 && xd_intervals_extent(p->region->interval[d], p->region->count[d]) == p->shape[d]; d--)
        *row *= p->shape[d];
    return d;
}

/* The index at a position of a list; *after: how many follow it in its interval, it included. */
static int64_t xdi_run_index(const xd_interval *list, int64_t position, int64_t *after) {
    for (; position >= list->end - list->begin; list++) position -= list->end - list->begin;
    *after = list->end - list->begin - position;
    return list->begin + position;
}

XD_PRIVATE int64_t xdi_part_run(const xd_tensor_part *p, int64_t position, int64_t *index) {
    int64_t row, at[XD_DIMS_MAX], after = 1;
    *index = position;
    if (!p->region || p->ndim == 0) return p->range.end - position;
    const int last = xdi_run_dimension(p, &row);
    int64_t left = position / row;
    for (int d = last; d >= 0; d--) {
        const int64_t extent = xd_intervals_extent(p->region->interval[d], p->region->count[d]);
        at[d] = left % extent;
        left /= extent;
    }
    *index = 0;
    for (int d = 0; d <= last; d++)
        *index = *index * p->shape[d] + xdi_run_index(p->region->interval[d], at[d], &after);
    *index = *index * row + position % row;
    const int64_t run = after * row - position % row, rest = p->range.end - position;
    return run < rest ? run : rest;
}

XD_PRIVATE int64_t xdi_part_position(const xd_tensor_part *p, int64_t index) {
    int64_t low = p->range.begin, high = p->range.end, at;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        (void)xdi_part_run(p, middle, &at);
        if (at < index)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* ---- a part as numbers ---- */

XD_PRIVATE int64_t xdi_part_write(const xd_tensor_part *p, bool holds, int64_t *message) {
    holds = holds && p->range.begin < p->range.end;
    message[0] = holds ? p->range.begin : 0;
    message[1] = holds ? p->range.end : 0;
    message[2] = holds && p->region != NULL;
    return message[2] ? xdi_cover_put_box(p->region, message, 3) : 3;
}

XD_PRIVATE int64_t xdi_part_read(const xd_tensor_part *own, const int64_t *message, xd_region *region,
                                 xd_tensor_part *part) {
    const int64_t *at = message + 3;
    *part = *own;
    part->range.begin = message[0];
    part->range.end = message[1];
    part->region = message[2] ? region : NULL;
    if (!message[2]) return 3;
    memset(region, 0, sizeof *region);
    region->ndim = own->ndim;
    for (int d = 0; d < own->ndim; d++) {
        region->count[d] = (int)*at++;
        for (int i = 0; i < region->count[d]; i++) {
            region->interval[d][i].begin = *at++;
            region->interval[d][i].end = *at++;
        }
    }
    return at - message;
}

/* ---- rounds ---- */

XD_PRIVATE xd_result xdi_round_count(xd_comm *comm, uint64_t left, int64_t *rounds) {
    int64_t most = (int64_t)(left / XDI_ROUND + (left % XDI_ROUND != 0));
    if (most == 0) most = 1;
    return xd_all_reduce(comm, &most, rounds, 1, XD_DTYPE_I64, XD_MAX);
}

XD_PRIVATE xd_result xdi_rounds(xd_comm *comm, uint64_t left, xdi_work work, void *argument) {
    int64_t rounds = 0;
    XD_TRY(xdi_round_count(comm, left, &rounds));
    for (; rounds > 0; rounds--) XD_TRY(xd_agree(comm, work(argument, XDI_ROUND)));
    return XD_OK;
}
