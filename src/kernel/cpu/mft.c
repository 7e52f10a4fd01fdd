/* Minimal fine-tuning and the cosine: plain loops, double inside. kernel/mft.h has the formulas. */

#include "kernel/cpu/internal.h"
#include "kernel/ids.h"
#include "kernel/mft_scalar.h"

#include <math.h>
#include <string.h>

static bool xdi_mft_counts(const xd_mft_args *a, int64_t r) {
    return a->row_scale[r] != 0.0;
}

/* One shard's value of a side of row r, of all shards'. */
static double xdi_mft_side(const xd_mft_args *a, int shard, int64_t r, int side) {
    return a->all_sides[(shard * a->student.rows + r) * XD_MFT_SIDES + side];
}

static void xdi_mft_zero_from(const xd_rows *x, int64_t r, int64_t column) {
    for (int64_t c = column; x->data && c < x->cols; c++) xdi_loss_store(x, r, c, 0.0);
}

XD_PRIVATE int64_t xdi_mft_begin_row(const xd_mft_args *a, int64_t r) {
    const bool fine = xdi_mft_counts(a, r) && a->row[r].finding == (int)XD_ROW_FINE;
    const int64_t columns = fine ? a->vocab.end - a->vocab.begin : 0;
    xdi_mft_zero_from(&a->terms, r, columns);
    xdi_mft_zero_from(&a->gradient, r, columns);
    return columns;
}

/* ---- minimal fine-tuning ---- */

static xd_result xdi_cpu_mft_at_label(const xd_launch *launch, const xd_mft_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->student.rows; r++) {
        double *sides = a->sides + r * XD_MFT_SIDES;
        const int64_t label = xd_id_at(a->labels, r) - a->vocab.begin;
        const bool mine = xdi_mft_counts(a, r) && label >= 0 && label < a->vocab.end - a->vocab.begin;
        sides[XD_MFT_STUDENT] = mine ? xdi_loss_load(&a->student, r, label) : 0.0;
        sides[XD_MFT_TEACHER] = mine ? xdi_loss_load(&a->teacher, r, label) : 0.0;
    }
    return XD_OK;
}

static void xdi_mft_correct_row(const xd_mft_args *a, int64_t r) {
    xd_loss_row *row = a->row + r;
    double x = 0.0, y = 0.0;
    xd_mft_change_sides(row);
    if (row->finding != (int)XD_ROW_FINE) return;
    for (int i = 0; i < a->vocab.shards; i++) {
        x += xdi_mft_side(a, i, r, XD_MFT_STUDENT);
        y += xdi_mft_side(a, i, r, XD_MFT_TEACHER);
    }
    xd_mft_correct(a, r, x, y, row->argmax == (double)xd_id_at(a->labels, r), row);
}

static xd_result xdi_cpu_mft_correct(const xd_launch *launch, const xd_mft_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->student.rows; r++)
        if (xdi_mft_counts(a, r)) xdi_mft_correct_row(a, r);
    return XD_OK;
}

XD_PRIVATE void xdi_mft_write_at(const xd_mft_args *a, int64_t r, int64_t c, double x, double y) {
    double term, gradient;
    xd_mft_column(a, r, x, y, c + a->vocab.begin == xd_id_at(a->labels, r), &term, &gradient);
    if (a->terms.data) xdi_loss_store(&a->terms, r, c, term);
    if (a->gradient.data) xdi_loss_store(&a->gradient, r, c, gradient);
}

XD_PRIVATE void xdi_mft_write_row(const xd_mft_args *a, int64_t r, int64_t columns) {
    for (int64_t c = 0; c < columns; c++)
        xdi_mft_write_at(a, r, c, xdi_loss_load(&a->student, r, c), xdi_loss_load(&a->teacher, r, c));
}

static void xdi_cpu_mft_write_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                   int slot) {
    const xd_mft_args *a = (const xd_mft_args *)args;
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++) xdi_mft_write_row(a, r, xdi_mft_begin_row(a, r));
}

static xd_result xdi_cpu_mft_write(const xd_launch *launch, const xd_mft_args *a) {
    return xdi_spread_rows(launch, a->student.rows, a->vocab.end - a->vocab.begin, xdi_cpu_mft_write_rows, a);
}

/* ---- cosine ---- */

static double xdi_cosine_magnitude(const xd_rows *x, int64_t r, int64_t columns) {
    double largest = 0.0;
    for (int64_t c = 0; c < columns; c++) {
        const double value = fabs(xdi_loss_load(x, r, c));
        if (!(value <= largest)) largest = isnan(value) ? (double)INFINITY : value;
    }
    return largest;
}

static void xdi_cpu_mft_largest_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                     int slot) {
    const xd_mft_args *a = (const xd_mft_args *)args;
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++) {
        double *sides = a->sides + r * XD_MFT_SIDES;
        const int64_t columns = xdi_mft_counts(a, r) ? a->vocab.end - a->vocab.begin : 0;
        sides[XD_MFT_STUDENT] = xdi_cosine_magnitude(&a->student, r, columns);
        sides[XD_MFT_TEACHER] = xdi_cosine_magnitude(&a->teacher, r, columns);
    }
}

static xd_result xdi_cpu_mft_largest(const xd_launch *launch, const xd_mft_args *a) {
    return xdi_spread_rows(launch, a->student.rows, a->vocab.end - a->vocab.begin, xdi_cpu_mft_largest_rows,
                           a);
}

/* The power of two above the largest magnitude of a side, 0 where sums are not fixed; false when it is not finite. */
static bool xdi_cosine_exponent(const xd_mft_args *a, int64_t r, int side, int *exponent) {
    double largest = 0.0;
    for (int i = 0; a->fixed && i < a->vocab.shards; i++)
        largest = fmax(largest, xdi_mft_side(a, i, r, side));
    return xd_cosine_exponent(largest, exponent);
}

static void xdi_cosine_products_row(const void *state, const xd_mft_args *a, int64_t r, double x_scale,
                                    double y_scale, xdi_cosine_sums *sums) {
    (void)state;
    for (int64_t c = 0; c < a->vocab.end - a->vocab.begin; c++) {
        const double x = xdi_loss_load(&a->student, r, c) * x_scale;
        const double y = xdi_loss_load(&a->teacher, r, c) * y_scale;
        const double term[XD_COSINE_SUMS] = { x * x, y * y, x * y };
        for (int i = 0; i < XD_COSINE_SUMS; i++) {
            if (a->fixed)
                xdi_fixed_add(&sums->exact[i], term[i]);
            else
                sums->plain[i] += term[i];
        }
    }
}

/* The arguments of the entry and the sweep over a row's columns. */
typedef struct xdi_cosine_swept {
    const xd_mft_args *a;
    xdi_cosine_sweep sweep;
    const void *state;
} xdi_cosine_swept;

static void xdi_cosine_products_piece(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                      int slot) {
    const xdi_cosine_swept *s = (const xdi_cosine_swept *)args;
    const xd_mft_args *a = s->a;
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++) {
        int x_exponent, y_exponent;
        xdi_cosine_sums sums;
        memset(&sums, 0, sizeof sums);
        if (xdi_mft_counts(a, r) && xdi_cosine_exponent(a, r, XD_MFT_STUDENT, &x_exponent) &&
            xdi_cosine_exponent(a, r, XD_MFT_TEACHER, &y_exponent))
            s->sweep(s->state, a, r, ldexp(1.0, -x_exponent), ldexp(1.0, -y_exponent), &sums);
        if (a->fixed)
            memcpy((xd_fixed *)a->sums + r * XD_COSINE_SUMS, sums.exact, sizeof sums.exact);
        else
            memcpy((double *)a->sums + r * XD_COSINE_SUMS, sums.plain, sizeof sums.plain);
    }
}

XD_PRIVATE xd_result xdi_cosine_products_rows(const xd_launch *launch, const xd_mft_args *a,
                                              xdi_cosine_sweep sweep, const void *state) {
    const xdi_cosine_swept s = { a, sweep, state };
    return xdi_spread_rows(launch, a->student.rows, a->vocab.end - a->vocab.begin, xdi_cosine_products_piece,
                           &s);
}

static xd_result xdi_cpu_mft_products(const xd_launch *launch, const xd_mft_args *a) {
    return xdi_cosine_products_rows(launch, a, xdi_cosine_products_row, NULL);
}

static double xdi_cosine_total(const xd_mft_args *a, int64_t r, int which) {
    double total = 0.0;
    xd_fixed exact = { 0, 0 };
    for (int i = 0; i < a->vocab.shards; i++) {
        const int64_t at = (i * a->student.rows + r) * XD_COSINE_SUMS + which;
        if (a->fixed) {
            exact.high += ((const xd_fixed *)a->all_sums)[at].high;
            exact.low += ((const xd_fixed *)a->all_sums)[at].low;
        } else {
            total += ((const double *)a->all_sums)[at];
        }
    }
    return a->fixed ? xdi_fixed_value(exact) : total;
}

static void xdi_cosine_row(const xd_mft_args *a, int64_t r) {
    int exponents[XD_MFT_SIDES];
    double sums[XD_COSINE_SUMS];
    const bool x_fits = xdi_cosine_exponent(a, r, XD_MFT_STUDENT, &exponents[XD_MFT_STUDENT]);
    const bool y_fits = xdi_cosine_exponent(a, r, XD_MFT_TEACHER, &exponents[XD_MFT_TEACHER]);
    for (int i = 0; i < XD_COSINE_SUMS; i++) sums[i] = xdi_cosine_total(a, r, i);
    xd_cosine_row(a, r, sums, exponents, x_fits && y_fits, a->row + r);
}

static xd_result xdi_cpu_mft_cosine(const xd_launch *launch, const xd_mft_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->student.rows; r++) {
        memset(a->row + r, 0, sizeof *a->row);
        if (xdi_mft_counts(a, r)) xdi_cosine_row(a, r);
    }
    return XD_OK;
}

/* Evaluated as written, so that it has the bits of the vectors. */
XDI_SIMD_AS_WRITTEN
static void xdi_cpu_mft_slopes_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                    int slot) {
    const xd_mft_args *a = (const xd_mft_args *)args;
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++) {
        const int64_t columns = xdi_mft_begin_row(a, r);
        double of_x, of_y;
        xd_cosine_slope(a, r, &of_x, &of_y);
        for (int64_t c = 0; c < columns; c++) {
            const double from_x = of_x * xdi_loss_load(&a->student, r, c);
            const double from_y = of_y * xdi_loss_load(&a->teacher, r, c);
            xdi_loss_store(&a->gradient, r, c, from_x + from_y);
        }
    }
}

static xd_result xdi_cpu_mft_slopes(const xd_launch *launch, const xd_mft_args *a) {
    return xdi_spread_rows(launch, a->student.rows, a->vocab.end - a->vocab.begin, xdi_cpu_mft_slopes_rows,
                           a);
}

XD_PRIVATE const xd_mft_kernels *xdi_mft_kernels_cpu(void) {
    static const xd_mft_kernels kernels = {
        xdi_cpu_mft_at_label, xdi_cpu_mft_correct, xdi_cpu_mft_write,  xdi_cpu_mft_largest,
        xdi_cpu_mft_products, xdi_cpu_mft_cosine,  xdi_cpu_mft_slopes,
    };
    return &kernels;
}
