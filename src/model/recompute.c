/* Inputs of blocks whose forward runs again. */

#include "model/recompute.h"
#include "base/internal.h"
#include "kernel/internal.h"
#include "model/describe_internal.h"

#include <string.h>

static int64_t xdi_inputs_blocks(const xd_model *model) {
    int64_t count = 0;
    for (const xd_block *b = &model->root; b && model->sealed; b = xdi_block_after(b))
        count += b->desc.recompute;
    return count;
}

static int64_t xdi_inputs_in_flight(const xd_inputs_desc *d) {
    return d->in_flight > 0 ? d->in_flight : 1;
}

static size_t xdi_inputs_step(const xd_inputs_desc *d) {
    return (d->bytes + XD_ARENA_ALIGNMENT - 1) / XD_ARENA_ALIGNMENT * XD_ARENA_ALIGNMENT;
}

/* Bytes of all inputs; false when they cannot be counted. */
static bool xdi_inputs_size(const xd_model *model, const xd_inputs_desc *d, size_t *bytes) {
    const size_t places = (size_t)(xdi_inputs_blocks(model) * xdi_inputs_in_flight(d));
    return d->bytes < SIZE_MAX / 2 && xdi_size_multiply(places, xdi_inputs_step(d), bytes) &&
           *bytes < SIZE_MAX / 2;
}

XD_PRIVATE xd_memory_bytes xdi_inputs_bytes(const xd_model *model, const xd_inputs_desc *desc) {
    const size_t places = (size_t)(xdi_inputs_blocks(model) * xdi_inputs_in_flight(desc));
    const xd_memory_bytes none = { 0, 0 };
    size_t data = 0;
    if (places == 0) return none;
    if (!xdi_inputs_size(model, desc, &data)) data = SIZE_MAX / 2;
    return xdi_memory_of(model->ctx, sizeof(xd_inputs) + places * sizeof(int64_t), data);
}

static xd_result xdi_inputs_check(const xd_model *model, const xd_inputs_desc *d) {
    XD_REQUIRE(model->ctx, model->sealed && !model->inputs, XD_ERROR_STATE,
               "inputs of a model of %lld weights that %s", (long long)model->weight_count,
               model->sealed ? "has inputs already" : "is not sealed");
    XD_REQUIRE(model->ctx, d->bytes > 0 && d->in_flight >= 0, XD_ERROR_ARGUMENT,
               "inputs of %llu bytes, %d of them in flight", (unsigned long long)d->bytes, d->in_flight);
    XD_REQUIRE(model->ctx, xdi_inputs_blocks(model) > 0, XD_ERROR_ARGUMENT,
               "inputs of a model of %lld weights of which no block is recomputed",
               (long long)model->weight_count);
    return XD_OK;
}

XD_API xd_result xd_inputs_create(xd_model *model, const xd_inputs_desc *desc, xd_inputs **out) {
    XDI_LIVE(xd_model, model);
    XDI_GIVEN_IN_PLAN(model ? model->ctx : NULL, model, desc, out);
    XD_TRY(xdi_inputs_check(model, desc));
    xd_ctx *ctx = model->ctx;
    const int64_t count = xdi_inputs_blocks(model), in_flight = xdi_inputs_in_flight(desc);
    const size_t places = (size_t)(count * in_flight), step = xdi_inputs_step(desc);
    size_t data = 0;
    XD_REQUIRE(ctx, xdi_inputs_size(model, desc, &data), XD_ERROR_MEMORY,
               "no room for %llu inputs of %llu bytes", (unsigned long long)places,
               (unsigned long long)desc->bytes);
    if (xdi_plan_is_open(ctx)) {
        *out = NULL;
        return xdi_plan_add(ctx, xdi_inputs_bytes(model, desc));
    }
    xd_inputs *inputs = XDI_OBJECT(xd_inputs, ctx, sizeof *inputs + places * sizeof *inputs->micro_batches);
    unsigned char *memory = inputs ? (unsigned char *)xd_ctx_kernels(ctx)->memory.allocate(ctx, data) : NULL;
    if (!memory) xd_release(ctx, inputs);
    XD_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for %llu inputs of %llu bytes",
               (unsigned long long)places, (unsigned long long)desc->bytes);
    inputs->model = model;
    inputs->bytes = desc->bytes;
    inputs->step = step;
    inputs->in_flight = in_flight;
    inputs->count = count;
    inputs->memory = memory;
    inputs->micro_batches = (int64_t *)(void *)(inputs + 1);
    xdi_inputs_forget(inputs);
    int64_t at = 0;
    for (xd_block *b = &model->root; b; b = xdi_block_after(b)) b->input = b->desc.recompute ? at++ : -1;
    model->inputs = inputs;
    *out = inputs;
    return XD_OK;
}

XD_API void xd_inputs_destroy(xd_inputs *inputs) {
    if (!inputs || XDI_IS_GONE(xd_inputs, inputs)) return;
    xd_ctx *ctx = inputs->model->ctx;
    inputs->model->inputs = NULL;
    xd_ctx_kernels(ctx)->memory.release(ctx, inputs->memory);
    xd_release(ctx, inputs);
}

/* ---- use ---- */

static const char *xdi_pass_name(const xd_block *b) {
    static const char *const names[] = { "a forward", "a backward", "a recomputation", "an inference" };
    return b->open ? names[b->passes[b->open - 1].kind] : "nothing";
}

static xd_result xdi_inputs_check_block(const xd_block *b, int64_t micro_batch, bool keeps) {
    const xd_model *model = b->model;
    const char *what = keeps ? "to keep" : "to recompute";
    XD_REQUIRE(model->ctx, model->inputs, XD_ERROR_STATE,
               "micro-batch %lld of block \"%.80s\" is %s, and the model has no inputs",
               (long long)micro_batch, b->name, what);
    XD_REQUIRE(model->ctx, b->desc.recompute, XD_ERROR_STATE,
               "micro-batch %lld of block \"%.80s\" is %s, and the block was described without recompute",
               (long long)micro_batch, b->name, what);
    XD_REQUIRE(model->ctx, micro_batch >= 0, XD_ERROR_ARGUMENT, "micro-batch %lld of block \"%.80s\"",
               (long long)micro_batch, b->name);
    return XD_OK;
}

/* The place of a micro-batch's input, or of -1 a free one; -1 for none. */
static int64_t xdi_inputs_find(const xd_inputs *inputs, const xd_block *b, int64_t micro_batch) {
    const int64_t first = b->input * inputs->in_flight;
    for (int64_t i = first; i < first + inputs->in_flight; i++)
        if (inputs->micro_batches[i] == micro_batch) return i;
    return -1;
}

XD_API xd_result xd_inputs_keep(xd_block *block, int64_t micro_batch, const void *input, size_t bytes) {
    XDI_LIVE(xd_block, block);
    XDI_GIVEN(block ? block->model->ctx : NULL, block);
    XDI_GIVEN_LIST(block->model->ctx, input, bytes);
    xd_ctx *ctx = block->model->ctx;
    xd_inputs *inputs = block->model->inputs;
    XD_TRY(xdi_inputs_check_block(block, micro_batch, true));
    XD_REQUIRE(
        ctx, block->open && block->passes[block->open - 1].kind == XD_PASS_FORWARD, XD_ERROR_STATE,
        "micro-batch %lld of block \"%.80s\" is to keep, and the block is open for %s instead of a forward",
        (long long)micro_batch, block->name, xdi_pass_name(block));
    XD_REQUIRE(ctx, bytes <= inputs->bytes, XD_ERROR_ARGUMENT,
               "an input of %llu bytes of block \"%.80s\", planned are %llu", (unsigned long long)bytes,
               block->name, (unsigned long long)inputs->bytes);
    XD_REQUIRE(ctx, xdi_inputs_find(inputs, block, micro_batch) < 0, XD_ERROR_STATE,
               "the input of micro-batch %lld of block \"%.80s\" is kept already", (long long)micro_batch,
               block->name);
    const int64_t at = xdi_inputs_find(inputs, block, -1);
    XD_REQUIRE(ctx, at >= 0, XD_ERROR_STATE,
               "micro-batch %lld of block \"%.80s\" is to keep, and %lld are in flight, that of micro-batch "
               "%lld among them",
               (long long)micro_batch, block->name, (long long)inputs->in_flight,
               (long long)inputs->micro_batches[block->input * inputs->in_flight]);
    const xd_launch launch = xd_ctx_launch(ctx);
    XD_TRY(xd_ctx_kernels(ctx)->memory.copy(&launch, inputs->memory + (size_t)at * inputs->step, input, bytes,
                                            XD_COPY_ON_DEVICE));
    inputs->micro_batches[at] = micro_batch;
    inputs->last = block;
    inputs->last_micro_batch = micro_batch;
    return XD_OK;
}

/* Under a wrapper the weights are there while the backward is open. */
static xd_result xdi_recompute_check(const xd_block *b, int64_t micro_batch) {
    const xd_pass *pass = b->open ? &b->passes[b->open - 1] : NULL;
    const bool backward = pass && pass->kind == XD_PASS_BACKWARD;
    XD_TRY(xdi_inputs_check_block(b, micro_batch, false));
    XD_REQUIRE(b->model->ctx, backward || (!b->model->parallel && !pass), XD_ERROR_STATE,
               "micro-batch %lld of block \"%.80s\" is to recompute, and the block is open for %s instead of "
               "a backward",
               (long long)micro_batch, b->name, xdi_pass_name(b));
    XD_REQUIRE(b->model->ctx, !backward || pass->micro_batch == micro_batch, XD_ERROR_STATE,
               "micro-batch %lld of block \"%.80s\" is to recompute in a backward of micro-batch %lld",
               (long long)micro_batch, b->name, (long long)pass->micro_batch);
    return XD_OK;
}

XD_API xd_result xd_recompute(xd_block *block, int64_t micro_batch, xd_forward forward) {
    XDI_LIVE(xd_block, block);
    XDI_GIVEN(block ? block->model->ctx : NULL, block);
    xd_inputs *inputs = block->model->inputs;
    xd_block_view view;
    XD_TRY(xdi_recompute_check(block, micro_batch));
    const int64_t at = xdi_inputs_find(inputs, block, micro_batch);
    XD_REQUIRE(block->model->ctx, at >= 0, XD_ERROR_STATE,
               "no input of micro-batch %lld of block \"%.80s\" is kept; the last one was of micro-batch "
               "%lld of \"%.80s\"",
               (long long)micro_batch, block->name, (long long)(inputs->last ? inputs->last_micro_batch : -1),
               inputs->last ? inputs->last->name : "");
    XD_TRY(xdi_block_show_values(block, &view));
    const xd_result result = forward.run(forward.user, &view, inputs->memory + (size_t)at * inputs->step);
    if (result == XD_OK) inputs->micro_batches[at] = -1;
    return result;
}
