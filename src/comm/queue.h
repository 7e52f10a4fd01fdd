#ifndef XDI_COMM_QUEUE_H
#define XDI_COMM_QUEUE_H

#include "comm/collective.h"

/* Collectives beside the caller's arithmetic: a queue takes records (xd_collective) and runs them one after another, each by
 * xd_collective_run, so that checks, counters, traces, errors and bits are those of a direct call.
 *
 * - One order of starts per queue, the same on all ranks. Between queues, and between a queue and its communicator, there is
 *   no order; but start them all in one order on all ranks, because a queue may be INLINE or STREAM, and then its starts are calls on
 *   the communicator.
 * - The record and its arrays of counts, displacements and known leaves are copied by xd_queue_start. The buffers they point to
 *   are the queue's from start to wait: nobody else reads what a record writes or writes what it reads.
 * - The deadline of a record counts from when the queue begins to run it, not from its start.
 * - A record that every rank refuses (ARGUMENT, DTYPE, MISMATCH and so on; a rank whose own arguments are right gets PEER) fails at
 *   its wait, and the queue goes on. A failure that breaks the group breaks the world, for the communicator and all queues
 *   alike: records that wait their turn fail at once, and so does xd_queue_start from when this rank knows.
 * - A worker has a context of its own with the settings of the communicator's, one thread and the CPU's kernels. Allocator,
 *   logger and clock are therefore called from a second thread and must allow it. */
typedef struct xd_queue xd_queue;

/* Who runs the records.
 *   AUTO     STREAM on a GPU; WORKER between processes, of MPI where it allows several threads; INLINE for threads and a single
 *            rank, which have no wire to wait for
 *   INLINE   xd_queue_start itself, on the caller's communicator
 *   WORKER   a thread, on a communicator of its own; it sleeps while there is no record
 *   STREAM   as INLINE, but memory of a GPU is moved on a stream of the queue, behind what the record's stream, or the
 *            context's, holds at the start; the wait is one of the context's stream, not of the host */
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

/* Names one started record of its queue until its wait; to another queue it may name any record, or none. A ticket of zero names
 * none. */
typedef struct xd_ticket {
    uint64_t number;
} xd_ticket;

/* What a queue is and has done. `traffic` is that of the records that have been run; the communicator's own counters have it
 * too, but not that of a WORKER. */
typedef struct xd_queue_facts {
    xd_queue_form form; /* all but AUTO */
    int capacity;
    int open; /* records between start and wait */
    xd_comm_counters traffic;
} xd_queue_facts;

/* Creates a queue over the ranks of comm.
 *
 *   desc   read during the call only, the same on all ranks; NULL -> all defaults
 *   out    destroy it with xd_queue_destroy before comm
 *
 * What cannot be had is INLINE, and xd_queue_info tells: a WORKER where the transport makes no second communicator for
 * another thread (MPI below MPI_THREAD_MULTIPLE, NCCL) or the context is on a GPU, a STREAM on a CPU or where the transport moves
 * host memory only. Collective over comm. Memory: what xd_queue_bytes says: capacity records with 7 numbers a rank each, for
 * a worker a context and a handle on the group, for a stream an event a record; nothing later.
 * Errors: ARGUMENT (form, capacity), MISMATCH (ranks pass different ones), MEMORY, also when a thread does not start, DEVICE
 * (no stream or event); as for every collective, one rank's error is PEER on the others. */
XD_API xd_result xd_queue_create(xd_comm *comm, const xd_queue_desc *desc, xd_queue **out);

/* What xd_queue_create would take on this rank: a worker's context and handle on the group too, with what the transport makes
 * for it (the ranks of a world of threads share what rank 0 takes). Of an AUTO desc that of the form that would be taken.
 * Streams and events are the device's own. Local, allocates nothing. Errors: ARGUMENT (form, capacity). */
XD_API xd_result xd_queue_bytes(xd_comm *comm, const xd_queue_desc *desc, xd_memory_bytes *out);

/* Appends a record to the queue. A worker's start never waits; INLINE and STREAM queues run the record now. Either way what
 * the record itself does wrong is told by its wait.
 *
 *   record   any kind that xd_collective_run takes; copied, with its arrays
 *   ticket   for xd_queue_wait; NULL -> xd_queue_wait_all takes the result
 *
 * All ranks of comm start the same records (two ranks SEND and RECV). Allocates nothing.
 * Errors, without a record: STATE (`capacity` records are open), PEER (the world is broken). */
XD_API xd_result xd_queue_start(xd_queue *queue, const xd_collective *record, xd_ticket *ticket);

/* Whether xd_queue_wait would return at once: the record has been run (a GPU may still move it), or no record has this
 * ticket. Local, never waits. */
XD_API bool xd_queue_done(xd_queue *queue, xd_ticket ticket);

/* Waits for a record and the ones started before it and returns the record's result, once: its place in the queue is free
 * again, and its ticket names nothing any more. Waits in any order; ranks need not wait alike. Not longer than the deadlines
 * of the records up to this one; after one that broke the world the others fail at once.
 *
 * A failure becomes the last error of the communicator's context, with culprit and message.
 * Errors: STATE (no open record has this ticket), and those of the record's collective. */
XD_API xd_result xd_queue_wait(xd_queue *queue, xd_ticket ticket);

/* Waits for all open records and frees their places. Returns the first failure in the order of starts; XD_OK without any. */
XD_API xd_result xd_queue_wait_all(xd_queue *queue);

/* The form that was taken, and what it has done. Local, never waits. */
XD_API xd_queue_facts xd_queue_info(xd_queue *queue);

/* Ends the queue; local. NULL is fine. A worker first runs what was started, as a wait would: a record whose peers do not come
 * ends with its deadline, and breaks the world. A STREAM orders the context's stream behind its own. Results nobody has
 * waited for are lost. */
XD_API void xd_queue_destroy(xd_queue *queue);

#endif
