#ifndef XDI_MPI_COMM_MPI_H
#define XDI_MPI_COMM_MPI_H

/* How to join a world. Zero is the default of every field. */
typedef struct xd_mpi_desc {
    /* an intra-communicator, which is duplicated and not used again; unset -> MPI_COMM_WORLD */
    MPI_Comm mpi;
    /* host memory for sums, the same on all ranks, at least 1 KiB a rank; 0 -> max(1 MiB, 64 KiB a rank) */
    size_t staging_bytes;
    /* collectives of each group whose arguments are compared, the same on all ranks; 0 -> all; -1 -> none */
    int64_t compare;
} xd_mpi_desc;

/* Joins the processes of an MPI communicator into a world with its ranks. Collective over desc->mpi; waits at most
 * init_timeout_seconds. Takes staging_bytes, once for all groups that are split from the world.
 *
 *   desc   NULL -> MPI_COMM_WORLD with every default
 *   out    destroy it with xd_comm_destroy before MPI_Finalize
 *
 * The context's CPU level becomes the lowest of all ranks. Comparing and failures: docs/concepts.md.
 * Errors on every rank: ARGUMENT (staging_bytes too small, compare below -1), MISMATCH (either of them, floating-point
 * state), MEMORY (PEER on the others), PEER (MPI's own error), TIMEOUT.
 * Errors on one rank, the others get TIMEOUT: STATE (MPI is not running), ARGUMENT (MPI_COMM_NULL, an
 * inter-communicator), MEMORY for the first bytes. */
XD_API xd_result xd_comm_mpi(xd_ctx *ctx, const xd_mpi_desc *desc, xd_comm **out);

#endif
