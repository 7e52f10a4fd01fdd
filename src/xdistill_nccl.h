/* xdistill_nccl.h - GPUs joined by NCCL as a world of xdistill. License: see xdistill.h.

   In *one* C, C++ or CUDA file:                      Everywhere else:
       #define XDISTILL_IMPLEMENTATION                          #include "xdistill.h"
       #include "xdistill.h"                                    #include "xdistill_nccl.h"
       #include "xdistill_nccl.h"                     nvcc app.cu xdistill_cuda.cu -lnccl -lpthread

       cudaSetDevice(local_rank);
       xd_cuda_create(ctx, NULL, &cuda);
       xd_nccl_desc desc = { .rank = rank, .size = size, .host = "node0", .port = "29501", .secret = secret };
       xd_comm_nccl(ctx, &desc, &world);
       ...
       xd_comm_destroy(world);
       xd_cuda_destroy(cuda);

   Data is on the GPU and moves on the context's stream; xd_nccl_desc.compare decides what the host waits for.
   DETERMINISTIC and INVARIANT sums are computed here, in rank order, by the context's kernels: the bits are
   those of the threads transport, with any version of NCCL. Host memory is copied through the GPU, and calls
   with it wait. Needs NCCL 2.18. */
#ifndef XDISTILL_NCCL_H
#define XDISTILL_NCCL_H

#if !defined(XD_VERSION_MAJOR)
#    error "include xdistill.h before xdistill_nccl.h"
#elif XD_VERSION_MAJOR != 0 || XD_VERSION_MINOR != 3
#    error "xdistill_nccl.h belongs to xdistill.h version 0.3: take both from one release"
#endif

/* The exchange of the id needs neither CUDA nor NCCL, and compiles without them: for its test. */
#if !defined(XDISTILL_NCCL_EXCHANGE)
#    include <cuda_runtime.h>
#    include <nccl.h>
#    if NCCL_VERSION_CODE < NCCL_VERSION(2, 18, 0)
#        error "xdistill_nccl.h needs NCCL 2.18"
#    endif
#else
typedef struct ncclUniqueId {
    char internal[128];
} ncclUniqueId;
#endif

#include "nccl/comm_nccl.h"

#endif

#if defined(XDISTILL_IMPLEMENTATION) && !defined(XDISTILL_NCCL_IMPLEMENTED)
#define XDISTILL_NCCL_IMPLEMENTED

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "nccl/exchange.h"
#include "nccl/hash.c"
#include "nccl/exchange_line.c"
#include "nccl/exchange_serve.c"
#include "nccl/exchange_ask.c"
#include "nccl/exchange_file.c"
#include "nccl/exchange.c"

#if !defined(XDISTILL_NCCL_EXCHANGE)
#include "nccl/internal.h"
#include "nccl/history.c"
#include "nccl/wait.c"
#include "nccl/collective.c"
#include "nccl/sum.c"
#include "nccl/call.c"
#include "nccl/messages.c"
#include "nccl/capture.c"
#include "nccl/handle.c"
#include "nccl/join.c"
#endif

#endif
