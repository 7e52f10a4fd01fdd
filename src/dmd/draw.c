/* Random numbers for rows of samples. */

#include "dmd/draw.h"
#include "dmd/internal.h"

static xd_result xdi_draw_check(xd_ctx *ctx, const xd_draw_desc *d) {
    const int64_t most = INT64_C(1) << 42, samples = INT64_C(1) << 32;
    XD_REQUIRE(ctx, d->first >= 0, XD_ERROR_ARGUMENT, "the first element is number %lld",
               (long long)d->first);
    XD_REQUIRE(ctx, d->first <= most && d->out.cols <= most - d->first, XD_ERROR_SHAPE,
               "%lld elements from %lld on; random numbers are for %lld", (long long)d->out.cols,
               (long long)d->first, (long long)most);
    XD_REQUIRE(ctx, d->out.rows <= samples - (int64_t)d->random.sample, XD_ERROR_ARGUMENT,
               "%lld samples from sample %lld: they are numbered from 0 to 2^32 - 1", (long long)d->out.rows,
               (long long)d->random.sample);
    return XD_OK;
}

XD_API xd_result xd_draw_rows(xd_ctx *ctx, const xd_draw_desc *desc) {
    XDI_GIVEN(ctx, ctx, desc);
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    const xd_launch launch = xd_ctx_launch(ctx);
    xd_draw_desc d = *desc;
    XD_TRY(xdi_mix_check_rows(ctx, &d.out, "out", &d.out));
    XD_TRY(xdi_draw_check(ctx, &d));
    if (d.out.rows == 0 || d.out.cols == 0) return XD_OK;
    XD_REQUIRE(ctx, kernels->dmd.draw, XD_ERROR_UNSUPPORTED, "kernels \"%.80s\" draw no random numbers",
               kernels->name);
    return kernels->dmd.draw(&launch, &d);
}
