/* What a plan of one call says: PLANNED(ctx, call, &planned) returns the result of the call, and *planned is written if that is
 * XD_OK; PLANNED_FOR of another rank, PLANNED_MEMORY its bytes alone, PLANNED_WORKSPACE those of a loss, 0 if it was refused. */
#ifndef PLANNED_H
#define PLANNED_H

#include "xd_test.h"
#include "xdistill.h"

static inline void planned_begin(xd_ctx *ctx, int rank, int ranks) {
    xd_plan_desc desc;
    desc.rank = rank;
    desc.ranks = ranks;
    CHECK_EQ_INT(xd_plan_begin(ctx, ranks > 0 ? &desc : NULL), XD_OK);
}

static inline xd_result planned_end(xd_ctx *ctx, xd_result result, xd_planned *out) {
    CHECK_EQ_INT(xd_plan_end(ctx, result == XD_OK ? out : NULL), XD_OK);
    return result;
}

static inline xd_result planned_memory(xd_ctx *ctx, xd_result result, xd_memory_bytes *out) {
    xd_planned planned;
    CHECK_EQ_INT(xd_plan_end(ctx, &planned), XD_OK);
    if (result == XD_OK) *out = planned.memory;
    return result;
}

static inline size_t planned_workspace(xd_ctx *ctx, xd_result result) {
    xd_planned planned;
    CHECK_EQ_INT(xd_plan_end(ctx, &planned), XD_OK);
    CHECK(result == XD_OK || planned.workspace == 0);
    return planned.workspace;
}

#define PLANNED_FOR(ctx, rank, ranks, call, out) \
    (planned_begin((ctx), (rank), (ranks)), planned_end((ctx), (call), (out)))
#define PLANNED(ctx, call, out) PLANNED_FOR(ctx, 0, 0, call, out)
#define PLANNED_MEMORY(ctx, call, out) (planned_begin((ctx), 0, 0), planned_memory((ctx), (call), (out)))
#define PLANNED_WORKSPACE(ctx, call) (planned_begin((ctx), 0, 0), planned_workspace((ctx), (call)))

#endif
