#ifndef XDI_TENSOR_PART_H
#define XDI_TENSOR_PART_H

#include "base/dtype.h"
#include "tensor/region.h"

/* This rank's part of a named tensor: a range of the dense storage of a region. Layouts cut tensors into regions; wrappers
 * cut storage into ranges that ignore rows. Files, exports and comparisons take both. */
typedef struct xd_tensor_part {
    const char *name; /* of the whole tensor */
    xd_dtype dtype;
    int ndim;                   /* 0 is a scalar */
    int64_t shape[XD_DIMS_MAX]; /* of the whole tensor; 0 from ndim on */
    const xd_region *region;    /* indices of the tensor; NULL -> all */
    xd_interval range;          /* positions in the dense storage of `region`; may be empty */
    void *data;                 /* [range.end - range.begin]; may be NULL when empty */
    bool replica; /* another rank provides these elements; exactly one holder of an element has false */
} xd_tensor_part;

#endif
