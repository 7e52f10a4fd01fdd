#ifndef XDI_CHECKPOINT_SAVER_H
#define XDI_CHECKPOINT_SAVER_H

#include "checkpoint/checkpoint.h"

/* Checkpoints beside training: xd_checkpoint_save_start copies what this rank has to save and returns; a thread with a
 * communicator and a context of its own then does what xd_checkpoint_save does, and writes the same bytes.
 *
 * - From the return of start on, everything the desc points to may be changed and freed, the networks' arrays, optimizers
 *   and averages too.
 * - Training's collectives run beside the save; they share nothing but the fate of the world: a failure that breaks the group
 *   in one of them breaks both. The traffic of the save is not in the counters of the communicator.
 * - Allocator, logger, clock and file calls of the context are called from a second thread and must allow it.
 * - Where the transport makes no second communicator for another thread (MPI below MPI_THREAD_MULTIPLE, NCCL), there is no
 *   thread: xd_checkpoint_save_poll and xd_checkpoint_save_wait carry the save out on the caller's communicator, and are
 *   collective. Programs for every transport call them on all ranks alike. */
typedef struct xd_checkpoint_saver xd_checkpoint_saver;

/* Bytes of the block into which a rank's start copies: what it speaks for of all tensors of these networks, each rounded up
 * to XD_ARENA_ALIGNMENT, with the states of frozen parameters for which optimizers have set memory aside (reserve_frozen), so
 * that xd_optimizer_thaw does not outgrow a saver. Local. Errors: those of xd_checkpoint_save about networks; MEMORY. */
XD_API xd_result xd_checkpoint_saver_bytes(xd_comm *comm, const xd_checkpoint_network *networks,
                                           int network_count, size_t *bytes);

/* Creates a saver for any number of saves, one at a time, of these networks or of less.
 *
 *   networks   [network_count], read during the call only
 *   out        destroy it with xd_checkpoint_saver_destroy before comm
 *
 * Collective. Memory: the bytes of the call above, in memory of the host (page-locked where the context's
 * device offers it), a context and a handle on the group. Errors, on every
 * rank: those of the call above; MEMORY, also when a thread does not start; as for every collective, one rank's error is PEER
 * on the others. */
XD_API xd_result xd_checkpoint_saver_create(xd_comm *comm, const xd_checkpoint_network *networks,
                                            int network_count, xd_checkpoint_saver **out);

/* Starts a save: checks what this rank can see, copies, and agrees with the other ranks that all have, in one exchange. On a
 * device the copy is behind what is on the context's stream, and complete on return.
 *
 *   desc   as for xd_checkpoint_save; its staging_bytes are not used, since the tensors are in memory of the host already
 *
 * Collective. Memory until the wait: copies of names, regions, state and files, and that of xd_checkpoint_save. Errors, on
 * every rank, nothing then being started: STATE while a save has not been waited for, naming both steps, or when the networks
 * need more bytes than the saver has; ARGUMENT, FORMAT and MEMORY as for xd_checkpoint_save. All that ranks find out together,
 * and files, is told by the wait. */
XD_API xd_result xd_checkpoint_save_start(xd_checkpoint_saver *saver, const xd_checkpoint_save_desc *desc);

/* Whether xd_checkpoint_save_wait would return at once; true when nothing was started. Local, and never waits; without a
 * thread it is collective, carries out a piece of the save, at most 256 MiB of writing on each rank, and returns the same on every
 * rank. */
XD_API bool xd_checkpoint_save_poll(xd_checkpoint_saver *saver);

/* Waits for the save that was started and returns its result, once: the errors of xd_checkpoint_save, on every rank, with culprit
 * and message in the communicator's context; older checkpoints are as they were. XD_OK when nothing was started. Not longer
 * than the deadlines of the save's collectives. */
XD_API xd_result xd_checkpoint_save_wait(xd_checkpoint_saver *saver);

/* Ends the saver; local. NULL is fine. A save nobody has waited for is completed first, and its result is lost; without a
 * thread it is given up. */
XD_API void xd_checkpoint_saver_destroy(xd_checkpoint_saver *saver);

#endif
