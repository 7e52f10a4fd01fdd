#ifndef XDI_KERNEL_SHARD_H
#define XDI_KERNEL_SHARD_H

#include "base/config.h"

/* One rank's columns of the vocabulary, and all ranks', as kernels see them. */
typedef struct xd_vocab_shard {
    int64_t begin, end;     /* global columns of this shard */
    int64_t size;           /* columns of all shards */
    int shard, shards;      /* this one among them, in rank order */
    const int64_t *offsets; /* [shards + 1] where each begins, then size; in memory of the device */
} xd_vocab_shard;

#endif
