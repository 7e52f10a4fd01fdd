#ifndef XDI_TENSOR_PART_H
#define XDI_TENSOR_PART_H

#include "base/dtype.h"
#include "tensor/region.h"

/* This rank's part of a named tensor: a range of a region's dense storage. Ranges of wrappers may cut rows. */
typedef struct xd_tensor_part {
    const char *name; /* of the whole tensor */
    xd_dtype dtype;
    int ndim;                   /* 0: scalar */
    int64_t shape[XD_DIMS_MAX]; /* whole tensor; 0 from ndim on */
    const xd_region *region;    /* indices of the tensor; NULL -> all */
    xd_interval range;          /* positions in `region`'s dense storage; may be empty */
    void *data;                 /* [range.end - range.begin]; NULL if empty */
    bool replica;               /* another rank provides these elements; exactly one holder has false */
} xd_tensor_part;

#endif
