/* toy_net.h - a network of points in the plane at a time: 4 hidden layers of 96 with SiLU. It predicts the flow, eps - x0.
 *
 * Its input is the point, and sines and cosines of the time. Each layer is a block with a weight [outputs, inputs] and a bias. */
#ifndef TOY_NET_H
#define TOY_NET_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    TOY_ELEMENTS = 2,
    TOY_WIDTH = 96,
    TOY_LAYERS = 5, /* with the last, which is linear */
    TOY_FREQUENCIES = 8,
    TOY_INPUTS = TOY_ELEMENTS + 2 * TOY_FREQUENCIES,
    TOY_WEIGHTS = 2 * TOY_LAYERS /* tensors */
};

typedef struct toy_net toy_net;

/* The model with its initial values to come from `seed`; sealed. Local. Errors: MEMORY. */
xd_result toy_net_describe(xd_ctx *ctx, uint64_t seed, xd_model **out);

/* Room for passes of up to `samples` samples through a model of toy_net_describe, wrapped or about to be.
 *
 *   slots   forwards that can be kept at the same time
 *
 * Local. Errors: MEMORY; MISSING for another model. */
xd_result toy_net_create(xd_ctx *ctx, const xd_model *model, int64_t samples, int slots, toy_net **out);

/* Passes of it; `condition` is not read. */
xd_network toy_net_network(toy_net *net);

/* NULL is fine. */
void toy_net_destroy(toy_net *net);

#ifdef __cplusplus
}
#endif

#endif /* TOY_NET_H */
