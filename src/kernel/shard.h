#ifndef XDI_KERNEL_SHARD_H
#define XDI_KERNEL_SHARD_H

#include "base/config.h"

/* The columns of the vocabulary of one rank and of all ranks, in the form that kernels read. */
typedef struct xd_vocab_shard {
    int64_t begin, end;     /* global columns of this shard */
    int64_t size;           /* columns of all shards */
    int shard, shards;      /* index of this shard in rank order, and their number */
    const int64_t *offsets; /* [shards + 1] first column of each shard, then size; in memory of the device */
} xd_vocab_shard;

#endif
