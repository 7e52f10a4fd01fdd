#ifndef XDI_DISTILL_TEACHER_ROUTE_INTERNAL_H
#define XDI_DISTILL_TEACHER_ROUTE_INTERNAL_H

#include "distill/internal.h"
#include "distill/teacher_route.h"

enum { XDI_ROUTE_TEACHER, XDI_ROUTE_STUDENT, XDI_ROUTE_SIDES };

/* One side of one rank, as every rank knows it. */
typedef struct xdi_route_half {
    int64_t sample_count, micro_batch, span_count, column_begin, column_end;
    const int64_t *samples;     /* [sample_count] */
    const xd_route_span *spans; /* [span_count] */
    int64_t held;               /* positions */
    int64_t batches;            /* micro-batches of a step */
    int layout;                 /* teacher: the lowest rank with the same positions and columns */
    int64_t *place;             /* teacher: [samples of the step] where each is in `samples`, or -1 */
} xdi_route_half;

/* A rectangle that goes from a teacher's slot into a student's window. */
typedef struct xdi_route_piece {
    int teacher, student;
    bool brings_ids;                /* the first piece of its sample */
    int64_t batch;                  /* teacher's micro-batch */
    int64_t from_sample, to_sample; /* in the micro-batches */
    int64_t from_position, to_position, positions;
    int64_t from_column, to_column, columns;
} xdi_route_piece;

/* Who gives what to whom in a step; pure. Tables by rank and step have takes + 1 entries a rank. */
typedef struct xdi_route_plan {
    int ranks, rank;
    int64_t takes;                           /* students' steps */
    xdi_route_half *halves[XDI_ROUTE_SIDES]; /* [ranks] each */
    int64_t *words;                          /* what they point to */
    int64_t *places;
    int64_t *need;           /* micro-batches a teacher has posted when students take step i */
    int64_t *first;          /* a teacher's first micro-batch that students need in steps i and later */
    int64_t *still;          /* the same for this rank's windows alone */
    int64_t *step_begin;     /* [takes + 1] in pieces */
    xdi_route_piece *pieces; /* that this rank sends or takes: by step, student, sample */
    int64_t piece_count;
    int *sources, *last_sources, *counts; /* [ranks] scratch */
} xdi_route_plan;

/* teacher_route_plan.c: gathers the sides of all ranks, checks them and makes the plan. d has its defaults.
 * Collective over comm; on failure the plan is half-built and to be freed as well. */
XD_PRIVATE xd_result xdi_route_plan_create(xd_comm *comm, const xd_route_desc *d, xdi_route_plan *plan);
XD_PRIVATE void xdi_route_plan_free(xd_ctx *ctx, xdi_route_plan *plan);
/* Slots that a teacher rank needs when students step together. */
XD_PRIVATE int64_t xdi_route_plan_slots(const xdi_route_plan *plan);
/* The teacher's slot a window of this rank lies in as it is, by its first piece; NULL when it does not. */
XD_PRIVATE const xdi_route_piece *xdi_route_plan_view(const xdi_route_plan *plan, int64_t step);
/* Samples of a half's micro-batch; 0 past the end. */
XD_PRIVATE int64_t xdi_route_plan_samples(const xdi_route_half *half, int64_t batch);

#endif
