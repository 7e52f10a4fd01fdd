/* Rows of a projection: the k best of each, from votes, similarities or transport. */

#include "align/internal.h"
#include "align/rows.h"
#include "base/half.h"
#include "base/internal.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* ---- rows of the k best ---- */

static xd_result xdi_mapping_create(xd_ctx *ctx, int64_t rows, int64_t k, xd_projection_rows *out) {
    XD_REQUIRE(ctx, k >= 1 && k <= INT32_MAX, XD_ERROR_ARGUMENT, "%lld entries a row", (long long)k);
    size_t count = 0, bytes = 0;
    const bool fits = rows >= 0 && xdi_size_multiply((size_t)rows, (size_t)k, &count) &&
                      xdi_size_multiply(count, sizeof *out->ids + sizeof *out->weights, &bytes);
    out->ids = fits ? (int32_t *)xd_allocate(ctx, bytes) : NULL;
    XD_REQUIRE(ctx, out->ids, XD_ERROR_MEMORY, "no room for %lld rows of %lld entries", (long long)rows,
               (long long)k);
    out->weights = (float *)(void *)(out->ids + count);
    out->rows = rows;
    out->k = k;
    for (size_t i = 0; i < count; i++) out->ids[i] = -1;
    return XD_OK;
}

XD_API void xd_projection_rows_destroy(xd_ctx *ctx, xd_projection_rows *rows) {
    xd_release(ctx, rows->ids);
    memset(rows, 0, sizeof *rows);
}

/* A value rounded to bf16. */
static float xdi_mapping_narrow(float value) {
    return xd_f32_from_bf16(xd_bf16_from_f32(value));
}

/* Divides a row by its sum; compat: the sum and the quotients are bf16. */
static void xdi_mapping_normalise(float *weights, int64_t k, bool compat) {
    double sum = 0.0;
    float narrow = 0.0f;
    for (int64_t i = 0; i < k; i++) {
        sum += (double)weights[i];
        narrow += weights[i];
    }
    narrow = xdi_mapping_narrow(narrow);
    if (sum == 0.0) return;
    for (int64_t i = 0; i < k; i++)
        weights[i] = compat ? xdi_mapping_narrow(weights[i] / narrow) : (float)((double)weights[i] / sum);
}

XD_PRIVATE void xdi_normalise_rows(double *matrix, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r++) {
        double *row = matrix + r * columns, sum = 0.0;
        for (int64_t c = 0; c < columns; c++) sum += row[c];
        for (int64_t c = 0; c < columns && sum != 0.0; c++) row[c] /= sum;
    }
}

/* One row's list of the best, by weight, then id. */
typedef struct xdi_mapping_best {
    int32_t *ids;
    float *weights;
    int64_t count, k;
} xdi_mapping_best;

static void xdi_mapping_offer(xdi_mapping_best *best, int32_t id, float weight) {
    int64_t at = best->count;
    while (at > 0 && best->weights[at - 1] < weight) at--;
    if (at == best->k) return;
    if (best->count < best->k) best->count++;
    for (int64_t i = best->count - 1; i > at; i--) {
        best->ids[i] = best->ids[i - 1];
        best->weights[i] = best->weights[i - 1];
    }
    best->ids[at] = id;
    best->weights[at] = weight;
}

/* ---- from votes ---- */

/* Unused entries get the lowest ids that the row does not have. */
static void xdi_mapping_fill(xdi_mapping_best *best, int64_t teacher_size) {
    for (int32_t id = 0; best->count < best->k && id < teacher_size; id++) {
        bool taken = false;
        for (int64_t i = 0; i < best->count && !taken; i++) taken = best->ids[i] == id;
        if (!taken) best->ids[best->count++] = id;
    }
}

/* Cells of one student id, ascending by teacher id, to its row. */
static void xdi_mapping_from_cells(const xdi_vote *cells, int64_t count, const xd_projection_rows_desc *desc,
                                   int64_t teacher_size, xdi_mapping_best *best) {
    double sum = 0.0;
    float narrow = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        sum += cells[i].weight;
        narrow += xdi_mapping_narrow((float)cells[i].weight);
    }
    narrow = xdi_mapping_narrow(narrow);
    for (int64_t i = 0; i < count && sum > 0.0; i++) {
        const float share = desc->compat
                                ? xdi_mapping_narrow(xdi_mapping_narrow((float)cells[i].weight) / narrow)
                                : (float)(cells[i].weight / sum);
        if (share > 0.0f) xdi_mapping_offer(best, cells[i].teacher_id, share);
    }
    if (desc->compat) xdi_mapping_fill(best, teacher_size);
}

/* The last slot of the scale trick, which in an exact row is empty; then weights that add up to 1. */
static void xdi_mapping_finish(const xd_projection_rows_desc *desc, bool exact, xdi_mapping_best *best) {
    if (desc->scale_trick) best->weights[best->k - 1] = exact ? 0.0f : xdi_mapping_narrow(0.2f);
    if (desc->scale_trick || !desc->compat) xdi_mapping_normalise(best->weights, best->k, desc->compat);
}

XD_API xd_result xd_projection_rows_from_votes(xd_votes *votes, const xd_projection_rows_desc *desc,
                                               xd_projection_rows *out) {
    XDI_LIVE(xd_votes, votes);
    const xdi_vote *cells = NULL;
    int64_t student_size = 0, teacher_size = 0, count = 0, at = 0;
    xd_ctx *ctx = votes ? xdi_votes_describe(votes, &student_size, &teacher_size) : NULL;
    xd_projection_rows rows;
    XDI_GIVEN(ctx, votes, desc, out);
    XD_REQUIRE(ctx, desc->compat || !desc->scale_trick, XD_ERROR_ARGUMENT,
               "the scale trick exists in compat rows only");
    XD_TRY(xdi_votes_read(votes, &cells, &count));
    XD_TRY(xdi_mapping_create(ctx, student_size, desc->k, &rows));
    for (int64_t s = 0; s < rows.rows; s++) {
        xdi_mapping_best best = { rows.ids + s * rows.k, rows.weights + s * rows.k, 0, rows.k };
        const int64_t begin = at;
        while (at < count && cells[at].student_id == s) at++;
        xdi_mapping_from_cells(cells + begin, at - begin, desc, teacher_size, &best);
        xdi_mapping_finish(desc, xdi_votes_is_exact(votes, s), &best);
    }
    *out = rows;
    return XD_OK;
}

/* ---- exact strings ---- */

typedef struct xdi_mapping_string {
    xd_text text;
    int64_t id;
} xdi_mapping_string;

static int xdi_mapping_compare_text(xd_text a, xd_text b) {
    const int64_t common = a.size < b.size ? a.size : b.size;
    const int order = common > 0 ? memcmp(a.data, b.data, (size_t)common) : 0;
    return order != 0 ? order : (a.size > b.size) - (a.size < b.size);
}

/* By text, the highest id first. */
static int xdi_mapping_compare(const void *left, const void *right) {
    const xdi_mapping_string *a = (const xdi_mapping_string *)left, *b = (const xdi_mapping_string *)right;
    const int order = xdi_mapping_compare_text(a->text, b->text);
    return order != 0 ? order : (a->id < b->id) - (a->id > b->id);
}

/* First of the sorted strings that is not before text. */
static int64_t xdi_mapping_find(const void *const *sorted, int64_t count, xd_text text) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (xdi_mapping_compare_text(((const xdi_mapping_string *)sorted[middle])->text, text) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void xdi_mapping_set_exact(xd_projection_rows *rows, int64_t student_id, int64_t teacher_id) {
    int32_t *ids = rows->ids + student_id * rows->k;
    float *weights = rows->weights + student_id * rows->k;
    for (int64_t i = 0; i < rows->k; i++) {
        ids[i] = i == 0 ? (int32_t)teacher_id : -1;
        weights[i] = i == 0 ? 1.0f : 0.0f;
    }
}

XD_PRIVATE xd_result xdi_projection_rows_apply_exact(xd_ctx *ctx, xd_projection_rows *rows, xd_texts student,
                                                     xd_texts teacher) {
    XDI_GIVEN(ctx, ctx, rows);
    XDI_GIVEN_LIST(ctx, student.texts, student.count);
    XDI_GIVEN_LIST(ctx, teacher.texts, teacher.count);
    XD_REQUIRE(ctx, student.count >= 0 && teacher.count >= 0, XD_ERROR_ARGUMENT,
               "vocabularies of %lld and %lld strings", (long long)student.count, (long long)teacher.count);
    XD_REQUIRE(ctx, student.count <= rows->rows, XD_ERROR_ARGUMENT,
               "%lld student strings for a projection of %lld rows", (long long)student.count,
               (long long)rows->rows);
    const size_t n = (size_t)teacher.count;
    xdi_mapping_string *strings =
        (xdi_mapping_string *)xd_allocate(ctx, n * (sizeof *strings + sizeof(void *)));
    XD_REQUIRE(ctx, strings, XD_ERROR_MEMORY, "no room to sort %zu strings", n);
    const void **sorted = (const void **)(void *)(strings + n);
    for (size_t i = 0; i < n; i++) {
        strings[i].text = teacher.texts[i];
        strings[i].id = (int64_t)i;
        sorted[i] = &strings[i];
    }
    xdi_sort(sorted, n, xdi_mapping_compare);
    for (int64_t s = 0; s < student.count; s++) {
        const int64_t at = xdi_mapping_find(sorted, teacher.count, student.texts[s]);
        if (student.texts[s].size == 0 || at == teacher.count) continue;
        const xdi_mapping_string *found = (const xdi_mapping_string *)sorted[at];
        if (xdi_mapping_compare_text(found->text, student.texts[s]) == 0)
            xdi_mapping_set_exact(rows, s, found->id);
    }
    xd_release(ctx, strings);
    return XD_OK;
}

/* ---- cutting ---- */

static bool xdi_mapping_valid(const xd_projection_rows *rows, int64_t at) {
    return rows->ids[at] >= 0 && rows->weights[at] > 0.0f;
}

static void xdi_mapping_cut_row(const xd_projection_rows *in, int64_t r, const xdi_projection_cut_desc *desc,
                                xd_projection_rows *out) {
    const int64_t begin = r * in->k, last = begin + in->k - 1;
    const bool keeps_last = desc->preserve_last && xdi_mapping_valid(in, last);
    xdi_mapping_best best = { out->ids + r * out->k, out->weights + r * out->k, 0,
                              desc->preserve_last ? out->k - 1 : out->k };
    int64_t valid = 0;
    for (int64_t i = begin; i <= last; i++) valid += xdi_mapping_valid(in, i);
    const int64_t most = desc->preserve_last && valid > in->k - 1 ? in->k - 1 : valid;
    for (int64_t i = begin, taken = 0; i <= last && taken < most; i++) {
        if (!xdi_mapping_valid(in, i)) continue;
        if (best.k > 0) xdi_mapping_offer(&best, in->ids[i], in->weights[i]);
        taken++;
    }
    if (keeps_last) {
        out->ids[r * out->k + out->k - 1] = in->ids[last];
        out->weights[r * out->k + out->k - 1] = in->weights[last];
    }
    xdi_mapping_normalise(out->weights + r * out->k, out->k, desc->compat);
}

XD_PRIVATE xd_result xdi_projection_rows_cut(xd_ctx *ctx, const xd_projection_rows *rows,
                                             const xdi_projection_cut_desc *desc, xd_projection_rows *out) {
    XDI_GIVEN(ctx, ctx, rows, desc, out);
    xd_projection_rows made;
    XD_TRY(xdi_check_row_weights(ctx, rows));
    XD_TRY(xdi_mapping_create(ctx, rows->rows, desc->k, &made));
    for (int64_t r = 0; r < rows->rows; r++) xdi_mapping_cut_row(rows, r, desc, &made);
    *out = made;
    return XD_OK;
}

/* ---- similarities ---- */

/* Rounded cosines may be a little above 1. */
#define XDI_MAPPING_MOST 1.01

static xd_result xdi_mapping_check_numbers(xd_ctx *ctx, const xd_rows *x, double most, const char *name) {
    const int64_t stride = x->stride ? x->stride : x->cols;
    for (int64_t r = 0; r < x->rows; r++)
        for (int64_t c = 0; c < x->cols; c++) {
            const double value = (double)((const float *)x->data)[r * stride + c];
            XD_REQUIRE(ctx, fabs(value) <= most, XD_ERROR_ARGUMENT, "%s: %g in row %lld, column %lld", name,
                       value, (long long)r, (long long)c);
        }
    return XD_OK;
}

static xd_result xdi_mapping_check_threshold(xd_ctx *ctx, double threshold) {
    XD_REQUIRE(ctx, isfinite(threshold), XD_ERROR_ARGUMENT, "threshold %g is not finite", threshold);
    return XD_OK;
}

static double xdi_mapping_magnitude(float similarity) {
    const double value = fabs((double)similarity);
    return value > 0.999999999 ? 1.0 : value;
}

static void xdi_mapping_similar_row(const float *similarities, int64_t columns, double threshold,
                                    xdi_mapping_best *best) {
    double largest = 0.0, sum = 0.0;
    for (int64_t c = 0; c < columns; c++) {
        const double value = xdi_mapping_magnitude(similarities[c]);
        if (value > largest) largest = value;
    }
    for (int64_t c = 0; c < columns; c++) sum += pow(xdi_mapping_magnitude(similarities[c]), 10.0 * largest);
    for (int64_t c = 0; c < columns; c++) {
        const double power = pow(xdi_mapping_magnitude(similarities[c]), 10.0 * largest);
        xdi_mapping_offer(best, (int32_t)c, (float)(sum > 0.0 ? power / sum : power));
    }
    for (int64_t i = 0; i < best->count; i++)
        if ((double)best->weights[i] < threshold) best->ids[i] = -1;
}

/* Rows of f32, one for each id of a vocabulary. */
static xd_result xdi_mapping_check_rows(xd_ctx *ctx, const xd_rows *x, const char *name) {
    XD_REQUIRE(ctx, x->dtype == XD_DTYPE_F32, XD_ERROR_DTYPE, "%s are f32, not %s", name,
               xd_dtype_name(x->dtype));
    XD_REQUIRE(ctx, x->rows >= 0 && x->cols >= 0 && (x->stride == 0 || x->stride >= x->cols), XD_ERROR_SHAPE,
               "%s: %lld rows of %lld elements, %lld apart", name, (long long)x->rows, (long long)x->cols,
               (long long)x->stride);
    XD_REQUIRE(ctx, x->data || x->rows == 0 || x->cols == 0, XD_ERROR_ARGUMENT,
               "%s: %lld rows of %lld elements without data", name, (long long)x->rows, (long long)x->cols);
    return XD_OK;
}

static xd_result xdi_mapping_check_columns(xd_ctx *ctx, int64_t columns) {
    XD_REQUIRE(ctx, columns >= 0 && columns <= INT32_MAX, XD_ERROR_ARGUMENT, "%lld teacher ids",
               (long long)columns);
    return XD_OK;
}

/* What rows are made from: similarities, or embeddings and memory for one row of similarities per thread. */
typedef struct xdi_mapping_similar {
    const xd_rows *student, *teacher; /* similarities: student [rows, columns], no teacher */
    float *cosines;                   /* [threads, columns] */
    int64_t columns;
    double threshold;
    xd_projection_rows *rows;
} xdi_mapping_similar;

static const float *xdi_mapping_row(const xd_rows *x, int64_t r) {
    return (const float *)x->data + r * (x->stride ? x->stride : x->cols);
}

static void xdi_mapping_similar_rows(void *argument, int64_t begin, int64_t end, int slot) {
    const xdi_mapping_similar *m = (const xdi_mapping_similar *)argument;
    const int64_t k = m->rows->k;
    (void)slot;
    for (int64_t r = begin; r < end; r++) {
        xdi_mapping_best best = { m->rows->ids + r * k, m->rows->weights + r * k, 0, k };
        xdi_mapping_similar_row(xdi_mapping_row(m->student, r), m->columns, m->threshold, &best);
    }
}

XD_PRIVATE xd_result xdi_projection_rows_from_similarities(xd_ctx *ctx, xd_rows similarities,
                                                           const xdi_similarity_desc *desc,
                                                           xd_projection_rows *out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    xd_projection_rows made;
    xdi_mapping_similar m = { &similarities, NULL, NULL, similarities.cols, desc->threshold, &made };
    XD_TRY(xdi_mapping_check_rows(ctx, &similarities, "similarities"));
    XD_TRY(xdi_mapping_check_numbers(ctx, &similarities, XDI_MAPPING_MOST, "similarities"));
    XD_TRY(xdi_mapping_check_threshold(ctx, desc->threshold));
    XD_TRY(xdi_mapping_check_columns(ctx, similarities.cols));
    XD_TRY(xdi_mapping_create(ctx, similarities.rows, desc->k, &made));
    const xd_result result = xdi_parallel_range(ctx, similarities.rows, 1, xdi_mapping_similar_rows, &m);
    if (result == XD_OK)
        *out = made;
    else
        xd_projection_rows_destroy(ctx, &made);
    return result;
}

static double xdi_mapping_dot(const float *a, const float *b, int64_t width) {
    double sum = 0.0;
    for (int64_t i = 0; i < width; i++) sum += (double)a[i] * (double)b[i];
    return sum;
}

static void xdi_mapping_embedded_rows(void *argument, int64_t begin, int64_t end, int slot) {
    const xdi_mapping_similar *m = (const xdi_mapping_similar *)argument;
    const int64_t k = m->rows->k, width = m->student->cols;
    float *cosines = m->cosines + slot * m->columns;
    for (int64_t r = begin; r < end; r++) {
        const float *row = xdi_mapping_row(m->student, r);
        const double length = sqrt(xdi_mapping_dot(row, row, width));
        xdi_mapping_best best = { m->rows->ids + r * k, m->rows->weights + r * k, 0, k };
        for (int64_t c = 0; c < m->columns; c++) {
            const float *other = xdi_mapping_row(m->teacher, c);
            const double product = length * sqrt(xdi_mapping_dot(other, other, width));
            cosines[c] = product > 0.0 ? (float)(xdi_mapping_dot(row, other, width) / product) : 0.0f;
        }
        xdi_mapping_similar_row(cosines, m->columns, m->threshold, &best);
    }
}

XD_PRIVATE xd_result xdi_projection_rows_from_embeddings(xd_ctx *ctx, xd_rows student, xd_rows teacher,
                                                         const xdi_similarity_desc *desc,
                                                         xd_projection_rows *out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    const size_t room = (size_t)xd_ctx_settings(ctx)->threads * (size_t)teacher.rows;
    xd_projection_rows made;
    xdi_mapping_similar m = { &student, &teacher, NULL, teacher.rows, desc->threshold, &made };
    XD_TRY(xdi_mapping_check_rows(ctx, &student, "the student's embeddings"));
    XD_TRY(xdi_mapping_check_rows(ctx, &teacher, "the teacher's embeddings"));
    XD_REQUIRE(ctx, student.cols == teacher.cols, XD_ERROR_SHAPE,
               "embeddings of %lld numbers for the student and %lld for the teacher", (long long)student.cols,
               (long long)teacher.cols);
    XD_TRY(xdi_mapping_check_columns(ctx, teacher.rows));
    XD_TRY(xdi_mapping_check_numbers(ctx, &student, FLT_MAX, "the student's embeddings"));
    XD_TRY(xdi_mapping_check_numbers(ctx, &teacher, FLT_MAX, "the teacher's embeddings"));
    XD_TRY(xdi_mapping_check_threshold(ctx, desc->threshold));
    m.cosines = (float *)xd_allocate(ctx, room * sizeof *m.cosines);
    XD_REQUIRE(ctx, m.cosines, XD_ERROR_MEMORY, "no room for %zu similarities", room);
    xd_result result = xdi_mapping_create(ctx, student.rows, desc->k, &made);
    if (result == XD_OK) {
        result = xdi_parallel_range(ctx, student.rows, 1, xdi_mapping_embedded_rows, &m);
        if (result == XD_OK)
            *out = made;
        else
            xd_projection_rows_destroy(ctx, &made);
    }
    xd_release(ctx, m.cosines);
    return result;
}
