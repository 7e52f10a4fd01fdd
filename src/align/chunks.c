/* Sums and averages over the chunks of sequences, and the cells of exact sums. */

#include "align/chunks.h"
#include "align/internal.h"
#include "loss/internal.h"

#include <string.h>

static xd_result xdi_chunks_check(xd_ctx *ctx, const xdi_chunk_map *map) {
    XD_REQUIRE(ctx, map->sequences >= 0 && map->held >= 0 && map->chunks >= 0, XD_ERROR_ARGUMENT,
               "%lld sequences of %lld positions in %lld chunks", (long long)map->sequences,
               (long long)map->held, (long long)map->chunks);
    const int64_t most = map->held > map->chunks ? map->held : map->chunks;
    XD_REQUIRE(ctx, most == 0 || map->sequences <= INT64_MAX / most, XD_ERROR_ARGUMENT,
               "%lld sequences of %lld positions in %lld chunks are too many", (long long)map->sequences,
               (long long)map->held, (long long)map->chunks);
    XD_REQUIRE(ctx, map->ids || map->sequences * map->held == 0, XD_ERROR_ARGUMENT, "no chunk ids");
    for (int64_t i = 0; i < map->sequences * map->held; i++)
        XD_REQUIRE(ctx, map->ids[i] >= -1 && map->ids[i] < map->chunks, XD_ERROR_ARGUMENT,
                   "chunk id %lld of position %lld is outside [-1, %lld)", (long long)map->ids[i],
                   (long long)i, (long long)map->chunks);
    return XD_OK;
}

static xd_result xdi_chunks_check_rows(xd_ctx *ctx, const xdi_chunk_map *map, const char *name,
                                       const xd_rows *rows) {
    XD_REQUIRE(ctx, rows->rows == map->sequences * map->held, XD_ERROR_SHAPE,
               "%s has %lld rows but %lld sequences of %lld positions", name, (long long)rows->rows,
               (long long)map->sequences, (long long)map->held);
    return xdi_rows_check(ctx, name, rows);
}

/* Sums of all chunks; their bytes, as exact sums too, fit into a size. */
static xd_result xdi_chunks_check_cells(xd_ctx *ctx, const xdi_chunk_map *map, const xd_rows *rows,
                                        int64_t *cells) {
    const int64_t count = map->sequences * map->chunks;
    XD_REQUIRE(ctx, rows->cols == 0 || count <= INT64_MAX / 64 / rows->cols, XD_ERROR_ARGUMENT,
               "%lld sums of %lld columns are too many", (long long)count, (long long)rows->cols);
    *cells = count * rows->cols;
    return XD_OK;
}

static xd_result xdi_chunks_count(const xdi_chunk_map *map, int64_t *sizes) {
    const int64_t count = map->sequences * map->chunks;
    memset(sizes, 0, (size_t)count * sizeof *sizes);
    for (int64_t row = 0; row < map->sequences * map->held; row++)
        if (map->ids[row] >= 0) sizes[row / map->held * map->chunks + map->ids[row]]++;
    if (!map->comm || xd_comm_size(map->comm) == 1) return XD_OK;
    return xd_all_reduce(map->comm, sizes, sizes, count, XD_DTYPE_I64, XD_SUM);
}

XD_PRIVATE xd_result xdi_chunk_sizes(xd_ctx *ctx, const xdi_chunk_map *map, int64_t *sizes) {
    XDI_GIVEN(ctx, ctx, map);
    xd_result result = xdi_chunks_check(ctx, map);
    const int64_t count = result == XD_OK ? map->sequences * map->chunks : 0;
    if (count > 0) result = XDI_CHECK_GIVEN(ctx, sizes);
    XD_TRY(xdi_vocab_agree_rows(map->comm, result, count));
    return xdi_chunks_count(map, sizes);
}

static xd_chunk_args xdi_chunks_args(const xdi_chunk_map *map, const xd_rows *rows) {
    xd_chunk_args a;
    memset(&a, 0, sizeof a);
    a.rows = *rows;
    a.ids = map->ids;
    a.held = map->held;
    a.chunks = map->chunks;
    a.count = map->sequences * map->chunks;
    return a;
}

/* Sums over the ranks in a->out, doubles or in INVARIANT mode cells. */
static xd_result xdi_chunks_sum(xd_ctx *ctx, xd_comm *comm, const xd_chunk_args *a) {
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    const xd_launch launch = xd_ctx_launch(ctx);
    const int64_t cells = a->count * a->rows.cols, words = a->fixed ? 2 * cells : cells;
    XD_TRY(kernels->memory.fill(&launch, a->out, 0, (size_t)words * sizeof *a->out));
    XD_TRY(kernels->xtoken.chunk_sums(&launch, a));
    if (!comm || xd_comm_size(comm) == 1) return XD_OK;
    return xd_all_reduce(comm, a->out, a->out, words, a->fixed ? XD_DTYPE_I64 : XD_DTYPE_F64, XD_SUM);
}

XD_PRIVATE xd_result xdi_chunk_sums(xd_ctx *ctx, const xdi_chunk_map *map, xd_rows values, double *sums,
                                    int64_t *sizes) {
    XDI_GIVEN(ctx, ctx, map);
    const bool fixed = xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT;
    int64_t cells = 0;
    xd_chunk_args a;
    xd_result result = xdi_chunks_check(ctx, map);
    memset(&a, 0, sizeof a);
    if (result == XD_OK) result = xdi_chunks_check_rows(ctx, map, "values", &values);
    if (result == XD_OK) result = xdi_chunks_check_cells(ctx, map, &values, &cells);
    if (result == XD_OK && map->sequences * map->chunks > 0) result = XDI_CHECK_GIVEN(ctx, sizes);
    if (result == XD_OK && cells > 0) result = XDI_CHECK_GIVEN(ctx, sums);
    if (result == XD_OK) a = xdi_chunks_args(map, &values);
    if (a.count > 0) result = XDI_CHECK_GIVEN(ctx, sums, sizes);
    a.fixed = fixed;
    a.out = fixed ? NULL : sums;
    if (result == XD_OK && fixed) {
        a.out = (double *)xdi_call_memory(ctx, ((size_t)cells + 1) * sizeof(xd_fixed));
        if (!a.out) result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld exact sums", (long long)cells);
    }
    result = xdi_vocab_agree_rows(map->comm, result, cells);
    if (result == XD_OK) result = xdi_chunks_sum(ctx, map->comm, &a);
    if (result == XD_OK && fixed) {
        const xd_launch launch = xd_ctx_launch(ctx);
        result = xd_ctx_kernels(ctx)->xtoken.settle(&launch, a.out, cells, sums);
    }
    if (fixed) xdi_call_memory_done(ctx, a.out);
    return result == XD_OK ? xdi_chunks_count(map, sizes) : result;
}

XD_PRIVATE xd_result xdi_chunk_averages(xd_ctx *ctx, const double *sums, const int64_t *sizes, int64_t chunks,
                                        int64_t n, double *averages) {
    XDI_GIVEN(ctx, ctx);
    XDI_GIVEN_LIST(ctx, sums, chunks);
    XDI_GIVEN_LIST(ctx, sizes, chunks);
    XDI_GIVEN_LIST(ctx, averages, chunks);
    const xd_launch launch = xd_ctx_launch(ctx);
    xd_chunk_args a;
    memset(&a, 0, sizeof a);
    a.rows.cols = n;
    a.count = chunks;
    a.sizes = sizes;
    a.sums = sums;
    a.out = averages;
    XD_REQUIRE(ctx, chunks >= 0 && n >= 0, XD_ERROR_ARGUMENT, "%lld chunks of %lld columns",
               (long long)chunks, (long long)n);
    return xd_ctx_kernels(ctx)->xtoken.chunk_averages(&launch, &a);
}

XD_PRIVATE xd_result xdi_chunk_averages_backward(xd_ctx *ctx, const xdi_chunk_map *map, const int64_t *sizes,
                                                 const double *weight, xd_rows gradient) {
    XDI_GIVEN(ctx, ctx, map);
    const xd_launch launch = xd_ctx_launch(ctx);
    XD_TRY(xdi_chunks_check(ctx, map));
    XD_TRY(xdi_chunks_check_rows(ctx, map, "gradient", &gradient));
    xd_chunk_args a = xdi_chunks_args(map, &gradient);
    if (a.count > 0) XD_TRY(XDI_CHECK_GIVEN(ctx, sizes, weight));
    a.sizes = sizes;
    a.weight = weight;
    return xd_ctx_kernels(ctx)->xtoken.chunk_spread(&launch, &a);
}

XD_PRIVATE void xdi_valid_chunks(const int64_t *student_sizes, const int64_t *teacher_sizes,
                                 const uint8_t *mask, const uint8_t *exact, int64_t count, uint8_t *valid) {
    for (int64_t i = 0; i < count; i++) {
        const bool both = student_sizes[i] > 0 && teacher_sizes[i] > 0;
        valid[i] = (uint8_t)(both && (!mask || mask[i]) && (!exact || exact[i]));
    }
}
