/* Steps of a route: what teachers post and students take. */

#include "comm/internal.h"
#include "teacher/route_internal.h"

#include <string.h>

/* ---- checks ---- */

static xd_result xdi_route_check_side(xd_ctx *ctx, const xd_route_side *side, int64_t samples,
                                      const char *name) {
    XD_REQUIRE(ctx, side->sample_count >= 0 && side->micro_batch >= 0 && side->span_count >= 0,
               XD_ERROR_ARGUMENT, "a %s side of %lld samples in micro-batches of %lld with %d spans", name,
               (long long)side->sample_count, (long long)side->micro_batch, side->span_count);
    XD_REQUIRE(ctx, side->sample_count <= samples, XD_ERROR_ARGUMENT, "a %s side of %lld samples, of %lld",
               name, (long long)side->sample_count, (long long)samples);
    XD_REQUIRE(ctx, side->positions || side->span_count == 0, XD_ERROR_ARGUMENT,
               "a %s side of %d spans, but none are given", name, side->span_count);
    return XD_OK;
}

static xd_result xdi_route_check_desc(xd_ctx *ctx, const xd_route_desc *d) {
    XD_REQUIRE(ctx, (int)d->payload >= 0 && d->payload <= XD_ROUTE_HIDDEN, XD_ERROR_ARGUMENT, "payload %d",
               (int)d->payload);
    XD_REQUIRE(ctx,
               d->samples > 0 && d->length > 0 && d->columns > 0 && d->samples <= INT32_MAX &&
                   d->length <= INT32_MAX && d->columns <= INT32_MAX,
               XD_ERROR_ARGUMENT, "a route of %lld samples of %lld positions by %lld columns",
               (long long)d->samples, (long long)d->length, (long long)d->columns);
    XD_REQUIRE(ctx,
               (d->wire == XD_DTYPE_F32 || d->wire == XD_DTYPE_BF16) &&
                   (d->dtype == XD_DTYPE_F32 || d->dtype == XD_DTYPE_BF16),
               XD_ERROR_DTYPE, "a wire of %s and windows of %s; F32 or BF16 is needed",
               xd_dtype_name(d->wire), xd_dtype_name(d->dtype));
    XD_REQUIRE(ctx, d->slots >= 0, XD_ERROR_ARGUMENT, "a ring of %d slots", d->slots);
    XD_TRY(xdi_route_check_side(ctx, &d->teacher, d->samples, "teacher"));
    return xdi_route_check_side(ctx, &d->student, d->samples, "student");
}

static xd_result xdi_route_agree_settings(xd_comm *comm, const xd_route_desc *d) {
    const bool cuda = xd_ctx_kernels(xd_comm_ctx(comm))->device == XD_DEVICE_CUDA;
    xdi_facts facts;
    xdi_facts_begin(&facts);
    xdi_fact_integer(&facts, "payload", (int64_t)d->payload);
    xdi_fact_integer(&facts, "samples", d->samples);
    xdi_fact_integer(&facts, "length", d->length);
    xdi_fact_integer(&facts, "columns", d->columns);
    xdi_fact_dtype(&facts, "wire", d->wire);
    xdi_fact_integer(&facts, "slots", d->slots);
    xdi_fact_integer(&facts, "messages", d->messages);
    xdi_fact_name(&facts, "the kind of device", cuda ? "CUDA" : "CPU");
    return xdi_agree_facts(comm, &facts, "settings of a route");
}

/* The defaults of a side; `whole` is the span of a sample and lives as long as the call. */
static void xdi_route_default_side(const xd_route_desc *d, const xd_route_span *whole, xd_route_side *side) {
    if (side->micro_batch == 0) side->micro_batch = side->sample_count > 0 ? side->sample_count : 1;
    if (!side->positions && side->span_count == 0) {
        side->positions = whole;
        side->span_count = 1;
    }
    if (side->column_begin == 0 && side->column_end == 0) side->column_end = d->columns;
}

/* Reports to the teachers that windows before `number`, counted over all steps, are read: they may reuse slots that no
 * later window needs. Some slots may never be needed, so this is reported before the first window too. */
static xd_result xdi_route_let_go(xd_route *route, uint64_t number) {
    XD_TRY(xdi_route_is_late(route) ? xdi_route_release_later(route) : xdi_route_finish_reading(route));
    route->told = number;
    if (!xdi_route_is_late(route)) xdi_route_release_before(route, number);
    return XD_OK;
}

/* ---- creating ---- */

/* The work of the ranks that have a side. */
static xd_result xdi_route_build(xd_route *route) {
    XD_TRY(xdi_route_plan_create(route->comm, &route->d, &route->plan));
    const xdi_route_plan *plan = &route->plan;
    const int64_t needed = xdi_route_plan_slots(plan);
    XD_REQUIRE(route->ctx, needed < INT32_MAX && (route->d.slots == 0 || route->d.slots >= needed),
               XD_ERROR_ARGUMENT, "a ring of %d slots, but students who step together need %lld",
               route->d.slots, (long long)needed);
    route->needed = (int)needed;
    if (route->d.slots == 0) route->d.slots = route->needed + 1;
    route->shared = !route->d.messages;
    XD_TRY(xdi_route_place(route));
    if (!route->shared || plan->halves[XDI_ROUTE_STUDENT][plan->rank].sample_count == 0) return XD_OK;
    return xdi_route_let_go(route, 0);
}

static xd_result xdi_route_open(xd_comm *comm, xd_route *route) {
    const bool takes_part = route->d.teacher.sample_count > 0 || route->d.student.sample_count > 0;
    XD_TRY(xd_comm_split(comm, takes_part ? 0 : -1, xd_comm_rank(comm), &route->comm));
    const xd_result built = route->comm ? xdi_route_build(route) : XD_OK;
    XD_TRY(xd_agree(comm, built));
    int sides = route->comm ? 1 : 0;
    XD_TRY(xd_all_reduce(comm, &sides, &sides, 1, XD_DTYPE_I32, XD_MAX));
    XD_REQUIRE(route->ctx, sides > 0, XD_ERROR_ARGUMENT, "no rank is a teacher or a student");
    return XD_OK;
}

XD_API xd_result xd_route_create(xd_comm *comm, const xd_route_desc *desc, xd_route **out) {
    XDI_GIVEN_COMM(comm, desc, out);
    xd_ctx *ctx = xd_comm_ctx(comm);
    xd_route_desc d = *desc;
    if (d.wire == XD_DTYPE_NONE) d.wire = XD_DTYPE_F32;
    if (d.dtype == XD_DTYPE_NONE) d.dtype = d.wire;
    const xd_route_span whole = { 0, d.length };
    xdi_route_default_side(&d, &whole, &d.teacher);
    xdi_route_default_side(&d, &whole, &d.student);
    XD_TRY(xd_agree(comm, xdi_route_check_desc(ctx, &d)));
    XD_TRY(xdi_route_agree_settings(comm, &d));
    xd_route *route = XDI_OBJECT(xd_route, ctx, sizeof *route);
    xd_result result = xd_agree(comm, route ? XD_OK : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a route"));
    if (route) {
        route->ctx = ctx;
        route->kernels = xd_ctx_kernels(ctx);
        route->d = d;
    }
    if (result == XD_OK) result = xdi_route_open(comm, route);
    if (result != XD_OK) {
        xd_route_destroy(route);
        return result;
    }
    route->d.teacher.samples = route->d.student.samples = NULL; /* the caller's */
    route->d.teacher.positions = route->d.student.positions = NULL;
    *out = route;
    return XD_OK;
}

XD_API void xd_route_destroy(xd_route *route) {
    if (!route || XDI_IS_GONE(xd_route, route)) return;
    if (!xdi_route_leave(route)) return;
    xdi_route_plan_free(route->ctx, &route->plan);
    xd_comm_destroy(route->comm); /* the last handle frees shared rings */
    xd_release(route->ctx, route);
}

/* ---- progress of a rank ---- */

static const xdi_route_half *xdi_route_own(const xd_route *route, int side) {
    return &route->plan.halves[side][route->plan.rank];
}

static uint64_t xdi_route_due(const xd_route *route, uint64_t number) {
    const uint64_t needed = xdi_route_needed_at(route, route->plan.rank, number, route->plan.need);
    return needed > route->posted ? needed - route->posted : 0;
}

XD_API xd_route_info xd_route_describe(const xd_route *route) {
    xd_route_info info;
    memset(&info, 0, sizeof info);
    if (!route->comm) return info;
    const bool takes = xdi_route_own(route, XDI_ROUTE_STUDENT)->sample_count > 0;
    info.posts = xdi_route_own(route, XDI_ROUTE_TEACHER)->batches;
    info.takes = takes ? route->plan.takes : 0;
    info.due = takes ? (int64_t)xdi_route_due(route, route->taken + (route->holds ? 1 : 0)) : 0;
    for (int64_t i = 0; i < info.takes; i++) info.views += xdi_route_is_view(route, i) ? 1 : 0;
    info.slots = route->d.slots;
    info.needed = route->needed;
    info.shared = route->shared;
    info.bytes = route->bytes;
    return info;
}

/* ---- pieces: the rectangles of the plan ---- */

/* The piece's rectangle in rows of a stride, from an element of them. */
static xd_rows xdi_route_rectangle(const xdi_route_piece *p, void *data, xd_dtype dtype, int64_t stride,
                                   int64_t row, int64_t column) {
    xd_rows rows;
    rows.data = (char *)data + (size_t)(row * stride + column) * xd_dtype_size(dtype);
    rows.dtype = dtype;
    rows.rows = p->positions;
    rows.cols = p->columns;
    rows.stride = stride;
    return rows;
}

static xd_rows xdi_route_from(const xd_route *route, const xdi_route_piece *p, uint64_t number) {
    const xdi_route_half *half = &route->plan.halves[XDI_ROUTE_TEACHER][p->teacher];
    return xdi_route_rectangle(p, xdi_route_slot_rows(&route->rings, p->teacher, number), route->d.wire,
                               half->column_end - half->column_begin,
                               p->from_sample * half->held + p->from_position, p->from_column);
}

static xd_rows xdi_route_to(const xd_route *route, const xdi_route_piece *p) {
    const xdi_route_half *half = xdi_route_own(route, XDI_ROUTE_STUDENT);
    return xdi_route_rectangle(p, route->window, route->d.dtype, half->column_end - half->column_begin,
                               p->to_sample * half->held + p->to_position, p->to_column);
}

/* ---- messages: one step of the students ---- */

static xd_result xdi_route_pack(xd_route *route, uint64_t first, int64_t begin, int64_t end, int64_t *counts,
                                int64_t *id_counts) {
    const xdi_route_plan *plan = &route->plan;
    const size_t list = (size_t)route->d.columns * sizeof(int64_t);
    int64_t at = 0, lists = 0;
    for (int64_t i = begin; i < end; i++) {
        const xdi_route_piece *p = &plan->pieces[i];
        if (p->teacher != plan->rank) continue;
        const uint64_t number = first + (uint64_t)p->batch;
        const xd_rows from = xdi_route_from(route, p, number);
        const xd_rows to = xdi_route_rectangle(p, route->messages.send, route->d.wire, p->columns, 0, at);
        XD_TRY(xdi_rows_copy(route->ctx, route->kernels, &from, &to));
        at += p->positions * p->columns;
        counts[p->student] += p->positions * p->columns;
        if (route->d.payload != XD_ROUTE_COLUMNS || !p->brings_ids) continue;
        memcpy(route->messages.send_ids + lists++ * route->d.columns,
               xdi_route_slot_ids(&route->rings, p->teacher, number) + p->from_sample * route->d.columns,
               list);
        id_counts[p->student] += route->d.columns;
    }
    return XD_OK;
}

static xd_result xdi_route_unpack_step(xd_route *route, int64_t begin, int64_t end, int64_t *at,
                                       int64_t *ids_at) {
    const xdi_route_plan *plan = &route->plan;
    for (int64_t i = begin; i < end; i++) {
        const xdi_route_piece *p = &plan->pieces[i];
        if (p->student != plan->rank) continue;
        const xd_rows from =
            xdi_route_rectangle(p, route->messages.recv, route->d.wire, p->columns, 0, at[p->teacher]);
        const xd_rows to = xdi_route_to(route, p);
        XD_TRY(xdi_rows_copy(route->ctx, route->kernels, &from, &to));
        at[p->teacher] += p->positions * p->columns;
        if (route->d.payload != XD_ROUTE_COLUMNS || !p->brings_ids) continue;
        memcpy(route->window_ids + p->to_sample * route->d.columns,
               route->messages.recv_ids + ids_at[p->teacher], (size_t)route->d.columns * sizeof(int64_t));
        ids_at[p->teacher] += route->d.columns;
    }
    return XD_OK;
}

/* Turns counts into offsets, in rank order. */
static void xdi_route_begins(int64_t *counts, int ranks) {
    int64_t sum = 0;
    for (int r = 0; r < ranks; r++) {
        const int64_t n = counts[r];
        counts[r] = sum;
        sum += n;
    }
}

static xd_result xdi_route_exchange(xd_route *route) {
    xdi_route_messages *messages = &route->messages;
    const xdi_route_plan *plan = &route->plan;
    const int ranks = plan->ranks;
    const int64_t step = (int64_t)(messages->exchanged % (uint64_t)plan->takes);
    const uint64_t round = messages->exchanged / (uint64_t)plan->takes;
    const uint64_t first = round * (uint64_t)xdi_route_own(route, XDI_ROUTE_TEACHER)->batches;
    const int64_t begin = plan->step_begin[step], end = plan->step_begin[step + 1];
    int64_t *out = messages->counts, *in = out + ranks, *ids_out = in + ranks, *ids_in = ids_out + ranks;
    memset(messages->counts, 0, 4 * (size_t)ranks * sizeof *messages->counts);
    XD_TRY(xdi_route_pack(route, first, begin, end, out, ids_out));
    for (int64_t i = begin; i < end; i++) {
        const xdi_route_piece *p = &plan->pieces[i];
        if (p->student != plan->rank) continue;
        in[p->teacher] += p->positions * p->columns;
        if (p->brings_ids) ids_in[p->teacher] += route->d.columns;
    }
    XD_TRY(xd_all_to_all(route->comm, messages->send, out, messages->recv, in, route->d.wire));
    if (route->d.payload == XD_ROUTE_COLUMNS)
        XD_TRY(xd_all_to_all(route->comm, messages->send_ids, ids_out, messages->recv_ids, ids_in,
                             XD_DTYPE_I64));
    messages->exchanged++;
    xdi_route_begins(in, ranks);
    xdi_route_begins(ids_in, ranks);
    return xdi_route_unpack_step(route, begin, end, in, ids_in);
}

/* The steps that a rank without a student side has completed: at least one micro-batch of a step is posted
 * before its first exchange, so that no rank waits in the last post for a step that may never begin. */
static xd_result xdi_route_catch_up(xd_route *route) {
    for (;;) {
        const uint64_t batches = (uint64_t)xdi_route_own(route, XDI_ROUTE_TEACHER)->batches;
        const uint64_t begun = route->messages.exchanged / (uint64_t)route->plan.takes * batches;
        const uint64_t need =
            xdi_route_needed_at(route, route->plan.rank, route->messages.exchanged, route->plan.need);
        if (route->posted < need || route->posted <= begun) return XD_OK;
        XD_TRY(xdi_route_exchange(route));
    }
}

/* ---- the teacher's side ---- */

/* Waits until a student has released `target` micro-batches; the stream then waits for the student's kernels. */
static xd_result xdi_route_wait_reader(const xd_route *route, int student, uint64_t target) {
    const uint64_t *released = xdi_route_released(&route->rings, route->plan.rank, student);
    XD_TRY(xdi_route_watch(route, released, target, student));
    return xdi_route_follow_reader(route, student);
}

/* Have the students released the previous contents of the next micro-batch's slot? */
static xd_result xdi_route_wait_slot(xd_route *route) {
    const int me = route->plan.rank;
    const uint64_t slots = (uint64_t)route->d.slots;
    bool own = false;
    if (route->posted < slots) return XD_OK;
    const uint64_t target = route->posted - slots + 1;
    if (!route->shared)
        own = xdi_route_needed_at(route, me, route->messages.exchanged, route->plan.first) < target;
    else if (route->rings.used_by[me])
        own = xdi_route_needed_at(route, me, route->told, route->plan.still) < target;
    XD_REQUIRE(route->ctx, !own, XD_ERROR_STATE,
               "all %d slots are full and this rank's own student side has to take first", route->d.slots);
    for (int s = 0; s < route->plan.ranks && route->shared; s++)
        if (route->rings.used_by[s]) XD_TRY(xdi_route_wait_reader(route, s, target));
    return XD_OK;
}

static int64_t xdi_route_next_samples(const xd_route *route) {
    const xdi_route_half *half = xdi_route_own(route, XDI_ROUTE_TEACHER);
    return xdi_route_plan_samples(half, (int64_t)(route->posted % (uint64_t)half->batches));
}

static xd_result xdi_route_check_teacher(const xd_route *route) {
    XD_REQUIRE(route->ctx, route->comm && xdi_route_own(route, XDI_ROUTE_TEACHER)->sample_count > 0,
               XD_ERROR_STATE, "this rank has no teacher side");
    return xdi_comm_own(route->comm);
}

XD_API xd_result xd_route_slot(xd_route *route, xd_rows *rows, int64_t **ids) {
    XDI_LIVE(xd_route, route);
    XDI_GIVEN_OF(route, rows);
    XD_TRY(xdi_route_check_teacher(route));
    const xdi_route_half *half = xdi_route_own(route, XDI_ROUTE_TEACHER);
    const int me = route->plan.rank;
    if (!route->open) XD_TRY(xdi_route_wait_slot(route));
    route->open = true;
    rows->data = xdi_route_slot_rows(&route->rings, me, route->posted);
    rows->dtype = route->d.wire;
    rows->rows = xdi_route_next_samples(route) * half->held;
    rows->cols = rows->stride = half->column_end - half->column_begin;
    if (ids)
        *ids = route->d.payload == XD_ROUTE_COLUMNS ? xdi_route_slot_ids(&route->rings, me, route->posted)
                                                    : NULL;
    return XD_OK;
}

XD_API xd_result xd_route_post(xd_route *route) {
    XDI_LIVE(xd_route, route);
    XDI_GIVEN(route ? route->ctx : NULL, route);
    XD_TRY(xdi_route_check_teacher(route));
    XD_REQUIRE(route->ctx, route->open, XD_ERROR_STATE, "no slot is open: xd_route_slot comes first");
    XD_TRY(xdi_route_is_late(route) ? xdi_route_post_later(route) : xdi_route_show(route));
    route->open = false;
    route->posted++;
    if (xdi_route_is_late(route)) return XD_OK;
    if (route->shared)
        __atomic_store_n(xdi_route_posted(&route->rings, route->plan.rank), route->posted, __ATOMIC_RELEASE);
    else if (xdi_route_own(route, XDI_ROUTE_STUDENT)->sample_count == 0)
        return xdi_route_catch_up(route);
    return XD_OK;
}

static xd_result xdi_route_check_rows_sent(const xd_route *route, const xd_rows *rows, const int64_t *ids) {
    const xdi_route_half *half = xdi_route_own(route, XDI_ROUTE_TEACHER);
    const int64_t count = xdi_route_next_samples(route) * half->held;
    const int64_t columns = half->column_end - half->column_begin;
    XD_REQUIRE(route->ctx, rows->dtype == XD_DTYPE_F32 || rows->dtype == XD_DTYPE_BF16, XD_ERROR_DTYPE,
               "rows of %s; F32 or BF16 is needed", xd_dtype_name(rows->dtype));
    XD_REQUIRE(route->ctx,
               rows->rows == count && rows->cols == columns &&
                   (rows->stride == 0 || rows->stride >= columns) && (rows->data || count * columns == 0),
               XD_ERROR_SHAPE, "rows of %lld by %lld with stride %lld, but the micro-batch has %lld by %lld",
               (long long)rows->rows, (long long)rows->cols, (long long)rows->stride, (long long)count,
               (long long)columns);
    XD_REQUIRE(route->ctx, ids || route->d.payload != XD_ROUTE_COLUMNS, XD_ERROR_ARGUMENT,
               "chosen columns without their ids");
    XD_REQUIRE(route->ctx, !rows->data || route->kernels->memory.owns(route->ctx, rows->data),
               XD_ERROR_ARGUMENT, "rows at %p are memory of the host, the context's tensors are a GPU's",
               rows->data);
    XD_REQUIRE(route->ctx,
               !ids || route->kernels->device == XD_DEVICE_CPU ||
                   !route->kernels->memory.owns(route->ctx, ids),
               XD_ERROR_ARGUMENT, "ids at %p are memory of a GPU; lists are the host's", (const void *)ids);
    return XD_OK;
}

XD_API xd_result xd_route_send(xd_route *route, xd_rows rows, const int64_t *ids) {
    XDI_LIVE(xd_route, route);
    XDI_GIVEN(route ? route->ctx : NULL, route);
    XD_TRY(xdi_route_check_teacher(route));
    XD_TRY(xdi_route_check_rows_sent(route, &rows, ids));
    xd_rows slot;
    int64_t *slot_ids = NULL;
    XD_TRY(xd_route_slot(route, &slot, &slot_ids));
    if (!rows.stride) rows.stride = rows.cols;
    XD_TRY(xdi_rows_copy(route->ctx, route->kernels, &rows, &slot));
    if (slot_ids)
        memcpy(slot_ids, ids, (size_t)(xdi_route_next_samples(route) * route->d.columns) * sizeof *ids);
    return xd_route_post(route);
}

/* ---- the student's side ---- */

static xd_result xdi_route_wait_piece(const xd_route *route, const xdi_route_piece *p, uint64_t number) {
    XD_TRY(xdi_route_watch(route, xdi_route_posted(&route->rings, p->teacher), number + 1, p->teacher));
    return xdi_route_follow_slot(route, p->teacher, number);
}

/* Waits for the pieces of the step in the order of the plan and copies each, unless the window is a view. */
static xd_result xdi_route_collect(xd_route *route, int64_t step, uint64_t round, bool view) {
    const xdi_route_plan *plan = &route->plan;
    for (int64_t i = plan->step_begin[step]; i < plan->step_begin[step + 1]; i++) {
        const xdi_route_piece *p = &plan->pieces[i];
        if (p->student != plan->rank) continue;
        const uint64_t number =
            round * (uint64_t)plan->halves[XDI_ROUTE_TEACHER][p->teacher].batches + (uint64_t)p->batch;
        XD_TRY(xdi_route_wait_piece(route, p, number));
        if (view) continue;
        const xd_rows from = xdi_route_from(route, p, number), to = xdi_route_to(route, p);
        XD_TRY(xdi_rows_copy(route->ctx, route->kernels, &from, &to));
        if (route->d.payload == XD_ROUTE_COLUMNS && p->brings_ids)
            memcpy(route->window_ids + p->to_sample * route->d.columns,
                   xdi_route_slot_ids(&route->rings, p->teacher, number) + p->from_sample * route->d.columns,
                   (size_t)route->d.columns * sizeof(int64_t));
    }
    return view ? XD_OK : xdi_route_let_go(route, route->taken + 1);
}

/* The window as a view into its slot. */
static void xdi_route_look(const xd_route *route, int64_t step, uint64_t round, xd_route_window *window) {
    const xdi_route_piece *p = xdi_route_plan_view(&route->plan, step);
    const xdi_route_half *half = &route->plan.halves[XDI_ROUTE_TEACHER][p->teacher];
    const uint64_t number = round * (uint64_t)half->batches + (uint64_t)p->batch;
    const xd_rows from = xdi_route_from(route, p, number);
    window->is_view = true;
    window->rows.data = from.data;
    window->rows.stride = from.stride;
    if (window->ids)
        window->ids =
            xdi_route_slot_ids(&route->rings, p->teacher, number) + p->from_sample * route->d.columns;
}

static xd_result xdi_route_check_take(const xd_route *route) {
    XD_REQUIRE(route->ctx, route->comm && xdi_route_own(route, XDI_ROUTE_STUDENT)->sample_count > 0,
               XD_ERROR_STATE, "this rank has no student side");
    XD_REQUIRE(route->ctx, !route->holds, XD_ERROR_STATE, "the last window was not released");
    const uint64_t due = xdi_route_due(route, route->taken);
    XD_REQUIRE(route->ctx, due == 0, XD_ERROR_STATE,
               "%llu micro-batches of this rank have to be posted first", (unsigned long long)due);
    return xdi_comm_own(route->comm);
}

XD_API xd_result xd_route_take(xd_route *route, xd_route_window *out) {
    XDI_LIVE(xd_route, route);
    XDI_GIVEN_OF(route, out);
    XD_TRY(xdi_route_check_take(route));
    const xdi_route_half *half = xdi_route_own(route, XDI_ROUTE_STUDENT);
    const uint64_t takes = (uint64_t)route->plan.takes, round = route->taken / takes;
    const int64_t step = (int64_t)(route->taken % takes);
    xd_route_window window;
    memset(&window, 0, sizeof window);
    window.sample_count = xdi_route_plan_samples(half, step);
    window.rows.data = route->window;
    window.rows.dtype = route->d.dtype;
    window.rows.rows = window.sample_count * half->held;
    window.rows.cols = window.rows.stride = half->column_end - half->column_begin;
    if (route->d.payload == XD_ROUTE_COLUMNS) window.ids = route->window_ids;
    const bool view = xdi_route_is_view(route, step);
    XD_TRY(route->shared ? xdi_route_collect(route, step, round, view) : xdi_route_exchange(route));
    if (view) xdi_route_look(route, step, round, &window);
    route->holds = true;
    *out = window;
    return XD_OK;
}

XD_API xd_result xd_route_release(xd_route *route) {
    XDI_LIVE(xd_route, route);
    XDI_GIVEN(route ? route->ctx : NULL, route);
    XD_REQUIRE(route->ctx, route->holds, XD_ERROR_STATE, "there is no window to release");
    XD_TRY(xdi_comm_own(route->comm));
    const uint64_t takes = (uint64_t)route->plan.takes;
    const int64_t step = (int64_t)(route->taken % takes);
    route->holds = false;
    route->taken++;
    return xdi_route_is_view(route, step) ? xdi_route_let_go(route, route->taken) : XD_OK;
}
