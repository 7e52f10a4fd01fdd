#ifndef XDI_TENSOR_INTERVAL_H
#define XDI_TENSOR_INTERVAL_H

#include "tensor/region.h"

/* The rule for splitting n indices over `parts`: blocks of ceil(n / parts), the last ones shorter or
 * empty. */
XD_API xd_interval xd_chunk(int64_t n, int parts, int part);

#endif
