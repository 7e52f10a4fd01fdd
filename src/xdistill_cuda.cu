/* xdistill_cuda.cu - v0.3.0 - the kernels of xdistill on CUDA. License at the end of xdistill.h.

       nvcc -O2 -arch=sm_90 -c xdistill_cuda.cu         (sm_80 on an A100; without -arch: any GPU since sm_75, slower)
       nvcc -O2 -arch=sm_90 app.cu xdistill_cuda.cu     one file of app defines XDISTILL_IMPLEMENTATION

   USE            xd_cuda_create (>>kernel/cuda) gives a context this unit's kernel table: losses, optimizers, averages
                  and collectives of that context then work on device memory. After it no operation allocates, waits or
                  copies to the host: results stay on the device until xd_read.
   NUMERICS       Elementwise operations (AdamW, SGD, averages, casts, scaling) and sums over ranks have the bits of the
                  CPU's kernels. Reductions are deterministic: the same bits on every run and every GPU. Exact sums
                  (INVARIANT) have the CPU's bits as well. Losses compute their terms in f32 and add them in double, so
                  they agree with the CPU's to a few 1e-6; in INVARIANT mode no split changes a bit of the GPU's.
   OPTIONS        XDISTILL_NO_ACROSS and XDISTILL_NO_DIFFUSION, as in xdistill.h, leave out their kernels.
   CONTENTS       search for ">>": the basis of every kernel, then the operations, then the table. */

#include "xdistill.h"

#include "cuda/port.cuh"
#include "cuda/device.cu"
#include "cuda/list.cuh"
#include "cuda/kept.cuh"
#include "cuda/four.cuh"
#include "cuda/copy.cu"
#include "cuda/fill.cu"
#include "cuda/reduce.cu"
#include "cuda/average.cu"
#include "cuda/optimizer.cu"
#include "cuda/matmul.cu"
#include "cuda/matmul_library.cu"
#include "cuda/matmul_cublas.cu"
#include "cuda/loss.cuh"
#include "cuda/ahead.cuh"
#include "cuda/largest.cuh"
#include "cuda/norm.cu"
#include "cuda/loss.cu"
#include "cuda/loss_sweep.cu"
#include "cuda/loss_fused.cu"
#include "cuda/ring.cuh"
#include "cuda/loss_ring.cuh"
#include "cuda/loss_ring_sums.cuh"
#include "cuda/loss_ring_grade.cuh"
#include "cuda/loss_ring_row.cuh"
#include "cuda/loss_ring.cu"
#include "cuda/loss_ring_rows.cu"
#include "cuda/loss_ring_host.cu"
#include "cuda/loss_ring_check.cu"
#include "cuda/sort_ids.cu"
#include "cuda/loss_rows.cu"
#include "cuda/mft.cu"
#include "cuda/estimate.cu"
#include "cuda/loss_softmax.cu"
#include "cuda/topk.cu"
#include "cuda/topk_select.cu"
#include "cuda/topk_few.cu"
#include "cuda/topk_many.cu"
#include "cuda/topk_table.cu"
#ifndef XDISTILL_NO_ACROSS
#include "cuda/xtoken.cu"
#include "cuda/xtoken_project.cu"
#include "cuda/xtoken_divergence.cu"
#include "cuda/xtoken_gradient.cu"
#include "cuda/xtoken_gold.cu"
#include "cuda/xtoken_tile.cu"
#include "cuda/xtoken_tails.cu"
#include "cuda/xtoken_rows.cu"
#include "cuda/xtoken_lists.cu"
#include "cuda/xtoken_chunks.cu"
#include "cuda/uld.cu"
#endif
#ifndef XDISTILL_NO_DIFFUSION
#include "cuda/doubles.cuh"
#include "cuda/dmd.cu"
#include "cuda/in_order.cuh"
#include "cuda/dmd_total.cu"
#include "cuda/dmd_terms.cuh"
#include "cuda/dmd_tile.cuh"
#include "cuda/dmd_loss.cu"
#endif
#include "cuda/table.cu"
