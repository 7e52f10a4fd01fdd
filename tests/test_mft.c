/* Minimal fine-tuning and the cosine on every CPU level, in both modes and over split vocabularies and batches, against
 * plain loops in double; INVARIANT mode to the bit. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "loss_calls.h"
#include "vocab_calls.h"
#include "planned.h"
#include "xd_test.h"
#include "xd_test_cpu.h"

#include <math.h>
#include <stdlib.h>

enum { ROWS = 9, PADDING = 3, MOST = 4600, CELLS = ROWS * (MOST + PADDING) };

typedef struct problem {
    bool cosine;
    int64_t vocab, width; /* width: elements of a row, the padding among them */
    xd_dtype student_dtype, teacher_dtype, gradient_dtype;
    bool in_place;
    double temperature, threshold, weight;
    double student[CELLS], teacher[CELLS];
    int64_t labels[ROWS];
    uint8_t mask[ROWS];
    float row_weight[ROWS];
} problem;

typedef struct outcome {
    double gradient[CELLS], terms[CELLS];
    float row_loss[ROWS];
    xd_loss_values values;
    xd_status status;
} outcome;

static double uniform(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)(*state >> 11) / 4503599627370496.0 - 1.0;
}

static double rounded(double x, xd_dtype dtype) {
    float room = 0.0f;
    xd_store_f64(&room, dtype, 0, x);
    return xd_load_f64(&room, dtype, 0);
}

/* Rows that differ in who is right: the label is anywhere, the teacher's favourite, or nearly certain. */
static void fill(problem *p, bool cosine, int64_t vocab, bool narrow, uint64_t seed) {
    uint64_t state = seed;
    memset(p, 0, sizeof *p);
    p->cosine = cosine;
    p->vocab = vocab;
    p->width = vocab + PADDING;
    p->student_dtype = narrow ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    p->teacher_dtype = seed % 3 == 0 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    p->gradient_dtype = p->student_dtype;
    p->temperature = 1.0;
    p->weight = 1.0;
    p->threshold = 0.2;
    for (int64_t i = 0; i < ROWS * p->width; i++) {
        p->student[i] = rounded(5.0 * uniform(&state), p->student_dtype);
        p->teacher[i] = rounded(p->student[i] + 3.0 * uniform(&state), p->teacher_dtype);
    }
    for (int r = 0; r < ROWS; r++) {
        int64_t best = 0;
        p->labels[r] = (r * 31) % vocab;
        if (r == 6) p->teacher[r * p->width + p->labels[r]] = 30.0;
        for (int64_t c = 1; c < vocab; c++)
            if (p->teacher[r * p->width + c] > p->teacher[r * p->width + best]) best = c;
        if (r % 3 == 1) p->labels[r] = best;
        p->mask[r] = r != 5;
        p->row_weight[r] = 0.5f + (float)r;
    }
}

/* ---- the formulas ---- */

/* Row r of the expected outcome; false when it is not finite. */
static bool expect_mft(const problem *p, int r, double scale, outcome *e) {
    const double *x = p->student + r * p->width, *y = p->teacher + r * p->width, tau = p->temperature;
    const double threshold = p->threshold, weight = p->weight * tau * tau;
    const int64_t label = p->labels[r];
    double x_max = -HUGE_VAL, y_max = -HUGE_VAL, x_sum = 0.0, y_sum = 0.0, loss = 0.0;
    int64_t favourite = 0;
    for (int64_t c = 0; c < p->vocab; c++) {
        if (!(x[c] < HUGE_VAL) || !(y[c] < HUGE_VAL)) return false;
        if (y[c] > y[favourite]) favourite = c;
        x_max = fmax(x_max, x[c]);
        y_max = fmax(y_max, y[c]);
    }
    for (int64_t c = 0; c < p->vocab; c++) {
        x_sum += exp((x[c] - x_max) / tau);
        y_sum += exp((y[c] - y_max) / tau);
    }
    const double q_a = 1.0 / y_sum, q_y = exp((y[label] - y_max) / tau) / y_sum;
    const double wanted = q_y > 1.0 - threshold ? 1.0 : q_y + threshold;
    const double mu = favourite == label ? (wanted - q_a) / (1.0 - q_a + 1e-7)
                                         : (q_a - q_y + threshold) / (1.0 + q_a - q_y + 1e-7);
    for (int64_t c = 0; c < p->vocab; c++) {
        const double q = (1.0 - mu) * exp((y[c] - y_max) / tau) / y_sum + (c == label ? mu : 0.0);
        const double log_p = (x[c] - x_max) / tau - log(x_sum), term = q > 0.0 ? q * (log(q) - log_p) : 0.0;
        loss += term;
        e->terms[r * p->width + c] = weight * term;
        e->gradient[r * p->width + c] = scale * weight / tau * (exp(log_p) - q);
    }
    e->row_loss[r] = (float)(weight * loss);
    e->values.soft += scale * loss;
    return isfinite(loss);
}

static bool expect_cosine(const problem *p, int r, double scale, outcome *e) {
    const double *x = p->student + r * p->width, *y = p->teacher + r * p->width;
    double xx = 0.0, yy = 0.0, xy = 0.0;
    for (int64_t c = 0; c < p->vocab; c++) {
        xx += x[c] * x[c];
        yy += y[c] * y[c];
        xy += x[c] * y[c];
    }
    const double length = fmax(sqrt(xx), 1e-12), other = fmax(sqrt(yy), 1e-12),
                 cosine = xy / (length * other);
    for (int64_t c = 0; c < p->vocab; c++)
        e->gradient[r * p->width + c] =
            sqrt(xx) < 1e-12 ? 0.0 : -scale * p->weight * (y[c] / other - cosine * x[c] / length) / length;
    e->row_loss[r] = (float)(p->weight * (1.0 - cosine));
    e->values.soft += scale * (1.0 - cosine);
    return isfinite(cosine);
}

static void expect(const problem *p, outcome *e) {
    memset(e, 0, sizeof *e);
    e->status.first_row = -1;
    for (int r = 0; r < ROWS; r++) {
        const double before = e->values.soft, scale = (double)p->row_weight[r] / ROWS;
        if (!p->mask[r] || p->labels[r] == XD_IGNORE_INDEX) continue;
        const bool outside = p->labels[r] < 0 || p->labels[r] >= p->vocab;
        const bool found = outside && !p->cosine;
        e->values.counted++;
        if (p->row_weight[r] == 0.0f) continue;
        if (!found && (p->cosine ? expect_cosine(p, r, scale, e) : expect_mft(p, r, scale, e))) continue;
        e->status.label_out_of_range += found ? 1 : 0;
        e->status.not_finite += found ? 0 : 1;
        if (e->status.first_row < 0) e->status.first_row = r;
        e->values.soft = before;
        e->row_loss[r] = 0.0f;
        for (int64_t c = 0; c < p->width; c++)
            e->gradient[r * p->width + c] = e->terms[r * p->width + c] = 0.0;
    }
    if (e->status.first_row < 0) e->status.first_row = 0;
    e->values.loss = p->weight * (p->cosine ? 1.0 : p->temperature * p->temperature) * e->values.soft;
}

/* ---- running ---- */

typedef struct run {
    const problem *problem;
    xd_cpu_level level;
    xd_reduction reduction;
    int ranks;
    int64_t cuts[5]; /* of the vocabulary or, when by_rows, of the rows */
    bool by_rows;
    void *student, *teacher, *gradient;
    float *terms;
    outcome *out;
} run;

static xd_rows part(void *data, xd_dtype dtype, const problem *p, int64_t row, int64_t rows, int64_t column,
                    int64_t columns) {
    const size_t at = (size_t)(row * p->width + column) * xd_dtype_size(dtype);
    const xd_rows out = { (char *)data + at, dtype, rows, columns, p->width };
    return out;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    const run *w = (const run *)argument;
    const problem *p = w->problem;
    xd_ctx *ctx = xd_comm_ctx(world);
    const int rank = xd_comm_rank(world);
    const int64_t low = w->cuts[rank], high = w->cuts[rank + 1];
    const int64_t row = w->by_rows ? low : 0, rows = w->by_rows ? high - low : ROWS;
    const int64_t begin = w->by_rows ? 0 : low, end = w->by_rows ? p->vocab : high;
    const int64_t columns = (end == p->vocab ? p->width : end) - begin; /* with the padding of the whole */
    float row_loss[ROWS];
    xd_vocab *vocab = NULL;
    mft_desc d;
    xd_loss_values values;
    xd_status status;
    memset(&d, 0, sizeof d);
    memset(&status, 0, sizeof status);
    XD_TRY(vocab_of(ctx, w->by_rows ? NULL : world, (xd_interval){ begin, end }, p->vocab, &vocab));
    d.loss.student = part(w->student, p->student_dtype, p, row, rows, begin, columns);
    d.loss.teacher = part(w->teacher, p->teacher_dtype, p, row, rows, begin, columns);
    d.loss.common.gradient =
        p->in_place ? d.loss.student : part(w->gradient, p->gradient_dtype, p, row, rows, begin, columns);
    d.terms = part(w->terms, XD_DTYPE_F32, p, row, rows, begin, columns);
    d.loss.common.labels = xd_ids_of(p->labels + row, XD_DTYPE_I64);
    d.loss.common.mask = p->mask + row;
    d.loss.common.row_weight = p->row_weight + row;
    d.loss.temperature = p->temperature;
    d.loss.soft_weight = p->weight;
    d.loss.common.denominator_value = ROWS;
    d.loss.vocab = vocab;
    d.loss.common.comm = w->by_rows ? world : NULL;
    d.loss.common.row_loss = row_loss;
    d.loss.common.status = &status;
    d.threshold = p->threshold;
    const xd_result result = p->cosine ? cosine_loss(ctx, &d.loss, &values) : mft_loss(ctx, &d, &values);
    if (result == XD_OK && (rank == 0 || w->by_rows))
        memcpy(w->out->row_loss + row, row_loss, (size_t)rows * sizeof *row_loss);
    if (rank == 0) {
        w->out->values = values;
        w->out->status = status;
    }
    xd_vocab_destroy(vocab);
    return result;
}

static void *stored(const double *values, xd_dtype dtype, int64_t count) {
    void *data = malloc((size_t)count * xd_dtype_size(dtype));
    for (int64_t i = 0; i < count; i++) xd_store_f64(data, dtype, i, values ? values[i] : 7.0);
    return data;
}

static void run_cut(run *w, outcome *out) {
    const problem *p = w->problem;
    const int64_t cells = ROWS * p->width;
    xd_ctx_desc settings;
    memset(&settings, 0, sizeof settings);
    memset(out, 0, sizeof *out);
    settings.cpu = w->level;
    settings.reduction = w->reduction;
    w->student = stored(p->student, p->student_dtype, cells);
    w->teacher = stored(p->teacher, p->teacher_dtype, cells);
    w->gradient = stored(NULL, p->gradient_dtype, cells);
    w->terms = (float *)stored(NULL, XD_DTYPE_F32, cells);
    w->out = out;
    CHECK_EQ_INT(xd_run_threads(w->ranks, &settings, run_rank, w, NULL), XD_OK);
    for (int64_t i = 0; i < cells; i++) {
        out->gradient[i] = p->in_place ? xd_load_f64(w->student, p->student_dtype, i)
                                       : xd_load_f64(w->gradient, p->gradient_dtype, i);
        out->terms[i] = p->cosine ? 0.0 : (double)w->terms[i];
    }
    free(w->student);
    free(w->teacher);
    free(w->gradient);
    free(w->terms);
}

static void run_whole(const problem *p, xd_cpu_level level, xd_reduction reduction, outcome *out) {
    run w;
    memset(&w, 0, sizeof w);
    w.problem = p;
    w.level = level;
    w.reduction = reduction;
    w.ranks = 1;
    w.cuts[1] = p->vocab;
    run_cut(&w, out);
}

/* The arithmetic of f32, of which the plain level and cosines do only the last rounding, on numbers of the size that a
 * row's gradient is made of; bf16 is rounded on top. */
static void compare(const problem *p, xd_cpu_level level, const outcome *got, const outcome *expected) {
    const double error = p->cosine || level == XD_CPU_PLAIN ? 1e-7 : 3e-6;
    const double tau = p->cosine ? 1.0 : p->temperature, squared = fmax(1.0, tau * tau) * fabs(p->weight);
    const double narrow = p->gradient_dtype == XD_DTYPE_BF16 ? 1.0 / 128.0 : 0.0;
    for (int r = 0; r < ROWS; r++) {
        const double size = squared + fabs((double)expected->row_loss[r]);
        double most = size / tau * (double)p->row_weight[r] / ROWS;
        for (int64_t c = 0; c < p->vocab; c++) most = fmax(most, fabs(expected->gradient[r * p->width + c]));
        CHECK_NEAR(got->row_loss[r], expected->row_loss[r], error * size);
        for (int64_t i = r * p->width; i < (r + 1) * p->width; i++) {
            CHECK_NEAR(got->gradient[i], expected->gradient[i],
                       error * most + narrow * fabs(expected->gradient[i]));
            CHECK_NEAR(got->terms[i], expected->terms[i], error * size);
        }
    }
    CHECK_NEAR(got->values.loss, expected->values.loss,
               error * (5.0 * squared + fabs(expected->values.loss)));
    CHECK_NEAR(got->values.soft * squared, expected->values.soft * squared,
               error * (5.0 * squared + fabs(expected->values.loss)));
    CHECK(got->values.hard == 0.0);
    CHECK_EQ_INT(got->values.counted, expected->values.counted);
    CHECK_EQ_INT(got->status.not_finite, expected->status.not_finite);
    CHECK_EQ_INT(got->status.label_out_of_range, expected->status.label_out_of_range);
    CHECK_EQ_INT(got->status.first_row, expected->status.first_row);
    CHECK_EQ_INT(got->status.overflow, 0);
}

static outcome expected, got, other; /* a test's, too large for a stack */

static void all_levels(const problem *p) {
    expect(p, &expected);
    XD_TEST_LEVELS(level, XD_CPU_PLAIN)
    for (int mode = 0; mode < 2; mode++) {
        const long before = xd_test_failures;
        run_whole(p, (xd_cpu_level)level, mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC, &got);
        compare(p, (xd_cpu_level)level, &got, &expected);
        if (xd_test_failures > before && before < XD_TEST_SHOWN)
            printf("  level %s, mode %d, %s, %lld columns, %s and %s, temperature %g\n",
                   xd_cpu_level_name((xd_cpu_level)level), mode, p->cosine ? "cosine" : "mft",
                   (long long)p->vocab, xd_dtype_name(p->student_dtype), xd_dtype_name(p->teacher_dtype),
                   p->temperature);
    }
}

static problem p; /* the problem of the running test */

XD_TEST(every_level_has_the_formulas_for_every_number_of_columns) {
    for (int kind = 0; kind < 2; kind++)
        for (int64_t vocab = 1; vocab <= 50; vocab += vocab < 36 ? 1 : 7) {
            fill(&p, kind == 1, vocab, vocab % 2 == 0, (uint64_t)vocab);
            p.in_place = vocab % 3 == 1;
            if (vocab % 5 == 0 && !p.in_place) p.gradient_dtype = XD_DTYPE_BF16;
            all_levels(&p);
        }
}

XD_TEST(rows_of_several_tiles_with_temperatures_thresholds_and_weights) {
    static const double temperature[] = { 1.0, 0.7, 2.5 }, threshold[] = { 0.0, 0.9, 1.0 },
                        weight[] = { 1.0, 3.0, -0.5 };
    for (int kind = 0; kind < 2; kind++)
        for (int i = 0; i < 3; i++) {
            fill(&p, kind == 1, MOST - 37 * i, i == 1, 60 + (uint64_t)i);
            p.temperature = temperature[i];
            p.threshold = threshold[i];
            p.weight = weight[i];
            p.in_place = i == 2;
            all_levels(&p);
        }
}

XD_TEST(one_hot_rows_and_columns_of_minus_infinity) {
    for (int64_t vocab = 12; vocab < 90; vocab += 35) {
        fill(&p, false, vocab, false, 7);
        for (int r = 0; r < ROWS; r++) {
            double *x = p.student + r * p.width, *y = p.teacher + r * p.width;
            if (r % 2 == 0) x[(r * 7) % 12] = 40.0;
            if (r % 4 < 2) y[(r * 7) % 12] = r < 5 ? 25.0 : 90.0;
            for (int64_t c = 1; c < vocab; c += 9)
                if (c != p.labels[r]) x[c] = y[c] = -HUGE_VAL;
        }
        p.teacher[2 * p.width + p.labels[2]] = -HUGE_VAL; /* the label may be impossible for the teacher */
        all_levels(&p);
    }
}

/* Row by row what can be wrong. */
static void spoil(bool cosine) {
    fill(&p, cosine, 45, false, 21);
    p.student[0 * p.width + 9] = NAN;
    p.teacher[1 * p.width + 44] = NAN;
    p.student[2 * p.width + 3] = HUGE_VAL;
    p.labels[3] = cosine ? XD_IGNORE_INDEX : 45;
    p.labels[4] = XD_IGNORE_INDEX;
    p.student[5 * p.width] = NAN; /* masked */
    p.teacher[6 * p.width] = cosine ? -HUGE_VAL : p.teacher[6 * p.width];
    p.row_weight[7] = 0.0f;
    p.teacher[7 * p.width] = NAN;
    for (int64_t c = 0; c < p.width && !cosine; c++) p.student[8 * p.width + c] = -HUGE_VAL;
}

XD_TEST(rows_that_are_broken_masked_or_labelled_outside_have_no_gradient) {
    for (int kind = 0; kind < 2; kind++) {
        spoil(kind == 1);
        all_levels(&p);
        CHECK(expected.status.not_finite >= 4 - kind);
        p.in_place = true;
        all_levels(&p);
    }
    fill(&p, false, 45, false, 22);
    p.student[p.width + 4] = -HUGE_VAL; /* impossible for the student, possible for the teacher */
    p.student[2 * p.width + p.labels[2]] = p.teacher[2 * p.width + p.labels[2]] = -HUGE_VAL;
    all_levels(&p);
    CHECK_EQ_INT(expected.status.not_finite, 2);
}

XD_TEST(cosines_of_rows_of_zeros_and_of_any_size) {
    static const double size[] = { 1e-30, 1e-9, 1.0, 3000.0, 1e15 };
    for (int i = 0; i < 5; i++) {
        fill(&p, true, 300, false, 31);
        for (int64_t c = 0; c < ROWS * p.width; c++) {
            p.student[c] = rounded(p.student[c] * size[i], XD_DTYPE_F32);
            p.teacher[c] = rounded(p.teacher[c] * size[4 - i], p.teacher_dtype);
        }
        for (int64_t c = 0; c < p.width; c++) p.student[c] = p.teacher[p.width + c] = 0.0;
        all_levels(&p);
        CHECK_NEAR(got.row_loss[0], 1.0, 0.0);
        CHECK_NEAR(got.row_loss[1], 1.0, 0.0);
    }
}

/* ---- splits ---- */

static const int64_t cuts[][5] = { { 0, 45 }, { 0, 7, 45 }, { 0, 1, 32, 45 }, { 0, 20, 20, 44, 45 } };
static const int64_t row_cuts[][5] = { { 0, ROWS }, { 0, 2, ROWS }, { 0, 0, 7, ROWS }, { 0, 1, 3, 6, ROWS } };

static void same_bits(const problem *q, const outcome *a, const outcome *b, bool columns) {
    CHECK(memcmp(a->row_loss, b->row_loss, sizeof a->row_loss) == 0);
    CHECK(memcmp(&a->values, &b->values, sizeof a->values) == 0);
    for (int64_t i = 0; i < ROWS * q->width && columns; i++)
        CHECK(a->gradient[i] == b->gradient[i] && a->terms[i] == b->terms[i]);
}

static void cut(const problem *q, int level, bool invariant, bool by_rows, int ranks, outcome *out) {
    run w;
    memset(&w, 0, sizeof w);
    w.problem = q;
    w.level = (xd_cpu_level)level;
    w.reduction = invariant ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC;
    w.ranks = ranks;
    w.by_rows = by_rows;
    memcpy(w.cuts, by_rows ? row_cuts[ranks - 1] : cuts[ranks - 1], sizeof w.cuts);
    run_cut(&w, out);
}

XD_TEST(splits_of_vocabulary_and_batch_find_the_same_and_in_invariant_mode_to_the_bit) {
    for (int kind = 0; kind < 4; kind++) {
        if (kind < 2)
            fill(&p, kind == 1, 45, false, 40);
        else
            spoil(kind == 3);
        p.temperature = 1.7;
        expect(&p, &expected);
        XD_TEST_LEVELS(level, XD_CPU_PLAIN)
        for (int ranks = 1; ranks <= 4; ranks++)
            for (int form = 0; form < 4; form++) {
                cut(&p, level, form % 2 == 1, form >= 2, ranks, &got);
                if (form < 2)
                    compare(&p, (xd_cpu_level)level, &got,
                            &expected); /* a status shows the first row of its rank */
                if (form % 2 == 0) continue;
                cut(&p, level, true, false, 1, &other);
                same_bits(&p, &got, &other, true);
            }
    }
}

XD_TEST(invariant_losses_have_the_same_bits_on_every_level_and_cosines_their_gradients_too) {
    for (int kind = 0; kind < 2; kind++)
        for (int64_t vocab = 45; vocab < MOST; vocab += 2100) {
            fill(&p, kind == 1, vocab, vocab % 2 == 1, 50 + (uint64_t)kind);
            run_whole(&p, XD_CPU_PLAIN, XD_REDUCTION_INVARIANT, &other);
            XD_TEST_LEVELS(level, XD_CPU_PORTABLE) {
                run_whole(&p, (xd_cpu_level)level, XD_REDUCTION_INVARIANT, &got);
                same_bits(&p, &got, &other, kind == 1);
            }
        }
}

/* ---- calls ---- */

XD_TEST(a_workspace_is_that_of_a_loss) {
    xd_ctx *ctx = NULL;
    xd_vocab *vocab = NULL;
    mft_desc d;
    xd_loss_values values = { 7.0, 0.0, 0.0, 0 };
    float student[ROWS * 5], teacher[ROWS * 5];
    uint64_t state = 3;
    d = mft_defaults();
    for (int i = 0; i < ROWS * 5; i++) student[i] = (float)uniform(&state);
    for (int i = 0; i < ROWS * 5; i++) teacher[i] = (float)uniform(&state);
    memset(&p, 0, sizeof p);
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(vocab_even(ctx, NULL, 5, &vocab), XD_OK);
    const xd_rows x = { student, XD_DTYPE_F32, ROWS, 5, 0 }, y = { teacher, XD_DTYPE_F32, ROWS, 5, 0 };
    d.loss.student = x;
    d.loss.teacher = y;
    d.loss.common.labels = xd_ids_of(p.labels, XD_DTYPE_I64);
    d.loss.vocab = vocab;
    const size_t bytes = PLANNED_WORKSPACE(ctx, mft_loss(ctx, &d, &values));
    d.loss.common.workspace = malloc(bytes);
    d.loss.common.workspace_bytes = bytes - 1;
    CHECK_EQ_INT(mft_loss(ctx, &d, &values), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(cosine_loss(ctx, &d.loss, &values), XD_ERROR_ARGUMENT);
    CHECK(values.loss == 7.0);
    d.loss.common.workspace_bytes = bytes;
    CHECK_EQ_INT(mft_loss(ctx, &d, &values), XD_OK);
    CHECK_EQ_INT(values.counted, ROWS);
    CHECK_EQ_INT(cosine_loss(ctx, &d.loss, &values), XD_OK);
    CHECK_EQ_INT(values.counted, ROWS);
    free(d.loss.common.workspace);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
}

XD_TEST(losses_without_rows_or_a_teacher) {
    xd_ctx *ctx = NULL;
    xd_vocab *vocab = NULL;
    mft_desc d;
    xd_status status;
    xd_loss_values values = { 7.0, 0.0, 0.0, 0 };
    int64_t label = 0;
    float logit[5] = { 0.0f, 1.0f, 2.0f, 3.0f, 4.0f };
    d = mft_defaults();
    memset(&status, 0, sizeof status);
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(vocab_even(ctx, NULL, 5, &vocab), XD_OK);
    const xd_rows x = { logit, XD_DTYPE_F32, 1, 5, 0 };
    d.loss.student = x;
    d.loss.common.labels = xd_ids_of(&label, XD_DTYPE_I64);
    d.loss.vocab = vocab;
    d.loss.common.status = &status;
    CHECK_EQ_INT(mft_loss(ctx, &d, &values), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(cosine_loss(ctx, &d.loss, &values), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "no teacher") != NULL);
    CHECK(values.loss == 7.0);
    d.loss.student.rows = 0;
    d.loss.teacher = d.loss.student;
    CHECK_EQ_INT(mft_loss(ctx, &d, &values), XD_OK);
    CHECK(values.loss == 0.0 && values.counted == 0);
    CHECK_EQ_INT(cosine_loss(ctx, &d.loss, &values), XD_OK);
    CHECK_EQ_INT(status.nothing_counted, 2);
    xd_vocab_destroy(vocab);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
