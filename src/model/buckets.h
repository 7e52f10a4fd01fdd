#ifndef XDI_MODEL_BUCKETS_H
#define XDI_MODEL_BUCKETS_H

#include "base/context.h"
#include "tensor/region.h"

/* One flat gradient buffer over the trainable parameters of a model that have the same dtypes, cut into buckets that are
 * summed over the data-parallel ranks one by one, while the backward pass computes the next. The rules and all numbers are
 * those of Megatron-Core (distributed/param_and_grad_buffer.py; with `sharded`, optimizer/param_layout.py and
 * distrib_optimizer.py), in integers, where it rounds through floating point. Positions and sizes are elements, not bytes. */

/* One parameter of the buffer. */
typedef struct xd_bucket_param {
    int64_t numel;         /* elements on this rank; 0 is allowed */
    bool shared_embedding; /* also summed between pipeline stages: a bucket of its own; read only with
                            * `sharded` */
} xd_bucket_param;

/* What to lay out. Read during the call only. Zero is the default of every field: one bucket, no padding. */
typedef struct xd_bucket_plan_desc {
    const xd_bucket_param *params; /* [param_count] in the order of registration; without frozen ones, which
                                    * have no gradient */
    int64_t param_count;
    int ranks;         /* data-parallel ranks, those of cp included; 0 -> 1 */
    int instances;     /* runs of ranks / instances consecutive ranks, each with a whole optimizer; 0 -> 1 */
    bool sharded;      /* the optimizer of an instance is split over its ranks: parameters begin at multiples
                        * of 64, buckets end at multiples of lcm(ranks / instances, 128), and rank r owns their
                        * r-th part */
    bool wide_padding; /* with `sharded`: at multiples of lcm(ranks / instances, 65536), for large groups
                        * over NCCL */
    bool overlap;      /* buckets are summed during the backward pass; false -> one bucket */
    /* A bucket ends with the parameter with which it has at least so many elements, padding included; 0 -> max(40,000,000,
     * 1,000,000 * ranks). Or so many buckets, about: sum of numel / bucket_count elements each; 0 -> bucket_size. */
    int64_t bucket_size, bucket_count;
    /* One bucket all the same where communication is not what the step waits for: */
    int stage;            /* pipeline stages after the first */
    int chunk;            /* model chunks after a stage's first */
    bool gathers_in_step; /* parameters are gathered while the optimizer steps */
} xd_bucket_plan_desc;

typedef struct xd_bucket_plan xd_bucket_plan; /* immutable */

/* Lays out a buffer: parameters in reverse order of registration, about the order in which a backward pass ends with them.
 * Pure and local: all ranks compute the same from the same desc, and compare xd_bucket_plan_hash. Memory: 72
 * bytes a parameter.
 *
 * Errors: ARGUMENT (negative sizes or counts, instances that do not divide ranks, both bucket_size and bucket_count, more
 * buckets than elements), SHAPE (a buffer of more than 2^62 elements), MEMORY. */
XD_API xd_result xd_bucket_plan_create(xd_ctx *ctx, const xd_bucket_plan_desc *desc, xd_bucket_plan **out);

/* Frees the plan. NULL is fine. */
XD_API void xd_bucket_plan_destroy(xd_bucket_plan *plan);

/* The desc in use: with defaults, the plan's own copy of params, and bucket_size as it was applied: INT64_MAX for one
 * bucket. */
XD_API const xd_bucket_plan_desc *xd_bucket_plan_settings(const xd_bucket_plan *plan);

/* One bucket: an interval of the buffer. Buckets follow each other without gaps, from 0 on, in the order in which they are
 * summed. */
typedef struct xd_bucket {
    xd_interval buffer;   /* with its padding at the end, which stays zero */
    int64_t unpadded;     /* elements without that; padding between parameters is counted */
    int64_t first, count; /* its parameters are first, first + 1, ... first + count - 1; the last one
                           * stands first */
} xd_bucket;

/* Number of buckets, 0 without parameters; and bucket `index` of them. Elements of the buffer: the end of the last one. */
XD_API int64_t xd_bucket_plan_count(const xd_bucket_plan *plan);
XD_API xd_bucket xd_bucket_plan_at(const xd_bucket_plan *plan, int64_t index);
XD_API int64_t xd_bucket_plan_numel(const xd_bucket_plan *plan);

/* Where a parameter is in the buffer; *bucket receives its bucket, NULL -> not wanted. Local. */
XD_API xd_interval xd_bucket_plan_param(const xd_bucket_plan *plan, int64_t param, int64_t *bucket);

/* The part of a bucket that a rank's optimizer owns, as an interval of the buffer: one of ranks / instances equal parts,
 * which ignore where parameters begin and may be padding alone; without `sharded` the whole bucket. `rank` is below `ranks`;
 * the ranks at the same place of every instance own the same. Local. */
XD_API xd_interval xd_bucket_plan_shard(const xd_bucket_plan *plan, int64_t bucket, int rank);

/* What a rank's optimizer owns of one parameter, from four origins; the extents are equal. xd_region_flat_range makes regions
 * of `param`. */
typedef struct xd_bucket_piece {
    int64_t bucket;
    xd_interval buffer;    /* in the buffer */
    xd_interval in_bucket; /* from the begin of the bucket */
    xd_interval shard;     /* from the begin of the rank's part of the bucket */
    xd_interval param;     /* in the parameter */
} xd_bucket_piece;

/* False, and *out untouched, when the rank owns no element of the parameter. Local. */
XD_API bool xd_bucket_plan_piece(const xd_bucket_plan *plan, int64_t param, int rank, xd_bucket_piece *out);

/* Hash of all that decides where an element is and who owns it; ranks compare it. */
XD_API uint64_t xd_bucket_plan_hash(const xd_bucket_plan *plan);

#endif
