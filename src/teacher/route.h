#ifndef XDI_TEACHER_ROUTE_H
#define XDI_TEACHER_ROUTE_H

#include "comm/collective.h"
#include "kernel/types.h"

/* Moves a teacher's micro-batches to a student with another split: docs/routes.md. Teacher ranks call xd_route_send,
 * or xd_route_slot and xd_route_post. Student ranks call xd_route_take and xd_route_release. A rank on both sides first
 * posts what xd_route_info.due counts. On a GPU rows are device memory, ids host memory. */
typedef struct xd_route xd_route;

/* Contents of a row; COLUMNS adds ids for each sample. */
typedef enum xd_route_payload {
    XD_ROUTE_LOGITS = 0, /* V_t logits */
    XD_ROUTE_COLUMNS,    /* of k columns: xd_vocab_topk_columns */
    XD_ROUTE_HIDDEN      /* H hidden states */
} xd_route_payload;

/* Positions [begin, end) of a sample. */
typedef struct xd_route_span {
    int64_t begin, end;
} xd_route_span;

/* What one rank computes (teacher) or needs (student) in a step. Teacher ranks of the same positions and columns
 * are replicas. */
typedef struct xd_route_side {
    int64_t sample_count;   /* 0 -> not on this side */
    int64_t sample_begin;   /* the first of consecutive ones */
    const int64_t *samples; /* [sample_count] in the order of micro-batches; NULL -> from sample_begin on */
    int64_t micro_batch;    /* samples of one; the last may have fewer; 0 -> all */
    const xd_route_span *positions; /* [span_count] ascending, disjoint; NULL -> all */
    int span_count;
    int64_t column_begin, column_end; /* both 0 -> all; equal and above 0: none */
} xd_route_side;

/* The same on every rank except sides and `dtype`. */
typedef struct xd_route_desc {
    xd_route_payload payload;
    int64_t samples; /* required; of a step, numbered from 0 */
    int64_t length;  /* required; positions of a sample */
    int64_t columns; /* required; V_t, k or H */
    xd_dtype wire;   /* of slots, F32 or BF16; NONE -> F32 */
    xd_dtype dtype;  /* of this rank's windows; NONE -> wire */
    /* micro-batches in a teacher rank's ring; 0 -> one more than students need at once */
    int slots;
    bool messages; /* never shared memory */
    xd_route_side teacher, student;
} xd_route_desc;

/* Row b * held + i is position i of sample b; held: positions of this side. */
typedef struct xd_route_window {
    xd_rows rows;         /* read only, until xd_route_release */
    const int64_t *ids;   /* COLUMNS: [sample_count, columns] on the host; else NULL */
    int64_t sample_count; /* 0: only other ranks have micro-batches left */
    bool is_view;         /* rows are in a slot: no copy */
} xd_route_window;

/* A route on one rank. */
typedef struct xd_route_info {
    int64_t posts; /* micro-batches of this rank in a step */
    int64_t takes; /* windows of this rank in a step */
    int64_t due;   /* posts of this rank that its next take waits for */
    int64_t views; /* takes without a copy */
    int slots;
    int needed;   /* slots that students need at once */
    bool shared;  /* shared memory; else messages */
    size_t bytes; /* of rings (of all ranks, if shared), windows, messages */
} xd_route_info;

/* Creates a route. Collective over comm, ranks without a side included. All contexts are on CPUs, or all on GPUs.
 * Takes xd_route_info.bytes, and a few words for each rank and sample.
 * Errors: ARGUMENT (side, size, no student, no teacher, slots), SHAPE (shards overlap in part, or do not cover a
 * window), DTYPE, MISMATCH, MEMORY, DEVICE, PEER. */
XD_API xd_result xd_route_create(xd_comm *comm, const xd_route_desc *desc, xd_route **out);

/* Destroys the route and its window. Local. Waiting ranks get PEER or TIMEOUT. With shared rings on GPUs it waits for
 * GPUs, at most timeout_seconds. */
XD_API void xd_route_destroy(xd_route *route);

/* Returns properties and progress. Local. */
XD_API xd_route_info xd_route_describe(const xd_route *route);

/* Returns the slot for this rank's next micro-batch, until xd_route_post the same one.
 *
 *   rows   [its samples * held, columns of this side] in the wire's dtype
 *   ids    COLUMNS: [its samples, columns] on the host; otherwise ids may be NULL
 *
 * Waits for students to release it, at most timeout_seconds. On a GPU fill it on the context's stream. Errors: STATE
 * (not a teacher rank; its student side must take first), TIMEOUT and PEER with the rank. */
XD_API xd_result xd_route_slot(xd_route *route, xd_rows *rows, int64_t **ids);

/* Posts the slot, with the work queued on the context's stream. With messages collective on a rank without a student
 * side. Errors: STATE (no slot), DEVICE, those of the communicator. */
XD_API xd_result xd_route_post(xd_route *route);

/* Sends a micro-batch: xd_route_slot, copy of rows (f32 or bf16) and ids, xd_route_post. Both may then change; on a
 * GPU, rows on the context's stream. Further errors, before any wait: SHAPE, DTYPE, ARGUMENT (no ids; on a GPU, host
 * rows or device ids). */
XD_API xd_result xd_route_send(xd_route *route, xd_rows rows, const int64_t *ids);

/* Returns the next window. Waits for posts, at most timeout_seconds. Errors: STATE (not a student rank; a window is
 * taken; posts are due), TIMEOUT and PEER with the rank. */
XD_API xd_result xd_route_take(xd_route *route, xd_route_window *out);

/* Releases the window, after work queued on the context's stream. Local. Errors: STATE (no window), DEVICE. */
XD_API xd_result xd_route_release(xd_route *route);

#endif
