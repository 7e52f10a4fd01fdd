#ifndef XDI_NCCL_COMM_NCCL_H
#define XDI_NCCL_COMM_NCCL_H

/* How to join a world. Zero is the default of every field. Ranks get the id of the world in one of three
 * ways: as `id`, or rank 0 creates it and passes it on through a file or TCP. A world of one rank needs none
 * of them.
 *
 * Through a file or TCP, rank 0 gives the id only to who has the secret, one process a rank, and the others take it only
 * from who has it. Both sides prove it by HMAC-SHA-256 over fresh random numbers: the secret is never sent, and what is
 * recorded cannot be used again. Strangers may call, say nothing, or answer in the place of rank 0: they learn nothing
 * and delay nobody. Nothing is encrypted: the id itself passes in clear, and so does all that NCCL sends later,
 * to anybody who reaches its ports. A network on which others can read or change what the ranks send needs more than this. */
typedef struct xd_nccl_desc {
    int rank, size;         /* size is required */
    const ncclUniqueId *id; /* from xd_nccl_unique_id on one rank, sent to all, for example by MPI */
    /* a path that all ranks see, in a folder where strangers cannot write. FILE and FILE.RANK are written there with
     * mode 600 and removed; what an earlier run has left is no obstacle */
    const char *file;
    /* the machine of rank 0 (MASTER_ADDR of a launcher); rank 0 listens at its addresses only */
    const char *host;
    const char *port;     /* a free port there: not MASTER_PORT, on which torchrun itself listens */
    int64_t compare;      /* collectives of each group whose arguments are compared; 0 -> all; -1 -> none */
    size_t staging_bytes; /* device memory for the terms of a sum; 0 -> 16 MiB */
    /* required with file or host: what all ranks know and nobody else can guess, 16 bytes or more. From a file of mode
     * 600, or a variable that the launcher sets; never on a command line */
    const char *secret;
} xd_nccl_desc;

#if !defined(XDISTILL_NCCL_EXCHANGE)

/* The id of a new world, for xd_nccl_desc.id. Local. Errors: DEVICE, PEER (with NCCL's own text). */
XD_API xd_result xd_nccl_unique_id(xd_ctx *ctx, ncclUniqueId *out);

/* Joins the ranks that share an id into a world.
 *
 *   ctx    computes on a GPU (xd_cuda_create), which must be the calling thread's current device here and in every
 *          xd_comm_split; ranks of one process must have different GPUs
 *   desc   read during the call only; compare and staging_bytes are the same on every rank
 *   out    destroy it, and all groups split from it, before xd_cuda_destroy
 *
 * Comparing the ranks' arguments takes a network round trip. The host waits for it, and so for the group's
 * earlier collectives, but not for kernels launched after them. For calls that are not compared, the call only
 * starts work, ranks whose arguments differ hang until the next deadline, and either all ranks or none must
 * pass displacements. Barriers, splits, agreements and sums over leaves that are not known beforehand
 * (xd_collective.known_leaves) are always compared; sends and receives when compare is 0.
 *
 * The context's CPU level becomes the lowest of all ranks. Collective over `size` ranks; waits at most
 * init_timeout_seconds. Memory: staging_bytes on the GPU, once for all groups that are split from the world.
 *
 * After a failure: NCCL does not report which rank is missing, so ranks that wait for one that left or died get
 * TIMEOUT at their deadline, or PEER as soon as NCCL detects it. Then all communicators of the world are aborted
 * on this rank, which ends the work that its streams were waiting in. A wait by CUDA's own calls has no deadline
 * and may never end: wait by xd_read or xd_barrier.
 *
 * Errors: ARGUMENT, STATE (no GPU, or not the current one), MEMORY (the others then get TIMEOUT), IO (the
 * file, the port), MISMATCH (compare, staging_bytes or the host's floating-point state), DEVICE and PEER (with NCCL's own
 * text), TIMEOUT. */
XD_API xd_result xd_comm_nccl(xd_ctx *ctx, const xd_nccl_desc *desc, xd_comm **out);

#endif

#endif
