/* Sums of integers in place of floating point: the same whatever their order. */

#include "kernel/fixed.h"

XD_API bool xd_fixed_add(xd_fixed *sum, double term) {
    return xd_fixed_put(sum, term);
}

XD_API double xd_fixed_value(xd_fixed sum) {
    return xd_fixed_read(sum);
}
