#ifndef XDI_MODEL_MODEL_H
#define XDI_MODEL_MODEL_H

#include "comm/collective.h"
#include "tensor/layout.h"
#include "train/param.h"

/* Named weights and buffers on a tree of blocks, the same on every rank: docs/wrappers.md. */
typedef struct xd_model xd_model;

/* A node of the tree. Belongs to its model. */
typedef struct xd_block xd_block;

/* A weight, a buffer, or a tie (another name of one). */
typedef struct xd_weight xd_weight;

/* Settings of a model. */
typedef struct xd_model_desc {
    uint64_t seed; /* of the first values */
    int rank;      /* this rank in the weights' layouts; over a mesh, in its communicator */
} xd_model_desc;

/* Whether a block is a unit of sharding. */
typedef enum xd_shard_unit {
    XD_UNIT_BY_TYPE = 0, /* by unit_types */
    XD_UNIT_ALWAYS,
    XD_UNIT_NEVER
} xd_shard_unit;

/* One block. */
typedef struct xd_block_desc {
    const char *name; /* required; components joined with '.' */
    const char *type; /* for settings by type; NULL -> none */
    xd_shard_unit unit;
    bool recompute;     /* its forward runs again in its backward */
    bool spectral_norm; /* its buffers weight_u and weight_v get the type of its views */
} xd_block_desc;

/* Whether weight decay applies. */
typedef enum xd_decay {
    XD_DECAY_BY_SHAPE = 0, /* from two dimensions on, not biases and norms */
    XD_DECAY_ALWAYS,
    XD_DECAY_NEVER
} xd_decay;

/* Traits of a weight. */
typedef struct xd_weight_traits {
    bool frozen;                 /* not trained; sharded and saved */
    bool expert;                 /* its data group is the experts' */
    bool tensor_parallel;        /* cut over tp: step 3 of a build */
    int partition_dim;           /* the dimension that is cut */
    int partition_stride;        /* of the cut; 0 -> 1 */
    bool expert_tensor_parallel; /* cut over expert_tp instead */
    /* Sums that xd_parallel_reduce makes besides those over data ranks. With several stages on a rank
     * xd_pipeline_finish makes those over pp and embedding */
    bool sequence_parallel;             /* over groups->tp */
    bool averaged_over_tensor_parallel; /* the mean over groups->tp */
    bool pipeline_parallel;             /* in every stage; over groups->pp */
    bool shared;                        /* another stage's copy counts in norms */
    bool shared_embedding;              /* embedding and head of two stages; over groups->embedding */
    bool keep_f32;                      /* not converted to a half type */
    xd_decay decay;
} xd_weight_traits;

/* One weight or buffer; copied, except `layout` and storage. */
typedef struct xd_weight_desc {
    const char *name;           /* required; components joined with '.' */
    xd_dtype dtype;             /* required */
    int ndim;                   /* 0: scalar */
    int64_t shape[XD_DIMS_MAX]; /* of the whole weight; 0 from ndim on */
    int64_t stored_rows;        /* with rows that stay 0 (padded vocabularies). 0 -> shape[0] */
    /* of the stored shape, not over data ranks; must outlive the model. A weight that several ranks hold whole needs
     * one that replicates it. NULL -> whole on this rank alone */
    const xd_layout *layout;
    /* By seed, full name (not with shared_embedding) and index in the whole weight; not into a caller's `value` */
    xd_init init;
    xd_weight_traits traits;
    bool buffer;    /* never trained or stepped */
    bool transient; /* a buffer; not saved */
    /* full name of an earlier weight of this shape and type, to share its storage, init, layout and traits. NULL ->
     * none */
    const char *tied_to;
    int group;               /* of the optimizer */
    xd_dtype gradient_dtype; /* NONE -> F32 */
    /* the caller's, on the context's device, until xd_model_destroy, each alone or both. NULL -> the library's */
    void *value, *gradient;
    int64_t room; /* elements at each */
} xd_weight_desc;

/* The state of a weight. */
typedef struct xd_weight_info {
    const char *name;           /* full */
    const xd_weight_desc *desc; /* with defaults; pointers to copies */
    xd_weight *owner;           /* itself, or what it is tied to */
    xd_block *block;
    const xd_region *region; /* of the stored tensor, on this rank */
    int64_t count;           /* of the region */
    void *value, *gradient;  /* [count]; NULL without storage */
    bool ready;              /* has values */
} xd_weight_info;

/* Creates an empty model. desc NULL -> defaults. Local. Errors: MEMORY. */
XD_API xd_result xd_model_create(xd_ctx *ctx, const xd_model_desc *desc, xd_model **out);

/* Frees the model, not the caller's storage. */
XD_API void xd_model_destroy(xd_model *model);

/* Returns the root; its name is empty. */
XD_API xd_block *xd_model_root(const xd_model *model);

/* Adds a block as the last child of `parent`; out may be NULL. Local. Errors change nothing: ARGUMENT (name: missing,
 * not UTF-8, taken, an empty component), STATE (sealed), MEMORY. */
XD_API xd_result xd_block_add(xd_block *parent, const xd_block_desc *desc, xd_block **out);

/* Adds a weight, a buffer or a tie; out may be NULL. Local. Errors change nothing: ARGUMENT (name as above, or
 * "__metadata__"; dtype; dimensions; a tie's settings; integers that train; init not finite), SHAPE (overflow;
 * stored_rows; layout; room; a tie), DTYPE (init other than zero without arithmetic), MISSING (tied_to), STATE
 * (sealed), MEMORY. */
XD_API xd_result xd_weight_add(xd_block *block, const xd_weight_desc *desc, xd_weight **out);

/* Sets `frozen` of a weight, or of what it is tied to. During training use xd_optimizer_thaw, under a wrapper after
 * xd_parallel_thaw. Local. Errors: STATE (sealed; frozen with the caller's gradient), ARGUMENT (trained, of integers). */
XD_API xd_result xd_weight_set_frozen(xd_weight *weight, bool frozen);

/* Ends the description and fixes the order: a block's weights as added, then those of its children. Local.
 * Errors: ARGUMENT (a tie before its owner; storage shared by two weights), STATE (sealed), MEMORY. */
XD_API xd_result xd_model_seal(xd_model *model);

/* The wrapper. */
typedef enum xd_wrap_kind { XD_WRAP_NONE = 0, XD_WRAP_DDP, XD_WRAP_FSDP } xd_wrap_kind;

/* Facts of a model; all 0 before the seal. */
typedef struct xd_model_info {
    int64_t weight_count;    /* with buffers and ties */
    int64_t parameter_count; /* elements of this rank without buffers, ties once */
    int64_t trained_count;   /* of these */
    xd_wrap_kind wrapper;    /* a build over one rank may skip the wrap */
} xd_model_info;

/* Returns the facts; reads all weights. Local. Source of `wrapper`: CREDIT. */
XD_API xd_model_info xd_model_describe(const xd_model *model);

/* Returns a weight, buffer or tie in order; NULL for none and before the seal. */
XD_API xd_weight *xd_model_weight_at(const xd_model *model, int64_t index);

/* Find by full name in constant time; the root's is empty. NULL for an unknown one. Local. */
XD_API xd_weight *xd_model_find_weight(const xd_model *model, const char *name);
XD_API xd_block *xd_model_find_block(const xd_model *model, const char *name);

/* Returns the state of a weight. Local. */
XD_API xd_weight_info xd_weight_describe(const xd_weight *weight);

/* A block. */
typedef struct xd_block_info {
    const char *name;          /* full */
    const xd_block_desc *desc; /* with its own name */
} xd_block_info;

/* Returns a block's name and settings. */
XD_API xd_block_info xd_block_describe(const xd_block *block);

/* Allocates missing values, and gradients of trained weights: one zeroed block on the context's device, in order, each
 * aligned to XD_ARENA_ALIGNMENT. Local. Errors change nothing: STATE (not sealed; wrapped), MEMORY. */
XD_API xd_result xd_model_allocate(xd_model *model);

/* Writes first values into weights that have none. Local. Deterministic. Errors: STATE (no storage; wrapped) before any
 * write, MEMORY, those of a copy on a device. */
XD_API xd_result xd_model_init_weights(xd_model *model);

/* Marks a weight as written, so that xd_model_init_weights skips it. Local. Errors: STATE (no storage). */
XD_API xd_result xd_weight_set_ready(xd_weight *weight);

/* Lists weights and buffers in order, each once, with the model's names and shapes.
 *
 *   params   [capacity]; NULL with capacity 0 to count
 *
 * Local. Errors: STATE (not sealed; wrapped; no storage), ARGUMENT (capacity). */
XD_API xd_result xd_model_params(const xd_model *model, int64_t capacity, xd_param *params, int64_t *count);

#endif
