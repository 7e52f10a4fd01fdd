#ifndef XDI_BASE_PLAN_H
#define XDI_BASE_PLAN_H

#include "base/context.h"

/* Measures creates and losses before memory exists: docs/concepts.md. A planned call checks its desc and adds what it would
 * take. It reads no array, reaches no other rank and makes nothing: *out is NULL. Any address stands for an array. Local.
 *
 * Other creates are UNSUPPORTED. Calls that compute, move, load or save are STATE. The message names them. Descriptions,
 * and numbers from them, work. */

/* The planned ranks; they need not exist. */
typedef struct xd_plan_desc {
    int ranks; /* of each halo, crossing and pipeline; 0 -> those of its own group, as this rank */
    int rank;  /* in [0, ranks) */
} xd_plan_desc;

/* What the calls would take. */
typedef struct xd_planned {
    xd_memory_bytes memory; /* of all creates */
    size_t workspace;       /* largest workspace_bytes of a loss or memory_bytes of a leaf stack; device */
    /* payload bytes of a pass of all halos and crossings, as xd_comm_traffic */
    uint64_t forward_sent, backward_sent;
} xd_planned;

/* Opens a plan; desc NULL -> for this rank. It measures losses with a workspace, xd_model_allocate, and creates of
 * optimizers, averages, queues, halos, crossings, pipelines, inputs, leaf stacks, savers, samplers and xd_dmd. Local.
 * Errors: ARGUMENT (ranks, rank), STATE (a plan is open). */
XD_API xd_result xd_plan_begin(xd_ctx *ctx, const xd_plan_desc *desc);

/* Ends the plan; out may be NULL. Failed calls added nothing. Local. Errors: STATE (no plan). */
XD_API xd_result xd_plan_end(xd_ctx *ctx, xd_planned *out);

#endif
