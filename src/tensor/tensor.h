#ifndef XDI_TENSOR_TENSOR_H
#define XDI_TENSOR_TENSOR_H

#include "tensor/layout.h"

/* One rank's part of a tensor: a view that owns nothing. Its elements are those whose indices in the whole tensor
 * are in xd_layout_region, ascending in every dimension. */
typedef struct xd_tensor {
    void *data; /* may be NULL when the part is empty */
    xd_dtype dtype;
    int device; /* 0 is the CPU */
    int ndim;
    int64_t shape[XD_DIMS_MAX];  /* local; 0 from ndim on */
    int64_t stride[XD_DIMS_MAX]; /* elements */
    const xd_layout *layout;     /* must outlive the view */
} xd_tensor;

/* A dense view of the part that `rank` holds; a rank outside the mesh gets data NULL and extents 0. Local. */
XD_API xd_tensor xd_tensor_view(const xd_layout *layout, int rank, void *data, xd_dtype dtype);

/* Elements of the local part; 0 for a rank outside the mesh, even when the tensor is a scalar. */
XD_API int64_t xd_tensor_numel(const xd_tensor *tensor);

/* Bytes of the dense part that `rank` holds; 0 also when they do not fit into a size_t. */
XD_API size_t xd_tensor_bytes(const xd_layout *layout, int rank, xd_dtype dtype);

#endif
