#ifndef XDI_TENSOR_EXCHANGE_H
#define XDI_TENSOR_EXCHANGE_H

#include "base/memory.h"

/* What a planned exchange with a backward takes on one rank: memory between create and destroy, and payload bytes that this rank
 * sends to others in each direction, as xd_comm_traffic counts them. */
typedef struct xd_exchange_bytes {
    xd_memory_bytes memory;
    uint64_t forward_sent, backward_sent;
} xd_exchange_bytes;

#endif
