/* nn_call.h - what passes of networks for a distillation (xd_network) have in common. */
#ifndef NN_CALL_H
#define NN_CALL_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The pass in which the blocks of a call are opened: only a backward that gives weights gradients is one of a micro-batch. */
xd_pass nn_pass_of(const xd_network_call *call, bool backward);

/* Errors: ARGUMENT for more samples than there is room for and, where `slot` is read, for one that there is not. */
xd_result nn_call_check(xd_ctx *ctx, const xd_network_call *call, int64_t samples, int slots, bool slot);

/* Of a backward's slot, which holds so many samples, -1 before its first forward. Errors: STATE for another number, with both. */
xd_result nn_call_check_kept(xd_ctx *ctx, const xd_network_call *call, int64_t kept);

/* Values and gradients of an open block's weights. */
void nn_call_weights(const xd_block_view *view, int count, const float **values, float **gradients);

#ifdef __cplusplus
}
#endif

#endif /* NN_CALL_H */
