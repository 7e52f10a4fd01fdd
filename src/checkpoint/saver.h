#ifndef XDI_CHECKPOINT_SAVER_H
#define XDI_CHECKPOINT_SAVER_H

#include "checkpoint/checkpoint.h"

/* Saves while training continues, with the files of xd_checkpoint_save: docs/checkpoints.md. A thread with its own communicator
 * and context writes them.
 *
 * - After start the caller may change and free everything that the desc names.
 * - A failure that breaks the group breaks training and the save. The communicator does not count the save's traffic.
 * - The thread calls the context's allocator, logger, clock and file calls.
 * - MPI below MPI_THREAD_MULTIPLE and NCCL have no thread: poll and wait are collective and run the save. Portable programs
 *   call them on all ranks. */
typedef struct xd_checkpoint_saver xd_checkpoint_saver;

/* What a saver can save. */
typedef struct xd_checkpoint_saver_desc {
    const xd_checkpoint_network *networks; /* [network_count] */
    int network_count;
} xd_checkpoint_saver_desc;

/* Creates a saver of these networks or fewer, for one save at a time. Collective.
 *
 *   desc   read during the call only
 *   out    destroy it before comm
 *
 * Memory: a staging block on the host, page-locked if the device can: all elements that this rank writes, reserved states of
 * frozen parameters included. Its thread has a context and a communicator.
 * Errors: those of xd_checkpoint_save about networks; MEMORY (also: no thread). */
XD_API xd_result xd_checkpoint_saver_create(xd_comm *comm, const xd_checkpoint_saver_desc *desc,
                                            xd_checkpoint_saver **out);

/* Starts a save: checks, copies and agrees. Collective. On a device the copy follows the context's stream and is complete on
 * return.
 *
 *   desc   as for xd_checkpoint_save; staging_bytes is not used
 *
 * Errors, with nothing started: STATE (an open save; too small a saver), ARGUMENT, FORMAT, MEMORY (as for xd_checkpoint_save).
 * xd_checkpoint_save_wait returns those of files and between ranks. */
XD_API xd_result xd_checkpoint_save_start(xd_checkpoint_saver *saver, const xd_checkpoint_save_desc *desc);

/* Returns whether xd_checkpoint_save_wait would return at once; true without a save. Local, never waits. Without a thread it is
 * collective, writes at most 256 MiB a rank, and returns the same on every rank. */
XD_API bool xd_checkpoint_save_poll(xd_checkpoint_saver *saver);

/* Waits for the save and returns its result once, within its deadlines; XD_OK without a save. Errors: those of
 * xd_checkpoint_save. */
XD_API xd_result xd_checkpoint_save_wait(xd_checkpoint_saver *saver);

/* Destroys the saver; local. NULL is fine. Completes an open save first, or abandons it without a thread. */
XD_API void xd_checkpoint_saver_destroy(xd_checkpoint_saver *saver);

#endif
