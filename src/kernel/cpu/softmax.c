/* Statistics of softmax, and the values computed from them. */

#include "kernel/cpu/internal.h"
#include "kernel/ids.h"
#include "kernel/softmax_scalar.h"

#include <math.h>

static void xdi_cpu_softmax_stats_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                       int slot) {
    const xd_softmax_args *a = (const xd_softmax_args *)args;
    const int64_t columns = a->vocab.end - a->vocab.begin;
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++) {
        double *part = a->parts + r * XD_SOFTMAX_PARTS;
        int64_t arg;
        part[XD_SOFTMAX_MAX] = xdi_loss_row_max(&a->logits, r, columns, &arg);
        part[XD_SOFTMAX_ARG] = arg < 0 ? -1.0 : (double)(arg + a->vocab.begin);
        part[XD_SOFTMAX_SUM] = 0.0;
        for (int64_t c = 0; c < columns && part[XD_SOFTMAX_MAX] > -INFINITY; c++)
            part[XD_SOFTMAX_SUM] +=
                exp((xdi_loss_load(&a->logits, r, c) - part[XD_SOFTMAX_MAX]) / a->temperature);
    }
}

static xd_result xdi_cpu_softmax_stats(const xd_launch *launch, const xd_softmax_args *a) {
    return xdi_spread_rows(launch, a->logits.rows, a->vocab.end - a->vocab.begin, xdi_cpu_softmax_stats_rows,
                           a);
}

static xd_result xdi_cpu_softmax_merge(const xd_launch *launch, const xd_softmax_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->logits.rows; r++) {
        double whole[XD_SOFTMAX_PARTS];
        xd_softmax_join(a, r, whole);
        if (a->log_sum_exp) a->log_sum_exp[r] = xd_softmax_log_sum_exp(whole, a->temperature);
        if (a->argmax) a->argmax[r] = (int64_t)whole[XD_SOFTMAX_ARG];
    }
    return XD_OK;
}

static double xdi_softmax_log_prob(const xd_softmax_args *a, int64_t r, int64_t c) {
    return xdi_loss_load(&a->logits, r, c) / a->temperature - a->log_sum_exp[r];
}

static void xdi_cpu_softmax_write_rows(const xd_launch *launch, const void *args, int64_t begin, int64_t end,
                                       int slot) {
    const xd_softmax_args *a = (const xd_softmax_args *)args;
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++)
        for (int64_t c = 0; c < a->vocab.end - a->vocab.begin; c++)
            xdi_loss_store(&a->out, r, c, xdi_softmax_log_prob(a, r, c));
}

static xd_result xdi_cpu_softmax_write(const xd_launch *launch, const xd_softmax_args *a) {
    return xdi_spread_rows(launch, a->logits.rows, a->vocab.end - a->vocab.begin, xdi_cpu_softmax_write_rows,
                           a);
}

static void xdi_cpu_softmax_row_sums_rows(const xd_launch *launch, const void *args, int64_t begin,
                                          int64_t end, int slot) {
    const xd_softmax_args *a = (const xd_softmax_args *)args;
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++) {
        a->parts[r] = 0.0;
        for (int64_t c = 0; c < a->vocab.end - a->vocab.begin; c++)
            a->parts[r] += xdi_loss_load(&a->weights, r, c);
    }
}

static xd_result xdi_cpu_softmax_row_sums(const xd_launch *launch, const xd_softmax_args *a) {
    return xdi_spread_rows(launch, a->weights.rows, a->vocab.end - a->vocab.begin,
                           xdi_cpu_softmax_row_sums_rows, a);
}

static void xdi_cpu_softmax_write_backward_rows(const xd_launch *launch, const void *args, int64_t begin,
                                                int64_t end, int slot) {
    const xd_softmax_args *a = (const xd_softmax_args *)args;
    const int64_t columns = a->vocab.end - a->vocab.begin;
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++) {
        double sum = 0.0;
        for (int i = 0; i < a->vocab.shards; i++) sum += a->all[i * a->all_stride + r];
        for (int64_t c = 0; c < columns; c++) {
            const double p = exp(xdi_softmax_log_prob(a, r, c));
            xdi_loss_store(&a->out, r, c, (xdi_loss_load(&a->weights, r, c) - p * sum) / a->temperature);
        }
        for (int64_t c = columns; c < a->out.cols; c++) xdi_loss_store(&a->out, r, c, 0.0);
    }
}

static xd_result xdi_cpu_softmax_write_backward(const xd_launch *launch, const xd_softmax_args *a) {
    return xdi_spread_rows(launch, a->logits.rows, a->vocab.end - a->vocab.begin,
                           xdi_cpu_softmax_write_backward_rows, a);
}

static xd_result xdi_cpu_softmax_pick(const xd_launch *launch, const xd_softmax_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->logits.rows; r++)
        for (int64_t j = 0; j < a->ids_count; j++) {
            const int64_t id = xd_id_at(a->ids, r * a->ids_stride + j);
            const bool owned = id >= a->vocab.begin && id < a->vocab.end;
            double *part = &a->parts[r * a->ids_count + j];
            *part = owned ? xdi_loss_load(&a->logits, r, id - a->vocab.begin) : 0.0;
            if (owned && a->finite && !a->finite[r]) *part = (double)NAN;
        }
    return XD_OK;
}

static xd_result xdi_cpu_softmax_take(const xd_launch *launch, const xd_softmax_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->logits.rows; r++)
        for (int64_t j = 0; j < a->ids_count; j++) {
            const int64_t id = xd_id_at(a->ids, r * a->ids_stride + j), at = r * a->ids_count + j;
            double value = (double)NAN;
            if (id >= 0 && id < a->vocab.size) {
                int owner = 0;
                while (id >= a->vocab.offsets[owner + 1]) owner++;
                value = a->all[owner * a->all_stride + at];
                if (a->log_sum_exp) value = value / a->temperature - a->log_sum_exp[r];
            }
            xd_store_f64(a->values, a->values_dtype, at, value);
        }
    return XD_OK;
}

static void xdi_cpu_softmax_write_target_backward_rows(const xd_launch *launch, const void *args,
                                                       int64_t begin, int64_t end, int slot) {
    const xd_softmax_args *a = (const xd_softmax_args *)args;
    (void)launch, (void)slot;
    for (int64_t r = begin; r < end; r++) {
        const int64_t id = xd_id_at(a->ids, r);
        const bool counts = a->weight[r] != 0.0f && id >= 0 && id < a->vocab.size;
        const int64_t columns = counts ? a->vocab.end - a->vocab.begin : 0;
        for (int64_t c = 0; c < columns; c++) {
            const double p = exp(xdi_softmax_log_prob(a, r, c)),
                         target = c + a->vocab.begin == id ? 1.0 : 0.0;
            xdi_loss_store(&a->out, r, c, (target - p) * (double)a->weight[r] / a->temperature);
        }
        for (int64_t c = columns; c < a->out.cols; c++) xdi_loss_store(&a->out, r, c, 0.0);
    }
}

static xd_result xdi_cpu_softmax_write_target_backward(const xd_launch *launch, const xd_softmax_args *a) {
    return xdi_spread_rows(launch, a->logits.rows, a->vocab.end - a->vocab.begin,
                           xdi_cpu_softmax_write_target_backward_rows, a);
}

static xd_result xdi_cpu_softmax_hits(const xd_launch *launch, const int64_t *argmax, xd_ids labels,
                                      const uint8_t *mask, int64_t rows, uint8_t *hits) {
    (void)launch;
    for (int64_t r = 0; r < rows; r++) hits[r] = argmax[r] == xd_id_at(labels, r) && (!mask || mask[r]);
    return XD_OK;
}

XD_PRIVATE const xd_softmax_kernels *xdi_softmax_kernels_cpu(void) {
    static const xd_softmax_kernels kernels = {
        xdi_cpu_softmax_stats,          xdi_cpu_softmax_merge,
        xdi_cpu_softmax_write,          xdi_cpu_softmax_row_sums,
        xdi_cpu_softmax_write_backward, xdi_cpu_softmax_pick,
        xdi_cpu_softmax_take,           xdi_cpu_softmax_write_target_backward,
        xdi_cpu_softmax_hits,
    };
    return &kernels;
}
