/* xdistill.h - v0.1.0 - distributed distillation in one C99 header. License at the end of the file.

   In *one* C or C++ file:                          Everywhere else:
       #define XDISTILL_IMPLEMENTATION                  #include "xdistill.h"
       #include "xdistill.h"                        cc -std=c99 -O2 app.c -o app -lm -lpthread

   PURPOSE         Your trainer keeps its own model and its own loop. This header brings what a distributed
                   distillation needs around them: meshes, sharded tensors, losses over a vocabulary and a sequence
                   that are split over ranks, within one tokenizer or across two, AdamW, EMA, safetensors files.
                   Ranks are threads of one process, or processes through a companion header (xdistill_mpi.h).
                   xdistill_cuda.cu, compiled by nvcc beside it, does the arithmetic on a GPU.

   BUILD OPTIONS   XDISTILL_STATIC, XD_API, XD_ASSERT, XD_NO_TOKENIZERS (leaves out the tokenizers and their Unicode
                   tables); all else is a run-time field of a desc struct.
   SHAPES          T tokens, V vocabulary, H hidden, L layers; [T, V/tp] = columns split over axis "tp".
   ERRORS          Every function that can fail returns an xd_result; xd_last_error(ctx) has the message, the place
                   and the rank. Ranks fail alike: no rank is left waiting for one that has refused.
   CONTENTS        search for ">>": one marker a part, declarations first, then the implementation. */

#ifndef XDISTILL_H
#define XDISTILL_H

/* ---- declarations, in the order of the layers ---- */
#include "base/config.h"
#include "base/dtype.h"
#include "base/result.h"
#include "base/memory.h"
#include "base/cpu.h"
#include "base/file.h"
#include "base/context.h"
#include "base/extend.h"
#include "base/half.h"
#include "base/philox.h"
#include "base/publish.h"
#include "base/json.h"
#include "base/crc.h"

#include "kernel/table.h"
#include "kernel/copy.h"
#include "kernel/fixed.h"
#include "kernel/reduce.h"
#include "kernel/loss.h"
#include "kernel/mft.h"
#include "kernel/rows.h"
#include "kernel/softmax.h"
#include "kernel/optimizer.h"
#include "kernel/matmul.h"
#include "kernel/xtoken.h"
#include "kernel/uld.h"
#include "kernel/kernels.h"
#include "kernel/cuda.h"

#include "comm/collective.h"
#include "comm/transport.h"
#include "comm/leaves.h"
#include "comm/topology.h"
#include "comm/mesh.h"

#include "tensor/interval.h"
#include "tensor/layout.h"
#include "tensor/tensor.h"
#include "tensor/redistribute.h"

#include "train/param.h"
#include "train/optimizer.h"
#include "train/clip.h"
#include "train/ema.h"

#include "distill/vocab.h"
#include "distill/denominator.h"
#include "distill/shift.h"
#include "distill/softmax.h"
#include "distill/loss.h"
#include "distill/head.h"
#include "distill/mft.h"
#include "distill/estimator.h"
#include "distill/topk.h"
#include "distill/compat.h"
#include "distill/align.h"
#include "distill/canonical.h"
#include "distill/uld.h"
#include "distill/projection.h"
#include "distill/projection_file.h"
#include "distill/teacher_cache.h"
#include "distill/chunks.h"
#include "distill/project.h"
#include "distill/xtoken.h"
#include "distill/xtoken_route.h"
#include "distill/teacher_route.h"
#ifndef XD_NO_TOKENIZERS
#include "distill/tokenizer.h"
#include "distill/projection_build.h"
#endif

#include "io/safetensors.h"
#include "io/model_files.h"
#include "io/gather.h"

#endif /* XDISTILL_H */

#ifdef XDISTILL_IMPLEMENTATION
#ifndef XDISTILL_IMPLEMENTED
#define XDISTILL_IMPLEMENTED

/* ---- implementation ---- */
#include "base/internal.h"
#include "base/dtype.c"
#include "base/result.c"
#include "base/memory.c"
#include "base/cpu.c"
#include "base/file.c"
#include "base/context.c"
#include "base/half.c"
#include "base/sort.c"
#include "base/philox.c"
#include "base/publish.c"
#include "base/json.c"
#include "base/crc.c"

#include "kernel/internal.h"
#include "kernel/simd.h"
#include "kernel/tiles.h"
#include "kernel/simd_math.h"
#include "kernel/exact.h"
#include "kernel/xtoken_loops.h"
#include "kernel/span.h"
#include "kernel/fixed.c"
#include "kernel/copy_cpu.c"
#include "kernel/reduce_cpu.c"
#include "kernel/loss_cpu.c"
#include "kernel/tiles.c"
#include "kernel/loss_simd.c"
#include "kernel/exact_simd.c"
#include "kernel/topk_cpu.c"
#include "kernel/topk_simd.c"
#include "kernel/rows_cpu.c"
#include "kernel/softmax_cpu.c"
#include "kernel/xtoken_cpu.c"
#include "kernel/uld_cpu.c"
#include "kernel/mft_cpu.c"
#include "kernel/mft_simd.c"
#include "kernel/rows_simd.c"
#include "kernel/xtoken_loops.c"
#include "kernel/xtoken_simd.c"
#include "kernel/uld_simd.c"
#include "kernel/optimizer_cpu.c"
#include "kernel/clip_cpu.c"
#include "kernel/span_portable.c"
#include "kernel/span_avx2.c"
#include "kernel/span_avx512.c"
#include "kernel/optimizer_simd.c"
#include "kernel/reduce_simd.c"
#include "kernel/matmul_cpu.c"
#include "kernel/kernels.c"

#include "comm/internal.h"
#include "comm/collective.c"
#include "comm/self.c"
#include "comm/threads.c"
#include "comm/node.c"
#include "comm/leaves.c"
#include "comm/topology.c"
#include "comm/mesh.c"

#include "tensor/internal.h"
#include "tensor/interval.c"
#include "tensor/layout.c"
#include "tensor/tensor.c"
#include "tensor/redistribute.c"

#include "train/internal.h"
#include "train/optimizer.c"
#include "train/clip.c"
#include "train/ema.c"

#include "distill/internal.h"
#include "distill/vocab.c"
#include "distill/denominator.c"
#include "distill/shift.c"
#include "distill/softmax.c"
#include "distill/reduction.c"
#include "distill/loss.c"
#include "distill/head.c"
#include "distill/mft.c"
#include "distill/estimator.c"
#include "distill/topk.c"
#include "distill/topk_kl.c"
#include "distill/compat.c"
#include "distill/canonical.c"
#include "distill/align.c"
#include "distill/align_dp.c"
#include "distill/align_bytes.c"
#include "distill/uld.c"
#include "distill/votes.c"
#include "distill/special_pairs.c"
#include "distill/projection_rows.c"
#include "distill/projection.c"
#include "distill/projection_file.c"
#include "distill/teacher_cache_internal.h"
#include "distill/teacher_cache.c"
#include "distill/teacher_cache_write.c"
#include "distill/xtoken_internal.h"
#include "distill/chunks.c"
#include "distill/project.c"
#include "distill/xtoken_check.c"
#include "distill/xtoken.c"
#include "distill/xtoken_projected.c"
#include "distill/xtoken_device.c"
#include "distill/xtoken_device_gold.c"
#include "distill/xtoken_device_same.c"
#include "distill/xtoken_device_cached.c"
#include "distill/xtoken_share.c"
#include "distill/xtoken_gold.c"
#include "distill/xtoken_same.c"
#include "distill/xtoken_cached.c"
#include "distill/xtoken_likelihood.c"
#include "distill/xtoken_score.c"
#include "distill/teacher_route_internal.h"
#include "distill/xtoken_route.c"
#include "distill/teacher_route_plan.c"
#include "distill/teacher_route_memory.c"
#include "distill/teacher_route_node.c"
#include "distill/teacher_route.c"
#include "distill/teacher_columns.c"

#ifndef XD_NO_TOKENIZERS
#include "distill/tokenizer_internal.h"
#include "distill/unicode_tables.h"
#include "distill/unicode.c"
#include "distill/pattern.c"
#include "distill/tokenizer.c"
#include "distill/tokenizer_text.c"
#include "distill/tokenizer_encode.c"
#include "distill/tokenizer_json.c"
#include "distill/tokenizer_ranks.c"
#include "distill/tokenizer_sentencepiece.c"
#include "distill/projection_build.c"
#endif

#include "io/internal.h"
#include "io/safetensors.c"
#include "io/model_files.c"
#include "io/gather.c"

#endif /* XDISTILL_IMPLEMENTED */
#endif /* XDISTILL_IMPLEMENTATION */

/* MIT License

   Copyright (c) 2026 xdistill authors

   Permission is hereby granted, free of charge, to any person obtaining a copy
   of this software and associated documentation files (the "Software"), to deal
   in the Software without restriction, including without limitation the rights
   to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
   copies of the Software, and to permit persons to whom the Software is
   furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all
   copies or substantial portions of the Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
   IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
   FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
   AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
   LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
   SOFTWARE. */
