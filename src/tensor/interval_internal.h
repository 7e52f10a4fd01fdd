#ifndef XDI_TENSOR_INTERVAL_INTERNAL_H
#define XDI_TENSOR_INTERVAL_INTERNAL_H

#include "base/internal.h"
#include "kernel/copy.h"
#include "tensor/interval.h"

/* interval.c: lists of intervals and regions of indices. Data movement between layouts is planned with them: intersect what
 * one rank holds with what another needs, and get a list of strided copies. Pure: no call communicates or
 * allocates. */

/* Lists of intervals are sorted, disjoint and without empty members; they may touch. A result never has
 * touching neighbours. `out` must have room for na + nb entries and may not overlap an input; the number
 * written is returned. */
XD_PRIVATE int xdi_intervals_unite(const xd_interval *a, int na, const xd_interval *b, int nb,
                                   xd_interval *out);
XD_PRIVATE int xdi_intervals_intersect(const xd_interval *a, int na, const xd_interval *b, int nb,
                                       xd_interval *out);
XD_PRIVATE int xdi_intervals_subtract(const xd_interval *a, int na, const xd_interval *b, int nb,
                                      xd_interval *out);

/* Number of indices in a list. */
XD_PRIVATE int64_t xdi_intervals_extent(const xd_interval *list, int count);

/* Sorted, disjoint, none empty, all within [0, extent). */
XD_PRIVATE bool xdi_intervals_are_valid(const xd_interval *list, int count, int64_t extent);

/* The part of `list` whose positions are in [begin, end); the position of an index is its rank among the indices of
 * the list, from 0. `out` must have room for `count` entries. */
XD_PRIVATE int xdi_intervals_select(const xd_interval *list, int count, int64_t begin, int64_t end,
                                    xd_interval *out);

/* Whether the lists together hold every index of [0, extent) exactly once.
 *
 *   lists, counts   `owners` lists
 *   first           when false is returned: the lowest index that is not held exactly once
 *   holders         and the number of lists that hold it
 *
 * Time grows with owners x intervals for each interval. */
XD_PRIVATE bool xdi_intervals_cover_once(const xd_interval *const *lists, const int *counts, int owners,
                                         int64_t extent, int64_t *first, int *holders);

/* The region that is the whole of a shape. */
XD_PRIVATE xd_region xdi_region_whole(int ndim, const int64_t *shape);

/* Local extents, and their product (1 for ndim 0). */
XD_PRIVATE void xdi_region_shape(const xd_region *region, int64_t *shape);
XD_PRIVATE int64_t xdi_region_numel(const xd_region *region);

/* Indices held by both; false without common indices (out is then empty in some dimension). ndim must agree, and both
 * must have at most XD_LAYOUT_INTERVALS_MAX intervals per dimension, which results of this function may exceed. */
XD_PRIVATE bool xdi_region_intersect(const xd_region *a, const xd_region *b, xd_region *out);

/* True when both regions hold the same indices. Local. */
XD_PRIVATE bool xdi_region_equal(const xd_region *a, const xd_region *b);

/* Maximum number of regions of a flat range. */
#define XDI_REGION_FLAT_MAX (2 * XD_DIMS_MAX - 1)

/* The indices of a region whose positions in its storage are in a range, as regions: a shard of a flat buffer, which
 * begins and ends in the middle of a row, becomes regions like all others, for copies, redistributions and files.
 *
 *   range   positions begin <= i < end in the dense storage of `region`, which need not be a box
 *   out     room for 2 * ndim - 1 regions, 1 for ndim 0; XDI_REGION_FLAT_MAX are always enough. Their storages, one
 *           after the other, are the range of the storage of `region`
 *   count   how many there are; 0 for an empty range
 *
 * Local, allocates nothing. Errors, which leave out and count as they are: ARGUMENT for a range that ends before it begins or
 * reaches outside [0, xdi_region_numel(region)). */
XD_PRIVATE xd_result xdi_region_flat_range(xd_ctx *ctx, const xd_region *region, xd_interval range,
                                           xd_region *out, int *count);

/* The copies that move the common indices of two regions from the storage of src to that of dst.
 *
 *   src_stride, dst_stride   [ndim] in elements; NULL -> dense
 *   copies                   room for `capacity`; may be NULL with capacity 0 to count
 *
 * Returns the number of copies, which may be above capacity. Copies are disjoint on both sides and cover each
 * common index once, in ascending order. */
XD_PRIVATE int64_t xdi_region_copies(const xd_region *src, const int64_t *src_stride, const xd_region *dst,
                                     const int64_t *dst_stride, xd_copy *copies, int64_t capacity);

/* Appends [begin, end) to a list of `count`, merging it into the last entry when they touch, and
 * returns the new count. Empty intervals are dropped. */
XD_PRIVATE int xdi_interval_append(xd_interval *out, int count, int64_t begin, int64_t end);

/* Drops dimensions of extent 1 and folds a dimension into the next where both sides are contiguous across them. */
XD_PRIVATE void xdi_interval_fold(xd_copy *copy);

#endif
