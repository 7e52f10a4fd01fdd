/* Universal logit distillation and the JSD of probabilities: plain loops, double inside. */

#include "kernel/cpu/uld.h"
#include "kernel/uld_scalar.h"

#include <math.h>
#include <string.h>

static double xdi_cpu_uld_probability(const xd_uld_rows *side, int64_t row, int64_t id) {
    const double *part = side->parts + row * XD_SOFTMAX_PARTS;
    return exp((xdi_loss_load(&side->logits, row, id) - part[XD_SOFTMAX_MAX]) / side->temperature) /
           part[XD_SOFTMAX_SUM];
}

/* ---- merge ---- */

static void xdi_cpu_uld_merge_side(const xd_uld_rows *side, int which, xd_uld_chunk *chunk) {
    double factor = 1.0;
    for (int64_t row = chunk->begin[which]; row < chunk->end[which]; row++) {
        const double *part = side->parts + row * XD_SOFTMAX_PARTS;
        if (!isfinite(part[XD_SOFTMAX_MAX])) {
            chunk->finite = false;
            return;
        }
        if (row == chunk->base[which]) continue;
        const double p = xdi_cpu_uld_probability(side, row, side->ids[row]);
        side->scores[row] = p;
        factor *= xd_uld_floored(p);
    }
    chunk->factor[which] = factor;
}

static void xdi_cpu_uld_merge_chunks(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                     int slot) {
    const xd_uld_args *a = (const xd_uld_args *)args;
    (void)launch, (void)slot;
    for (int64_t i = begin; i < end; i++) {
        a->chunks[i].finite = true;
        for (int which = 0; which < XD_ULD_SIDES; which++)
            xdi_cpu_uld_merge_side(&a->side[which], which, &a->chunks[i]);
    }
}

static xd_result xdi_cpu_uld_merge(const xd_launch *launch, const xd_uld_args *a) {
    return xdi_spread_rows(launch, a->count, 1, xdi_cpu_uld_merge_chunks, a);
}

/* ---- sort ---- */

/* Digits of the keys: the passes of a radix sort. */
enum { XDI_ULD_DIGITS = 3, XDI_ULD_WIDTH = 11, XDI_ULD_BINS = 1 << XDI_ULD_WIDTH };

static uint64_t xdi_uld_digit(uint64_t record, int digit) {
    return record >> (32 + XDI_ULD_WIDTH * digit) & (XDI_ULD_BINS - 1);
}

/* The records of a row, and where those of each digit will begin. */
static void xdi_uld_records(const xd_uld_rows *side, int64_t row, uint64_t *records,
                            uint32_t bins[][XDI_ULD_BINS]) {
    memset(bins, 0, XDI_ULD_DIGITS * sizeof *bins);
    for (int64_t i = 0; i < side->count; i++) {
        const int64_t id = side->list ? side->list[i] : i;
        const uint32_t key = xd_key_of_float((float)xdi_loss_load(&side->logits, row, id));
        records[i] = (uint64_t)key << 32 | (uint64_t)id;
        for (int digit = 0; digit < XDI_ULD_DIGITS; digit++) bins[digit][xdi_uld_digit(records[i], digit)]++;
    }
    for (int digit = 0; digit < XDI_ULD_DIGITS; digit++) {
        uint32_t before = 0;
        for (int bin = 0; bin < XDI_ULD_BINS; bin++) {
            const uint32_t here = bins[digit][bin];
            bins[digit][bin] = before;
            before += here;
        }
    }
}

/* The sort is stable, so that equal keys stay ordered by id. The number of passes is odd: from `spare` to
 * `sorted`. */
static void xdi_uld_sort_list(const xd_uld_rows *side, int64_t row, uint64_t *sorted, uint64_t *spare) {
    uint32_t bins[XDI_ULD_DIGITS][XDI_ULD_BINS];
    uint64_t *from = spare, *to = sorted;
    xdi_uld_records(side, row, spare, bins);
    for (int digit = 0; digit < XDI_ULD_DIGITS; digit++) {
        for (int64_t i = 0; i < side->count; i++) to[bins[digit][xdi_uld_digit(from[i], digit)]++] = from[i];
        uint64_t *next = from;
        from = to;
        to = next;
    }
}

/* Sides of chunks, one after the other. */
static void xdi_cpu_uld_sort_sides(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                   int slot) {
    const xd_uld_args *a = (const xd_uld_args *)args;
    (void)launch, (void)slot;
    for (int64_t at = begin; at < end; at++) {
        const int64_t i = at / XD_ULD_SIDES;
        const int which = (int)(at % XD_ULD_SIDES);
        const xd_uld_rows *side = &a->side[which];
        if (a->chunks[i].finite)
            xdi_uld_sort_list(side, a->chunks[i].base[which], side->sorted + i * side->count,
                              side->spare + i * side->count);
    }
}

static xd_result xdi_cpu_uld_sort(const xd_launch *launch, const xd_uld_args *a) {
    return xdi_spread_items(launch, a->count * XD_ULD_SIDES, 1, xdi_cpu_uld_sort_sides, a);
}

/* ---- compare ---- */

/* The probability of a record's logit in the base row, times the factor. */
static double xdi_cpu_uld_value(const xd_uld_args *a, int which, const xd_uld_chunk *chunk, uint64_t record) {
    const xd_uld_rows *side = &a->side[which];
    const double *part = side->parts + chunk->base[which] * XD_SOFTMAX_PARTS;
    const double logit = (double)xd_float_of_key((uint32_t)(record >> 32));
    return chunk->factor[which] * exp((logit - part[XD_SOFTMAX_MAX]) / side->temperature) /
           part[XD_SOFTMAX_SUM];
}

/* Sums over the sorted ids that are not matched; mean is that of the signs, weighted by the student's merged values. */
static void xdi_cpu_uld_unmatched(const xd_uld_args *a, int64_t i, float *slope, double *mean) {
    const xd_uld_rows *student = &a->side[XD_ULD_STUDENT], *teacher = &a->side[XD_ULD_TEACHER];
    const uint64_t *x = student->sorted + i * student->count, *y = teacher->sorted + i * teacher->count;
    const int64_t n = student->count, m = teacher->count;
    xd_uld_chunk *chunk = &a->chunks[i];
    for (int64_t r = 0; n > 0 && m > 0 && (r < n || r < m); r++) {
        const double u = r < n ? xdi_cpu_uld_value(a, XD_ULD_STUDENT, chunk, x[r]) : 0.0;
        const double v = r < m ? xdi_cpu_uld_value(a, XD_ULD_TEACHER, chunk, y[r]) : 0.0;
        const double d = xd_uld_sign(a->unmatched_weight, u, v);
        chunk->unmatched += fabs(u - v);
        if (r >= n || !slope) continue;
        slope[(uint32_t)x[r]] = (float)d;
        *mean += d * u;
    }
}

static void xdi_cpu_uld_matched(const xd_uld_args *a, xd_uld_chunk *chunk, float *slope, double *mean) {
    for (int64_t i = 0; i < a->matched_count; i++) {
        const int64_t s = a->matched[XD_ULD_STUDENT][i], t = a->matched[XD_ULD_TEACHER][i];
        const double u = chunk->factor[XD_ULD_STUDENT] *
                         xdi_cpu_uld_probability(&a->side[XD_ULD_STUDENT], chunk->base[XD_ULD_STUDENT], s);
        const double v = chunk->factor[XD_ULD_TEACHER] *
                         xdi_cpu_uld_probability(&a->side[XD_ULD_TEACHER], chunk->base[XD_ULD_TEACHER], t);
        double d;
        chunk->matched += xd_jsd_entry(u, v, a->beta, &d);
        if (!slope) continue;
        slope[s] = (float)(a->matched_weight * d);
        *mean += a->matched_weight * d * u;
    }
}

XD_PRIVATE void xdi_uld_compare_chunk(const xd_uld_args *a, int64_t i) {
    const int64_t columns = a->side[XD_ULD_STUDENT].columns;
    xd_uld_chunk *chunk = &a->chunks[i];
    float *slope = a->slope ? a->slope + i * columns : NULL;
    double mean = 0.0;
    chunk->matched = chunk->unmatched = 0.0;
    if (slope) memset(slope, 0, (size_t)columns * sizeof *slope);
    xdi_cpu_uld_unmatched(a, i, slope, &mean);
    xdi_cpu_uld_matched(a, chunk, slope, &mean);
    chunk->mean = xd_uld_mean(mean, chunk->factor[XD_ULD_STUDENT]);
}

static void xdi_cpu_uld_compare_chunks(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                       int slot) {
    const xd_uld_args *a = (const xd_uld_args *)args;
    (void)launch, (void)slot;
    for (int64_t i = begin; i < end; i++)
        if (a->chunks[i].finite) xdi_uld_compare_chunk(a, i);
}

static xd_result xdi_cpu_uld_compare(const xd_launch *launch, const xd_uld_args *a) {
    return xdi_spread_items(launch, a->count, 1, xdi_cpu_uld_compare_chunks, a);
}

/* ---- gradient ---- */

/* The factors of a row of a chunk: the gradient is share p (d - mean) / temperature, where d is the slope in the base
 * row; in the other rows it is 1 at the row's token and 0 elsewhere. */
XD_PRIVATE xdi_uld_scale xdi_uld_row_scale(const xd_uld_args *a, const xd_uld_chunk *chunk, int64_t row) {
    const double factor = chunk->factor[XD_ULD_STUDENT],
                 share = a->share / a->side[XD_ULD_STUDENT].temperature;
    xdi_uld_scale s;
    if (row == chunk->base[XD_ULD_STUDENT]) {
        s.scale = share * factor;
        s.mean = chunk->mean;
        s.only = -1;
    } else {
        s.mean = a->side[XD_ULD_STUDENT].scores[row];
        s.scale = s.mean > XD_ULD_FLOOR ? share * factor * chunk->mean / s.mean : 0.0;
        s.only = a->side[XD_ULD_STUDENT].ids[row];
    }
    return s;
}

XD_PRIVATE void xdi_uld_gradient_row(const xd_uld_args *a, int64_t row) {
    const int64_t i = a->owner[row] - a->first, columns = a->side[XD_ULD_STUDENT].columns;
    const float *slope = a->slope + i * columns;
    const xdi_uld_scale s = xdi_uld_row_scale(a, &a->chunks[i], row);
    for (int64_t c = 0; c < columns; c++) {
        const double d = s.only < 0 ? (double)slope[c] : (double)(c == s.only);
        const double p = xdi_cpu_uld_probability(&a->side[XD_ULD_STUDENT], row, c);
        xdi_loss_store(&a->gradient, row, c, s.scale * p * (d - s.mean));
    }
}

/* Zeros from a column on. */
static void xdi_uld_clear(const xd_rows *gradient, int64_t row, int64_t begin) {
    const int64_t at = row * (gradient->stride ? gradient->stride : gradient->cols) + begin;
    const size_t size = xd_dtype_size(gradient->dtype);
    memset((unsigned char *)gradient->data + (size_t)at * size, 0, (size_t)(gradient->cols - begin) * size);
}

/* The entry's arguments, and what writes its rows. */
typedef struct xdi_uld_writing {
    const xd_uld_args *args;
    xdi_uld_row_writer write;
} xdi_uld_writing;

static void xdi_uld_gradient_pieces(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                    int slot) {
    const xdi_uld_writing *w = (const xdi_uld_writing *)args;
    const xd_uld_args *a = w->args;
    (void)slot;
    for (int64_t row = a->row + begin; row < a->row + end; row++) {
        const bool owned = a->owner[row] >= 0 && a->chunks[a->owner[row] - a->first].finite;
        if (owned) w->write(launch, a, row);
        xdi_uld_clear(&a->gradient, row, owned ? a->side[XD_ULD_STUDENT].columns : 0);
    }
}

XD_PRIVATE xd_result xdi_uld_gradient_rows(const xd_launch *launch, const xd_uld_args *a,
                                           xdi_uld_row_writer writer) {
    const xdi_uld_writing w = { a, writer };
    return xdi_spread_rows(launch, a->rows, a->gradient.cols, xdi_uld_gradient_pieces, &w);
}

static void xdi_cpu_uld_write_row(const xd_launch *launch, const xd_uld_args *a, int64_t row) {
    (void)launch;
    xdi_uld_gradient_row(a, row);
}

static xd_result xdi_cpu_uld_gradient(const xd_launch *launch, const xd_uld_args *a) {
    return xdi_uld_gradient_rows(launch, a, xdi_cpu_uld_write_row);
}

/* ---- probabilities ---- */

static xd_result xdi_cpu_jsd(const xd_launch *launch, const xd_jsd_args *a) {
    double sum = 0.0;
    (void)launch;
    for (int64_t r = 0; r < a->student.rows; r++)
        for (int64_t c = 0; c < a->student.cols; c++) {
            double slope;
            sum += xd_jsd_entry(xdi_loss_load(&a->student, r, c), xdi_loss_load(&a->teacher, r, c), a->beta,
                                &slope);
            if (a->gradient.data) xdi_loss_store(&a->gradient, r, c, slope / a->denominator);
        }
    a->out->value = sum;
    a->out->bad = -1;
    return XD_OK;
}

XD_PRIVATE const xd_uld_kernels *xdi_uld_kernels_plain(void) {
    static const xd_uld_kernels kernels = {
        xdi_cpu_uld_merge, xdi_cpu_uld_sort, xdi_cpu_uld_compare, xdi_cpu_uld_gradient, xdi_cpu_jsd,
    };
    return &kernels;
}
