#ifndef XDI_MODEL_BUCKETS_INTERNAL_H
#define XDI_MODEL_BUCKETS_INTERNAL_H

#include "base/internal.h"
#include "tensor/region.h"

/* The layout of a flat gradient buffer over trained parameters of the same dtypes. Its buckets are summed one by one beside
 * the backward pass. Sizes are elements. The numbers are Megatron-Core's (distributed/param_and_grad_buffer.py; with
 * `sharded`, optimizer/param_layout.py and distrib_optimizer.py), in integers. */

/* One parameter of the buffer. */
typedef struct xdi_bucket_param {
    int64_t numel;         /* elements on this rank; 0 is legal */
    bool shared_embedding; /* with `sharded`: a bucket of its own, also summed between stages */
} xdi_bucket_param;

/* Settings, read during the call only. Zero -> one bucket, no padding. */
typedef struct xdi_bucket_plan_desc {
    const xdi_bucket_param *params; /* [param_count], trained, in the order of registration */
    int64_t param_count;
    int ranks;     /* data-parallel ranks, with those of cp; 0 -> 1 */
    int instances; /* of ranks / instances consecutive ranks, each with a whole optimizer; 0 -> 1 */
    /* an instance's ranks share its optimizer, part r of a bucket each. Parameters begin at multiples of 64, buckets
     * end at multiples of lcm(ranks / instances, 128) */
    bool sharded;
    bool wide_padding; /* with `sharded`: of lcm(ranks / instances, 65536), for large groups over NCCL */
    bool overlap;      /* sums during the backward pass; false -> one bucket */
    /* Elements that end a bucket, padding included; 0 -> max(40,000,000, 1,000,000 * ranks). Or about how many buckets of
     * equal size; 0 -> bucket_size. */
    int64_t bucket_size, bucket_count;
    /* One bucket where the step does not wait for communication: */
    int stage;            /* pipeline stages after the first */
    int chunk;            /* model chunks after a stage's first */
    bool gathers_in_step; /* gathers beside the optimizer step */
} xdi_bucket_plan_desc;

typedef struct xdi_bucket_plan xdi_bucket_plan; /* immutable */

/* Lays out a buffer: parameters in reverse order of registration, about that of a backward pass. Pure and local. Memory: 72
 * bytes a parameter.
 * Errors: ARGUMENT (negative numbers; instances do not divide ranks; both bucket_size and bucket_count; more buckets than
 * elements), SHAPE (above 2^62 elements), MEMORY. */
XD_PRIVATE xd_result xdi_bucket_plan_create(xd_ctx *ctx, const xdi_bucket_plan_desc *desc,
                                            xdi_bucket_plan **out);

/* Frees the plan; NULL is legal. */
XD_PRIVATE void xdi_bucket_plan_destroy(xdi_bucket_plan *plan);

/* Returns the desc in use; bucket_size is INT64_MAX for one bucket. */
XD_PRIVATE const xdi_bucket_plan_desc *xdi_bucket_plan_settings(const xdi_bucket_plan *plan);

/* One bucket. Buckets follow each other without gaps from 0 on, in the order of their sums. */
typedef struct xdi_planned_bucket {
    xd_interval buffer;   /* with its padding at the end, which stays zero */
    int64_t unpadded;     /* elements without it, with padding between parameters */
    int64_t first, count; /* its parameters first, ... first + count - 1; the last one stands first */
} xdi_planned_bucket;

/* Return the number of buckets, 0 without parameters; one of them; the elements of the buffer. */
XD_PRIVATE int64_t xdi_bucket_plan_count(const xdi_bucket_plan *plan);
XD_PRIVATE xdi_planned_bucket xdi_bucket_plan_at(const xdi_bucket_plan *plan, int64_t index);
XD_PRIVATE int64_t xdi_bucket_plan_numel(const xdi_bucket_plan *plan);

/* Returns the place of a parameter in the buffer. *bucket receives its bucket, NULL -> not wanted. Local. */
XD_PRIVATE xd_interval xdi_bucket_plan_param(const xdi_bucket_plan *plan, int64_t param, int64_t *bucket);

/* Returns the part of a bucket that the optimizer of `rank` owns: one of ranks / instances equal parts, which may be padding
 * alone. Without `sharded` the whole bucket. Local. */
XD_PRIVATE xd_interval xdi_bucket_plan_shard(const xdi_bucket_plan *plan, int64_t bucket, int rank);

/* A rank's piece of a parameter, from four origins. xdi_region_flat_range makes regions of `param`. */
typedef struct xdi_bucket_piece {
    int64_t bucket;
    xd_interval buffer;    /* in the buffer */
    xd_interval in_bucket; /* from the bucket's begin */
    xd_interval shard;     /* from the begin of the rank's part of the bucket */
    xd_interval param;     /* in the parameter */
} xdi_bucket_piece;

/* Returns a rank's piece; false, with *out untouched, if it owns nothing of the parameter. Local. */
XD_PRIVATE bool xdi_bucket_plan_piece(const xdi_bucket_plan *plan, int64_t param, int rank,
                                      xdi_bucket_piece *out);

/* Returns a hash of every element's place and owner: ranks compare it. */
XD_PRIVATE uint64_t xdi_bucket_plan_hash(const xdi_bucket_plan *plan);

#endif
