#ifndef XDI_MODEL_INTERNAL_H
#define XDI_MODEL_INTERNAL_H

#include "base/internal.h"
#include "comm/leaves.h"
#include "comm/queue.h"
#include "kernel/kernels.h"
#include "model/buckets.h"
#include "model/build.h"
#include "model/parallel.h"
#include "model/pipeline.h"
#include "model/recompute.h"
#include "tensor/internal.h"

struct xd_weight {
    xd_model *model;
    xd_block *block;
    xd_weight *next;  /* of its block */
    xd_weight *owner; /* itself, or what it is tied to */
    char *name;       /* full; belongs to the table of names */
    xd_weight_desc desc;
    xd_region region;
    /* what of it is no padding, of a weight with stored rows that it does not have; NULL: all */
    xd_region *saved;
    int64_t index; /* in the model's order, once sealed */
    int64_t count;
    int64_t shape[XD_DIMS_MAX]; /* of the region */
    void *value, *gradient;
    bool ready;
    xd_gradient_state state; /* of the gradient of a wrapped model, in its lists too */
    bool used;               /* a backward of this step has opened a block with it, or with a tie to it */
    bool awaited;            /* values come as soon as there is memory for them: nothing forms first ones */
    xd_dtype declared;       /* the type before a wrapper gave it another one; NONE -> none did */
    void *own;               /* its storage in the model, of that type; NULL -> none */
    /* of a wrapper: where its values and gradients are, and which of that buffer's weights it is */
    struct xdi_flat *flat;
    int64_t flat_index;
};

enum { XDI_BLOCK_OPEN_MAX = 8 /* brackets of one block inside one another */ };

struct xd_block {
    xd_model *model;
    xd_block *parent, *next, *first_child, *last_child; /* next: the parent's next child */
    xd_weight *first_weight, *last_weight;
    const char *name; /* full; belongs to the table of names */
    xd_block_desc desc;
    char *type;           /* the desc's, copied */
    int64_t first, count; /* its own weights in the model's order, once sealed */
    bool expert;          /* its weights are those of experts, once wrapped */
    struct xdi_unit *units
        [2]; /* of a wrapper: in which the block is, or is around, for other weights and for those of experts */
    xd_pass passes[XDI_BLOCK_OPEN_MAX];
    int open;      /* brackets that are open, and their passes */
    int64_t leaf;  /* backwards of this step that have ended */
    int64_t input; /* its number among the blocks whose inputs are kept */
};

/* Inputs of blocks whose forward runs again. */
struct xd_inputs {
    xd_model *model;
    size_t bytes, step; /* of the largest input; from one to the next */
    int64_t in_flight, count;
    unsigned char *memory; /* [count][in_flight][step], of the device */
    int64_t *leaves;       /* [count][in_flight] whose input is there; -1: free */
    const xd_block *last;  /* whose input was kept last, and of which leaf */
    int64_t last_leaf;
};

/* An entry of the table of names: a block or a weight. */
typedef struct xdi_model_named {
    const char *name;
    xd_block *block;
    xd_weight *weight;
} xdi_model_named;

struct xd_model {
    xd_ctx *ctx;
    xd_model_desc desc;
    xd_block root;
    xdi_model_named *names; /* [name_room], open addressing; a power of two */
    size_t name_count, name_room;
    int64_t weight_count;
    xd_weight **weights; /* [weight_count] in order, once sealed */
    void *storage;       /* of the library's values and gradients */
    bool buffers_alone;  /* of buffers, nothing else */
    bool yields;         /* a wrapper takes the values out of it and releases it, also DDP */
    bool sealed;
    void **values, **gradients, **nothing;                /* [weight_count] what views show; nothing: NULLs */
    xd_dtype *value_dtypes, *gradient_dtypes, *no_dtypes; /* [weight_count] of these; no_dtypes: NONE */
    struct xd_parallel *parallel;                         /* the wrapper, while there is one */
    struct xd_inputs *inputs; /* of blocks that are recomputed, while there are some */
};

/* model.c: the stored shape: that of the desc, with the rows that are stored. */
XD_PRIVATE void xdi_weight_stored_shape(const xd_weight_desc *d, int64_t shape[XD_DIMS_MAX]);

/* model_seal.c: the block after this one, a parent before its children; NULL after the last. */
XD_PRIVATE xd_block *xdi_block_after(const xd_block *block);

/* model_init.c: the first values of the positions `range` of a weight's region, into memory of the context's device. */
XD_PRIVATE xd_result xdi_weight_fill(xd_ctx *ctx, const xd_weight *weight, xd_interval range, void *to);

/* model_storage.c: STATE for a model that is not sealed, or has a weight without storage. */
XD_PRIVATE xd_result xdi_model_require_storage(const xd_model *model);

/* model_storage.c: xd_model_allocate: for buffers alone where a wrapper forms parts of weights, for values alone where it will
 * have the gradients, or for all. */
typedef enum xdi_take { XDI_TAKE_BUFFERS, XDI_TAKE_VALUES, XDI_TAKE_ALL } xdi_take;
XD_PRIVATE xd_result xdi_model_take(xd_model *model, xdi_take what);

/* model_storage.c: frees the library's storage; the weights that were there have none. */
XD_PRIVATE void xdi_model_release(xd_model *model);

/* model_storage.c: an entry of lists of parameters, without value, gradient and count. */
XD_PRIVATE xd_param xdi_weight_param(const xd_weight *weight);

/* pass.c: the values of a block that is open, or that has no wrapper. */
XD_PRIVATE xd_result xdi_block_show_values(xd_block *block, xd_block_view *view);

/* model.c: frees the places of all inputs; NULL is fine. */
XD_PRIVATE void xdi_inputs_forget(struct xd_inputs *inputs);

/* model.c: whether a weight has a gradient. */
XD_PRIVATE bool xdi_weight_is_trained(const xd_weight *weight);

/* ---- building ---- */

XD_PRIVATE xd_ctx *xdi_built_ctx(const xd_built *built); /* build.c */

/* A build that is going on. */
typedef struct xdi_builder {
    xd_ctx *ctx;
    xd_comm *world;
    const xd_build_desc *desc;
    xd_groups groups;
    xd_comm *data; /* the data ranks; NULL -> one */
    bool experts;  /* some rank has weights of experts */
    xd_built *built;
    xd_stages *list; /* of it */
} xdi_builder;

/* build.c: a callback's result, with a message if it left none, and of the codes that there are. */
XD_PRIVATE xd_result xdi_builder_called(xd_ctx *ctx, xd_result result, const char *what, int index);

/* build_place.c: a rank and a size; of no group 0 and 1. */
XD_PRIVATE int xdi_group_rank(const xd_comm *comm);
XD_PRIVATE int xdi_group_size(const xd_comm *comm);

/* build_place.c: the virtual stages of each rank; one rank has no others than one. */
XD_PRIVATE int xdi_pipeline_stages(int ranks, int virtual_stages);

/* build_settings.c: what can be refused before anything is built; and whether all ranks have said alike what they must. */
XD_PRIVATE xd_result xdi_builder_validate(const xdi_builder *b, const xd_stages *existing);
XD_PRIVATE xd_result xdi_builder_agree_settings(const xdi_builder *b, bool existing);
/* build_settings.c: the hooks that are called; NULL for none. */
XD_PRIVATE const xd_stage_hooks *xdi_builder_hooks(const xd_build_desc *d, bool after);

/* build_precision.c: gives a sealed model the half type of step 5. Errors: as in xd_build; the model is unchanged then. */
XD_PRIVATE xd_result xdi_model_lower(xd_model *model, const xd_precision *precision);

/* build_casts.c: in which types a stage takes and puts out values. */
XD_PRIVATE void xdi_stage_set_casts(const xd_build_desc *d, xd_stage *stage);

/* build_precision.c: whether a name fits a pattern, in which '*' stands for any run of characters. */
XD_PRIVATE bool xdi_name_fits(const char *pattern, const char *name);

/* build_values.c: broadcasts the seeds; makes values equal over the data ranks or compares them, as the settings say.
 * Collective. */
XD_PRIVATE xd_result xdi_builder_seeds(const xdi_builder *b);
XD_PRIVATE xd_result xdi_builder_equalise(const xdi_builder *b);

/* ---- pipelines ---- */

enum { XDI_SCHEDULE_RANKS = 4096, XDI_SCHEDULE_MICRO_BATCHES = 1 << 20 };

/* A schedule tick by tick. */
typedef struct xdi_schedule {
    xd_ctx *ctx;
    xd_pipeline_schedule desc;
    int64_t ticks;                 /* so far */
    xd_pipeline_work *row;         /* [ranks] of the last one */
    int64_t *at;                   /* [ranks] items done */
    int64_t *forwards, *backwards; /* [stages] micro-batches done */
} xdi_schedule;

/* pipeline_table.c: checks settings and fills in the defaults. */
XD_PRIVATE xd_result xdi_schedule_settle(xd_ctx *ctx, xd_pipeline_schedule *desc);

/* pipeline_table.c: before the first tick; to the next one, false after the last; and the end. */
XD_PRIVATE xd_result xdi_schedule_open(xd_ctx *ctx, const xd_pipeline_schedule *desc, xdi_schedule *out);
XD_PRIVATE bool xdi_schedule_next(xdi_schedule *s);
XD_PRIVATE void xdi_schedule_close(xdi_schedule *s);

/* pipeline_table.c: the rank that what an item of this rank puts out goes to; -1: none. */
XD_PRIVATE int xdi_schedule_sends_to(const xd_pipeline_schedule *d, int rank, const xd_pipeline_work *work);

/* pipeline_table.c: the work of this rank whose activation, or whose gradient of an output, arrives at the end of the tick;
 * IDLE: none. */
XD_PRIVATE xd_pipeline_work xdi_schedule_arrival(const xdi_schedule *s, int rank, xd_pipeline_work_kind kind);

/* pipeline_run.c: bytes of a pipeline on one rank of schedule.ranks; reads no groups and no `built`. */
XD_PRIVATE xd_result xdi_pipeline_bytes(xd_ctx *ctx, const xd_pipeline_run_desc *desc, int rank,
                                        xd_memory_bytes *out);

/* recompute.c: bytes of the inputs of a sealed model: 0 without blocks to recompute, half of SIZE_MAX if uncountable. */
XD_PRIVATE xd_memory_bytes xdi_inputs_bytes(const xd_model *model, const xd_inputs_desc *desc);

/* pipeline_run.c: drops the step of every stage: see xdi_parallel_drop_step. */
XD_PRIVATE void xdi_pipeline_drop(const xd_built *built);

/* A tick of one rank, with the places of what it reads and writes. Indices of buffers; -1: none. */
typedef struct xdi_pipeline_step {
    xd_pipeline_work work;
    int to;           /* the rank that the output is sent to */
    int64_t slot;     /* of the caller */
    int64_t input;    /* an activation that arrived */
    int64_t gradient; /* of the output, likewise */
    int64_t arrives;  /* where an activation is received at the end of the tick */
    int64_t gradient_arrives;
    bool meets
        [2]; /* the rank before, or behind: this one or that one is idle, and an empty message each way says that both go on */
    int64_t waits; /* idle ticks in a row, this one counted */
    int buffer;    /* of two in turn, where what is sent is written */
    /* the last tick whose messages must have arrived before the work, or left that buffer; -1: none */
    int64_t needs;
} xdi_pipeline_step;

/* All ticks of one rank, and how many places they use. */
typedef struct xdi_pipeline_program {
    xd_pipeline_schedule schedule;
    xd_pipeline_counts counts;
    xdi_pipeline_step *steps; /* [counts.ticks] */
} xdi_pipeline_program;

/* pipeline_program.c: the counts of a schedule on one rank; and, once there is memory, the steps. `owners` has room for twice
 * counts.forwards + inputs + gradients numbers. */
XD_PRIVATE xd_result xdi_pipeline_program_count(xd_ctx *ctx, const xd_pipeline_schedule *schedule, int rank,
                                                xdi_pipeline_program *out);
XD_PRIVATE xd_result xdi_pipeline_program_fill(xd_ctx *ctx, xdi_pipeline_program *program, int rank,
                                               int64_t *owners);

/* ---- wrappers ---- */

/* A record on a queue, from its start to its wait. */
typedef struct xdi_flight {
    bool open;
    xd_ticket ticket;
} xdi_flight;

/* A bucket of a flat buffer: the gradients that are summed at once. */
typedef struct xdi_bucket {
    struct xdi_flat *flat;
    xd_interval buffer; /* of the flat buffer */
    int64_t kept;       /* elements of the sum that stay here: this rank's part, or all */
    int64_t blocks;     /* that add to it, ties included; 0: it rests */
    int64_t done; /* of these, in the leaf that is being formed, or in the round of those of all members */
    int64_t leaf; /* leaves formed so far */
    /* [members] the whole gradient of each leaf that is being formed; NULL before its first backward, and of members
     * whose leaves are added to that of the first */
    float **places;
    xd_leaf_stack *stack; /* of whole leaves; of parts of sums over the ranks where leaves are dealt */
    float *sum;           /* [kept], once reduced; at home */
    /* [kept] in memory of the device, where a sum passes on its way home; NULL -> it does not */
    float *landed;
    bool reduced;
    /* [members] instead of the stack: of each member's leaves, where they come in turn and lie in rows; NULL -> none */
    xd_leaf_stack **lanes;
    float *joined;        /* the nodes of all lanes, as one stack would have them; NULL -> none */
    xdi_flight sending;   /* the sum over the ranks that is under way: of a dealt leaf, or of all leaves */
    xdi_flight spreading; /* values that ranks have stepped in parts, to all */
    uint64_t seen;        /* the last round over a block's buckets that met it */
} xdi_bucket;

/* Weights of one unit and one type, one after another. What is kept has the type of the weights; it may be sent in another one,
 * and shown in a third. */
typedef struct xdi_flat {
    struct xdi_unit *unit;
    xd_weight **weights; /* [count] in the model's order */
    int64_t count;
    xd_dtype dtype, sent_dtype, view_dtype;
    bool trained; /* or may be later */
    bool whole;   /* every rank keeps all values; else its part, and the unit is gathered while it is open */
    xd_bucket_plan *plan;
    size_t kept_bytes; /* of values */
    void *values; /* kept: all of them or this rank's part; NULL when all weights have their own; at home */
    /* [numel / ranks] this rank's part as it is sent: `values`, or a copy; at home. When whole NULL, but [numel] as
     * shown where that is not at home and of another type */
    void *sent;
    void *shown;         /* [numel] values that all ranks keep, as they are shown; NULL -> as they are kept */
    void *near;          /* [numel / reshard_ranks] the part of a gathered unit that stays; NULL -> none */
    size_t slot;         /* bytes from the begin of a gathered unit to these, as they were sent */
    size_t view_slot;    /* and as they are shown, where that is another type */
    xdi_flight arriving; /* its gather */
    int64_t place;       /* elements from the begin of a unit's whole gradient to these */
    xdi_bucket *buckets; /* [bucket_count] */
    int64_t bucket_count; /* 0 when it is not trained */
} xdi_flat;

/* What is gathered and released together; under DDP the one unit is the whole model. */
struct xdi_unit {
    xd_block *block;
    xdi_flat *flats; /* [flat_count] */
    int64_t flat_count;
    int level;              /* units around it */
    size_t gathered_bytes;  /* of its values, 0 when they are kept whole */
    int64_t gradient_count; /* elements of its whole gradient */
    int64_t open;           /* brackets that are open */
    /* [slot_count] where they may be: shared with the units of its level, or its own */
    struct xdi_unit_slot *slots;
    int slot_count;
    struct xdi_unit_slot *slot;     /* where they are, or arrive; NULL -> not gathered */
    bool arriving;                  /* started, and not opened yet */
    bool near;                      /* its flats' parts of that name hold the current values */
    struct xdi_gradient_slot *sums; /* [sum_count] where its whole gradient may be: shared by its level */
    int sum_count;
    struct xdi_gradient_slot *sum; /* where it is; NULL -> nowhere */
    int64_t forming, sending; /* buckets whose place is there: that blocks add to; whose sum is under way */
};

/* Memory for the values of one unit at a time. */
typedef struct xdi_unit_slot {
    size_t bytes;
    unsigned char *memory;
    struct xdi_unit *unit; /* whose values are there; NULL -> nobody's */
    uint64_t opened;       /* when that unit was last opened */
} xdi_unit_slot;

/* Memory for the whole gradient of one unit at a time. */
typedef struct xdi_gradient_slot {
    int64_t count;
    float *memory;         /* [count] */
    struct xdi_unit *unit; /* whose it is; NULL -> nobody's */
    uint64_t taken;        /* when that unit took it */
} xdi_gradient_slot;

/* A bracket of this step: a pass, one with more to follow, or a skip. */
enum { XDI_OPENINGS = 64, XDI_OPENING_MORE = XD_PASS_INFERENCE + 1, XDI_OPENING_SKIP };

typedef struct xdi_opening {
    const xd_block *block;
    int kind;
    int64_t leaf;
    uint64_t signature; /* of it and all before */
} xdi_opening;

struct xd_parallel {
    xd_ctx *ctx;
    xd_model *model;
    xd_comm *data, *replicas; /* replicas NULL -> one group */
    int rank, ranks;          /* in data */
    int replica, replica_count;
    struct xd_parallel
        *experts;    /* the wrapper of experts inside that of the other weights; NULL -> there are none */
    bool of_experts; /* this is one */
    int members;     /* of an expert-parallel group, whose leaves come in turn; else 1 */
    xd_leaf_stack **lanes; /* [bucket_count, members] of all buckets; NULL -> none */
    float **places;        /* [bucket_count, members] of all buckets */
    const void **forests;  /* [members] scratch, and which leaves these are */
    xd_leaves *forest_leaves;
    bool sharded;           /* FSDP */
    bool invariant;         /* the reduction mode */
    bool dealt;             /* leaves: every N-th one */
    bool split_optimizer;   /* DDP: each rank steps its part */
    bool reserve_frozen;    /* frozen weights have buckets, which rest until one of their weights is thawed */
    xd_leaves leaves;       /* of this rank in its group, in order unless they are dealt */
    int64_t most, total;    /* leaves: of the rank that has most; of all groups */
    int level_count;        /* of units inside units */
    struct xdi_unit *units; /* [unit_count], a unit after those around it */
    int64_t unit_count;
    xdi_flat *flats; /* [flat_count], those of a unit together */
    int64_t flat_count;
    xdi_bucket *buckets; /* [bucket_count] of all flats */
    int64_t bucket_count;
    xd_weight **weights;  /* of all flats */
    xdi_unit_slot *slots; /* [slot_count] */
    int64_t slot_count;
    xdi_gradient_slot *sums; /* [sum_count] */
    int64_t sum_count;
    xd_queue *gathers, *reductions; /* the caller's; NULL -> in the call itself */
    int prefetch;                   /* units that are gathered ahead */
    int64_t bucket_size,
        bucket_parts;     /* DDP: elements of a bucket, or about how many buckets; 0 -> the default */
    int stage, chunk;     /* DDP: of a pipeline; later ones have one bucket */
    bool gathers_in_step; /* DDP: likewise */
    bool wide_padding;    /* of what is cut into parts */
    int64_t launched;     /* DDP: buckets of this step whose sum was started, in order */
    bool late;            /* DDP: sums begin in xd_parallel_reduce alone */
    int64_t *counts;      /* [ranks] scratch */
    int *used;            /* [weights of the model] scratch */
    /* [ranks + replica_count]: of each data rank, then of each group, in the sums over them */
    xd_leaves *known;
    xd_dtype sent_dtype, view_dtype; /* of floating weights; NONE -> their own */
    float before, after;             /* factors of leaves, and of the sum of all */
    int reshard_ranks;               /* that keep a unit together after it was gathered; 0 -> all */
    bool alone;                      /* FSDP of one rank, which several would gather units for */
    xd_comm *near;                   /* these, when they are neither one nor all; the wrapper's own */
    xd_ctx *home; /* in whose memory this rank's parts are kept: the model's context, or xd_fsdp_desc.host */
    bool offloaded;             /* the latter */
    void *memory, *home_memory; /* the latter NULL but where parts are offloaded */
    bool unwritten;             /* where parts of values are kept is not cleared */
    void *locked;               /* home_memory, where the model's device has locked its pages; else NULL */
    xd_parallel_bytes bytes;
    uint64_t round;                     /* over a block's buckets */
    uint64_t opened;                    /* units so far, and pieces of memory that they took */
    int64_t open;                       /* brackets */
    uint64_t signature;                 /* of the brackets of this step */
    xdi_opening openings[XDI_OPENINGS]; /* the last of them: number i at i modulo their number */
    int64_t opening_count;
    bool reduced;    /* between reduce and publish */
    bool has_groups; /* the caller has given some: tp, pp and embedding of these, NULL for one rank */
    xd_groups groups;
    int stages;        /* of this rank, as its build says; 0 -> this one */
    bool compared[3];  /* with the ranks of each: how many weights are summed over it */
    bool summed;       /* in this step: what traits say over these groups */
    bool finished;     /* xd_pipeline_finish was called in this step */
    int compare_steps; /* as in xd_ddp_desc */
    int64_t published; /* steps so far */
    bool waits;        /* some leaf has ended that is not summed yet */
    bool elsewhere;    /* when ranks were to agree on the last step's sum some rank was in another call */
};

/* parallel_experts.c: the wrapper of experts of one that has its place among the data ranks, as a rank of theirs and, where
 * that is not NULL, of a group; and one that stands among `ranks` of them without any group. None where the model has no
 * experts. On failure the wrapper is to be destroyed. */
XD_PRIVATE xd_result xdi_experts_open(xd_parallel *p, const xd_fsdp_desc *d);
XD_PRIVATE xd_result xdi_experts_place(xd_parallel *p, const xd_fsdp_desc *d, int ranks);
/* parallel.c: lays the experts out as xdi_parallel_lay does the others, which come first. */
XD_PRIVATE xd_result xdi_experts_lay(xd_parallel *p, const xd_fsdp_desc *d);
/* parallel_place.c: which wrapper has a weight; a block, NULL without a wrapper; and whether this one has a weight or a block. */
XD_PRIVATE const xd_parallel *xdi_parallel_of(const xd_parallel *p, const xd_weight *w);
XD_PRIVATE xd_parallel *xdi_block_parallel(const xd_block *block);
XD_PRIVATE bool xdi_parallel_has(const xd_parallel *p, const xd_weight *w);
/* parallel_place.c: whether a weight, or what it is tied to, is an expert's; and the unit of a block that is wrapped. */
XD_PRIVATE bool xdi_weight_is_expert(const xd_weight *w);
XD_PRIVATE struct xdi_unit *xdi_block_unit(const xd_block *block);
/* parallel_place.c: leaves of one of the data ranks that this rank has leaves of, in its group, where they lie in rows; how
 * many backwards a block has in a step; and the number of one of these in the whole step, -1 for none. */
XD_PRIVATE xd_interval xdi_parallel_row(const xd_parallel *p, int member);
XD_PRIVATE int64_t xdi_parallel_passes(const xd_parallel *p);
XD_PRIVATE int64_t xdi_parallel_number(const xd_parallel *p, int64_t leaf);
/* parallel_experts.c: whether each member's leaves have a stack of their own. */
XD_PRIVATE bool xdi_parallel_has_lanes(const xd_parallel *p);
/* parallel_experts.c: the nodes of a bucket's lanes become those of one stack. */
XD_PRIVATE xd_result xdi_lanes_join(xd_parallel *p, const xdi_bucket *b);
/* model_agree.c: xd_model_agree, of all weights but those of experts. */
XD_PRIVATE xd_result xdi_model_agree_shared(const xd_model *model, xd_comm *comm);

/* parallel_units.c: the units of a model and the weights of each, by type. On failure the wrapper is to be destroyed. */
XD_PRIVATE xd_result xdi_parallel_divide(xd_parallel *p, const xd_fsdp_desc *d);

/* parallel_units.c: the type in which blocks show a weight. */
XD_PRIVATE xd_dtype xdi_weight_view_dtype(const xd_parallel *p, const xd_weight *w);

/* parallel_spectral.c: the vectors of blocks with spectral norm get the type in which their weights are shown: first the type alone,
 * then, in memory of the wrapper, the values; and each has what it was, with its values, when the wrapper goes. */
XD_PRIVATE xd_result xdi_spectral_retype(const xd_parallel *p);
XD_PRIVATE xd_result xdi_spectral_take(const xd_parallel *p, xd_weight *weight, void *place);
XD_PRIVATE void xdi_spectral_give_back(const xd_parallel *p, xd_weight *weight, const void *place);

/* parallel.c: an empty wrapper of a kind, one of the two; parallel_place.c: then, with its model, on a rank of a group among its
 * replicas. */
XD_PRIVATE void xdi_parallel_set_kind(xd_parallel *p, xd_fsdp_desc *settings, const xd_ddp_desc *ddp,
                                      const xd_fsdp_desc *fsdp);
XD_PRIVATE void xdi_parallel_set_place(xd_parallel *p, int rank, int ranks, int replica, int replica_count);
/* parallel.c: lays everything out, without memory and other ranks. */
XD_PRIVATE xd_result xdi_parallel_lay(xd_parallel *p, const xd_fsdp_desc *d);
/* parallel.c: whether optimizers and files see a weight: once, and not what is computed again. */
XD_PRIVATE bool xdi_parallel_lists(const xd_weight *w);
/* parallel.c: the entry of such lists for this rank's part of a weight, and where that is; without value and gradient. */
XD_PRIVATE xd_param xdi_parallel_describe(const xd_parallel *p, const xd_weight *w, xd_bucket_piece *piece);

/* parallel_state.c: whether a block has a weight that trains. */
XD_PRIVATE bool xdi_block_trains(const xd_block *block);

/* parallel.c: what xd_parallel_reduce does over the data ranks; and its end: a step that could not be reduced is dropped, one that
 * was before stays. */
XD_PRIVATE xd_result xdi_parallel_reduce_data(xd_parallel *p);
XD_PRIVATE xd_result xdi_parallel_end_reduce(xd_parallel *p, xd_result result);

/* Sums that traits of weights ask for; and all weights that train. */
typedef enum xdi_finish_kind {
    XDI_FINISH_OVER_STAGES = 0,
    XDI_FINISH_OVER_TENSORS,
    XDI_FINISH_EMBEDDING,
    XDI_FINISH_ALL
} xdi_finish_kind;

/* The end of a step: of all stages of a rank, or of one that is reduced by itself. */
typedef struct xdi_finish {
    const char *call;
    xd_groups groups;
    const xd_built *built; /* NULL -> `one` is all */
    xd_stage one;
} xdi_finish;

/* parallel_reduce.c: its stages. */
XD_PRIVATE int xdi_finish_stage_count(const xdi_finish *f);
XD_PRIVATE xd_stage xdi_finish_stage(const xdi_finish *f, int index);
/* parallel_reduce.c: weights of one stage whose sum of a kind is not made: the one with this number, or NULL; `count` receives
 * their number, `elements` those of this rank's parts. */
XD_PRIVATE const xd_weight *xdi_finish_find(const xd_stage *stage, xdi_finish_kind kind, int64_t number,
                                            int64_t *count, int64_t *elements);
/* parallel_reduce.c: whether the ranks of a group have the same weights of a kind, where none has failed before; and whether the
 * embedding's copies fit. Collective. */
XD_PRIVATE xd_result xdi_finish_compare(xd_comm *comm, const xdi_finish *f, xdi_finish_kind kind,
                                        xd_result mine);
XD_PRIVATE xd_result xdi_finish_compare_copies(xd_ctx *ctx, const xdi_finish *f, xd_result before);
/* parallel_reduce.c: the sums of all kinds; and every weight of one, over a group, times a factor. */
XD_PRIVATE xd_result xdi_finish_traits(const xdi_finish *f);
XD_PRIVATE xd_result xdi_finish_each(xd_comm *tp, const xdi_finish *f, xdi_finish_kind kind, float factor);

/* parallel.c: closes all blocks and forgets leaves, sums and gathered values of the step, on all data ranks alike, so that it
 * begins again. */
XD_PRIVATE void xdi_parallel_drop_step(xd_parallel *p);

/* parallel.c: an entry of xd_parallel_params, of any weight that is no tie. */
XD_PRIVATE xd_param xdi_parallel_param(const xd_parallel *p, const xd_weight *w);

/* parallel.c: an entry of xd_parallel_parts, of any weight that is no tie. */
XD_PRIVATE xd_tensor_part xdi_parallel_part(const xd_parallel *p, const xd_weight *w);

/* parallel.c: whether another rank of the wrapper, or of the cut by tensor parallelism, speaks for what is here of a weight. */
XD_PRIVATE bool xdi_parallel_is_elsewhere(const xd_parallel *p, const xd_weight *w);
/* parallel.c: whether a rank of a lower number in the weight's layout holds the same elements. */
XD_PRIVATE bool xdi_weight_is_copy(const xd_weight *w);
/* model_storage.c: elements of this rank's region that the whole weight has: rows that are stored beyond its shape come last. */
XD_PRIVATE int64_t xdi_weight_true_count(const xd_weight *w);

/* Memory of a wrapper that is measured or given out: of the device, and of the host where parts are offloaded. */
typedef struct xdi_room {
    xd_arena device, home;
    size_t values; /* bytes at the begin of what is kept: this rank's parts of values */
} xdi_room;

/* parallel_flat.c: plans of the flat buffers; what all memory takes, by purpose in p->bytes; the memory, and the values in it. */
XD_PRIVATE xd_result xdi_parallel_plan(xd_parallel *p);
XD_PRIVATE xd_result xdi_parallel_measure(xd_parallel *p, xdi_room *room);
XD_PRIVATE xd_result xdi_parallel_take_memory(xd_parallel *p);
XD_PRIVATE xd_result xdi_parallel_take_values(xd_parallel *p);
/* parallel_flat.c: releases the model's own storage, once all values have been taken, where the wrapper has them instead. */
XD_PRIVATE void xdi_parallel_leave_storage(xd_parallel *p);
/* parallel_flat.c: what this rank has of a weight: a range of its region, and where that lies in the kept values and sums.
 * False when that is nothing. */
XD_PRIVATE bool xdi_flat_piece(const xd_parallel *p, const xd_weight *weight, xd_bucket_piece *out);
/* parallel_flat.c: the address of a weight's kept values from element `at` of its region on. */
XD_PRIVATE void *xdi_flat_value(const xd_weight *weight, const xd_bucket_piece *piece);
/* parallel_flat.c: the place of a weight in the kept values of its buffer. */
XD_PRIVATE void *xdi_flat_place(const xd_weight *weight);
/* parallel_flat.c: after kept values have changed: where ranks step parts of weights that all keep, every rank's part to all; and
 * what blocks show is made from them again. */
XD_PRIVATE xd_result xdi_parallel_renew_values(xd_parallel *p);

/* parallel_order.c: a bracket is added to what ranks compare at the end of a step; and, when that differs, the error that names the
 * first two that do. Collective. */
XD_PRIVATE void xdi_order_add(xd_parallel *p, const xd_block *block, xd_pass pass, bool skipped);
XD_PRIVATE xd_result xdi_order_explain(const xd_parallel *p, xd_comm *comm);

/* parallel_home.c: whether this rank's parts may be kept there. */
XD_PRIVATE xd_result xdi_parallel_check_home(const xd_parallel *p);
/* parallel_home.c: whether open units and their gradients have memory of their own: there are parts of other ranks, or the own one
 * is not there where blocks show it. */
XD_PRIVATE bool xdi_parallel_assembles(const xd_parallel *p);
/* parallel_home.c: copies between memory of the model's context and this rank's parts. What comes home is there on return. */
XD_PRIVATE xd_result xdi_parallel_bring_home(const xd_parallel *p, void *to, const void *from, size_t bytes);
XD_PRIVATE xd_result xdi_parallel_take_out(const xd_parallel *p, void *to, const void *from, size_t bytes);
/* parallel_home.c: waits until no copy reads parts that are kept on the host. */
XD_PRIVATE xd_result xdi_parallel_let_go(const xd_parallel *p);

/* parallel_values.c: which slots each unit may use; in lists that are allocated. */
XD_PRIVATE void xdi_parallel_deal_slots(xd_parallel *p);
/* parallel_values.c: whether a few ranks keep gathered units together. */
XD_PRIVATE bool xdi_parallel_has_near(const xd_parallel *p);
/* parallel_flight.c: runs a record on a queue, or at once where that is NULL; and waits for it. */
XD_PRIVATE xd_result xdi_flight_start(xd_queue *queue, xd_comm *comm, const xd_collective *record,
                                      xdi_flight *flight);
XD_PRIVATE xd_result xdi_flight_land(xd_queue *queue, xdi_flight *flight);
/* parallel_flight.c: waits for everything that is under way, whatever comes of it. */
XD_PRIVATE void xdi_parallel_land(xd_parallel *p);
/* parallel_flight.c: waits for values that ranks have stepped in parts. */
XD_PRIVATE xd_result xdi_parallel_land_values(xd_parallel *p);
/* parallel_flight.c: whether the caller's queues are over the data ranks and have room for all that is under way at once. */
XD_PRIVATE xd_result xdi_parallel_check_queues(const xd_parallel *p);

/* parallel_values.c: a bracket of a unit begins: its values are gathered, unless they still are from before, and those of the next
 * units are started. */
XD_PRIVATE xd_result xdi_unit_open(xd_parallel *p, struct xdi_unit *unit, bool backward);
/* parallel.c: the leaves of a step that failed before its end are as if they had not been; not while a block is open, or a
 * queue has begun a sum of them. Local. */
XD_PRIVATE void xdi_parallel_drop_leaves(xd_parallel *p);

/* parallel_values.c: drops the units that were gathered ahead and not opened. */
XD_PRIVATE void xdi_parallel_drop_ahead(xd_parallel *p);
/* parallel_values.c: where a weight's values are while its unit is open. */
XD_PRIVATE void *xdi_weight_shown(const xd_parallel *p, const xd_weight *owner);
/* parallel_values.c: after kept values have changed: no unit is gathered; other types of what is kept are made again. */
XD_PRIVATE void xdi_parallel_forget_values(xd_parallel *p);
XD_PRIVATE xd_result xdi_parallel_convert_values(xd_parallel *p);

/* parallel_replicas.c: MISMATCH, with the weight, where ranks that should hold the same values do not; counts the steps, and compares
 * in some of them. Collective. */
XD_PRIVATE xd_result xdi_replicas_check(xd_parallel *p);

/* parallel_state.c: what the gradients of the wrapper's weights are worth: once a leaf has ended, once all are summed, and when a
 * step ends. The second is collective where `skipped`: some rank has a weight whose blocks were skipped in all of its leaves. */
XD_PRIVATE void xdi_state_wait(xd_parallel *p);
XD_PRIVATE bool xdi_state_skips(const xd_parallel *p);
XD_PRIVATE xd_result xdi_state_sum(xd_parallel *p, bool skipped);
XD_PRIVATE void xdi_state_reset(xd_parallel *p);
/* parallel_state.c: a backward opens a block; or its weights are in a leaf of the caller's. */
XD_PRIVATE void xdi_state_use(const xd_block *block);

/* parallel_flat.c: the bucket with the place of a weight's owner; NULL when it has no gradient and never will. And the one that
 * takes its gradient now; NULL when it does not train. */
XD_PRIVATE xdi_bucket *xdi_flat_bucket(const xd_weight *owner);
XD_PRIVATE xdi_bucket *xdi_gradient_bucket(const xd_weight *owner);
/* parallel_flat.c: how many blocks add to each bucket, from the weights that train now. */
XD_PRIVATE void xdi_parallel_count_blocks(xd_parallel *p);
/* parallel_flat.c: the bucket of a block's weight number i, each bucket once in a round, which begins at i = 0; NULL -> none, or
 * met already. */
XD_PRIVATE xdi_bucket *xdi_block_bucket(xd_parallel *p, const xd_block *block, int64_t i);

/* parallel_flat.c: the leaves that wait on a bucket's stack: those of a rank, or, where leaves are dealt, parts of sums over the
 * ranks; outside of INVARIANT mode a rank adds its own up first. */
XD_PRIVATE xd_leaves xdi_bucket_leaves(const xd_parallel *p);

/* parallel_gradient.c: wrappers whose leaves are computed side by side, [count] with NULL for none. Where ranks have different
 * numbers of leaves and some wrapper gathers for those that a rank does not have, or rows come to its experts for them, DDP begins
 * its sums in xd_parallel_reduce: after a rank's own last leaf they would come before that here, and behind it on other ranks.
 * Local. */
XD_PRIVATE void xdi_gradient_align(xd_parallel *const *parallels, int count);
/* parallel_gradient.c: STATE for a block's backward of a leaf while another block has not ended one before, where both add to the
 * same sum and its leaves are kept apart. */
XD_PRIVATE xd_result xdi_gradient_check_leaf(const xd_parallel *p, const xd_block *block, int64_t leaf);
/* parallel_gradient.c: the place where a weight's gradient of a leaf is to be added; and what follows from the end of a
 * block's last backward of a leaf. */
XD_PRIVATE xd_result xdi_gradient_place(xd_parallel *p, const xd_weight *weight, int64_t leaf, void **out);
XD_PRIVATE xd_result xdi_gradient_finish(xd_parallel *p, xd_block *block);
/* parallel_experts.c: whether leaves are sent one by one, or a round of them: they are formed in memory of their unit; and whole
 * gradients that are there at once. */
XD_PRIVATE bool xdi_gradient_is_sent(const xd_parallel *p);
XD_PRIVATE int64_t xdi_gradient_levels(const xd_parallel *p);
/* parallel_experts.c: whether leaves of a bucket are being formed. */
XD_PRIVATE bool xdi_bucket_is_forming(const xd_parallel *p, const xdi_bucket *b);
/* parallel_experts.c: which place takes the gradient of a leaf. */
XD_PRIVATE int xdi_gradient_member(const xd_parallel *p, int64_t leaf);
/* parallel_experts.c: the leaves of a round along the tree over them, at the place of the first. */
XD_PRIVATE xd_result xdi_round_join(xd_parallel *p, const xdi_bucket *b);
/* parallel_gradient.c: the factors that follow from the divisors, once the leaves are dealt. */
XD_PRIVATE xd_result xdi_gradient_set_factors(xd_parallel *p, const xd_gradient_divisors *divide);
/* parallel_gradient.c: adds the caller's gradient of a weight to its place. */
XD_PRIVATE xd_result xdi_gradient_add(const xd_parallel *p, const xd_weight *weight, void *place);
/* parallel_gradient.c: sums what is left; and forgets the leaves of the step. */
XD_PRIVATE xd_result xdi_gradient_reduce(xd_parallel *p);
XD_PRIVATE void xdi_gradient_reset(xd_parallel *p);

/* parallel_gradient.c: a leaf of this rank; false beyond its own. */
XD_PRIVATE bool xdi_parallel_owns(const xd_parallel *p, int64_t leaf);

#endif
