/* Memory for the calls of a case. The kinds keep everything on the host and lend arrays to a call; on a device a lent array is
 * a copy, and what the call has written there is copied back. Built with GOLDEN_CUDA, contexts compute on a GPU. */
#include "golden.h"
#include "softmax_calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(GOLDEN_CUDA)

xd_result golden_device_open(xd_ctx *ctx, golden_device **out) {
    return xd_cuda_create(ctx, NULL, out);
}

void golden_device_close(golden_device *device) {
    xd_cuda_destroy(device);
}

#else

xd_result golden_device_open(xd_ctx *ctx, golden_device **out) {
    (void)ctx;
    *out = NULL;
    return XD_OK;
}

void golden_device_close(golden_device *device) {
    (void)device;
}

#endif

bool golden_on_device(const xd_ctx *ctx) {
    return xd_ctx_kernels(ctx)->device != XD_DEVICE_CPU;
}

/* ---- loans ---- */

/* If a copy fails there is nothing to compare: the program stops. */
static void golden_copy(xd_ctx *ctx, void *to, const void *from, size_t bytes, xd_copy_kind kind) {
    const xd_launch launch = xd_ctx_launch(ctx);
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    if (bytes == 0) return;
    if (memory->copy(&launch, to, from, bytes, kind) == XD_OK && memory->synchronize(&launch) == XD_OK)
        return;
    fprintf(stderr, "golden: %s\n", xd_last_error(ctx)->message);
    exit(2);
}

void golden_loans_open(golden_loans *l, xd_ctx *ctx) {
    memset(l, 0, sizeof *l);
    l->ctx = ctx;
}

static void *golden_lend(golden_loans *l, void *host, size_t bytes, bool comes_back) {
    if (!host || !golden_on_device(l->ctx)) return host;
    for (int i = 0; i < l->count; i++)
        if (l->loan[i].host == host && l->loan[i].bytes == bytes) { /* in place: one array, lent twice */
            l->loan[i].comes_back = l->loan[i].comes_back || comes_back;
            return l->loan[i].there;
        }
    void *there = l->count < GOLDEN_LOANS ? xd_ctx_kernels(l->ctx)->memory.allocate(l->ctx, bytes) : NULL;
    if (!there) {
        fprintf(stderr, "golden: no room on the device for array %d of %zu bytes\n", l->count, bytes);
        exit(2);
    }
    l->loan[l->count].host = host;
    l->loan[l->count].there = there;
    l->loan[l->count].bytes = bytes;
    l->loan[l->count++].comes_back = comes_back;
    golden_copy(l->ctx, there, host, bytes, XD_COPY_TO_DEVICE);
    return there;
}

const void *golden_in(golden_loans *l, const void *host, size_t bytes) {
    return golden_lend(l, (void *)(uintptr_t)host, bytes, false);
}

void *golden_out(golden_loans *l, void *host, size_t bytes) {
    return golden_lend(l, host, bytes, true);
}

static size_t golden_rows_bytes(const xd_rows *rows) {
    return (size_t)(rows->rows * (rows->stride ? rows->stride : rows->cols)) * xd_dtype_size(rows->dtype);
}

xd_rows golden_rows_in(golden_loans *l, xd_rows rows) {
    rows.data = golden_lend(l, rows.data, golden_rows_bytes(&rows), false);
    return rows;
}

xd_rows golden_rows_out(golden_loans *l, xd_rows rows) {
    rows.data = golden_lend(l, rows.data, golden_rows_bytes(&rows), true);
    return rows;
}

void golden_renew(golden_loans *l) {
    for (int i = 0; i < l->count; i++)
        golden_copy(l->ctx, l->loan[i].there, l->loan[i].host, l->loan[i].bytes, XD_COPY_TO_DEVICE);
}

void golden_home(golden_loans *l) {
    for (int i = 0; i < l->count; i++)
        if (l->loan[i].comes_back)
            golden_copy(l->ctx, l->loan[i].host, l->loan[i].there, l->loan[i].bytes, XD_COPY_TO_HOST);
}

xd_result golden_back(golden_loans *l, xd_result result) {
    if (result == XD_OK) golden_home(l);
    for (int i = 0; i < l->count; i++) xd_ctx_kernels(l->ctx)->memory.release(l->ctx, l->loan[i].there);
    l->count = 0;
    return result;
}

const void *golden_fetch(golden_case *c, const void *there, size_t bytes) {
    if (!there || !golden_on_device(golden_ctx(c))) return there;
    void *host = golden_memory(c, bytes);
    golden_copy(golden_ctx(c), host, there, bytes, XD_COPY_TO_HOST);
    return host;
}

/* ---- calls whose descs are full of arrays ---- */

static xd_ids golden_ids_in(golden_loans *l, xd_ids ids, size_t count) {
    ids.data = golden_in(l, ids.data, count * xd_dtype_size(ids.dtype));
    return ids;
}

static xd_positions golden_positions_in(golden_loans *l, xd_positions p) {
    p.labels = golden_ids_in(l, p.labels, (size_t)p.count);
    p.mask = (const uint8_t *)golden_in(l, p.mask, (size_t)p.count);
    p.weights = (const float *)golden_in(l, p.weights, (size_t)p.count * sizeof *p.weights);
    return p;
}

xd_result golden_denominator(golden_loans *l, const xd_positions *positions, xd_denominator *out) {
    const xd_positions lent = golden_positions_in(l, *positions);
    xd_denominator *there = (xd_denominator *)golden_out(l, out, sizeof *out);
    return golden_back(l, xd_denominator_count(l->ctx, NULL, &lent, 1, there));
}

xd_result golden_accuracy(golden_loans *l, const xd_vocab *vocab, xd_rows logits,
                          const xd_positions *positions, double *out) {
    const xd_positions lent = golden_positions_in(l, *positions);
    double *there = (double *)golden_out(l, out, sizeof *out);
    return golden_back(l, softmax_accuracy(l->ctx, vocab, golden_rows_in(l, logits), &lent, NULL, there));
}

xd_status *golden_status(golden_loans *l, xd_status *status) {
    memset(status, 0, sizeof *status);
    return (xd_status *)golden_out(l, status, sizeof *status);
}

xd_result golden_found(golden_loans *l, xd_result result, xd_status *status) {
    result = golden_back(l, result);
    if (result != XD_OK) return result;
    if (status->nothing_counted != 0) l->nothing_counted = true;
    status->nothing_counted = 0;
    return xd_status_check(l->ctx, status);
}

static xd_loss_desc golden_lent_loss(golden_loans *l, const xd_loss_desc *desc, int64_t row_count) {
    const size_t rows = (size_t)row_count;
    xd_loss_desc d = *desc;
    d.student = golden_rows_in(l, d.student);
    d.teacher = golden_rows_in(l, d.teacher);
    d.common.gradient = golden_rows_out(l, d.common.gradient);
    d.common.labels = golden_ids_in(l, d.common.labels, rows);
    d.common.mask = (const uint8_t *)golden_in(l, d.common.mask, rows);
    d.common.row_weight =
        (const float *)golden_in(l, d.common.row_weight, rows * sizeof *d.common.row_weight);
    d.common.scale = (const double *)golden_in(l, d.common.scale, sizeof *d.common.scale);
    d.common.denominator =
        (const xd_denominator *)golden_in(l, d.common.denominator, sizeof *d.common.denominator);
    d.common.row_loss = (float *)golden_out(l, d.common.row_loss, rows * sizeof *d.common.row_loss);
    return d;
}

static xd_result golden_loss_of(golden_loans *l,
                                xd_result (*loss)(xd_ctx *, const xd_loss_desc *, xd_loss_values *),
                                const xd_loss_desc *desc, xd_loss_values *out) {
    xd_status status;
    xd_loss_desc d = golden_lent_loss(l, desc, desc->student.rows);
    d.common.status = golden_status(l, &status);
    xd_loss_values *there = (xd_loss_values *)golden_out(l, out, sizeof *out);
    return golden_found(l, loss(l->ctx, &d, there), &status);
}

xd_result golden_loss(golden_loans *l, const xd_loss_desc *desc, xd_loss_values *out) {
    return golden_loss_of(l, xd_loss, desc, out);
}

xd_result golden_cosine_loss(golden_loans *l, const xd_loss_desc *desc, xd_loss_values *out) {
    return golden_loss_of(l, cosine_loss, desc, out);
}

xd_result golden_mft_loss(golden_loans *l, const mft_desc *desc, xd_loss_values *out) {
    xd_status status;
    mft_desc d = *desc;
    d.loss = golden_lent_loss(l, &desc->loss, desc->loss.student.rows);
    d.loss.common.status = golden_status(l, &status);
    d.terms = golden_rows_out(l, d.terms);
    xd_loss_values *there = (xd_loss_values *)golden_out(l, out, sizeof *out);
    return golden_found(l, mft_loss(l->ctx, &d, there), &status);
}

static xd_head golden_lent_head(golden_loans *l, xd_head head) {
    head.hidden = golden_rows_in(l, head.hidden);
    head.weight = golden_rows_in(l, head.weight);
    head.bias = (const float *)golden_in(l, head.bias, (size_t)head.weight.rows * sizeof *head.bias);
    return head;
}

xd_result golden_head_loss(golden_loans *l, const xd_head_loss_desc *desc, xd_loss_values *out) {
    const size_t columns = (size_t)desc->student.weight.rows, width = (size_t)desc->student.weight.cols;
    xd_status status;
    xd_head_loss_desc d = *desc;
    d.loss = golden_lent_loss(l, &desc->loss, desc->student.hidden.rows);
    d.loss.common.status = golden_status(l, &status);
    d.student = golden_lent_head(l, desc->student);
    d.teacher = golden_lent_head(l, desc->teacher);
    d.hidden_gradient = golden_rows_out(l, d.hidden_gradient);
    d.weight_gradient = (float *)golden_out(l, d.weight_gradient, columns * width * sizeof(float));
    d.bias_gradient = (float *)golden_out(l, d.bias_gradient, columns * sizeof(float));
    xd_loss_values *there = (xd_loss_values *)golden_out(l, out, sizeof *out);
    return golden_found(l, xd_head_loss(l->ctx, &d, there), &status);
}

xd_result golden_topk_loss(golden_loans *l, const xd_topk_desc *desc, xd_loss_values *out) {
    const size_t rows = (size_t)desc->student.rows, cells = rows * (size_t)desc->k;
    xd_status status;
    xd_topk_desc d = *desc;
    d.student = golden_rows_in(l, d.student);
    d.teacher = golden_rows_in(l, d.teacher);
    d.common.gradient = golden_rows_out(l, d.common.gradient);
    d.ids = golden_ids_in(l, d.ids, cells);
    d.values = (const float *)golden_in(l, d.values, cells * sizeof *d.values);
    d.common.labels = golden_ids_in(l, d.common.labels, rows);
    d.common.row_weight =
        (const float *)golden_in(l, d.common.row_weight, rows * sizeof *d.common.row_weight);
    d.common.row_loss = (float *)golden_out(l, d.common.row_loss, rows * sizeof *d.common.row_loss);
    d.student_log_probs = (float *)golden_out(l, d.student_log_probs, cells * sizeof *d.student_log_probs);
    d.common.status = golden_status(l, &status);
    xd_loss_values *there = (xd_loss_values *)golden_out(l, out, sizeof *out);
    return golden_found(l, xd_topk_kl_loss(l->ctx, &d, there), &status);
}
