#ifndef XDI_MODEL_BUILD_H
#define XDI_MODEL_BUILD_H

#include "model/groups.h"
#include "model/parallel.h"

/* Builds stages in seven steps (docs/pipelines.md): 1 describe, 2 hooks, 3 attributes, 4 storage, 5 precision, 6 first
 * values, 7 wrap. */

/* ---- stages ---- */

enum {
    XD_STAGES_MAX = 128, /* of one rank */
    XD_STAGE_HOOKS_MAX = 16
};

/* The layers of a model in chunks. Chunk virtual_stage * ranks + rank belongs to that rank. */
typedef struct xd_pipeline_desc {
    int ranks;                   /* 0 -> 1; in xd_build_desc, those of groups->pp */
    int virtual_stages;          /* of each rank; 0 -> 1; a single rank has one */
    int64_t layer_count;         /* of the whole model */
    const int64_t *chunk_layers; /* [ranks * virtual_stages]; NULL -> equal numbers */
} xd_pipeline_desc;

/* The place of a stage. */
typedef struct xd_stage_place {
    int pipeline_rank, pipeline_ranks;
    int virtual_stage, virtual_stages; /* 0 of 1 without virtual stages */
    bool first;                        /* it has the embedding and takes the input */
    bool last;                         /* it has the final norm, the head and the loss */
    int64_t first_layer, layer_count;  /* from 0 */
} xd_stage_place;

/* One stage of this rank. */
typedef struct xd_stage {
    xd_model *model;
    xd_parallel *parallel; /* NULL before step 7 and without a wrap */
    xd_stage_place place;
    xd_dtype input_dtype, output_dtype; /* of xd_stage_cast, from step 5; NONE -> no cast */
} xd_stage;

/* Stages in the order of their virtual stages. */
typedef struct xd_stages {
    int count;
    xd_stage stages[XD_STAGES_MAX];
} xd_stages;

/* The callback of step 1, for each virtual stage in order: returns its model, without a wrapper. The build owns it
 * unless it refuses it. */
typedef struct xd_stage_provider {
    xd_result (*describe)(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out);
    void *user;
} xd_stage_provider;

/* A hook on the list of stages. Leaves `out` empty (unchanged) or returns another list of at least one stage. The build
 * owns what the list adds and destroys what it leaves out; of a list that comes with an error, or is refused, neither. */
typedef struct xd_stage_hook {
    xd_result (*call)(void *user, xd_ctx *ctx, const xd_stages *in, xd_stages *out);
    void *user;
} xd_stage_hook;

/* Hooks in order; each gets the list of the one before. */
typedef struct xd_stage_hooks {
    int count;
    xd_stage_hook hooks[XD_STAGE_HOOKS_MAX];
} xd_stage_hooks;

/* ---- settings ---- */

/* When weights get storage. */
typedef enum xd_build_storage {
    XD_STORAGE_DEVICE = 0, /* step 4, on the context's device; not under FSDP */
    XD_STORAGE_META,       /* step 6, in the final types */
    XD_STORAGE_CALLER      /* by the provider; the wrapper makes the rest */
} xd_build_storage;

/* Settings of step 5. Integers, types of 8 bits, keep_f32 weights and `keep` stay unchanged. */
typedef struct xd_precision {
    bool f16, bf16;          /* at most one; neither -> no step 5 */
    const char *const *keep; /* [keep_count] patterns of full names; '*' stands for any characters, or none */
    int keep_count;
    /* of F32 inputs on the first stage; F32 -> unchanged; NONE -> the half type, or the wrapper's view_dtype */
    xd_dtype input_dtype;
    /* of F32, BF16 and F16 outputs on the last stage; NONE -> F32 if there is a half type or a view_dtype */
    xd_dtype output_dtype;
} xd_precision;

/* Types by name, in any case: "bfloat16", "float16", "half", "float32", "float", "bf16", "fp16", "fp32". NULL or "" ->
 * the default. */
typedef struct xd_policy_desc {
    const char *param_dtype;  /* of views and messages; default "bfloat16" */
    const char *reduce_dtype; /* of gradients; default and only "float32" */
    const char *output_dtype; /* default "bfloat16" */
    bool disabled;            /* F32 throughout, whatever the names */
    bool spectral_norm;       /* F32 throughout unless a name is given */
} xd_policy_desc;

/* The settings of a policy. */
typedef struct xd_policy {
    bool applied;           /* false -> F32 throughout, zeros */
    xd_fsdp_desc fsdp;      /* sent_dtype, view_dtype */
    xd_ddp_desc ddp;        /* view_dtype */
    xd_precision precision; /* input_dtype, output_dtype */
} xd_policy;

/* Returns the settings of a policy; weights stay F32.
 *
 *   desc   NULL -> defaults
 *
 * Errors: ARGUMENT (dtype unknown), DTYPE (integers; types without views), UNSUPPORTED (reduce_dtype).
 * Source: CREDIT. */
XD_API xd_result xd_policy_find(xd_ctx *ctx, const xd_policy_desc *desc, xd_policy *out);

/* The callback of step 6 for every block in order. Writes values into storage and calls xd_weight_set_ready. Under FSDP
 * only buffers have storage. */
typedef struct xd_block_init {
    xd_result (*call)(void *user, xd_model *model, xd_block *block);
    void *user;
} xd_block_init;

/* The callback of step 7 for each stage in order. Changes its copy of `ddp` or `fsdp`; the other is NULL. What they
 * point to must outlive the build. */
typedef struct xd_stage_settings {
    xd_result (*call)(void *user, const xd_stage *stage, xd_ddp_desc *ddp, xd_fsdp_desc *fsdp);
    void *user;
} xd_stage_settings;

/* The wrapper of step 7, with settings of its kind only. */
typedef struct xd_wrap {
    xd_wrap_kind kind;
    const xd_ddp_desc *ddp;
    const xd_fsdp_desc *fsdp;
} xd_wrap;

/* How step 7 makes values equal on all data ranks. */
typedef struct xd_build_values {
    bool broadcast;       /* data rank 0 sends seeds and values; for experts rank 0 of their data group */
    bool without_buffers; /* with broadcast: not buffers, as in Megatron */
    bool check;           /* compares a hash of every value instead */
} xd_build_values;

/* Receives the line of step 3, without a newline. Zero -> the context's logger, as XD_LOG_INFO. */
typedef struct xd_build_report {
    void (*write)(void *user, const char *line);
    void *user;
} xd_build_report;

/* Settings of a build, the same on all ranks except functions and groups. */
typedef struct xd_build_desc {
    const xd_groups *groups; /* NULL -> one rank in every group */
    xd_stage_provider provider;
    /* existing models without wrappers, instead of a provider and hooks before the wrap. The result owns them, on
     * failure the caller. NULL -> the provider's */
    const xd_stages *stages;
    xd_pipeline_desc pipeline;
    const xd_stage_hooks *before, *after; /* of the wrap; NULL -> none */
    /* replace `before` and `after`, even if empty; NULL -> no override */
    const xd_stage_hooks *before_override, *after_override;
    xd_build_storage storage;
    xd_precision precision;
    xd_block_init init; /* zero -> none */
    xd_wrap wrap;
    xd_build_values values;
    xd_build_report report;
    xd_stage_settings wrap_settings; /* zero -> `wrap` for all */
} xd_build_desc;

/* Owns models and wrappers. */
typedef struct xd_built xd_built;

/* ---- calls ---- */

/* Runs the steps. Collective over world, every rank that builds.
 *
 * Memory: models and wrappers; in step 5 each model with storage once more. Deterministic.
 * Errors: ARGUMENT (negative numbers; both half types; the wrap's settings; a model of a provider or hook; above
 * XD_STAGES_MAX; chunk_layers do not add up), TOPOLOGY (layers do not divide; groups), MISMATCH (settings, models,
 * values or stages), STATE (the caller's storage would change its type), those of callbacks and the wrappers, MEMORY.
 * Source: Megatron-Bridge. */
XD_API xd_result xd_build(xd_comm *world, const xd_build_desc *desc, xd_built **out);

/* Frees wrappers and models, the last stage first. Local. */
XD_API void xd_built_destroy(xd_built *built);

/* A tensor that a stage takes or returns. */
typedef struct xd_stage_values {
    const void *values; /* [count] of `dtype`, on the context's device */
    xd_dtype dtype;
    int64_t count;
    void *room; /* [count] of the new type; needed only for a cast */
} xd_stage_values;

/* Which tensors of a stage. */
typedef enum xd_stage_end { XD_STAGE_INPUTS = 0, XD_STAGE_OUTPUTS } xd_stage_end;

/* Casts tensors to the stage's input or output type, into `room`; an entry then shows its new values and type. Other
 * entries stay.
 *
 *   list   [count]
 *
 * Rounds to nearest, ties to even. Local. Errors cast nothing: ARGUMENT (list; count; room), those of xd_cast.
 * Source: Megatron-Core. */
XD_API xd_result xd_stage_cast(const xd_stage *stage, xd_stage_end end, xd_stage_values *list, int64_t count);

/* Returns the count of this rank's stages, and one of them; all zero for none. Local. */
XD_API int xd_built_stage_count(const xd_built *built);
XD_API xd_stage xd_built_stage(const xd_built *built, int index);

/* Lists a whole model whose stages are on several ranks; the same on each.
 *
 *   whole           sealed, with the stages' names, shapes and types; needs no storage. Names must outlive the lists
 *   params, parts   [capacity]; NULL with capacity 0 to count
 *
 * In the order of xd_parallel_params; weights of other ranks have a count of 0. Local. Errors: ARGUMENT (capacity),
 * STATE (`whole` not sealed; a stage without a wrapper), MISMATCH (a stage's weight: missing, another shape or type,
 * twice). */
XD_API xd_result xd_built_params(const xd_built *built, const xd_model *whole, int64_t capacity,
                                 xd_param *params, int64_t *count);
XD_API xd_result xd_built_parts(const xd_built *built, const xd_model *whole, int64_t capacity,
                                xd_tensor_part *parts, int64_t *count);

#endif
