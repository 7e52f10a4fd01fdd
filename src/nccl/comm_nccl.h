#ifndef XDI_NCCL_COMM_NCCL_H
#define XDI_NCCL_COMM_NCCL_H

/* How to join a world. Zero is the default of every field. Several ranks need `id`, `file`, or `host` and `port`. By
 * `file` or TCP rank 0 makes the id and gives it to each rank that proves the secret, one process a rank. The other
 * ranks take it only from a rank 0 that proves it too. Nothing is encrypted: docs/concepts.md. */
typedef struct xd_nccl_desc {
    int rank, size;         /* size is required */
    const ncclUniqueId *id; /* of xd_nccl_unique_id on one rank, sent to all, for example by MPI */
    /* a path that all ranks see, in a folder where strangers cannot write. FILE and FILE.RANK are written with mode 600
     * and removed; files of an earlier run do no harm */
    const char *file;
    const char *host; /* rank 0's machine, as MASTER_ADDR; rank 0 listens at its addresses only */
    const char *port; /* a free port there: not MASTER_PORT, on which torchrun listens */
    /* collectives of each group whose arguments are compared; 0 -> the first 64; -1 -> none; INT64_MAX -> all, with sends and
     * receives */
    int64_t compare;
    size_t staging_bytes; /* device memory for what other ranks send for a sum; 0 -> 16 MiB */
    /* with `file` or `host`: at least 16 bytes that all ranks know and strangers cannot guess. From a file of mode 600, or
     * a variable that the launcher sets; never on a command line */
    const char *secret;
} xd_nccl_desc;

#if !defined(XDISTILL_NCCL_EXCHANGE)

/* Returns the id of a new world, for xd_nccl_desc.id. Local. Errors: DEVICE, PEER (with NCCL's own text). */
XD_API xd_result xd_nccl_unique_id(xd_ctx *ctx, ncclUniqueId *out);

/* Joins the ranks that share an id into a world. Collective over `size` ranks; waits at most init_timeout_seconds. Takes
 * staging_bytes of the GPU, once for all groups of the world. Failures: docs/concepts.md.
 *
 *   ctx    of a GPU (xd_cuda_create); ranks of one process have different GPUs. Any device may be the current one at
 *          a call, and it is the same one afterwards
 *   desc   compare and staging_bytes are the same on every rank
 *   out    destroy it, and all groups split from it, before xd_cuda_destroy
 *
 * The context's CPU level becomes the lowest of all ranks. Errors: ARGUMENT, STATE (no GPU), MEMORY (the others get
 * TIMEOUT), IO (file, port), MISMATCH (rank taken, size, compare, staging_bytes, floating-point state), UNSUPPORTED (id
 * size), DEVICE, PEER (with NCCL's text), TIMEOUT.
 *
 * Comparing. After the calls that `compare` covers the host no longer waits. If one rank then passes other arguments than its
 * peers, or refuses a call by itself, the world is lost: ranks that wait for it get TIMEOUT at the deadline, with this rank's
 * last calls. If nobody waits, the group's next barrier or agreement compares a hash of all such calls and returns MISMATCH.
 *
 * CUDA graphs. A stream in a capture records a collective or xd_exchange, in every mode of reduction, when its memory is on
 * the GPU and `compare` no longer covers it. So a step's collectives can be in its graph. Every other call is UNSUPPORTED:
 * barriers, splits, agreements, calls that are compared, memory of the host. Such a refusal loses neither the capture nor
 * the world. The other ranks do not learn of it, so all ranks capture the same calls. They also launch their graphs in the
 * same order. Ranks of one process capture with cudaStreamCaptureModeThreadLocal. Destroy graphs before their groups.
 *
 * A training step fits one graph: losses, norms, xd_parallel_reduce and xd_parallel_publish leave their agreements out in a
 * capture. Make a step before it, and call xd_parallel_publish outside of it now and then.
 *
 * A launch has no deadline. If a rank stops launching, the graphs of the others wait in it. xd_read, xd_barrier and
 * xd_parallel_publish wait with a deadline and return TIMEOUT. The latter two also end the work that waits.
 * cudaStreamSynchronize alone may never return. */
XD_API xd_result xd_comm_nccl(xd_ctx *ctx, const xd_nccl_desc *desc, xd_comm **out);

#endif

#endif
