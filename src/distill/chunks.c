#include <string.h>

static xd_result xdi_chunks_check(xd_ctx *ctx, const xd_chunk_map *map) {
    XDI_REQUIRE(ctx, map->sequences >= 0 && map->held >= 0 && map->chunks >= 0, XD_ERROR_ARGUMENT,
                "%lld sequences of %lld positions in %lld chunks", (long long)map->sequences,
                (long long)map->held, (long long)map->chunks);
    XDI_REQUIRE(ctx, map->ids || map->sequences * map->held == 0, XD_ERROR_ARGUMENT, "no chunk ids");
    for (int64_t i = 0; i < map->sequences * map->held; i++)
        XDI_REQUIRE(ctx, map->ids[i] >= -1 && map->ids[i] < map->chunks, XD_ERROR_ARGUMENT,
                    "chunk id %lld of position %lld is outside [-1, %lld)", (long long)map->ids[i],
                    (long long)i, (long long)map->chunks);
    return XD_OK;
}

static xd_result xdi_chunks_check_rows(xd_ctx *ctx, const xd_chunk_map *map, const xd_rows *rows) {
    XDI_REQUIRE(ctx, xd_ctx_kernels(ctx).device == XD_DEVICE_CPU, XD_ERROR_UNSUPPORTED,
                "chunk sums are computed on the CPU only");
    XDI_REQUIRE(ctx, rows->rows == map->sequences * map->held, XD_ERROR_SHAPE,
                "%lld rows but %lld sequences of %lld positions", (long long)rows->rows,
                (long long)map->sequences, (long long)map->held);
    XDI_REQUIRE(ctx, rows->dtype == XD_DTYPE_F32 || rows->dtype == XD_DTYPE_BF16, XD_ERROR_DTYPE,
                "rows are %s; F32 or BF16 is needed", xd_dtype_name(rows->dtype));
    XDI_REQUIRE(ctx, rows->stride == 0 || rows->stride >= rows->cols, XD_ERROR_SHAPE,
                "rows have stride %lld, less than their %lld columns", (long long)rows->stride,
                (long long)rows->cols);
    return XD_OK;
}

/* The chunk of a row among all B * C, or -1. */
static int64_t xdi_chunks_at(const xd_chunk_map *map, int64_t row) {
    return map->ids[row] < 0 ? -1 : row / map->held * map->chunks + map->ids[row];
}

static xd_result xdi_chunks_count(const xd_chunk_map *map, int64_t *sizes) {
    const int64_t count = map->sequences * map->chunks;
    memset(sizes, 0, (size_t)count * sizeof *sizes);
    for (int64_t row = 0; row < map->sequences * map->held; row++)
        if (map->ids[row] >= 0) sizes[xdi_chunks_at(map, row)]++;
    if (!map->comm || xd_comm_size(map->comm) == 1) return XD_OK;
    return xd_all_reduce(map->comm, sizes, sizes, count, XD_DTYPE_I64, XD_SUM);
}

XD_API xd_result xd_chunk_sizes(xd_ctx *ctx, const xd_chunk_map *map, int64_t *sizes) {
    XDI_TRY(xdi_vocab_agree(NULL, map->comm, xdi_chunks_check(ctx, map)));
    return xdi_chunks_count(map, sizes);
}

XD_API xd_result xd_chunk_sums(xd_ctx *ctx, const xd_chunk_map *map, xd_rows values, double *sums,
                               int64_t *sizes) {
    xd_result result = xdi_chunks_check(ctx, map);
    if (result == XD_OK) result = xdi_chunks_check_rows(ctx, map, &values);
    XDI_TRY(xdi_vocab_agree(NULL, map->comm, result));
    const int64_t n = values.cols, count = map->sequences * map->chunks * n;
    memset(sums, 0, (size_t)count * sizeof *sums);
    for (int64_t row = 0; row < values.rows; row++) {
        const int64_t chunk = xdi_chunks_at(map, row);
        for (int64_t i = 0; i < n && chunk >= 0; i++) sums[chunk * n + i] += xdi_loss_load(&values, row, i);
    }
    if (map->comm && xd_comm_size(map->comm) > 1)
        XDI_TRY(xd_all_reduce(map->comm, sums, sums, count, XD_DTYPE_F64, XD_SUM));
    return xdi_chunks_count(map, sizes);
}

XD_API void xd_chunk_averages(const double *sums, const int64_t *sizes, int64_t chunks, int64_t n,
                              double *averages) {
    for (int64_t i = 0; i < chunks * n; i++)
        averages[i] = sizes[i / n] > 0 ? sums[i] / (double)sizes[i / n] : 0.0;
}

XD_API xd_result xd_chunk_averages_backward(xd_ctx *ctx, const xd_chunk_map *map, const int64_t *sizes,
                                            const double *weight, xd_rows gradient) {
    XDI_TRY(xdi_chunks_check(ctx, map));
    XDI_TRY(xdi_chunks_check_rows(ctx, map, &gradient));
    for (int64_t row = 0; row < gradient.rows; row++) {
        const int64_t chunk = xdi_chunks_at(map, row);
        for (int64_t i = 0; i < gradient.cols; i++)
            xdi_loss_store(&gradient, row, i,
                           chunk < 0 ? 0.0 : weight[chunk * gradient.cols + i] / (double)sizes[chunk]);
    }
    return XD_OK;
}

XD_API void xd_valid_chunks(const int64_t *student_sizes, const int64_t *teacher_sizes, const uint8_t *mask,
                            const uint8_t *exact, int64_t count, uint8_t *valid) {
    for (int64_t i = 0; i < count; i++) {
        const bool both = student_sizes[i] > 0 && teacher_sizes[i] > 0;
        valid[i] = (uint8_t)(both && (!mask || mask[i]) && (!exact || exact[i]));
    }
}
