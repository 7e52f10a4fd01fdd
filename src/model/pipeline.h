#ifndef XDI_MODEL_PIPELINE_H
#define XDI_MODEL_PIPELINE_H

#include "model/build.h"

/* Pipelines: ranks that hold the layers of a model one after another, and micro-batches that go through them. */

/* ---- schedules ---- */

/* Who does what when. Zero is the default of every field but micro_batches.
 *
 * 1F1B, of one virtual stage: rank r of p runs min(p - r - 1, micro_batches) forwards, then a forward and a backward in turn,
 * then the backwards that are left. Interleaved 1F1B, of several: micro-batches go in groups, each through all virtual stages of a rank
 * before the next group begins, backwards through the last one first; 2 (p - r - 1) + (virtual_stages - 1) group forwards come
 * before the first backward. The last group may be shorter, but not than the pipeline. */
typedef struct xd_pipeline_schedule {
    int ranks;             /* p; 0 -> 1 */
    int virtual_stages;    /* v, of each rank; 0 -> 1. More than one needs ranks > 1 */
    int64_t micro_batches; /* m; required */
    int64_t
        group; /* with virtual stages: micro-batches of a group, from `ranks` to all of them, which leave none or at
                        * least `ranks` for the last; 0 -> the fewest, and all where they are fewer than the ranks */
    bool forward_only; /* inference: there are no backwards */
} xd_pipeline_schedule;

typedef enum xd_pipeline_work_kind {
    XD_PIPELINE_IDLE = 0,
    XD_PIPELINE_FORWARD,
    XD_PIPELINE_BACKWARD
} xd_pipeline_work_kind;

/* What a rank does in one tick. Stage number virtual_stage * ranks + rank of the model; zeros when it is idle. */
typedef struct xd_pipeline_work {
    xd_pipeline_work_kind kind;
    int virtual_stage;
    int64_t micro_batch;
} xd_pipeline_work;

/* The whole schedule, in ticks: the time of one forward or one backward of one stage. A rank does the next item of its order
 * as soon as what it reads was there at the end of a tick: what the stage before, or behind, has put out, which travels between two ticks.
 * In each stage micro-batches follow each other in order, forwards and backwards alike.
 *
 * A rank has 2 v m items, v m without backwards. With at least as many micro-batches as ranks the rest of its ticks, the bubble, is
 * 2 (p - 1), or p - 1 without backwards: (p - 1) / m of the work with one virtual stage, (p - 1) / (v m) with more. With fewer
 * of them virtual stages wait for each other, 2 (v - 1) (p - m) ticks more, or half of it.
 *
 *   table    [ticks * ranks], a tick after another; NULL with capacity 0 to count
 *   ticks    out
 *
 * Pure and local: a pipeline of any size is computed on one machine. Memory: some numbers for each stage, freed again. *ticks is
 * untouched on failure.
 * Errors: ARGUMENT (micro_batches below 1, negative numbers; more than 4096 ranks, XD_STAGES_MAX virtual stages or 2^20 micro-batches;
 * virtual stages without a pipeline; a group that may not be, with the numbers; capacity below the entries, with both), MEMORY.
 * Source: Megatron-Core, pipeline_parallel/schedules.py; groups that Megatron-Core refuses are refused. */
XD_API xd_result xd_pipeline_table(xd_ctx *ctx, const xd_pipeline_schedule *schedule, int64_t capacity,
                                   xd_pipeline_work *table, int64_t *ticks);

/* What a schedule asks of one rank. */
typedef struct xd_pipeline_counts {
    int64_t ticks;           /* of all ranks alike */
    int64_t work, idle;      /* ticks of this rank */
    int64_t sends, receives; /* its messages, each an activation or the gradient of one */
    int64_t
        forwards; /* in flight at most: run, and their backwards not. Of 1F1B min(p - r, m), interleaved min(2 (p - r - 1) +
                       * (v - 1) group + 1, v m) */
    int64_t
        inputs; /* activations from other ranks that are kept at once, at most: until their backward has been run */
    int64_t gradients; /* of outputs, likewise */
} xd_pipeline_counts;

/* Counts for one rank, by the table. Local, as above. Errors: as xd_pipeline_table; ARGUMENT for a rank that there is not. */
XD_API xd_result xd_pipeline_measure(xd_ctx *ctx, const xd_pipeline_schedule *schedule, int rank,
                                     xd_pipeline_counts *out);

#endif
