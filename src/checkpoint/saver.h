#ifndef XDI_CHECKPOINT_SAVER_H
#define XDI_CHECKPOINT_SAVER_H

#include "checkpoint/checkpoint.h"

/* Saves while training continues, with the files of xd_checkpoint_save: docs/checkpoints.md. A thread writes them, with its own
 * context and communicator and the context's allocator, logger, clock and file calls. Without one (NCCL, MPI below
 * MPI_THREAD_MULTIPLE) poll and wait are collective and run the save. */
typedef struct xd_checkpoint_saver xd_checkpoint_saver;

/* The networks that a saver can save. */
typedef struct xd_checkpoint_saver_desc {
    const xd_checkpoint_network *networks; /* [network_count] */
    int network_count;
} xd_checkpoint_saver_desc;

/* Creates a saver of these networks or fewer, for one save at a time. Collective. Takes host memory, page-locked if the device
 * can, for all elements that this rank writes, with reserved states of frozen parameters.
 * Errors: those of xd_checkpoint_save about networks; MEMORY (also: no thread). */
XD_API xd_result xd_checkpoint_saver_create(xd_comm *comm, const xd_checkpoint_saver_desc *desc,
                                            xd_checkpoint_saver **out);

/* Starts a save: checks, copies and agrees. Collective. On return all that the desc names may change; on a device the copy
 * follows the context's stream.
 *
 *   desc   of xd_checkpoint_save, without staging_bytes
 *
 * Errors, nothing started: STATE (an open save; more than the saver's), ARGUMENT, FORMAT, MEMORY (as xd_checkpoint_save). Others
 * come from xd_checkpoint_save_wait. */
XD_API xd_result xd_checkpoint_save_start(xd_checkpoint_saver *saver, const xd_checkpoint_save_desc *desc);

/* Returns whether xd_checkpoint_save_wait would return at once; true without a save. Local, never waits. Without a thread:
 * collective, writes at most 256 MiB a rank, the same on every rank. */
XD_API bool xd_checkpoint_save_poll(xd_checkpoint_saver *saver);

/* Waits for the save within its deadlines and returns its result once; XD_OK without a save. Errors: those of
 * xd_checkpoint_save. */
XD_API xd_result xd_checkpoint_save_wait(xd_checkpoint_saver *saver);

/* Destroys the saver. It first ends an open save; without a thread it abandons that. Local. NULL is fine. */
XD_API void xd_checkpoint_saver_destroy(xd_checkpoint_saver *saver);

#endif
