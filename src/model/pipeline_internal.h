#ifndef XDI_MODEL_PIPELINE_INTERNAL_H
#define XDI_MODEL_PIPELINE_INTERNAL_H

#include "base/internal.h"
#include "model/build.h"
#include "model/pipeline.h"

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
    /* the rank before, or behind: this one or that one is idle, and an empty message each way says that both go on */
    bool meets[2];
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

/* pipeline_run.c: bytes of a pipeline on one rank of schedule.ranks; reads no groups and no `built`. */
XD_PRIVATE xd_result xdi_pipeline_bytes(xd_ctx *ctx, const xd_pipeline_run_desc *desc, int rank,
                                        xd_memory_bytes *out);

#endif
