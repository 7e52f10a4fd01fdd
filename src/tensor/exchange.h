#ifndef XDI_TENSOR_EXCHANGE_H
#define XDI_TENSOR_EXCHANGE_H

#include "base/memory.h"

/* Memory of an exchange between create and destroy, and payload bytes this rank sends, as xd_comm_traffic counts. */
typedef struct xd_exchange_bytes {
    xd_memory_bytes memory;
    uint64_t forward_sent, backward_sent;
} xd_exchange_bytes;

#endif
