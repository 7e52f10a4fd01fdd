#ifndef XDI_COMM_LAUNCH_H
#define XDI_COMM_LAUNCH_H

#include "base/context.h"

/* Which of the processes of a job this one is, as whoever started it says in the environment. */

/* Whose variables were read. */
typedef enum xd_launch_kind {
    XD_LAUNCH_ALONE = 0, /* nobody's: one rank */
    XD_LAUNCH_TORCHRUN, /* RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT: of torchrun and build/xdrun */
    XD_LAUNCH_OPEN_MPI, /* OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE */
    /* PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS: MPICH, Intel MPI and others; or PMI_LOCAL_RANK, PMI_LOCAL_SIZE: PALS */
    XD_LAUNCH_PMI,
    XD_LAUNCH_SLURM,   /* SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, in a step (SLURM_STEP_ID) */
    XD_LAUNCH_MVAPICH, /* MV2_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE: MVAPICH2 */
    XD_LAUNCH_FLUX,    /* FLUX_TASK_RANK, FLUX_JOB_SIZE, FLUX_TASK_LOCAL_ID */
    XD_LAUNCH_JSRUN    /* JSM_NAMESPACE_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE */
} xd_launch_kind;

#define XD_LAUNCH_JOB_MAX 64      /* with its terminator; letters, digits, '-' and '_' */
#define XD_LAUNCH_ADDRESS_MAX 256 /* with its terminator */

/* A rank's place in its job, a plain value. */
typedef struct xd_launch_info {
    xd_launch_kind kind;
    int rank, world_size; /* of all machines */
    int local_rank;       /* of this machine, as the next one */
    int local_world_size; /* 0 where Slurm or Flux alone tells the rank */
    /* A name that all ranks of the job have and jobs beside it have not, for what its processes meet at: XDISTILL_JOB, which
     * build/xdrun draws at random; otherwise made of what tells this launcher's jobs apart. "" -> nothing does. */
    char job[XD_LAUNCH_JOB_MAX];
    char master_address[XD_LAUNCH_ADDRESS_MAX]; /* MASTER_ADDR, a host where ranks meet; "" -> not set */
    int master_port;                            /* MASTER_PORT; 0 -> not set */
} xd_launch_info;

/* Reads from the environment which rank this process is. The first of these sets of variables that is there counts: torchrun's,
 * Open MPI's, PMI's, MVAPICH2's, Flux's, jsrun's, Slurm's; with none of them it is one rank alone. MASTER_ADDR and MASTER_PORT
 * count for every kind, and begin no set. Where PMI_RANK and PMI_SIZE stand alone, as srun, Flux and mpirun_rsh set them, the
 * local rank and the job's name are those of that launcher's other variables. A variable of a launcher without one that tells
 * the rank (PMIx alone, PMI by a socket) is MISSING: else each of N processes would take itself for the only one, and all would
 * write the same files.
 *
 *   out   untouched on failure
 *
 * The sets after the first must agree with it: on the number of ranks and on what each says of this one. A set with fewer
 * ranks, of which this process would be the first on its machine, belongs to a launcher that has started another one
 * (srun torchrun, mpirun in an interactive step) and is left alone.
 *
 * Nothing else in the library reads these variables. Local; allocates nothing; must not run beside setenv. The kind is logged
 * at INFO.
 * Errors, each naming the variables: MISSING for a set that lacks one or tells no rank, ARGUMENT for a value that is no
 * such number and for a job name that is none, TOPOLOGY, with both values, for a rank that is not below its size and for
 * sets that contradict each other.
 * Source: the variables as the manuals of torchrun, Open MPI, MPICH, Slurm, PALS, MVAPICH2, Flux and jsrun have them. */
XD_API xd_result xd_launch_discover(xd_ctx *ctx, xd_launch_info *out);

#endif
