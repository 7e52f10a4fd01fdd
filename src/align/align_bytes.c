/* A sweep over both sides at once. Each side is between two tokens; the bytes from the end of its covered bytes to the
 * beginning of its next token are in no token, so any offset in that gap is a boundary of the side.
 * Where the boundaries of both sides meet, a chunk ends. */

#include "align/align.h"
#include "base/internal.h"

#include <string.h>

typedef struct xdi_sweep_side {
    const xd_align_side *in;
    int64_t first;   /* first token of the open chunk */
    int64_t next;    /* first token that has not been taken */
    int64_t limit;   /* end of the document */
    int64_t covered; /* end of the bytes covered in this document */
    int64_t begin;   /* where the open chunk's text begins; -1 while it has none */
    bool gap;        /* the open chunk has bytes inside that none of its tokens covers */
    bool masked;
} xdi_sweep_side;

typedef struct xdi_sweep {
    xdi_sweep_side side[2]; /* student, teacher */
    xd_alignment *out;
    xd_align_report *report;
} xdi_sweep;

static int xdi_sweep_role(const xdi_sweep_side *s) {
    if (s->next >= s->limit) return (int)XD_TOKEN_TEXT;
    const xd_token_span span = s->in->spans[s->next];
    return s->in->roles && span.begin == span.end ? s->in->roles[s->next] : (int)XD_TOKEN_TEXT;
}

/* Offset where the next token begins; the end of all text when the document has no further token. */
static int64_t xdi_sweep_gap_end(const xdi_sweep_side *s) {
    return s->next < s->limit ? s->in->spans[s->next].begin : INT64_MAX;
}

/* True when no token that is still to come shares bytes with those taken. */
static bool xdi_sweep_at_boundary(const xdi_sweep_side *s) {
    return xdi_sweep_gap_end(s) >= s->covered;
}

static void xdi_sweep_take(xdi_sweep_side *s) {
    const xd_token_span span = s->in->spans[s->next];
    if (s->begin < 0)
        s->begin = span.begin;
    else if (span.begin > s->covered)
        s->gap = true;
    if (span.end > s->covered) s->covered = span.end;
    if (s->in->mask && !s->in->mask[s->next]) s->masked = true;
    s->next++;
}

static bool xdi_sweep_open(const xdi_sweep_side *s) {
    return s->next > s->first;
}

/* Do both sides of the open chunk cover the same bytes, all of them? */
static bool xdi_sweep_same(const xdi_sweep *x) {
    const xdi_sweep_side *s = &x->side[0], *t = &x->side[1];
    return xdi_sweep_open(s) && xdi_sweep_open(t) && !s->gap && !t->gap && s->begin == t->begin &&
           s->covered == t->covered;
}

/* Ends the open chunk, if it has a token. */
static void xdi_sweep_close(xdi_sweep *x, bool exact) {
    xdi_sweep_side *s = &x->side[0], *t = &x->side[1];
    if (xdi_sweep_open(s) || xdi_sweep_open(t)) {
        xd_aligned_chunk *c = &x->out->chunks[x->out->count++];
        const bool both = xdi_sweep_open(s) && xdi_sweep_open(t), masked = s->masked || t->masked;
        c->student_begin = (int32_t)s->first;
        c->student_end = (int32_t)s->next;
        c->teacher_begin = (int32_t)t->first;
        c->teacher_end = (int32_t)t->next;
        c->flags = (exact ? (uint32_t)XD_CHUNK_EXACT : 0u) | (masked ? (uint32_t)XD_CHUNK_MASKED : 0u);
        const int64_t bytes = xdi_sweep_open(s) ? s->covered - s->begin : 0;
        x->report->chunks++;
        x->report->exact += exact;
        x->report->one_sided += !both;
        x->report->masked += masked;
        x->report->total_bytes += bytes;
        if (!exact || masked) x->report->lost_bytes += bytes;
    }
    for (int i = 0; i < 2; i++) {
        x->side[i].first = x->side[i].next;
        x->side[i].begin = -1;
        x->side[i].gap = x->side[i].masked = false;
    }
}

/* Tokens without bytes at a common boundary: the same role on both sides is a pair, any other token is a one-sided
 * chunk. */
static bool xdi_sweep_special(xdi_sweep *x) {
    const int s = xdi_sweep_role(&x->side[0]), t = xdi_sweep_role(&x->side[1]);
    if (s == (int)XD_TOKEN_TEXT && t == (int)XD_TOKEN_TEXT) return false;
    const bool pair = s == t;
    if (s != (int)XD_TOKEN_TEXT) xdi_sweep_take(&x->side[0]);
    if (pair || s == (int)XD_TOKEN_TEXT) xdi_sweep_take(&x->side[1]);
    xdi_sweep_close(x, pair);
    return true;
}

/* Both sides have a boundary, and the gaps after their covered bytes overlap. */
static bool xdi_sweep_meet(const xdi_sweep *x) {
    const xdi_sweep_side *s = &x->side[0], *t = &x->side[1];
    return xdi_sweep_at_boundary(s) && xdi_sweep_at_boundary(t) && s->covered <= xdi_sweep_gap_end(t) &&
           t->covered <= xdi_sweep_gap_end(s);
}

/* Whether the student's side advances: the side that is behind; at the same place the one that has to, because tokens to come share
 * bytes with those taken; and the other side when one has no further token. */
static bool xdi_sweep_is_students(const xdi_sweep *x) {
    const xdi_sweep_side *s = &x->side[0], *t = &x->side[1];
    if (s->next >= s->limit || t->next >= t->limit) return t->next >= t->limit;
    if (s->covered != t->covered) return s->covered < t->covered;
    return !xdi_sweep_at_boundary(s) || xdi_sweep_at_boundary(t);
}

/* One document: tokens up to each side's limit. */
static void xdi_sweep_document(xdi_sweep *x) {
    xdi_sweep_side *s = &x->side[0], *t = &x->side[1];
    for (int i = 0; i < 2; i++)
        x->side[i].covered =
            x->side[i].next < x->side[i].limit ? x->side[i].in->spans[x->side[i].next].begin : 0;
    while (s->next < s->limit || t->next < t->limit) {
        if (xdi_sweep_meet(x)) {
            xdi_sweep_close(x, xdi_sweep_same(x));
            if (xdi_sweep_special(x)) continue;
        }
        xdi_sweep_take(xdi_sweep_is_students(x) ? s : t);
    }
    xdi_sweep_close(x, xdi_sweep_meet(x) && xdi_sweep_same(x));
}

static int32_t xdi_sweep_document_of(const xdi_sweep_side *s) {
    return s->in->documents ? s->in->documents[s->next] : 0;
}

static void xdi_sweep_limit(xdi_sweep_side *s, int32_t document) {
    s->limit = s->next;
    while (s->limit < s->in->count && (s->in->documents ? s->in->documents[s->limit] : 0) == document)
        s->limit++;
}

/* The lowest document that either side still has. */
static int32_t xdi_sweep_next_document(const xdi_sweep *x) {
    const xdi_sweep_side *s = &x->side[0], *t = &x->side[1];
    if (s->next >= s->in->count) return xdi_sweep_document_of(t);
    if (t->next >= t->in->count) return xdi_sweep_document_of(s);
    const int32_t a = xdi_sweep_document_of(s), b = xdi_sweep_document_of(t);
    return a < b ? a : b;
}

static void xdi_sweep_run(xdi_sweep *x) {
    xdi_sweep_close(x, false); /* nothing is open: sets both sides to the start */
    while (x->side[0].next < x->side[0].in->count || x->side[1].next < x->side[1].in->count) {
        const int32_t document = xdi_sweep_next_document(x);
        for (int i = 0; i < 2; i++) xdi_sweep_limit(&x->side[i], document);
        xdi_sweep_document(x);
    }
}

static bool xdi_sweep_countable(const xd_align_side *side) {
    return side->count >= 0 && side->count < INT32_MAX && (side->spans || side->count == 0);
}

/* The first invalid token, -1 if all are valid. */
static int64_t xdi_sweep_bad(const xd_align_side *side) {
    for (int64_t i = 0; i < side->count; i++) {
        const xd_token_span now = side->spans[i];
        if (now.begin < 0 || now.begin > now.end) return i;
        if (i == 0) continue;
        const xd_token_span before = side->spans[i - 1];
        const bool same = !side->documents || side->documents[i] == side->documents[i - 1];
        if (same && (now.begin < before.begin || now.end < before.end)) return i;
        if (!same && side->documents[i] < side->documents[i - 1]) return i;
    }
    return -1;
}

static xd_result xdi_sweep_check(xd_ctx *ctx, const char *name, const xd_align_side *side) {
    XD_REQUIRE(ctx, side->spans || side->count <= 0, XD_ERROR_ARGUMENT, "%s: spans is NULL and count %lld",
               name, (long long)side->count);
    XD_REQUIRE(ctx, xdi_sweep_countable(side), XD_ERROR_ARGUMENT, "%s has %lld tokens", name,
               (long long)side->count);
    const int64_t i = xdi_sweep_bad(side);
    if (i < 0) return XD_OK;
    const xd_token_span now = side->spans[i];
    XD_REQUIRE(ctx, now.begin >= 0 && now.begin <= now.end, XD_ERROR_ARGUMENT,
               "%s token %lld covers bytes [%lld, %lld)", name, (long long)i, (long long)now.begin,
               (long long)now.end);
    const xd_token_span before = side->spans[i - 1];
    XD_REQUIRE(ctx, side->documents && side->documents[i] < side->documents[i - 1], XD_ERROR_ARGUMENT,
               "%s token %lld covers bytes [%lld, %lld) behind [%lld, %lld)", name, (long long)i,
               (long long)now.begin, (long long)now.end, (long long)before.begin, (long long)before.end);
    return XD_FAIL(ctx, XD_ERROR_ARGUMENT, "%s token %lld is of document %d behind document %d", name,
                   (long long)i, (int)side->documents[i], (int)side->documents[i - 1]);
}

/* Memory for the maximum number of chunks: each has at least one token. */
static xd_result xdi_sweep_room(xd_ctx *ctx, const xd_align_side *student, const xd_align_side *teacher,
                                xd_alignment *out) {
    const size_t most = (size_t)student->count + (size_t)teacher->count;
    out->chunks = (xd_aligned_chunk *)xd_allocate(ctx, most * sizeof *out->chunks);
    out->count = 0;
    XD_REQUIRE(ctx, out->chunks, XD_ERROR_MEMORY, "no room for %zu chunks", most);
    return XD_OK;
}

/* Aligns valid sides into memory for their chunks. */
static void xdi_sweep_sides(const xd_align_side *student, const xd_align_side *teacher, xd_alignment *out,
                            xd_align_report *report) {
    xdi_sweep x;
    memset(&x, 0, sizeof x);
    x.side[0].in = student;
    x.side[1].in = teacher;
    x.out = out;
    x.report = report;
    memset(report, 0, sizeof *report);
    xdi_sweep_run(&x);
}

XD_API xd_result xd_align_bytes(xd_ctx *ctx, const xd_align_side *student, const xd_align_side *teacher,
                                xd_alignment *out, xd_align_report *report) {
    XDI_GIVEN(ctx, ctx, student, teacher, out);
    xd_align_report unused;
    xd_alignment made;
    XD_TRY(xdi_sweep_check(ctx, "student", student));
    XD_TRY(xdi_sweep_check(ctx, "teacher", teacher));
    XD_TRY(xdi_sweep_room(ctx, student, teacher, &made));
    xdi_sweep_sides(student, teacher, &made, report ? report : &unused);
    *out = made;
    return XD_OK;
}

/* ---- a batch ---- */

/* Jobs [begin, end); where a side is invalid, the count of chunks becomes -1. */
static void xdi_align_jobs(void *argument, int64_t begin, int64_t end, int slot) {
    xd_align_job *jobs = (xd_align_job *)argument;
    (void)slot;
    for (int64_t i = begin; i < end; i++) {
        xd_align_job *job = &jobs[i];
        if (xdi_sweep_bad(&job->student) < 0 && xdi_sweep_bad(&job->teacher) < 0)
            xdi_sweep_sides(&job->student, &job->teacher, &job->out, &job->report);
        else
            job->out.count = -1;
    }
}

/* The error of a job: checks it once more to get the message. */
static xd_result xdi_align_job_error(xd_ctx *ctx, const xd_align_job *job, int64_t i) {
    xd_result result = xdi_sweep_check(ctx, "student", &job->student);
    if (result == XD_OK) result = xdi_sweep_check(ctx, "teacher", &job->teacher);
    if (result == XD_OK) return XD_OK;
    return XD_FAIL(ctx, result, "sequence %lld: %s", (long long)i, xd_last_error(ctx)->message);
}

static xd_result xdi_align_all(xd_ctx *ctx, xd_align_job *jobs, int64_t count) {
    int64_t refused = count; /* jobs from this one on are not checked: the first error is reported */
    for (int64_t i = 0; i < refused; i++) {
        if (!xdi_sweep_countable(&jobs[i].student) || !xdi_sweep_countable(&jobs[i].teacher)) refused = i;
        if (i < refused) XD_TRY(xdi_sweep_room(ctx, &jobs[i].student, &jobs[i].teacher, &jobs[i].out));
    }
    XD_TRY(xdi_parallel_range(ctx, refused, 1, xdi_align_jobs, jobs));
    for (int64_t i = 0; i < refused; i++)
        if (jobs[i].out.count < 0) return xdi_align_job_error(ctx, &jobs[i], i);
    return refused < count ? xdi_align_job_error(ctx, &jobs[refused], refused) : XD_OK;
}

XD_API xd_result xd_align_batch(xd_ctx *ctx, xd_align_job *jobs, int64_t count) {
    XDI_GIVEN(ctx, ctx);
    XDI_GIVEN_LIST(ctx, jobs, count);
    XD_REQUIRE(ctx, count >= 0, XD_ERROR_ARGUMENT, "%lld pairs of sequences", (long long)count);
    for (int64_t i = 0; i < count; i++) memset(&jobs[i].out, 0, sizeof jobs[i].out);
    const xd_result result = xdi_align_all(ctx, jobs, count);
    for (int64_t i = 0; i < count && result != XD_OK; i++) xd_alignment_destroy(ctx, &jobs[i].out);
    return result;
}
