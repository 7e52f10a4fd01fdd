/* Rows of a batch: which count, their labels, records of losses, maxima of columns. */

#include "kernel/cpu/internal.h"
#include "kernel/ids.h"
#include "kernel/loss_scalar.h"

#include <math.h>
#include <string.h>

/* ---- denominators ---- */

static bool xdi_rows_count(const xd_positions *p, int64_t i) {
    if (p->mask && !p->mask[i]) return false;
    return !p->labels.data ||
           xd_id_at(p->labels, i) != (p->has_ignore_index ? p->ignore_index : XD_IGNORE_INDEX);
}

static xd_result xdi_cpu_rows_count(const xd_launch *launch, const xd_positions *p, int64_t *part) {
    xd_fixed weight = { part[XD_COUNT_HIGH], part[XD_COUNT_LOW] };
    (void)launch;
    if (p->count < 0) part[XD_COUNT_REFUSED]++;
    for (int64_t i = 0; i < p->count; i++) {
        if (!xdi_rows_count(p, i)) continue;
        part[XD_COUNT_POSITIONS]++;
        if (!p->weights)
            weight.high += (int64_t)1 << 30;
        else if (!(p->weights[i] >= 0.0f) || !xdi_fixed_add(&weight, (double)p->weights[i]))
            part[XD_COUNT_REFUSED]++;
    }
    part[XD_COUNT_HIGH] = weight.high;
    part[XD_COUNT_LOW] = weight.low;
    return XD_OK;
}

static xd_result xdi_cpu_rows_denominator(const xd_launch *launch, const int64_t *part, xd_denominator *out) {
    const xd_fixed weight = { part[XD_COUNT_HIGH], part[XD_COUNT_LOW] };
    xd_denominator d;
    (void)launch;
    d.refused = part[XD_COUNT_REFUSED];
    d.positions = part[XD_COUNT_POSITIONS];
    d.value = d.refused == 0 ? xdi_fixed_value(weight) : 0.0;
    d.inverse = d.value > 0.0 ? 1.0 / d.value : 0.0;
    *out = d;
    return XD_OK;
}

static xd_result xdi_cpu_rows_ratio(const xd_launch *launch, const xd_denominator *hit,
                                    const xd_denominator *counted, double *out) {
    (void)launch;
    *out = counted->refused ? (double)NAN : counted->value > 0.0 ? hit->value / counted->value : 0.0;
    return XD_OK;
}

/* ---- reduction of row losses ---- */

static double xdi_rows_weight(const xd_row_args *a, int64_t row) {
    return a->positions.weights ? (double)a->positions.weights[row] : 1.0;
}

static xd_result xdi_cpu_rows_scales(const xd_launch *launch, const xd_row_args *a) {
    const double inverse = a->denominator               ? a->denominator->inverse
                           : a->denominator_value > 0.0 ? 1.0 / a->denominator_value
                                                        : 0.0;
    (void)launch;
    *a->factor = (a->scale ? *a->scale : 1.0) * inverse;
    for (int64_t r = 0; r < a->positions.count; r++) {
        const double scale = xdi_rows_weight(a, r) * *a->factor;
        a->row_scale[r] = xdi_rows_count(&a->positions, r) && isfinite(scale) ? scale : 0.0;
    }
    return XD_OK;
}

/* The values of a row that the reduction uses. */
typedef struct xdi_rows_value {
    double hard, soft;
    int finding;  /* xd_row_finding */
    double value; /* for the status */
} xdi_rows_value;

static xdi_rows_value xdi_rows_read(const xd_row_args *a, int64_t r) {
    xdi_rows_value v;
    if (a->topk_rows) {
        v.hard = 0.0;
        v.soft = a->topk_rows[r].loss;
        v.finding = a->topk_rows[r].finding;
        v.value = a->topk_rows[r].max;
    } else {
        v.hard = a->loss_rows[r].hard;
        v.soft = a->loss_rows[r].soft;
        v.finding = a->loss_rows[r].finding;
        v.value = a->loss_rows[r].max;
        if (v.finding == (int)XD_ROW_LABEL) v.value = (double)xd_id_at(a->positions.labels, r);
        if (v.finding == (int)XD_ROW_NOT_FINITE)
            v.value = xd_row_reason(v.value, a->loss_rows[r].teacher_max);
    }
    return v;
}

static void xdi_rows_note_finding(int64_t *record, int64_t row, int finding, double value) {
    const int which = finding == (int)XD_ROW_LABEL      ? XD_RECORD_LABEL
                      : finding == (int)XD_ROW_OVERFLOW ? XD_RECORD_OVERFLOW
                                                        : XD_RECORD_NOT_FINITE;
    if (record[XD_RECORD_LABEL] + record[XD_RECORD_NOT_FINITE] + record[XD_RECORD_OVERFLOW] == 0) {
        record[XD_RECORD_FIRST_ROW] = row;
        memcpy(record + XD_RECORD_FIRST_VALUE, &value, sizeof value);
    }
    record[which]++;
}

/* Writes the values of a row that the caller requested. */
static void xdi_rows_show(const xd_row_args *a, int64_t r) {
    if (a->row_loss) {
        const xdi_rows_value v = xdi_rows_read(a, r);
        a->row_loss[r] = (float)xd_loss_of_row(a->hard_weight, v.hard, a->soft_weight, v.soft);
    }
    if (a->student_mass) a->student_mass[r] = (float)a->topk_rows[r].student_mass;
    if (a->teacher_mass) a->teacher_mass[r] = (float)a->topk_rows[r].teacher_mass;
}

/* Weighted sums over this rank's rows, the findings, the number of rows that count. */
static xd_result xdi_cpu_rows_sum(const xd_launch *launch, const xd_row_args *a) {
    double hard = 0.0, soft = 0.0;
    xd_total fixed_hard, fixed_soft;
    (void)launch;
    memset(a->record, 0, XD_RECORD_WORDS * sizeof *a->record);
    memset(&fixed_hard, 0, sizeof fixed_hard);
    memset(&fixed_soft, 0, sizeof fixed_soft);
    for (int64_t r = 0; r < a->positions.count; r++) {
        const double weight = xdi_rows_weight(a, r), scale = weight * *a->factor;
        xdi_rows_show(a, r);
        if (!xdi_rows_count(&a->positions, r)) continue;
        a->record[XD_RECORD_COUNTED]++;
        if (!isfinite(scale)) xdi_rows_note_finding(a->record, r, (int)XD_ROW_NOT_FINITE, scale);
        if (a->row_scale[r] == 0.0) continue;
        const xdi_rows_value v = xdi_rows_read(a, r);
        if (v.finding != (int)XD_ROW_FINE) {
            xdi_rows_note_finding(a->record, r, v.finding, v.value);
            continue;
        }
        hard += weight * v.hard;
        soft += weight * v.soft;
        if (!a->fixed) continue;
        xd_total with_hard = fixed_hard, with_soft = fixed_soft;
        if (xd_total_put(&with_hard, weight * v.hard) && xd_total_put(&with_soft, weight * v.soft)) {
            fixed_hard = with_hard;
            fixed_soft = with_soft;
        } else { /* neither: the row is a finding */
            xdi_rows_note_finding(a->record, r, (int)XD_ROW_OVERFLOW, v.value);
        }
    }
    memcpy(a->record + XD_RECORD_HARD, a->fixed ? (void *)&fixed_hard.rest : (void *)&hard,
           a->fixed ? sizeof fixed_hard.rest : sizeof hard);
    memcpy(a->record + XD_RECORD_SOFT, a->fixed ? (void *)&fixed_soft.rest : (void *)&soft,
           a->fixed ? sizeof fixed_soft.rest : sizeof soft);
    a->record[XD_RECORD_HARD_EIGHTS] = fixed_hard.eights;
    a->record[XD_RECORD_SOFT_EIGHTS] = fixed_soft.eights;
    return XD_OK;
}

/* Sum of one loss over the ranks' records, in rank order or as limbs. */
static double xdi_rows_total(const xd_row_args *a, int which, int eights) {
    double sum = 0.0, part;
    xd_total fixed;
    memset(&fixed, 0, sizeof fixed);
    for (int i = 0; i < a->ranks; i++) {
        const int64_t *word = a->records + i * XD_RECORD_WORDS + which;
        if (a->fixed) {
            fixed.rest.high += word[0];
            fixed.rest.low += word[1];
            fixed.eights += word[eights - which];
        } else {
            memcpy(&part, word, sizeof part);
            sum += part;
        }
    }
    return a->fixed ? xd_total_read(fixed) : sum;
}

static int64_t xdi_rows_total_count(const xd_row_args *a, int which) {
    int64_t sum = 0;
    for (int i = 0; i < a->ranks; i++) sum += a->records[i * XD_RECORD_WORDS + which];
    return sum;
}

/* Adds the findings of all ranks; the first one is that of the lowest rank. */
static void xdi_rows_status(const xd_row_args *a, bool nothing, xd_status *status) {
    const bool clean = status->label_out_of_range + status->not_finite + status->overflow == 0;
    for (int i = 0; i < a->ranks && clean; i++) {
        const int64_t *part = a->records + i * XD_RECORD_WORDS;
        if (part[XD_RECORD_LABEL] + part[XD_RECORD_NOT_FINITE] + part[XD_RECORD_OVERFLOW] == 0) continue;
        status->first_row = part[XD_RECORD_FIRST_ROW];
        memcpy(&status->first_value, part + XD_RECORD_FIRST_VALUE, sizeof status->first_value);
        break;
    }
    status->label_out_of_range += xdi_rows_total_count(a, XD_RECORD_LABEL);
    status->not_finite += xdi_rows_total_count(a, XD_RECORD_NOT_FINITE);
    status->overflow += xdi_rows_total_count(a, XD_RECORD_OVERFLOW);
    if (nothing) status->nothing_counted++;
}

static xd_result xdi_cpu_rows_finish(const xd_launch *launch, const xd_row_args *a) {
    const double factor = isfinite(*a->factor) ? *a->factor : 0.0; /* else every row is a finding */
    xd_loss_values *out = a->values;
    out->hard = xdi_rows_total(a, XD_RECORD_HARD, XD_RECORD_HARD_EIGHTS) * factor;
    out->soft = xdi_rows_total(a, XD_RECORD_SOFT, XD_RECORD_SOFT_EIGHTS) * factor;
    out->loss = a->hard_weight * out->hard + a->soft_weight * out->soft;
    out->counted = xdi_rows_total_count(a, XD_RECORD_COUNTED);
    xdi_rows_status(a, a->denominator && a->denominator->inverse == 0.0, launch->status);
    return XD_OK;
}

/* ---- columns ---- */

enum { XDI_VOTERS_BLOCK = 64 };

/* The bits of a bf16 are those of the f32's upper half. A block at a time, because compilers make vectors of a loop whose
 * length they know. */
static bool xdi_rows_block_votes(const uint32_t *bits) {
    uint32_t bad = 0;
    for (int i = 0; i < XDI_VOTERS_BLOCK; i++)
        bad |= (uint32_t)((bits[i] & 0x7fffffffu) > 0x7f800000u) | (uint32_t)(bits[i] == 0x7f800000u);
    return bad == 0;
}

static bool xdi_rows_votes(const xd_rows *x, int64_t r, int64_t columns) {
    const int64_t at = r * (x->stride ? x->stride : x->cols);
    for (int64_t c = 0; c < columns; c += XDI_VOTERS_BLOCK) {
        const int64_t block = XDI_VOTERS_BLOCK, count = columns - c < block ? columns - c : block;
        uint32_t bits[XDI_VOTERS_BLOCK] = { 0 };
        if (x->dtype == XD_DTYPE_F32)
            memcpy(bits, (const float *)x->data + at + c, (size_t)count * sizeof(float));
        else if (x->dtype == XD_DTYPE_BF16)
            for (int64_t i = 0; i < count; i++)
                bits[i] = (uint32_t)((const uint16_t *)x->data)[at + c + i] << 16;
        else
            for (int64_t i = 0; i < count; i++)
                bits[i] = xdi_loss_load(x, r, c + i) < (double)INFINITY ? 0 : 0x7f800000u;
        if (!xdi_rows_block_votes(bits)) return false;
    }
    return true;
}

typedef struct xdi_rows_voters {
    const xd_rows *logits;
    const uint8_t *mask;
    int64_t columns;
    uint8_t *voters;
} xdi_rows_voters;

static void xdi_cpu_rows_voters_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                     int slot) {
    const xdi_rows_voters *v = (const xdi_rows_voters *)args;
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++)
        v->voters[r] = (uint8_t)((!v->mask || v->mask[r]) && xdi_rows_votes(v->logits, r, v->columns));
}

static xd_result xdi_cpu_rows_voters(const xd_launch *launch, const xd_rows *logits, const uint8_t *mask,
                                     int64_t columns, uint8_t *voters) {
    const xdi_rows_voters v = { logits, mask, columns, voters };
    return xdi_spread_rows(launch, logits->rows, columns, xdi_cpu_rows_voters_rows, &v);
}

static xd_result xdi_cpu_rows_column_maxima(const xd_launch *launch, const xd_rows *logits,
                                            const uint8_t *mask, int64_t columns, float *maxima) {
    (void)launch;
    for (int64_t c = 0; c < columns; c++) maxima[c] = -INFINITY;
    for (int64_t r = 0; r < logits->rows; r++)
        for (int64_t c = 0; c < columns && (!mask || mask[r]); c++) {
            const float value = (float)xdi_loss_load(logits, r, c);
            if (value > maxima[c]) maxima[c] = value;
        }
    return XD_OK;
}

static xd_result xdi_cpu_rows_sort_ids(const xd_launch *launch, int64_t *ids, int64_t count) {
    (void)launch;
    for (int64_t gap = count / 2; gap > 0; gap /= 2)
        for (int64_t i = gap; i < count; i++) {
            const int64_t id = ids[i];
            int64_t at = i;
            for (; at >= gap && ids[at - gap] > id; at -= gap) ids[at] = ids[at - gap];
            ids[at] = id;
        }
    return XD_OK;
}

/* ---- rows that are kept ---- */

static bool xdi_rows_are_finite(const xd_rows *x, int64_t r) {
    for (int64_t c = 0; c < x->cols; c++)
        if (!isfinite(xdi_loss_load(x, r, c))) return false;
    return true;
}

static unsigned char *xdi_rows_start(const xd_rows *x, int64_t r) {
    return (unsigned char *)x->data +
           (size_t)(r * (x->stride ? x->stride : x->cols)) * xd_dtype_size(x->dtype);
}

static xd_result xdi_cpu_rows_keep(const xd_launch *launch, const xd_kept_rows *a) {
    const size_t bytes = (size_t)a->from.cols * xd_dtype_size(a->from.dtype);
    (void)launch;
    for (int64_t r = 0; r < a->from.rows; r++) {
        unsigned char *to = xdi_rows_start(&a->to, r);
        const unsigned char *from = xdi_rows_start(&a->from, r);
        bool kept = a->row_scale[r] != 0.0 && a->row[r].finding == (int)XD_ROW_FINE;
        if (kept && a->judge && !xdi_rows_are_finite(&a->from, r)) {
            xd_loss_reject(&a->row[r]);
            kept = false;
        }
        if (!kept)
            memset(to, 0, bytes);
        else if (to != from)
            memcpy(to, from, bytes);
    }
    return XD_OK;
}

XD_PRIVATE const xd_row_kernels *xdi_row_kernels_cpu(void) {
    static const xd_row_kernels kernels = {
        xdi_cpu_rows_count,
        xdi_cpu_rows_denominator,
        xdi_cpu_rows_ratio,
        xdi_cpu_rows_scales,
        xdi_cpu_rows_sum,
        xdi_cpu_rows_finish,
        xdi_cpu_rows_column_maxima,
        xdi_cpu_rows_sort_ids,
        xdi_cpu_rows_keep,
        xdi_cpu_rows_voters,
        NULL,
    };
    return &kernels;
}
