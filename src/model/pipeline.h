#ifndef XDI_MODEL_PIPELINE_H
#define XDI_MODEL_PIPELINE_H

#include "model/build.h"

/* Pipelines: ranks hold the layers of a model one after another (docs/pipelines.md). The caller computes the stages.
 * Micro-batch k is also that of a stage's wrapper, so INVARIANT bits do not depend on where the model is cut. */

/* ---- schedules ---- */

/* The schedule of a pipeline: 1F1B with one virtual stage, interleaved 1F1B with more (docs/pipelines.md). */
typedef struct xd_pipeline_schedule {
    int ranks;             /* p; 0 -> 1 */
    int virtual_stages;    /* v, a rank; 0 -> 1. One rank has one stage, whatever this is */
    int64_t micro_batches; /* m; required */
    /* with virtual stages: micro-batches of a group. All m, or at least p; the last group then has at least p. 0 -> the
     * fewest */
    int64_t group;
    bool forward_only; /* inference: no backwards */
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

/* Computes the whole schedule. A tick is the time of a forward or backward of a stage; messages travel between ticks.
 *
 *   table    [ticks * ranks], tick after tick; NULL with capacity 0 to count
 *   ticks    untouched on failure
 *
 * Pure and local. Errors: ARGUMENT (numbers below 0; micro_batches below 1 or above 2^20; above 4096 ranks or XD_STAGES_MAX
 * virtual stages; an illegal group; capacity), MEMORY.
 * Source: Megatron-Core, pipeline_parallel/schedules.py, with the groups that it refuses. */
XD_API xd_result xd_pipeline_table(xd_ctx *ctx, const xd_pipeline_schedule *schedule, int64_t capacity,
                                   xd_pipeline_work *table, int64_t *ticks);

/* The counts of a schedule on one rank. */
typedef struct xd_pipeline_counts {
    int64_t ticks;           /* the same on all ranks */
    int64_t work, idle;      /* ticks of this rank */
    int64_t sends, receives; /* of activations and gradients */
    /* most in flight. 1F1B: min(p - r, m). Interleaved: min(2 (p - r - 1) + (v - 1) group + 1, v m) */
    int64_t forwards;
    int64_t inputs;    /* most activations from other ranks, each kept until its backward has run */
    int64_t gradients; /* most gradients of outputs, kept the same way */
} xd_pipeline_counts;

/* Counts the schedule of one rank. Local. Errors: as xd_pipeline_table; ARGUMENT (no such rank). */
XD_API xd_result xd_pipeline_measure(xd_ctx *ctx, const xd_pipeline_schedule *schedule, int rank,
                                     xd_pipeline_counts *out);

/* ---- running one ---- */

/* Settings of a pipeline. Required: schedule.micro_batches, and dtype with several ranks. */
typedef struct xd_pipeline_run_desc {
    xd_pipeline_schedule schedule; /* ranks 0 -> the group's. forward_only: backwards are refused */
    int ndim;                      /* of an activation; 0 -> one element */
    int64_t shape[XD_DIMS_MAX];    /* 0 from ndim on */
    xd_dtype dtype;                /* of activations that are sent; any */
    xd_dtype gradient_dtype;       /* of their gradients; NONE -> dtype */
    int64_t value_count;           /* numbers of a micro-batch that the last stage returns; at most 2^20 */
    const xd_built *built;         /* this rank's stages; must outlive the pipeline. NULL -> places only */
    /* The data ranks, the handle of the wrappers; NULL -> none. `gathers`: every call is collective over them, as under
     * FSDP. */
    xd_comm *data;
    bool gathers;
    xd_comm *world; /* ranks that fail together, besides the pipeline and `data`; NULL -> none */
    /* A queue over the pipeline's ranks with room for two records, on all ranks or none; must outlive the pipeline. A WORKER
     * sends beside the next call. NULL -> a rank waits for messages after every tick */
    xd_queue *sends;
} xd_pipeline_run_desc;

/* A pipeline: memory for activations, and the order of this rank's work. */
typedef struct xd_pipeline xd_pipeline;

/* Creates a pipeline. Collective over `pipeline`, desc->data and desc->world.
 *
 *   pipeline   the ranks in the order of their stages; must outlive the result
 *   desc       read during the call only, except what must live longer
 *
 * Allocates here, runs allocate nothing. A plan of another rank (xd_plan_begin) reads no groups and no `built`.
 * Errors: as xd_pipeline_table; ARGUMENT (ranks; dimensions; value_count; stages; `gathers` without data; `sends`), DTYPE,
 * SHAPE (sizes overflow), MISMATCH (ranks differ), MEMORY. */
XD_API xd_result xd_pipeline_create(xd_comm *pipeline, const xd_pipeline_run_desc *desc, xd_pipeline **out);

/* Frees the pipeline; NULL is legal. Local. */
XD_API void xd_pipeline_destroy(xd_pipeline *pipeline);

/* A forward or backward of a stage. Arrays are dense, [shape], on the context's device; NULL without elements. */
typedef struct xd_pipeline_call {
    xd_stage stage;      /* model and wrapper of desc.built, if any */
    xd_pass_kind pass;   /* FORWARD, BACKWARD or INFERENCE */
    int64_t micro_batch; /* ascending a stage; also that of xd_pass */
    /* below xd_pipeline_counts.forwards, unique among forwards in flight: where the caller keeps what the backward
     * reads */
    int64_t slot;
    /* valid until its backward returns, which gets it again. NULL on the first stage */
    const void *input;
    void *output;                /* FORWARD, INFERENCE: to write. NULL on the last stage */
    const void *output_gradient; /* BACKWARD. NULL on the last stage */
    void *input_gradient;        /* BACKWARD: to write, all of it. NULL on the first stage */
    /* [value_count] on the host, zero at first, to write in either pass. NULL except on the last stage */
    double *values;
} xd_pipeline_call;

/* The caller's passes. Any result but XD_OK ends the run on all ranks. `backward` NULL: inference.
 *
 * Under a wrapper a call opens and closes its stage's blocks, for `micro_batch`; under FSDP for all. Beyond its own a
 * rank computes nothing. */
typedef struct xd_pipeline_calls {
    xd_result (*forward)(void *user, const xd_pipeline_call *call);
    xd_result (*backward)(void *user, const xd_pipeline_call *call);
    void *user;
} xd_pipeline_calls;

/* Runs all micro-batches through all stages. Collective over the pipeline, data and world.
 *
 *   calls    read during the call only
 *   values   [micro_batches * value_count] on the host: the last stage's, on every rank of the pipeline; may be NULL.
 *            Untouched on failure
 *
 * Each exchange lasts at most timeout_seconds, which must exceed the time of a call. Allocates nothing, except once for a
 * queue's thread. Bits do not depend on the schedule. If a call fails, all ranks drop the step.
 * Errors: ARGUMENT (no `forward`), STATE (backwards with forward_only), MISMATCH (some ranks without backwards), that of a
 * call, PEER with its rank on the others, those of xd_exchange, which break the group: TIMEOUT. */
XD_API xd_result xd_pipeline_run(xd_pipeline *pipeline, const xd_pipeline_calls *calls, double *values);

/* ---- after a run ---- */

/* Settings of xd_pipeline_finish. */
typedef struct xd_pipeline_finish_desc {
    const xd_groups *groups; /* required: pp, tp, embedding and dp_cp, or dp if that is NULL */
    const xd_built *built;   /* required; every stage wrapped */
    bool per_token;          /* divides by the tokens of the step, at least 1 */
    int64_t tokens;          /* with per_token: counted by this rank's last stage; not read on other ranks */
} xd_pipeline_finish_desc;

/* Completes the gradients of all stages, in Megatron's order, instead of xd_parallel_reduce on each (whose sums are not
 * repeated):
 *
 *     1 over data ranks
 *     2 pipeline_parallel: over all stages
 *     3 sequence_parallel: over tp; averaged_over_tensor_parallel: the mean
 *     4 shared_embedding: first and last stage get the sum
 *     5 per_token: divided by the tokens
 *
 * Collective over world, which has all these ranks. Allocates nothing.
 * Errors change nothing: ARGUMENT (groups, built or tokens), STATE (a stage unwrapped or finished), UNSUPPORTED (`host` on
 * some stages). Errors drop the step: MISMATCH (such weights differ), UNSUPPORTED (copies in unequal parts), those of
 * xd_parallel_reduce. */
XD_API xd_result xd_pipeline_finish(xd_comm *world, const xd_pipeline_finish_desc *desc);

#endif
