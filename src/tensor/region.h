#ifndef XDI_TENSOR_REGION_H
#define XDI_TENSOR_REGION_H

#include "kernel/types.h"

/* begin <= i < end. */
typedef struct xd_interval {
    int64_t begin, end;
} xd_interval;

/* A region is a rank's part of a tensor: an interval list a dimension. Elements are dense, ascending, last dimension
 * fastest. Layouts have at most XD_LAYOUT_INTERVALS_MAX intervals a dimension. */
#define XD_LAYOUT_INTERVALS_MAX 16
#define XD_REGION_INTERVALS_MAX (2 * XD_LAYOUT_INTERVALS_MAX)

/* See above. */
typedef struct xd_region {
    int ndim;
    int count[XD_DIMS_MAX];
    xd_interval interval[XD_DIMS_MAX][XD_REGION_INTERVALS_MAX];
} xd_region;

#endif
