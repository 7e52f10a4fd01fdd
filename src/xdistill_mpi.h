/* xdistill_mpi.h - the processes of an MPI job as a world of xdistill. License: see xdistill.h.

   In *one* C or C++ file:                            Everywhere else:
       #define XDISTILL_IMPLEMENTATION                          #include "xdistill.h"
       #include "xdistill.h"                                    #include "xdistill_mpi.h"
       #include "xdistill_mpi.h"                      mpicc -std=c99 app.c -lm -lpthread

       MPI_Init(&argc, &argv);
       xd_mpi_desc desc = { .mpi = MPI_COMM_WORLD };
       xd_comm_mpi(ctx, &desc, &world);               examples/05_mpi.c is a whole program
       ...
       xd_comm_destroy(world);
       MPI_Finalize();

   All data goes through non-blocking point-to-point messages, so that every wait has a deadline. Sums are
   computed here, in rank order, by the functions of kernel/reduce.h: the bits are those of the threads
   transport, with any MPI library. Data is memory of the host: on contexts with a GPU, memory of the GPU
   is refused (UNSUPPORTED); xdistill_nccl.h moves it. Needs MPI 3.0. The thread that owns the context makes the MPI
   calls: MPI_THREAD_SINGLE is enough when it is the main thread. Where MPI_Init_thread has given MPI_THREAD_MULTIPLE on
   every rank, queues (xd_queue_create) have a thread and messages of their own. */
#ifndef XDISTILL_MPI_H
#define XDISTILL_MPI_H

#if !defined(XD_VERSION_MAJOR)
#    error "include xdistill.h before xdistill_mpi.h"
#elif XD_VERSION_MAJOR != 0 || XD_VERSION_MINOR != 3
#    error "xdistill_mpi.h belongs to xdistill.h version 0.3: take both from one release"
#endif

/* The old C++ bindings are not needed and cause warnings. */
#if !defined(OMPI_SKIP_MPICXX)
#    define OMPI_SKIP_MPICXX 1
#endif
#if !defined(MPICH_SKIP_MPICXX)
#    define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>
#if defined(OMPI_MAJOR_VERSION) && OMPI_MAJOR_VERSION >= 5
#    include <mpi-ext.h>
#endif
#if defined(OMPI_HAVE_MPI_EXT_FTMPI) && OMPI_HAVE_MPI_EXT_FTMPI
#    define XDI_MPI_RECOVERS 1 /* it tells who has died, and the others go on: ULFM */
#endif

#include "mpi/comm_mpi.h"

#endif

#if defined(XDISTILL_IMPLEMENTATION) && !defined(XDISTILL_MPI_IMPLEMENTED)
#define XDISTILL_MPI_IMPLEMENTED

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "mpi/internal.h"
#include "mpi/world.c"
#include "mpi/wait.c"
#include "mpi/collective.c"
#include "mpi/messages.c"
#include "mpi/shrink.c"
#include "mpi/handle.c"
#include "mpi/join.c"

#endif
