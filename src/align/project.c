/* Probabilities through a projection matrix, its vector-Jacobian product, and matrices in device memory. */

#include "align/internal.h"
#include "align/project.h"
#include "loss/internal.h"

#include <string.h>

/* ---- on a device ---- */

XD_PRIVATE bool xdi_projection_is_near(xd_ctx *ctx, const xd_projection *m) {
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    return kernels->device == XD_DEVICE_CPU || kernels->memory.owns(ctx, m->row_begin);
}

/* One block, both begins first, so that every array is aligned. */
XD_API xd_result xd_projection_upload(xd_ctx *ctx, const xd_projection *projection, xd_projection *out) {
    XDI_GIVEN(ctx, ctx, projection, out);
    XD_TRY(xdi_projection_given(ctx, projection));
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

XD_PRIVATE xd_xtoken_projection xdi_projection_for_kernels(const xd_projection *m) {
    const xd_xtoken_projection p = { m->teacher_size, m->row_begin,  m->teacher_id,    m->weight,
                                     m->column_begin, m->student_id, m->column_weight, m->entries };
    return p;
}

/* ---- products ---- */

/* One call. On a device `m` and `columns` are in device memory, where needed as copies for the call. */
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

/* Columns in device memory cannot be checked. */
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

/* Copies to the device what is in host memory. */
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

/* Local checks and memory; to be closed in any case. */
static xd_result xdi_project_open(xd_ctx *ctx, const xdi_project_desc *d, const char *name,
                                  const xd_rows *rows, xdi_project_call *p) {
    const xd_projection *projection = d->projection;
    memset(p, 0, sizeof *p);
    p->ctx = ctx;
    p->kernels = xd_ctx_kernels(ctx);
    p->launch = xd_ctx_launch(ctx);
    XDI_GIVEN(ctx, d->vocab);
    p->vocab = xd_vocab_describe(d->vocab);
    XDI_GIVEN(ctx, projection);
    p->m = *projection;
    p->columns = d->columns;
    p->k = d->columns || d->k ? d->k : projection->teacher_size;
    p->on_device = p->kernels->device != XD_DEVICE_CPU;
    XD_TRY(xdi_vocab_check_rows(ctx, d->vocab, name, rows, -1));
    XD_REQUIRE(ctx, p->vocab.size == projection->student_size, XD_ERROR_SHAPE,
               "the vocabulary has %lld ids but the projection %lld rows", (long long)p->vocab.size,
               (long long)projection->student_size);
    XD_TRY(xdi_project_check_columns(ctx, projection, p->columns, p->k));
    return p->on_device ? xdi_project_bring(p) : XD_OK;
}

static void xdi_project_close(xdi_project_call *p) {
    xdi_call_memory_done(p->ctx, p->cells);
    p->kernels->memory.release(p->ctx, p->copied_columns);
    xd_projection_unload(p->ctx, &p->copied);
}

static xd_xtoken_product_args xdi_project_args(const xdi_project_call *p, const xd_rows *rows) {
    xd_xtoken_product_args a;
    memset(&a, 0, sizeof a);
    a.rows = *rows;
    a.first = p->vocab.begin;
    a.columns = p->vocab.end - p->vocab.begin;
    a.projection = xdi_projection_for_kernels(&p->m);
    a.ids = p->columns;
    a.k = p->k;
    a.fixed = p->fixed;
    return a;
}

/* cells [rows, k] = P M for this rank's columns. */
static xd_result xdi_project_rows(const xdi_project_call *p, const xd_rows *probs, double *cells) {
    const size_t cell = p->fixed ? sizeof(xd_fixed) : sizeof(double);
    xd_xtoken_product_args a = xdi_project_args(p, probs);
    a.cells = cells;
    XD_TRY(p->kernels->memory.fill(&p->launch, cells, 0, (size_t)(probs->rows * p->k) * cell));
    return p->kernels->xtoken.product(&p->launch, &a);
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
        XD_TRY(p->kernels->xtoken.settle(&p->launch, p->cells, count, out + row * p->k));
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

XD_PRIVATE xd_result xdi_project(xd_ctx *ctx, const xdi_project_desc *desc, xd_rows probs, double *out) {
    XDI_GIVEN(ctx, ctx, desc);
    xdi_project_call p;
    xd_result result = xdi_project_open(ctx, desc, "probs", &probs, &p);
    if (result == XD_OK && probs.rows > 0 && p.k > 0) result = XDI_CHECK_GIVEN(ctx, out);
    if (result == XD_OK && xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT)
        result = xdi_project_take_cells(&p);
    result = xdi_vocab_agree_rows(p.vocab.tp, result, probs.rows);
    if (result == XD_OK)
        result = p.fixed ? xdi_project_fixed(&p, &probs, out) : xdi_project_rows(&p, &probs, out);
    if (result == XD_OK && p.vocab.tp && !p.fixed)
        result = xd_all_reduce(p.vocab.tp, out, out, probs.rows * p.k, XD_DTYPE_F64, XD_SUM);
    xdi_project_close(&p);
    return result;
}

XD_PRIVATE xd_result xdi_project_backward(xd_ctx *ctx, const xdi_project_desc *desc, const double *weight,
                                          xd_rows gradient) {
    XDI_GIVEN(ctx, ctx, desc);
    xdi_project_call p;
    xd_result result = xdi_project_open(ctx, desc, "gradient", &gradient, &p);
    if (result == XD_OK && gradient.rows > 0 && p.k > 0) result = XDI_CHECK_GIVEN(ctx, weight);
    result = xdi_vocab_agree_rows(p.vocab.tp, result, gradient.rows);
    if (result == XD_OK) {
        xd_xtoken_product_args a = xdi_project_args(&p, &gradient);
        a.weight = weight;
        result = p.kernels->xtoken.product_back(&p.launch, &a);
    }
    xdi_project_close(&p);
    return result;
}
