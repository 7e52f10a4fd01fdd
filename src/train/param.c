/* Questions about parameters and steps that optimizers, averages and clipping share. */

#include "kernel/optimizer_scalar.h"
#include "train/internal.h"

#include <stdio.h>

XD_PRIVATE bool xdi_train_on_device(const xd_ctx *ctx) {
    return xd_ctx_kernels(ctx)->device != XD_DEVICE_CPU;
}

XD_PRIVATE bool xdi_train_refused(const xd_ctx *ctx, const xd_status *status) {
    return !xdi_train_on_device(ctx) && xd_status_refuses(status);
}

XD_PRIVATE xd_launch xdi_train_launch(xd_ctx *ctx, const xd_status *status) {
    xd_launch launch = xd_ctx_launch(ctx);
    launch.status = (xd_status *)status; /* kernels only read it */
    return launch;
}

XD_PRIVATE xd_memory_bytes xdi_train_with_list(const xd_ctx *ctx, xd_memory_bytes bytes, int64_t arrays) {
    const xd_optimizer_kernels *kernels = &xd_ctx_kernels(ctx)->optimizer;
    if (!kernels->list_create || !kernels->list_bytes) return bytes;
    const xd_memory_bytes list = kernels->list_bytes(arrays);
    bytes.host += list.host;
    bytes.device += list.device;
    return bytes;
}

XD_PRIVATE xd_dtype xdi_train_gradient_dtype(const xd_param *param) {
    return param->gradient_dtype == XD_DTYPE_NONE ? XD_DTYPE_F32 : param->gradient_dtype;
}

XD_PRIVATE bool xdi_train_takes(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F16;
}

XD_PRIVATE bool xdi_train_owns(const xd_param *param) {
    return !param->frozen && !param->buffer;
}

XD_PRIVATE bool xdi_train_has_gradient(const xd_param *param) {
    return param->gradient && (!param->state || *param->state != XD_GRADIENT_NONE);
}

XD_PRIVATE bool xdi_train_steps(const xd_param *param) {
    return xdi_train_has_gradient(param) && xdi_train_owns(param);
}

XD_PRIVATE xd_result xdi_train_check_summed(xd_ctx *ctx, const xd_param *params, int64_t count,
                                            const char *call) {
    for (int64_t i = 0; i < count; i++)
        XD_REQUIRE(
            ctx, !params[i].state || *params[i].state != XD_GRADIENT_WAITS || !xdi_train_owns(&params[i]),
            XD_ERROR_STATE,
            "%s before xd_parallel_reduce: parameter %lld of %lld, \"%.80s\", has backward passes that "
            "no rank has summed",
            call, (long long)i, (long long)count, params[i].name ? params[i].name : "(unnamed)");
    return XD_OK;
}

XD_PRIVATE const char *xdi_train_changed(const xd_param *then, const xd_param *now, char text[XDI_CHANGED]) {
    const struct {
        const char *name;
        int64_t then, now;
    } fields[] = { { "count", then->count, now->count },    { "dtype", then->dtype, now->dtype },
                   { "buffer", then->buffer, now->buffer }, { "no_decay", then->no_decay, now->no_decay },
                   { "group", then->group, now->group },    { "first", then->first, now->first },
                   { "frozen", then->frozen, now->frozen } };
    const size_t count = sizeof fields / sizeof *fields;
    size_t i = 0;
    while (i < count && fields[i].then == fields[i].now) i++;
    if (then->value != now->value || i == count)
        snprintf(text, XDI_CHANGED, "value is another array now");
    else
        snprintf(text, XDI_CHANGED, "%s was %lld and is %lld%s", fields[i].name, (long long)fields[i].then,
                 (long long)fields[i].now, i == count - 1 ? ": see xd_optimizer_thaw" : "");
    return text;
}
