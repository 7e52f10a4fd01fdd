#ifndef XDI_KERNEL_IDS_H
#define XDI_KERNEL_IDS_H

#include "kernel/types.h"

/* Returns id i without checks. Pure; device kernels call it too. */
static XDI_ON_DEVICE inline int64_t xd_id_at(xd_ids ids, int64_t i) {
    return ids.dtype == XD_DTYPE_I32 ? (int64_t)((const int32_t *)ids.data)[i]
                                     : ((const int64_t *)ids.data)[i];
}

#endif
