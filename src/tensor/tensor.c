/* Views of tensors. */

#include "tensor/internal.h"
#include "tensor/tensor.h"

#include <string.h>

/* Wraps where a tensor without elements has large extents beside one of 0: no other layout has a product that does not fit. */
static int64_t xdi_tensor_product(int64_t a, int64_t b) {
    return (int64_t)((uint64_t)a * (uint64_t)b);
}

XD_API xd_tensor xd_tensor_view(const xd_layout *layout, int rank, void *data, xd_dtype dtype) {
    xd_tensor tensor;
    xd_region region;
    memset(&tensor, 0, sizeof tensor);
    tensor.data = xd_layout_region(layout, rank, &region) ? data : NULL;
    tensor.dtype = dtype;
    tensor.ndim = region.ndim;
    tensor.layout = layout;
    xdi_region_shape(&region, tensor.shape);
    int64_t stride = 1;
    for (int d = tensor.ndim - 1; d >= 0; d--) {
        tensor.stride[d] = stride;
        stride = xdi_tensor_product(stride, tensor.shape[d]);
    }
    return tensor;
}

XD_API int64_t xd_tensor_numel(const xd_tensor *tensor) {
    int64_t numel = tensor->ndim || tensor->data ? 1 : 0;
    for (int d = 0; d < tensor->ndim; d++) numel = xdi_tensor_product(numel, tensor->shape[d]);
    return numel;
}

XD_PRIVATE size_t xdi_tensor_bytes(const xd_layout *layout, int rank, xd_dtype dtype) {
    xd_region region;
    size_t bytes = xd_dtype_size(dtype);
    if (!xd_layout_region(layout, rank, &region)) return 0;
    for (int d = 0; d < region.ndim; d++)
        if (!xdi_size_multiply(bytes, (size_t)xdi_intervals_extent(region.interval[d], region.count[d]),
                               &bytes))
            return 0;
    return bytes;
}
