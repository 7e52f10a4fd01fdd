#ifndef XDI_KERNEL_COPY_H
#define XDI_KERNEL_COPY_H

#include "kernel/types.h"

/* One strided block: extent[i] steps of src_stride[i] and dst_stride[i] elements. Dimensions contiguous on both sides are
 * folded: a contiguous block has ndim 1, stride 1. */
typedef struct xd_copy {
    int ndim;
    int64_t src_offset, dst_offset; /* elements */
    int64_t extent[XD_DIMS_MAX], src_stride[XD_DIMS_MAX], dst_stride[XD_DIMS_MAX];
} xd_copy;

#endif
