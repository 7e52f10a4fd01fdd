#ifndef XDI_TEACHER_ROUTE_H
#define XDI_TEACHER_ROUTE_H

#include "comm/collective.h"
#include "loss/topk.h"
#include "kernel/types.h"

/* Moves a teacher's outputs to a student on other ranks, or on the same ranks with another
 * split. Each side has its own split of samples (uneven or in any order), its own micro-batches, positions
 * (any ascending list of intervals, such as the two blocks of the load-balanced order) and columns. A route moves one
 * teacher's payload, micro-batch by micro-batch:
 *
 *   every rank      xd_route_create
 *   teacher ranks   xd_route_send for each of their micro-batches, or xd_route_slot, fill it, xd_route_post
 *   student ranks   xd_route_take, read the window, xd_route_release, for each of theirs
 *
 * Steps follow each other without further calls: after a step's last micro-batch comes the next step's first. A rank on
 * both sides first posts as many micro-batches as xd_route_describe reports due, then takes:
 *
 *   for (;;) { while (xd_route_describe(route).due > 0) send(); take(); loss(); release(); }
 *
 * Each teacher rank has a ring of slots, so it can fill the next micro-batch while students read the last.
 * Between threads, and between processes of one node with any communicator, the ring is shared memory:
 * a window that lies contiguously in one slot, with the requested dtype, is a pointer into
 * it; other windows are copied once from the slots. Processes share a file in /dev/shm without a name, opened through
 * rank 0's /proc, and on GPUs open each other's rings (CUDA IPC). When one rank cannot, because it is on
 * another node, shares its process with another rank, or the system refuses it memory, a file or a GPU's memory, all
 * ranks use messages.
 *
 * With messages the payload goes over the communicator: the students' step i is one all_to_all of all ranks with a
 * side, inside xd_route_take on student ranks, and on ranks that are teachers only inside the xd_route_post
 * that completes the students' next window. So a teacher rank runs ahead by what it computes between two posts.
 *
 * On contexts with a GPU (xd_cuda_create) rows are in device memory: what is sent, slots and windows. Ids are lists
 * in host memory, as the losses take them. Teachers fill slots and students read them by work on the
 * streams of their contexts: a post covers the work queued on the teacher's stream before it, and a window may be read
 * by work queued on the student's stream between take and release. Calls wait on the host for each other's calls, as
 * on a CPU, but between threads only xd_route_create and xd_route_destroy wait for a GPU. Between processes
 * that share rings the streams signal what is posted and read (cudaLaunchHostFunc): there xd_route_take waits
 * for the teacher's GPU, and xd_route_slot for the students' when all slots are full; the waiting rank's own GPU continues
 * meanwhile. A shared slot is read by the kernels of other ranks, so ranks on different GPUs need peer access between
 * them; rings that processes share come from cudaMalloc, whatever the allocator of xd_cuda_desc. Messages need a
 * communicator that takes device memory: threads and NCCL do, MPI (xdistill_mpi.h) does not (UNSUPPORTED).
 * NCCL moves the ids too, and then the host waits for them.
 *
 * The rows a student gets have the teacher's bits (rounded to bf16 when the wire is bf16), for every split on
 * either side and on every transport. */
typedef struct xd_route xd_route;

/* What a row is. All three are moved in the same way; COLUMNS adds a list of ids for each sample. */
typedef enum xd_route_payload {
    XD_ROUTE_LOGITS = 0, /* V_t logits */
    XD_ROUTE_COLUMNS,    /* the logits of k columns chosen for each sample: see xd_vocab_topk_gather */
    XD_ROUTE_HIDDEN      /* H hidden states; the student applies the teacher's head itself */
} xd_route_payload;

/* Positions [begin, end) of a sample. */
typedef struct xd_route_span {
    int64_t begin, end;
} xd_route_span;

/* What one rank computes (teacher) or needs (student) in a step. Teacher ranks that hold the same positions and
 * columns of a sample are replicas, and a student reads from one of them. Ranks that compute a sample together, with
 * collectives among them, must have the same samples and micro-batches, so that they post at the same time. */
typedef struct xd_route_side {
    int64_t sample_count;           /* 0 -> this rank is not on this side */
    int64_t sample_begin;           /* its samples are this one and those after it, ... */
    const int64_t *samples;         /* [sample_count] ... or these, in the order of its micro-batches */
    int64_t micro_batch;            /* samples in one, the last may have fewer; 0 -> all of them */
    const xd_route_span *positions; /* [span_count] ascending, disjoint; NULL -> all of a sample */
    int span_count;
    int64_t column_begin, column_end; /* both 0 -> all columns; none: n, n for any n but 0 */
} xd_route_side;

/* What to build a route from. Read during the call only; all fields except the sides and `dtype` are the same on every
 * rank. */
typedef struct xd_route_desc {
    xd_route_payload payload;
    int64_t samples; /* required; in a step, numbered from 0 */
    int64_t length;  /* required; positions of a sample */
    int64_t columns; /* required; V_t, k or H */
    xd_dtype wire;   /* what slots hold, F32 or BF16; NONE -> F32 */
    xd_dtype dtype;  /* what this rank's windows hold; NONE -> wire */
    /* Micro-batches in a teacher rank's ring; 0 -> as many as students need at the same time, and one more
     * for the next. */
    int slots;
    bool messages; /* use messages even where the ranks could share memory */
    xd_route_side teacher, student;
} xd_route_desc;

/* What a student reads: one micro-batch of its side. Row b * held + i is position i of its side in the micro-batch's
 * sample b. */
typedef struct xd_route_window {
    xd_rows rows;         /* valid until xd_route_release; not to be written; memory of the device */
    const int64_t *ids;   /* COLUMNS: [sample_count, columns], on the host; else NULL */
    int64_t sample_count; /* 0 when this rank, unlike others, has no micro-batch left */
    bool is_view;         /* rows lie in a teacher's slot: nothing was copied */
} xd_route_window;

/* What was agreed, as this rank sees it. */
typedef struct xd_route_info {
    int64_t posts; /* micro-batches this rank posts in a step */
    int64_t takes; /* windows in a step: the same on all student ranks */
    int64_t due;   /* posts of this rank that the next take waits for */
    int64_t views; /* of a step's windows on this rank, those that are not copied */
    int slots;
    int needed;   /* slots without the one for the next micro-batch */
    bool shared;  /* the ring is shared memory of threads, or of processes of one node; else messages */
    size_t bytes; /* of rings (all ranks', when shared), windows and messages */
} xd_route_info;

/* Plans the route: which rectangle of which shard goes where. Checks that every window is covered by shards that
 * do not overlap.
 *
 * Collective over comm, ranks without a side included; those have nothing more to do. comm
 * must outlive the route. All ranks' contexts compute on a CPU, or all on GPUs. Takes memory for the plan: a few
 * words for each rectangle this rank sends or takes, and for each rank and sample; and
 * xd_route_info.bytes.
 * Errors, *out untouched; ranks that find nothing wrong themselves, and those without a side, return PEER with
 * the message: ARGUMENT (a side or size that is wrong, no student or no teacher at all, fewer slots than the
 * students need at the same time), SHAPE (shards overlap in part, or part of a window is in no shard: the message has
 * ranks, sample and how much), DTYPE, MISMATCH, MEMORY, DEVICE. */
XD_API xd_result xd_route_create(xd_comm *comm, const xd_route_desc *desc, xd_route **out);

/* Frees the route. Local; NULL is fine. Ranks that still wait for this one get PEER, or TIMEOUT where the transport cannot
 * notify them. A window that was not released becomes invalid. On GPUs that share rings the host waits for this rank's GPU,
 * and a teacher rank also until students have released what it posted or have destroyed their route; between processes,
 * until they have destroyed it or have exited. After timeout_seconds its ring stays allocated, because a student may
 * still read it; if this rank's GPU has not finished by then, the whole route stays allocated.
 *
 * When a rank that shares rings with other processes dies, ranks that wait for it get PEER. The first wait
 * that fails ends the route for all its ranks and does not change the communicator. */
XD_API void xd_route_destroy(xd_route *route);

/* What was agreed, and this rank's progress. Local. */
XD_API xd_route_info xd_route_describe(const xd_route *route);

/* The slot for this rank's next micro-batch: rows [its samples * held, columns of this side] with the wire's
 * dtype, and, for COLUMNS, ids [its samples, columns] on the host (ids may be NULL otherwise). Calling again
 * before the post returns the same slot.
 *
 * Waits until no student needs the slot's previous contents, at most timeout_seconds; on a GPU the host waits until the
 * students have called xd_route_release, and the context's stream waits for their GPUs: fill the slot by work on that
 * stream. Errors: STATE (not a teacher rank; this rank's student side must take first), TIMEOUT and PEER naming the
 * rank. */
XD_API xd_result xd_route_slot(xd_route *route, xd_rows *rows, int64_t **ids);

/* Makes the slot visible to students, with all work queued on the context's stream so far; they read it until they
 * release it. With messages, on a rank that is a teacher only: collective, see above. Errors: STATE (xd_route_slot was
 * not called), DEVICE, those of the communicator. */
XD_API xd_result xd_route_post(xd_route *route);

/* xd_route_slot, a copy of rows (f32 or bf16) and ids, xd_route_post. rows and ids may be changed when it
 * returns; on a GPU, rows by work on the context's stream. Further errors, before any wait: SHAPE, DTYPE,
 * ARGUMENT (no ids; on a GPU rows in host memory, or ids that are not). */
XD_API xd_result xd_route_send(xd_route *route, xd_rows rows, const int64_t *ids);

/* This rank's next window. Waits for the teachers' posts, at most timeout_seconds. Errors, *out untouched:
 * STATE (not a student rank; the last window was not released; posts of this rank are due), TIMEOUT and PEER
 * naming the rank. */
XD_API xd_result xd_route_take(xd_route *route, xd_route_window *out);

/* Ends reading of the window; on a GPU, after the work queued on the context's stream so far. Local. Errors: STATE
 * when no window is taken, DEVICE. */
XD_API xd_result xd_route_release(xd_route *route);

/* The columns of COLUMNS, chosen on the teacher's ranks: for each sequence the ids that xd_vocab_topk_columns
 * chooses, as xd_xtoken_loss would, and the logits of those columns.
 *
 *   desc    the teacher's vocabulary and its split, logits, sequences, mask, k
 *   ids     [B, k] ascending, the same on all ranks of both groups; on the host, as routes and losses take them
 *   values  rows T, cols k, f32 or bf16; the same on all ranks of the vocabulary. All NaN in a row that holds NaN or
 *           +infinity in any column, so that the loss tells it; -infinity is legal
 *
 * Logits, mask and values are memory of the context's device. Collective over the vocabulary's group and comm.
 * Takes [B + T / B, k] words of 8 bytes for the call and, on a GPU, waits for the ids. Errors, the same on every
 * rank: those of xd_vocab_topk_columns; SHAPE and DTYPE of values. */
XD_API xd_result xd_vocab_topk_gather(xd_ctx *ctx, const xd_vocab_topk_desc *desc, int64_t *ids,
                                      xd_rows values);

#endif
