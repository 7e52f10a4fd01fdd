#ifndef XDI_MODEL_PARALLEL_H
#define XDI_MODEL_PARALLEL_H

#include "comm/queue.h"
#include "model/groups.h"
#include "model/pass.h"
#include "tensor/part.h"

/* A model wrapped for data-parallel training: docs/wrappers.md.
 *
 * DDP keeps the whole model on every rank; FSDP keeps 1 / N and gathers a unit while its blocks are open. A step's gradient
 * is the sum over its micro-batches (of all ranks), not the mean. INVARIANT mode sums along the tree of xd_leaves:
 * the same bits for every number of ranks, wrapper and setting. */
typedef struct xd_parallel xd_parallel;

/* Divisors of gradients. Each multiplies once, by the F32 nearest to its inverse, at the same place on every layout. */
typedef struct xd_gradient_divisors {
    bool average; /* divides the sum by `micro_batches`: the mean over micro-batches */
    /* divides each micro-batch before it is added; outside of INVARIANT mode, what a rank sends. 0 -> 1 */
    double before;
    double after; /* divides the sum, in one multiplication with `average`; 0 -> 1 */
} xd_gradient_divisors;

/* The ranks with the same experts (trait `expert`). Zero without experts, and on one data rank. */
typedef struct xd_expert_ranks {
    /* N / members of the data ranks; data rank r is their number r / members. Must outlive the wrapper */
    xd_comm *data;
    xd_comm *replicas; /* the ranks at the same place of other groups, if the wrapper has replicas */
    xd_queue *gathers, *reductions; /* over `data`; NULL -> none */
} xd_expert_ranks;

/* Settings of DDP. */
typedef struct xd_ddp_desc {
    /* required: the data ranks, or a group of one; must outlive the wrapper. Not read by xd_build and xd_plan_memory */
    xd_comm *data;
    int64_t micro_batches;  /* micro-batches of a step over all ranks; 0 -> one a rank */
    bool sharded_optimizer; /* ZeRO-1: each rank steps 1 / N of the weights; xd_parallel_publish gathers */
    /* F32, BF16 or F16, in which blocks show weights of these types: a copy. keep_f32 weights only in F32. NONE ->
     * their own type */
    xd_dtype view_dtype;
    /* Shared queues over the data ranks, for sums of buckets during the backward and for stepped values; must outlive the
     * wrapper. NULL -> xd_parallel_reduce and xd_parallel_publish run them. */
    xd_queue *gathers, *reductions;
    /* With `reductions`: elements of a bucket, or about how many buckets; not both. 0 -> max(40,000,000, 1,000,000 * data
     * ranks) elements. */
    int64_t bucket_size, bucket_count;
    xd_gradient_divisors divide;
    /* Ranks compare a checksum of shared weights in the first and every compare_steps-th xd_parallel_publish. 0 -> 256, on a
     * device 4096; below 0 -> never */
    int compare_steps;
    bool reserve_frozen; /* memory for gradients of frozen weights, for xd_parallel_thaw */
    /* the ranks of other optimizer instances, as in xd_fsdp_desc. NULL -> one instance */
    xd_comm *replicas;
    xd_expert_ranks experts;
    /* xd_parallel_reduce sums what xd_weight_traits ask for over tp, pp and embedding, which must outlive the wrapper.
     * NULL -> it refuses such weights; xd_build gives its groups. */
    const xd_groups *groups;
    /* A type has one bucket unless both are 0. xd_build fills them in. */
    int stage, chunk;
    /* Megatron's overlap_param_gather_with_optimizer_step; with sharded_optimizer and `gathers`. Each chunk has its own
     * optimizer. */
    bool gathers_in_step;
    /* With sharded_optimizer: buckets end at multiples of lcm(data ranks, 65536) elements, for large groups over NCCL. */
    bool wide_padding;
} xd_ddp_desc;

/* Settings of FSDP. */
typedef struct xd_fsdp_desc {
    xd_comm *data;                 /* required; as in xd_ddp_desc */
    int64_t micro_batches;         /* as in xd_ddp_desc */
    const char *const *unit_types; /* [unit_type_count] xd_block_desc.type of units */
    int unit_type_count;
    /* HSDP: the ranks with the same part, one of each group of equal size; data ranks are numbered group after group.
     * NULL -> one group */
    xd_comm *replicas;
    /* adds up a rank's micro-batches before it sends: fewer bytes, memory of whole units. The default if micro-batches
     * cannot be dealt (xd_parallel_micro_batch) */
    bool accumulate_whole;
    /* For weights of F32, BF16 and F16 except keep_f32: the type of a copy that is sent, and the type in which blocks show
     * it. NONE -> sent as kept, shown in the desc's type. */
    xd_dtype sent_dtype, view_dtype;
    /* The number of consecutive ranks that keep a gathered unit together for its backwards. It divides the data ranks.
     * 0 -> all, each keeps its part; 1 -> all keep whole units. The root always stays whole. */
    int reshard_ranks;
    /* As in xd_ddp_desc. Sums of units run beside the next backward. `prefetch` units are gathered ahead, in the order of
     * registration, reversed in a backward. NULL -> xd_block_begin and xd_block_end run them. */
    xd_queue *gathers, *reductions;
    int prefetch; /* 0 -> none */
    xd_gradient_divisors divide;
    int compare_steps;   /* as in xd_ddp_desc, for parts that `replicas` share */
    bool reserve_frozen; /* as in xd_ddp_desc */
    /* CPU offload: a context without a GPU that keeps parts of values and gradients, and optimizers and averages made in it.
     * Must outlive the wrapper. Bits do not change. NULL -> parts are kept with the model */
    xd_ctx *host;
    /* Units of experts are gathered by their own ranks; prefetch needs a queue of their own. */
    xd_expert_ranks experts;
    const xd_groups *groups; /* as in xd_ddp_desc */
    bool wide_padding;       /* as in xd_ddp_desc, for every unit */
} xd_fsdp_desc;

/* Wraps a model with DDP. Collective over desc->data and desc->replicas.
 *
 *   model   sealed; must outlive the wrapper. Weights without values get their first ones
 *
 * Memory: gradients once; in INVARIANT mode with several micro-batches a rank at most 1 + 2 log2 of their number times. Steps allocate
 * nothing.
 * Errors: STATE (not sealed; wrapped), ARGUMENT (a setting: docs/wrappers.md), DTYPE (trained weights are F32, BF16 or F16,
 * gradients F32), MISMATCH (settings, models, layouts or experts differ; names weight and rank), TOPOLOGY (ranks for experts),
 * UNSUPPORTED (experts without ranks or in mixed blocks; INVARIANT replicas whose micro-batches are not a power of two), MEMORY. */
XD_API xd_result xd_ddp_create(xd_model *model, const xd_ddp_desc *desc, xd_parallel **out);

/* Wraps a model with FSDP: each rank keeps 1 / N of each unit. Collective over desc->data and desc->replicas.
 *
 * Units are blocks with XD_UNIT_ALWAYS, those of unit_types, and the root for the rest. Buffers stay whole. Releases the
 * library's storage of the model.
 * Memory: this rank's parts; a gathered unit and a whole gradient a level of nested units; what settings add
 * (xd_plan_memory).
 * Errors: as xd_ddp_create; ARGUMENT (reshard_ranks; prefetch without `gathers`; `host` with a GPU or another reduction
 * mode), STATE (the caller's storage, except buffers without `host`; a tie across units), UNSUPPORTED (as xd_ddp_create). */
XD_API xd_result xd_fsdp_create(xd_model *model, const xd_fsdp_desc *desc, xd_parallel **out);

/* Frees the wrapper and the values that it kept; NULL is legal. Local. */
XD_API void xd_parallel_destroy(xd_parallel *parallel);

/* Micro-batches of a step: this rank's own, the most of any rank, all, and those for which it opens blocks. `opened` is
 * `most` under FSDP, `own` under DDP. Local. */
typedef struct xd_parallel_micro_batch_count {
    int64_t own, most, total, opened;
} xd_parallel_micro_batch_count;
XD_API xd_parallel_micro_batch_count xd_parallel_micro_batches(const xd_parallel *parallel);

/* Returns the number, in the whole step, of this rank's micro-batch k; -1 beyond its own: open and close the blocks,
 * compute nothing.
 *
 * Ranks own ranges of micro-batches. FSDP deals every N-th to a rank if N divides `micro_batches` and, in INVARIANT mode,
 * is a power of two. Then only parts are kept. Under HSDP this holds within a group. Local. */
XD_API int64_t xd_parallel_micro_batch(const xd_parallel *parallel, int64_t k);

/* The same for blocks of experts. `own` counts micro-batches of all members of this rank's group; the k-th of `opened` is
 * a micro-batch of member k % members, or -1. All 0 without experts. Local. */
XD_API xd_parallel_micro_batch_count xd_parallel_expert_micro_batches(const xd_parallel *parallel);
XD_API int64_t xd_parallel_expert_micro_batch(const xd_parallel *parallel, int64_t k);

/* Lists this rank's parts of all weights: for optimizers, norms and averages, and as parts of whole tensors for files.
 *
 *   params, parts   [capacity]; NULL with capacity 0 to count
 *
 * The order is that of xd_model_params, without transient buffers, the same on all ranks, with a count of 0 for none.
 * Pointers live as long as the wrapper; xd_parallel_reduce writes gradients. Local. Errors: ARGUMENT (capacity). */
XD_API xd_result xd_parallel_params(const xd_parallel *parallel, int64_t capacity, xd_param *params,
                                    int64_t *count);
XD_API xd_result xd_parallel_parts(const xd_parallel *parallel, int64_t capacity, xd_tensor_part *parts,
                                   int64_t *count);

/* Trains a weight that was frozen at the wrap, or what it is tied to, from the next step on. Then call xd_optimizer_thaw for
 * its entry.
 *
 * Collective over data and replicas, for an expert over its own, between steps. Allocates nothing.
 * Errors change nothing: ARGUMENT (another model's weight), STATE (no reserve_frozen; a buffer; trained already; within a
 * step), DTYPE (of weight or gradient), MISMATCH (ranks name different weights). */
XD_API xd_result xd_parallel_thaw(xd_parallel *parallel, xd_weight *weight);

/* Takes the gradients in the caller's storage as this rank's next micro-batch, for all weights, instead of backward
 * passes. DDP only. Local.
 * Errors: STATE (a weight without such a gradient; all micro-batches are there; incomplete blocks in INVARIANT mode),
 * UNSUPPORTED (FSDP; experts). */
XD_API xd_result xd_parallel_push_micro_batch(xd_parallel *parallel);

/* Completes a step's gradients: each becomes the sum over all micro-batches, with the sums of xd_weight_traits. A weight
 * that all ranks skip in all micro-batches is not stepped. Optimizer steps and norms before this call are refused.
 *
 * Collective over data, and over tp, pp and embedding of the desc's groups.
 * Errors drop the micro-batches: STATE (a block open or without a backward; another order of blocks), MISMATCH (traits
 * differ), UNSUPPORTED (embedding copies in unequal parts), those of the reductions. Errors that change nothing: STATE (a
 * trait without groups, or over several stages), MISMATCH or PEER (a rank is in another call). */
XD_API xd_result xd_parallel_reduce(xd_parallel *parallel);

/* Ends a step: blocks show the new weights. Needed too after a skipped or abandoned step, and after values were loaded or
 * swapped. After the last micro-batch xd_parallel_reduce comes first.
 *
 * Collective over data, and over replicas in calls that compare. Errors change nothing: STATE (a block open;
 * micro-batches not reduced), MISMATCH (a weight differs between ranks). Also those of xd_all_gather. */
XD_API xd_result xd_parallel_publish(xd_parallel *parallel);

/* Bytes of a wrapper on this rank, on the context's device except `host`; allocated at the wrap, no step allocates. */
typedef struct xd_parallel_bytes {
    size_t values;          /* this rank's part of the weights, or all of the wrapper's; in all types */
    size_t gradients;       /* reduced gradients, and micro-batches that wait */
    size_t gathered;        /* open units, and what xd_fsdp_desc.reshard_ranks keeps */
    size_t whole_gradients; /* of units in their backward */
    size_t host;            /* in memory of xd_fsdp_desc.host; not counted above */
} xd_parallel_bytes;
XD_API xd_parallel_bytes xd_parallel_memory(const xd_parallel *parallel);

#endif
