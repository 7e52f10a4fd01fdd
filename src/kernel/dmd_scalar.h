#ifndef XDI_KERNEL_DMD_SCALAR_H
#define XDI_KERNEL_DMD_SCALAR_H

#include "base/philox_scalar.h"
#include "kernel/dmd.h"

/* Formulas of kernel/dmd.h. */

/* A double as f32, rounded to odd: towards zero, and an inexact result has its last bit set. Rounding that to a type of at most
 * 22 bits gives what rounding the double once gives. */
XD_SCALAR float xd_float_to_odd(double value) {
    const float nearest = (float)value;
    const double back = (double)nearest;
    uint32_t bits = xd_bits_of_float(nearest);
    if (fabs(back) > fabs(value)) bits -= 1u; /* rounded away from zero, maybe to infinity */
    if (back < value || back > value) bits |= 1u;
    return xd_float_of_bits(bits);
}

/* Stores a double in any floating type, rounded once. */
XD_SCALAR void xd_store_once(void *data, xd_dtype dtype, int64_t index, double value) {
    const bool narrow = dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F16;
    xd_element_store(data, dtype, index, narrow ? (double)xd_float_to_odd(value) : value);
}

/* An element of mix; `both`: there is a q and c1 is not 0. */
XD_SCALAR double xd_mix_of(xd_mix pair, bool both, double p, double q) {
    return both ? xd_fma(pair.c0, p, xd_mul(pair.c1, q)) : xd_mul(pair.c0, p);
}

/* The sequence of row r of draw. */
XD_SCALAR xd_philox xd_draw_of(const xd_draw_desc *d, int64_t r) {
    xd_philox random = d->random;
    random.sample += (uint32_t)r;
    if (d->step) random.step += (uint32_t)(uint64_t)*d->step;
    return random;
}

/* Blocks that a row has numbers of. */
XD_SCALAR int64_t xd_draw_blocks(const xd_draw_desc *d) {
    return d->out.cols > 0 ? (d->first + d->out.cols + 3) / 4 - d->first / 4 : 0;
}

#endif
