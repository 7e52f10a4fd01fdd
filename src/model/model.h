#ifndef XDI_MODEL_MODEL_H
#define XDI_MODEL_MODEL_H

#include "comm/collective.h"
#include "tensor/layout.h"
#include "train/param.h"

/* What the library needs to know of a model: named weights and buffers on a tree of blocks. It knows no layers: the caller
 * computes, with the pointers that the model hands out.
 *
 *     xd_model_create(ctx, &(xd_model_desc){ .seed = 1 }, &model);
 *     xd_block_add(xd_model_root(model), &(xd_block_desc){ .name = "blocks.0", .type = "block" }, &block);
 *     xd_weight_add(block, &(xd_weight_desc){ .name = "mlp.weight", .dtype = XD_DTYPE_F32, .ndim = 2,
 *                                             .shape = { 4096, 1024 },
 *                                             .init = { XD_INIT_NORMAL, .scale = 0.02 } }, &weight);
 *     xd_model_seal(model);
 *     xd_model_allocate(model);
 *     xd_model_init_weights(model);
 *
 * A description alone takes no memory for weights: everything that needs only sizes works on it. Every rank describes the
 * same model; xd_model_agree compares. */
typedef struct xd_model xd_model;

/* A node of the tree: what is gathered, recomputed and released together. Belongs to its model. */
typedef struct xd_block xd_block;

/* A weight or a buffer of a block, or another name of one (a tie). Belongs to its model. */
typedef struct xd_weight xd_weight;

/* Settings of a model. Zero is the default of every field. */
typedef struct xd_model_desc {
    uint64_t seed; /* of the initial values */
    int rank;      /* this rank, in the world of the weights' layouts */
} xd_model_desc;

/* Whether a block is a unit of sharding, with all weights below it that are in no unit of their own. */
typedef enum xd_shard_unit {
    XD_UNIT_BY_TYPE = 0, /* as the settings of the wrapper say for its type */
    XD_UNIT_ALWAYS,
    XD_UNIT_NEVER
} xd_shard_unit;

/* One block. */
typedef struct xd_block_desc {
    const char *name; /* required; one component, or several joined with '.' */
    const char *type; /* for settings by type; NULL -> none */
    xd_shard_unit unit;
    bool recompute; /* its forward runs again before its backward, instead of keeping what it computed */
    /* Its floating buffers weight_u and weight_v get, while the model is wrapped, the type in which views show its first floating
     * weight, with which they are multiplied: they are stored and saved so, and what is written into a view is kept. With
     * storage of the caller a wrapper refuses to change the type (STATE). */
    bool spectral_norm;
} xd_block_desc;

/* Whether weight decay applies. */
typedef enum xd_decay {
    XD_DECAY_BY_SHAPE = 0, /* to weights of two dimensions or more, not to biases and norms */
    XD_DECAY_ALWAYS,
    XD_DECAY_NEVER
} xd_decay;

/* What parallel training needs to know of a weight. Zero is the default of every field. */
typedef struct xd_weight_traits {
    bool frozen;          /* not trained: no gradient and no state of an optimizer; sharded and saved like the
                           * others */
    bool expert;          /* its data group is that of the experts */
    bool tensor_parallel; /* ranks of the tensor-parallel group hold different parts: see
                           * xd_weight_set_tensor_parallel */
    int partition_dim;    /* the dimension that is cut */
    int partition_stride; /* of the cut; 0 -> 1 */
    bool expert_tensor_parallel; /* cut over the experts' tensor-parallel group instead */
    /* Four sums beside those over data ranks. xd_parallel_reduce makes them at the end of a step, over the groups of the
     * wrapper's settings; xd_pipeline_finish makes those that are left. With several stages on a rank the last two are
     * made by xd_pipeline_finish alone. */
    bool sequence_parallel;             /* its gradient is summed over groups->tp */
    bool averaged_over_tensor_parallel; /* its gradient is averaged over groups->tp */
    bool pipeline_parallel;             /* every stage has it: its gradient is summed over groups->pp */
    bool shared;                        /* another stage has the same weight and counts it in norms */
    bool shared_embedding; /* an embedding that is also the head of another stage: both copies get the sum
                            * of their gradients, over groups->embedding */
    bool keep_f32;         /* not converted to a half type */
    xd_decay decay;
} xd_weight_traits;

/* One weight or buffer. Copied, but for `layout` and the storage. */
typedef struct xd_weight_desc {
    const char *name;           /* required; one component, or several joined with '.' */
    xd_dtype dtype;             /* required */
    int ndim;                   /* 0 is a scalar */
    int64_t shape[XD_DIMS_MAX]; /* of the whole weight, all ranks together; 0 from ndim on */
    int64_t stored_rows;        /* of dimension 0 where more rows are stored than there are (padded
                                 * vocabularies): these stay 0. 0 -> shape[0] */
    const xd_layout *layout;    /* of the stored shape: how the caller has cut it over ranks of one
                                 * tensor-parallel group, for example; not over data ranks, which wrappers
                                 * divide. Must outlive the model. NULL -> whole on this rank, and on no other
                                 * of the model's: a weight that all ranks of a tensor-parallel group have
                                 * alike has a layout that replicates it; norms and files count it once */
    xd_init init; /* a pure function of (seed of the model, full name, index in the whole weight), so the
                   * same on every layout; with shared_embedding the name does not count, so that copies begin
                   * as equals */
    xd_weight_traits traits;
    bool buffer;             /* not trained: no gradient, never stepped */
    bool transient;          /* a buffer that is not saved: it can be computed again */
    const char *tied_to;     /* the full name of an earlier weight of the same shape and type, whose storage
                              * this is. Such a weight has no storage, init, layout and traits of its own; NULL
                              * -> none */
    int group;               /* of the optimizer */
    xd_dtype gradient_dtype; /* NONE -> F32 */
    void *value, *gradient;  /* the caller's storage in memory of the context's device, until
                              * xd_model_destroy; NULL -> the library's. gradient may be given alone or
                              * left out */
    int64_t room;            /* elements there are at value, and at gradient */
} xd_weight_desc;

/* A weight as it is now. */
typedef struct xd_weight_info {
    const char *name;           /* full: the names of its blocks and its own, joined with '.' */
    const xd_weight_desc *desc; /* as given, defaults filled in, pointers to the model's own copies */
    xd_weight *owner;           /* whose storage this is: itself, or what it is tied to */
    xd_block *block;
    const xd_region *region; /* the indices of the stored tensor that this rank holds */
    int64_t count;           /* elements of the region */
    void *value, *gradient;  /* [count]; NULL without storage */
    bool ready;              /* holds values: initialised, loaded, or the caller's */
} xd_weight_info;

/* Creates an empty model. desc NULL -> defaults. Local. Errors: MEMORY. */
XD_API xd_result xd_model_create(xd_ctx *ctx, const xd_model_desc *desc, xd_model **out);

/* Frees the model with its blocks, weights and storage, not the caller's. NULL is fine. */
XD_API void xd_model_destroy(xd_model *model);

/* The block that all others are in; its name is empty. */
XD_API xd_block *xd_model_root(const xd_model *model);

/* Adds a block as the last child of `parent`; out may be NULL. Local. Errors: ARGUMENT (a name that is missing, not UTF-8, has
 * an empty component, or is taken), STATE (the model is sealed), MEMORY. The model is unchanged then. */
XD_API xd_result xd_block_add(xd_block *parent, const xd_block_desc *desc, xd_block **out);

/* Adds a weight, a buffer or a tie to a block; out may be NULL. Local. Errors: ARGUMENT (name as above, or "__metadata__";
 * dtype; dimensions; a tie with a setting that is its owner's; a weight of integers that trains; numbers of the init that are
 * not finite), SHAPE (sizes that overflow; stored_rows below shape[0]; a layout of another shape; room below what this rank
 * holds; a tie to a weight of another shape or type), DTYPE (an init other than zero in a type without arithmetic), MISSING (a tie
 * to no weight), STATE (the model is sealed), MEMORY. The model is unchanged then. */
XD_API xd_result xd_weight_add(xd_block *block, const xd_weight_desc *desc, xd_weight **out);

/* Sets tensor_parallel, partition_dim and partition_stride of a weight, also of a sealed model. Local.
 * Errors: STATE when one of them is set already, ARGUMENT for a dimension that the weight lacks or a stride below 1. */
XD_API xd_result xd_weight_set_tensor_parallel(xd_weight *weight, int dim, int stride);

/* Sets `frozen` of a weight, or of the weight that it is tied to: it is not trained from then on. Local. Errors: STATE when
 * the model is sealed, or the weight has a gradient of the caller's. */
XD_API xd_result xd_weight_freeze(xd_weight *weight);

/* Takes `frozen` back: the weight is trained. Local. Errors: STATE when the model is sealed, ARGUMENT for a weight of integers. A
 * weight that is to be unfrozen during training stays frozen here; in the list of xd_model_params its entry gets a gradient of
 * the caller's and goes to xd_optimizer_thaw; of a wrapped model, to xd_parallel_thaw first. */
XD_API xd_result xd_weight_thaw(xd_weight *weight);

/* Ends the description and fixes the order of the weights: those of a block as they were added, then those of its children.
 * Local. Errors: ARGUMENT (a tie before its owner in this order; storage of the caller that two weights share), STATE (sealed
 * already), MEMORY. */
XD_API xd_result xd_model_seal(xd_model *model);

/* Of a sealed model, 0 and NULL before: how many weights, buffers and ties it has, and one of them in its order. */
XD_API int64_t xd_model_weight_count(const xd_model *model);
XD_API xd_weight *xd_model_weight_at(const xd_model *model, int64_t index);

/* By full name, which is empty for the root; NULL for an unknown one, which no call takes. Local, in constant time. */
XD_API xd_weight *xd_model_find_weight(const xd_model *model, const char *name);
XD_API xd_block *xd_model_find_block(const xd_model *model, const char *name);

/* The weight as it is now; pointers live as long as the model. Local. */
XD_API xd_weight_info xd_weight_describe(const xd_weight *weight);

/* Full name and settings of a block; pointers live as long as the model. */
XD_API const char *xd_block_name(const xd_block *block);
XD_API const xd_block_desc *xd_block_settings(const xd_block *block);

/* Elements that this rank holds, each once however many names it has, buffers left out: all, and those that are trained. Local. */
XD_API int64_t xd_model_parameter_count(const xd_model *model);
XD_API int64_t xd_model_trained_count(const xd_model *model);

/* Bytes that xd_model_allocate takes, in memory of the context's device. Of a sealed model; 0 before. Local. */
XD_API size_t xd_model_bytes(const xd_model *model);

/* Gives storage to every weight without: values of all, gradients of those that are trained. One block of memory, zeroed,
 * in the order of the weights, each aligned to XD_ARENA_ALIGNMENT. What has storage keeps it, and its values.
 * Local. Errors: STATE (not sealed, or wrapped), MEMORY; nothing has changed then. */
XD_API xd_result xd_model_allocate(xd_model *model);

/* Forms the first values of every weight that holds none. Local. Deterministic. Errors: STATE, naming the weight without
 * storage, or when the model is wrapped (the wrapper has done it); nothing is written then. MEMORY and those of a copy on a
 * device. */
XD_API xd_result xd_model_init_weights(xd_model *model);

/* Says that the caller has written the weight's values (a file, a table that he computes), so that xd_model_init_weights leaves
 * them alone. Local. Errors: STATE without storage. */
XD_API xd_result xd_weight_set_ready(xd_weight *weight);

/* The list that optimizers, norms and averages take: weights and buffers in the model's order, each once. Names and shapes are
 * the model's.
 *
 *   params     [capacity]; NULL with capacity 0 to count
 *   count      entries that there are
 *
 * Local. Errors: STATE (not sealed, wrapped, or no storage, naming the weight), ARGUMENT when capacity is below the count,
 * with both. */
XD_API xd_result xd_model_params(const xd_model *model, int64_t capacity, xd_param *params, int64_t *count);

/* Hash of everything that the ranks of one model share: names, shapes, types, traits, order; not storage and layouts. 0 for a
 * model that is not sealed. */
XD_API uint64_t xd_model_hash(const xd_model *model);

/* Checks that all ranks describe the same model. Collective over comm. Errors: MISMATCH on every rank alike, naming the first
 * weight that differs and a rank that has another; STATE (not sealed), PEER, MEMORY. */
XD_API xd_result xd_model_agree(const xd_model *model, xd_comm *comm);

#endif
