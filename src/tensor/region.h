#ifndef XDI_TENSOR_REGION_H
#define XDI_TENSOR_REGION_H

#include "kernel/types.h"

/* The indices begin <= i < end. */
typedef struct xd_interval {
    int64_t begin, end;
} xd_interval;

/* A product of lists, one per dimension: what a rank holds of a tensor. Stored densely in ascending order of
 * the indices, last dimension fastest. Layouts have at most XD_LAYOUT_INTERVALS_MAX intervals a dimension, so
 * that the common part of two of them always fits. */
#define XD_LAYOUT_INTERVALS_MAX 16
#define XD_REGION_INTERVALS_MAX (2 * XD_LAYOUT_INTERVALS_MAX)

/* A product of interval lists, one for each dimension. */
typedef struct xd_region {
    int ndim;
    int count[XD_DIMS_MAX];
    xd_interval interval[XD_DIMS_MAX][XD_REGION_INTERVALS_MAX];
} xd_region;

#endif
