/* losses.h - losses of the library in a workspace that grows when one needs more. */
#ifndef LOSSES_H
#define LOSSES_H

#include "xdistill.h"

/* A workspace; zero it first. Free `memory` with xd_release. */
typedef struct loss_room {
    void *memory;
    size_t bytes;
} loss_room;

/* Each plans its call, makes room and calls. The workspace of `desc` is set. Errors: those of the loss; MEMORY. */
xd_result loss_of_logits(xd_ctx *ctx, loss_room *room, xd_loss_desc *desc, xd_loss_values *values);
xd_result loss_of_topk(xd_ctx *ctx, loss_room *room, xd_topk_desc *desc, xd_loss_values *values);
xd_result loss_of_xtoken(xd_ctx *ctx, loss_room *room, xd_xtoken_desc *desc, xd_xtoken_values *values);

#endif /* LOSSES_H */
