/* The plan of a route: which teacher rank sends what to which student rank. */

#include "teacher/route_internal.h"

#include <string.h>

/* The words that describe a rank: five numbers per side, then for each side its samples and its spans. */
enum { XDI_ROUTE_HALF_WORDS = 5, XDI_ROUTE_HEAD_WORDS = XDI_ROUTE_SIDES * XDI_ROUTE_HALF_WORDS };

static const char *const xdi_route_side_names[XDI_ROUTE_SIDES] = { "teacher", "student" };

/* ---- the table of all ranks ---- */

static int64_t xdi_route_half_extent(const int64_t *head) {
    return head[0] + 2 * head[2];
}

static void xdi_route_pack_head(const xd_route_side *side, int64_t *head) {
    head[0] = side->sample_count;
    head[1] = side->micro_batch;
    head[2] = side->span_count;
    head[3] = side->column_begin;
    head[4] = side->column_end;
}

static int64_t *xdi_route_pack_lists(const xd_route_side *side, int64_t *words) {
    for (int64_t i = 0; i < side->sample_count; i++)
        *words++ = side->samples ? side->samples[i] : (int64_t)((uint64_t)side->sample_begin + (uint64_t)i);
    for (int i = 0; i < side->span_count; i++) {
        *words++ = side->positions[i].begin;
        *words++ = side->positions[i].end;
    }
    return words;
}

static const int64_t *xdi_route_unpack(const int64_t *head, const int64_t *words, xdi_route_half *half) {
    half->sample_count = head[0];
    half->micro_batch = head[1];
    half->span_count = head[2];
    half->column_begin = head[3];
    half->column_end = head[4];
    half->samples = words;
    half->spans = (const xd_route_span *)(const void *)(words + half->sample_count);
    if (half->micro_batch > 0)
        half->batches =
            half->sample_count / half->micro_batch + (half->sample_count % half->micro_batch != 0);
    uint64_t held = 0; /* the spans are not checked yet, and may have any ends */
    for (int64_t i = 0; i < half->span_count; i++)
        held += (uint64_t)half->spans[i].end - (uint64_t)half->spans[i].begin;
    half->held = (int64_t)held;
    return words + half->sample_count + 2 * half->span_count;
}

/* All ranks' lists in plan->words, one after the other, and the offsets of each rank's sides in them. */
static xd_result xdi_route_gather(xd_comm *comm, const xd_route_desc *d, const int64_t *heads, int64_t *mine,
                                  int64_t *counts, xdi_route_plan *plan) {
    const xd_route_side *sides[XDI_ROUTE_SIDES] = { &d->teacher, &d->student };
    int64_t *at = mine;
    for (int s = 0; s < XDI_ROUTE_SIDES; s++) at = xdi_route_pack_lists(sides[s], at);
    XD_TRY(xd_all_gather(comm, mine, plan->words, counts, XD_DTYPE_I64));
    const int64_t *words = plan->words;
    for (int r = 0; r < plan->ranks; r++)
        for (int s = 0; s < XDI_ROUTE_SIDES; s++)
            words = xdi_route_unpack(heads + r * XDI_ROUTE_HEAD_WORDS + s * XDI_ROUTE_HALF_WORDS, words,
                                     &plan->halves[s][r]);
    return XD_OK;
}

static xd_result xdi_route_read(xd_comm *comm, const xd_route_desc *d, int64_t *heads, int64_t *counts,
                                xdi_route_plan *plan) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    int64_t head[XDI_ROUTE_HEAD_WORDS];
    xdi_route_pack_head(&d->teacher, head);
    xdi_route_pack_head(&d->student, head + XDI_ROUTE_HALF_WORDS);
    XD_TRY(xdi_comm_all_gather_equal(comm, head, heads, XDI_ROUTE_HEAD_WORDS, XD_DTYPE_I64));
    for (int r = 0; r < plan->ranks; r++) {
        const int64_t *theirs = heads + r * XDI_ROUTE_HEAD_WORDS;
        counts[r] = xdi_route_half_extent(theirs) + xdi_route_half_extent(theirs + XDI_ROUTE_HALF_WORDS);
    }
    const size_t total = (size_t)xdi_comm_total(counts, plan->ranks);
    plan->words = (int64_t *)xd_allocate(ctx, (total + 1) * sizeof *plan->words);
    int64_t *mine = (int64_t *)xd_allocate(ctx, ((size_t)counts[plan->rank] + 1) * sizeof *mine);
    xd_result result = plan->words && mine
                           ? XD_OK
                           : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for the sides of %d ranks", plan->ranks);
    result = xd_agree(comm, result);
    if (result == XD_OK) result = xdi_route_gather(comm, d, heads, mine, counts, plan);
    xd_release(ctx, mine);
    return result;
}

/* ---- checks: every rank sees the same table and so the same error ---- */

static xd_result xdi_route_check_samples(xd_ctx *ctx, const xd_route_desc *d, const xdi_route_half *half,
                                         int rank, const char *side, uint8_t *seen) {
    memset(seen, 0, (size_t)d->samples);
    for (int64_t i = 0; i < half->sample_count; i++) {
        const int64_t sample = half->samples[i];
        XD_REQUIRE(ctx, sample >= 0 && sample < d->samples, XD_ERROR_ARGUMENT,
                   "%s rank %d has sample %lld of %lld", side, rank, (long long)sample,
                   (long long)d->samples);
        XD_REQUIRE(ctx, !seen[sample], XD_ERROR_ARGUMENT, "%s rank %d has sample %lld twice", side, rank,
                   (long long)sample);
        seen[sample] = 1;
    }
    return XD_OK;
}

static xd_result xdi_route_check_half(xd_ctx *ctx, const xd_route_desc *d, const xdi_route_half *half,
                                      int rank, const char *side) {
    int64_t last = 0;
    XD_REQUIRE(ctx, half->micro_batch > 0, XD_ERROR_ARGUMENT, "%s rank %d has micro-batches of %lld samples",
               side, rank, (long long)half->micro_batch);
    for (int64_t i = 0; i < half->span_count; i++) {
        const xd_route_span *s = &half->spans[i];
        XD_REQUIRE(ctx, s->begin >= last && s->begin <= s->end && s->end <= d->length, XD_ERROR_ARGUMENT,
                   "%s rank %d has positions [%lld, %lld) after %lld, of %lld", side, rank,
                   (long long)s->begin, (long long)s->end, (long long)last, (long long)d->length);
        last = s->end;
    }
    XD_REQUIRE(ctx,
               half->column_begin >= 0 && half->column_begin <= half->column_end &&
                   half->column_end <= d->columns,
               XD_ERROR_ARGUMENT, "%s rank %d has columns [%lld, %lld) of %lld", side, rank,
               (long long)half->column_begin, (long long)half->column_end, (long long)d->columns);
    return XD_OK;
}

static xd_result xdi_route_check_table(xd_comm *comm, const xd_route_desc *d, const xdi_route_plan *plan,
                                       uint8_t *seen) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    for (int s = 0; s < XDI_ROUTE_SIDES; s++) {
        int present = 0;
        for (int r = 0; r < plan->ranks; r++) {
            const xdi_route_half *half = &plan->halves[s][r];
            const int rank = xd_comm_world_rank(comm, r);
            if (half->sample_count == 0) continue;
            present++;
            XD_TRY(xdi_route_check_half(ctx, d, half, rank, xdi_route_side_names[s]));
            XD_TRY(xdi_route_check_samples(ctx, d, half, rank, xdi_route_side_names[s], seen));
            XD_REQUIRE(ctx,
                       d->payload != XD_ROUTE_COLUMNS || s == XDI_ROUTE_TEACHER ||
                           half->column_end - half->column_begin == d->columns,
                       XD_ERROR_ARGUMENT, "student rank %d wants %lld of the %lld chosen columns", rank,
                       (long long)(half->column_end - half->column_begin), (long long)d->columns);
        }
        XD_REQUIRE(ctx, present > 0, XD_ERROR_ARGUMENT, "no rank is a %s", xdi_route_side_names[s]);
    }
    return XD_OK;
}

/* ---- which rank has which samples ---- */

static bool xdi_route_same_layout(const xdi_route_half *a, const xdi_route_half *b) {
    return a->column_begin == b->column_begin && a->column_end == b->column_end &&
           a->span_count == b->span_count &&
           memcmp(a->spans, b->spans, (size_t)a->span_count * sizeof *a->spans) == 0;
}

/* Layouts, and the index of each sample in each teacher's list. */
static void xdi_route_index(const xd_route_desc *d, xdi_route_plan *plan) {
    for (int r = 0; r < plan->ranks; r++) {
        xdi_route_half *half = &plan->halves[XDI_ROUTE_TEACHER][r];
        half->place = plan->places + (int64_t)r * d->samples;
        for (int64_t i = 0; i < d->samples; i++) half->place[i] = -1;
        for (int64_t i = 0; i < half->sample_count; i++) half->place[half->samples[i]] = i;
        half->layout = 0;
        while (!xdi_route_same_layout(half, &plan->halves[XDI_ROUTE_TEACHER][half->layout])) half->layout++;
    }
}

/* The teacher ranks that a student takes a sample from, ascending: one of each layout that has it. Among replicas
 * it prefers itself; else students are spread over them. Returns their number. */
static int xdi_route_sources(const xdi_route_plan *plan, int student, int64_t sample, int *sources) {
    const xdi_route_half *teachers = plan->halves[XDI_ROUTE_TEACHER];
    const bool own = teachers[student].place[sample] >= 0;
    int count = 0;
    memset(plan->counts, 0, (size_t)plan->ranks * sizeof *plan->counts);
    for (int r = 0; r < plan->ranks; r++)
        if (teachers[r].place[sample] >= 0) plan->counts[teachers[r].layout]++;
    for (int r = 0; r < plan->ranks; r++) plan->counts[r] = plan->counts[r] ? student % plan->counts[r] : -1;
    if (own) plan->counts[teachers[student].layout] = -1;
    for (int r = 0; r < plan->ranks; r++) {
        if (teachers[r].place[sample] < 0) continue;
        if (own && r == student)
            sources[count++] = r;
        else if (plan->counts[teachers[r].layout] >= 0 && plan->counts[teachers[r].layout]-- == 0)
            sources[count++] = r;
    }
    return count;
}

static int64_t xdi_route_most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static int64_t xdi_route_least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t xdi_route_common_columns(const xdi_route_half *a, const xdi_route_half *b) {
    return xdi_route_most(0, xdi_route_least(a->column_end, b->column_end) -
                                 xdi_route_most(a->column_begin, b->column_begin));
}

/* A run of positions that two sides share, and its first row in each. */
typedef struct xdi_route_run {
    int64_t a, b;             /* spans to look at next */
    int64_t a_begin, b_begin; /* their first rows */
    int64_t a_row, b_row, length;
} xdi_route_run;

/* The next run of two ascending lists; false at the end. */
static bool xdi_route_next_run(const xdi_route_half *a, const xdi_route_half *b, xdi_route_run *run) {
    while (run->a < a->span_count && run->b < b->span_count) {
        const xd_route_span *x = &a->spans[run->a], *y = &b->spans[run->b];
        const int64_t begin = xdi_route_most(x->begin, y->begin), end = xdi_route_least(x->end, y->end);
        run->a_row = run->a_begin + begin - x->begin;
        run->b_row = run->b_begin + begin - y->begin;
        run->length = end - begin;
        if (x->end <= y->end) {
            run->a_begin += x->end - x->begin;
            run->a++;
        } else {
            run->b_begin += y->end - y->begin;
            run->b++;
        }
        if (run->length > 0) return true;
    }
    return false;
}

static int64_t xdi_route_common(const xdi_route_half *a, const xdi_route_half *b) {
    xdi_route_run run;
    int64_t positions = 0;
    memset(&run, 0, sizeof run);
    while (xdi_route_next_run(a, b, &run)) positions += run.length;
    return positions * xdi_route_common_columns(a, b);
}

/* Disjoint shards whose parts add up to the window cover it. */
static xd_result xdi_route_check_cover(xd_comm *comm, const xdi_route_plan *plan, int student, int64_t sample,
                                       int count) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    const xdi_route_half *teachers = plan->halves[XDI_ROUTE_TEACHER];
    const xdi_route_half *window = &plan->halves[XDI_ROUTE_STUDENT][student];
    const int64_t wanted = window->held * (window->column_end - window->column_begin);
    int64_t covered = 0;
    for (int i = 0; i < count; i++) {
        const xdi_route_half *shard = &teachers[plan->sources[i]];
        covered += xdi_route_common(shard, window);
        for (int j = 0; j < i; j++)
            XD_REQUIRE(ctx, xdi_route_common(shard, &teachers[plan->sources[j]]) == 0, XD_ERROR_SHAPE,
                       "the shards of teacher ranks %d and %d overlap in part in sample %lld",
                       xd_comm_world_rank(comm, plan->sources[j]), xd_comm_world_rank(comm, plan->sources[i]),
                       (long long)sample);
    }
    XD_REQUIRE(ctx, covered == wanted, XD_ERROR_SHAPE,
               "teachers hold %lld of the %lld elements of sample %lld that student rank %d wants",
               (long long)covered, (long long)wanted, (long long)sample, xd_comm_world_rank(comm, student));
    return XD_OK;
}

/* ---- pieces ---- */

XD_PRIVATE int64_t xdi_route_plan_samples(const xdi_route_half *half, int64_t batch) {
    if (batch >= half->batches) return 0;
    return xdi_route_least(half->micro_batch, half->sample_count - batch * half->micro_batch);
}

/* Adds a piece, or extends the last one if both sides continue without a gap. */
static void xdi_route_add(xdi_route_plan *plan, int64_t *of_sample, const xdi_route_piece *piece) {
    xdi_route_piece *last =
        plan->pieces && plan->piece_count > 0 ? &plan->pieces[plan->piece_count - 1] : NULL;
    if (last && *of_sample > 0 && last->teacher == piece->teacher && last->student == piece->student &&
        last->to_sample == piece->to_sample &&
        last->from_position + last->positions == piece->from_position &&
        last->to_position + last->positions == piece->to_position) {
        last->positions += piece->positions;
        return;
    }
    if (plan->pieces) {
        plan->pieces[plan->piece_count] = *piece;
        plan->pieces[plan->piece_count].brings_ids = *of_sample == 0;
    }
    ++*of_sample;
    plan->piece_count++;
}

/* The pieces of one sample that this rank sends or takes. */
static void xdi_route_add_sample(xdi_route_plan *plan, int student, int64_t at, int count) {
    const xdi_route_half *window = &plan->halves[XDI_ROUTE_STUDENT][student];
    int64_t of_sample = 0;
    for (int i = 0; i < count; i++) {
        const int teacher = plan->sources[i];
        const xdi_route_half *shard = &plan->halves[XDI_ROUTE_TEACHER][teacher];
        const int64_t place = shard->place[window->samples[at]],
                      columns = xdi_route_common_columns(shard, window);
        const bool mine = teacher == plan->rank || student == plan->rank;
        xdi_route_piece piece;
        xdi_route_run run;
        memset(&run, 0, sizeof run);
        memset(&piece, 0, sizeof piece);
        piece.teacher = teacher;
        piece.student = student;
        piece.batch = place / shard->micro_batch;
        piece.from_sample = place % shard->micro_batch;
        piece.to_sample = at % window->micro_batch;
        piece.columns = columns;
        piece.from_column = xdi_route_most(0, window->column_begin - shard->column_begin);
        piece.to_column = xdi_route_most(0, shard->column_begin - window->column_begin);
        while (columns > 0 && xdi_route_next_run(shard, window, &run)) {
            piece.from_position = run.a_row;
            piece.to_position = run.b_row;
            piece.positions = run.length;
            if (mine) xdi_route_add(plan, &of_sample, &piece);
            if (!mine) of_sample++; /* another sender brings the ids */
        }
    }
}

/* What the sample requires of the teachers' rings. All teachers that hold the sample post it before it is taken,
 * whichever of them it is taken from: ranks that compute it together post at the same time. */
static void xdi_route_note(xdi_route_plan *plan, int student, int64_t at, int count) {
    const xdi_route_half *window = &plan->halves[XDI_ROUTE_STUDENT][student];
    const int64_t step = at / window->micro_batch;
    for (int r = 0; r < plan->ranks; r++) {
        const xdi_route_half *shard = &plan->halves[XDI_ROUTE_TEACHER][r];
        const int64_t place = shard->place[window->samples[at]], cell = r * (plan->takes + 1) + step;
        if (place >= 0) plan->need[cell] = xdi_route_most(plan->need[cell], place / shard->micro_batch + 1);
    }
    for (int i = 0; i < count; i++) {
        const xdi_route_half *shard = &plan->halves[XDI_ROUTE_TEACHER][plan->sources[i]];
        const int64_t batch = shard->place[window->samples[at]] / shard->micro_batch;
        const int64_t cell = plan->sources[i] * (plan->takes + 1) + step;
        if (xdi_route_common(shard, window) == 0) continue;
        plan->first[cell] = xdi_route_least(plan->first[cell], batch);
        if (student == plan->rank) plan->still[cell] = xdi_route_least(plan->still[cell], batch);
    }
}

/* One window: its samples are checked when the teachers that have them change. */
static xd_result xdi_route_walk_window(xd_comm *comm, xdi_route_plan *plan, int student, int64_t step) {
    const xdi_route_half *window = &plan->halves[XDI_ROUTE_STUDENT][student];
    const int64_t begin = step * window->micro_batch, end = begin + xdi_route_plan_samples(window, step);
    int last = -1;
    for (int64_t at = begin; at < end; at++) {
        const int64_t sample = window->samples[at];
        const int count = xdi_route_sources(plan, student, sample, plan->sources);
        if (count != last ||
            memcmp(plan->sources, plan->last_sources, (size_t)count * sizeof *plan->sources) != 0)
            XD_TRY(xdi_route_check_cover(comm, plan, student, sample, count));
        last = count;
        memcpy(plan->last_sources, plan->sources, (size_t)count * sizeof *plan->sources);
        xdi_route_note(plan, student, at, count);
        xdi_route_add_sample(plan, student, at, count);
    }
    return XD_OK;
}

/* With plan->pieces NULL the pieces are counted: an upper bound, because none are joined. */
static xd_result xdi_route_walk(xd_comm *comm, xdi_route_plan *plan) {
    plan->piece_count = 0;
    for (int64_t step = 0; step < plan->takes; step++) {
        plan->step_begin[step] = plan->piece_count;
        for (int s = 0; s < plan->ranks; s++) XD_TRY(xdi_route_walk_window(comm, plan, s, step));
    }
    plan->step_begin[plan->takes] = plan->piece_count;
    return XD_OK;
}

/* What must be posted accumulates over the steps so far; the first micro-batch needed, over the steps to come. */
static void xdi_route_accumulate(xdi_route_plan *plan) {
    for (int r = 0; r < plan->ranks; r++) {
        int64_t *need = plan->need + r * (plan->takes + 1);
        int64_t *first = plan->first + r * (plan->takes + 1), *still = plan->still + r * (plan->takes + 1);
        for (int64_t i = 1; i <= plan->takes; i++) need[i] = xdi_route_most(need[i], need[i - 1]);
        for (int64_t i = plan->takes - 1; i >= 0; i--) {
            first[i] = xdi_route_least(first[i], first[i + 1]);
            still[i] = xdi_route_least(still[i], still[i + 1]);
        }
    }
}

XD_PRIVATE int64_t xdi_route_plan_slots(const xdi_route_plan *plan) {
    int64_t slots = 1;
    for (int64_t r = 0; r < plan->ranks; r++)
        for (int64_t i = 0; i < plan->takes; i++) {
            const int64_t cell = r * (plan->takes + 1) + i;
            slots = xdi_route_most(slots, plan->need[cell] - plan->first[cell]);
        }
    return slots;
}

XD_PRIVATE const xdi_route_piece *xdi_route_plan_view(const xdi_route_plan *plan, int64_t step) {
    const xdi_route_half *window = &plan->halves[XDI_ROUTE_STUDENT][plan->rank];
    const xdi_route_piece *first = NULL;
    int64_t samples = 0;
    for (int64_t i = plan->step_begin[step]; i < plan->step_begin[step + 1]; i++) {
        const xdi_route_piece *p = &plan->pieces[i];
        if (p->student != plan->rank) continue;
        if (!first) first = p;
        if (p->teacher != first->teacher || p->batch != first->batch || p->positions != window->held ||
            p->columns != window->column_end - window->column_begin ||
            p->from_sample != first->from_sample + samples)
            return NULL;
        samples++;
    }
    const bool aligned =
        first && (samples == 1 || plan->halves[XDI_ROUTE_TEACHER][first->teacher].held == window->held);
    return aligned ? first : NULL;
}

/* ---- the whole ---- */

static xd_result xdi_route_allocate_tables(xd_ctx *ctx, const xd_route_desc *d, xdi_route_plan *plan) {
    const size_t ranks = (size_t)plan->ranks;
    for (int r = 0; r < plan->ranks; r++)
        plan->takes = xdi_route_most(plan->takes, plan->halves[XDI_ROUTE_STUDENT][r].batches);
    const size_t cells = ranks * ((size_t)plan->takes + 1);
    plan->places = (int64_t *)xd_allocate(ctx, ranks * (size_t)d->samples * sizeof(int64_t));
    plan->need = (int64_t *)xd_allocate(ctx, cells * sizeof(int64_t));
    plan->first = (int64_t *)xd_allocate(ctx, cells * sizeof(int64_t));
    plan->still = (int64_t *)xd_allocate(ctx, cells * sizeof(int64_t));
    plan->step_begin = (int64_t *)xd_allocate(ctx, ((size_t)plan->takes + 1) * sizeof(int64_t));
    XD_REQUIRE(ctx, plan->places && plan->need && plan->first && plan->still && plan->step_begin,
               XD_ERROR_MEMORY, "no room for the plan of %d ranks over %lld steps", plan->ranks,
               (long long)plan->takes);
    for (size_t i = 0; i < cells; i++)
        plan->first[i] = plan->still[i] =
            plan->halves[XDI_ROUTE_TEACHER][i / ((size_t)plan->takes + 1)].batches;
    return XD_OK;
}

/* Checks and allocations that fail on every rank alike, or on this rank only. */
static xd_result xdi_route_make(xd_comm *comm, const xd_route_desc *d, xdi_route_plan *plan) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    XD_TRY(xdi_route_allocate_tables(ctx, d, plan));
    xdi_route_index(d, plan);
    XD_TRY(xdi_route_walk(comm, plan));
    plan->pieces =
        (xdi_route_piece *)xd_allocate(ctx, ((size_t)plan->piece_count + 1) * sizeof *plan->pieces);
    XD_REQUIRE(ctx, plan->pieces, XD_ERROR_MEMORY, "no room for %lld pieces", (long long)plan->piece_count);
    XD_TRY(xdi_route_walk(comm, plan));
    xdi_route_accumulate(plan);
    return XD_OK;
}

static xd_result xdi_route_check_all(xd_comm *comm, const xd_route_desc *d, const xdi_route_plan *plan) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    uint8_t *seen = (uint8_t *)xd_allocate(ctx, (size_t)d->samples);
    XD_REQUIRE(ctx, seen, XD_ERROR_MEMORY, "no room for %lld samples", (long long)d->samples);
    const xd_result result = xdi_route_check_table(comm, d, plan, seen);
    xd_release(ctx, seen);
    return result;
}

XD_PRIVATE xd_result xdi_route_plan_create(xd_comm *comm, const xd_route_desc *d, xdi_route_plan *plan) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    const size_t ranks = (size_t)xd_comm_size(comm);
    plan->ranks = xd_comm_size(comm);
    plan->rank = xd_comm_rank(comm);
    int64_t *heads = (int64_t *)xd_allocate(ctx, ranks * XDI_ROUTE_HEAD_WORDS * sizeof *heads);
    int64_t *counts = (int64_t *)xd_allocate(ctx, ranks * sizeof *counts);
    plan->sources = (int *)xd_allocate(ctx, 3 * ranks * sizeof *plan->sources);
    plan->halves[0] = (xdi_route_half *)xd_allocate(ctx, 2 * ranks * sizeof *plan->halves[0]);
    const bool room = heads && counts && plan->sources && plan->halves[0];
    xd_result result = room ? XD_OK : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a plan of %zu ranks", ranks);
    result = xd_agree(comm, result);
    if (result == XD_OK) {
        plan->last_sources = plan->sources + ranks;
        plan->counts = plan->sources + 2 * ranks;
        plan->halves[1] = plan->halves[0] + ranks;
        result = xdi_route_read(comm, d, heads, counts, plan);
    }
    xd_release(ctx, counts);
    xd_release(ctx, heads);
    XD_TRY(result);
    result = xdi_route_check_all(comm, d, plan);
    if (result == XD_OK) result = xdi_route_make(comm, d, plan);
    return xd_agree(comm, result);
}

XD_PRIVATE void xdi_route_plan_free(xd_ctx *ctx, xdi_route_plan *plan) {
    xd_release(ctx, plan->pieces);
    xd_release(ctx, plan->step_begin);
    xd_release(ctx, plan->still);
    xd_release(ctx, plan->first);
    xd_release(ctx, plan->need);
    xd_release(ctx, plan->places);
    xd_release(ctx, plan->words);
    xd_release(ctx, plan->halves[0]);
    xd_release(ctx, plan->sources);
}
