/* Latent pictures as rows of tokens, and back. */

#include "dmd/pack.h"
#include "base/fail.h"
#include "base/internal.h"
#include "kernel/kernels.h"

#include <string.h>

static xd_result xdi_pack_check_shape(xd_ctx *ctx, const xd_latents *s) {
    size_t elements = 1;
    XD_REQUIRE(ctx, s->samples >= 0 && s->channels >= 0 && s->height >= 0 && s->width >= 0, XD_ERROR_SHAPE,
               "latents [%lld, %lld, %lld, %lld]", (long long)s->samples, (long long)s->channels,
               (long long)s->height, (long long)s->width);
    XD_REQUIRE(ctx, s->height % 2 == 0 && s->width % 2 == 0, XD_ERROR_SHAPE,
               "latents of height %lld and width %lld; both must be even", (long long)s->height,
               (long long)s->width);
    const int64_t sizes[4] = { s->samples, s->channels, s->height, s->width };
    for (int i = 0; i < 4; i++)
        XD_REQUIRE(ctx,
                   xdi_size_multiply(elements, sizes[i] > 0 ? (size_t)sizes[i] : 1, &elements) &&
                       elements <= SIZE_MAX / 16,
                   XD_ERROR_SHAPE, "latents [%lld, %lld, %lld, %lld] do not fit into memory",
                   (long long)s->samples, (long long)s->channels, (long long)s->height, (long long)s->width);
    XD_REQUIRE(ctx, s->dtype == XD_DTYPE_F32 || s->dtype == XD_DTYPE_BF16 || s->dtype == XD_DTYPE_F16,
               XD_ERROR_DTYPE, "latents of %s; F32, BF16 and F16 are possible", xd_dtype_name(s->dtype));
    return XD_OK;
}

static xd_result xdi_pack_check(xd_ctx *ctx, const xd_latents *s, const void *latents,
                                const xd_rows *packed) {
    XD_TRY(xdi_pack_check_shape(ctx, s));
    const int64_t tokens = s->height / 2 * (s->width / 2), rows = s->samples * tokens, cols = 4 * s->channels;
    XD_REQUIRE(ctx, packed->dtype == s->dtype, XD_ERROR_DTYPE, "latents of %s and rows of %s",
               xd_dtype_name(s->dtype), xd_dtype_name(packed->dtype));
    XD_REQUIRE(ctx, packed->cols % 4 == 0, XD_ERROR_SHAPE,
               "rows of %lld numbers, which 4 does not divide; %lld channels have %lld",
               (long long)packed->cols, (long long)s->channels, (long long)cols);
    XD_REQUIRE(ctx, packed->rows == rows && packed->cols == cols, XD_ERROR_SHAPE,
               "rows are [%lld, %lld] but [%lld, %lld] is expected: %lld samples of %lld tokens",
               (long long)packed->rows, (long long)packed->cols, (long long)rows, (long long)cols,
               (long long)s->samples, (long long)tokens);
    XD_REQUIRE(ctx, packed->stride == 0 || packed->stride >= cols, XD_ERROR_SHAPE,
               "rows have stride %lld, less than their %lld columns", (long long)packed->stride,
               (long long)cols);
    if (rows == 0 || cols == 0) return XD_OK;
    XD_REQUIRE(ctx, packed->stride <= INT64_MAX / 16 / rows, XD_ERROR_SHAPE,
               "%lld rows with stride %lld do not fit into memory", (long long)rows,
               (long long)packed->stride);
    XD_REQUIRE(ctx, latents && packed->data, XD_ERROR_ARGUMENT, "no data of %s of %lld samples",
               latents ? "rows" : "latents", (long long)s->samples);
    XD_REQUIRE(ctx, latents != packed->data, XD_ERROR_ARGUMENT,
               "latents and rows of %lld samples at one address", (long long)s->samples);
    return XD_OK;
}

/* Steps of both arrays along b, c, i, p, j, q; latents are the source. */
static xd_copy xdi_pack_copy(const xd_latents *s, const xd_rows *packed) {
    const int64_t i = s->height / 2, j = s->width / 2, row = packed->stride ? packed->stride : packed->cols;
    const int64_t extent[6] = { s->samples, s->channels, i, 2, j, 2 };
    const int64_t spatial[6] = {
        s->channels * s->height * s->width, s->height * s->width, 2 * s->width, s->width, 2, 1
    };
    const int64_t token[6] = { i * j * row, 4, j * row, 2, row, 1 };
    xd_copy copy;
    memset(&copy, 0, sizeof copy);
    copy.ndim = 6;
    memcpy(copy.extent, extent, sizeof extent);
    memcpy(copy.src_stride, spatial, sizeof spatial);
    memcpy(copy.dst_stride, token, sizeof token);
    return copy;
}

static xd_result xdi_pack_run(xd_ctx *ctx, const xd_copy *copy, const void *from, void *to, xd_dtype dtype) {
    const xd_launch launch = xd_ctx_launch(ctx);
    for (int d = 0; d < copy->ndim; d++)
        if (copy->extent[d] == 0) return XD_OK;
    return xd_ctx_kernels(ctx)->copies(&launch, copy, 1, from, to, xd_dtype_size(dtype));
}

XD_API xd_result xd_latent_pack(xd_ctx *ctx, const xd_latents *shape, const void *latents, xd_rows packed) {
    XDI_GIVEN(ctx, ctx, shape);
    XD_TRY(xdi_pack_check(ctx, shape, latents, &packed));
    const xd_copy copy = xdi_pack_copy(shape, &packed);
    return xdi_pack_run(ctx, &copy, latents, packed.data, shape->dtype);
}

XD_API xd_result xd_latent_unpack(xd_ctx *ctx, const xd_latents *shape, xd_rows packed, void *latents) {
    XDI_GIVEN(ctx, ctx, shape);
    XD_TRY(xdi_pack_check(ctx, shape, latents, &packed));
    const xd_copy there = xdi_pack_copy(shape, &packed);
    xd_copy back = there;
    memcpy(back.src_stride, there.dst_stride, sizeof back.src_stride);
    memcpy(back.dst_stride, there.src_stride, sizeof back.dst_stride);
    return xdi_pack_run(ctx, &back, packed.data, latents, shape->dtype);
}
