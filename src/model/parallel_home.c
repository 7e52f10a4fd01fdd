/* Where the parts of a rank are kept: in memory of the model's context, or of another one on the host (CPU offload). */

#include "base/internal.h"
#include "kernel/kernels.h"
#include "model/internal.h"

XD_PRIVATE xd_result xdi_parallel_check_home(const xd_parallel *p) {
    const xd_reduction mine = xd_ctx_settings(p->ctx)->reduction;
    if (!p->offloaded) return XD_OK;
    const xd_reduction other = xd_ctx_settings(p->home)->reduction;
    XD_REQUIRE(p->ctx, xd_ctx_kernels(p->home)->device == XD_DEVICE_CPU, XD_ERROR_ARGUMENT,
               "parts kept on the host: the context for them has a device of type %d, not %d",
               (int)xd_ctx_kernels(p->home)->device, (int)XD_DEVICE_CPU);
    XD_REQUIRE(p->ctx, mine == other, XD_ERROR_ARGUMENT,
               "parts kept on the host: the context for them has reduction mode %d, the model's %d",
               (int)other, (int)mine);
    return XD_OK;
}

XD_PRIVATE bool xdi_parallel_assembles(const xd_parallel *p) {
    return p->ranks > 1 || p->offloaded;
}

XD_PRIVATE xd_result xdi_parallel_bring_home(const xd_parallel *p, void *to, const void *from, size_t bytes) {
    const xd_launch launch = xd_ctx_launch(p->ctx);
    if (bytes == 0) return XD_OK;
    if (p->offloaded) return xd_read(p->ctx, to, from, bytes);
    return xd_ctx_kernels(p->ctx)->memory.copy(&launch, to, from, bytes, XD_COPY_ON_DEVICE);
}

XD_PRIVATE xd_result xdi_parallel_let_go(const xd_parallel *p) {
    const xd_launch launch = xd_ctx_launch(p->ctx);
    return p->offloaded ? xd_ctx_kernels(p->ctx)->memory.synchronize(&launch) : XD_OK;
}

XD_PRIVATE xd_result xdi_parallel_take_out(const xd_parallel *p, void *to, const void *from, size_t bytes) {
    const xd_launch launch = xd_ctx_launch(p->ctx);
    if (bytes == 0) return XD_OK;
    return xd_ctx_kernels(p->ctx)->memory.copy(&launch, to, from, bytes,
                                               p->offloaded ? XD_COPY_TO_DEVICE : XD_COPY_ON_DEVICE);
}
