#include <math.h>
#include <string.h>

/* Chunks [first, end) of sequence b. */
typedef struct xdi_projected_tile {
    const xdi_xtoken *x;
    const xdi_xtoken_term *term;
    int64_t b, first, end;
    int64_t row_count; /* student rows in x->rows */
} xdi_projected_tile;

/* The chunk of a held position when it is in the tile and looked at, as its place in the tile; else -1. */
static int64_t xdi_projected_place(const xdi_projected_tile *tile, const int64_t *chunks, int64_t row) {
    const int64_t c = chunks[row];
    if (c < tile->first || c >= tile->end) return -1;
    return xdi_xtoken_looks(tile->x, tile->term, tile->b, c) ? c - tile->first : -1;
}

/* Cells [first, first + k) of the student += sum_v p_v M[v, J_j]: only ids with an entry in J are
 * exponentiated. */
static void xdi_projected_add_student(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t row,
                                      int64_t first) {
    const xd_projection *m = term->teacher->projection;
    for (int64_t j = 0; j < term->k; j++) {
        const xdi_projection_span span = xdi_projection_column(m, x->ids[j], x->vocab.begin, x->vocab.end);
        for (int64_t e = span.begin; e < span.end; e++) {
            const double z = xdi_loss_load(&x->d.student, row, m->student_id[e] - x->vocab.begin);
            xdi_xtoken_add(x, x->student, first + j,
                           (double)m->column_weight[e] * exp(z / x->d.temperature - x->lse[row]));
        }
    }
}

/* Cells [first, first + k) of the teacher += log_softmax over J of its row. */
static void xdi_projected_add_teacher(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t row,
                                      int64_t first) {
    const xd_rows *y = &term->teacher->logits;
    double max = -INFINITY, sum = 0.0;
    for (int64_t j = 0; j < term->k; j++) {
        const double z = xdi_loss_load(y, row, x->ids[j]) / x->d.temperature;
        if (!(z <= max)) max = z; /* a NaN stays */
    }
    for (int64_t j = 0; j < term->k; j++)
        sum += exp(xdi_loss_load(y, row, x->ids[j]) / x->d.temperature - max);
    const double lse = max + log(sum);
    for (int64_t j = 0; j < term->k; j++)
        xdi_xtoken_add(x, x->teacher, first + j, xdi_loss_load(y, row, x->ids[j]) / x->d.temperature - lse);
}

/* Sums of the tile over all ranks: [tile, k] of the student and of the teacher. */
static xd_result xdi_projected_sums(xdi_xtoken *x, xdi_projected_tile *tile) {
    const xdi_xtoken_term *term = tile->term;
    const int64_t count = (tile->end - tile->first) * term->k;
    xdi_xtoken_zero(x, x->student, count);
    xdi_xtoken_zero(x, x->teacher, count);
    tile->row_count = 0;
    for (int64_t i = tile->b * x->held; i < (tile->b + 1) * x->held; i++) {
        const int64_t place = xdi_projected_place(tile, term->teacher->student_chunks, i);
        if (place < 0) continue;
        x->rows[tile->row_count++] = i;
        xdi_projected_add_student(x, term, i, place * term->k);
    }
    for (int64_t i = tile->b * term->held; i < (tile->b + 1) * term->held; i++) {
        const int64_t place = xdi_projected_place(tile, term->teacher->teacher_chunks, i);
        if (place >= 0) xdi_projected_add_teacher(x, term, i, place * term->k);
    }
    XDI_TRY(xdi_xtoken_join(x, x->student, count, x->vocab.tp, x->d.sequence_comm));
    return xdi_xtoken_join(x, x->teacher, count, x->d.sequence_comm, NULL);
}

/* Subtracts ln sum e^a: the target becomes a distribution. */
static void xdi_projected_normalise(double *a, int64_t k) {
    double max = -INFINITY, sum = 0.0;
    for (int64_t j = 0; j < k; j++)
        if (!(a[j] <= max)) max = a[j];
    for (int64_t j = 0; j < k; j++) sum += exp(a[j] - max);
    const double lse = max + log(sum);
    for (int64_t j = 0; j < k; j++) a[j] -= lse;
}

/* d(c), and by q the derivative d d(c) / d q, where r = q / Z and s = ln(r + epsilon):
 *   ds = -e^a (forward) or e^s (s - a + 1) (reverse),  dr = ds / (r + epsilon),  dq = (dr - sum dr r) / Z */
static double xdi_projected_divergence(double *q, const double *a, int64_t k, bool reverse) {
    double z = XDI_XTOKEN_EPSILON, value = 0.0, dot = 0.0;
    for (int64_t j = 0; j < k; j++) z += q[j];
    for (int64_t j = 0; j < k; j++) {
        const double r = q[j] / z, s = log(r + XDI_XTOKEN_EPSILON), target = exp(a[j]);
        const double ds = reverse ? exp(s) * (s - a[j] + 1.0) : -target;
        if (reverse)
            value += exp(s) * (s - a[j]);
        else if (target != 0.0)
            value += target * (a[j] - s); /* NaN passes, a column of no probability does not count */
        q[j] = ds / (r + XDI_XTOKEN_EPSILON);
        dot += q[j] * r;
    }
    for (int64_t j = 0; j < k; j++) q[j] = (q[j] - dot) / z;
    return value;
}

static int64_t xdi_projected_argmax(const double *x, int64_t k) {
    int64_t best = 0;
    for (int64_t j = 1; j < k; j++)
        if (x[j] > x[best]) best = j;
    return best;
}

/* One chunk of the tile: its sums become means, its loss is added, and q becomes d loss / d y of each of its
 * positions, y = p M. Zero where nothing counts. */
static void xdi_projected_chunk(xdi_xtoken *x, xdi_xtoken_term *term, int64_t b, int64_t c, double *q,
                                double *a) {
    const int64_t at = b * term->teacher->chunks + c;
    const double student = (double)term->student_sizes[at] + XDI_XTOKEN_EPSILON;
    const double teacher = (double)term->teacher_sizes[at] + XDI_XTOKEN_EPSILON;
    const double weight = xdi_xtoken_weight(x, term, b, c);
    for (int64_t j = 0; j < term->k; j++) q[j] /= student;
    for (int64_t j = 0; j < term->k; j++) a[j] /= teacher;
    if (!x->d.compat) xdi_projected_normalise(a, term->k);
    const bool agree = xdi_projected_argmax(q, term->k) == xdi_projected_argmax(a, term->k);
    const double value = xdi_projected_divergence(q, a, term->k, x->d.reverse);
    const bool good = isfinite(value) != 0;
    if (!good && weight != 0.0 && x->owner) xdi_xtoken_found(x, at, value);
    if (x->owner) {
        xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_DIVERGENCE, good ? weight * value : 0.0);
        xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_AGREEING, agree ? 1.0 : 0.0);
        xdi_xtoken_add(x, x->sums, term->cell + XDI_XTOKEN_COMPARED, 1.0);
    }
    const double factor = good ? weight * xdi_xtoken_factor(x, term) / student : 0.0;
    for (int64_t j = 0; j < term->k; j++) q[j] = factor != 0.0 ? q[j] * factor : 0.0;
}

/* The largest |dy|: delta is summed in units of it, for fixed point. 0 where nothing counts. */
static double xdi_projected_unit(const double *dy, int64_t k) {
    double most = 0.0;
    for (int64_t j = 0; j < k; j++)
        if (fabs(dy[j]) > most) most = fabs(dy[j]);
    return most;
}

/* Cell i += sum_v p_v h_v of this shard, h = M dy, in units of dy. */
static void xdi_projected_delta(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t i,
                                const double *dy) {
    const xd_projection *m = term->teacher->projection;
    const double unit = xdi_projected_unit(dy, term->k);
    const int64_t row = x->rows[i];
    for (int64_t j = 0; j < term->k; j++) {
        if (dy[j] == 0.0) continue;
        const xdi_projection_span span = xdi_projection_column(m, x->ids[j], x->vocab.begin, x->vocab.end);
        for (int64_t e = span.begin; e < span.end; e++) {
            const double z = xdi_loss_load(&x->d.student, row, m->student_id[e] - x->vocab.begin);
            xdi_xtoken_add(x, x->row_delta, i,
                           (double)m->column_weight[e] * (dy[j] / unit) *
                               exp(z / x->d.temperature - x->lse[row]));
        }
    }
}

/* u = h / tau of this shard. */
static void xdi_projected_scatter(xdi_xtoken *x, const xdi_xtoken_term *term, const double *dy) {
    const xd_projection *m = term->teacher->projection;
    memset(x->u, 0, (size_t)x->columns * sizeof *x->u);
    for (int64_t j = 0; j < term->k; j++) {
        const xdi_projection_span span = xdi_projection_column(m, x->ids[j], x->vocab.begin, x->vocab.end);
        for (int64_t e = span.begin; e < span.end; e++)
            x->u[m->student_id[e] - x->vocab.begin] += (double)m->column_weight[e] * dy[j] / x->d.temperature;
    }
}

/* dz = p (h - delta) / tau for the rows of the tile. A run of one chunk's rows makes h once. */
static xd_result xdi_projected_gradient(xdi_xtoken *x, const xdi_projected_tile *tile) {
    const xdi_xtoken_term *term = tile->term;
    const int64_t *chunks = term->teacher->student_chunks;
    int64_t last = -1;
    xdi_xtoken_zero(x, x->row_delta, tile->row_count);
    for (int64_t i = 0; i < tile->row_count; i++)
        xdi_projected_delta(x, term, i, x->student + (chunks[x->rows[i]] - tile->first) * term->k);
    XDI_TRY(xdi_xtoken_join(x, x->row_delta, tile->row_count, x->vocab.tp, NULL));
    for (int64_t i = 0; i < tile->row_count; i++) {
        const int64_t place = chunks[x->rows[i]] - tile->first;
        const double *dy = x->student + place * term->k, unit = xdi_projected_unit(dy, term->k);
        if (unit == 0.0) continue;
        if (place != last) xdi_projected_scatter(x, term, dy);
        last = place;
        xdi_xtoken_write(x, x->rows[i], x->u, true, x->row_delta[i] * unit / x->d.temperature);
    }
    return XD_OK;
}

static xd_result xdi_projected_run_tile(xdi_xtoken *x, xdi_xtoken_term *term, xdi_projected_tile *tile) {
    XDI_TRY(xdi_projected_sums(x, tile));
    for (int64_t c = tile->first; c < tile->end; c++) {
        const int64_t at = (c - tile->first) * term->k;
        if (xdi_xtoken_looks(x, term, tile->b, c))
            xdi_projected_chunk(x, term, tile->b, c, x->student + at, x->teacher + at);
    }
    return x->write ? xdi_projected_gradient(x, tile) : XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_projected(xdi_xtoken *x, xdi_xtoken_term *term) {
    const int64_t chunks = term->teacher->chunks;
    for (int64_t b = 0; b < x->d.sequences; b++) {
        if (b == 0 || !x->d.compat) XDI_TRY(xdi_xtoken_choose(x, term, b));
        for (int64_t first = 0; first < chunks; first += term->tile) {
            const int64_t end = first + term->tile < chunks ? first + term->tile : chunks;
            xdi_projected_tile tile = { x, term, b, first, end, 0 };
            XDI_TRY(xdi_projected_run_tile(x, term, &tile));
        }
    }
    return XD_OK;
}
