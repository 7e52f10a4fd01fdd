/* Probabilities through a projection matrix, backwards as well, and matrices in memory of a device. */

#include "align/internal.h"
#include "align/project.h"
#include "kernel/cells.h"
#include "loss/internal.h"

#include <string.h>

/* ---- on a device ---- */

XD_PRIVATE bool xdi_projection_is_near(xd_ctx *ctx, const xd_projection *m) {
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    return kernels->device == XD_DEVICE_CPU || kernels->memory.owns(ctx, m->row_begin);
}

/* One block, both begins first, so that every array is aligned. */
XD_API xd_result xd_projection_upload(xd_ctx *ctx, const xd_projection *projection, xd_projection *out) {
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    const xd_launch launch = xd_ctx_launch(ctx);
    const xd_projection *m = projection;
    const size_t begins = (size_t)(m->student_size + m->teacher_size + 2) * sizeof(int64_t);
    const size_t entries = (size_t)m->entries * sizeof(int32_t);
    const void *from[6] = { m->row_begin,  m->column_begin, m->teacher_id,
                            m->student_id, m->weight,       m->column_weight };
    XD_REQUIRE(ctx, xd_ctx_kernels(ctx)->device == XD_DEVICE_CPU || !memory->owns(ctx, m->row_begin),
               XD_ERROR_ARGUMENT, "the projection of %lld entries is in memory of the device already",
               (long long)m->entries);
    const size_t bytes[6] = { (size_t)(m->student_size + 1) * sizeof(int64_t),
                              (size_t)(m->teacher_size + 1) * sizeof(int64_t),
                              entries,
                              entries,
                              entries,
                              entries };
    unsigned char *block = (unsigned char *)memory->allocate(ctx, begins + 4 * entries), *at = block;
    XD_REQUIRE(ctx, block, XD_ERROR_MEMORY, "no room for a projection of %lld entries",
               (long long)m->entries);
    xd_result result = XD_OK;
    for (int i = 0; i < 6 && result == XD_OK; at += bytes[i++])
        result = memory->copy(&launch, at, from[i], bytes[i], XD_COPY_TO_DEVICE);
    if (result == XD_OK) result = memory->synchronize(&launch);
    if (result != XD_OK) {
        memory->release(ctx, block);
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

XD_API void xd_projection_unload(xd_ctx *ctx, xd_projection *projection) {
    xd_ctx_kernels(ctx)->memory.release(ctx, (void *)(uintptr_t)projection->row_begin);
    memset(projection, 0, sizeof *projection);
}

/* ---- products ---- */

/* One call. On a device `m` and `columns` are in its memory, some of it copies for the call. */
typedef struct xdi_project_call {
    xd_ctx *ctx;
    const xd_kernels *kernels;
    xd_launch launch;
    xd_vocab_info vocab;
    xd_projection m, copied;
    const int64_t *columns;
    int64_t *copied_columns;
    int64_t k;
    bool on_device;
    bool fixed;    /* INVARIANT: sums are xd_fixed */
    double *cells; /* those of `tile` rows */
    int64_t tile;
} xdi_project_call;

/* Columns in memory of a device cannot be looked at. */
static xd_result xdi_project_check_columns(xd_ctx *ctx, const xd_projection *m, const int64_t *columns,
                                           int64_t k) {
    XD_REQUIRE(ctx, k >= 0 && (columns || k == m->teacher_size), XD_ERROR_SHAPE,
               "%lld columns of a projection that has %lld", (long long)k, (long long)m->teacher_size);
    if (!columns ||
        (xd_ctx_kernels(ctx)->device != XD_DEVICE_CPU && xd_ctx_kernels(ctx)->memory.owns(ctx, columns)))
        return XD_OK;
    for (int64_t j = 0; j < k; j++)
        XD_REQUIRE(ctx, columns[j] >= 0 && columns[j] < m->teacher_size, XD_ERROR_ARGUMENT,
                   "column %lld is outside the projection's %lld", (long long)columns[j],
                   (long long)m->teacher_size);
    for (int64_t j = 1; j < k; j++)
        XD_REQUIRE(ctx, columns[j] > columns[j - 1], XD_ERROR_ARGUMENT, "column %lld follows column %lld",
                   (long long)columns[j], (long long)columns[j - 1]);
    return XD_OK;
}

/* Brings to the device what is not there. */
static xd_result xdi_project_bring(xdi_project_call *p) {
    const xd_device_ops *memory = &p->kernels->memory;
    const size_t bytes = (size_t)p->k * sizeof *p->columns;
    if (!xdi_projection_is_near(p->ctx, &p->m)) {
        XD_TRY(xd_projection_upload(p->ctx, &p->m, &p->copied));
        p->m = p->copied;
    }
    if (!p->columns || memory->owns(p->ctx, p->columns)) return XD_OK;
    p->copied_columns = (int64_t *)memory->allocate(p->ctx, bytes);
    XD_REQUIRE(p->ctx, p->copied_columns, XD_ERROR_MEMORY, "no room for %lld columns", (long long)p->k);
    XD_TRY(memory->copy(&p->launch, p->copied_columns, p->columns, bytes, XD_COPY_TO_DEVICE));
    p->columns = p->copied_columns;
    return memory->synchronize(&p->launch);
}

/* Checks and memory on this rank alone; to be closed in any case. */
static xd_result xdi_project_open(xd_ctx *ctx, const xd_vocab *vocab, const xd_projection *projection,
                                  const char *name, const xd_rows *rows, const int64_t *columns, int64_t k,
                                  xdi_project_call *p) {
    memset(p, 0, sizeof *p);
    p->ctx = ctx;
    p->kernels = xd_ctx_kernels(ctx);
    p->launch = xd_ctx_launch(ctx);
    p->vocab = xd_vocab_describe(vocab);
    p->m = *projection;
    p->columns = columns;
    p->k = k;
    p->on_device = p->kernels->device != XD_DEVICE_CPU;
    XD_TRY(xdi_vocab_check_rows(ctx, vocab, name, rows, -1));
    XD_REQUIRE(ctx, p->vocab.size == projection->student_size, XD_ERROR_SHAPE,
               "the vocabulary has %lld ids but the projection %lld rows", (long long)p->vocab.size,
               (long long)projection->student_size);
    XD_TRY(xdi_project_check_columns(ctx, projection, columns, k));
    return p->on_device ? xdi_project_bring(p) : XD_OK;
}

static void xdi_project_close(xdi_project_call *p) {
    xdi_call_memory_done(p->ctx, p->cells);
    p->kernels->memory.release(p->ctx, p->copied_columns);
    xd_projection_unload(p->ctx, &p->copied);
}

/* Entries of a column of the transposed matrix whose student ids are in [begin, end). */
typedef struct xdi_projection_span {
    int64_t begin, end;
} xdi_projection_span;
static xdi_projection_span xdi_projection_column(const xd_projection *m, int64_t column, int64_t begin,
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

static void xdi_project_row(const xdi_project_call *p, const xd_rows *probs, int64_t row, double *cells) {
    const xd_projection *m = &p->m;
    const int64_t first = p->vocab.begin;
    for (int64_t j = 0; j < p->k; j++) {
        const xdi_projection_span span =
            xdi_projection_column(m, p->columns ? p->columns[j] : j, first, p->vocab.end);
        for (int64_t e = span.begin; e < span.end; e++)
            xdi_cells_add(p->fixed, cells, row * p->k + j,
                          (double)m->column_weight[e] * xdi_loss_load(probs, row, m->student_id[e] - first));
    }
}

/* cells [rows, k] = P M for this rank's columns. */
static xd_result xdi_project_rows(const xdi_project_call *p, const xd_rows *probs, double *cells) {
    const size_t cell = p->fixed ? sizeof(xd_fixed) : sizeof(double);
    xd_xtoken_args a;
    XD_TRY(p->kernels->memory.fill(&p->launch, cells, 0, (size_t)(probs->rows * p->k) * cell));
    for (int64_t row = 0; row < probs->rows && !p->on_device; row++) xdi_project_row(p, probs, row, cells);
    if (!p->on_device) return XD_OK;
    memset(&a, 0, sizeof a);
    a.logits = *probs;
    a.first = p->vocab.begin;
    a.count = a.place_count = probs->rows;
    a.ids = p->columns;
    a.vocabulary = p->m.teacher_size;
    a.cells = cells;
    a.fixed = p->fixed;
    a.matrix.columns = p->vocab.end - p->vocab.begin;
    a.matrix.k = p->k;
    a.matrix.column_begin = p->m.column_begin;
    a.matrix.column_student = p->m.student_id;
    a.matrix.column_weight = p->m.column_weight;
    return p->kernels->xtoken.project(&p->launch, &a);
}

/* In INVARIANT mode, tile after tile of rows. */
static xd_result xdi_project_fixed(const xdi_project_call *p, const xd_rows *probs, double *out) {
    const int64_t stride = probs->stride ? probs->stride : probs->cols;
    for (int64_t row = 0; row < probs->rows; row += p->tile) {
        xd_rows part = *probs;
        part.rows = probs->rows - row < p->tile ? probs->rows - row : p->tile;
        part.data = (unsigned char *)probs->data + (size_t)(row * stride) * xd_dtype_size(probs->dtype);
        const int64_t count = part.rows * p->k;
        XD_TRY(xdi_project_rows(p, &part, p->cells));
        if (p->vocab.tp)
            XD_TRY(xd_all_reduce(p->vocab.tp, p->cells, p->cells, 2 * count, XD_DTYPE_I64, XD_SUM));
        XD_TRY(xdi_xtoken_settle(p->ctx, p->cells, count, out + row * p->k));
    }
    return XD_OK;
}

/* Memory for the cells of an INVARIANT call, 2 MB or one row. */
static xd_result xdi_project_take_cells(xdi_project_call *p) {
    const int64_t row = (int64_t)sizeof(xd_fixed) * (p->k > 0 ? p->k : 1), most = 2 << 20;
    p->fixed = true;
    p->tile = row < most ? most / row : 1;
    p->cells = (double *)xdi_call_memory(p->ctx, (size_t)(p->tile * row));
    XD_REQUIRE(p->ctx, p->cells, XD_ERROR_MEMORY, "no room for %lld rows of %lld columns", (long long)p->tile,
               (long long)p->k);
    return XD_OK;
}

XD_API xd_result xd_project(xd_ctx *ctx, const xd_vocab *vocab, const xd_projection *projection,
                            xd_rows probs, const int64_t *columns, int64_t k, double *out) {
    xdi_project_call p;
    xd_result result = xdi_project_open(ctx, vocab, projection, "probs", &probs, columns, k, &p);
    if (result == XD_OK && xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT)
        result = xdi_project_take_cells(&p);
    result = xdi_vocab_agree(p.vocab.tp, NULL, result);
    if (result == XD_OK)
        result = p.fixed ? xdi_project_fixed(&p, &probs, out) : xdi_project_rows(&p, &probs, out);
    if (result == XD_OK && p.vocab.tp && !p.fixed)
        result = xd_all_reduce(p.vocab.tp, out, out, probs.rows * k, XD_DTYPE_F64, XD_SUM);
    xdi_project_close(&p);
    return result;
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

static void xdi_project_row_backward(const xdi_project_call *p, const double *weight, const xd_rows *gradient,
                                     int64_t row) {
    const xd_projection *m = &p->m;
    for (int64_t v = 0; v < gradient->cols; v++) {
        const int64_t id = p->vocab.begin + v;
        double sum = 0.0;
        for (int64_t e = id < p->vocab.end ? m->row_begin[id] : 0;
             id < p->vocab.end && e < m->row_begin[id + 1]; e++) {
            const int64_t j = xdi_project_place(p->columns, p->k, m->teacher_id[e]);
            if (j >= 0) sum += (double)m->weight[e] * weight[row * p->k + j];
        }
        xdi_loss_store(gradient, row, v, sum);
    }
}

static xd_result xdi_project_there_backward(const xdi_project_call *p, const double *weight,
                                            const xd_rows *gradient) {
    xd_xtoken_args a;
    memset(&a, 0, sizeof a);
    a.gradient = *gradient;
    a.columns = p->vocab.end - p->vocab.begin;
    a.count = gradient->rows;
    a.k = p->k;
    a.student = (double *)(uintptr_t)weight; /* read alone */
    a.direct = true;
    a.matrix.k = p->k;
    a.matrix.begin = p->m.row_begin + p->vocab.begin;
    a.matrix.slot = p->m.teacher_id;
    a.matrix.weight = p->m.weight;
    a.matrix.sorted = p->columns;
    return p->kernels->xtoken.gradient(&p->launch, &a);
}

XD_API xd_result xd_project_backward(xd_ctx *ctx, const xd_vocab *vocab, const xd_projection *projection,
                                     const double *weight, const int64_t *columns, int64_t k,
                                     xd_rows gradient) {
    xdi_project_call p;
    xd_result result = xdi_project_open(ctx, vocab, projection, "gradient", &gradient, columns, k, &p);
    result = xdi_vocab_agree(p.vocab.tp, NULL, result);
    for (int64_t row = 0; row < gradient.rows && result == XD_OK && !p.on_device; row++)
        xdi_project_row_backward(&p, weight, &gradient, row);
    if (result == XD_OK && p.on_device) result = xdi_project_there_backward(&p, weight, &gradient);
    xdi_project_close(&p);
    return result;
}
