#ifndef XDI_TENSOR_INTERNAL_H
#define XDI_TENSOR_INTERNAL_H

#include "base/internal.h"
#include "tensor/interval.h"

/* interval.c: appends [begin, end) to a list of `count`, merging it into the last entry when they touch, and
 * returns the new count. Empty intervals are dropped. */
XD_PRIVATE int xdi_interval_append(xd_interval *out, int count, int64_t begin, int64_t end);

#endif
