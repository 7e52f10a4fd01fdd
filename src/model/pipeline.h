#ifndef XDI_MODEL_PIPELINE_H
#define XDI_MODEL_PIPELINE_H

#include "model/build.h"

/* Pipelines: ranks that hold the layers of a model one after another, and micro-batches that go through them.
 *
 *     xd_build(world, &(xd_build_desc){ .groups = groups, .pipeline = { .layer_count = 16, .virtual_stages = 2 }, ... }, &built);
 *     xd_pipeline_create(groups->pp, &(xd_pipeline_run_desc){ .schedule = { .virtual_stages = 2, .micro_batches = 8 }, .built = built,
 *                                    .ndim = 2, .shape = { tokens, hidden }, .dtype = XD_DTYPE_F32, .value_count = 1 }, &pipeline);
 *     for each step {
 *         xd_pipeline_run(pipeline, &(xd_pipeline_calls){ forward, backward, trainer }, losses);
 *         xd_pipeline_finish(world, &(xd_pipeline_finish_desc){ .groups = groups, .built = built });   // gradients are complete
 *         ... norm and optimizer over the parameters of all stages, then xd_parallel_publish of each ...
 *     }
 *
 * What a stage computes is the caller's: `forward` turns an activation into the next one, `backward` the gradient of its output
 * into that of its input. Micro-batch k is leaf k of the stage's wrapper, so the bits of INVARIANT mode do not depend on
 * where the model is cut. */

/* ---- schedules ---- */

/* Who does what when. Zero is the default of every field but micro_batches.
 *
 * 1F1B, of one virtual stage: rank r of p runs min(p - r - 1, micro_batches) forwards, then a forward and a backward in turn,
 * then the backwards that are left. Interleaved 1F1B, of several: micro-batches go in groups, each through all virtual stages
 * of a rank before the next group begins, backwards through the last one first; 2 (p - r - 1) + (virtual_stages - 1) group
 * forwards come before the first backward. The last group may be shorter, but not than the pipeline. */
typedef struct xd_pipeline_schedule {
    int ranks;             /* p; 0 -> 1 */
    int virtual_stages;    /* v, of each rank; 0 -> 1. One rank has one stage, whatever this says */
    int64_t micro_batches; /* m; required */
    int64_t group;         /* with virtual stages: micro-batches of a group: all, or at least `ranks` of them,
                            * which leave none or at least `ranks` for the last; 0 -> the fewest */
    bool forward_only;     /* inference: there are no backwards */
} xd_pipeline_schedule;

/* Nothing, or one of the two passes over a stage. */
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
 * as soon as what it reads was there at the end of a tick: what the stage before, or behind, has put out, which travels
 * between two ticks. In each stage micro-batches follow each other in order, forwards and backwards alike.
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
 * Errors: ARGUMENT (micro_batches below 1, negative numbers; more than 4096 ranks, XD_STAGES_MAX virtual stages or 2^20
 * micro-batches; a group that may not be, with the numbers; capacity below the entries,
 * with both), MEMORY.
 * Source: Megatron-Core, pipeline_parallel/schedules.py; groups that Megatron-Core refuses are refused. */
XD_API xd_result xd_pipeline_table(xd_ctx *ctx, const xd_pipeline_schedule *schedule, int64_t capacity,
                                   xd_pipeline_work *table, int64_t *ticks);

/* What a schedule asks of one rank. */
typedef struct xd_pipeline_counts {
    int64_t ticks;           /* of all ranks alike */
    int64_t work, idle;      /* ticks of this rank */
    int64_t sends, receives; /* its messages, each an activation or the gradient of one */
    int64_t forwards;        /* in flight at most: run, and their backwards not. Of 1F1B min(p - r, m),
                              * interleaved min(2 (p - r - 1) + (v - 1) group + 1, v m) */
    int64_t inputs;    /* activations from other ranks that are kept at once, at most: until their backward
                        * has been run */
    int64_t gradients; /* of outputs, likewise */
} xd_pipeline_counts;

/* Counts for one rank, by the table. Local, as above. Errors: as xd_pipeline_table; ARGUMENT for a rank that there is not. */
XD_API xd_result xd_pipeline_measure(xd_ctx *ctx, const xd_pipeline_schedule *schedule, int rank,
                                     xd_pipeline_counts *out);

/* ---- running one ---- */

/* What a pipeline runs. Zero is the default of every field but schedule.micro_batches and, with several ranks, dtype. */
typedef struct xd_pipeline_run_desc {
    xd_pipeline_schedule schedule; /* ranks 0 -> those of the group. forward_only: no memory for
                                    * backwards, which are then refused */
    int ndim;                      /* of an activation, the same between all stages; 0 -> one element */
    int64_t shape[XD_DIMS_MAX];    /* 0 from ndim on */
    xd_dtype dtype;                /* in which activations are sent; any */
    xd_dtype gradient_dtype;       /* and their gradients; NONE -> dtype */
    int64_t value_count; /* numbers that the last stage reports of a micro-batch, at most 2^20: losses, counts
                          * of tokens */
    const xd_built *built; /* this rank's stages, handed to the callbacks; must outlive the pipeline. NULL
                            * -> plain numbers */
    /* The other ranks that hold these stages, as the same handle that their wrappers have; NULL -> none. `gathers`: calls of
     * `forward` and `backward` are collective over it, each of them, as brackets under FSDP are; schedules are then the same
     * on all of it. */
    xd_comm *data;
    bool gathers;
    xd_comm *world; /* every rank that fails when one does, beyond the pipeline and `data`; NULL -> these
                     * alone */
    /* A queue over the ranks of the pipeline, with room for two records, which outlives it: messages travel beside the next
     * call where it has a thread, a rank waits for them before the first call that reads one, and there is memory for one
     * activation and one gradient more. Bits and the order of calls are the same. On all ranks or none. NULL -> a rank waits
     * for its messages after every tick */
    xd_queue *sends;
} xd_pipeline_run_desc;

/* A pipeline that can run: memory for its activations, and the order of this rank's work. */
typedef struct xd_pipeline xd_pipeline;

/* Takes memory for the activations that wait here and compares settings over the ranks.
 *
 *   pipeline   the ranks in the order of their stages; must outlive the pipeline
 *   desc       read during the call only, but for what it says must live longer
 *
 * Collective over `pipeline`, desc->data and desc->world. Memory: as xd_pipeline_bytes; no run takes more.
 * Errors: those of xd_pipeline_table; ARGUMENT (ranks of the schedule that are not those of the group; dimensions;
 * value_count; stages of `built` that are not the schedule's, with both numbers; `gathers` without data; `sends`
 * over other ranks, or with less room than two records), DTYPE, SHAPE (sizes that overflow), MISMATCH (ranks with another
 * shape, dtype, schedule or number of values, with both numbers; or with `sends` where others have none), MEMORY. All ranks
 * alike. */
XD_API xd_result xd_pipeline_create(xd_comm *pipeline, const xd_pipeline_run_desc *desc, xd_pipeline **out);

/* What xd_pipeline_create takes on one rank of schedule.ranks: (inputs + 1) activations and (gradients + 1) gradients of
 * xd_pipeline_counts, one more of each with `sends`, the order of work, the values. Local; `built` and groups are not read,
 * of `sends` whether there is one. Errors: as above. */
XD_API xd_result xd_pipeline_bytes(xd_ctx *ctx, const xd_pipeline_run_desc *desc, int rank,
                                   xd_memory_bytes *out);

/* Frees it. Local. NULL is fine. */
XD_API void xd_pipeline_destroy(xd_pipeline *pipeline);

/* One piece of work. Arrays are dense, [shape], in memory of the context's device; without elements they are NULL everywhere,
 * so ask stage.place which stage this is. */
typedef struct xd_pipeline_call {
    xd_stage stage; /* its place, and of desc.built its model and wrapper; without, places have no layers */
    xd_pass_kind pass;   /* FORWARD, BACKWARD or INFERENCE */
    int64_t micro_batch; /* ascending for each stage; the leaf of xd_pass */
    int64_t slot;      /* below xd_pipeline_counts.forwards: where the caller keeps what a backward reads; no
                        * other forward in flight on this rank has the same, whatever its stage */
    const void *input; /* until the backward has returned, which is given it again. NULL on the first stage */
    void *output;      /* FORWARD, INFERENCE: to be written. NULL on the last stage */
    const void *output_gradient; /* BACKWARD; NULL on the last stage, whose loss is the caller's */
    void *input_gradient;        /* BACKWARD: to be written, all of it. NULL on the first stage */
    double *values; /* [value_count] of the host, on the last stage: zero at first, to be written in either
                     * pass. NULL elsewhere */
} xd_pipeline_call;

/* The caller's part. Any result but XD_OK ends the run on all ranks. `backward` NULL: inference, nothing is kept.
 *
 * Under a wrapper a call opens and closes the blocks of its stage (xd_block_begin with micro_batch as leaf). Under FSDP a rank
 * that has fewer leaves of its own than micro-batches opens and closes them too, computes nothing and leaves the output as it is.
 * Units are gathered again for every micro-batch; xd_fsdp_desc.reshard_ranks = 1 keeps them, torchtitan's default under
 * pipelines. */
typedef struct xd_pipeline_calls {
    xd_result (*forward)(void *user, const xd_pipeline_call *call);
    xd_result (*backward)(void *user, const xd_pipeline_call *call);
    void *user;
} xd_pipeline_calls;

/* Runs all micro-batches through all stages, by the schedule.
 *
 *   calls    read during the call only
 *   values   [micro_batches * value_count] of the host: those of the last stage, the same on every rank of the pipeline; may be
 *            NULL
 *
 * Collective over the pipeline, and over data and world, which agree at the end. What neighbours send each other in a tick is one
 * xd_exchange on each side, which no order can dead-lock, with empty messages where a rank idles: each lasts no longer than
 * timeout_seconds, which is to be more than one call takes. Allocates nothing but, once, what a queue's thread needs. Bits do
 * not depend on the schedule.
 *
 * A call that fails ends the computing of all ranks: they go through the rest of the schedule without data and return that rank's
 * error, with its number. The step is dropped in the wrappers of `built`, with blocks that calls have left open, and may
 * begin again. With `gathers` the data ranks agree after every call, so that none waits inside of one for a rank that has
 * failed; not so when wrappers gather or sum on queues with threads: then it is found at the deadline. A call that fails amid
 * exchanges of its own over other groups agrees with these first (xd_agree).
 *
 * Errors: ARGUMENT (no `forward`), STATE (backwards of a pipeline that is forward_only), MISMATCH (some ranks have backwards,
 * others not), what a call returned, PEER naming the rank on the others, those of xd_exchange, which break the world: TIMEOUT
 * naming a rank that does not come. values are untouched then. */
XD_API xd_result xd_pipeline_run(xd_pipeline *pipeline, const xd_pipeline_calls *calls, double *values);

/* ---- after a run ---- */

/* What makes the gradients of a step complete. */
typedef struct xd_pipeline_finish_desc {
    const xd_groups *groups; /* required; of these pp, tp, embedding and dp_cp, or dp where that is NULL */
    const xd_built *built;   /* required; every stage wrapped */
    bool per_token;          /* gradients are those of a sum over tokens, to be divided by their number in the
                              * whole step, at least 1 */
    int64_t tokens; /* with per_token: those that this rank's last stage has counted; not read where it is
                     * not */
} xd_pipeline_finish_desc;

/* Instead of xd_parallel_reduce of each stage, in Megatron's order:
 *
 *     1 what xd_parallel_reduce sums over data ranks, of every stage in order for which it was not called
 *     2 weights with the trait pipeline_parallel, of which every stage has the same in the same order: summed over all stages
 *     3 sequence_parallel, and averaged_over_tensor_parallel: summed, or averaged, over tp
 *     4 the weight with shared_embedding of the first stage and that of the last, or two of one stage: each gets the sum
 *     5 per_token: everything divided by the tokens, of the last stages, summed over the data ranks
 *
 * Of a stage that xd_parallel_reduce was called for, 2 to 4 are not repeated: that call has made these sums.
 *
 * The weight of 4 is one that two stages hold a copy of, under two names: described with the same init, from which both get the
 * same values, in the last stage with the trait `shared` too, so that norms count it once. Whoever writes values writes both.
 * It is the same sum of two, and so has the same bits, wherever the model is cut, also when one stage has both copies; a tie
 * inside of one model (xd_weight_desc.tied_to) adds in another order. Both stages must hold equal parts: under FSDP give each
 * copy a block of its own that is a unit; DDP sees to it. Sums of 2 depend, as roundings do, on where the model is cut.
 *
 * Collective over world, which has all ranks of these groups. Memory: none. Deterministic.
 * Errors, all ranks alike: ARGUMENT (groups or built missing; tokens negative), STATE (a stage without a wrapper, or with a
 * step that was finished already), UNSUPPORTED (xd_fsdp_desc.host of some of a rank's stages and not of others): nothing
 * has changed then. MISMATCH (stages or ranks that differ in the number of such weights or their elements, with both
 * numbers), UNSUPPORTED (parts of the two copies that are not equal, with both numbers), those of xd_parallel_reduce: the
 * step is dropped then, as by xd_pipeline_run. */
XD_API xd_result xd_pipeline_finish(xd_comm *world, const xd_pipeline_finish_desc *desc);

#endif
