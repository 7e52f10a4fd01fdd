#include <string.h>

/* ---- on a device ---- */

XD_PRIVATE bool xdi_projection_is_near(xd_ctx *ctx, const xd_projection *m) {
    const xd_kernels kernels = xd_ctx_kernels(ctx);
    return kernels.device == XD_DEVICE_CPU || kernels.memory.owns(ctx, m->row_begin);
}

/* One block, both begins first, so that every array is aligned. */
XD_API xd_result xd_projection_upload(xd_ctx *ctx, const xd_projection *projection, xd_projection *out) {
    const xd_device_ops memory = xd_ctx_kernels(ctx).memory;
    const xd_launch launch = xd_ctx_launch(ctx);
    const xd_projection *m = projection;
    const size_t begins = (size_t)(m->student_size + m->teacher_size + 2) * sizeof(int64_t);
    const size_t entries = (size_t)m->entries * sizeof(int32_t);
    const void *from[6] = { m->row_begin,  m->column_begin, m->teacher_id,
                            m->student_id, m->weight,       m->column_weight };
    XDI_REQUIRE(ctx, xd_ctx_kernels(ctx).device == XD_DEVICE_CPU || !memory.owns(ctx, m->row_begin),
                XD_ERROR_ARGUMENT, "the projection of %lld entries is in memory of the device already",
                (long long)m->entries);
    const size_t bytes[6] = { (size_t)(m->student_size + 1) * sizeof(int64_t),
                              (size_t)(m->teacher_size + 1) * sizeof(int64_t),
                              entries,
                              entries,
                              entries,
                              entries };
    unsigned char *block = (unsigned char *)memory.allocate(ctx, begins + 4 * entries), *at = block;
    XDI_REQUIRE(ctx, block, XD_ERROR_MEMORY, "no room for a projection of %lld entries",
                (long long)m->entries);
    xd_result result = XD_OK;
    for (int i = 0; i < 6 && result == XD_OK; at += bytes[i++])
        result = memory.copy(&launch, at, from[i], bytes[i], XD_COPY_TO_DEVICE);
    if (result == XD_OK) result = memory.synchronize(&launch);
    if (result != XD_OK) {
        memory.release(ctx, block);
        return result;
    }
    *out = *m;
    out->row_begin = (const int64_t *)(const void *)block;
    out->column_begin = out->row_begin + m->student_size + 1;
    out->teacher_id = (const int32_t *)(const void *)(block + begins);
    out->student_id = out->teacher_id + m->entries;
    out->weight = (const float *)(const void *)(out->student_id + m->entries);
    out->column_weight = out->weight + m->entries;
    return XD_OK;
}

XD_API void xd_projection_drop(xd_ctx *ctx, xd_projection *projection) {
    xd_ctx_kernels(ctx).memory.release(ctx, (void *)(uintptr_t)projection->row_begin);
    memset(projection, 0, sizeof *projection);
}

/* ---- products ---- */

static xd_result xdi_project_check(xd_ctx *ctx, const xd_vocab *vocab, const xd_projection *projection,
                                   const char *name, const xd_rows *rows, const int64_t *columns, int64_t k) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    XDI_REQUIRE(ctx, xd_ctx_kernels(ctx).device == XD_DEVICE_CPU, XD_ERROR_UNSUPPORTED,
                "projections are computed on the CPU only");
    XDI_REQUIRE(ctx, !info.tp || xd_ctx_settings(ctx)->reduction != XD_REDUCTION_INVARIANT,
                XD_ERROR_UNSUPPORTED, "projections over %d ranks have no INVARIANT form", info.ranks);
    XDI_TRY(xdi_vocab_check_rows(ctx, vocab, name, rows, -1));
    XDI_REQUIRE(ctx, info.size == projection->student_size, XD_ERROR_SHAPE,
                "the vocabulary has %lld ids but the projection %lld rows", (long long)info.size,
                (long long)projection->student_size);
    XDI_REQUIRE(ctx, columns || k == projection->teacher_size, XD_ERROR_SHAPE,
                "%lld columns of a projection that has %lld", (long long)k,
                (long long)projection->teacher_size);
    for (int64_t j = 0; j < k && columns; j++)
        XDI_REQUIRE(ctx, columns[j] >= 0 && columns[j] < projection->teacher_size, XD_ERROR_ARGUMENT,
                    "column %lld is outside the projection's %lld", (long long)columns[j],
                    (long long)projection->teacher_size);
    for (int64_t j = 1; j < k && columns; j++)
        XDI_REQUIRE(ctx, columns[j] > columns[j - 1], XD_ERROR_ARGUMENT, "column %lld follows column %lld",
                    (long long)columns[j], (long long)columns[j - 1]);
    return XD_OK;
}

XD_PRIVATE xdi_projection_span xdi_projection_column(const xd_projection *m, int64_t column, int64_t begin,
                                                     int64_t end) {
    xdi_projection_span span = { m->column_begin[column], m->column_begin[column + 1] };
    while (span.begin < span.end && m->student_id[span.begin] < begin) span.begin++;
    while (span.begin < span.end && m->student_id[span.end - 1] >= end) span.end--;
    return span;
}

XD_PRIVATE void xdi_projection_restrict(const xd_projection *m, const int64_t *ids, int64_t k, int64_t begin,
                                        int64_t end, int32_t *slots, int64_t *row_begin, int32_t *student,
                                        int32_t *slot, float *weight) {
    int64_t n = 0;
    for (int64_t id = 0; id < m->teacher_size; id++) slots[id] = -1;
    for (int64_t j = 0; j < k; j++) slots[ids[j]] = (int32_t)j;
    for (int64_t v = begin; v < end; v++) {
        row_begin[v - begin] = n;
        for (int64_t e = m->row_begin[v]; e < m->row_begin[v + 1]; e++) {
            const int32_t at = slots[m->teacher_id[e]];
            if (at < 0) continue;
            student[n] = (int32_t)(v - begin);
            slot[n] = at;
            weight[n++] = m->weight[e];
        }
    }
    row_begin[end - begin] = n;
}

static void xdi_project_row(const xd_projection *m, const xd_vocab_info *info, const xd_rows *probs,
                            int64_t row, const int64_t *columns, int64_t k, double *out) {
    for (int64_t j = 0; j < k; j++) {
        const xdi_projection_span span =
            xdi_projection_column(m, columns ? columns[j] : j, info->begin, info->end);
        double sum = 0.0;
        for (int64_t e = span.begin; e < span.end; e++)
            sum += (double)m->column_weight[e] * xdi_loss_load(probs, row, m->student_id[e] - info->begin);
        out[j] = sum;
    }
}

XD_API xd_result xd_project(xd_ctx *ctx, const xd_vocab *vocab, const xd_projection *projection,
                            xd_rows probs, const int64_t *columns, int64_t k, double *out) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const xd_result result = xdi_project_check(ctx, vocab, projection, "probs", &probs, columns, k);
    XDI_TRY(xdi_vocab_agree(info.tp, NULL, result));
    for (int64_t row = 0; row < probs.rows; row++)
        xdi_project_row(projection, &info, &probs, row, columns, k, out + row * k);
    return info.tp ? xd_all_reduce(info.tp, out, out, probs.rows * k, XD_DTYPE_F64, XD_SUM) : XD_OK;
}

/* The place of a teacher id among the columns; -1 when it is not there. */
static int64_t xdi_project_place(const int64_t *columns, int64_t k, int64_t id) {
    int64_t low = 0, high = k;
    if (!columns) return id;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (columns[middle] < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low < k && columns[low] == id ? low : -1;
}

static void xdi_project_row_backward(const xd_projection *m, const xd_vocab_info *info, const double *weight,
                                     const int64_t *columns, int64_t k, const xd_rows *gradient,
                                     int64_t row) {
    for (int64_t v = 0; v < gradient->cols; v++) {
        const int64_t id = info->begin + v;
        double sum = 0.0;
        for (int64_t e = id < info->end ? m->row_begin[id] : 0; id < info->end && e < m->row_begin[id + 1];
             e++) {
            const int64_t j = xdi_project_place(columns, k, m->teacher_id[e]);
            if (j >= 0) sum += (double)m->weight[e] * weight[j];
        }
        xdi_loss_store(gradient, row, v, sum);
    }
}

XD_API xd_result xd_project_backward(xd_ctx *ctx, const xd_vocab *vocab, const xd_projection *projection,
                                     const double *weight, const int64_t *columns, int64_t k,
                                     xd_rows gradient) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const xd_result result = xdi_project_check(ctx, vocab, projection, "gradient", &gradient, columns, k);
    XDI_TRY(xdi_vocab_agree(info.tp, NULL, result));
    for (int64_t row = 0; row < gradient.rows; row++)
        xdi_project_row_backward(projection, &info, weight + row * k, columns, k, &gradient, row);
    return XD_OK;
}
