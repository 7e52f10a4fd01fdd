#ifndef XDI_TENSOR_TENSOR_H
#define XDI_TENSOR_TENSOR_H

#include "tensor/layout.h"

/* A view of one rank's part: the elements of xd_layout_region, ascending in every dimension. Owns nothing. */
typedef struct xd_tensor {
    void *data; /* may be NULL when the part is empty */
    xd_dtype dtype;
    int device; /* 0 is the CPU */
    int ndim;
    int64_t shape[XD_DIMS_MAX];  /* local; 0 from ndim on */
    int64_t stride[XD_DIMS_MAX]; /* elements */
    const xd_layout *layout;     /* must outlive the view */
} xd_tensor;

/* Returns a dense view of the part of `rank`; a rank outside the mesh gets data NULL and extents 0. Local. */
XD_API xd_tensor xd_tensor_view(const xd_layout *layout, int rank, void *data, xd_dtype dtype);

/* Elements of the local part; 0 outside the mesh, scalars included. */
XD_API int64_t xd_tensor_numel(const xd_tensor *tensor);

#endif
