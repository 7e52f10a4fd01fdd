/* First values of weights. */

#include "model/describe_internal.h"
#include "comm/topology.h"
#include "tensor/fill.h"
#include "tensor/internal.h"

#include <string.h>

/* A sequence of random numbers for each name; the copies of an embedding, which have different ones, share theirs. */
static xd_philox xdi_weight_random(const xd_weight *weight) {
    const char *name = weight->desc.traits.shared_embedding ? "shared_embedding" : weight->name;
    const uint64_t key = xd_hash(0, name, strlen(name));
    xd_philox random;
    memset(&random, 0, sizeof random);
    random.seed = weight->model->desc.seed;
    random.stream = XD_STREAM_INIT;
    random.sample = (uint32_t)(key & 0xffffffffu);
    random.step = (uint32_t)(key >> 32);
    return random;
}

XD_PRIVATE xd_result xdi_weight_fill(xd_ctx *ctx, const xd_weight *weight, xd_interval range, void *to) {
    const xd_weight_desc *d = &weight->desc;
    const xd_philox random = xdi_weight_random(weight);
    int64_t inside = 1; /* rows beyond shape[0] are padding */
    xd_tensor_part part;
    memset(&part, 0, sizeof part);
    for (int i = 0; i < d->ndim; i++) inside *= d->shape[i];
    xdi_weight_stored_shape(d, part.shape);
    part.name = weight->name;
    part.dtype = d->dtype;
    part.ndim = d->ndim;
    part.region = &weight->region;
    part.range = range;
    part.data = to;
    return xdi_part_fill(ctx, &part, &d->init, &random, inside);
}

XD_API xd_result xd_model_init_weights(xd_model *model) {
    XDI_LIVE(xd_model, model);
    XDI_GIVEN(model ? model->ctx : NULL, model);
    XD_TRY(xdi_model_require_storage(model));
    for (int64_t i = 0; i < model->weight_count; i++) {
        xd_weight *weight = model->weights[i];
        const xd_interval all = { 0, weight->count };
        if (weight->owner != weight || weight->ready) continue;
        if (!weight->awaited || weight->desc.value)
            XD_TRY(xdi_weight_fill(model->ctx, weight, all, weight->value));
        weight->ready = true;
    }
    return XD_OK;
}
