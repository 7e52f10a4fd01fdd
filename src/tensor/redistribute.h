#ifndef XDI_TENSOR_REDISTRIBUTE_H
#define XDI_TENSOR_REDISTRIBUTE_H

#include "tensor/tensor.h"

/* Moves tensors between layouts on one mesh, or two of one world: docs/questions.md. No data passes through a third
 * rank. Partial values are reduced in rank order by xd_reduce_pieces. */

/* Moves `from` to `to`, views of one shape. A rank outside a layout passes the empty view of xd_tensor_view. Device
 * memory, without overlap. Collective over the world. Allocates plan and buffers for the call.
 * Errors: ARGUMENT (dtype; no layout or data), SHAPE or DTYPE (shapes differ; more than 2^63 bytes; view does not fit
 * its layout; cannot be reduced), TOPOLOGY (mesh ranks outside the world), UNSUPPORTED (shard or another op made
 * partial; partial on another mesh; float sum in INVARIANT mode), MISMATCH, MEMORY. On an error `to` is unchanged,
 * unless the exchange itself failed. */
XD_API xd_result xd_redistribute(xd_comm *world, const xd_tensor *from, const xd_tensor *to);

/* Gathers a tensor or a window of it, dense, partial values reduced.
 *
 *    window   [ndim], the same on every rank; NULL -> all
 *    root     rank of `world` that receives; -1 -> every rank of the tensor's mesh
 *    out      the window's elements; NULL elsewhere
 *
 * Ranks outside the mesh pass their empty view. Collective over the world. Receivers allocate staging, bounded by
 * the window. Errors: as xd_redistribute; ARGUMENT (root, window outside the shape). */
XD_API xd_result xd_tensor_gather(xd_comm *world, const xd_tensor *tensor, const xd_interval *window,
                                  int root, void *out);

#endif
