/* Where the elements of a part lie in the whole tensor. */

#include "tensor/internal.h"

/* The last dimension that is not whole: a run is rows of it, of `*row` elements. */
static int xdi_run_dimension(const xd_tensor_part *p, int64_t *row) {
    int d = p->ndim - 1;
    *row = 1;
    for (; d > 0 && xdi_intervals_extent(p->region->interval[d], p->region->count[d]) == p->shape[d]; d--)
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
        const int64_t extent = xdi_intervals_extent(p->region->interval[d], p->region->count[d]);
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
