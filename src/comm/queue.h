#ifndef XDI_COMM_QUEUE_H
#define XDI_COMM_QUEUE_H

#include "comm/collective.h"

/* Runs collectives beside the caller's arithmetic: docs/queues.md. Every rank starts the same records in one order.
 * The queue owns a record's buffers from start to wait. */
typedef struct xd_queue xd_queue;

/* Which thread runs records.
 *   AUTO     STREAM on a GPU; WORKER between processes, if MPI allows threads; otherwise INLINE
 *   INLINE   that which calls xd_queue_start, on the caller's communicator
 *   WORKER   the queue's, with its own communicator; sleeps while the queue is empty
 *   STREAM   as INLINE; GPU memory moves on the queue's stream; a wait blocks the context's stream, not the host */
typedef enum xd_queue_form {
    XD_QUEUE_AUTO = 0,
    XD_QUEUE_INLINE,
    XD_QUEUE_WORKER,
    XD_QUEUE_STREAM
} xd_queue_form;

/* Settings. */
typedef struct xd_queue_desc {
    xd_queue_form form;
    int capacity; /* records between start and wait, at most 4096; 0 -> 16 */
} xd_queue_desc;

/* A started record of its queue until xd_queue_wait returns it. Zero is none. */
typedef struct xd_ticket {
    uint64_t number;
} xd_ticket;

/* The communicator's counters include `traffic`, except for a WORKER. */
typedef struct xd_queue_info {
    xd_queue_form form; /* not AUTO */
    int capacity;
    int open;                 /* between start and wait */
    xd_comm_counters traffic; /* of records that have run */
} xd_queue_info;

/* Creates a queue over comm's ranks. Collective.
 *
 *    desc   the same on all ranks; NULL -> all defaults
 *    out    destroy it before comm
 *
 * A form that is not available becomes INLINE (xd_queue_describe). All memory is allocated here, with a WORKER's
 * communicator and a STREAM's events, one a record. Between threads rank 0 allocates what ranks share.
 * Errors: ARGUMENT (form, capacity), MISMATCH (ranks differ), MEMORY, DEVICE. */
XD_API xd_result xd_queue_create(xd_comm *comm, const xd_queue_desc *desc, xd_queue **out);

/* Appends a record. A WORKER returns at once; INLINE and STREAM run it first. xd_queue_wait returns its errors.
 *
 *   record   of any kind; copied with its arrays
 *   ticket   NULL -> xd_queue_wait_all returns the result
 *
 * Collective, except SEND and RECV: two ranks. Allocates nothing.
 * Errors, nothing appended: STATE (`capacity` records are open), PEER (the group is broken). */
XD_API xd_result xd_queue_start(xd_queue *queue, const xd_collective *record, xd_ticket *ticket);

/* Returns whether xd_queue_wait would return at once; a GPU may still move data. True if no open record has the ticket.
 * Local. */
XD_API bool xd_queue_done(xd_queue *queue, xd_ticket ticket);

/* Waits for a record and all started before it. Returns its result once and frees its place. Ranks may wait in
 * different orders. The records' deadlines bound the wait. xd_last_error has message and culprit.
 * Errors: STATE (no open record), those of the collective. */
XD_API xd_result xd_queue_wait(xd_queue *queue, xd_ticket ticket);

/* Waits for all open records. Returns the first failure in start order. */
XD_API xd_result xd_queue_wait_all(xd_queue *queue);

/* Returns facts. Local, never waits. */
XD_API xd_queue_info xd_queue_describe(xd_queue *queue);

/* Destroys the queue. Local. A WORKER first runs the open records, each within its deadline. A STREAM makes the
 * context's stream wait for its own. Results without a wait are lost. */
XD_API void xd_queue_destroy(xd_queue *queue);

#endif
