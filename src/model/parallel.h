#ifndef XDI_MODEL_PARALLEL_H
#define XDI_MODEL_PARALLEL_H

#include "comm/queue.h"
#include "model/groups.h"
#include "model/pass.h"
#include "tensor/part.h"

/* A model wrapped for training by several data ranks: each computes the gradients of its own micro-batches, and all make the same
 * step. DDP keeps the whole model on every rank; FSDP keeps 1 / N of it and gathers a unit of blocks while it is open.
 *
 *     xd_fsdp_create(model, data, &(xd_fsdp_desc){ .leaves = 16 }, &parallel);
 *     xd_parallel_params(parallel, room, params, &count);       // what optimizer, norm and averages take
 *     for each step {
 *         for (int64_t k = 0; k < xd_parallel_leaves(parallel).opened; k++) {
 *             ... micro-batch xd_parallel_leaf(parallel, k): blocks forward, loss, blocks backward with .leaf = k; of -1, open
 *                 and close them alone ...
 *         }
 *         xd_parallel_reduce(parallel);                          // params[i].gradient = the sum over all leaves
 *         xd_gradient_norm_compute(ctx, data, ...); xd_optimizer_step(...);
 *         xd_parallel_publish(parallel);                         // the new weights are what blocks show
 *     }
 *
 * Leaves. A step has `leaves` micro-batches over all data ranks together, the same number on every layout; the content of one
 * depends on its number alone. The gradient is their sum, not their mean (but for xd_gradient_divisors): losses divide by the
 * whole batch (xd_loss). In
 * INVARIANT mode it is summed along the canonical tree of xd_leaves, so that the step has the same bits for every number of
 * ranks, both wrappers and all their settings. In the other modes each rank adds up its own leaves first.
 *
 * Which blocks are at which leaf. Several forwards may be in flight, and each block has its backwards in the order of leaves.
 * Blocks whose gradients are summed together (under FSDP those of a unit, of experts or not; under DDP all, or with a queue
 * for reductions those of a bucket) end leaf k, by xd_block_end or xd_block_skip, before one of them begins k + 1, where
 * leaves are kept apart: in INVARIANT mode, and where each is sent when it ends (dealt ones, see xd_parallel_leaf). A block
 * that is ahead is refused (STATE), and nothing has changed then. Elsewhere a rank adds all of its leaves to one place, and
 * blocks may be at any.
 *
 * Experts. Where expert parallelism divides the experts of a layer among neighbouring data ranks, those that hold the same
 * ones are a data group of their own (xd_groups.expert_dp). Weights with the trait `expert` are summed, sharded and stepped
 * over that group, the others over all data ranks, under one wrapper with one list of parameters; a norm over the data ranks
 * counts each of them once.
 *
 *     data rank                0    1    2    3         rank r is member r % 2 of group r / 2
 *     holds of 4 experts      0,1  2,3  0,1  2,3        0 and 2 sum experts 0 and 1
 *     leaves of round k        a    b    c    d         rank 1 gets tokens of a, then of b: its expert leaves 2 k and 2 k + 1
 *
 * Tokens come to an expert from the leaves of all members of its group, and what they add to its gradient belongs to the leaf
 * that they came from. So a block of experts is opened once for each member's leaf: its backward of pass.leaf = k * members +
 * j is for the tokens of leaf k of member j, which an all-to-all over the group has put side by side. xd_parallel_expert_leaf
 * is that leaf's number in the whole step. A leaf without tokens adds zeros: under DDP xd_block_skip does, under FSDP the
 * block is opened as on the ranks that have some. An expert's gradient is then the sum over all leaves along the same tree as
 * any other, and INVARIANT mode has the bits of one rank that holds all experts. There it takes room for each member's
 * leaves: where leaves are dealt (FSDP), so many whole gradients of a unit in its backward; else a stack for each member, and
 * the nodes of all (xd_plan_memory tells). All blocks of experts end a round before one of them begins the next.
 *
 * There is no scaler of losses for f16: gradients are f32. Biases and norms are not treated apart. A weight that is tied
 * has one gradient, to which its uses add in the order of the caller's passes.
 *
 * Flat shards. The weights of a unit lie one after another in one buffer, each from a multiple of 64 elements on, cut into N
 * equal parts wherever that falls (xd_bucket_plan): no element is sent twice or copied on arrival, every rank has the same
 * amount, and a rank's part of a weight is one range of it. So there are no shard dimensions, and weights may have any size,
 * 0 included. What is saved is whole tensors (checkpoint.h); who holds what is never seen in a file. */
typedef struct xd_parallel xd_parallel;

/* Which wrapper. Megatron's four sharding strategies are settings of the two: no_shard is DDP; optim is DDP with
 * sharded_optimizer; optim_grads is FSDP without types of units, so that the model is one unit, whole while its root is
 * open; optim_grads_params is FSDP with units. */
typedef enum xd_wrap_kind { XD_WRAP_NONE = 0, XD_WRAP_DDP, XD_WRAP_FSDP } xd_wrap_kind;

/* Which wrapper a model has now; NONE -> none. It looks at the model, not at settings: a build over one rank may have skipped
 * the wrap, and casts, scalers and what is saved depend on which. Local. Source: CREDIT, is_applied. */
XD_API xd_wrap_kind xd_model_wrapped(const xd_model *model);

/* What gradients are divided by: each element is multiplied once by the f32 nearest to the inverse of the divisor, at a place
 * that no layout changes, so that INVARIANT mode keeps its bits. Zero is the default of every field. */
typedef struct xd_gradient_divisors {
    bool average;  /* at the end, by the number of leaves: the mean over all micro-batches instead of their
                    * sum */
    double before; /* each leaf, before it is added to others, so that the sum of large ones stays finite;
                    * outside of INVARIANT mode what a rank sends. 0 -> 1 */
    double after;  /* the sum over all leaves, in one multiplication with `average`; 0 -> 1 */
} xd_gradient_divisors;

/* The ranks that hold the same experts (weights with the trait `expert`). Zero where a model has none, and on a single data
 * rank. */
typedef struct xd_expert_ranks {
    xd_comm *data;     /* those among the data ranks: N / members of them, number r / members for data rank r.
                        * Must outlive the wrapper */
    xd_comm *replicas; /* those at the same place in other groups, where the wrapper has replicas */
    xd_queue *gathers, *reductions; /* as those of the wrapper, over `data`; NULL -> none */
} xd_expert_ranks;

/* Settings of DDP. Zero is the default of every field. */
typedef struct xd_ddp_desc {
    int64_t leaves;         /* micro-batches of a step, all ranks together; 0 -> one for each data rank */
    bool sharded_optimizer; /* each rank steps 1 / N of the weights, which xd_parallel_publish gathers
                             * (ZeRO-1) */
    xd_dtype view_dtype;    /* F32, BF16 or F16: in which blocks show such weights, but those with keep_f32
                             * in a half type; a copy that xd_parallel_publish renews. NONE -> as they are,
                             * and no copy */
    /* Queues over the data ranks, which several wrappers may share and which outlive them; NULL -> what they would run is run in
     * xd_parallel_reduce and xd_parallel_publish. On `reductions` the sum of a bucket begins when the last of its blocks has
     * had its last backward, in the order of buckets; that xd_block_end is then collective, as xd_queue_start is. With
     * experts, where ranks have different numbers of leaves, all begin in xd_parallel_reduce. On `gathers` stepped values
     * travel from xd_parallel_publish until a block with them is opened or the next step is reduced: so long, this rank's own
     * parts may be read, and none written. */
    xd_queue *gathers, *reductions;
    /* With `reductions`: elements from which on a bucket ends, or about how many buckets there are, of whose elements each has
     * an equal share; not both. 0 -> max(40,000,000, 1,000,000 * data ranks) elements. */
    int64_t bucket_size, bucket_count;
    xd_gradient_divisors divide;
    /* Ranks compare a checksum of the weights that they should hold alike, so that a load on one rank alone is found: in the first
     * xd_parallel_publish and in every compare_steps-th after it. Each comparison reads these weights once; buffers are left
     * out. 0 -> 256, and 4096 where weights are in memory of a device; below 0 -> never */
    int compare_steps;
    bool reserve_frozen; /* memory for gradients of frozen weights too, so that xd_parallel_thaw can begin
                          * them; with sharded_optimizer such weights are kept in parts from the start */
    xd_comm *replicas;   /* several instances of the optimizer: as in xd_fsdp_desc. With sharded_optimizer
                          * each group of data ranks steps all weights among its own ranks. NULL -> there is
                          * one group */
    xd_expert_ranks experts;
    /* Of these tp, pp and embedding: over which xd_parallel_reduce sums what traits of weights say (xd_weight_traits). Read
     * by the call alone; the three must outlive the wrapper. NULL -> it refuses to reduce such weights; xd_build gives
     * its own groups then. */
    const xd_groups *groups;
    /* One bucket of each type all the same where nothing waits for its sum: in pipeline stages after the first and chunks
     * after a stage's first, whose numbers xd_build fills in, and with gathers_in_step. */
    int stage, chunk;
    /* Megatron's overlap_param_gather_with_optimizer_step: values of one chunk travel on `gathers` while the optimizer of the next
     * one steps, each chunk with an optimizer of its own and xd_parallel_publish behind its step. With sharded_optimizer */
    bool gathers_in_step;
    /* Buckets end at multiples of lcm(data ranks, 65536) elements, for the bus bandwidth of large groups over NCCL. With
     * sharded_optimizer */
    bool wide_padding;
} xd_ddp_desc;

/* Settings of FSDP. Zero is the default of every field. */
typedef struct xd_fsdp_desc {
    int64_t leaves;                /* as in xd_ddp_desc */
    const char *const *unit_types; /* [unit_type_count] blocks of these types are units
                                    * (xd_block_desc.type) */
    int unit_type_count;
    xd_comm *replicas;     /* HSDP: the ranks that hold the same part in other groups of the same size, one of
                            * each; data ranks are numbered group after group. NULL -> there is one group */
    bool accumulate_whole; /* gradients of a rank's leaves are added up before they are sent: fewer bytes
                            * sent, memory of the whole unit; and several units of a level may be amid a
                            * leaf's backwards (xd_pass.more). The default where leaves cannot be dealt
                            * (see xd_parallel_leaf) */
    /* F32, BF16 or F16, for weights of these types but those with keep_f32: in which they are sent, a copy of this rank's part
     * that xd_parallel_publish renews, and in which blocks show them (xd_block_view.value_dtypes). NONE -> sent as they are kept,
     * shown in the type of their desc, rounded to what is sent: one rank rounds as many do. Where a unit is shown in another type
     * than it is sent in, its memory has both: for f32 weights sent as BF16, 4 bytes an element more than with view_dtype BF16,
     * for one unit of each level and those gathered ahead; of all units with reshard_ranks 1, and on one rank. */
    xd_dtype sent_dtype, view_dtype;
    /* After a unit was gathered, so many ranks that follow each other keep it together, until values change: backwards are then
     * gathered from these. A divisor of the data ranks; 0 -> all of them, each keeps its part alone; 1 -> every rank keeps
     * every unit whole. The root is kept whole in any case. */
    int reshard_ranks;
    /* Queues over the data ranks, which several wrappers may share and which outlive them; NULL -> gathers and sums are run by
     * the brackets. On `reductions` the sum of a unit's gradient runs beside the backward of the next, in a second piece of
     * memory. On `gathers` the next `prefetch` units are gathered ahead, each level into so many more pieces of memory: in the
     * order of registration, backwards in a backward; another order works and costs the gathers that nobody opens. */
    xd_queue *gathers, *reductions;
    int prefetch; /* 0 -> none */
    xd_gradient_divisors divide;
    int compare_steps;   /* as in xd_ddp_desc, of parts that `replicas` hold alike */
    bool reserve_frozen; /* as in xd_ddp_desc */
    /* A context without a GPU whose memory keeps this rank's parts of values and gradients, with those of optimizer and averages
     * that are made in it (CPU offload); it outlives the wrapper. Blocks show what is gathered in memory of the model's own
     * context, to which a part is copied before its gather and from which sums come back; buffers are copied there by
     * xd_parallel_publish, and what is written into their views is not kept. Parts are written after xd_parallel_reduce, or
     * once the work of the model's context was waited for: a copy may still read them before. Where the model's device offers
     * page-locked memory, parts are kept in that, not in the allocator's of this context. Norms and checkpoints take this
     * context and a group that xd_comm_fork made for it. The bits are those without. NULL -> parts are kept where the model
     * is */
    xd_ctx *host;
    /* Units of experts are gathered by their own ranks; reshard_ranks other than 1 is 0 for them, and they are gathered ahead only
     * with a queue of their own. Where leaves are dealt, the backwards of a round of leaves follow each other in a unit of
     * experts before those of another one of its level */
    xd_expert_ranks experts;
    const xd_groups *groups; /* as in xd_ddp_desc */
    bool wide_padding;       /* likewise, of every unit */
} xd_fsdp_desc;

/* Wraps a model: every rank holds all of it, gradients are summed over `data`. Weights that hold no values yet get their first
 * ones. Where the caller gave storage it stays in use; the library's is made here if there is none.
 *
 *   model   sealed; must outlive the wrapper, which is destroyed first
 *   data    the data ranks; a group of one is fine. Must outlive the wrapper
 *   desc    NULL -> defaults
 *
 * Collective over data and desc->replicas: the models are compared first. Memory: gradients, once or, in INVARIANT mode with
 * several leaves a rank, at most 1 + 2 log2(leaves) times; allocated here and never later.
 * Errors: as xd_model_agree; STATE (not sealed, or wrapped already), ARGUMENT (leaves negative, fewer than
 * ranks, or not the same number for each group of replicas, with both; a queue over other ranks, or with less room than
 * records are under way at once, with both; a divisor without a positive inverse in F32; ranks for experts, and no weight of
 * one; both bucket_size and bucket_count, or more buckets than elements; gathers_in_step without `gathers`; one of
 * gathers_in_step and wide_padding without sharded_optimizer), DTYPE (weights that train are F32, BF16 or F16, their
 * gradients F32), MISMATCH (settings; layouts of weights over data ranks; experts on some ranks alone), TOPOLOGY (ranks for experts that do not divide the data ranks, or are not those
 * of their places, with both numbers), UNSUPPORTED (experts without ranks for them; a block with weights of experts and
 * others; in INVARIANT mode: replicas, and leaves of a group that are no power of two), MEMORY. */
XD_API xd_result xd_ddp_create(xd_model *model, xd_comm *data, const xd_ddp_desc *desc, xd_parallel **out);

/* Wraps a model: every rank of `data` holds 1 / N of each unit. Units are the blocks that say so, those of the types in
 * desc.unit_types, and the root for the rest; a block's weights are in the innermost unit around it. Buffers stay whole, in
 * the caller's storage where they have it. The library's own storage of the model is released when its values have been taken.
 * desc NULL -> defaults.
 *
 * Collective over data and desc->replicas. Memory: this rank's part of values and gradients, one gathered unit for each level of
 * units inside units, one whole gradient likewise, and what the settings add; see xd_parallel_bytes and xd_plan_memory.
 * Errors: as xd_ddp_create; ARGUMENT (reshard_ranks does not divide the data ranks; prefetch without `gathers`; a `host` with
 * a GPU or of another reduction mode), STATE (storage of the caller, but that of buffers without `host`; a weight tied to one
 * in another unit), UNSUPPORTED (in INVARIANT mode: replicas, and leaves of a group that are no power of two). */
XD_API xd_result xd_fsdp_create(xd_model *model, xd_comm *data, const xd_fsdp_desc *desc, xd_parallel **out);

/* Frees the wrapper and all values that it kept: weights that had no storage before have none afterwards. NULL is fine. Local. */
XD_API void xd_parallel_destroy(xd_parallel *parallel);

/* The leaves of this rank in each step, the most that any rank has, all, and those for which this rank opens blocks: under FSDP
 * `most`, for it opens and closes blocks without computing for those beyond its own; under DDP its own. Local. */
typedef struct xd_parallel_leaf_count {
    int64_t own, most, total, opened;
} xd_parallel_leaf_count;
XD_API xd_parallel_leaf_count xd_parallel_leaves(const xd_parallel *parallel);

/* The number, in the whole step, of this rank's leaf k; -1 beyond its own: a loop to `opened` opens and closes the blocks
 * then, and computes nothing. Ranks own ranges of leaves; or, under FSDP where N divides `leaves` and, in INVARIANT mode, is a
 * power of two, every N-th one: then each is sent when its backward ends, and only parts are kept. Under HSDP that holds within
 * a group; groups own ranges. Local. */
XD_API int64_t xd_parallel_leaf(const xd_parallel *parallel, int64_t k);

/* The same of blocks of experts: what `own` of them bring here are leaves of all members of this rank's group; for each of
 * the `opened`, members times as many as the most that a rank has in turns, its blocks are opened, also under DDP. All 0
 * without experts. And the number in the whole step of the k-th that is opened, of member k % members; -1 where that member
 * has none, and beyond them. Local. */
XD_API xd_parallel_leaf_count xd_parallel_expert_leaves(const xd_parallel *parallel);
XD_API int64_t xd_parallel_expert_leaf(const xd_parallel *parallel, int64_t k);

/* This rank's parts of all weights, as optimizers, norms and averages take them, and as parts of whole tensors for files. Entry
 * i of both is the same part; every rank has the same names in the same order, with a count of 0 where it holds nothing. Pointers
 * live as long as the wrapper; gradients are those of the last xd_parallel_reduce. The order is that of xd_model_params;
 * transient buffers are left out.
 *
 *   params, parts   [capacity]; NULL with capacity 0 to count
 *
 * Local. Errors: ARGUMENT when capacity is below the count, with both. */
XD_API xd_result xd_parallel_params(const xd_parallel *parallel, int64_t capacity, xd_param *params,
                                    int64_t *count);
XD_API xd_result xd_parallel_parts(const xd_parallel *parallel, int64_t capacity, xd_tensor_part *parts,
                                   int64_t *count);

/* Trains a weight from the next step on that was frozen when its model was wrapped with reserve_frozen, or what it is tied to. From
 * then on views have its gradient, and steps sum it. In the list of xd_parallel_params its entry, whose gradient is there from the
 * start, is thawed by xd_optimizer_thaw. Until a weight of its bucket is thawed, nothing is sent for a gradient.
 *
 * Collective over data and replicas, of an expert's weight over its own, between steps. Allocates nothing. Errors, with the
 * name, on all ranks alike; nothing has changed then: ARGUMENT (a weight of another model), STATE (reserve_frozen was not
 * set; a buffer; trained already; within a step), DTYPE (no type that trains with gradients of F32), MISMATCH (ranks name
 * different weights). */
XD_API xd_result xd_parallel_thaw(xd_parallel *parallel, xd_weight *weight);

/* Takes the gradients in the caller's storage as this rank's next leaf, for all weights at once, instead of the brackets
 * of backward passes. DDP only, when every weight that trains has a gradient of the caller's. No weight counts as skipped. Local.
 * Errors: STATE (a weight without, by name; all leaves are there already; brackets have left a leaf of which some blocks are not
 * complete, in INVARIANT mode, naming two blocks), UNSUPPORTED (FSDP; experts). */
XD_API xd_result xd_parallel_push_leaf(xd_parallel *parallel);

/* After the last backward of a step: what is left to sum is summed, and every gradient in the list of parameters is
 * the sum over all leaves. A norm over `data` then counts each element once (xd_param.replica). Gradients of weights with
 * sequence_parallel, averaged_over_tensor_parallel, pipeline_parallel and shared_embedding are then summed over the
 * desc's groups too, in the order of xd_pipeline_finish, which sums them no second time.
 *
 * Steps and norms over that list are refused before this call (xd_param.state), so that no rank steps with its own gradients. A
 * weight whose blocks were skipped in all leaves of all ranks has no gradient after it: steps leave it alone, without decay.
 * The gradient is zero instead for experts, and where ranks beyond the data ranks add to it (the traits above).
 *
 * Collective over data, and over tp, pp and embedding of the desc's groups. Errors: STATE (a block without a backward for a leaf, by
 * name and number; a block still open; blocks in another order on some ranks, with the first two that differ), MISMATCH
 * (ranks of tp, or stages, that differ in the weights with such traits, with both numbers), those of the reductions. All
 * ranks alike; the step's leaves are then dropped. STATE too, and nothing has changed then: a weight with such a trait, by
 * name, where the wrapper has no groups, or where this rank has several stages and the trait is one of the last two. MISMATCH or
 * PEER where some data rank is in another call: leaves are kept, and the call may be made again. */
XD_API xd_result xd_parallel_reduce(xd_parallel *parallel);

/* After the optimizer: what blocks show from now on are the new weights. Also after a step that was skipped or given up,
 * after values were loaded or exchanged with an average, and where gradients are summed without the wrapper. A step that the
 * caller gives up between two leaves loses them: the logger gets a warning with their number. After the last leaf
 * xd_parallel_reduce comes first, also for a step that the caller gives up.
 *
 * Collective over data, and over replicas in calls that compare (compare_steps). Errors, before anything has changed: STATE (a
 * block still open; all leaves are there, and xd_parallel_reduce has not summed them), MISMATCH (a weight has other values
 * on two ranks, with its name and both). Besides: those of xd_all_gather. */
XD_API xd_result xd_parallel_publish(xd_parallel *parallel);

/* Bytes that a wrapper takes by purpose on this rank, in memory of the context's device but for `host`. Their sum is one
 * block, and one for experts, taken when the model is wrapped; no step takes more. Descriptions, on the host, are not
 * counted. */
typedef struct xd_parallel_bytes {
    size_t values;    /* kept: this rank's part of the weights, or all of them where they are the wrapper's;
                       * in every type */
    size_t gradients; /* kept: reduced gradients, and leaves that wait for others */
    size_t gathered;  /* whole values of units that are open, and what xd_fsdp_desc.reshard_ranks keeps of
                       * others */
    size_t whole_gradients; /* of units in their backward, until they are sent */
    size_t host; /* parts of values and gradients in memory of xd_fsdp_desc.host, in a block of their own;
                  * not counted above */
} xd_parallel_bytes;
XD_API xd_parallel_bytes xd_parallel_memory(const xd_parallel *parallel);

#endif
