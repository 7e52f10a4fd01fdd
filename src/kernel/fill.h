#ifndef XDI_KERNEL_FILL_H
#define XDI_KERNEL_FILL_H

#include "base/philox_scalar.h"
#include "kernel/copy.h"

/* Inputs and outputs of the fill entry: first values of boxes of a tensor. The number of an element is a function of its index in
 * the whole tensor alone, and has the same bits on every device. */
typedef struct xd_fill_args {
    xd_init init;
    xd_philox random;
    const xd_copy *boxes; /* [box_count]; src: the index in the whole tensor, dst: the place at `out` */
    int64_t box_count;
    int64_t limit; /* elements whose index is not below it are padding: 0 */
    void *out;
    xd_dtype dtype; /* one that has arithmetic, or BOOL */
} xd_fill_args;

/* Whether a kind of first values needs random numbers. */
XD_SCALAR bool xd_init_is_random(const xd_init *init) {
    return init->kind == XD_INIT_NORMAL || init->kind == XD_INIT_UNIFORM;
}

/* A first value, from the uniform or normal number of its element where it is random. */
XD_SCALAR float xd_init_value(const xd_init *init, float number) {
    if (init->kind == XD_INIT_ZERO) return 0.0f;
    if (init->kind == XD_INIT_CONSTANT) return init->center;
    if (init->kind == XD_INIT_UNIFORM) number = xd_subf(xd_mulf(2.0f, number), 1.0f); /* both exact */
    return xd_addf(xd_mulf(init->scale, number), init->center);
}

/* The places of element i of a box: its index in the whole tensor, and where it is stored. */
XD_SCALAR void xd_fill_places(const xd_copy *box, int64_t i, int64_t *index, int64_t *place) {
    *index = box->src_offset;
    *place = box->dst_offset;
    for (int d = box->ndim - 1; d >= 0; d--) {
        const int64_t outer = d > 0 ? i / box->extent[d] : 0, at = i - outer * box->extent[d];
        *index += at * box->src_stride[d];
        *place += at * box->dst_stride[d];
        i = outer;
    }
}

#endif
