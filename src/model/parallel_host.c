/* Where the parts of a rank are kept: in memory of the model's context, or of another one on the host (CPU offload). */

#include "base/internal.h"
#include "kernel/kernels.h"
#include "model/place_internal.h"

XD_PRIVATE xd_result xdi_place_check_host(const xdi_place *place) {
    const xd_reduction mine = xd_ctx_settings(place->ctx)->reduction;
    if (!place->on_host) return XD_OK;
    const xd_reduction other = xd_ctx_settings(place->parts_ctx)->reduction;
    XD_REQUIRE(place->ctx, xd_ctx_kernels(place->parts_ctx)->device == XD_DEVICE_CPU, XD_ERROR_ARGUMENT,
               "parts kept on the host: the context for them has a device of type %d, not %d",
               (int)xd_ctx_kernels(place->parts_ctx)->device, (int)XD_DEVICE_CPU);
    XD_REQUIRE(place->ctx, mine == other, XD_ERROR_ARGUMENT,
               "parts kept on the host: the context for them has reduction mode %d, the model's %d",
               (int)other, (int)mine);
    return XD_OK;
}

XD_PRIVATE bool xdi_place_assembles(const xdi_place *place) {
    return place->ranks > 1 || place->on_host;
}

XD_PRIVATE xd_result xdi_parts_write(const xdi_place *place, void *to, const void *from, size_t bytes) {
    const xd_launch launch = xd_ctx_launch(place->ctx);
    if (bytes == 0) return XD_OK;
    if (place->on_host) return xd_read(place->ctx, to, from, bytes);
    return xd_ctx_kernels(place->ctx)->memory.copy(&launch, to, from, bytes, XD_COPY_ON_DEVICE);
}

XD_PRIVATE xd_result xdi_parts_settle(const xdi_place *place) {
    const xd_launch launch = xd_ctx_launch(place->ctx);
    return place->on_host ? xd_ctx_kernels(place->ctx)->memory.synchronize(&launch) : XD_OK;
}

XD_PRIVATE xd_result xdi_parts_read(const xdi_place *place, void *to, const void *from, size_t bytes) {
    const xd_launch launch = xd_ctx_launch(place->ctx);
    if (bytes == 0) return XD_OK;
    return xd_ctx_kernels(place->ctx)
        ->memory.copy(&launch, to, from, bytes, place->on_host ? XD_COPY_TO_DEVICE : XD_COPY_ON_DEVICE);
}
