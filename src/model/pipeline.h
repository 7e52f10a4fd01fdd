#ifndef XDI_MODEL_PIPELINE_H
#define XDI_MODEL_PIPELINE_H

#include "model/build.h"

/* Pipelines of stages: docs/pipelines.md. */

/* ---- schedules ---- */

/* A schedule: 1F1B with one virtual stage, interleaved 1F1B with more. */
typedef struct xd_pipeline_schedule {
    int ranks;             /* p; 0 -> 1 */
    int virtual_stages;    /* v, of a rank; 0 -> 1; a single rank has one */
    int64_t micro_batches; /* m; required */
    /* with virtual stages: micro-batches of a group: all m, or at least p, in the last group too. 0 -> the fewest */
    int64_t group;
    bool forward_only; /* no backwards */
} xd_pipeline_schedule;

/* Nothing, or a pass over a stage. */
typedef enum xd_pipeline_work_kind {
    XD_PIPELINE_IDLE = 0,
    XD_PIPELINE_FORWARD,
    XD_PIPELINE_BACKWARD
} xd_pipeline_work_kind;

/* The work of a rank in one tick, on stage virtual_stage * ranks + rank; zeros when idle. */
typedef struct xd_pipeline_work {
    xd_pipeline_work_kind kind;
    int virtual_stage;
    int64_t micro_batch;
} xd_pipeline_work;

/* Computes the whole schedule.
 *
 *   table    [ticks * ranks], tick after tick; NULL with capacity 0 to count
 *
 * Pure and local. Errors: ARGUMENT (below 0; micro_batches below 1 or above 2^20; above 4096 ranks or XD_STAGES_MAX
 * virtual stages; group; capacity), MEMORY.
 * Source: Megatron-Core. */
XD_API xd_result xd_pipeline_table(xd_ctx *ctx, const xd_pipeline_schedule *schedule, int64_t capacity,
                                   xd_pipeline_work *table, int64_t *ticks);

/* Counts of one rank. */
typedef struct xd_pipeline_counts {
    int64_t ticks;           /* the same on all ranks */
    int64_t work, idle;      /* in ticks */
    int64_t sends, receives; /* of activations and gradients */
    int64_t forwards;        /* most forwards in flight */
    int64_t inputs;          /* most activations from other ranks, until their backward has run */
    int64_t gradients;       /* most gradients of outputs */
} xd_pipeline_counts;

/* Counts the schedule of one rank. Local. Errors: as xd_pipeline_table; ARGUMENT (rank). */
XD_API xd_result xd_pipeline_measure(xd_ctx *ctx, const xd_pipeline_schedule *schedule, int rank,
                                     xd_pipeline_counts *out);

/* ---- running one ---- */

/* Settings of a pipeline. Required: schedule.micro_batches, and dtype with several ranks. */
typedef struct xd_pipeline_run_desc {
    xd_pipeline_schedule schedule; /* ranks 0 -> the group's. forward_only: backwards are refused */
    int ndim;                      /* of an activation; 0 -> one element */
    int64_t shape[XD_DIMS_MAX];    /* 0 from ndim on */
    xd_dtype dtype;                /* of activations; any */
    xd_dtype gradient_dtype;       /* of their gradients; NONE -> dtype */
    int64_t value_count;           /* numbers that the last stage returns for a micro-batch; at most 2^20 */
    const xd_built *built;         /* this rank's stages; must outlive the pipeline. NULL -> places only */
    xd_comm *data;                 /* the handle of the wrappers; NULL -> none */
    bool gathers;                  /* every call is collective over `data`, as under FSDP */
    xd_comm *world;                /* more ranks that fail together; NULL -> none */
    /* over the pipeline's ranks with room for two records, on all or none; must outlive the pipeline. NULL -> a rank
     * waits for messages after every tick */
    xd_queue *sends;
} xd_pipeline_run_desc;

/* A pipeline: memory for activations, and the order of this rank's work. */
typedef struct xd_pipeline xd_pipeline;

/* Creates a pipeline. Collective over `pipeline`, desc->data and desc->world.
 *
 *   pipeline   the ranks in the order of their stages
 *
 * Runs allocate nothing.
 * Errors: as xd_pipeline_table; ARGUMENT (ranks; dimensions; value_count; stages; `gathers` without data; `sends`),
 * DTYPE, SHAPE (overflow), MISMATCH (ranks differ), MEMORY. */
XD_API xd_result xd_pipeline_create(xd_comm *pipeline, const xd_pipeline_run_desc *desc, xd_pipeline **out);

/* Frees the pipeline. Local. */
XD_API void xd_pipeline_destroy(xd_pipeline *pipeline);

/* A forward or backward of a stage. Arrays are dense, [shape], on the context's device; NULL without elements. */
typedef struct xd_pipeline_call {
    xd_stage stage;      /* of desc.built, if any */
    xd_pass_kind pass;   /* FORWARD, BACKWARD or INFERENCE */
    int64_t micro_batch; /* ascending a stage; also that of xd_pass */
    /* below xd_pipeline_counts.forwards, unique in flight: a place for what the backward reads */
    int64_t slot;
    const void *input; /* valid until its backward, which gets it again, returns. NULL on the first stage */
    void *output;      /* FORWARD, INFERENCE: to write. NULL on the last stage */
    const void *output_gradient; /* BACKWARD. NULL on the last stage */
    void *input_gradient;        /* BACKWARD: to write, all of it. NULL on the first stage */
    /* [value_count] on the host, zero at first, to write in either pass. NULL before the last stage */
    double *values;
} xd_pipeline_call;

/* The caller's passes. Any result but XD_OK ends the run on all ranks. `backward` NULL: inference. */
typedef struct xd_pipeline_calls {
    xd_result (*forward)(void *user, const xd_pipeline_call *call);
    xd_result (*backward)(void *user, const xd_pipeline_call *call);
    void *user;
} xd_pipeline_calls;

/* Runs all micro-batches through all stages. Collective over the pipeline, data and world.
 *
 *   values   [micro_batches * value_count] on the host: the last stage's, on every rank of the pipeline; may be NULL
 *
 * timeout_seconds must exceed the time of a call. Allocates nothing, except once for a queue's thread. If a call fails,
 * all ranks drop the step.
 * Errors: ARGUMENT (no `forward`), STATE (backwards with forward_only), MISMATCH (some ranks without backwards), that
 * of a call, PEER with its rank on the others, those of xd_exchange, which break the group: TIMEOUT. */
XD_API xd_result xd_pipeline_run(xd_pipeline *pipeline, const xd_pipeline_calls *calls, double *values);

/* ---- after a run ---- */

/* Settings of xd_pipeline_finish. */
typedef struct xd_pipeline_finish_desc {
    const xd_groups *groups; /* required: pp, tp, embedding and dp_cp, or dp if that is NULL */
    const xd_built *built;   /* required; every stage wrapped */
    bool per_token;          /* divides by the tokens of the step, at least 1 */
    int64_t tokens;          /* with per_token: of this rank's last stage; not read on other ranks */
} xd_pipeline_finish_desc;

/* Completes the gradients of all stages instead of xd_parallel_reduce on each. Collective over world, which has the
 * ranks of all these groups. Allocates nothing.
 *
 * Errors change nothing: ARGUMENT (groups, built or tokens), STATE (a stage unwrapped or finished), UNSUPPORTED (`host`
 * on some stages). Errors drop the step: MISMATCH (traits differ), UNSUPPORTED (copies in unequal parts), those of
 * xd_parallel_reduce. */
XD_API xd_result xd_pipeline_finish(xd_comm *world, const xd_pipeline_finish_desc *desc);

#endif
