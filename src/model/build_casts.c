/* Types in which stages take and put out values, and policies of precision by name. */

#include "kernel/kernels.h"
#include "model/build_internal.h"

#include <string.h>

/* ---- casts ---- */

/* The type that a model computes in: that of its weights, or that in which they are shown; NONE -> nothing says another. */
static xd_dtype xdi_build_dtype(const xd_build_desc *d) {
    if (d->precision.f16 || d->precision.bf16) return d->precision.f16 ? XD_DTYPE_F16 : XD_DTYPE_BF16;
    if (d->wrap.fsdp) return d->wrap.fsdp->view_dtype;
    return d->wrap.ddp ? d->wrap.ddp->view_dtype : XD_DTYPE_NONE;
}

XD_PRIVATE void xdi_stage_set_casts(const xd_build_desc *d, xd_stage *stage) {
    const xd_dtype computes = xdi_build_dtype(d), input = d->precision.input_dtype,
                   output = d->precision.output_dtype;
    stage->input_dtype = stage->output_dtype = XD_DTYPE_NONE;
    if (stage->place.first) stage->input_dtype = input ? input : computes;
    if (stage->place.last) stage->output_dtype = output ? output : computes ? XD_DTYPE_F32 : XD_DTYPE_NONE;
}

static bool xdi_stage_is_cast(const xd_stage_values *v, xd_dtype to, bool inputs) {
    const bool half = v->dtype == XD_DTYPE_BF16 || v->dtype == XD_DTYPE_F16;
    return to != XD_DTYPE_NONE && v->dtype != to && (v->dtype == XD_DTYPE_F32 || (half && !inputs));
}

static xd_result xdi_stage_cast(const xd_stage *stage, xd_dtype to, bool inputs, xd_stage_values *list,
                                int64_t count) {
    xd_ctx *ctx = stage->model ? stage->model->ctx : NULL;
    XDI_GIVEN(ctx, stage->model);
    XD_REQUIRE(ctx, count >= 0 && (list || count == 0), XD_ERROR_ARGUMENT, "%lld values at %p",
               (long long)count, (const void *)list);
    for (int64_t i = 0; i < count; i++) {
        const xd_stage_values *v = &list[i];
        XD_REQUIRE(ctx, v->count >= 0 && (v->values || v->count == 0), XD_ERROR_ARGUMENT,
                   "value %lld of %lld: %lld elements at %p", (long long)i, (long long)count,
                   (long long)v->count, v->values);
        XD_REQUIRE(ctx, v->room || v->count == 0 || !xdi_stage_is_cast(v, to, inputs), XD_ERROR_ARGUMENT,
                   "value %lld of %lld becomes %s, and there is no room for its %lld elements", (long long)i,
                   (long long)count, xd_dtype_name(to), (long long)v->count);
    }
    for (int64_t i = 0; i < count; i++) {
        xd_stage_values *v = &list[i];
        if (!xdi_stage_is_cast(v, to, inputs)) continue;
        XD_TRY(xd_cast(ctx, v->room, to, v->values, v->dtype, v->count));
        v->values = v->room;
        v->dtype = to;
    }
    return XD_OK;
}

XD_API xd_result xd_stage_cast(const xd_stage *stage, xd_stage_end end, xd_stage_values *list,
                               int64_t count) {
    XDI_GIVEN(NULL, stage);
    const bool inputs = end == XD_STAGE_INPUTS;
    return xdi_stage_cast(stage, inputs ? stage->input_dtype : stage->output_dtype, inputs, list, count);
}

/* ---- policies ---- */

/* A name of a dtype, as PyTorch or we spell it. */
typedef struct xdi_policy_name {
    const char *name;
    xd_dtype dtype;
} xdi_policy_name;

static const xdi_policy_name xdi_policy_names[] = {
    { "bfloat16", XD_DTYPE_BF16 }, { "bf16", XD_DTYPE_BF16 }, { "float16", XD_DTYPE_F16 },
    { "fp16", XD_DTYPE_F16 },      { "half", XD_DTYPE_F16 },  { "float32", XD_DTYPE_F32 },
    { "fp32", XD_DTYPE_F32 },      { "float", XD_DTYPE_F32 }, { "float64", XD_DTYPE_F64 },
    { "double", XD_DTYPE_F64 },    { "int8", XD_DTYPE_I8 },   { "int16", XD_DTYPE_I16 },
    { "short", XD_DTYPE_I16 },     { "int32", XD_DTYPE_I32 }, { "int", XD_DTYPE_I32 },
    { "int64", XD_DTYPE_I64 },     { "long", XD_DTYPE_I64 },  { "uint8", XD_DTYPE_U8 },
    { "bool", XD_DTYPE_BOOL }
};

static bool xdi_policy_is_called(const char *name, const char *lower) {
    for (; *name && *lower; name++, lower++)
        if ((*name >= 'A' && *name <= 'Z' ? *name - 'A' + 'a' : *name) != *lower) return false;
    return !*name && !*lower;
}

static xd_result xdi_policy_dtype(xd_ctx *ctx, const char *what, const char *name, xd_dtype *out) {
    xd_dtype found = XD_DTYPE_NONE;
    if (!name || !*name) return XD_OK; /* the default is there */
    for (size_t i = 0; i < sizeof xdi_policy_names / sizeof xdi_policy_names[0]; i++)
        if (xdi_policy_is_called(name, xdi_policy_names[i].name)) found = xdi_policy_names[i].dtype;
    XD_REQUIRE(ctx, found != XD_DTYPE_NONE, XD_ERROR_ARGUMENT, "%s is \"%.40s\": no dtype is called so", what,
               name);
    XD_REQUIRE(ctx, found == XD_DTYPE_BF16 || found == XD_DTYPE_F16 || found == XD_DTYPE_F32, XD_ERROR_DTYPE,
               "%s is \"%.40s\": a policy is of float32, bfloat16 or float16", what, name);
    *out = found;
    return XD_OK;
}

static bool xdi_policy_is_named(const xd_policy_desc *d) {
    return (d->param_dtype && *d->param_dtype) || (d->reduce_dtype && *d->reduce_dtype) ||
           (d->output_dtype && *d->output_dtype);
}

XD_API xd_result xd_policy_find(xd_ctx *ctx, const xd_policy_desc *desc, xd_policy *out) {
    xd_dtype param = XD_DTYPE_BF16, reduce = XD_DTYPE_F32, output = XD_DTYPE_BF16;
    xd_policy_desc d;
    xd_policy policy;
    XDI_GIVEN_IN_PLAN(ctx, ctx, out);
    memset(&d, 0, sizeof d);
    memset(&policy, 0, sizeof policy);
    if (desc) d = *desc;
    XD_TRY(xdi_policy_dtype(ctx, "param_dtype", d.param_dtype, &param));
    XD_TRY(xdi_policy_dtype(ctx, "reduce_dtype", d.reduce_dtype, &reduce));
    XD_TRY(xdi_policy_dtype(ctx, "output_dtype", d.output_dtype, &output));
    XD_REQUIRE(ctx, reduce == XD_DTYPE_F32, XD_ERROR_UNSUPPORTED,
               "reduce_dtype is \"%.40s\": gradients are summed in float32", d.reduce_dtype);
    const bool spared = d.spectral_norm && !xdi_policy_is_named(&d);
    if (spared && !d.disabled)
        xd_log(
            ctx, XD_LOG_INFO,
            "a model with spectral norm stays float32, since no dtype is named: name param_dtype to show its "
            "weights as %s",
            xd_dtype_name(param));
    policy.applied = !d.disabled && !spared;
    if (policy.applied) {
        policy.fsdp.sent_dtype = policy.fsdp.view_dtype = policy.ddp.view_dtype = param;
        policy.precision.input_dtype = param;
        policy.precision.output_dtype = output;
    }
    *out = policy;
    return XD_OK;
}
