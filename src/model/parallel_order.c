/* The order of brackets: a rolling hash of those of a step, which ranks compare at its end, and the last of them, to say where
 * orders part. */

#include "base/internal.h"
#include "comm/mesh.h"
#include "model/step_internal.h"

#include <inttypes.h>
#include <string.h>

XD_PRIVATE void xdi_order_add(xdi_order *order, const xd_block *block, xd_pass pass, bool skipped) {
    const int kind = skipped ? XDI_OPENING_SKIP : pass.more ? XDI_OPENING_MORE : (int)pass.kind;
    const int64_t facts[] = { block->first, block->count, kind, pass.micro_batch };
    xdi_opening *o = &order->openings[order->opening_count++ % XDI_OPENINGS];
    order->signature = xd_hash(order->signature, facts, sizeof facts);
    order->signature = xd_hash(order->signature, block->name, strlen(block->name));
    o->signature = order->signature;
    o->block = block;
    o->kind = kind;
    o->micro_batch = pass.micro_batch;
}

/* ---- where orders part ---- */

/* What the ranks of a group have done by themselves and together. */
typedef struct xdi_order_search {
    const xdi_order *order;
    const xd_model *model;
    xd_comm *comm;
    int64_t min, max; /* brackets of the ranks with fewest and most */
    int64_t at;       /* the first that is not the same on all ranks, as far back as is kept; min: none among
                 * these */
} xdi_order_search;

static xd_result xdi_order_find(xdi_order_search *s) {
    int64_t counts[] = { s->order->opening_count, ~s->order->opening_count }, seen[2 * XDI_OPENINGS];
    XD_TRY(xd_all_reduce(s->comm, counts, counts, 2, XD_DTYPE_I64, XD_MAX));
    s->max = counts[0];
    s->min = ~counts[1];
    const int64_t begin = s->max > XDI_OPENINGS ? s->max - XDI_OPENINGS : 0;
    memset(seen, 0, sizeof seen);
    for (int64_t i = begin; i < s->min; i++) {
        const int64_t signature = (int64_t)s->order->openings[i % XDI_OPENINGS].signature;
        seen[2 * (i - begin)] = signature;
        seen[2 * (i - begin) + 1] = ~signature;
    }
    XD_TRY(xd_all_reduce(s->comm, seen, seen, 2 * XDI_OPENINGS, XD_DTYPE_I64, XD_MAX));
    for (s->at = begin; s->at < s->min; s->at++)
        if (seen[2 * (s->at - begin)] != ~seen[2 * (s->at - begin) + 1]) break;
    return XD_OK;
}

/* This rank's bracket at that place, or rank 0's, or that of the first rank that has another. */
static xd_result xdi_order_compare(const xdi_order_search *s, int64_t theirs[3], int64_t others[3],
                                   int *other) {
    const xdi_opening *o = &s->order->openings[s->at % XDI_OPENINGS];
    int64_t mine[3] = { 0, o->kind, o->micro_batch };
    for (const xd_block *b = &s->model->root; b != o->block; b = xdi_block_after(b)) mine[0]++;
    memcpy(theirs, mine, sizeof mine);
    XD_TRY(xd_broadcast(s->comm, theirs, 3, XD_DTYPE_I64, 0));
    const bool same = memcmp(mine, theirs, sizeof mine) == 0;
    *other = same ? xd_comm_size(s->comm) : xd_comm_rank(s->comm);
    XD_TRY(xd_all_reduce(s->comm, other, other, 1, XD_DTYPE_I32, XD_MIN));
    if (*other == xd_comm_size(s->comm)) return XD_OK;
    memcpy(others, mine, sizeof mine);
    return xd_broadcast(s->comm, others, 3, XD_DTYPE_I64, *other);
}

static const char *xdi_order_name(const xd_model *model, int64_t index) {
    const xd_block *b = &model->root;
    while (index-- > 0 && b) b = xdi_block_after(b);
    return b ? b->name : "";
}

static const char *xdi_order_kind(int64_t kind) {
    static const char *const kinds[] = { "a forward",    "a backward",           "a recomputation",
                                         "an inference", "a part of a backward", "a skip" };
    return kind >= 0 && kind <= XDI_OPENING_SKIP ? kinds[kind] : "a pass";
}

XD_PRIVATE xd_result xdi_order_explain(const xdi_order *order, const xd_model *model, xd_comm *comm) {
    xdi_order_search s = { order, model, comm, 0, 0, 0 };
    int64_t a[3] = { 0, 0, 0 }, b[3] = { 0, 0, 0 };
    int other = 0;
    XD_TRY(xdi_order_find(&s));
    if (s.at == s.min)
        return XD_FAIL(model->ctx, XD_ERROR_STATE,
                       "the order in which blocks were opened: a rank has opened %" PRId64
                       " in this step, another %" PRId64,
                       s.min, s.max);
    XD_TRY(xdi_order_compare(&s, a, b, &other));
    if (other == xd_comm_size(comm))
        return XD_FAIL(model->ctx, XD_ERROR_STATE,
                       "the order in which blocks were opened: it has parted %d or more brackets ago",
                       XDI_OPENINGS);
    return XD_FAIL_CULPRIT(
        model->ctx, XD_ERROR_STATE, xd_comm_world_rank(comm, other),
        "the order in which blocks were opened: rank %d began %s of \"%.80s\", micro-batch %" PRId64
        ", where rank %d began %s of \"%.80s\", micro-batch %" PRId64,
        xd_comm_world_rank(comm, other), xdi_order_kind(b[1]), xdi_order_name(model, b[0]), b[2],
        xd_comm_world_rank(comm, 0), xdi_order_kind(a[1]), xdi_order_name(model, a[0]), a[2]);
}
