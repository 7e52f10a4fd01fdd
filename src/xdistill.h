/* xdistill.h - v0.3.0 - distributed distillation in one C99 header. License at the end of the file.

   Your trainer keeps its model and its loop. This header adds what a distributed distillation needs: meshes, sharded
   tensors, losses over a split vocabulary and sequence, within one tokenizer or across two, distribution matching of
   diffusion models, DDP, FSDP and pipelines, optimizers, averages, and checkpoints. Ranks are threads of one process,
   processes of one machine, an MPI job (xdistill_mpi.h), or GPUs over NCCL (xdistill_nccl.h). nvcc compiles
   xdistill_cuda.cu for arithmetic on a GPU.

   In *one* C or C++ file of its own:               Everywhere else:
       #define XDISTILL_IMPLEMENTATION                  #include "xdistill.h"
       #include "xdistill.h"                        cc -std=c99 -O2 app.c xdistill.c -o app -lm -lpthread

   A program, without its declarations and its checks of results (XD_TRY):

       xd_ctx_create(NULL, &ctx);
       xd_vocab_create(ctx, &(xd_vocab_desc){ .size = 50257, .tp = tp }, &vocab); // tp: ranks that share the vocabulary
       xd_loss_desc loss = { .student = { logits, XD_DTYPE_F32, tokens, columns }, .vocab = vocab };
       loss.teacher = (xd_rows){ teacher_logits, XD_DTYPE_BF16, tokens, columns };
       loss.soft_weight = 1.0;                                // forward KL from the teacher
       loss.temperature = 2.0;
       loss.common.gradient = loss.student;                   // over the student's logits: no extra memory
       xd_loss(ctx, &loss, &values);                          // values.loss, and d loss / d logits for your backward pass
       xd_optimizer_step(adamw, NULL, NULL);                  // over your own parameters: xd_optimizer_create

   OPTIONS   XDISTILL_STATIC, XDISTILL_DEBUG, XDISTILL_PORTABLE, XD_API, XD_ASSERT; other settings are run-time fields of desc structs.
             XDISTILL_NO_ACROSS leaves out tokenizers, teachers and losses across tokenizers. XDISTILL_NO_MODELS leaves
             out models, wrappers, checkpoints and xd_dmd_step; XDISTILL_NO_DIFFUSION leaves out diffusion models. Their
             kernels go with them. A call of what was left out is an error that names the option.
   SECTIONS  The implementation also compiles as objects that link into the same library: define XDISTILL_SECTION too,
             as 1 (kernels), 2 (vector kernels), 3 (core), 4 (across), 5 (models), 6 (diffusion), all with the same
             options. An undefined symbol xdistill_section_N_... names a section that is missing, or that has other
             options or another version.
   SHAPES    T tokens, V vocabulary, H hidden, L layers; [T, V/tp] = columns split over axis "tp".
   ERRORS    A call that can fail returns an xd_result. xd_last_error(ctx) has the message with its numbers, the place and
             the rank. A call checks its arguments before data moves; if a check fails, outputs are unchanged.
   RANKS     All ranks of a group make a collective call, in one order; a local call is one rank's own. If a rank refuses
             a collective, the other ranks return PEER with its message. If a rank does not come, they return TIMEOUT at
             the deadline, and the group is broken: later calls return PEER. Comments do not repeat these errors.
   NULL      A required pointer, path or desc that is NULL, or a count without its list, is ARGUMENT with its name in the
             message. A NULL context or object is ARGUMENT without one. A comment says where NULL is legal
             ("NULL -> defaults", "may be NULL"); _destroy and _close accept it. A call that returns no xd_result needs
             a valid object, which XD_ASSERT checks.
   ZERO      Set a desc to zero, then fill it in. A field of 0 is 0, or what its comment says where 0 has no meaning.
             Recipes are functions that return a filled desc, such as xd_adamw_defaults.
   MEMORY    A list of xd_param outlives its optimizers and averages; a group or a model outlives what was made over it.
             A call reads the other pointers of a desc only until it returns, unless a comment says more. Destroy in the
             reverse order of creation, the context last.
   CONTENTS  Search for ">>": each part has one marker. First come the calls of programs, in the order of their use. From
             "for back ends" on come those of devices, transports and companions, then the implementation. */

#ifndef XDISTILL_H
#define XDISTILL_H

/* ---- for users, in the order in which they meet it ---- */

/* Results and contexts. */
#include "base/config.h"
#include "base/result.h"
#include "base/dtype.h"
#include "base/half.h"
#include "base/memory.h"
#include "base/cpu.h"
#include "base/file.h"
#include "base/parallel.h"
#include "base/context.h"
#include "base/fail.h"
#include "base/plan.h"
#include "base/philox.h"
#include "kernel/types.h"
#include "kernel/cuda.h"

/* Ranks and meshes. */
#include "comm/collective.h"
#include "comm/processes.h"
#include "comm/leaves.h"
#include "comm/topology.h"
#include "comm/mesh.h"
#include "comm/queue.h"
#include "comm/launch.h"

/* Tensors. */
#include "tensor/region.h"
#include "tensor/layout.h"
#include "tensor/tensor.h"
#include "tensor/part.h"
#include "tensor/fill.h"
#include "tensor/redistribute.h"
#include "tensor/halo.h"
#include "tensor/crossing.h"

/* Losses. */
#include "loss/vocab.h"
#include "loss/common.h"
#include "loss/denominator.h"
#include "loss/shift.h"
#include "loss/loss.h"
#include "loss/head.h"
#include "loss/topk.h"
#include "loss/softmax.h"
#include "loss/estimator.h"

/* Tokenizers and alignment. */
#include "base/text.h"
#ifndef XDISTILL_NO_ACROSS
#include "text/tokenizer.h"
#include "align/align.h"
#include "align/projection.h"
#include "align/projection_file.h"
#include "align/projection_build.h"
#include "align/project.h"

/* Teachers. */
#include "teacher/cache.h"
#include "teacher/route.h"
#include "xtoken/xtoken.h"
#include "xtoken/uld.h"
#endif

/* Training. */
#include "train/param.h"
#include "train/optimizer.h"
#include "train/clip.h"
#include "train/ema.h"
#include "train/post_hoc.h"

/* Files. */
#include "base/directory.h"
#include "io/weights.h"
#include "io/gather.h"

/* Models. */
#ifndef XDISTILL_NO_MODELS
#include "model/model.h"
#include "model/pass.h"
#include "model/recompute.h"
#include "model/groups.h"
#include "model/parallel.h"
#include "model/build.h"
#include "model/pipeline.h"
#include "model/plan.h"

/* Checkpoints. */
#include "checkpoint/checkpoint.h"
#include "checkpoint/saver.h"
#include "checkpoint/full.h"
#include "checkpoint/inherit.h"
#include "checkpoint/map.h"
#endif

/* Distillation of diffusion models. */
#include "kernel/dmd_types.h"
#ifndef XDISTILL_NO_DIFFUSION
#include "dmd/noise_schedule.h"
#include "dmd/convert.h"
#include "dmd/times.h"
#include "dmd/draw.h"
#include "dmd/samples.h"
#include "dmd/vsd.h"
#include "dmd/denoise.h"
#include "dmd/gan.h"
#include "dmd/pack.h"
#ifndef XDISTILL_NO_MODELS
#include "dmd/network.h"
#include "dmd/dmd.h"
#include "dmd/record.h"
#include "dmd/sampler.h"
#include "dmd/fake_score.h"
#endif
#endif

/* ---- for back ends ---- */

/* Kernel tables, transports, whole files, JSON and the formulas that devices share: for authors of a device, a transport or a
 * companion header. They may change in any minor version until 1.0. */
#include "base/extend.h"
#include "base/scalar.h"
#include "base/philox_scalar.h"
#include "base/publish.h"
#include "base/json.h"
#include "base/crc.h"
#include "kernel/ids.h"
#include "kernel/copy.h"
#include "kernel/fill.h"
#include "kernel/fixed.h"
#include "kernel/shard.h"
#include "kernel/reduce.h"
#include "kernel/loss.h"
#include "kernel/loss_scalar.h"
#include "kernel/topk.h"
#include "kernel/topk_scalar.h"
#include "kernel/mft.h"
#include "kernel/mft_scalar.h"
#include "kernel/rows.h"
#include "kernel/softmax.h"
#include "kernel/softmax_scalar.h"
#include "kernel/optimizer.h"
#include "kernel/optimizer_scalar.h"
#include "kernel/matmul.h"
#include "kernel/xtoken.h"
#include "kernel/xtoken_scalar.h"
#include "kernel/estimate.h"
#include "kernel/estimate_scalar.h"
#include "kernel/uld.h"
#include "kernel/uld_scalar.h"
#include "kernel/dmd.h"
#include "kernel/dmd_scalar.h"
#include "kernel/dmd_loss.h"
#include "kernel/dmd_loss_scalar.h"
#include "kernel/kernels.h"
#include "comm/transport.h"
#include "tensor/interval.h"

/* ---- left out by an option: tools/amalgamate.py lists it here ---- */

#endif /* XDISTILL_H */

#ifdef XDISTILL_IMPLEMENTATION
#ifndef XDISTILL_IMPLEMENTED
#define XDISTILL_IMPLEMENTED

/* ---- implementation ---- */
#include "base/section.h"
#include "base/live.h"
#include "base/internal.h"
#include "base/publish_internal.h"
#include "base/dtype.c"
#include "base/result.c"
#include "base/memory.c"
#include "base/cpu.c"
#include "base/floats.c"
#include "base/file.c"
#include "base/fork.c"
#include "base/parallel.c"
#include "base/live.c"
#include "base/context.c"
#include "base/half.c"
#include "base/sort.c"
#include "base/philox.c"
#include "base/lock.c"
#include "base/publish.c"
#include "base/directory.c"
#include "base/json.c"
#include "base/crc.c"

#include "kernel/internal.h"
#include "kernel/span.h"
#include "kernel/cells.h"
#include "kernel/fixed.c"
#include "kernel/spread.c"
#include "kernel/cells.c"
#include "kernel/cpu/internal.h"
#include "kernel/cpu/exact.h"
#include "kernel/cpu/exact.c"
#include "kernel/cpu/copy.c"
#include "kernel/cpu/fill.c"
#include "kernel/cpu/reduce.c"
#include "kernel/cpu/loss.c"
#include "kernel/cpu/topk.c"
#include "kernel/cpu/rows.c"
#include "kernel/cpu/softmax.c"
#include "kernel/cpu/estimate.c"
#include "kernel/cpu/mft.c"
#include "kernel/cpu/span.c"
#include "kernel/cpu/norm.c"
#include "kernel/cpu/optimizer.c"
#include "kernel/cpu/clip.c"
#include "kernel/cpu/matmul.h"
#include "kernel/cpu/matmul.c"
#include "kernel/simd/internal.h"
#include "kernel/simd/simd.h"
#include "kernel/simd/tiles.h"
#ifndef XDISTILL_NO_ACROSS
#include "kernel/simd/xtoken_loops.h"
#include "kernel/simd/across.h"
#endif
#include "kernel/simd/loops.h"
#include "kernel/simd/rest.c"
#include "kernel/simd/portable.c"
#include "kernel/simd/avx2.c"
#include "kernel/simd/avx512.c"
#include "kernel/simd/span_portable.c"
#include "kernel/simd/span_avx2.c"
#include "kernel/simd/span_avx512.c"
#include "kernel/simd/matmul_avx.c"
#include "kernel/simd/levels.c"
#include "kernel/simd/matmul.c"
#include "kernel/simd/tiles.c"
#include "kernel/simd/exact.c"
#include "kernel/simd/loss.c"
#include "kernel/simd/topk.c"
#include "kernel/simd/mft.c"
#include "kernel/simd/rows.c"
#include "kernel/simd/reduce.c"
#include "kernel/wings.h"
#include "kernel/kernels.c"

#ifndef XDISTILL_NO_ACROSS
#include "kernel/cpu/xtoken.h"
#include "kernel/cpu/xtoken.c"
#include "kernel/cpu/xtoken_gradient.c"
#include "kernel/cpu/xtoken_chunks.c"
#include "kernel/cpu/xtoken_gold.c"
#include "kernel/cpu/xtoken_rows.c"
#include "kernel/cpu/xtoken_lists.c"
#include "kernel/cpu/xtoken_table.c"
#include "kernel/cpu/uld.h"
#include "kernel/cpu/uld.c"
#include "kernel/simd/xtoken_rest.c"
#include "kernel/simd/xtoken.c"
#include "kernel/simd/uld.c"
#include "kernel/across.c"
#endif

#ifndef XDISTILL_NO_DIFFUSION
#include "kernel/cpu/dmd.h"
#include "kernel/cpu/dmd.c"
#include "kernel/cpu/dmd_loss.h"
#include "kernel/cpu/dmd_loss.c"
#include "kernel/simd/dmd.h"
#include "kernel/simd/dmd.c"
#include "kernel/simd/dmd_loss.c"
#include "kernel/simd/dmd_tiles.c"
#include "kernel/diffusion.c"
#endif

#include "comm/topology_internal.h"
#include "comm/internal.h"
#include "comm/record.c"
#include "comm/collective.c"
#include "comm/transport.c"
#include "comm/self.c"
#include "comm/threads_internal.h"
#include "comm/threads_wait.c"
#include "comm/threads_move.c"
#include "comm/threads_messages.c"
#include "comm/threads.c"
#include "comm/run_threads.c"
#include "comm/node.c"
#include "comm/job.h"
#include "comm/job.c"
#include "comm/job_shrink.c"
#include "comm/processes_internal.h"
#include "comm/processes_wait.c"
#include "comm/processes_messages.c"
#include "comm/processes.c"
#include "comm/leaves.c"
#include "comm/topology.c"
#include "comm/mesh.c"
#include "comm/facts.c"
#include "comm/queue.c"
#include "comm/launch.c"

#include "tensor/interval_internal.h"
#include "tensor/internal.h"
#include "tensor/interval.c"
#include "tensor/layout.c"
#include "tensor/tensor.c"
#include "tensor/redistribute_internal.h"
#include "tensor/redistribute.c"
#include "tensor/fill.c"
#include "tensor/runs.c"
#include "tensor/halo_internal.h"
#include "tensor/halo_map.c"
#include "tensor/halo_cells.c"
#include "tensor/halo_plan.c"
#include "tensor/halo.c"
#include "tensor/crossing.c"

#include "train/internal.h"
#include "train/param.c"
#include "train/clip.c"
#include "train/ema_internal.h"
#include "train/ema.c"
#include "train/ema_state.c"
#include "train/post_hoc.c"
#include "train/optimizer.c"

#include "io/safetensors_internal.h"
#include "io/internal.h"
#include "io/safetensors.c"
#include "io/safetensors_writer.c"
#include "io/written.c"
#include "io/weights_files.c"
#include "io/weights_reader.c"
#include "io/weights_writer.c"
#include "io/gather.c"

#include "loss/internal.h"
#include "loss/vocab.c"
#include "loss/denominator.c"
#include "loss/shift.c"
#include "loss/softmax.c"
#include "loss/reduction.c"
#include "loss/loss.c"
#include "loss/head.c"
#include "loss/mft.c"
#include "loss/estimator.c"
#include "loss/topk.c"
#include "loss/columns.c"
#include "loss/topk_kl.c"

#ifndef XDISTILL_NO_MODELS
#include "model/describe_internal.h"
#include "model/build_internal.h"
#include "model/pipeline_internal.h"
#include "model/place_internal.h"
#include "model/buckets_internal.h"
#include "model/store_internal.h"
#include "model/step_internal.h"
#include "model/parallel_internal.h"
#include "model/finish_internal.h"
#include "model/model.c"
#include "model/model_seal.c"
#include "model/model_storage.c"
#include "model/model_init.c"
#include "model/model_agree.c"
#include "model/buckets.c"
#include "model/parallel_place.c"
#include "model/parallel_spectral.c"
#include "model/parallel_units.c"
#include "model/parallel_order.c"
#include "model/parallel_state.c"
#include "model/parallel_replicas.c"
#include "model/parallel_experts.c"
#include "model/parallel_flat.c"
#include "model/parallel_flight.c"
#include "model/parallel_values.c"
#include "model/parallel_gradient.c"
#include "model/parallel_host.c"
#include "model/parallel.c"
#include "model/plan.c"
#include "model/pass.c"
#include "model/recompute.c"
#include "model/groups.c"
#include "model/build_place.c"
#include "model/build_list.c"
#include "model/build_settings.c"
#include "model/build_casts.c"
#include "model/build_precision.c"
#include "model/build_values.c"
#include "model/build.c"
#include "model/pipeline_table.c"
#include "model/pipeline_program.c"
#include "model/pipeline_run.c"
#include "model/parallel_reduce.c"
#include "model/pipeline_finish.c"

#include "checkpoint/internal.h"
#include "checkpoint/rounds.c"
#include "checkpoint/fingerprint.c"
#include "checkpoint/content.c"
#include "checkpoint/cover.c"
#include "checkpoint/plan.c"
#include "checkpoint/hand.c"
#include "checkpoint/write.c"
#include "checkpoint/state.c"
#include "checkpoint/manifest.c"
#include "checkpoint/find.c"
#include "checkpoint/save.c"
#include "checkpoint/saver.c"
#include "checkpoint/read.c"
#include "checkpoint/load.c"
#include "checkpoint/full.c"
#include "checkpoint/move.c"
#include "checkpoint/inherit.c"
#include "checkpoint/map_internal.h"
#include "checkpoint/map_plan.c"
#include "checkpoint/map_boxes.c"
#include "checkpoint/map_pieces.c"
#include "checkpoint/map.c"
#include "checkpoint/verify.c"
#endif

#ifndef XDISTILL_NO_ACROSS
#include "text/internal.h"
#include "text/unicode_tables.h"
#include "text/unicode.c"
#include "text/pattern.c"
#include "text/tokenizer.c"
#include "text/tokenizer_text.c"
#include "text/tokenizer_encode.c"
#include "text/tokenizer_batch.c"
#include "text/tokenizer_json.c"
#include "text/tokenizer_ranks.c"
#include "text/tokenizer_sentencepiece.c"
#include "text/tokenizer_load.c"

#include "align/internal.h"
#include "align/chunks.h"
#include "align/rows.h"
#include "align/align.c"
#include "align/align_bytes.c"
#include "align/votes.c"
#include "align/special_pairs.c"
#include "align/projection_rows.c"
#include "align/projection.c"
#include "align/projection_file.c"
#include "align/chunks.c"
#include "align/project.c"
#include "align/projection_build.c"

#include "teacher/internal.h"
#include "teacher/cache.c"
#include "teacher/cache_draw.c"
#include "teacher/cache_write.c"
#include "teacher/route_internal.h"
#include "teacher/route_plan.c"
#include "teacher/route_slots.c"
#include "teacher/route_node.c"
#include "teacher/route_memory.c"
#include "teacher/route.c"

#include "xtoken/internal.h"
#include "xtoken/teacher.c"
#include "xtoken/cells.c"
#include "xtoken/share.c"
#include "xtoken/work.c"
#include "xtoken/projected.c"
#include "xtoken/gold.c"
#include "xtoken/same.c"
#include "xtoken/cached.c"
#include "xtoken/likelihood.c"
#include "xtoken/kinds.c"
#include "xtoken/check.c"
#include "xtoken/layout.c"
#include "xtoken/score.c"
#include "xtoken/rows.c"
#include "xtoken/xtoken.c"
#include "xtoken/uld.c"

#include "compat/canonical.h"
#include "compat/canonical.c"
#include "compat/align_dp.h"
#include "compat/align_dp.c"
#include "compat/compat.h"
#include "compat/compat.c"
#include "compat/uld_chunks.h"
#include "compat/uld_chunks.c"
#include "compat/route_plan.h"
#include "compat/route_plan.c"
#endif

#ifndef XDISTILL_NO_DIFFUSION
#include "dmd/internal.h"
#include "dmd/noise_schedule.c"
#include "dmd/convert.c"
#include "dmd/times.c"
#include "dmd/draw.c"
#include "dmd/losses.h"
#include "dmd/samples.c"
#include "dmd/vsd.c"
#include "dmd/denoise.c"
#include "dmd/gan.c"
#include "dmd/fdistill.h"
#include "dmd/fdistill.c"
#include "dmd/pack.c"
#ifndef XDISTILL_NO_MODELS
#include "dmd/state.h"
#include "dmd/settings.c"
#include "dmd/dmd.c"
#include "dmd/tensors.c"
#include "dmd/ratios.c"
#include "dmd/guidance.c"
#include "dmd/walk.c"
#include "dmd/input.c"
#include "dmd/micro_batch.c"
#include "dmd/adversary.c"
#include "dmd/terms.c"
#include "dmd/warm_up.c"
#include "dmd/step.c"
#include "dmd/record.c"
#include "dmd/sampler.c"
#include "dmd/fake_score_internal.h"
#include "dmd/fake_score.c"
#include "dmd/fake_score_source.c"
#include "dmd/fake_score_meta.c"
#endif
#endif

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
