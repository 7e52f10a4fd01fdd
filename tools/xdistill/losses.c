/* losses.c - plan, room, call. */
#include "losses.h"

/* A loss and what it is called with. */
typedef struct loss_call {
    xd_result (*run)(xd_ctx *ctx, const void *desc, void *values);
    const void *desc;
    xd_loss_common *common; /* in desc */
    void *values;
} loss_call;

static xd_result loss_grow(xd_ctx *ctx, loss_room *room, size_t bytes) {
    if (bytes <= room->bytes) return XD_OK;
    xd_release(ctx, room->memory);
    room->memory = xd_allocate(ctx, bytes);
    room->bytes = room->memory ? bytes : 0;
    XD_REQUIRE(ctx, room->memory, XD_ERROR_MEMORY, "no room for a loss's %zu bytes", bytes);
    return XD_OK;
}

static xd_result loss_in_room(xd_ctx *ctx, loss_room *room, const loss_call *call) {
    xd_planned planned;
    XD_TRY(xd_plan_begin(ctx, NULL));
    XD_TRY(call->run(ctx, call->desc, call->values));
    XD_TRY(xd_plan_end(ctx, &planned));
    XD_TRY(loss_grow(ctx, room, planned.workspace));
    call->common->workspace = room->memory;
    call->common->workspace_bytes = room->bytes;
    return call->run(ctx, call->desc, call->values);
}

static xd_result loss_run_logits(xd_ctx *ctx, const void *desc, void *values) {
    return xd_loss(ctx, (const xd_loss_desc *)desc, (xd_loss_values *)values);
}

static xd_result loss_run_topk(xd_ctx *ctx, const void *desc, void *values) {
    return xd_topk_kl_loss(ctx, (const xd_topk_desc *)desc, (xd_loss_values *)values);
}

static xd_result loss_run_xtoken(xd_ctx *ctx, const void *desc, void *values) {
    return xd_xtoken_loss(ctx, (const xd_xtoken_desc *)desc, (xd_xtoken_values *)values);
}

xd_result loss_of_logits(xd_ctx *ctx, loss_room *room, xd_loss_desc *desc, xd_loss_values *values) {
    const loss_call call = { loss_run_logits, desc, &desc->common, values };
    return loss_in_room(ctx, room, &call);
}

xd_result loss_of_topk(xd_ctx *ctx, loss_room *room, xd_topk_desc *desc, xd_loss_values *values) {
    const loss_call call = { loss_run_topk, desc, &desc->common, values };
    return loss_in_room(ctx, room, &call);
}

xd_result loss_of_xtoken(xd_ctx *ctx, loss_room *room, xd_xtoken_desc *desc, xd_xtoken_values *values) {
    const loss_call call = { loss_run_xtoken, desc, &desc->common, values };
    return loss_in_room(ctx, room, &call);
}
