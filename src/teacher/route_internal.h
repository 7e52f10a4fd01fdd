#ifndef XDI_TEACHER_ROUTE_INTERNAL_H
#define XDI_TEACHER_ROUTE_INTERNAL_H

#include "teacher/internal.h"
#include "teacher/route.h"

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

/* Which rank sends what to which rank in a step; pure. Tables by rank and step have takes + 1 entries per rank. */
typedef struct xdi_route_plan {
    int ranks, rank;
    int64_t takes;                           /* students' steps */
    xdi_route_half *halves[XDI_ROUTE_SIDES]; /* [ranks] each */
    int64_t *words;                          /* what they point to */
    int64_t *places;
    int64_t *need;           /* micro-batches a teacher has posted when students take step i */
    int64_t *first;          /* a teacher's first micro-batch that students need in steps i and later */
    int64_t *still;          /* the same for this rank's windows only */
    int64_t *step_begin;     /* [takes + 1] in pieces */
    xdi_route_piece *pieces; /* that this rank sends or takes: by step, student, sample */
    int64_t piece_count;
    int *sources, *last_sources, *counts; /* [ranks] scratch */
} xdi_route_plan;

/* A teacher's ring is a head of counters and `slots` slots. `posted` counts the micro-batches that it has posted, over
 * all steps; `released` of a student, those that it will not read any more. Each counter has a separate cache line and one
 * writer. With messages no other rank sees the ring, and the counters are unused. A last line of the head is for the
 * handle of a GPU's rows, see route_node.c.
 *
 * The head and the ids of the slots are host memory, shared by ranks that share rings. Rows are memory of
 * the contexts' device: on a CPU they follow the ids; on a GPU each teacher rank has a separate block, and
 * every slot has an event, which its teacher records before it raises `posted`; every student has one, which it
 * records before it raises `released`. A rank that has seen a counter makes its stream wait for the event, so the
 * host does not wait for the GPU. A later record of the same event covers the earlier one. */
enum { XDI_ROUTE_LINE = 64, XDI_ROUTE_NAP = 50000 /* nanoseconds */ };

/* A bit of the counters of a rank that has destroyed its route: it wakes ranks that wait for it. */
#define XDI_ROUTE_GONE ((uint64_t)1 << 63)

/* The rings of all ranks as this one sees them: [ranks] each. */
typedef struct xdi_route_rings {
    int ranks;
    int slots;                    /* of a ring */
    xdi_node *node;               /* rings that processes share; NULL: rings of threads, or a private ring */
    char **heads;                 /* head and ids; NULL where this rank sees none */
    char **rows;                  /* the slots' rows; the same */
    size_t *row_bytes, *id_bytes; /* of a slot */
    uint8_t *used_by;             /* students that read this rank's slots */
    uint64_t *left;               /* ranks that share rings and have destroyed the route; atomic */
    void *memory;                 /* host memory: the rings, when they are private */
    void *own_rows;               /* of a GPU: this rank's */
    int64_t *links;               /* shared on a GPU: [ranks][slots + 2], see xdi_route_link */
    bool linked;                  /* all ranks have the links of all */
} xdi_route_rings;

/* Without shared rings: what one step of the students sends and takes. Rows are of the device. */
typedef struct xdi_route_messages {
    char *send, *recv;
    int64_t *send_ids, *recv_ids;
    int64_t *counts;    /* [4][ranks] */
    uint64_t exchanged; /* students' steps */
} xdi_route_messages;

struct xd_route {
    xd_ctx *ctx;
    xd_comm *comm; /* ranks with a side; NULL: this one has none */
    const xd_kernels *kernels;
    xd_route_desc d;
    xdi_route_plan plan;
    xdi_route_rings rings;
    xdi_route_messages messages;
    char *window; /* of the device */
    int64_t *window_ids;
    int needed;
    bool shared;
    bool open;              /* a slot was handed out and not posted */
    bool holds;             /* a window was taken and not released */
    uint64_t posted, taken; /* micro-batches, windows released */
    uint64_t told;          /* windows reported to teachers as read, at once or by the stream */
    uint64_t counted;       /* such windows, counted when the stream reaches them; atomic */
    size_t bytes;
};

/* route_slots.c: bytes of samples * held * columns elements; of a slot's ids; and of rank r's head with the ids, and of
 * its rows, noting the sizes of its slots. False when that is too much. */
XD_PRIVATE bool xdi_route_block_bytes(const xdi_route_half *half, xd_dtype dtype, size_t *bytes);
XD_PRIVATE bool xdi_route_ids_bytes(const xd_route *route, const xdi_route_half *half, size_t *bytes);
XD_PRIVATE bool xdi_route_ring_bytes(xd_route *route, int r, size_t *head, size_t *rows);
/* route_slots.c: all rings that this rank sees, one after the other in host memory: *total bytes, and on a GPU *on_device
 * bytes of device memory. memory NULL: only the sizes. Returns the rank whose ring is too large, or -1. */
XD_PRIVATE int xdi_route_lay_rings(xd_route *route, char *memory, size_t *total, size_t *on_device);
XD_PRIVATE bool xdi_route_has_side(const xd_route *route, int side);
/* route_slots.c: counters of a teacher's ring, its slot for a micro-batch, and the slot's ids. */
XD_PRIVATE uint64_t *xdi_route_posted(const xdi_route_rings *rings, int teacher);
XD_PRIVATE uint64_t *xdi_route_released(const xdi_route_rings *rings, int teacher, int student);
XD_PRIVATE char *xdi_route_slot_rows(const xdi_route_rings *rings, int teacher, uint64_t number);
XD_PRIVATE int64_t *xdi_route_slot_ids(const xdi_route_rings *rings, int teacher, uint64_t number);
/* route_slots.c: waits until the counter, which `rank` raises, reaches target. */
XD_PRIVATE xd_result xdi_route_watch(const xd_route *route, const uint64_t *counter, uint64_t target,
                                     int rank);
/* route_slots.c: a table's entry of teacher rank r at the students' step `number`, both counted over all steps; and
 * reports to teachers that windows before `number` are read. */
XD_PRIVATE uint64_t xdi_route_needed_at(const xd_route *route, int r, uint64_t number, const int64_t *table);
XD_PRIVATE void xdi_route_release_before(const xd_route *route, uint64_t number);

/* route_memory.c: allocates rings, windows and message buffers for the plan. Collective over
 * the ranks with a side. */
XD_PRIVATE xd_result xdi_route_place(xd_route *route);
/* route_memory.c: frees all memory; rings that others read, once they do not read them any more. False, and nothing
 * of the route may be freed, when a GPU does not finish and might still raise its counters. */
XD_PRIVATE bool xdi_route_leave(xd_route *route);
/* route_memory.c: events; nothing on a CPU. */
XD_PRIVATE xd_result xdi_route_show(const xd_route *route);
XD_PRIVATE xd_result xdi_route_follow_slot(const xd_route *route, int teacher, uint64_t number);
XD_PRIVATE xd_result xdi_route_finish_reading(const xd_route *route);
XD_PRIVATE xd_result xdi_route_follow_reader(const xd_route *route, int student);
/* route_memory.c: can the window of this rank's step be a view into a slot? */
XD_PRIVATE bool xdi_route_is_view(const xd_route *route, int64_t step);

/* route_node.c: tries to place the rings in memory that all processes of one node share: then route->rings.node is
 * set, else the route is not shared. Collective over the ranks with a side. */
XD_PRIVATE xd_result xdi_route_share_node(xd_route *route);
/* route_node.c: do the streams raise the counters? */
XD_PRIVATE bool xdi_route_is_late(const xd_route *route);
/* route_node.c: reports the next post, the next window read, after the work queued on the stream so far. */
XD_PRIVATE xd_result xdi_route_post_later(xd_route *route);
XD_PRIVATE xd_result xdi_route_release_later(xd_route *route);
/* route_node.c: returns false as xdi_route_leave does. */
XD_PRIVATE bool xdi_route_leave_node(xd_route *route);
/* route_plan.c: gathers the sides of all ranks, checks them and makes the plan. d has its defaults.
 * Collective over comm; on failure the plan is half-built and to be freed as well. */
XD_PRIVATE xd_result xdi_route_plan_create(xd_comm *comm, const xd_route_desc *d, xdi_route_plan *plan);
XD_PRIVATE void xdi_route_plan_free(xd_ctx *ctx, xdi_route_plan *plan);
/* Slots that a teacher rank needs when all students take the same step. */
XD_PRIVATE int64_t xdi_route_plan_slots(const xdi_route_plan *plan);
/* The teacher's slot that a window of this rank is a view into, by its first piece; NULL when it is no view. */
XD_PRIVATE const xdi_route_piece *xdi_route_plan_view(const xdi_route_plan *plan, int64_t step);
/* Samples of a side's micro-batch; 0 past the end. */
XD_PRIVATE int64_t xdi_route_plan_samples(const xdi_route_half *half, int64_t batch);

#endif
