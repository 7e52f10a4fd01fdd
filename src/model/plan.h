#ifndef XDI_MODEL_PLAN_H
#define XDI_MODEL_PLAN_H

#include "model/pipeline.h"
#include "model/recompute.h"
#include "train/ema.h"
#include "train/optimizer.h"

/* What training a model takes, before anything is allocated, and for ranks that need not exist. */

/* How the model is to be wrapped, and what trains it. Zero is the default of every field but one of the first two. */
typedef struct xd_memory_plan_desc {
    const xd_ddp_desc *ddp; /* one of these two; `replicas` and `groups` are not read, `stage` is at least
                             * pipeline_rank with a pipeline */
    const xd_fsdp_desc *fsdp;
    int ranks;  /* data ranks of a group; 0 -> 1 */
    int groups; /* that hold replicas of each other (HSDP, instances of optimizers); 0 -> 1 */
    const xd_optimizer_desc *optimizer; /* its settings; not its list, which is the wrapper's. NULL -> none */
    const xd_ema_desc *averages;        /* [average_count] */
    int average_count;
    const xd_inputs_desc *inputs;         /* of blocks that are recomputed; NULL -> none */
    const xd_pipeline_run_desc *pipeline; /* that the model is a stage of, on rank `pipeline_rank`, with
                                           * schedule.ranks; NULL -> none */
    int pipeline_rank;
    int expert_ranks; /* data ranks of a group that hold the same experts, of a model with some; 0 -> all of them */
} xd_memory_plan_desc;

/* Bytes of one rank. */
typedef struct xd_memory_plan {
    int64_t elements;          /* of weights and buffers in this rank's list: what it steps and averages */
    xd_parallel_bytes wrapper; /* as xd_parallel_memory says once it is wrapped */
    xd_memory_bytes optimizer; /* as xd_optimizer_bytes */
    xd_memory_bytes averages;  /* of all together, as xd_ema_bytes */
    xd_memory_bytes inputs;    /* as xd_inputs_bytes */
    xd_memory_bytes pipeline; /* as xd_pipeline_bytes: activations that wait, once for all stages of a rank */
    /* As xd_queue_bytes, of the queues that the descs of the wrapper and the pipeline name, each once: those of the ranks
     * that are there, whatever `ranks` is. */
    xd_memory_bytes queues;
} xd_memory_plan;

/* Plans one rank.
 *
 *   model   sealed, not wrapped; unchanged afterwards. Storage need not be there
 *   rank    of ranks * groups, numbered group after group
 *
 * Local: no other rank need exist. The reduction mode is the context's. Memory: descriptions, freed again. Errors: as those of
 * xd_ddp_create, xd_fsdp_create (of its groups for experts only `gathers` and `reductions` are read), xd_optimizer_bytes,
 * xd_ema_bytes and xd_pipeline_bytes; ARGUMENT (both kinds of wrapper or none; a rank that there is not), STATE. *out is
 * untouched then. */
XD_API xd_result xd_plan_memory(xd_model *model, const xd_memory_plan_desc *desc, int rank,
                                xd_memory_plan *out);

/* Writes a table with a line for each rank, in KiB, and one with the largest and the sum of all.
 *
 *   report   receives the lines; zero -> the context's logger
 *
 * Local. Errors: as xd_plan_memory; nothing is written then. */
XD_API xd_result xd_plan_print(xd_model *model, const xd_memory_plan_desc *desc, xd_build_report report);

#endif
