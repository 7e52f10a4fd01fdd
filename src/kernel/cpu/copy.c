/* Strided copies. */

#include "kernel/copy.h"

#include <string.h>

XD_API void xd_copy_run(const xd_copy *copy, const void *src, void *dst, size_t size) {
    const int last = copy->ndim - 1;
    const bool dense = copy->src_stride[last] == 1 && copy->dst_stride[last] == 1;
    const int64_t inner = dense ? 1 : copy->extent[last];
    const size_t block = dense ? (size_t)copy->extent[last] * size : size;
    int64_t at[XD_DIMS_MAX] = { 0 }, s = copy->src_offset, d = copy->dst_offset;
    int dim;
    do {
        for (int64_t i = 0; i < inner; i++)
            memcpy((char *)dst + (size_t)(d + i * copy->dst_stride[last]) * size,
                   (const char *)src + (size_t)(s + i * copy->src_stride[last]) * size, block);
        for (dim = last - 1; dim >= 0; dim--) {
            s += copy->src_stride[dim];
            d += copy->dst_stride[dim];
            if (++at[dim] < copy->extent[dim]) break;
            s -= copy->src_stride[dim] * copy->extent[dim];
            d -= copy->dst_stride[dim] * copy->extent[dim];
            at[dim] = 0;
        }
    } while (dim >= 0);
}
