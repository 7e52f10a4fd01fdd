/* Schedules of pipelines: what each rank does at each tick.
 *
 * A rank has its work in an order of its own: some forwards first, then a forward and a backward in turn, then the backwards
 * that are left. A tick is the time of one of them; a rank does its next one as soon as what that reads was there at the end
 * of a tick. In each stage micro-batches follow each other in order, so what is done is one number a stage and direction. */

#include "base/internal.h"
#include "model/build_internal.h"
#include "model/pipeline_internal.h"
#include "model/pipeline.h"

#include <inttypes.h>
#include <string.h>

/* ---- settings ---- */

static xd_result xdi_schedule_check(xd_ctx *ctx, const xd_pipeline_schedule *d) {
    XD_REQUIRE(ctx, d->ranks >= 0 && d->virtual_stages >= 0 && d->micro_batches > 0, XD_ERROR_ARGUMENT,
               "a schedule of %d ranks, %d virtual stages and %" PRId64
               " micro-batches: none may be negative, and there must be a micro-batch",
               d->ranks, d->virtual_stages, d->micro_batches);
    XD_REQUIRE(ctx, d->virtual_stages <= XD_STAGES_MAX && d->ranks <= XDI_SCHEDULE_RANKS, XD_ERROR_ARGUMENT,
               "%d ranks with %d virtual stages, at most %d with %d are possible", d->ranks,
               d->virtual_stages, (int)XDI_SCHEDULE_RANKS, (int)XD_STAGES_MAX);
    XD_REQUIRE(ctx, d->micro_batches <= XDI_SCHEDULE_MICRO_BATCHES, XD_ERROR_ARGUMENT,
               "%" PRId64 " micro-batches, at most %d are possible", d->micro_batches,
               (int)XDI_SCHEDULE_MICRO_BATCHES);
    XD_REQUIRE(ctx, d->group >= 0, XD_ERROR_ARGUMENT, "groups of %" PRId64 " of %" PRId64 " micro-batches",
               d->group, d->micro_batches);
    return XD_OK;
}

/* A last group shorter than the pipeline would wait for itself. */
static xd_result xdi_schedule_check_group(xd_ctx *ctx, const xd_pipeline_schedule *d) {
    if (d->virtual_stages <= 1 || d->group == 0) return XD_OK;
    if (d->group == d->micro_batches) return XD_OK; /* one group, however short */
    XD_REQUIRE(ctx, d->group >= d->ranks && d->group <= d->micro_batches, XD_ERROR_ARGUMENT,
               "groups of %" PRId64 " micro-batches: at least the %d ranks, at most all %" PRId64
               " are possible",
               d->group, d->ranks, d->micro_batches);
    const int64_t rest = d->micro_batches % d->group;
    XD_REQUIRE(ctx, rest == 0 || rest >= d->ranks, XD_ERROR_ARGUMENT,
               "%" PRId64 " micro-batches in groups of %" PRId64 " leave %" PRId64
               " for the last group, fewer than the %d ranks",
               d->micro_batches, d->group, rest, d->ranks);
    return XD_OK;
}

/* The shortest groups that may be; all of fewer micro-batches than ranks. */
static int64_t xdi_schedule_group(const xd_pipeline_schedule *d) {
    int64_t group = d->ranks;
    if (d->group > 0) return d->group;
    if (d->micro_batches <= d->ranks) return d->micro_batches;
    while (d->micro_batches % group != 0 && d->micro_batches % group < d->ranks) group++;
    return group;
}

XD_PRIVATE xd_result xdi_schedule_settle(xd_ctx *ctx, xd_pipeline_schedule *d) {
    XD_TRY(xdi_schedule_check(ctx, d));
    if (d->ranks == 0) d->ranks = 1;
    d->virtual_stages = xdi_pipeline_stages(d->ranks, d->virtual_stages);
    XD_TRY(xdi_schedule_check_group(ctx, d));
    d->group = d->virtual_stages > 1 ? xdi_schedule_group(d) : d->micro_batches;
    return XD_OK;
}

/* ---- orders ---- */

/* Forward number k of a rank, and backward number k: the same with the virtual stages the other way round. */
static xd_pipeline_work xdi_schedule_item(const xd_pipeline_schedule *d, xd_pipeline_work_kind kind,
                                          int64_t k) {
    const int64_t group = k / (d->group * d->virtual_stages), begin = group * d->group;
    const int64_t within = k % (d->group * d->virtual_stages), left = d->micro_batches - begin;
    const int64_t size = left < d->group ? left : d->group;
    xd_pipeline_work work;
    work.kind = kind;
    work.virtual_stage = (int)(within / size);
    work.micro_batch = begin + within % size;
    if (kind == XD_PIPELINE_BACKWARD) work.virtual_stage = d->virtual_stages - 1 - work.virtual_stage;
    return work;
}

/* Forwards before the first one that is followed by a backward. */
static int64_t xdi_schedule_warm_up(const xd_pipeline_schedule *d, int rank) {
    const int64_t all = d->micro_batches * d->virtual_stages, behind = d->ranks - rank - 1;
    const int64_t count = d->virtual_stages > 1 ? 2 * behind + (d->virtual_stages - 1) * d->group : behind;
    return count < all ? count : all;
}

static int64_t xdi_schedule_items(const xd_pipeline_schedule *d) {
    return d->micro_batches * d->virtual_stages * (d->forward_only ? 1 : 2);
}

/* Item number `at` of a rank. */
static xd_pipeline_work xdi_schedule_at(const xd_pipeline_schedule *d, int rank, int64_t at) {
    const int64_t all = d->micro_batches * d->virtual_stages, warm_up = xdi_schedule_warm_up(d, rank);
    const int64_t turn = at - warm_up;
    if (d->forward_only || turn < 0) return xdi_schedule_item(d, XD_PIPELINE_FORWARD, at);
    if (turn >= 2 * (all - warm_up)) return xdi_schedule_item(d, XD_PIPELINE_BACKWARD, at - all);
    return turn % 2 == 0 ? xdi_schedule_item(d, XD_PIPELINE_FORWARD, warm_up + turn / 2)
                         : xdi_schedule_item(d, XD_PIPELINE_BACKWARD, turn / 2);
}

/* ---- ticks ---- */

XD_PRIVATE xd_result xdi_schedule_open(xd_ctx *ctx, const xd_pipeline_schedule *desc, xdi_schedule *out) {
    xdi_schedule s;
    memset(&s, 0, sizeof s);
    s.desc = *desc;
    XD_TRY(xdi_schedule_settle(ctx, &s.desc));
    const size_t ranks = (size_t)s.desc.ranks, stages = ranks * (size_t)s.desc.virtual_stages;
    const size_t bytes = ranks * sizeof *s.row + (ranks + 2 * stages) * sizeof(int64_t);
    s.row = (xd_pipeline_work *)xdi_scratch_take(ctx, bytes);
    XD_REQUIRE(ctx, s.row, XD_ERROR_MEMORY, "no room for a schedule of %d ranks", s.desc.ranks);
    memset(s.row, 0, bytes);
    s.ctx = ctx;
    s.at = (int64_t *)(void *)(s.row + ranks);
    s.forwards = s.at + ranks;
    s.backwards = s.forwards + stages;
    *out = s;
    return XD_OK;
}

XD_PRIVATE void xdi_schedule_close(xdi_schedule *s) {
    xdi_scratch_give(s->ctx, s->row);
}

/* Whether what an item reads is there. */
static bool xdi_schedule_can(const xdi_schedule *s, int rank, const xd_pipeline_work *work) {
    const int stages = s->desc.ranks * s->desc.virtual_stages;
    const int stage = work->virtual_stage * s->desc.ranks + rank;
    if (work->kind == XD_PIPELINE_FORWARD) return stage == 0 || s->forwards[stage - 1] > work->micro_batch;
    return (stage == stages - 1 ? s->forwards[stage] : s->backwards[stage + 1]) > work->micro_batch;
}

XD_PRIVATE bool xdi_schedule_next(xdi_schedule *s) {
    const int64_t items = xdi_schedule_items(&s->desc);
    bool some = false;
    for (int r = 0; r < s->desc.ranks; r++) {
        memset(&s->row[r], 0, sizeof s->row[r]);
        if (s->at[r] == items) continue;
        const xd_pipeline_work work = xdi_schedule_at(&s->desc, r, s->at[r]);
        if (!xdi_schedule_can(s, r, &work)) continue;
        s->row[r] = work;
        some = true;
    }
    for (int r = 0; r < s->desc.ranks; r++) { /* what was done in this tick is seen in the next */
        const xd_pipeline_work *work = &s->row[r];
        const int stage = work->virtual_stage * s->desc.ranks + r;
        if (work->kind == XD_PIPELINE_IDLE) continue;
        s->at[r]++;
        (work->kind == XD_PIPELINE_FORWARD ? s->forwards : s->backwards)[stage]++;
    }
    s->ticks += some;
    return some;
}

/* ---- messages ---- */

XD_PRIVATE int xdi_schedule_sends_to(const xd_pipeline_schedule *d, int rank, const xd_pipeline_work *work) {
    const int stages = d->ranks * d->virtual_stages, stage = work->virtual_stage * d->ranks + rank;
    if (work->kind == XD_PIPELINE_FORWARD && stage < stages - 1) return (rank + 1) % d->ranks;
    if (work->kind == XD_PIPELINE_BACKWARD && stage > 0) return (rank + d->ranks - 1) % d->ranks;
    return -1;
}

XD_PRIVATE xd_pipeline_work xdi_schedule_arrival(const xdi_schedule *s, int rank,
                                                 xd_pipeline_work_kind kind) {
    const xd_pipeline_schedule *d = &s->desc;
    const bool forward = kind == XD_PIPELINE_FORWARD;
    const int from = forward ? (rank + d->ranks - 1) % d->ranks : (rank + 1) % d->ranks;
    xd_pipeline_work work = s->row[from];
    if (work.kind != kind || xdi_schedule_sends_to(d, from, &work) < 0) {
        memset(&work, 0, sizeof work);
        return work;
    }
    const int stage = work.virtual_stage * d->ranks + from;
    work.virtual_stage = (forward ? stage + 1 : stage - 1) / d->ranks;
    return work;
}

/* ---- what callers see ---- */

XD_API xd_result xd_pipeline_table(xd_ctx *ctx, const xd_pipeline_schedule *schedule, int64_t capacity,
                                   xd_pipeline_work *table, int64_t *ticks) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, schedule, ticks);
    xdi_schedule s;
    XD_TRY(xdi_schedule_open(ctx, schedule, &s));
    while (xdi_schedule_next(&s))
        if (s.ticks * s.desc.ranks <= capacity)
            memcpy(table + (s.ticks - 1) * s.desc.ranks, s.row, (size_t)s.desc.ranks * sizeof *table);
    const int64_t entries = s.ticks * s.desc.ranks;
    xdi_schedule_close(&s);
    XD_REQUIRE(ctx, capacity == 0 || capacity >= entries, XD_ERROR_ARGUMENT,
               "room for %" PRId64 " entries of a table that has %" PRId64, capacity, entries);
    *ticks = s.ticks;
    return XD_OK;
}

static void xdi_counts_raise(int64_t *max, int64_t now) {
    if (now > *max) *max = now;
}

/* What one tick changes. */
static void xdi_counts_add(const xdi_schedule *s, int rank, xd_pipeline_counts *now,
                           xd_pipeline_counts *max) {
    const xd_pipeline_work *work = &s->row[rank];
    const bool has_input = work->virtual_stage * s->desc.ranks + rank > 0;
    const bool has_gradient =
        work->virtual_stage * s->desc.ranks + rank < s->desc.ranks * s->desc.virtual_stages - 1;
    const bool ends = work->kind == (s->desc.forward_only ? XD_PIPELINE_FORWARD : XD_PIPELINE_BACKWARD);
    max->work += work->kind != XD_PIPELINE_IDLE;
    max->sends += xdi_schedule_sends_to(&s->desc, rank, work) >= 0;
    now->forwards += work->kind == XD_PIPELINE_FORWARD;
    xdi_counts_raise(&max->forwards, now->forwards);
    if (ends) now->forwards--, now->inputs -= has_input;
    if (work->kind == XD_PIPELINE_BACKWARD) now->gradients -= has_gradient;
    if (xdi_schedule_arrival(s, rank, XD_PIPELINE_FORWARD).kind) now->inputs++, max->receives++;
    if (xdi_schedule_arrival(s, rank, XD_PIPELINE_BACKWARD).kind) now->gradients++, max->receives++;
    xdi_counts_raise(&max->inputs, now->inputs);
    xdi_counts_raise(&max->gradients, now->gradients);
}

XD_API xd_result xd_pipeline_measure(xd_ctx *ctx, const xd_pipeline_schedule *schedule, int rank,
                                     xd_pipeline_counts *out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, schedule, out);
    xd_pipeline_counts now, max;
    xdi_schedule s;
    XD_TRY(xdi_schedule_open(ctx, schedule, &s));
    memset(&now, 0, sizeof now);
    memset(&max, 0, sizeof max);
    const bool exists = rank >= 0 && rank < s.desc.ranks;
    while (exists && xdi_schedule_next(&s)) xdi_counts_add(&s, rank, &now, &max);
    xdi_schedule_close(&s);
    XD_REQUIRE(ctx, exists, XD_ERROR_ARGUMENT, "rank %d of a pipeline of %d ranks", rank, s.desc.ranks);
    max.ticks = s.ticks;
    max.idle = s.ticks - max.work;
    *out = max;
    return XD_OK;
}
