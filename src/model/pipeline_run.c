/* Pipelines: memory by the schedule, the caller's work tick by tick, and what neighbours send each other between ticks.
 *
 * Ranks meet only where they have something to send each other, so that a short tick here need not wait for a long one there.
 * Where one idles, at both ends of a run above all, it would wait for many ticks at once, beyond its time limit: there
 * neighbours meet after every tick.
 *
 * A failure. The rank that has one, or hears of one, goes on through the schedule and refuses every message, so its
 * neighbours hear in the same tick and none waits. At the end all agree, and the rank that failed tells the others its
 * message. Where calls are collective over the data ranks, these agree after every call, so that one of them that waits
 * inside of its call hears too. All that ranks wait for is in the order of ticks, and a rank that has stopped tells its data
 * ranks where its next call would be: so no two wait for each other.
 *
 * On a queue the messages of two ticks at most are under way beside the calls. A rank waits for those of a tick before the
 * first call that reads what arrives, or writes where what was sent is, and hears of a failure then: later, but still in the
 * order of ticks. */

#include "base/internal.h"
#include "comm/internal.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"
#include "model/build_internal.h"
#include "model/parallel_internal.h"
#include "model/pipeline_internal.h"

#include <inttypes.h>
#include <string.h>

enum {
    XDI_PIPELINE_PROGRAMS = 2,
    XDI_PIPELINE_TRAINS = 0,
    XDI_PIPELINE_INFERS = 1,
    XDI_PIPELINE_MESSAGES = 7,
    XDI_PIPELINE_FLIGHTS = 2 /* ticks whose messages are under way on a queue */
};

/* The messages of a tick, on a queue. */
typedef struct xdi_pipeline_flight {
    xd_collective records[XDI_PIPELINE_MESSAGES];
    xd_ticket ticket;
    int64_t tick;
    bool open;
} xdi_pipeline_flight;

/* Sizes of everything, before there is any memory. */
typedef struct xdi_pipeline_sizes {
    xdi_pipeline_program programs[XDI_PIPELINE_PROGRAMS]; /* without backwards the first is empty */
    int64_t count;                                        /* elements of an activation */
    size_t activation, gradient;                          /* bytes from one to the next */
    int buffers;                                          /* for one to be sent, of each kind */
    int64_t inputs, gradients;                            /* places for those that arrive */
    int64_t owners, values;                               /* numbers */
    size_t host, device;                                  /* bytes: descriptions; activations */
} xdi_pipeline_sizes;

struct xd_pipeline {
    xd_ctx *ctx;
    xd_comm *comm;
    xd_pipeline_run_desc desc;
    xdi_pipeline_sizes sizes;
    int rank, ranks;
    unsigned char *memory; /* of the device; NULL when no activation is sent */
    unsigned char *inputs, *gradients, *output, *input_gradient;
    double *values;
    /* of the run that is going on */
    const xd_pipeline_calls *calls;
    uint64_t heard; /* the last collective over data that had failed before */
    bool stopped;   /* some rank has failed, perhaps this one */
    bool failed;    /* a call here or on a data rank */
    bool own;       /* a call here */
    bool reported;  /* the data ranks know */
    xd_error error; /* why */
    xdi_pipeline_flight flights[XDI_PIPELINE_FLIGHTS];
    uint64_t flown; /* flights so far: the next is number flown % XDI_PIPELINE_FLIGHTS */
};

/* ---- settings ---- */

static xd_result xdi_pipeline_check(xd_ctx *ctx, const xd_pipeline_run_desc *d) {
    XD_REQUIRE(ctx, d->ndim >= 0 && d->ndim <= XD_DIMS_MAX, XD_ERROR_ARGUMENT,
               "activations of %d dimensions, from 0 to %d are possible", d->ndim, (int)XD_DIMS_MAX);
    XD_TRY(xdi_shape_check_rest(ctx, "activations", d->ndim, d->shape));
    for (int i = 0; i < d->ndim; i++)
        XD_REQUIRE(ctx, d->shape[i] >= 0, XD_ERROR_ARGUMENT,
                   "dimension %d of activations has %" PRId64 " elements", i, d->shape[i]);
    XD_REQUIRE(ctx, d->value_count >= 0 && d->value_count <= XDI_SCHEDULE_MICRO_BATCHES, XD_ERROR_ARGUMENT,
               "%" PRId64 " values of each micro-batch, from 0 to %d are possible", d->value_count,
               (int)XDI_SCHEDULE_MICRO_BATCHES);
    XD_REQUIRE(ctx, d->data || !d->gathers, XD_ERROR_ARGUMENT,
               "calls of %" PRId64 " micro-batches are collective over data, which is NULL",
               d->schedule.micro_batches);
    return XD_OK;
}

/* A default filled in, and no type that does not exist; of one rank none is needed. */
static xd_result xdi_pipeline_check_types(xd_ctx *ctx, const xd_pipeline_run_desc *d) {
    const bool sends = d->schedule.ranks > 1;
    const xd_dtype gradient = d->gradient_dtype ? d->gradient_dtype : d->dtype;
    XD_REQUIRE(ctx, !sends || (xd_dtype_size(d->dtype) > 0 && xd_dtype_size(gradient) > 0), XD_ERROR_DTYPE,
               "activations of dtype %s (%d) with gradients of dtype %s (%d)", xd_dtype_name(d->dtype),
               (int)d->dtype, xd_dtype_name(gradient), (int)gradient);
    return XD_OK;
}

static bool xdi_pipeline_align(int64_t count, xd_dtype dtype, size_t *bytes) {
    if (!xdi_size_multiply((size_t)count, xd_dtype_size(dtype), bytes) || *bytes > SIZE_MAX / 2) return false;
    *bytes = (*bytes + XD_ARENA_ALIGNMENT - 1) / XD_ARENA_ALIGNMENT * XD_ARENA_ALIGNMENT;
    return true;
}

/* Bytes of what waits, of one to be sent in either direction, and of the descriptions; false when they cannot be counted. */
static bool xdi_pipeline_add(xdi_pipeline_sizes *s, const xd_pipeline_run_desc *d) {
    const xd_dtype gradient = d->gradient_dtype ? d->gradient_dtype : d->dtype;
    size_t inputs = 0, gradients = 0;
    s->count = 1;
    for (int i = 0; i < d->ndim; i++) {
        if (d->shape[i] > 0 && s->count > INT64_MAX / 64 / d->shape[i]) return false;
        s->count *= d->shape[i];
    }
    for (int i = 0; i < XDI_PIPELINE_PROGRAMS; i++) {
        const xd_pipeline_counts *c = &s->programs[i].counts;
        const int64_t owners = 2 * (c->forwards + c->inputs + c->gradients);
        if (c->inputs > s->inputs) s->inputs = c->inputs;
        if (c->gradients > s->gradients) s->gradients = c->gradients;
        if (owners > s->owners) s->owners = owners;
        s->host += (size_t)c->ticks * sizeof(xdi_pipeline_step);
    }
    s->values = d->schedule.micro_batches * d->value_count;
    s->host += sizeof(xd_pipeline) + (size_t)(s->owners + s->values) * sizeof(int64_t);
    if (s->programs[XDI_PIPELINE_INFERS].schedule.ranks == 1) return true;
    if (!xdi_pipeline_align(s->count, d->dtype, &s->activation)) return false;
    if (!d->schedule.forward_only && !xdi_pipeline_align(s->count, gradient, &s->gradient)) return false;
    if (!xdi_size_multiply((size_t)(s->inputs + s->buffers), s->activation, &inputs)) return false;
    if (!xdi_size_multiply((size_t)(s->gradients + s->buffers), s->gradient, &gradients)) return false;
    s->device = inputs + gradients;
    return inputs < SIZE_MAX / 2 && gradients < SIZE_MAX / 2;
}

static xd_result xdi_pipeline_measure(xd_ctx *ctx, const xd_pipeline_run_desc *d, int rank,
                                      xdi_pipeline_sizes *out) {
    xd_pipeline_schedule schedule = d->schedule;
    memset(out, 0, sizeof *out);
    out->buffers = d->sends ? 2 : 1;
    XD_TRY(xdi_pipeline_check(ctx, d));
    XD_TRY(xdi_pipeline_check_types(ctx, d));
    if (!schedule.forward_only)
        XD_TRY(xdi_pipeline_program_count(ctx, &schedule, rank, &out->programs[XDI_PIPELINE_TRAINS]));
    schedule.forward_only = true;
    XD_TRY(xdi_pipeline_program_count(ctx, &schedule, rank, &out->programs[XDI_PIPELINE_INFERS]));
    XD_REQUIRE(ctx, xdi_pipeline_add(out, d), XD_ERROR_SHAPE,
               "%" PRId64 " activations of %d dimensions, the first of %" PRId64
               ", are more than can be counted",
               out->inputs + 1, d->ndim, d->ndim ? d->shape[0] : 1);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_pipeline_bytes(xd_ctx *ctx, const xd_pipeline_run_desc *desc, int rank,
                                        xd_memory_bytes *out) {
    xdi_pipeline_sizes sizes;
    XD_TRY(xdi_pipeline_measure(ctx, desc, rank, &sizes));
    *out = xdi_memory_of(ctx, sizes.host, sizes.device);
    return XD_OK;
}

/* ---- creation ---- */

/* Over the pipeline, then over those who wait for it elsewhere. */
static xd_result xdi_pipeline_agree(xd_comm *comm, const xd_pipeline_run_desc *d, xd_result result) {
    result = xd_agree(comm, result);
    if (d->data) result = xd_agree(d->data, result);
    return d->world ? xd_agree(d->world, result) : result;
}

/* One number of all ranks of a group, or a failure; `result` is that of this rank so far. */
static xd_result xdi_pipeline_same(xd_comm *comm, xd_result result, const char *name, int64_t number) {
    return xdi_comm_agree_number(comm, result, "xd_pipeline_create", name, number);
}

static xd_result xdi_pipeline_compare(xd_comm *comm, const xd_pipeline_run_desc *d, xd_result result) {
    const xd_pipeline_schedule *s = &d->schedule;
    int64_t count = 1;
    for (int i = 0; i < d->ndim && result == XD_OK; i++) count *= d->shape[i];
    XD_TRY(xdi_pipeline_same(comm, result, "micro-batches", s->micro_batches));
    XD_TRY(xdi_pipeline_same(comm, XD_OK, "virtual stages", s->virtual_stages ? s->virtual_stages : 1));
    XD_TRY(xdi_pipeline_same(comm, XD_OK, "micro-batches of a group", s->group));
    XD_TRY(xdi_pipeline_same(comm, XD_OK, "forward_only", s->forward_only ? 1 : 0));
    XD_TRY(xdi_pipeline_same(comm, XD_OK, "queues of sends", d->sends ? 1 : 0));
    XD_TRY(xdi_pipeline_same(comm, XD_OK, "elements of an activation", count));
    for (int i = 0; i < XD_DIMS_MAX; i++)
        XD_TRY(xdi_pipeline_same(comm, XD_OK, "elements of a dimension", i < d->ndim ? d->shape[i] : 0));
    XD_TRY(xdi_pipeline_same(comm, XD_OK, "dtype", (int64_t)d->dtype));
    XD_TRY(xdi_pipeline_same(comm, XD_OK, "gradient_dtype",
                             (int64_t)(d->gradient_dtype ? d->gradient_dtype : d->dtype)));
    return xdi_pipeline_same(comm, XD_OK, "values", d->value_count);
}

static xd_result xdi_pipeline_check_built(xd_ctx *ctx, const xd_pipeline_run_desc *d, int rank) {
    const int stages = xdi_pipeline_stages(d->schedule.ranks, d->schedule.virtual_stages);
    const int count = d->built ? xd_built_stage_count(d->built) : stages;
    XD_REQUIRE(ctx, count == stages, XD_ERROR_ARGUMENT, "%d stages were built, the schedule has %d", count,
               stages);
    for (int i = 0; i < stages && d->built; i++) {
        const xd_stage_place place = xd_built_stage(d->built, i).place;
        XD_REQUIRE(ctx, place.pipeline_rank == rank && place.pipeline_ranks == d->schedule.ranks,
                   XD_ERROR_ARGUMENT, "stage %d was built for rank %d of %d, and this is rank %d of %d", i,
                   place.pipeline_rank, place.pipeline_ranks, rank, d->schedule.ranks);
        XD_REQUIRE(ctx, place.virtual_stage == i && place.virtual_stages == stages, XD_ERROR_ARGUMENT,
                   "stage %d was built as virtual stage %d of %d, the schedule has %d", i,
                   place.virtual_stage, place.virtual_stages, stages);
    }
    return XD_OK;
}

static xd_result xdi_pipeline_check_queue(xd_comm *comm, xd_queue *queue) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    if (!queue) return XD_OK;
    const xd_comm *over = xdi_queue_comm(queue);
    const int capacity = xd_queue_describe(queue).capacity;
    XD_REQUIRE(ctx, xd_comm_size(over) == xd_comm_size(comm) && xd_comm_rank(over) == xd_comm_rank(comm),
               XD_ERROR_ARGUMENT, "a queue of sends on rank %d of %d for rank %d of %d of a pipeline",
               xd_comm_rank(over), xd_comm_size(over), xd_comm_rank(comm), xd_comm_size(comm));
    XD_REQUIRE(ctx, capacity >= XDI_PIPELINE_FLIGHTS, XD_ERROR_ARGUMENT,
               "a queue of sends has room for %d records, and %d are under way at once", capacity,
               (int)XDI_PIPELINE_FLIGHTS);
    return XD_OK;
}

static xd_result xdi_pipeline_plan(xd_comm *comm, xd_pipeline_run_desc *d, xdi_pipeline_sizes *sizes) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    const int size = xd_comm_size(comm);
    XD_REQUIRE(ctx, d->schedule.ranks == 0 || d->schedule.ranks == size, XD_ERROR_ARGUMENT,
               "a schedule of %d ranks over a group of %d", d->schedule.ranks, size);
    d->schedule.ranks = size;
    XD_TRY(xdi_pipeline_measure(ctx, d, xd_comm_rank(comm), sizes));
    XD_TRY(xdi_pipeline_check_queue(comm, d->sends));
    return xdi_pipeline_check_built(ctx, d, xd_comm_rank(comm));
}

/* The parts of the two blocks of memory. */
static xd_result xdi_pipeline_divide(xd_pipeline *p) {
    xdi_pipeline_sizes *s = &p->sizes;
    xdi_pipeline_step *steps = (xdi_pipeline_step *)(void *)(p + 1);
    for (int i = 0; i < XDI_PIPELINE_PROGRAMS; i++) {
        s->programs[i].steps = steps;
        steps += s->programs[i].counts.ticks;
    }
    p->values = (double *)(void *)steps;
    int64_t *owners = (int64_t *)(void *)(p->values + s->values);
    p->inputs = p->memory;
    if (p->memory) {
        p->output = p->inputs + (size_t)s->inputs * s->activation;
        p->gradients = p->output + (size_t)s->buffers * s->activation;
        p->input_gradient = p->gradients + (size_t)s->gradients * s->gradient;
    }
    for (int i = 0; i < XDI_PIPELINE_PROGRAMS; i++)
        if (s->programs[i].counts.ticks > 0)
            XD_TRY(xdi_pipeline_program_fill(p->ctx, &s->programs[i], p->rank, owners));
    return XD_OK;
}

static xd_result xdi_pipeline_make(xd_comm *comm, const xd_pipeline_run_desc *d,
                                   const xdi_pipeline_sizes *sizes, xd_pipeline **out) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    xd_pipeline *p = XDI_OBJECT(xd_pipeline, ctx, sizes->host);
    XD_REQUIRE(ctx, p, XD_ERROR_MEMORY, "no room for a pipeline of %" PRId64 " micro-batches",
               d->schedule.micro_batches);
    *out = p;
    p->ctx = ctx;
    p->comm = comm;
    p->desc = *d;
    p->sizes = *sizes;
    p->rank = xd_comm_rank(comm);
    p->ranks = xd_comm_size(comm);
    if (sizes->device > 0) {
        p->memory = (unsigned char *)xd_ctx_kernels(ctx)->memory.allocate(ctx, sizes->device);
        XD_REQUIRE(ctx, p->memory, XD_ERROR_MEMORY,
                   "no room for activations of %llu bytes, %" PRId64 " at once",
                   (unsigned long long)sizes->activation, sizes->inputs + 1);
    }
    return xdi_pipeline_divide(p);
}

/* Of another rank no groups and no stages are read. */
static xd_result xdi_pipeline_add_to_plan(xd_comm *comm, const xd_pipeline_run_desc *desc) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    xd_pipeline_run_desc d = *desc;
    xdi_pipeline_sizes sizes;
    int rank = 0, ranks = 0;
    if (!xdi_plan_place(ctx, &rank, &ranks)) {
        XD_TRY(xdi_pipeline_plan(comm, &d, &sizes));
    } else {
        XD_REQUIRE(ctx, d.schedule.ranks == 0 || d.schedule.ranks == ranks, XD_ERROR_ARGUMENT,
                   "a schedule of %d ranks in a plan for %d", d.schedule.ranks, ranks);
        d.schedule.ranks = ranks;
        XD_TRY(xdi_pipeline_measure(ctx, &d, rank, &sizes));
    }
    return xdi_plan_take(ctx, sizes.host, sizes.device);
}

XD_API xd_result xd_pipeline_create(xd_comm *pipeline, const xd_pipeline_run_desc *desc, xd_pipeline **out) {
    XDI_GIVEN_COMM_IN_PLAN(pipeline, desc, out);
    if (xdi_plan_is_open(xd_comm_ctx(pipeline))) {
        *out = NULL;
        return xdi_pipeline_add_to_plan(pipeline, desc);
    }
    xd_pipeline_run_desc d = *desc;
    xdi_pipeline_sizes sizes;
    xd_pipeline *made = NULL;
    xd_result result = xdi_pipeline_plan(pipeline, &d, &sizes);
    result = xdi_pipeline_compare(pipeline, &d, result);
    if (d.gathers && d.data)
        result = xdi_comm_agree_number(d.data, result, "xd_pipeline_create", "micro-batches",
                                       d.schedule.micro_batches);
    XD_TRY(xdi_pipeline_agree(pipeline, &d, result));
    result = xdi_pipeline_agree(pipeline, &d, xdi_pipeline_make(pipeline, &d, &sizes, &made));
    if (result == XD_OK)
        *out = made;
    else
        xd_pipeline_destroy(made);
    return result;
}

XD_API void xd_pipeline_destroy(xd_pipeline *pipeline) {
    if (!pipeline || XDI_IS_GONE(xd_pipeline, pipeline)) return;
    xd_ctx *ctx = pipeline->ctx;
    if (pipeline->memory) xd_ctx_kernels(ctx)->memory.release(ctx, pipeline->memory);
    xd_release(ctx, pipeline);
}

/* ---- failures ---- */

static void xdi_pipeline_fail(xd_pipeline *p, bool own) {
    p->stopped = p->failed = true;
    p->own = own;
    p->error = *xd_last_error(p->ctx);
}

/* After a call, or where one would have been. If a collective over the data ranks was the last thing to fail here, all of
 * them know; and where its error is PEER, the failure is another rank's. */
static void xdi_pipeline_tell(xd_pipeline *p, xd_result result) {
    xd_comm *data = p->desc.data;
    const bool heard = data && xdi_comm_refused_last(data) > p->heard;
    if (result != XD_OK) xdi_pipeline_fail(p, !(heard && result == XD_ERROR_PEER));
    if (p->stopped && heard) p->reported = true;
    if (!p->desc.gathers || p->reported) return;
    if (p->stopped && result == XD_OK) result = xdi_ctx_adopt(p->ctx, &p->error); /* a neighbour's refusal */
    const xd_result agreed = xd_agree(data, result);
    if (agreed == XD_OK) return;
    p->reported = true;
    if (result == XD_OK) xdi_pipeline_fail(p, false);
}

/* No rank needs what the step has left here: it begins again. */
XD_PRIVATE void xdi_pipeline_drop(const xd_built *built) {
    for (int i = 0; built && i < xd_built_stage_count(built); i++) {
        xd_parallel *parallel = xd_built_stage(built, i).parallel;
        if (parallel) xdi_parallel_drop_step(parallel);
    }
}

/* Everybody gets the message of the rank that has failed by itself, as far as groups reach. */
static xd_result xdi_pipeline_settle(xd_pipeline *p) {
    const xd_pipeline_run_desc *d = &p->desc;
    xd_result result = xd_agree(p->comm, p->failed ? xdi_ctx_adopt(p->ctx, &p->error) : XD_OK);
    if (d->data && !p->reported) result = xd_agree(d->data, result);
    if (d->world) {
        const xd_result all = xd_agree(d->world, p->own ? xdi_ctx_adopt(p->ctx, &p->error) : XD_OK);
        if (all != XD_OK) result = all;
    }
    if (result != XD_OK) xdi_pipeline_drop(d->built);
    return p->own ? xdi_ctx_adopt(p->ctx, &p->error) : result;
}

/* ---- ticks ---- */

/* One of several buffers; NULL where activations have no elements. */
static unsigned char *xdi_pipeline_buffer(unsigned char *buffers, int64_t index, size_t bytes) {
    return buffers ? buffers + (size_t)index * bytes : NULL;
}

/* Where what is sent to a neighbour is written. */
static unsigned char *xdi_pipeline_sent(const xd_pipeline *p, const xdi_pipeline_step *step) {
    const xdi_pipeline_sizes *s = &p->sizes;
    const int64_t buffer = step->buffer % s->buffers;
    return step->work.kind == XD_PIPELINE_FORWARD
               ? xdi_pipeline_buffer(p->output, buffer, s->activation)
               : xdi_pipeline_buffer(p->input_gradient, buffer, s->gradient);
}

static void xdi_pipeline_describe(const xd_pipeline *p, const xdi_pipeline_step *step, xd_pass_kind pass,
                                  xd_pipeline_call *call) {
    const xd_pipeline_work *w = &step->work;
    const xdi_pipeline_sizes *s = &p->sizes;
    const bool forward = w->kind == XD_PIPELINE_FORWARD;
    xd_pipeline_desc places;
    memset(call, 0, sizeof *call);
    memset(&places, 0, sizeof places);
    places.ranks = p->ranks;
    places.virtual_stages = p->desc.schedule.virtual_stages;
    if (p->desc.built)
        call->stage = xd_built_stage(p->desc.built, w->virtual_stage);
    else
        (void)xdi_pipeline_place(p->ctx, &places, p->rank, w->virtual_stage, &call->stage.place);
    call->pass = pass;
    call->micro_batch = w->micro_batch;
    call->slot = step->slot;
    if (step->input >= 0) call->input = xdi_pipeline_buffer(p->inputs, step->input, s->activation);
    if (step->gradient >= 0)
        call->output_gradient = xdi_pipeline_buffer(p->gradients, step->gradient, s->gradient);
    if (step->to >= 0 && forward) call->output = xdi_pipeline_sent(p, step);
    if (step->to >= 0 && !forward) call->input_gradient = xdi_pipeline_sent(p, step);
    if (call->stage.place.last && p->desc.value_count > 0)
        call->values = p->values + w->micro_batch * p->desc.value_count;
}

static void xdi_pipeline_work(xd_pipeline *p, const xdi_pipeline_step *step) {
    const bool forward = step->work.kind == XD_PIPELINE_FORWARD, trains = p->calls->backward != NULL;
    xd_pipeline_call call;
    if (step->work.kind == XD_PIPELINE_IDLE || p->reported) return;
    if (p->stopped) {
        xdi_pipeline_tell(p, XD_OK);
        return;
    }
    xdi_pipeline_describe(p, step,
                          !forward ? XD_PASS_BACKWARD
                          : trains ? XD_PASS_FORWARD
                                   : XD_PASS_INFERENCE,
                          &call);
    xdi_clear_error(p->ctx);
    const xd_result result = xdi_builder_called(
        p->ctx,
        forward ? p->calls->forward(p->calls->user, &call) : p->calls->backward(p->calls->user, &call),
        forward ? "forward of micro-batch" : "backward of micro-batch", (int)step->work.micro_batch);
    xdi_pipeline_tell(p, result);
}

static void xdi_pipeline_record(const xd_pipeline *p, xd_collective_kind kind, bool gradient, int other,
                                unsigned char *memory, xd_collective *out) {
    const xd_pipeline_run_desc *d = &p->desc;
    memset(out, 0, sizeof *out);
    out->kind = kind;
    if (kind == XD_COLLECTIVE_SEND)
        out->send = memory;
    else
        out->recv = memory;
    out->count = p->sizes.count;
    out->dtype = gradient && d->gradient_dtype ? d->gradient_dtype : d->dtype;
    out->root = other;
}

/* An empty message each way. */
static void xdi_pipeline_meet(int other, xd_collective *records, int *count) {
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.dtype = XD_DTYPE_U8;
    c.root = other;
    c.kind = XD_COLLECTIVE_SEND;
    records[(*count)++] = c;
    c.kind = XD_COLLECTIVE_RECV;
    records[(*count)++] = c;
}

/* Who idles waits for others that wait themselves: the one next to a rank that does not come is to find it first. */
static double xdi_pipeline_patience(const xdi_pipeline_step *step) {
    return 0.1 * (double)(step->waits < 10 ? step->waits : 10);
}

/* What travels at the end of a tick. */
static int xdi_pipeline_list(const xd_pipeline *p, const xdi_pipeline_step *step, xd_collective *records) {
    const xdi_pipeline_sizes *s = &p->sizes;
    const int before = (p->rank + p->ranks - 1) % p->ranks, behind = (p->rank + 1) % p->ranks;
    int count = 0;
    if (step->to >= 0)
        xdi_pipeline_record(p, XD_COLLECTIVE_SEND, step->work.kind == XD_PIPELINE_BACKWARD, step->to,
                            xdi_pipeline_sent(p, step), &records[count++]);
    if (step->arrives >= 0)
        xdi_pipeline_record(p, XD_COLLECTIVE_RECV, false, before,
                            xdi_pipeline_buffer(p->inputs, step->arrives, s->activation), &records[count++]);
    if (step->gradient_arrives >= 0)
        xdi_pipeline_record(p, XD_COLLECTIVE_RECV, true, behind,
                            xdi_pipeline_buffer(p->gradients, step->gradient_arrives, s->gradient),
                            &records[count++]);
    if (step->meets[0]) xdi_pipeline_meet(before, records, &count);
    if (step->meets[1]) xdi_pipeline_meet(behind, records, &count);
    return count;
}

/* What came of messages. Errors: those that break the group; after any other this rank has heard of a failure. */
static xd_result xdi_pipeline_hear(xd_pipeline *p, xd_result result) {
    xd_queue *queue = p->desc.sends;
    const xd_result broken = queue ? xdi_queue_broken(queue) : xdi_comm_broken(p->comm);
    if (result == XD_OK || broken != XD_OK) return result;
    if (!p->stopped) p->error = *xd_last_error(p->ctx);
    p->stopped = true; /* the rank that has refused says why at the end */
    return XD_OK;
}

/* Waits for messages on the queue, those of ticks up to one. */
static xd_result xdi_pipeline_land(xd_pipeline *p, int64_t tick) {
    xd_result result = XD_OK;
    for (int i = 0; i < XDI_PIPELINE_FLIGHTS; i++) { /* the oldest first */
        xdi_pipeline_flight *f = &p->flights[(p->flown + (uint64_t)i) % XDI_PIPELINE_FLIGHTS];
        if (!f->open || f->tick > tick) continue;
        f->open = false;
        const xd_result landed = xdi_pipeline_hear(p, xd_queue_wait(p->desc.sends, f->ticket));
        if (result == XD_OK) result = landed;
    }
    return result;
}

static xd_result xdi_pipeline_fly(xd_pipeline *p, const xdi_pipeline_step *step, int64_t tick) {
    xdi_pipeline_flight *f = &p->flights[p->flown % XDI_PIPELINE_FLIGHTS];
    xdi_queue_messages messages;
    if (f->open) XD_TRY(xdi_pipeline_land(p, f->tick));
    messages.records = f->records;
    messages.count = xdi_pipeline_list(p, step, f->records);
    messages.refuses = p->stopped;
    messages.patience = xdi_pipeline_patience(step);
    if (messages.count == 0) return XD_OK;
    XD_TRY(xdi_queue_exchange(p->desc.sends, &messages, &f->ticket));
    f->open = true;
    f->tick = tick;
    p->flown++;
    return XD_OK;
}

static xd_result xdi_pipeline_exchange(xd_pipeline *p, const xdi_pipeline_step *step, int64_t tick) {
    xd_collective records[XDI_PIPELINE_MESSAGES];
    if (p->desc.sends) return xdi_pipeline_fly(p, step, tick);
    const int count = xdi_pipeline_list(p, step, records);
    if (count == 0) return XD_OK;
    return xdi_pipeline_hear(
        p, xdi_comm_exchange_as(p->comm, records, count, p->stopped, xdi_pipeline_patience(step)));
}

static xd_result xdi_pipeline_tick(xd_pipeline *p, const xdi_pipeline_step *step, int64_t tick) {
    XD_TRY(xdi_pipeline_land(p, step->needs));
    xdi_pipeline_work(p, step);
    return xdi_pipeline_exchange(p, step, tick);
}

static xd_result xdi_pipeline_ticks(xd_pipeline *p) {
    const xdi_pipeline_program *program =
        &p->sizes.programs[p->calls->backward ? XDI_PIPELINE_TRAINS : XDI_PIPELINE_INFERS];
    xd_result result = XD_OK;
    for (int64_t i = 0; i < program->counts.ticks && result == XD_OK; i++)
        result = xdi_pipeline_tick(p, &program->steps[i], i);
    const xd_result landed = xdi_pipeline_land(p, program->counts.ticks);
    if (result == XD_OK) result = landed;
    if (result != XD_OK) return p->failed ? xdi_ctx_adopt(p->ctx, &p->error) : result;
    return xdi_pipeline_settle(p);
}

/* ---- a run ---- */

static xd_result xdi_pipeline_check_calls(const xd_pipeline *p, const xd_pipeline_calls *calls) {
    XD_REQUIRE(p->ctx, calls->forward, XD_ERROR_ARGUMENT,
               "a run of %" PRId64 " micro-batches without forward", p->desc.schedule.micro_batches);
    XD_REQUIRE(p->ctx, !calls->backward || !p->desc.schedule.forward_only, XD_ERROR_STATE,
               "backwards of %" PRId64 " micro-batches in a pipeline that is forward_only",
               p->desc.schedule.micro_batches);
    return XD_OK;
}

static xd_result xdi_pipeline_begin(xd_pipeline *p, const xd_pipeline_calls *calls) {
    const int64_t backwards = calls->backward ? p->desc.schedule.micro_batches : 0;
    xd_result result = xdi_pipeline_check_calls(p, calls);
    result = xdi_comm_agree_number(p->comm, result, "xd_pipeline_run", "backwards", backwards);
    if (p->desc.gathers)
        result = xdi_comm_agree_number(p->desc.data, result, "xd_pipeline_run", "backwards", backwards);
    p->calls = calls;
    p->stopped = p->failed = p->own = p->reported = false;
    p->heard = p->desc.data ? xdi_comm_refused_last(p->desc.data) : 0;
    memset(p->values, 0, (size_t)p->sizes.values * sizeof *p->values);
    return result;
}

/* Ranks of other pipelines hear at their end of one that does not begin. */
static xd_result xdi_pipeline_go(xd_pipeline *p, const xd_pipeline_calls *calls) {
    const xd_result result = xdi_pipeline_begin(p, calls);
    if (result == XD_OK) return xdi_pipeline_ticks(p);
    p->failed = p->own = true;
    p->error = *xd_last_error(p->ctx);
    return xdi_pipeline_settle(p);
}

XD_API xd_result xd_pipeline_run(xd_pipeline *pipeline, const xd_pipeline_calls *calls, double *values) {
    XDI_LIVE(xd_pipeline, pipeline);
    XDI_GIVEN_OF(pipeline, calls);
    const int64_t count = pipeline->sizes.values;
    XD_TRY(xdi_pipeline_go(pipeline, calls));
    if (count == 0) return XD_OK;
    XD_TRY(xd_broadcast(pipeline->comm, pipeline->values, count, XD_DTYPE_F64, pipeline->ranks - 1));
    if (values) memcpy(values, pipeline->values, (size_t)count * sizeof *values);
    return XD_OK;
}
