/* Sums as integers instead of floating point: independent of the order of the terms. */

#include "kernel/internal.h"

XD_PRIVATE bool xdi_fixed_add(xd_fixed *sum, double term) {
    return xd_fixed_put(sum, term);
}

XD_PRIVATE double xdi_fixed_value(xd_fixed sum) {
    return xd_fixed_read(sum);
}
