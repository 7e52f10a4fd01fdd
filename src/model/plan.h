#ifndef XDI_MODEL_PLAN_H
#define XDI_MODEL_PLAN_H

#include "model/pipeline.h"
#include "model/recompute.h"
#include "train/ema.h"
#include "train/optimizer.h"

/* Plans of memory, for ranks that need not exist. */

/* One wrapper, and what trains the model. */
typedef struct xd_memory_plan_desc {
    /* `replicas` and `groups` are not read; in a pipeline `stage` counts as at least pipeline_rank */
    const xd_ddp_desc *ddp;
    const xd_fsdp_desc *fsdp;
    int ranks;                          /* data ranks of a group; 0 -> 1 */
    int groups;                         /* of data ranks, with replicas; 0 -> 1 */
    const xd_optimizer_desc *optimizer; /* its list is not read. NULL -> none */
    const xd_ema_desc *averages;        /* [average_count]; their lists are not read */
    int average_count;
    const xd_inputs_desc *inputs;         /* NULL -> none */
    const xd_pipeline_run_desc *pipeline; /* of a stage, with schedule.ranks; NULL -> none */
    int pipeline_rank;
    int expert_ranks; /* data ranks with the same experts; 0 -> all */
} xd_memory_plan_desc;

/* Bytes of one rank. */
typedef struct xd_memory_plan {
    int64_t elements;          /* in this rank's list */
    xd_parallel_bytes wrapper; /* as xd_parallel_memory */
    xd_memory_bytes optimizer;
    xd_memory_bytes averages; /* in sum */
    xd_memory_bytes inputs;
    xd_memory_bytes pipeline; /* once for all stages of a rank */
    xd_memory_bytes queues;   /* each once */
} xd_memory_plan;

/* Plans one rank, in the context's reduction mode. Local; allocates nothing that stays.
 *
 *   model   sealed, not wrapped
 *   rank    in [0, ranks * groups), group after group
 *
 * Errors: as xd_ddp_create, xd_fsdp_create (of experts only queues are read), and plans of optimizers, averages and
 * pipelines; ARGUMENT (both wrappers or none; rank), STATE. */
XD_API xd_result xd_plan_memory(xd_model *model, const xd_memory_plan_desc *desc, int rank,
                                xd_memory_plan *out);

/* Writes a table in KiB: a line a rank, the largest, the sum. Local. Errors write nothing: as xd_plan_memory. */
XD_API xd_result xd_plan_print(xd_model *model, const xd_memory_plan_desc *desc, xd_build_report report);

#endif
