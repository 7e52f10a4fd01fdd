#ifndef XDI_MPI_COMM_MPI_H
#define XDI_MPI_COMM_MPI_H

/* How to join a world. Zero is the default of every field. */
typedef struct xd_mpi_desc {
    /* an intra-communicator; unset -> MPI_COMM_WORLD. The library uses a duplicate and does not use this one again */
    MPI_Comm mpi;
    /* host memory for the terms of a sum, the same on every rank; 0 -> the larger of 1 MiB and 64 KiB per rank. At
     * least 1 KiB per rank */
    size_t staging_bytes;
    /* collectives of each group whose arguments are compared, the same on every rank; 0 -> all; -1 -> none */
    int64_t compare;
} xd_mpi_desc;

/* Joins the processes of an MPI communicator into a world; ranks are those of the communicator.
 *
 *   desc   read during the call only; NULL -> MPI_COMM_WORLD with every default
 *   out    destroy it with xd_comm_destroy before MPI_Finalize
 *
 * Comparing the ranks' arguments takes a round of short messages before each call. For calls that are not compared, ranks whose
 * arguments differ get PEER or TIMEOUT, and the world is broken, as it is by one that is refused on its own rank. Barriers, splits,
 * agreements, sends, receives and sums over leaves that are not known beforehand (xd_collective.known_leaves) are always compared.
 *
 * The context's CPU level becomes the lowest of all processes. Collective over desc->mpi; waits at most
 * init_timeout_seconds. Memory: staging_bytes, once for all groups that are split from the world.
 *
 * After a failure: peers that wait for a rank that has called xd_comm_abort get PEER; those that wait for one
 * that died or destroyed its handle get TIMEOUT at their deadline. So do both sides of a network that is cut, each naming a
 * rank of the other. Whether a launcher leaves survivors alive to see it: docs/concepts.md. A call that fails returns at most
 * one second later: half of it for the others to say whom they wait for, so that who waits itself is not blamed, and half for
 * messages that have begun to arrive, because MPI writes them into the caller's memory.
 * A process that was stopped beyond the others' deadline names itself when it goes on, as long as they have not ended. Memory of
 * a broken world that MPI may still access is not freed, nor is its communicator; MPI_Finalize may wait for the missing rank.
 *
 * Where the MPI library has recovery (Open MPI 5, mpirun --with-ft ulfm), a rank that died is named at once, by PEER, and
 * xd_comm_shrink makes a world of the others, with two differences: a rank that lives and does not call it makes it TIMEOUT on
 * all others at their deadlines, and so does one that has destroyed its handles before the world was broken. The new world
 * uses the communicator of the first. With other libraries xd_comm_shrink is UNSUPPORTED.
 *
 * What one rank alone gets wrong fails every rank at once, and the message names it: ARGUMENT (staging_bytes too small,
 * or compare below -1), MISMATCH (either of them, or the floating-point state), MEMORY (PEER on the other ranks). Not so where
 * there is nothing to say it through, and the others get TIMEOUT: STATE (MPI is not running), ARGUMENT (MPI_COMM_NULL, a communicator between two
 * groups), MEMORY for the first bytes of a world. Errors besides: PEER (MPI's own error), TIMEOUT. */
XD_API xd_result xd_comm_mpi(xd_ctx *ctx, const xd_mpi_desc *desc, xd_comm **out);

#endif
