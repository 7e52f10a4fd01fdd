#ifndef XDI_TEACHER_ROUTE_H
#define XDI_TEACHER_ROUTE_H

#include "comm/collective.h"
#include "kernel/types.h"

/* Moves one teacher's outputs, micro-batch by micro-batch, to a student with another split: docs/routes.md.
 *
 *   every rank      xd_route_create
 *   teacher ranks   xd_route_send each micro-batch; or xd_route_slot, fill it, xd_route_post
 *   student ranks   xd_route_take each micro-batch, read it, xd_route_release
 *
 * Steps follow each other without further calls. A rank on both sides first sends while xd_route_describe has posts due.
 * Windows have the teacher's bits, rounded to the wire's dtype, for every split and transport. On a GPU rows are device memory,
 * and ids host memory. */
typedef struct xd_route xd_route;

/* The contents of a row; COLUMNS adds ids for each sample. */
typedef enum xd_route_payload {
    XD_ROUTE_LOGITS = 0, /* V_t logits */
    XD_ROUTE_COLUMNS,    /* logits of k columns: xd_vocab_topk_columns */
    XD_ROUTE_HIDDEN      /* H hidden states; the student applies the teacher's head */
} xd_route_payload;

/* Positions [begin, end) of a sample. */
typedef struct xd_route_span {
    int64_t begin, end;
} xd_route_span;

/* What one rank computes (teacher) or needs (student) in a step. Teacher ranks with the same positions and columns are
 * replicas; a student reads one. Ranks that compute a sample with collectives have the same samples and micro-batches. */
typedef struct xd_route_side {
    int64_t sample_count;           /* 0 -> not on this side */
    int64_t sample_begin;           /* this sample and the next ones, ... */
    const int64_t *samples;         /* [sample_count] ... or these, in the order of micro-batches */
    int64_t micro_batch;            /* samples; the last may have fewer; 0 -> all */
    const xd_route_span *positions; /* [span_count] ascending, disjoint; NULL -> all */
    int span_count;
    int64_t column_begin, column_end; /* both 0 -> all; n, n with n > 0: none */
} xd_route_side;

/* The settings of a route, the same on every rank except sides and `dtype`. */
typedef struct xd_route_desc {
    xd_route_payload payload;
    int64_t samples; /* required; of a step, numbered from 0 */
    int64_t length;  /* required; positions of a sample */
    int64_t columns; /* required; V_t, k or H */
    xd_dtype wire;   /* what slots hold, F32 or BF16; NONE -> F32 */
    xd_dtype dtype;  /* what this rank's windows hold; NONE -> wire */
    /* Micro-batches in a teacher rank's ring; 0 -> as many as students need at once, and one. */
    int slots;
    bool messages; /* never share memory */
    xd_route_side teacher, student;
} xd_route_desc;

/* One micro-batch of a student; row b * held + i is position i of sample b. */
typedef struct xd_route_window {
    xd_rows rows;         /* read only, until xd_route_release */
    const int64_t *ids;   /* COLUMNS: [sample_count, columns], on the host; else NULL */
    int64_t sample_count; /* 0: only other ranks have micro-batches left */
    bool is_view;         /* rows are a slot's, without a copy */
} xd_route_window;

/* The route as this rank sees it. */
typedef struct xd_route_info {
    int64_t posts; /* micro-batches this rank posts in a step */
    int64_t takes; /* windows in a step */
    int64_t due;   /* posts that the next take waits for */
    int64_t views; /* windows of a step without a copy */
    int slots;
    int needed;   /* slots without the next micro-batch's */
    bool shared;  /* shared memory; else messages */
    size_t bytes; /* of rings (of all ranks, if shared), windows, messages */
} xd_route_info;

/* Creates a route. Collective over comm, ranks without a side included.
 *
 * comm must outlive the route. All contexts are on CPUs, or all on GPUs. Takes xd_route_info.bytes, and a few words for each
 * rectangle of this rank, and each rank and sample.
 * Errors, *out untouched: ARGUMENT (side, size, no student, no teacher, too few slots), SHAPE (shards overlap in part, or do
 * not cover a window), DTYPE, MISMATCH, MEMORY, DEVICE; PEER on ranks without an error of their own. */
XD_API xd_result xd_route_create(xd_comm *comm, const xd_route_desc *desc, xd_route **out);

/* Destroys the route and its window. Local; NULL is fine. Ranks that wait for this one get PEER, or TIMEOUT where the transport
 * cannot notify them. With shared rings on GPUs waits for GPUs, at most timeout_seconds (docs/routes.md). The first failed wait
 * ends the route on all its ranks, not the communicator. */
XD_API void xd_route_destroy(xd_route *route);

/* Returns properties and progress on this rank. Local. */
XD_API xd_route_info xd_route_describe(const xd_route *route);

/* Returns the slot for this rank's next micro-batch; until the post the same one.
 *
 *   rows   [its samples * held, columns of this side] in the wire's dtype
 *   ids    COLUMNS: [its samples, columns] on the host; otherwise ids may be NULL
 *
 * Waits for students to release it, at most timeout_seconds. On a GPU fill it on the context's stream, which waits for their
 * GPUs. Errors: STATE (not a teacher rank; its student side must take first), TIMEOUT and PEER with the rank. */
XD_API xd_result xd_route_slot(xd_route *route, xd_rows *rows, int64_t **ids);

/* Posts the slot, with the work queued on the context's stream. With messages, on a rank without a student side: collective.
 * Errors: STATE (no xd_route_slot), DEVICE, those of the communicator. */
XD_API xd_result xd_route_post(xd_route *route);

/* Sends a micro-batch: xd_route_slot, copy of rows (f32 or bf16) and ids, xd_route_post. The caller may then change both; on a
 * GPU, rows on the context's stream. Further errors, before any wait: SHAPE, DTYPE, ARGUMENT (no ids; on a GPU, rows in host
 * or ids in device memory). */
XD_API xd_result xd_route_send(xd_route *route, xd_rows rows, const int64_t *ids);

/* Returns the next window. Waits for posts, at most timeout_seconds. Errors, *out untouched: STATE (not a student rank; a
 * window is taken; posts of this rank are due), TIMEOUT and PEER with the rank. */
XD_API xd_result xd_route_take(xd_route *route, xd_route_window *out);

/* Releases the window, after work queued on the context's stream. Local. Errors: STATE (no window), DEVICE. */
XD_API xd_result xd_route_release(xd_route *route);

#endif
