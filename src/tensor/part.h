#ifndef XDI_TENSOR_PART_H
#define XDI_TENSOR_PART_H

#include "base/dtype.h"
#include "tensor/region.h"

/* This rank's part of a named tensor: a range of what a region of it holds. A layout cuts a tensor into regions, a wrapper cuts
 * the storage of regions into ranges that ignore rows; a part is either, so that files, exports and comparisons need to
 * know neither. */
typedef struct xd_tensor_part {
    const char *name; /* of the whole tensor */
    xd_dtype dtype;
    int ndim;                   /* 0 is a scalar */
    int64_t shape[XD_DIMS_MAX]; /* of the whole tensor; 0 from ndim on */
    const xd_region *region;    /* indices of the tensor; NULL -> all of them */
    xd_interval range;          /* positions in the dense storage of `region` that are here; may be empty */
    void *data;                 /* [range.end - range.begin]; may be NULL when empty */
    bool replica; /* another rank holds the same elements and speaks for them; exactly one rank of those
                   * that hold an element leaves this false */
} xd_tensor_part;

#endif
