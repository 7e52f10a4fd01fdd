#ifndef XDI_MODEL_PARALLEL_H
#define XDI_MODEL_PARALLEL_H

#include "comm/queue.h"
#include "model/groups.h"
#include "model/pass.h"
#include "tensor/part.h"

/* A model wrapped for data-parallel training: docs/wrappers.md. A step's gradient is the sum over the micro-batches of
 * all ranks. INVARIANT mode has the same bits for every number of ranks, wrapper and setting. */
typedef struct xd_parallel xd_parallel;

/* Divisors of gradients, each one multiplication by the F32 nearest to its inverse. */
typedef struct xd_gradient_divisors {
    bool average; /* divides the sum by `micro_batches` */
    /* of each micro-batch before it is added; outside of INVARIANT mode, of what a rank sends. 0 -> 1 */
    double before;
    double after; /* of the sum; 0 -> 1 */
} xd_gradient_divisors;

/* The ranks with the same experts (trait `expert`). Zero without experts, and on one data rank. */
typedef struct xd_expert_ranks {
    xd_comm *data;     /* N / members ranks, members: of an ep group; data rank r is number r / members */
    xd_comm *replicas; /* with replicas: the ranks at this place in other groups */
    xd_queue *gathers, *reductions; /* over `data`; NULL -> none */
} xd_expert_ranks;

/* Settings of DDP. */
typedef struct xd_ddp_desc {
    xd_comm *data; /* required: the data ranks, or a group of one. Not read by xd_build and xd_plan_memory */
    int64_t micro_batches;  /* of a step over all ranks; 0 -> one a rank */
    bool sharded_optimizer; /* ZeRO-1: each rank steps 1 / N of the weights; xd_parallel_publish gathers */
    /* F32, BF16 or F16: a copy that blocks show of weights of these types, keep_f32 only in F32. NONE -> their own */
    xd_dtype view_dtype;
    /* over the data ranks, for stepped values and sums of buckets; must outlive the wrapper. NULL ->
     * xd_parallel_publish and xd_parallel_reduce run them */
    xd_queue *gathers, *reductions;
    /* With `reductions`: elements of a bucket, or about how many buckets; not both. 0 -> max(40,000,000, 1,000,000 *
     * data ranks) elements */
    int64_t bucket_size, bucket_count;
    xd_gradient_divisors divide;
    /* xd_parallel_publish compares shared weights in the first and in every compare_steps-th call. 0 -> 256, on a
     * device 4096; below 0 -> never */
    int compare_steps;
    bool reserve_frozen; /* memory for gradients of frozen weights, for xd_parallel_thaw */
    xd_comm *replicas;   /* other optimizer instances, as in xd_fsdp_desc. NULL -> one instance */
    xd_expert_ranks experts;
    /* for sums of xd_weight_traits over tp, pp and embedding; must outlive the wrapper. NULL -> xd_parallel_reduce
     * refuses such weights; xd_build gives its groups */
    const xd_groups *groups;
    int stage, chunk; /* one bucket a type unless both are 0. xd_build fills them in */
    /* Megatron's overlap_param_gather_with_optimizer_step; needs sharded_optimizer and `gathers` */
    bool gathers_in_step;
    /* with sharded_optimizer: buckets end at multiples of lcm(data ranks, 65536) elements */
    bool wide_padding;
} xd_ddp_desc;

/* Settings of FSDP. Fields of xd_ddp_desc mean the same. */
typedef struct xd_fsdp_desc {
    xd_comm *data; /* required */
    int64_t micro_batches;
    const char *const *unit_types; /* [unit_type_count] xd_block_desc.type of units */
    int unit_type_count;
    /* HSDP: the ranks with the same part, one of each group of equal size. NULL -> one group */
    xd_comm *replicas;
    /* adds up a rank's micro-batches before it sends; also done where they cannot be dealt: docs/wrappers.md */
    bool accumulate_whole;
    /* For weights of F32, BF16 and F16 except keep_f32: types of the copy that is sent, and of what blocks show. NONE
     * -> sent as kept, shown in the desc's type */
    xd_dtype sent_dtype, view_dtype;
    /* Consecutive ranks that keep a gathered unit together for its backwards; divides the data ranks. 0 -> all; 1 ->
     * all keep whole units. The root always stays whole */
    int reshard_ranks;
    xd_queue *gathers, *reductions; /* as in xd_ddp_desc. NULL -> xd_block_begin and xd_block_end run them */
    int prefetch;                   /* units gathered ahead */
    xd_gradient_divisors divide;
    int compare_steps; /* of parts that `replicas` share */
    bool reserve_frozen;
    /* CPU offload: a context without a GPU for parts, gradients, and optimizers and averages made in it. Must outlive
     * the wrapper. NULL -> with the model */
    xd_ctx *host;
    xd_expert_ranks experts; /* prefetch of their units needs their own queue */
    const xd_groups *groups;
    bool wide_padding; /* for every unit */
} xd_fsdp_desc;

/* Wraps a sealed model with DDP. Weights without values get their first ones. Collective over desc->data and
 * desc->replicas.
 *
 * Memory: gradients; steps allocate nothing.
 * Errors: STATE (not sealed; wrapped), ARGUMENT (a setting), DTYPE (trained weights are F32, BF16 or F16, gradients
 * F32), MISMATCH (settings, models, layouts or experts; names weight and rank), TOPOLOGY (ranks for experts),
 * UNSUPPORTED (experts without ranks or in mixed blocks; INVARIANT replicas whose micro-batches are not a power of
 * two), MEMORY. */
XD_API xd_result xd_ddp_create(xd_model *model, const xd_ddp_desc *desc, xd_parallel **out);

/* Wraps a model with FSDP: each rank keeps 1 / N of each unit. Collective as xd_ddp_create.
 *
 * Units: blocks with XD_UNIT_ALWAYS, those of unit_types, and the root for the rest. Buffers stay whole. Releases the
 * library's storage of the model.
 * Memory: parts; for each level of nested units one gathered unit and one whole gradient (xd_plan_memory).
 * Errors: as xd_ddp_create; ARGUMENT (reshard_ranks; prefetch without `gathers`; `host` with a GPU or another reduction
 * mode), STATE (the caller's storage, except buffers without `host`; a tie across units). */
XD_API xd_result xd_fsdp_create(xd_model *model, const xd_fsdp_desc *desc, xd_parallel **out);

/* Frees the wrapper and its values. Local. */
XD_API void xd_parallel_destroy(xd_parallel *parallel);

/* Micro-batches of a step: this rank's, the most of any rank, all, and those for which it opens blocks: `max` under
 * FSDP, `own` under DDP. Local. */
typedef struct xd_parallel_micro_batch_count {
    int64_t own, max, total, opened;
} xd_parallel_micro_batch_count;
XD_API xd_parallel_micro_batch_count xd_parallel_micro_batches(const xd_parallel *parallel);

/* Returns the number, in the whole step, of this rank's micro-batch k; -1 beyond its own: then open and close the
 * blocks, and compute nothing. Local. */
XD_API int64_t xd_parallel_micro_batch(const xd_parallel *parallel, int64_t k);

/* The same for blocks of experts, where `own` counts those of all members of this rank's group; all 0 without experts.
 * Local. */
XD_API xd_parallel_micro_batch_count xd_parallel_expert_micro_batches(const xd_parallel *parallel);
XD_API int64_t xd_parallel_expert_micro_batch(const xd_parallel *parallel, int64_t k);

/* Lists this rank's parts of all weights, for training and as parts of whole tensors for files.
 *
 *   params, parts   [capacity]; NULL with capacity 0 to count
 *
 * In the order of xd_model_params, without transient buffers, the same on all ranks; a count of 0 for none. Pointers
 * live as long as the wrapper. Local. Errors: ARGUMENT (capacity). */
XD_API xd_result xd_parallel_params(const xd_parallel *parallel, int64_t capacity, xd_param *params,
                                    int64_t *count);
XD_API xd_result xd_parallel_parts(const xd_parallel *parallel, int64_t capacity, xd_tensor_part *parts,
                                   int64_t *count);

/* Trains a frozen weight, or what it is tied to, from the next step on. Then call xd_optimizer_thaw.
 *
 * Collective over data and replicas, for an expert's weight over xd_expert_ranks, between steps. Allocates nothing.
 * Errors change nothing: ARGUMENT (another model's), STATE (no reserve_frozen; a buffer; trained; within a step), DTYPE
 * (of weight or gradient), MISMATCH (weights differ). */
XD_API xd_result xd_parallel_thaw(xd_parallel *parallel, xd_weight *weight);

/* Takes all gradients in the caller's storage as this rank's next micro-batch, instead of backward passes. Local.
 * Errors: STATE (no such gradient; all micro-batches there; incomplete blocks in INVARIANT mode), UNSUPPORTED (FSDP;
 * experts). */
XD_API xd_result xd_parallel_push_micro_batch(xd_parallel *parallel);

/* Sums a step's gradients over all micro-batches, and as xd_weight_traits say.
 *
 * Collective over data, and over tp, pp and embedding of the desc's groups.
 * In a capture each rank checks its own step only.
 * Errors drop the micro-batches: STATE (a block open or without a backward; order of blocks), MISMATCH (traits),
 * UNSUPPORTED (embedding copies in unequal parts), those of the reductions. Errors that change nothing: STATE (a trait
 * without groups, or over several stages), MISMATCH or PEER (a rank is in another call). */
XD_API xd_result xd_parallel_reduce(xd_parallel *parallel);

/* Ends a step: blocks show the new weights. Needed too after a skipped or abandoned step, and after values were loaded
 * or swapped.
 *
 * Collective over data, and over replicas in calls that compare. In a capture ranks neither agree nor compare; every
 * later call outside of it compares. Errors change nothing: STATE (a block open;
 * micro-batches not reduced), MISMATCH (a weight differs), those of xd_all_gather. */
XD_API xd_result xd_parallel_publish(xd_parallel *parallel);

/* Bytes of a wrapper on this rank, on the context's device except `host`. Local. */
typedef struct xd_parallel_bytes {
    size_t values;          /* weights in all types, under FSDP this rank's part */
    size_t gradients;       /* reduced, and micro-batches that wait */
    size_t gathered;        /* open units, and what reshard_ranks keeps */
    size_t whole_gradients; /* of units in their backward */
    size_t host;            /* of xd_fsdp_desc.host; not counted above */
} xd_parallel_bytes;
XD_API xd_parallel_bytes xd_parallel_memory(const xd_parallel *parallel);

#endif
