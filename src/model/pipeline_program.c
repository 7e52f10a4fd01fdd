/* Programs of pipelines: the ticks of one rank, with places for what waits. */

#include "base/internal.h"
#include "model/pipeline_internal.h"

#include <string.h>

XD_PRIVATE xd_result xdi_pipeline_program_count(xd_ctx *ctx, const xd_pipeline_schedule *schedule, int rank,
                                                xdi_pipeline_program *out) {
    xdi_pipeline_program program;
    memset(&program, 0, sizeof program);
    program.schedule = *schedule;
    XD_TRY(xdi_schedule_settle(ctx, &program.schedule));
    XD_TRY(xd_pipeline_measure(ctx, &program.schedule, rank, &program.counts));
    *out = program;
    return XD_OK;
}

/* Places of one kind, and the work that each is taken for; -1: it is free. There are as many as are taken at once, so the
 * first free one will do. */
typedef struct xdi_places {
    int64_t *owners; /* [count] */
    int64_t *ticks;  /* [count] when it was taken */
    int64_t count;
} xdi_places;

static int64_t xdi_places_find(const xdi_places *p, int64_t owner) {
    for (int64_t i = 0; i < p->count; i++)
        if (p->owners[i] == owner) return i;
    return -1;
}

static int64_t xdi_places_take(xdi_places *p, int64_t owner, int64_t tick) {
    const int64_t place = xdi_places_find(p, -1);
    if (place < 0) return place;
    p->owners[place] = owner;
    p->ticks[place] = tick;
    return place;
}

static int64_t xdi_places_tick(const xdi_places *p, int64_t place) {
    return place < 0 ? -1 : p->ticks[place];
}

static void xdi_places_free(xdi_places *p, int64_t place) {
    if (place >= 0) p->owners[place] = -1;
}

typedef struct xdi_pipeline_places {
    xdi_places forwards, inputs, gradients;
    int64_t sent[2][2]; /* ticks of the last two activations, and gradients, sent; -1: none */
    int sends[2];
} xdi_pipeline_places;

static xdi_pipeline_places xdi_pipeline_all_places(const xd_pipeline_counts *counts, int64_t *owners) {
    const int64_t all = counts->forwards + counts->inputs + counts->gradients;
    xdi_pipeline_places p;
    memset(&p, 0, sizeof p);
    p.forwards.owners = owners;
    p.forwards.count = counts->forwards;
    p.inputs.owners = owners + counts->forwards;
    p.inputs.count = counts->inputs;
    p.gradients.owners = p.inputs.owners + counts->inputs;
    p.gradients.count = counts->gradients;
    p.forwards.ticks = p.forwards.owners + all;
    p.inputs.ticks = p.inputs.owners + all;
    p.gradients.ticks = p.gradients.owners + all;
    for (int64_t i = 0; i < all; i++) owners[i] = -1;
    for (int i = 0; i < 4; i++) p.sent[i / 2][i % 2] = -1;
    return p;
}

static int64_t xdi_pipeline_owner(const xd_pipeline_schedule *d, const xd_pipeline_work *work) {
    return work->virtual_stage * d->micro_batches + work->micro_batch;
}

/* What arrives at the end of a tick takes a place; -1 for nothing. */
static int64_t xdi_pipeline_receive(const xdi_schedule *s, int rank, xd_pipeline_work_kind kind,
                                    xdi_places *places) {
    const xd_pipeline_work work = xdi_schedule_arrival(s, rank, kind);
    return work.kind ? xdi_places_take(places, xdi_pipeline_owner(&s->desc, &work), s->ticks - 1) : -1;
}

/* Whether a rank or the next one is idle. */
static bool xdi_pipeline_meets(const xdi_schedule *s, int rank) {
    return s->row[rank].kind == XD_PIPELINE_IDLE || s->row[rank + 1].kind == XD_PIPELINE_IDLE;
}

static void xdi_pipeline_await(xdi_pipeline_step *step, int64_t tick) {
    if (tick > step->needs) step->needs = tick;
}

/* What must be over before the work. */
static void xdi_pipeline_order(const xdi_schedule *s, xdi_pipeline_step *step, xdi_pipeline_places *p) {
    const int kind = step->work.kind == XD_PIPELINE_FORWARD ? 0 : 1;
    xdi_pipeline_await(step, xdi_places_tick(&p->inputs, step->input));
    xdi_pipeline_await(step, xdi_places_tick(&p->gradients, step->gradient));
    if (step->to < 0) return;
    step->buffer = p->sends[kind]++ % 2;
    xdi_pipeline_await(step, p->sent[kind][step->buffer]);
    p->sent[kind][step->buffer] = s->ticks - 1;
}

static xdi_pipeline_step xdi_pipeline_step_of(const xdi_schedule *s, int rank, xdi_pipeline_places *p) {
    xdi_pipeline_step step;
    memset(&step, 0, sizeof step);
    step.work = s->row[rank];
    step.to = xdi_schedule_sends_to(&s->desc, rank, &step.work);
    step.slot = step.input = step.gradient = step.needs = -1;
    const bool forward = step.work.kind == XD_PIPELINE_FORWARD;
    const int64_t owner = xdi_pipeline_owner(&s->desc, &step.work);
    if (step.work.kind != XD_PIPELINE_IDLE) {
        step.slot = forward ? xdi_places_take(&p->forwards, owner, s->ticks - 1)
                            : xdi_places_find(&p->forwards, owner);
        step.input = xdi_places_find(&p->inputs, owner);
        step.gradient = forward ? -1 : xdi_places_find(&p->gradients, owner);
        xdi_pipeline_order(s, &step, p);
        if (!forward || s->desc.forward_only) {
            xdi_places_free(&p->forwards, step.slot);
            xdi_places_free(&p->inputs, step.input);
            xdi_places_free(&p->gradients, step.gradient);
        }
    }
    step.arrives = xdi_pipeline_receive(s, rank, XD_PIPELINE_FORWARD, &p->inputs);
    step.gradient_arrives = xdi_pipeline_receive(s, rank, XD_PIPELINE_BACKWARD, &p->gradients);
    step.meets[0] = rank > 0 && xdi_pipeline_meets(s, rank - 1);
    step.meets[1] = rank + 1 < s->desc.ranks && xdi_pipeline_meets(s, rank);
    return step;
}

XD_PRIVATE xd_result xdi_pipeline_program_fill(xd_ctx *ctx, xdi_pipeline_program *program, int rank,
                                               int64_t *owners) {
    xdi_pipeline_places places = xdi_pipeline_all_places(&program->counts, owners);
    xdi_schedule s;
    XD_TRY(xdi_schedule_open(ctx, &program->schedule, &s));
    for (int64_t waits = 0; xdi_schedule_next(&s);) {
        xdi_pipeline_step *step = &program->steps[s.ticks - 1];
        *step = xdi_pipeline_step_of(&s, rank, &places);
        waits = step->work.kind == XD_PIPELINE_IDLE ? waits + 1 : 0;
        step->waits = waits;
    }
    xdi_schedule_close(&s);
    return XD_OK;
}
