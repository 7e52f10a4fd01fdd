#ifndef XDI_BASE_PLAN_H
#define XDI_BASE_PLAN_H

#include "base/context.h"

/* Measures creates and losses before their memory exists:
 *
 *     xd_plan_begin(ctx, NULL);
 *     xd_optimizer_create(ctx, &adamw, &optimizer);   // optimizer is NULL
 *     xd_loss(ctx, &loss, &values);                   // values is unchanged
 *     xd_plan_end(ctx, &planned);                     // planned.memory, planned.workspace
 *
 * A planned call checks its desc and adds what it would take. It reads no array, reaches no other rank and makes nothing:
 * *out is NULL. It compares pointers with NULL only, so any address stands for an array. Local.
 *
 * Another create is UNSUPPORTED. A call that computes, moves, loads or saves is STATE. The message names it. Descriptions, and
 * numbers computed from them, work as always. */

/* The ranks to plan for, which need not exist. */
typedef struct xd_plan_desc {
    int ranks; /* of each halo, crossing and pipeline; 0 -> those of its own group, as this rank */
    int rank;  /* in [0, ranks) */
} xd_plan_desc;

/* What the calls of a plan would take. */
typedef struct xd_planned {
    xd_memory_bytes memory; /* of all creates together */
    size_t workspace;       /* of the largest loss, for workspace_bytes; on the device */
    /* payload bytes that the rank sends in one pass of all halos and crossings, as xd_comm_traffic counts */
    uint64_t forward_sent, backward_sent;
} xd_planned;

/* Opens a plan of this context; desc NULL -> for this rank. It takes losses with a workspace and creates of optimizers,
 * averages, queues, halos, crossings, pipelines, inputs, leaf stacks, savers, samplers and xd_dmd. It takes xd_model_allocate
 * too. Local. Errors: ARGUMENT (ranks negative; no such rank), STATE (a plan
 * is open). */
XD_API xd_result xd_plan_begin(xd_ctx *ctx, const xd_plan_desc *desc);

/* Ends the plan; out may be NULL. A call that failed has added nothing. Local. Errors: STATE (no plan is open). */
XD_API xd_result xd_plan_end(xd_ctx *ctx, xd_planned *out);

#endif
