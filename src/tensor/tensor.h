#ifndef XDI_TENSOR_TENSOR_H
#define XDI_TENSOR_TENSOR_H

#include "tensor/layout.h"

/* View of one rank's part (xd_layout_region), which it does not own. */
typedef struct xd_tensor {
    void *data; /* may be NULL when empty */
    xd_dtype dtype;
    int device; /* 0: CPU */
    int ndim;
    int64_t shape[XD_DIMS_MAX];  /* local; 0 from ndim on */
    int64_t stride[XD_DIMS_MAX]; /* elements */
    const xd_layout *layout;     /* outlives the view */
} xd_tensor;

/* Returns a dense view of `rank`'s part; outside the mesh data NULL, extents 0. Local. */
XD_API xd_tensor xd_tensor_view(const xd_layout *layout, int rank, void *data, xd_dtype dtype);

/* Returns the local number of elements; outside the mesh 0, for scalars too. */
XD_API int64_t xd_tensor_numel(const xd_tensor *tensor);

#endif
