/* Sums as integers instead of floating point: independent of the order of the terms. */

#include "kernel/fixed.h"

XD_API bool xd_fixed_add(xd_fixed *sum, double term) {
    return xd_fixed_put(sum, term);
}

XD_API double xd_fixed_value(xd_fixed sum) {
    return xd_fixed_read(sum);
}
