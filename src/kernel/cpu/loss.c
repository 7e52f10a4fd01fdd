/* Plain loops, double inside; kernel/loss.h has the formulas. Logits are read once per entry and element. */

#include "kernel/cpu/exact.h"
#include "kernel/cpu/internal.h"
#include "kernel/ids.h"
#include "kernel/loss_scalar.h"

#include <math.h>
#include <string.h>

XD_PRIVATE double xdi_loss_row_max(const xd_rows *x, int64_t row, int64_t columns, int64_t *column) {
    double max = -INFINITY;
    bool finite = true;
    *column = -1;
    for (int64_t c = 0; c < columns; c++) {
        const double value = xdi_loss_load(x, row, c);
        if (!(value < INFINITY)) finite = false;
        if (value > max || *column < 0) {
            max = value;
            *column = c;
        }
    }
    return finite ? max : NAN;
}

static void xdi_cpu_loss_references_rows(const xd_launch *launch, const void *args, int64_t begin,
                                         int64_t end, int slot) {
    const xd_loss_args *a = (const xd_loss_args *)args;
    const int64_t columns = xdi_loss_columns(a);
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++) {
        double *ref = a->references + r * XD_LOSS_REFERENCES;
        int64_t arg, teacher_arg;
        if (a->row_scale[r] == 0.0) {
            for (int i = 0; i < XD_LOSS_REFERENCES; i++) ref[i] = 0.0;
            continue;
        }
        ref[XD_LOSS_MAX] = xdi_loss_row_max(&a->student, r, columns, &arg);
        ref[XD_LOSS_ARG] = arg < 0 ? -1.0 : (double)(arg + a->vocab.begin);
        ref[XD_LOSS_TEACHER_AT_ARG] = 0.0;
        ref[XD_LOSS_TEACHER_MAX] = 0.0;
        if (!xdi_loss_has_soft(a)) continue;
        ref[XD_LOSS_TEACHER_AT_ARG] = arg < 0 ? -INFINITY : xdi_loss_load(&a->teacher, r, arg);
        ref[XD_LOSS_TEACHER_MAX] = xdi_loss_row_max(&a->teacher, r, columns, &teacher_arg);
    }
}

static xd_result xdi_cpu_loss_references(const xd_launch *launch, const xd_loss_args *a) {
    return xdi_spread_rows(launch, a->student.rows, xdi_loss_columns(a), xdi_cpu_loss_references_rows, a);
}

/* References of the whole row from those of all shards. */
static void xdi_loss_whole_reference(const xd_loss_args *a, int64_t r, double *ref) {
    xd_loss_no_reference(ref);
    for (int i = 0; i < a->vocab.shards; i++)
        xd_loss_join_reference(ref, a->all_references + i * a->reference_stride + r * XD_LOSS_REFERENCES);
}

static xd_result xdi_cpu_loss_merge_references(const xd_launch *launch, const xd_loss_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->student.rows; r++) {
        double ref[XD_LOSS_REFERENCES]; /* one shard reads and writes the same memory */
        xdi_loss_whole_reference(a, r, ref);
        memcpy(a->references + r * XD_LOSS_REFERENCES, ref, sizeof ref);
    }
    return XD_OK;
}

/* Terms of sums in fixed point have the same bits with every math library. */
static inline double xdi_loss_exp(bool fixed, double x) {
    return fixed ? xdi_exact_exp(x) : exp(x);
}

static inline void xdi_loss_add(xdi_loss_sums *sums, int which, double term) {
    if (!sums->fixed)
        sums->plain[which] += term;
    else if (!xdi_fixed_add(&sums->exact[which], term)) {
        if (isfinite(term))
            sums->exact[XD_LOSS_BAD].low++;
        else
            sums->exact[XD_LOSS_BAD].high++;
    }
}

/* The term of CROSS at one column; 0 where the probability that weights it is 0, which avoids 0 * infinity. */
static inline double xdi_loss_cross(const xd_loss_args *a, double e_s, double e_t, double z, double u,
                                    double at_arg) {
    switch (a->divergence) {
    case XD_KL_FORWARD: return e_t > 0.0 ? e_t * (u - z) : 0.0;
    case XD_SOFT_CE: return e_t > 0.0 ? e_t * z : 0.0;
    case XD_KL_REVERSE: return e_s > 0.0 ? e_s * (z - at_arg) : 0.0;
    default: return 0.0; /* JSD: needs the normalisers, see mixture */
    }
}

/* Without fusing: the vectors of simd/exact.c leave columns to this function and the next one, and the terms must have the
 * same bits. */
XDI_SIMD_AS_WRITTEN
XD_PRIVATE void xdi_loss_stats_columns(const xd_loss_args *a, int64_t r, int64_t begin, int64_t end,
                                       const double *ref, xdi_loss_sums *sums) {
    const bool hard = xdi_loss_has_hard(a), soft = xdi_loss_has_soft(a);
    const double max = ref[XD_LOSS_MAX], teacher_max = ref[XD_LOSS_TEACHER_MAX];
    const double scale = 1.0 / a->temperature;
    for (int64_t c = begin; c < end; c++) {
        const double x = xdi_loss_minus(xdi_loss_load(&a->student, r, c), max);
        const double e = hard || a->temperature == 1.0 ? xdi_loss_exp(a->fixed, x) : 0.0;
        if (hard) xdi_loss_add(sums, XD_LOSS_HARD, e);
        if (hard && a->uniform_weight != 0.0) xdi_loss_add(sums, XD_LOSS_LINEAR, x);
        if (!soft) continue;
        const double y = xdi_loss_load(&a->teacher, r, c);
        const double z = x * scale, u = xdi_loss_minus(y, teacher_max) * scale;
        const double e_s = a->temperature == 1.0 ? e : xdi_loss_exp(a->fixed, z);
        const double e_t = xdi_loss_exp(a->fixed, u);
        xdi_loss_add(sums, XD_LOSS_SOFT, e_s);
        xdi_loss_add(sums, XD_LOSS_TEACHER, e_t);
        xdi_loss_add(sums, XD_LOSS_CROSS,
                     xdi_loss_cross(a, e_s, e_t, z, u, (y - ref[XD_LOSS_TEACHER_AT_ARG]) * scale));
    }
}

static void xdi_loss_stats_target(const xd_loss_args *a, int64_t r, const double *ref, xdi_loss_sums *sums) {
    const int64_t target = xdi_loss_has_hard(a) ? xd_id_at(a->labels, r) - a->vocab.begin : -1;
    if (target < 0 || target >= xdi_loss_columns(a)) return;
    xdi_loss_add(sums, XD_LOSS_TARGET,
                 xdi_loss_minus(xdi_loss_load(&a->student, r, target), ref[XD_LOSS_MAX]));
}

static void xdi_loss_stats_row(const void *state, const xd_loss_args *a, int64_t r, const double *ref,
                               xdi_loss_sums *sums) {
    (void)state;
    xdi_loss_stats_columns(a, r, 0, xdi_loss_columns(a), ref, sums);
}

/* The arguments of an entry and the sweep over a row's columns. */
typedef struct xdi_loss_swept {
    const xd_loss_args *a;
    xdi_loss_sweep sweep;
    const void *state;
} xdi_loss_swept;

static void xdi_loss_stats_piece(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                 int slot) {
    const xdi_loss_swept *s = (const xdi_loss_swept *)args;
    const xd_loss_args *a = s->a;
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++) {
        const double *ref = a->references + r * XD_LOSS_REFERENCES;
        xdi_loss_sums sums;
        memset(&sums, 0, sizeof sums);
        sums.fixed = a->fixed;
        if (isnan(ref[XD_LOSS_MAX]) || isnan(ref[XD_LOSS_TEACHER_MAX])) {
            sums.plain[XD_LOSS_BAD] = 1.0;
            sums.exact[XD_LOSS_BAD].high = 1;
        } else if (a->row_scale[r] != 0.0) {
            s->sweep(s->state, a, r, ref, &sums);
            xdi_loss_stats_target(a, r, ref, &sums);
        }
        if (a->fixed)
            memcpy((xd_fixed *)a->sums + r * XD_LOSS_SUMS, sums.exact, sizeof sums.exact);
        else
            memcpy((double *)a->sums + r * XD_LOSS_SUMS, sums.plain, sizeof sums.plain);
    }
}

XD_PRIVATE xd_result xdi_loss_stats_rows(const xd_launch *launch, const xd_loss_args *a, xdi_loss_sweep sweep,
                                         const void *state) {
    const xdi_loss_swept s = { a, sweep, state };
    return xdi_spread_rows(launch, a->student.rows, xdi_loss_columns(a), xdi_loss_stats_piece, &s);
}

static xd_result xdi_cpu_loss_stats(const xd_launch *launch, const xd_loss_args *a) {
    return xdi_loss_stats_rows(launch, a, xdi_loss_stats_row, NULL);
}

/* Whole-row sums from fixed ones: the limbs of all shards added. */
static void xdi_loss_total_fixed(const xd_loss_args *a, int64_t r, double *total, xd_loss_row *row) {
    const xd_fixed *all = (const xd_fixed *)a->all_sums;
    for (int i = 0; i < XD_LOSS_SUMS; i++) {
        xd_fixed sum = { 0, 0 };
        for (int shard = 0; shard < a->vocab.shards; shard++) {
            const xd_fixed *part = all + shard * a->sums_stride + r * XD_LOSS_SUMS + i;
            sum.high += part->high;
            sum.low += part->low;
        }
        if (i == XD_LOSS_BAD && sum.low > 0) row->finding = (int)XD_ROW_OVERFLOW;
        if (i == XD_LOSS_BAD && sum.high > 0) row->finding = (int)XD_ROW_NOT_FINITE;
        total[i] = xdi_fixed_value(sum);
    }
}

static void xdi_loss_total_plain(const xd_loss_args *a, int64_t r, const double *ref, double *total) {
    const double *all = (const double *)a->all_sums;
    for (int i = 0; i < XD_LOSS_SUMS; i++) total[i] = 0.0;
    for (int i = 0; i < a->vocab.shards; i++) {
        const double *own = a->all_references + i * a->reference_stride + r * XD_LOSS_REFERENCES;
        const double *sums = all + i * a->sums_stride + r * XD_LOSS_SUMS;
        xd_loss_rescale(a, ref, own, sums, a->vocab.offsets[i + 1] - a->vocab.offsets[i], total);
        const int64_t label = xdi_loss_has_hard(a) ? xd_id_at(a->labels, r) : -1;
        if (label >= a->vocab.offsets[i] && label < a->vocab.offsets[i + 1])
            total[XD_LOSS_TARGET] = sums[XD_LOSS_TARGET] + (own[XD_LOSS_MAX] - ref[XD_LOSS_MAX]);
    }
    if (isnan(ref[XD_LOSS_MAX]) || isnan(ref[XD_LOSS_TEACHER_MAX])) total[XD_LOSS_BAD] += 1.0;
}

static void xdi_loss_combine_row(const xd_loss_args *a, int64_t r, xd_loss_row *row) {
    double total[XD_LOSS_SUMS], ref[XD_LOSS_REFERENCES];
    xdi_loss_whole_reference(a, r, ref);
    xd_loss_take_references(ref, row);
    const int64_t label = a->labels.data ? xd_id_at(a->labels, r) : 0;
    if (label < 0 || label >= a->vocab.size) {
        row->finding = (int)XD_ROW_LABEL;
        return;
    }
    if (a->fixed)
        xdi_loss_total_fixed(a, r, total, row);
    else
        xdi_loss_total_plain(a, r, ref, total);
    xd_loss_scalars(a, xdi_loss_has_hard(a), xdi_loss_has_soft(a), a->vocab.size, total, row);
}

static xd_result xdi_cpu_loss_combine(const xd_launch *launch, const xd_loss_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->student.rows; r++) {
        xd_loss_row *row = a->row + r;
        memset(row, 0, sizeof *row);
        if (a->row_scale[r] == 0.0) continue;
        xdi_loss_combine_row(a, r, row);
        xd_loss_settle(a, r, row);
    }
    return XD_OK;
}

XDI_SIMD_AS_WRITTEN
XD_PRIVATE void xdi_loss_mixture_columns(const xd_loss_args *a, int64_t r, int64_t begin, int64_t end,
                                         xdi_loss_sums *sums) {
    const xd_loss_row *row = a->row + r;
    const double scale = 1.0 / a->temperature;
    for (int64_t c = begin; c < end; c++) {
        const double s = (xdi_loss_load(&a->student, r, c) - row->max) * scale - row->soft_log;
        const double t = (xdi_loss_load(&a->teacher, r, c) - row->teacher_max) * scale - row->teacher_log;
        double student, teacher;
        if (a->fixed) {
            xdi_exact_mixture(s, t, a->beta, row->top, &teacher, &student);
            xdi_loss_add(sums, XD_LOSS_TEACHER_MIXTURE, teacher);
            xdi_loss_add(sums, XD_LOSS_STUDENT_MIXTURE, student);
            continue;
        }
        const double p = exp(s), q = exp(t);
        if (p == 0.0 && q == 0.0) continue;
        xd_log_ratios(t - s, a->beta, &student, &teacher);
        if (q > 0.0) xdi_loss_add(sums, XD_LOSS_TEACHER_MIXTURE, q * teacher);
        if (p > 0.0) xdi_loss_add(sums, XD_LOSS_STUDENT_MIXTURE, p * (student - row->top));
    }
}

static void xdi_loss_mixture_row(const void *state, const xd_loss_args *a, int64_t r, const double *ref,
                                 xdi_loss_sums *sums) {
    (void)state, (void)ref;
    xdi_loss_mixture_columns(a, r, 0, xdi_loss_columns(a), sums);
}

static void xdi_loss_mixture_piece(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                   int slot) {
    const xdi_loss_swept *s = (const xdi_loss_swept *)args;
    const xd_loss_args *a = s->a;
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++) {
        xdi_loss_sums sums;
        memset(&sums, 0, sizeof sums);
        sums.fixed = a->fixed;
        if (a->row_scale[r] != 0.0 && a->row[r].finding == (int)XD_ROW_FINE)
            s->sweep(s->state, a, r, NULL, &sums);
        for (int i = 0; i < XD_LOSS_MIXTURES; i++) {
            if (a->fixed)
                ((xd_fixed *)a->mixtures)[r * XD_LOSS_MIXTURES + i] = sums.exact[i];
            else
                ((double *)a->mixtures)[r * XD_LOSS_MIXTURES + i] = sums.plain[i];
        }
    }
}

XD_PRIVATE xd_result xdi_loss_mixture_rows(const xd_launch *launch, const xd_loss_args *a,
                                           xdi_loss_sweep sweep, const void *state) {
    const xdi_loss_swept s = { a, sweep, state };
    return xdi_spread_rows(launch, a->student.rows, xdi_loss_columns(a), xdi_loss_mixture_piece, &s);
}

static xd_result xdi_cpu_loss_mixture(const xd_launch *launch, const xd_loss_args *a) {
    return xdi_loss_mixture_rows(launch, a, xdi_loss_mixture_row, NULL);
}

static double xdi_loss_mixture_total(const xd_loss_args *a, int64_t r, int which) {
    double total = 0.0;
    xd_fixed exact = { 0, 0 };
    for (int i = 0; i < a->vocab.shards; i++) {
        const int64_t at = (i * a->student.rows + r) * XD_LOSS_MIXTURES + which;
        if (a->fixed) {
            exact.high += ((const xd_fixed *)a->all_mixtures)[at].high;
            exact.low += ((const xd_fixed *)a->all_mixtures)[at].low;
        } else {
            total += ((const double *)a->all_mixtures)[at];
        }
    }
    return a->fixed ? xdi_fixed_value(exact) : total;
}

static xd_result xdi_cpu_loss_mixture_combine(const xd_launch *launch, const xd_loss_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->student.rows; r++) {
        xd_loss_row *row = a->row + r;
        if (a->row_scale[r] == 0.0 || row->finding != (int)XD_ROW_FINE) continue;
        xd_loss_mixture_scalars(a, r, xdi_loss_mixture_total(a, r, XD_LOSS_TEACHER_MIXTURE),
                                xdi_loss_mixture_total(a, r, XD_LOSS_STUDENT_MIXTURE), row);
    }
    return XD_OK;
}

XD_PRIVATE double xdi_loss_gradient_at(const xd_loss_args *a, int64_t r, int64_t c, double x, double y) {
    const xd_loss_row *row = a->row + r;
    double g = 0.0;
    if (xdi_loss_has_hard(a))
        g = xd_loss_hard_gradient(a, row, x, c == xd_id_at(a->labels, r) - a->vocab.begin);
    if (xdi_loss_has_soft(a)) g = xd_loss_add_soft(a, g, xd_loss_soft_gradient(a, row, x, y));
    return a->row_scale[r] * g;
}

static void xdi_loss_grad_row(const xd_loss_args *a, int64_t r, int64_t columns) {
    const bool soft = xdi_loss_has_soft(a);
    for (int64_t c = 0; c < columns; c++) {
        const double x = xdi_loss_load(&a->student, r, c);
        const double y = soft ? xdi_loss_load(&a->teacher, r, c) : 0.0;
        xdi_loss_store(&a->gradient, r, c, xdi_loss_gradient_at(a, r, c, x, y));
    }
}

static void xdi_cpu_loss_grad_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                   int slot) {
    const xd_loss_args *a = (const xd_loss_args *)args;
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++) {
        const bool counts = a->row_scale[r] != 0.0 && a->row[r].finding == (int)XD_ROW_FINE;
        const int64_t columns = counts ? xdi_loss_columns(a) : 0;
        xdi_loss_grad_row(a, r, columns);
        for (int64_t c = columns; c < a->gradient.cols; c++) xdi_loss_store(&a->gradient, r, c, 0.0);
    }
}

static xd_result xdi_cpu_loss_grad(const xd_launch *launch, const xd_loss_args *a) {
    return xdi_spread_rows(launch, a->student.rows, xdi_loss_columns(a), xdi_cpu_loss_grad_rows, a);
}

XD_PRIVATE const xd_loss_kernels *xdi_loss_kernels_cpu_plain(void) {
    static const xd_loss_kernels kernels = {
        xdi_cpu_loss_references, xdi_cpu_loss_merge_references, xdi_cpu_loss_stats, xdi_cpu_loss_combine,
        xdi_cpu_loss_mixture,    xdi_cpu_loss_mixture_combine,  xdi_cpu_loss_grad,  NULL,
    };
    return &kernels;
}
