#include <math.h>
#include <string.h>

#define XDI_ULD_FLOOR 1e-8 /* of the probability of a merged token, and of TRL's JSD */

/* ---- groups as TRL forms them ---- */

/* Tokens [first, first + count) of one side. */
typedef struct xdi_uld_span {
    int64_t first, count;
} xdi_uld_span;

static xdi_uld_span xdi_uld_span_of(const xd_uld_trl_side *side) {
    xdi_uld_span span = { 0, 0 };
    for (int64_t i = side->count; i-- > 0;)
        if (side->labels[i] != -100) {
            span.first = i;
            span.count++;
        }
    if (side->skip_eos) span.count--;
    return span;
}

static void xdi_uld_push(xd_alignment *a, int64_t s0, int64_t s1, int64_t t0, int64_t t1) {
    if (s0 == s1 || t0 == t1) return;
    xd_aligned_chunk *c = &a->chunks[a->count++];
    c->student_begin = (int32_t)s0;
    c->student_end = (int32_t)s1;
    c->teacher_begin = (int32_t)t0;
    c->teacher_end = (int32_t)t1;
    c->flags = (uint32_t)XD_CHUNK_EXACT;
}

/* A pair of groups ends where both sides have a token that ends; what is left over is the last pair. */
static void xdi_uld_extended(const xd_uld_trl_side *student, xdi_uld_span s, const xd_uld_trl_side *teacher,
                             xdi_uld_span t, xd_alignment *out) {
    const int64_t s_end = s.first + s.count, t_end = t.first + t.count;
    int64_t i = s.first, j = t.first, s0 = i, t0 = j;
    while (i < s_end && j < t_end) {
        const int64_t a = student->spans[i].end, b = teacher->spans[j].end;
        if (a <= b) i++;
        if (b <= a) j++;
        if (a != b) continue;
        xdi_uld_push(out, s0, i, t0, j);
        s0 = i;
        t0 = j;
    }
    xdi_uld_push(out, s0, s_end, t0, t_end);
}

XD_API xd_result xd_compat_uld_chunks(xd_ctx *ctx, const xd_uld_trl_side *student,
                                      const xd_uld_trl_side *teacher, bool extended, xd_uld_merge merge,
                                      xd_alignment *out) {
    const xdi_uld_span s = xdi_uld_span_of(student), t = xdi_uld_span_of(teacher);
    const int64_t most = s.count < t.count ? s.count : t.count;
    out->count = 0;
    out->chunks = (xd_aligned_chunk *)xd_allocate(ctx, (size_t)(most > 0 ? most : 0) * sizeof *out->chunks);
    XDI_REQUIRE(ctx, out->chunks, XD_ERROR_MEMORY, "no room for %lld groups", (long long)most);
    if (most <= 0) return XD_OK;
    if (extended)
        xdi_uld_extended(student, s, teacher, t, out);
    else
        for (int64_t i = 0; i < most; i++)
            xdi_uld_push(out, s.first + i, s.first + i + 1, t.first + i, t.first + i + 1);
    /* the first token of a sequence has no row before it */
    if (merge == XD_ULD_BAYESIAN && out->count > 0 && (s.first == 0 || t.first == 0))
        memmove(out->chunks, out->chunks + 1, (size_t)--out->count * sizeof *out->chunks);
    return XD_OK;
}

/* ---- one side of one chunk ---- */

/* The merged distribution of tokens [begin, end). */
typedef struct xdi_uld_merged {
    const xd_uld_side *side;
    int64_t begin, end, base; /* base: the token whose distribution it is */
    int64_t shift;            /* from a token to the row that predicts it */
    double factor;            /* product of the other tokens' probabilities */
    double *values;           /* [vocabulary] */
    const void **order;       /* [vocabulary] pointers into values, largest first */
} xdi_uld_merged;

/* Largest logit and logarithm of the sum of a row, by which every probability follows; false when the row is
 * not finite. */
static bool xdi_uld_row(const xd_uld_side *side, int64_t row, double *max, double *log_sum) {
    int64_t at;
    double sum = 0.0;
    *max = xdi_loss_row_max(&side->logits, row, side->vocabulary, &at);
    if (!isfinite(*max)) return false;
    for (int64_t c = 0; c < side->vocabulary; c++)
        sum += exp((xdi_loss_load(&side->logits, row, c) - *max) / side->temperature);
    *log_sum = log(sum);
    return true;
}

static double xdi_uld_probability(const xd_uld_side *side, int64_t row, int64_t id, double max,
                                  double log_sum) {
    return exp((xdi_loss_load(&side->logits, row, id) - max) / side->temperature - log_sum);
}

static bool xdi_uld_merge(xdi_uld_merged *m) {
    double max, log_sum;
    m->factor = 1.0;
    for (int64_t t = m->begin; t < m->end; t++) {
        if (t == m->base) continue;
        if (!xdi_uld_row(m->side, t + m->shift, &max, &log_sum)) return false;
        const double p = xdi_uld_probability(m->side, t + m->shift, m->side->ids[t], max, log_sum);
        m->factor *= p > XDI_ULD_FLOOR ? p : XDI_ULD_FLOOR;
    }
    if (!xdi_uld_row(m->side, m->base + m->shift, &max, &log_sum)) return false;
    for (int64_t c = 0; c < m->side->vocabulary; c++)
        m->values[c] = m->factor * xdi_uld_probability(m->side, m->base + m->shift, c, max, log_sum);
    return true;
}

/* Larger first; the lower address, which is the lower id, among equals. */
static int xdi_uld_descending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    if (x != y) return x < y ? 1 : -1;
    return (a > b) - (a < b);
}

/* Sorts the entries whose mark is not set; returns how many. */
static int64_t xdi_uld_sort(xdi_uld_merged *m, const uint8_t *matched) {
    int64_t n = 0;
    for (int64_t c = 0; c < m->side->vocabulary; c++)
        if (!matched[c]) m->order[n++] = &m->values[c];
    xdi_sort(m->order, (size_t)n, xdi_uld_descending);
    return n;
}

/* ---- the loss ---- */

typedef struct xdi_uld_plan {
    xd_uld_desc d;
    xdi_uld_merged student, teacher;
    double *slope;                                 /* [student vocabulary] d loss / d merged value */
    uint8_t *matched_of_student, *matched_of_teacher; /* [vocabulary] marks */
    int64_t chunks;
    double matched, unmatched;
} xdi_uld_plan;

static bool xdi_uld_layout(xdi_uld_plan *p, xd_arena *arena) {
    const size_t s = (size_t)p->d.student.vocabulary, t = (size_t)p->d.teacher.vocabulary;
    const size_t sizes[7] = { s * sizeof(double), t * sizeof(double), s * sizeof(void *), t * sizeof(void *),
                              s * sizeof(double), s,                  t };
    void *at[7];
    for (int i = 0; i < 7; i++) {
        size_t offset;
        if (!xd_arena_take(arena, sizes[i], &offset)) return false;
        at[i] = arena->base ? arena->base + offset : NULL;
    }
    p->student.values = (double *)at[0];
    p->teacher.values = (double *)at[1];
    p->student.order = (const void **)at[2];
    p->teacher.order = (const void **)at[3];
    p->slope = (double *)at[4];
    p->matched_of_student = (uint8_t *)at[5];
    p->matched_of_teacher = (uint8_t *)at[6];
    return true;
}

/* Adds |a - b| of the sorted rests; fills slope. */
static void xdi_uld_unmatched(xdi_uld_plan *p) {
    const int64_t n = xdi_uld_sort(&p->student, p->matched_of_student);
    const int64_t m = xdi_uld_sort(&p->teacher, p->matched_of_teacher);
    const double weight = p->d.matched_count > 0 ? p->d.unmatched_weight : 1.0;
    if (n == 0 || m == 0) return; /* a side without a rest has nothing to be compared with */
    for (int64_t r = 0; r < n || r < m; r++) {
        const double a = r < n ? *(const double *)p->student.order[r] : 0.0;
        const double b = r < m ? *(const double *)p->teacher.order[r] : 0.0;
        p->unmatched += fabs(a - b);
        if (r < n)
            p->slope[(const double *)p->student.order[r] - p->student.values] =
                weight * (double)((a > b) - (a < b));
    }
}

static void xdi_uld_matched(xdi_uld_plan *p) {
    for (int64_t i = 0; i < p->d.matched_count; i++) {
        const int64_t s = p->d.matched_student[i], t = p->d.matched_teacher[i];
        const double u = p->student.values[s], v = p->teacher.values[t];
        double slope;
        p->matched += xdi_compat_entry(log(u > XDI_ULD_FLOOR ? u : XDI_ULD_FLOOR),
                                       log(v > XDI_ULD_FLOOR ? v : XDI_ULD_FLOOR), p->d.beta, &slope);
        p->slope[s] = u >= XDI_ULD_FLOOR ? p->d.matched_weight * slope / u : 0.0;
    }
}

/* Adds share * p_v (d_v - sum p d) / tau to a row of the gradient, where d is slope[v], or 1 at `only` and 0
 * elsewhere. */
static void xdi_uld_backward(const xdi_uld_plan *p, int64_t row, int64_t only, double share) {
    const xd_uld_side *side = &p->d.student;
    double max, log_sum, mean = 0.0;
    xdi_uld_row(side, row, &max, &log_sum);
    for (int64_t c = 0; c < side->vocabulary; c++)
        if (only < 0 || c == only)
            mean += xdi_uld_probability(side, row, c, max, log_sum) * (only < 0 ? p->slope[c] : 1.0);
    for (int64_t c = 0; c < side->vocabulary; c++) {
        const double d = only < 0 ? p->slope[c] : (double)(c == only);
        const double g = xdi_uld_probability(side, row, c, max, log_sum) * (d - mean);
        xdi_loss_store(&p->d.gradient, row, c, share * g / side->temperature);
    }
}

/* The chunk's rows of the gradient: a row belongs to one token, and a token to one chunk. The base row comes last
 * where the gradient lies over the logits: the others do not need it any more. */
static void xdi_uld_gradient(const xdi_uld_plan *p, double share) {
    const xdi_uld_merged *m = &p->student;
    double along = 0.0; /* d loss / d ln factor */
    for (int64_t c = 0; c < m->side->vocabulary; c++) along += p->slope[c] * m->values[c];
    for (int64_t t = m->begin; t < m->end; t++) {
        double max, log_sum;
        if (t == m->base) continue;
        xdi_uld_row(m->side, t + m->shift, &max, &log_sum);
        const double q = xdi_uld_probability(m->side, t + m->shift, m->side->ids[t], max, log_sum);
        xdi_uld_backward(p, t + m->shift, m->side->ids[t], q > XDI_ULD_FLOOR ? share * along / q : 0.0);
    }
    xdi_uld_backward(p, m->base + m->shift, -1, share * m->factor);
}

static void xdi_uld_point(xdi_uld_merged *m, const xd_uld_side *side, xd_uld_merge merge, int64_t begin,
                          int64_t end) {
    m->side = side;
    m->begin = begin;
    m->end = end;
    m->shift = merge == XD_ULD_BAYESIAN ? -1 : 0;
    m->base = merge == XD_ULD_BAYESIAN ? end - 1 : begin;
}

static bool xdi_uld_two_sided(const xd_aligned_chunk *c) {
    return c->student_begin < c->student_end && c->teacher_begin < c->teacher_end;
}

static xd_result xdi_uld_chunk(xd_ctx *ctx, xdi_uld_plan *p, const xd_aligned_chunk *c, double share) {
    xdi_uld_point(&p->student, &p->d.student, p->d.merge, c->student_begin, c->student_end);
    xdi_uld_point(&p->teacher, &p->d.teacher, p->d.merge, c->teacher_begin, c->teacher_end);
    XDI_REQUIRE(ctx, xdi_uld_merge(&p->student) && xdi_uld_merge(&p->teacher), XD_ERROR_DATA,
                "logits of student tokens [%d, %d) or teacher tokens [%d, %d) are not finite",
                (int)c->student_begin, (int)c->student_end, (int)c->teacher_begin, (int)c->teacher_end);
    memset(p->slope, 0, (size_t)p->d.student.vocabulary * sizeof *p->slope);
    xdi_uld_unmatched(p);
    xdi_uld_matched(p);
    if (share != 0.0) xdi_uld_gradient(p, share);
    return XD_OK;
}

/* ---- checks ---- */

static xd_result xdi_uld_check_side(xd_ctx *ctx, const char *name, const xd_uld_side *side) {
    XDI_REQUIRE(ctx, side->logits.dtype == XD_DTYPE_F32 || side->logits.dtype == XD_DTYPE_BF16, XD_ERROR_DTYPE,
                "%s logits are %s: F32 or BF16 is needed", name, xd_dtype_name(side->logits.dtype));
    XDI_REQUIRE(ctx, side->vocabulary > 0 && side->vocabulary <= side->logits.cols, XD_ERROR_SHAPE,
                "%s logits have %lld columns for a vocabulary of %lld", name, (long long)side->logits.cols,
                (long long)side->vocabulary);
    XDI_REQUIRE(ctx, side->temperature > 0.0 && isfinite(side->temperature), XD_ERROR_ARGUMENT,
                "%s temperature %g must be positive and finite", name, side->temperature);
    for (int64_t i = 0; i < side->logits.rows; i++)
        XDI_REQUIRE(ctx, side->ids[i] >= 0 && side->ids[i] < side->vocabulary, XD_ERROR_ARGUMENT,
                    "%s token %lld has id %lld of a vocabulary of %lld", name, (long long)i,
                    (long long)side->ids[i], (long long)side->vocabulary);
    return XD_OK;
}

static xd_result xdi_uld_check_chunks(xd_ctx *ctx, const xd_uld_desc *d) {
    const int64_t first = d->merge == XD_ULD_BAYESIAN ? 1 : 0;
    int64_t s = first, t = first;
    for (int64_t i = 0; i < d->chunk_count; i++) {
        const xd_aligned_chunk *c = &d->chunks[i];
        if (!xdi_uld_two_sided(c)) continue;
        XDI_REQUIRE(ctx,
                    c->student_begin >= s && c->student_end <= d->student.logits.rows && c->teacher_begin >= t &&
                        c->teacher_end <= d->teacher.logits.rows,
                    XD_ERROR_ARGUMENT,
                    "chunk %lld, [%d, %d) and [%d, %d), does not lie in [%lld, %lld) and [%lld, %lld)",
                    (long long)i, (int)c->student_begin, (int)c->student_end, (int)c->teacher_begin,
                    (int)c->teacher_end, (long long)s, (long long)d->student.logits.rows, (long long)t,
                    (long long)d->teacher.logits.rows);
        s = c->student_end;
        t = c->teacher_end;
    }
    return XD_OK;
}

static xd_result xdi_uld_check(xd_ctx *ctx, const xd_uld_desc *d) {
    XDI_REQUIRE(ctx, xd_ctx_kernels(ctx).device == XD_DEVICE_CPU, XD_ERROR_UNSUPPORTED,
                "this loss is not built for a GPU");
    XDI_TRY(xdi_uld_check_side(ctx, "student", &d->student));
    XDI_TRY(xdi_uld_check_side(ctx, "teacher", &d->teacher));
    XDI_REQUIRE(ctx, d->beta >= 0.0 && d->beta <= 1.0, XD_ERROR_ARGUMENT, "beta %g is outside [0, 1]", d->beta);
    XDI_REQUIRE(ctx, d->denominator >= 0.0 && isfinite(d->denominator) && isfinite(d->scale), XD_ERROR_ARGUMENT,
                "denominator %g and scale %g must be finite, the first not negative", d->denominator, d->scale);
    for (int64_t i = 0; i < d->matched_count; i++)
        XDI_REQUIRE(ctx,
                    d->matched_student[i] >= 0 && d->matched_student[i] < d->student.vocabulary &&
                        d->matched_teacher[i] >= 0 && d->matched_teacher[i] < d->teacher.vocabulary,
                    XD_ERROR_ARGUMENT, "matched ids %lld and %lld are outside vocabularies of %lld and %lld",
                    (long long)d->matched_student[i], (long long)d->matched_teacher[i],
                    (long long)d->student.vocabulary, (long long)d->teacher.vocabulary);
    const xd_rows *g = &d->gradient, *x = &d->student.logits;
    if (g->data)
        XDI_REQUIRE(ctx, g->rows == x->rows && g->cols == x->cols, XD_ERROR_SHAPE,
                    "the gradient is [%lld, %lld], the student's logits [%lld, %lld]", (long long)g->rows,
                    (long long)g->cols, (long long)x->rows, (long long)x->cols);
    return xdi_uld_check_chunks(ctx, d);
}

/* Zeros in every row that no chunk writes. A row is kept until its own chunk is done when the gradient lies
 * over the logits, so this comes last; `written` marks rows. */
static void xdi_uld_clear(const xdi_uld_plan *p) {
    const int64_t shift = p->d.merge == XD_ULD_BAYESIAN ? -1 : 0;
    int64_t row = 0;
    for (int64_t i = 0; i <= p->d.chunk_count; i++) {
        const bool last = i == p->d.chunk_count;
        if (!last && !xdi_uld_two_sided(&p->d.chunks[i])) continue;
        const int64_t begin = last ? p->d.gradient.rows : p->d.chunks[i].student_begin + shift;
        for (; row < begin; row++)
            for (int64_t c = 0; c < p->d.gradient.cols; c++) xdi_loss_store(&p->d.gradient, row, c, 0.0);
        const int64_t end = last ? row : p->d.chunks[i].student_end + shift;
        for (; row < end; row++)
            for (int64_t c = p->d.student.vocabulary; c < p->d.gradient.cols; c++)
                xdi_loss_store(&p->d.gradient, row, c, 0.0);
    }
}

static xd_result xdi_uld_run(xd_ctx *ctx, xdi_uld_plan *p, xd_uld_values *out) {
    const xd_uld_desc *d = &p->d;
    for (int64_t i = 0; i < d->matched_count; i++) {
        p->matched_of_student[d->matched_student[i]] = 1;
        p->matched_of_teacher[d->matched_teacher[i]] = 1;
    }
    for (int64_t i = 0; i < d->chunk_count; i++) p->chunks += xdi_uld_two_sided(&d->chunks[i]);
    const double below = d->denominator > 0.0 ? d->denominator : p->chunks > 0 ? (double)p->chunks : 1.0;
    const double share = d->gradient.data ? d->scale / below : 0.0;
    for (int64_t i = 0; i < d->chunk_count; i++)
        if (xdi_uld_two_sided(&d->chunks[i])) XDI_TRY(xdi_uld_chunk(ctx, p, &d->chunks[i], share));
    if (d->gradient.data) xdi_uld_clear(p);
    out->matched = p->matched / below;
    out->unmatched = p->unmatched / below;
    out->chunks = p->chunks;
    out->loss = d->matched_count > 0
                    ? d->scale * (d->matched_weight * out->matched + d->unmatched_weight * out->unmatched)
                    : d->scale * out->unmatched;
    return XD_OK;
}

XD_API xd_result xd_uld_loss(xd_ctx *ctx, const xd_uld_desc *desc, xd_uld_values *out) {
    xdi_uld_plan plan;
    xd_arena planning = xd_arena_over(NULL, 0);
    memset(&plan, 0, sizeof plan);
    plan.d = *desc;
    if (plan.d.student.temperature == 0.0) plan.d.student.temperature = 1.0;
    if (plan.d.teacher.temperature == 0.0) plan.d.teacher.temperature = 1.0;
    if (plan.d.scale == 0.0) plan.d.scale = 1.0;
    XDI_TRY(xdi_uld_check(ctx, &plan.d));
    XDI_REQUIRE(ctx, xdi_uld_layout(&plan, &planning), XD_ERROR_MEMORY, "the workspace would not fit");
    void *memory = xd_allocate(ctx, planning.peak);
    XDI_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for a workspace of %zu bytes", planning.peak);
    xd_arena arena = xd_arena_over(memory, planning.peak);
    xdi_uld_layout(&plan, &arena);
    const xd_result result = xdi_uld_run(ctx, &plan, out);
    xd_release(ctx, memory);
    return result;
}
