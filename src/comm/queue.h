#ifndef XDI_COMM_QUEUE_H
#define XDI_COMM_QUEUE_H

#include "comm/collective.h"

/* Runs collectives beside the caller's arithmetic, in the order in which they were started: docs/queues.md.
 *
 * Every rank starts the same records in the same order. A queue owns the buffers of a record from start to wait. A failure
 * that breaks the group breaks the communicator and all its queues. A WORKER calls the context's allocator, logger and clock
 * from its own thread. */
typedef struct xd_queue xd_queue;

/* Which thread runs the records.
 *   AUTO     STREAM on a GPU; WORKER between processes, if MPI allows several threads; otherwise INLINE
 *   INLINE   the thread that calls xd_queue_start, on the caller's communicator
 *   WORKER   a thread with a communicator of its own; it sleeps while the queue is empty
 *   STREAM   as INLINE; GPU memory moves on a stream of the queue, and a wait blocks the context's stream, not the host */
typedef enum xd_queue_form {
    XD_QUEUE_AUTO = 0, /* the default */
    XD_QUEUE_INLINE,
    XD_QUEUE_WORKER,
    XD_QUEUE_STREAM
} xd_queue_form;

/* Zero is the default of every field. */
typedef struct xd_queue_desc {
    xd_queue_form form; /* 0 -> XD_QUEUE_AUTO */
    int capacity;       /* records between start and wait, at most 4096; 0 -> 16 */
} xd_queue_desc;

/* Identifies one started record of its queue until xd_queue_wait returns it. Zero identifies none. */
typedef struct xd_ticket {
    uint64_t number;
} xd_ticket;

/* The state of a queue. The communicator's own counters include `traffic`, except for a WORKER. */
typedef struct xd_queue_facts {
    xd_queue_form form; /* all but AUTO */
    int capacity;
    int open;                 /* records between start and wait */
    xd_comm_counters traffic; /* of the records that have run */
} xd_queue_facts;

/* Creates a queue over the ranks of comm. Collective.
 *
 *   desc   the same on all ranks; NULL -> all defaults
 *   out    destroy it before comm
 *
 * A form that this context or transport does not have becomes INLINE; xd_queue_info returns the form. Allocates here, with the
 * communicator of a worker; between threads rank 0 allocates what ranks share. A STREAM makes one event a record. Later calls
 * allocate nothing.
 * Errors: ARGUMENT (form, capacity), MISMATCH (ranks differ), MEMORY, DEVICE. */
XD_API xd_result xd_queue_create(xd_comm *comm, const xd_queue_desc *desc, xd_queue **out);

/* Appends a record. A WORKER returns at once; INLINE and STREAM run the record first. xd_queue_wait returns its errors.
 *
 *   record   of any kind; the queue copies it with its arrays
 *   ticket   for xd_queue_wait; NULL -> xd_queue_wait_all returns the result
 *
 * Collective: all ranks start the same records, except the two ranks of a SEND and RECV. Allocates nothing.
 * Errors: STATE (`capacity` records are open), PEER (the group is broken). The record is then not appended. */
XD_API xd_result xd_queue_start(xd_queue *queue, const xd_collective *record, xd_ticket *ticket);

/* Returns whether xd_queue_wait would return at once. A GPU may still move the data. True if no record has the ticket. Local. */
XD_API bool xd_queue_done(xd_queue *queue, xd_ticket ticket);

/* Waits for a record and all records started before it. Returns the record's result once and frees its place.
 *
 * Ranks may wait in different orders. The deadlines of these records bound the wait. The context's last error has message
 * and culprit. Errors: STATE (no open record has this ticket), and those of the collective. */
XD_API xd_result xd_queue_wait(xd_queue *queue, xd_ticket ticket);

/* Waits for all open records. Returns the first failure in the order of starts, or XD_OK. */
XD_API xd_result xd_queue_wait_all(xd_queue *queue);

/* Returns the form, the capacity and the traffic. Local, never waits. */
XD_API xd_queue_facts xd_queue_info(xd_queue *queue);

/* Destroys the queue; NULL is legal. Local. A WORKER first runs the open records, each within its deadline. A STREAM makes the
 * context's stream wait for its own. Results without a wait are lost. */
XD_API void xd_queue_destroy(xd_queue *queue);

#endif
