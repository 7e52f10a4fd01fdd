#ifndef XDI_MODEL_BUILD_H
#define XDI_MODEL_BUILD_H

#include "model/groups.h"
#include "model/parallel.h"

/* A model for a pipeline of stages over data-, tensor- and expert-parallel ranks, built in seven steps whose order is fixed:
 *
 *     1 describe      the provider describes each stage of this rank: a model, not sealed, or sealed with storage of its own
 *     2 hooks         before the wrap, on the list of stages: add adapters, freeze, cut; then every model is sealed
 *     3 attributes    tensor-parallel attributes that were left out; then the line that counts the parameters
 *     4 storage       of every stage (not for XD_STORAGE_META and XD_STORAGE_CALLER, nor under FSDP)
 *     5 precision     floating weights and buffers become F16 or BF16, with the values that they hold
 *     6 first values  with XD_STORAGE_META storage comes first; then init callbacks, then what still holds no values
 *     7 wrap          values are made equal over the data ranks or compared; DDP or FSDP; hooks after the wrap
 *
 *     xd_grid_create(world, &(xd_expert_desc){ .tp = 2, .pp = 2 }, &grid);
 *     xd_build(world, &(xd_build_desc){ .groups = xd_grid_groups(grid), .provider = { describe, NULL },
 *                                       .pipeline = { .layer_count = 16, .virtual_stages = 2 },
 *                                       .wrap = { XD_WRAP_DDP, .ddp = &(xd_ddp_desc){ .leaves = 8 } } }, &built);
 *     for (int i = 0; i < xd_built_stage_count(built); i++) ... xd_built_stage(built, i).model ...
 *
 * A failure in any step, also one that only one rank meets, is every rank's: that rank returns its error, the others PEER with
 * its message, and all that the earlier steps made is freed. */

/* ---- stages ---- */

enum {
    XD_STAGES_MAX = 128, /* stages of one rank */
    XD_STAGE_HOOKS_MAX = 16
};

/* What a pipeline is made of: the layers of a model in chunks, dealt to the ranks round by round. Chunk number
 * virtual_stage * ranks + rank is that rank's. */
typedef struct xd_pipeline_desc {
    int ranks;                   /* 0 -> 1; in xd_build_desc, those of groups->pp */
    int virtual_stages;          /* chunks of each rank; 0 -> 1. One rank has one stage, whatever this says */
    int64_t layer_count;         /* of the whole model */
    const int64_t *chunk_layers; /* [ranks * virtual_stages] layers of each chunk; NULL -> the same number
                                  * in all */
} xd_pipeline_desc;

/* Where a stage is. */
typedef struct xd_stage_place {
    int pipeline_rank, pipeline_ranks;
    int virtual_stage, virtual_stages; /* 0 of 1 without virtual stages */
    bool first;                        /* of the whole model: it has the embedding and takes the input */
    bool last;                         /* it has the final norm, the head and the loss */
    int64_t first_layer, layer_count;  /* its layers, counted from 0 */
} xd_stage_place;

/* The place of one stage of one rank. Pure: a pipeline of any size is computed on one machine.
 *
 * Errors: ARGUMENT (negative numbers; a rank or virtual stage that there is not; more virtual stages than
 * XD_STAGES_MAX; chunk_layers that do not add up to layer_count, with both), TOPOLOGY (layers that do not divide, with all
 * three numbers).
 * Source: Megatron-Core's interleaved pipeline; explicit counts are ours. */
XD_API xd_result xd_pipeline_place(xd_ctx *ctx, const xd_pipeline_desc *desc, int rank, int virtual_stage,
                                   xd_stage_place *out);

/* One stage of this rank. */
typedef struct xd_stage {
    xd_model *model;
    xd_parallel *parallel; /* its wrapper; NULL before step 7 and without a wrap */
    xd_stage_place place;
    /* What xd_stage_cast_inputs and xd_stage_cast_outputs make of values, set in step 5 from xd_precision; NONE -> nothing. */
    xd_dtype input_dtype, output_dtype;
} xd_stage;

/* Stages in the order of their virtual stages. */
typedef struct xd_stages {
    int count;
    xd_stage stages[XD_STAGES_MAX];
} xd_stages;

/* Describes one stage (step 1): creates a model, adds what belongs at this place, and returns it without wrapping it. Called
 * once for each virtual stage, in order. The build owns the model from then on, unless it refuses it. */
typedef struct xd_stage_provider {
    xd_result (*describe)(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out);
    void *user;
} xd_stage_provider;

/* A hook on the list of stages: `in` is what the build has; `out` comes with a count of 0, which means "unchanged". A hook
 * may return another list with at least one stage: what it leaves out is destroyed, with its wrapper, once all ranks have
 * called the hook; what it adds is the build's from then on. An error ends the build with that code, and `out` is not
 * read; nor is a list taken over that the build refuses. */
typedef struct xd_stage_hook {
    xd_result (*call)(void *user, xd_ctx *ctx, const xd_stages *in, xd_stages *out);
    void *user;
} xd_stage_hook;

/* Hooks in the order in which they are called; each gets what the one before it returned. Zero is the empty list. */
typedef struct xd_stage_hooks {
    int count;
    xd_stage_hook hooks[XD_STAGE_HOOKS_MAX];
} xd_stage_hooks;

/* Adds a hook behind all others, or before them. Local. Errors: ARGUMENT (a hook without a function; a list that is full, with both
 * numbers); the list is unchanged then. */
XD_API xd_result xd_stage_hooks_add(xd_ctx *ctx, xd_stage_hooks *list, xd_stage_hook hook, bool prepend);

/* ---- settings ---- */

/* Who gives weights their storage. */
typedef enum xd_build_storage {
    XD_STORAGE_DEVICE = 0, /* step 4, in memory of the context's device, before types change in step 5 */
    XD_STORAGE_META,       /* step 6, when types are final, so that no weight is ever held twice */
    XD_STORAGE_CALLER /* the provider, on the host for example; what it left without has none until a wrapper
                            * makes it. No first values are formed before that */
} xd_build_storage;

/* Step 5. Weights with the trait keep_f32 and those whose full name fits a pattern stay as they are, as do integers and types of 8
 * bits. In a pattern '*' stands for any run of characters, also an empty one. */
typedef struct xd_precision {
    bool f16, bf16;          /* at most one; neither -> step 5 does nothing */
    const char *const *keep; /* [keep_count] patterns */
    int keep_count;
    /* On the first stage F32 inputs become this; F32 -> as they come; NONE -> the half type, or that in which the wrapper shows
     * weights. */
    xd_dtype input_dtype;
    /* On the last stage outputs of F32, BF16 and F16 become this; NONE -> F32 where there is such a type. */
    xd_dtype output_dtype;
} xd_precision;

/* What a policy is named by. Zero is the default of every field. Names are those of PyTorch ("bfloat16", "float16", "half",
 * "float32", "float") or "bf16", "fp16", "fp32", in any case; NULL or "" -> the default. */
typedef struct xd_policy_desc {
    const char *param_dtype;  /* that views show and ranks send; default "bfloat16" */
    const char *reduce_dtype; /* of gradients; default "float32", and nothing else: they are summed in F32 */
    const char *output_dtype; /* of the model's outputs; default "bfloat16" */
    bool disabled;            /* CREDIT's `amp: false`: F32 throughout, whatever the names say */
    bool spectral_norm;       /* a model with spectral norm: F32 throughout unless a name is given */
} xd_policy_desc;

/* Settings that a policy fills in, to be completed. */
typedef struct xd_policy {
    bool applied;           /* false -> F32 throughout: the settings are those of zero */
    xd_fsdp_desc fsdp;      /* sent_dtype, view_dtype */
    xd_ddp_desc ddp;        /* view_dtype */
    xd_precision precision; /* input_dtype, output_dtype; weights are kept in F32 */
} xd_policy;

/* The settings of a policy by name. What it leaves in F32 for spectral norm it logs as XD_LOG_INFO. Pure otherwise.
 *
 *   desc   NULL -> defaults
 *
 * Errors, with the name: ARGUMENT (no dtype is called so), DTYPE (of integers, or of a type in which views show nothing),
 * UNSUPPORTED (a reduce_dtype other than F32). *out is untouched then.
 * Source: CREDIT, fsdp2.py. */
XD_API xd_result xd_policy_find(xd_ctx *ctx, const xd_policy_desc *desc, xd_policy *out);

/* Called in step 6 for every block, in the order of the model, before the library forms what still holds no values. It writes
 * values where xd_weight_describe shows storage, under FSDP of buffers alone, and says so by xd_weight_set_ready. */
typedef struct xd_block_init {
    xd_result (*call)(void *user, xd_model *model, xd_block *block);
    void *user;
} xd_block_init;

/* Called in step 7 for each stage before it is wrapped, in order: changes what differs there from the settings of all, of which
 * it gets a copy as the build has filled it in. One of the two is NULL. What they point to must be there until the build ends. */
typedef struct xd_stage_settings {
    xd_result (*call)(void *user, const xd_stage *stage, xd_ddp_desc *ddp, xd_fsdp_desc *fsdp);
    void *user;
} xd_stage_settings;

/* Step 7: the wrapper and its settings, exactly those of its kind. With replicas it is over groups->intra_dp_cp. Experts
 * without ranks of their own in the settings are over groups->expert_dp, with replicas over groups->intra_expert_dp and
 * groups->inter_expert_instances; NULL -> every rank has other ones. Under DDP `stage` and `chunk` are those of the
 * pipeline, so that only the first chunk of the first stage has more than one bucket of a type. DDP with sharded_optimizer and
 * `gathers` takes values out of the library's storage, which it releases, so that they arrive where blocks read them: pointers
 * that a hook before the wrap has kept are void then, as under FSDP. */
typedef struct xd_wrap {
    xd_wrap_kind kind;
    const xd_ddp_desc *ddp;
    const xd_fsdp_desc *fsdp;
} xd_wrap;

/* Step 7: values that should be equal on all data ranks. */
typedef struct xd_build_values {
    bool broadcast;       /* seeds, and values that weights hold, become those of data rank 0: for providers
                           * that draw numbers of their own on each rank. Experts' become those of rank 0 of
                           * their own data group */
    bool without_buffers; /* with broadcast: buffers stay as they are, as in Megatron */
    bool check;           /* a hash of every value is compared instead; reads all of them once */
} xd_build_values;

/* Receives the line of step 3, without a newline. Without it the line goes to the context's logger: on standard error with
 * xd_stderr_logger and log_level XD_LOG_INFO. */
typedef struct xd_build_report {
    void (*write)(void *user, const char *line);
    void *user;
} xd_build_report;

/* What to build. Read during the call only, but for what a wrapper's settings say must live longer. Every rank passes the same
 * settings; functions and groups are its own. */
typedef struct xd_build_desc {
    const xd_groups *groups; /* NULL -> one rank in every group */
    xd_stage_provider provider;
    xd_pipeline_desc pipeline;
    const xd_stage_hooks *before, *after;                   /* of the wrap; NULL -> none */
    const xd_stage_hooks *before_override, *after_override; /* called instead of these, also when
                                                             * empty; NULL -> no override */
    xd_build_storage storage;
    xd_precision precision;
    xd_block_init init; /* zero -> none. Under FSDP buffers alone have storage then, tables that are computed
                         * for example, which stay whole; of the weights the wrapper forms parts */
    xd_wrap wrap;
    xd_build_values values;
    xd_build_report report;          /* zero -> the context's logger, as XD_LOG_INFO */
    xd_stage_settings wrap_settings; /* zero -> those of `wrap` for every stage */
} xd_build_desc;

/* Models and wrappers that were built. Owns them. */
typedef struct xd_built xd_built;

/* ---- calls ---- */

/* The seven steps.
 *
 *   world   every rank that builds: failures are agreed over it
 *   desc    see above
 *   out     untouched on failure
 *
 * Collective over world. Data ranks are those of groups->dp_cp, or of groups->dp where that is NULL. In step 3 stages are
 * compared over the data ranks and over the tensor-parallel ones; where some rank has experts, over the experts' data ranks
 * alone, since other ranks have other experts. A rank that is number 0 in dp, cp and dp_cp reports
 *     " > number of parameters on (tensor, pipeline) model parallel rank (0, 1): 1234"
 * counting all stages of the rank, what is frozen too, ties once, in elements that it holds.
 * Memory: that of the models and wrappers; in step 5, each model with storage once more, in the new types. Deterministic.
 * Errors: ARGUMENT (numbers below 0; both half types; a wrap without its settings, or with those of another; a provider that
 * gives no model, or one of another context; a hook that gives none, one twice, one of another context, or one that is
 * wrapped by what is not the stage's wrapper; more stages than XD_STAGES_MAX), TOPOLOGY (layers that do
 * not divide; groups that do not fit together), MISMATCH (settings, models, values or numbers of stages that differ),
 * STATE (storage of the caller that would have to change its type), those of provider, hooks, callbacks,
 * xd_pipeline_place and the wrappers, MEMORY. All ranks alike.
 * Source: Megatron-Bridge, unimodal. */
XD_API xd_result xd_build(xd_comm *world, const xd_build_desc *desc, xd_built **out);

/* Steps 3 to 7 for stages that were made elsewhere: models without wrappers, sealed or not. desc has no provider and no hooks
 * before the wrap; of desc->pipeline nothing but `ranks` is read, places are those in `stages`.
 *
 *   stages   read during the call only. Its models are the result's afterwards; on failure they stay the caller's, without
 *            wrappers, but perhaps sealed and with the attributes, types and storage of the steps before; not those that a
 *            hook after the wrap has left out
 *
 * Otherwise as xd_build. Collective over world. Source: Megatron-Bridge, unimodal. */
XD_API xd_result xd_build_existing(xd_comm *world, const xd_build_desc *desc, const xd_stages *stages,
                                   xd_built **out);

/* Frees wrappers and models, the last stage first. Local; NULL is fine. */
XD_API void xd_built_destroy(xd_built *built);

/* A tensor that a stage takes, or puts out. */
typedef struct xd_stage_values {
    const void *values; /* [count] of `dtype`, in memory of the context's device */
    xd_dtype dtype;
    int64_t count;
    void *room; /* [count] of the type that they become; read where a cast is due alone */
} xd_stage_values;

/* Casts in place of a list: where a cast is due, values are written to `room`, and the entry shows them there in their new type;
 * other entries stay. Inputs are cast on the first stage if they are F32, outputs on the last if they are F32, BF16 or F16;
 * integers and masks never are, and other stages exchange what they have. Rounding is to nearest, ties to even.
 *
 *   list   [count]
 *
 * Local. Errors: ARGUMENT (a list at NULL, negative counts; a cast that is due without room, with its number), those of xd_cast.
 * Nothing is cast then.
 * Source: Megatron-Core, Float16Module; it leaves keyword inputs out. */
XD_API xd_result xd_stage_cast_inputs(const xd_stage *stage, xd_stage_values *list, int64_t count);
XD_API xd_result xd_stage_cast_outputs(const xd_stage *stage, xd_stage_values *list, int64_t count);

/* Stages of this rank, and one of them; all zero where there is none. Local. */
XD_API int xd_built_stage_count(const xd_built *built);
XD_API xd_stage xd_built_stage(const xd_built *built, int index);

/* The lists of a whole model whose stages are on several ranks, the same on each of them, as checkpoints, optimizers and
 * averages take them: an entry for every weight of `whole` that xd_parallel_params lists, in its order. What a stage of this
 * rank has is as xd_parallel_params and xd_parallel_parts say; the rest has a count of 0. A weight with the traits shared and
 * shared_embedding, the last stage's copy, counts in no norm, but is a part of its own that files hold.
 *
 *   whole           sealed, needs no storage, and its names must live as long as the lists; with the names, shapes and types that stages have
 *   params, parts   [capacity]; NULL with capacity 0 to count
 *
 * Local. Errors: ARGUMENT (capacity below the count, with both), STATE (`whole` is not sealed; a stage without a wrapper),
 * MISMATCH (a weight of a stage that `whole` does not have, or with another shape or type; one that two stages of this rank
 * have). */
XD_API xd_result xd_built_params(const xd_built *built, const xd_model *whole, int64_t capacity,
                                 xd_param *params, int64_t *count);
XD_API xd_result xd_built_parts(const xd_built *built, const xd_model *whole, int64_t capacity,
                                xd_tensor_part *parts, int64_t *count);

#endif
