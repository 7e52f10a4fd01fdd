#ifndef XDI_TENSOR_REGION_H
#define XDI_TENSOR_REGION_H

#include "kernel/types.h"

/* The indices begin <= i < end. */
typedef struct xd_interval {
    int64_t begin, end;
} xd_interval;

/* A region is the part of a tensor that a rank holds: one interval list for each dimension. Elements are dense, in ascending
 * index order, last dimension fastest. Layouts have at most XD_LAYOUT_INTERVALS_MAX intervals a dimension, so intersections
 * fit. */
#define XD_LAYOUT_INTERVALS_MAX 16
#define XD_REGION_INTERVALS_MAX (2 * XD_LAYOUT_INTERVALS_MAX)

/* One interval list for each dimension. */
typedef struct xd_region {
    int ndim;
    int count[XD_DIMS_MAX];
    xd_interval interval[XD_DIMS_MAX][XD_REGION_INTERVALS_MAX];
} xd_region;

#endif
