#ifndef XDI_TENSOR_REDISTRIBUTE_H
#define XDI_TENSOR_REDISTRIBUTE_H

#include "tensor/tensor.h"

/* Moves a tensor between layouts on one mesh, or on two meshes of one world.
 *
 * A plan depends on the two layouts only. A rank copies from its own part if it can, or receives from a holder, replicas in
 * turn. No data passes through a third rank; padding is never sent. Partial values are reduced at the destination in rank
 * order by xd_reduce_pieces. If that moves fewer bytes, they are reduced into equal parts and gathered. */

/* Moves the elements of `from` to `to`, views with layouts of one shape; outside a layout pass the view of xd_tensor_view. Memory of
 * the context's device, without overlap.
 *
 * Collective over the world. Allocates the plan and its buffers during the call.
 * Errors: ARGUMENT (dtype; no layout or data), SHAPE or DTYPE (shapes differ; more than 2^63 bytes; view does not fit its
 * layout; cannot be reduced), TOPOLOGY (mesh ranks outside the world), UNSUPPORTED (shard or another op made partial; partial
 * on another mesh; float sum in INVARIANT mode), PEER, MISMATCH, MEMORY. `to` changes only if the exchange itself fails. */
XD_API xd_result xd_redistribute(xd_comm *world, const xd_tensor *from, const xd_tensor *to);

/* Gathers the whole tensor or a window of it, dense, partial values reduced.
 *
 *    window   [ndim] intervals, the same on every rank; NULL -> all
 *    root     the rank that gets it; -1 -> every rank of the tensor's mesh
 *    out      there: the window's elements; NULL elsewhere
 *
 * Ranks outside the mesh pass their empty view. Collective over the world. Receivers allocate staging for what arrives;
 * windows bound it. Errors: as xd_redistribute; ARGUMENT (root, window outside the shape). */
XD_API xd_result xd_tensor_gather(xd_comm *world, const xd_tensor *tensor, const xd_interval *window,
                                  int root, void *out);

#endif
