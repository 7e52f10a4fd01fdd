#ifndef XDI_COMM_LAUNCH_H
#define XDI_COMM_LAUNCH_H

#include "base/context.h"

/* A process's rank, from its launcher's environment. */

/* Whose variables were read. */
typedef enum xd_launch_kind {
    XD_LAUNCH_ALONE = 0, /* no launcher: one rank */
    XD_LAUNCH_TORCHRUN, /* RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT: also build/xdrun */
    XD_LAUNCH_OPEN_MPI, /* OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE */
    /* PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS: MPICH, Intel MPI, others; PMI_LOCAL_RANK, PMI_LOCAL_SIZE: PALS */
    XD_LAUNCH_PMI,
    XD_LAUNCH_SLURM,   /* SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, in a step (SLURM_STEP_ID) */
    XD_LAUNCH_MVAPICH, /* MV2_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE: MVAPICH2 */
    XD_LAUNCH_FLUX,    /* FLUX_TASK_RANK, FLUX_JOB_SIZE, FLUX_TASK_LOCAL_ID */
    XD_LAUNCH_JSRUN    /* JSM_NAMESPACE_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE */
} xd_launch_kind;

#define XD_LAUNCH_JOB_MAX 64      /* with terminator; letters, digits, '-' and '_' */
#define XD_LAUNCH_ADDRESS_MAX 256 /* with terminator */

/* Place in the job. */
typedef struct xd_launch_info {
    xd_launch_kind kind;
    int rank, world_size; /* of all machines */
    int local_rank;       /* on this machine */
    int local_world_size; /* 0 -> unknown (Slurm, Flux) */
    /* Of this job only, equal on all ranks: XDISTILL_JOB (random from build/xdrun), else from the launcher's
     * variables. "" -> none. */
    char job[XD_LAUNCH_JOB_MAX];
    char master_address[XD_LAUNCH_ADDRESS_MAX]; /* MASTER_ADDR; "" -> not set */
    int master_port;                            /* MASTER_PORT; 0 -> not set */
} xd_launch_info;

/* Returns this process's rank. Of several sets the first counts: torchrun, Open MPI, PMI, MVAPICH2, Flux, jsrun, Slurm;
 * none -> one rank. More: docs/concepts.md. Local; allocates nothing; must not run while setenv does. Logs the kind
 * at INFO.
 * Errors, naming the variables: MISSING (incomplete set; PMIx alone, PMI by a socket), ARGUMENT (number, job name),
 * TOPOLOGY (rank not below its size; sets contradict). */
XD_API xd_result xd_launch_discover(xd_ctx *ctx, xd_launch_info *out);

#endif
