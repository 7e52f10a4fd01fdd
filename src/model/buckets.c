/* The gradient buffer of data-parallel training: where parameters are, where buckets end, who owns what. */

#include "base/internal.h"
#include "comm/topology.h"
#include "model/buckets_internal.h"

#include <inttypes.h>
#include <string.h>

/* Elements: 64 are 128 bytes of bf16; 128 and 2^16 are what collectives over NCCL are fastest with. */
#define XDI_BUCKET_START 64
#define XDI_BUCKET_END 128
#define XDI_BUCKET_WIDE 65536
#define XDI_BUCKET_NUMEL_MAX ((int64_t)1 << 62)

struct xdi_bucket_plan {
    xd_ctx *ctx;
    xdi_bucket_plan_desc desc;
    int shards; /* ranks of an instance */
    int64_t count;
    xdi_bucket_param *params;
    int64_t *start;     /* [param_count] position of each parameter */
    int64_t *bucket_of; /* [param_count] its bucket */
    xdi_planned_bucket *buckets;
};

static int64_t xdi_bucket_up(int64_t n, int64_t unit) {
    return n % unit ? n + (unit - n % unit) : n;
}

static int64_t xdi_bucket_multiple(int64_t a, int64_t b) {
    int64_t x = a, y = b;
    while (y) {
        const int64_t rest = x % y;
        x = y;
        y = rest;
    }
    return a / x * b;
}

/* What a bucket's end is rounded up to. */
static int64_t xdi_bucket_unit(const xdi_bucket_plan_desc *d, int shards) {
    if (!d->sharded) return 1;
    return xdi_bucket_multiple(shards, d->wide_padding ? XDI_BUCKET_WIDE : XDI_BUCKET_END);
}

static xd_result xdi_bucket_validate(xd_ctx *ctx, const xdi_bucket_plan_desc *d, int64_t *numel) {
    XD_REQUIRE(ctx, d->param_count >= 0 && (d->params || d->param_count == 0), XD_ERROR_ARGUMENT,
               "%" PRId64 " parameters, and params is %s", d->param_count, d->params ? "given" : "NULL");
    XD_REQUIRE(ctx, d->ranks >= 1 && d->instances >= 1 && d->ranks % d->instances == 0, XD_ERROR_ARGUMENT,
               "%d ranks are not %d instances of equal size", d->ranks, d->instances);
    XD_REQUIRE(ctx, d->bucket_size >= 0 && d->bucket_count >= 0 && (!d->bucket_size || !d->bucket_count),
               XD_ERROR_ARGUMENT, "bucket_size %" PRId64 " and bucket_count %" PRId64, d->bucket_size,
               d->bucket_count);
    XD_REQUIRE(ctx, d->stage >= 0 && d->chunk >= 0, XD_ERROR_ARGUMENT, "stage %d, chunk %d", d->stage,
               d->chunk);
    for (int64_t i = 0; i < d->param_count; i++) {
        const int64_t n = d->params[i].numel;
        XD_REQUIRE(ctx, n >= 0, XD_ERROR_ARGUMENT, "parameter %" PRId64 " has %" PRId64 " elements", i, n);
        XD_REQUIRE(ctx, n <= XDI_BUCKET_NUMEL_MAX - *numel, XD_ERROR_SHAPE,
                   "parameters %" PRId64 " and before have more than 2^62 elements", i);
        *numel += n;
    }
    return XD_OK;
}

/* The size at which a bucket ends, from whichever field says it. */
static xd_result xdi_bucket_resolve(xd_ctx *ctx, xdi_bucket_plan_desc *d, int64_t numel) {
    XD_REQUIRE(ctx, d->bucket_count <= numel || !d->bucket_count, XD_ERROR_ARGUMENT,
               "%" PRId64 " buckets of %" PRId64 " elements", d->bucket_count, numel);
    if (d->bucket_count) d->bucket_size = numel / d->bucket_count;
    if (!d->bucket_size) d->bucket_size = (int64_t)1000000 * (d->ranks > 40 ? d->ranks : 40);
    if (!d->overlap || d->stage > 0 || d->chunk > 0 || d->gathers_in_step) d->bucket_size = INT64_MAX;
    return XD_OK;
}

/* The bucket that ends with parameter `param`, at position `at` of the buffer. Returns where the next one begins. */
static int64_t xdi_bucket_close(xdi_bucket_plan *plan, int64_t param, int64_t at, int64_t unit) {
    const xdi_planned_bucket *last = plan->count ? &plan->buckets[plan->count - 1] : NULL;
    xdi_planned_bucket *bucket = &plan->buckets[plan->count++];
    bucket->buffer.begin = last ? last->buffer.end : 0;
    bucket->buffer.end = xdi_bucket_up(at, unit);
    bucket->unpadded = at - bucket->buffer.begin;
    bucket->first = param;
    bucket->count = (last ? last->first : plan->desc.param_count) - param;
    return bucket->buffer.end;
}

/* Positions and buckets; false when the buffer would have more than 2^62 elements. */
static bool xdi_bucket_lay_out(xdi_bucket_plan *plan) {
    const xdi_bucket_plan_desc *d = &plan->desc;
    const int64_t unit = xdi_bucket_unit(d, plan->shards);
    int64_t at = 0, begin = 0,
            open = 0; /* the next position; of the open bucket: where it begins, its parameters */
    for (int64_t i = d->param_count - 1; i >= 0; i--) {
        const bool alone = d->sharded && plan->params[i].shared_embedding;
        if (d->sharded) at = xdi_bucket_up(at, XDI_BUCKET_START);
        if (alone && open) {
            at = begin = xdi_bucket_close(plan, i + 1, at, unit);
            open = 0;
        }
        if (at > XDI_BUCKET_NUMEL_MAX - plan->params[i].numel) return false;
        plan->start[i] = at;
        plan->bucket_of[i] = plan->count;
        at += plan->params[i].numel;
        open++;
        if (at - begin < d->bucket_size && !alone && i > 0) continue;
        at = begin = xdi_bucket_close(plan, i, at, unit);
        open = 0;
    }
    return at <= XDI_BUCKET_NUMEL_MAX;
}

XD_PRIVATE xd_result xdi_bucket_plan_create(xd_ctx *ctx, const xdi_bucket_plan_desc *desc,
                                            xdi_bucket_plan **out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    xdi_bucket_plan_desc d = *desc;
    int64_t numel = 0;
    if (!d.ranks) d.ranks = 1;
    if (!d.instances) d.instances = 1;
    XD_TRY(xdi_bucket_validate(ctx, &d, &numel));
    XD_TRY(xdi_bucket_resolve(ctx, &d, numel));
    const size_t each = sizeof(xdi_bucket_param) + 2 * sizeof(int64_t) + sizeof(xdi_planned_bucket);
    size_t bytes = 0;
    const bool fits =
        xdi_size_multiply((size_t)d.param_count, each, &bytes) && bytes < SIZE_MAX - sizeof(xdi_bucket_plan);
    xdi_bucket_plan *plan = fits ? (xdi_bucket_plan *)xd_allocate(ctx, sizeof *plan + bytes) : NULL;
    XD_REQUIRE(ctx, plan, XD_ERROR_MEMORY, "no room for a plan of %" PRId64 " parameters", d.param_count);
    plan->ctx = ctx;
    plan->desc = d;
    plan->shards = d.ranks / d.instances;
    plan->buckets = (xdi_planned_bucket *)(void *)(plan + 1);
    plan->start = (int64_t *)(void *)(plan->buckets + d.param_count);
    plan->bucket_of = plan->start + d.param_count;
    plan->params = (xdi_bucket_param *)(void *)(plan->bucket_of + d.param_count);
    if (d.param_count) memcpy(plan->params, d.params, (size_t)d.param_count * sizeof *d.params);
    plan->desc.params = plan->params;
    const bool laid_out = xdi_bucket_lay_out(plan);
    if (!laid_out) xdi_bucket_plan_destroy(plan);
    XD_REQUIRE(ctx, laid_out, XD_ERROR_SHAPE,
               "a buffer of %" PRId64 " elements and padding has more than 2^62", numel);
    *out = plan;
    return XD_OK;
}

XD_PRIVATE void xdi_bucket_plan_destroy(xdi_bucket_plan *plan) {
    if (plan) xd_release(plan->ctx, plan);
}

XD_PRIVATE const xdi_bucket_plan_desc *xdi_bucket_plan_settings(const xdi_bucket_plan *plan) {
    XD_ASSERT(plan);
    return &plan->desc;
}

XD_PRIVATE int64_t xdi_bucket_plan_count(const xdi_bucket_plan *plan) {
    XD_ASSERT(plan);
    return plan->count;
}

XD_PRIVATE xdi_planned_bucket xdi_bucket_plan_at(const xdi_bucket_plan *plan, int64_t index) {
    XD_ASSERT(plan);
    return plan->buckets[index];
}

XD_PRIVATE int64_t xdi_bucket_plan_numel(const xdi_bucket_plan *plan) {
    XD_ASSERT(plan);
    return plan->count ? plan->buckets[plan->count - 1].buffer.end : 0;
}

XD_PRIVATE xd_interval xdi_bucket_plan_param(const xdi_bucket_plan *plan, int64_t param, int64_t *bucket) {
    XD_ASSERT(plan);
    xd_interval place;
    place.begin = plan->start[param];
    place.end = place.begin + plan->params[param].numel;
    if (bucket) *bucket = plan->bucket_of[param];
    return place;
}

XD_PRIVATE xd_interval xdi_bucket_plan_shard(const xdi_bucket_plan *plan, int64_t bucket, int rank) {
    xd_interval part = plan->buckets[bucket].buffer;
    if (!plan->desc.sharded) return part;
    const int64_t each = (part.end - part.begin) / plan->shards; /* exact: ends are multiples of shards */
    part.begin += each * (rank % plan->shards);
    part.end = part.begin + each;
    return part;
}

static xd_interval xdi_bucket_from(xd_interval v, int64_t origin) {
    v.begin -= origin;
    v.end -= origin;
    return v;
}

XD_PRIVATE bool xdi_bucket_plan_piece(const xdi_bucket_plan *plan, int64_t param, int rank,
                                      xdi_bucket_piece *out) {
    XD_ASSERT(plan);
    xdi_bucket_piece piece;
    const xd_interval place = xdi_bucket_plan_param(plan, param, &piece.bucket);
    const xd_interval shard = xdi_bucket_plan_shard(plan, piece.bucket, rank);
    piece.buffer.begin = place.begin > shard.begin ? place.begin : shard.begin;
    piece.buffer.end = place.end < shard.end ? place.end : shard.end;
    if (piece.buffer.begin >= piece.buffer.end) return false;
    piece.in_bucket = xdi_bucket_from(piece.buffer, plan->buckets[piece.bucket].buffer.begin);
    piece.shard = xdi_bucket_from(piece.buffer, shard.begin);
    piece.param = xdi_bucket_from(piece.buffer, place.begin);
    *out = piece;
    return true;
}

XD_PRIVATE uint64_t xdi_bucket_plan_hash(const xdi_bucket_plan *plan) {
    XD_ASSERT(plan);
    const xdi_bucket_plan_desc *d = &plan->desc;
    const int64_t facts[4] = { d->param_count, plan->count, plan->shards, d->sharded };
    uint64_t hash = xd_hash(0, facts, sizeof facts);
    for (int64_t i = 0; i < d->param_count; i++) {
        const int64_t place[3] = { plan->start[i], plan->params[i].numel, plan->bucket_of[i] };
        hash = xd_hash(hash, place, sizeof place);
    }
    for (int64_t i = 0; i < plan->count; i++)
        hash = xd_hash(hash, &plan->buckets[i].buffer, sizeof plan->buckets[i].buffer);
    return hash;
}
