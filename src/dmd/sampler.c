/* Samples from noise. A sampler is a distillation that has one network, in the teacher's place. */

#include "base/internal.h"
#include "dmd/internal.h"
#include "dmd/state.h"

#include <math.h>
#include <string.h>

struct xd_sampler {
    xd_dmd d;
    xd_sampler_kind kind;
    void *slope, *next_slope; /* HEUN: dx/dt, as `input` */
};

/* ---- settings ---- */

XD_API xd_sampler_desc xd_sampler_defaults(void) {
    xd_sampler_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.schedule = xd_noise_defaults(XD_NOISE_FLOW);
    desc.guidance_scale = 1.0;
    desc.dtype = XD_DTYPE_F32;
    return desc;
}

XD_API xd_sampler_desc xd_sampler_of_student(const xd_dmd_desc *desc) {
    xd_sampler_desc s = xd_sampler_defaults();
    s.network = desc->networks[XD_DMD_STUDENT];
    s.schedule = desc->schedule;
    s.v_is_flow = desc->v_is_flow;
    s.network_scale = desc->network_scale;
    s.network_dtype = desc->network_dtype;
    s.list_dtype = desc->student_times.dtype == XD_DTYPE_F32 ? XD_DTYPE_F32 : XD_DTYPE_NONE;
    s.kind = desc->rungs.fresh_noise ? XD_SAMPLER_SDE : XD_SAMPLER_ODE;
    s.steps = desc->rungs.steps;
    s.list = desc->rungs.list;
    s.samples = desc->sizes.samples;
    s.elements = desc->sizes.elements;
    s.whole_elements = desc->sizes.whole_elements;
    s.first_element = desc->sizes.first_element;
    s.dtype = desc->sizes.dtype;
    s.seed = desc->seed;
    return s;
}

static bool xdi_sampler_has_slope(xd_sampler_kind kind) {
    return kind == XD_SAMPLER_EULER || kind == XD_SAMPLER_HEUN;
}

/* Every time but the last is one at which the prediction is read. */
static xd_result xdi_sampler_check_list(xd_ctx *ctx, const xd_sampler_desc *s) {
    static const char *const names[] = { "ODE", "SDE", "EULER", "HEUN" };
    XD_REQUIRE(ctx, s->kind >= XD_SAMPLER_ODE && s->kind <= XD_SAMPLER_HEUN, XD_ERROR_ARGUMENT,
               "a sampler of kind %d", (int)s->kind);
    XD_REQUIRE(ctx, s->steps >= 1 && s->list, XD_ERROR_ARGUMENT, "a sampler of %d steps%s", s->steps,
               s->list ? "" : " without a list of times");
    XD_REQUIRE(ctx, s->kind != XD_SAMPLER_SDE || s->steps <= XDI_DMD_FRESH_STEPS, XD_ERROR_ARGUMENT,
               "new noise between %d times; there are numbers for %d", s->steps, XDI_DMD_FRESH_STEPS);
    XD_TRY(xdi_noise_check_steps(ctx, &s->schedule, s->steps, s->list, (int64_t)s->steps + 1));
    if (s->list_dtype == XD_DTYPE_F32) XD_TRY(xdi_noise_check_list_f32(ctx, s->list, (int64_t)s->steps + 1));
    for (int i = 0; i < s->steps; i++) {
        xd_noise_level level = { 0.0, 0.0, 0.0, 0.0 };
        XD_TRY(xdi_noise_level_at(ctx, &s->schedule, s->list[i], &level));
        XD_REQUIRE(ctx,
                   !xdi_sampler_has_slope(s->kind) ||
                       (isfinite(level.alpha_rate) && isfinite(level.sigma_rate)),
                   XD_ERROR_ARGUMENT, "sampler %s under a schedule (kind %d) that has no rates at time %g",
                   names[s->kind], (int)s->schedule.kind, s->list[i]);
    }
    return XD_OK;
}

static xd_result xdi_sampler_check_guidance(xd_ctx *ctx, const xd_sampler_desc *s) {
    const xd_guidance *g = &s->network.guidance;
    XD_REQUIRE(ctx, !g->on, XD_ERROR_ARGUMENT,
               "a sampler's network with guidance by %g; a sampler has guidance_scale instead", g->scale);
    XD_REQUIRE(ctx, !s->guided || isfinite(s->guidance_scale), XD_ERROR_ARGUMENT, "guidance by %g",
               s->guidance_scale);
    XD_REQUIRE(ctx, g->rescale >= 0.0 && g->rescale <= 1.0, XD_ERROR_ARGUMENT,
               "guidance of a sampler with rescale %g, which is outside [0, 1]", g->rescale);
    XD_REQUIRE(ctx, s->guided || g->rescale == 0.0, XD_ERROR_ARGUMENT,
               "rescale %g of a sampler, which has no guidance", g->rescale);
    return XD_OK;
}

/* The whole sample is asked for only where something depends on it. */
static xd_result xdi_sampler_check_sizes(xd_ctx *ctx, const xd_sampler_desc *s) {
    const int64_t whole = s->whole_elements ? s->whole_elements : s->elements;
    XD_REQUIRE(ctx, s->samples > 0 && s->samples <= INT32_MAX, XD_ERROR_ARGUMENT, "a sampler of %lld samples",
               (long long)s->samples);
    XD_REQUIRE(ctx,
               s->elements >= 0 && s->elements <= INT64_MAX / 4096 / s->samples && s->first_element >= 0 &&
                   s->first_element <= INT64_MAX - s->elements,
               XD_ERROR_ARGUMENT, "%lld samples of %lld elements from %lld on", (long long)s->samples,
               (long long)s->elements, (long long)s->first_element);
    XD_REQUIRE(ctx,
               (s->network.guidance.rescale == 0.0 && s->whole_elements == 0) ||
                   (whole > 0 && s->elements <= whole && s->first_element <= whole - s->elements),
               XD_ERROR_ARGUMENT, "elements %lld to %lld of samples of %lld", (long long)s->first_element,
               (long long)(s->first_element + s->elements - 1), (long long)whole);
    return XD_OK;
}

static xd_result xdi_sampler_check(xd_ctx *ctx, const xd_sampler_desc *s) {
    const xd_dtype dtype = s->network_dtype ? s->network_dtype : XD_DTYPE_F32;
    XD_TRY(xdi_noise_check(ctx, &s->schedule));
    XD_REQUIRE(ctx, s->network.forward, XD_ERROR_ARGUMENT,
               "the network of a sampler of %d steps has no forward", s->steps);
    XD_TRY(xdi_prediction_check(ctx, &s->schedule, s->network.predicts, s->v_is_flow));
    XD_TRY(xdi_sampler_check_list(ctx, s));
    XD_TRY(xdi_sampler_check_guidance(ctx, s));
    XD_REQUIRE(ctx, s->network_scale >= 0.0 && isfinite(s->network_scale), XD_ERROR_ARGUMENT,
               "times for networks, times %g", s->network_scale);
    XD_REQUIRE(ctx, !isnan(xdi_noise_network_time(0.5, s->network_scale, dtype)), XD_ERROR_DTYPE,
               "times for networks as %s", xd_dtype_name(s->network_dtype));
    XD_REQUIRE(ctx, s->list_dtype == XD_DTYPE_NONE || s->list_dtype == XD_DTYPE_F32, XD_ERROR_DTYPE,
               "times of a list as %s; NONE and F32 are possible", xd_dtype_name(s->list_dtype));
    XD_REQUIRE(ctx, s->step >= 0 && s->step <= UINT32_MAX, XD_ERROR_ARGUMENT, "step %lld of drawn noise",
               (long long)s->step);
    XD_TRY(xdi_sampler_check_sizes(ctx, s));
    XD_REQUIRE(ctx, s->dtype == XD_DTYPE_F32 || s->dtype == XD_DTYPE_BF16 || s->dtype == XD_DTYPE_F16,
               XD_ERROR_DTYPE, "samples of %s; F32, BF16 and F16 are possible", xd_dtype_name(s->dtype));
    return XD_OK;
}

/* ---- memory ---- */

static void xdi_sampler_settle(xd_sampler *s, xd_ctx *ctx, const xd_sampler_desc *desc) {
    xd_dmd_desc *d = &s->d.desc;
    memset(s, 0, sizeof *s);
    s->kind = desc->kind;
    s->d.ctx = ctx;
    s->d.only_network = "sampler's network";
    s->d.beyond = -1;
    s->d.record.step = desc->step;
    d->networks[XD_DMD_TEACHER] = desc->network;
    d->schedule = desc->schedule;
    d->v_is_flow = desc->v_is_flow;
    d->network_scale = desc->network_scale;
    d->network_dtype = desc->network_dtype;
    d->student_times.dtype = desc->list_dtype;
    d->rungs.steps = desc->steps;
    d->rungs.list = desc->list;
    d->guided = desc->guided;
    d->guidance_scale = desc->guidance_scale;
    d->sizes.samples = d->sizes.step_samples = desc->samples;
    d->sizes.elements = desc->elements;
    d->sizes.whole_elements = desc->whole_elements;
    d->sizes.first_element = desc->first_element;
    d->sizes.split = desc->split;
    d->sizes.dtype = desc->dtype;
    d->seed = desc->seed;
}

/* What guidance with rescale computes with. */
static void xdi_sampler_lay_out_rescale(xd_dmd *d, xd_arena *host, xd_arena *device) {
    const size_t n = (size_t)d->desc.sizes.samples;
    d->factors.host_terms = (xd_denoise_term *)xd_arena_take_pointer(host, n * sizeof *d->factors.host_terms);
    d->factors.terms = (xd_denoise_term *)xd_arena_take_pointer(device, n * sizeof *d->factors.terms);
    xdi_dmd_lay_out_deviations(d, host, device);
    d->results.status = (xd_status *)xd_arena_take_pointer(device, sizeof *d->results.status);
    d->results.value = (xd_sample_values *)xd_arena_take_pointer(device, sizeof *d->results.value);
    d->results.workspace_bytes = xdi_dmd_guidance_workspace(d);
    d->results.workspace = xd_arena_take_pointer(device, d->results.workspace_bytes);
}

static void xdi_sampler_lay_out_tensors(xd_sampler *s, xd_arena *device) {
    const xd_dmd_desc *desc = &s->d.desc;
    const size_t all = (size_t)desc->sizes.samples * (size_t)desc->sizes.elements;
    const bool few = s->kind == XD_SAMPLER_ODE || s->kind == XD_SAMPLER_SDE,
               rescales = xdi_dmd_rescales(desc);
    const bool heun = s->kind == XD_SAMPLER_HEUN;
    xdi_dmd_tensors *t = &s->d.tensors;
    void **const places[] = { &t->input,
                              &t->prediction,
                              few ? &t->generated : NULL,
                              few ? &t->epsilon : NULL,
                              heun ? &t->noised : NULL,
                              heun ? &s->slope : NULL,
                              heun ? &s->next_slope : NULL,
                              desc->guided ? &t->scratch : NULL,
                              rescales ? &t->teacher_x0 : NULL,
                              rescales ? &t->guided_x0 : NULL };
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        if (places[i]) *places[i] = xd_arena_take_pointer(device, all * xd_dtype_size(desc->sizes.dtype));
}

static void xdi_sampler_lay_out(xd_sampler *s, xd_arena *host, xd_arena *device) {
    xd_dmd *d = &s->d;
    const size_t n = (size_t)d->desc.sizes.samples, all = n * (size_t)d->desc.sizes.elements;
    xd_arena_take_pointer(host, sizeof *s);
    xdi_dmd_take_times(host, d->desc.sizes.samples, &d->input);
    xdi_dmd_take_times(host, d->desc.sizes.samples, &d->noised);
    d->factors.host_mixes = (xd_mix *)xd_arena_take_pointer(host, n * sizeof *d->factors.host_mixes);
    if (xdi_dmd_draws_apart(d->ctx, &d->desc))
        d->draws.host_normals = (float *)xd_arena_take_pointer(host, all * sizeof *d->draws.host_normals);
    d->factors.mixes = (xd_mix *)xd_arena_take_pointer(device, n * sizeof *d->factors.mixes);
    if (xdi_dmd_draws_between(d->ctx, &d->desc))
        d->draws.normals = (float *)xd_arena_take_pointer(device, all * sizeof *d->draws.normals);
    xdi_sampler_lay_out_tensors(s, device);
    if (xdi_dmd_rescales(&d->desc)) xdi_sampler_lay_out_rescale(d, host, device);
}

static xd_result xdi_sampler_add_to_plan(xd_ctx *ctx, const xd_sampler_desc *desc) {
    xd_arena host = xd_arena_over(NULL, 0), device = xd_arena_over(NULL, 0);
    xd_sampler plan;
    xdi_sampler_settle(&plan, ctx, desc);
    xdi_sampler_lay_out(&plan, &host, &device);
    return xdi_plan_take(ctx, host.peak, device.peak);
}

static xd_result xdi_sampler_make(xd_ctx *ctx, const xd_sampler_desc *desc, xd_sampler **out) {
    xd_arena host = xd_arena_over(NULL, 0), device = xd_arena_over(NULL, 0);
    const xd_launch launch = xd_ctx_launch(ctx);
    xd_sampler plan, *s;
    xdi_sampler_settle(&plan, ctx, desc);
    xdi_sampler_lay_out(&plan, &host, &device);
    const size_t host_bytes = host.peak, device_bytes = device.peak;
    s = XDI_OBJECT(xd_sampler, ctx, host_bytes);
    void *memory = s ? xd_ctx_kernels(ctx)->memory.allocate(ctx, device_bytes) : NULL;
    if (!memory) xd_release(ctx, s);
    XD_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for a sampler: %zu bytes, and %zu of the device",
               host_bytes, device_bytes);
    host = xd_arena_over(s, host_bytes);
    device = xd_arena_over(memory, device_bytes);
    xdi_sampler_lay_out(&plan, &host, &device);
    *s = plan;
    s->d.memory = memory;
    *out = s;
    return s->d.results.status ? xd_ctx_kernels(ctx)->memory.fill(&launch, s->d.results.status, 0,
                                                                  sizeof *s->d.results.status)
                               : XD_OK;
}

XD_API xd_result xd_sampler_create(xd_ctx *ctx, const xd_sampler_desc *desc, xd_sampler **out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, desc);
    xd_comm *split = desc->split;
    xd_sampler *made = NULL;
    xd_result result = XDI_CHECK_GIVEN_AS(ctx, true, out);
    if (result == XD_OK) result = xdi_sampler_check(ctx, desc);
    if (xdi_plan_is_open(ctx)) {
        if (out) *out = NULL;
        return result == XD_OK ? xdi_sampler_add_to_plan(ctx, desc) : result;
    }
    if (split) result = xd_agree(split, result);
    XD_TRY(result);
    if (split) XD_TRY(xdi_sampler_agree_settings(desc, split));
    result = xdi_sampler_make(ctx, desc, &made);
    if (split) result = xd_agree(split, result);
    if (result != XD_OK) {
        xd_sampler_destroy(made);
        return result;
    }
    *out = made;
    return XD_OK;
}

XD_API void xd_sampler_destroy(xd_sampler *sampler) {
    if (!sampler || XDI_IS_GONE(xd_sampler, sampler)) return;
    xd_ctx_kernels(sampler->d.ctx)->memory.release(sampler->d.ctx, sampler->d.memory);
    xd_release(sampler->d.ctx, sampler);
}

/* ---- sampling ---- */

static xd_result xdi_sampler_check_batch(const xd_sampler *s, const xd_dmd_batch *batch, const void *out) {
    XD_REQUIRE(s->d.ctx, batch->samples >= 0 && batch->samples <= s->d.desc.sizes.samples, XD_ERROR_ARGUMENT,
               "%lld samples in a batch; there is room for %lld", (long long)batch->samples,
               (long long)s->d.desc.sizes.samples);
    XD_REQUIRE(s->d.ctx, batch->first >= 0 && batch->first <= ((int64_t)1 << 32) - batch->samples,
               XD_ERROR_ARGUMENT, "%lld samples from sample %lld: they are numbered from 0 to 2^32 - 1",
               (long long)batch->samples, (long long)batch->first);
    XD_REQUIRE(s->d.ctx, out || batch->samples == 0, XD_ERROR_ARGUMENT,
               "no place for %lld samples: out is NULL", (long long)batch->samples);
    return XD_OK;
}

/* The student's few steps; noise is drawn as for its phase of a step. */
static xd_result xdi_sampler_few(xd_sampler *s, const xd_dmd_batch *batch, void *out) {
    xd_dmd *d = &s->d;
    const int64_t n = batch->samples, last = d->desc.rungs.steps - 1;
    const xdi_dmd_point at = xdi_dmd_input_point(d);
    void *epsilon = d->tensors.epsilon;
    for (int64_t j = 0; j < last; j++) {
        const xdi_dmd_where fresh = xdi_dmd_at(XD_DMD_STUDENT, XD_STREAM_ROLLOUT + 1 + (int)j, batch);
        XD_TRY(xdi_dmd_guide(d, batch, at));
        XD_TRY(s->kind == XD_SAMPLER_SDE ? xdi_dmd_normals(d, fresh, epsilon)
                                         : xdi_dmd_read_input(d, XD_DMD_TEACHER, XD_PREDICT_EPS, n, epsilon));
        XD_TRY(xdi_dmd_descend(d, XD_DMD_TEACHER, n, j, epsilon));
    }
    XD_TRY(xdi_dmd_guide(d, batch, at));
    return xdi_dmd_read_input(d, XD_DMD_TEACHER, XD_PREDICT_X0, n, out);
}

/* out = x + width/2 (slope at x + slope at where Euler's step leads to). */
static xd_result xdi_sampler_heun(xd_sampler *s, const xd_dmd_batch *batch, double width, double next,
                                  void *out) {
    xd_dmd *d = &s->d;
    const xd_dmd_sizes *sizes = &d->desc.sizes;
    const int64_t n = batch->samples;
    const xdi_dmd_point at = xdi_dmd_input_point(d), ahead = { d->tensors.noised, &d->noised };
    const xd_rows slope = xdi_dmd_rows(sizes, s->slope, n),
                  next_slope = xdi_dmd_rows(sizes, s->next_slope, n);
    XD_TRY(xdi_dmd_slope(d, n, at, s->slope));
    XD_TRY(xdi_dmd_euler(d, n, at, width, d->tensors.noised));
    xdi_dmd_set_times(&d->desc, &d->noised, n, next);
    XD_TRY(xdi_dmd_guide(d, batch, ahead));
    XD_TRY(xdi_dmd_slope(d, n, ahead, s->next_slope));
    for (int64_t i = 0; i < n; i++) d->factors.host_mixes[i].c0 = d->factors.host_mixes[i].c1 = 0.5;
    XD_TRY(xdi_dmd_mix(d, slope, next_slope, slope));
    for (int64_t i = 0; i < n; i++) d->factors.host_mixes[i].c0 = 1.0, d->factors.host_mixes[i].c1 = width;
    return xdi_dmd_mix(d, xdi_dmd_rows(sizes, at.x, n), slope, xdi_dmd_rows(sizes, out, n));
}

static xd_result xdi_sampler_many(xd_sampler *s, const xd_dmd_batch *batch, void *out) {
    xd_dmd *d = &s->d;
    const int64_t n = batch->samples, steps = d->desc.rungs.steps;
    const xdi_dmd_point at = xdi_dmd_input_point(d);
    for (int64_t j = 0; j < steps; j++) {
        const double t = xdi_dmd_rung_time(&d->desc, j), next = xdi_dmd_rung_time(&d->desc, j + 1);
        void *to = j + 1 < steps ? d->tensors.input : out;
        xdi_dmd_set_times(&d->desc, &d->input, n, t);
        XD_TRY(xdi_dmd_guide(d, batch, at));
        XD_TRY(s->kind == XD_SAMPLER_HEUN && j + 1 < steps ? xdi_sampler_heun(s, batch, next - t, next, to)
                                                           : xdi_dmd_euler(d, n, at, next - t, to));
    }
    return XD_OK;
}

XD_API xd_result xd_sampler_run(xd_sampler *sampler, const xd_dmd_batch *batch, void *out) {
    XDI_LIVE(xd_sampler, sampler);
    XDI_GIVEN(sampler ? sampler->d.ctx : NULL, sampler, batch);
    xd_dmd *d = &sampler->d;
    void *input = d->tensors.input;
    XD_TRY(xdi_sampler_check_batch(sampler, batch, out));
    XD_TRY(xdi_dmd_check_guidance(d, batch, XD_DMD_TEACHER));
    if (!batch->noise)
        XD_TRY(xdi_dmd_normals(d, xdi_dmd_at(XD_DMD_STUDENT, XD_STREAM_STUDENT_NOISE, batch), input));
    XD_TRY(xdi_dmd_begin(d, batch->noise ? batch->noise : input, batch->samples));
    return xdi_sampler_has_slope(sampler->kind) ? xdi_sampler_many(sampler, batch, out)
                                                : xdi_sampler_few(sampler, batch, out);
}

XD_PRIVATE xd_result xdi_sampler_noise(xd_sampler *sampler, const xd_dmd_batch *batch, void *out) {
    XD_TRY(xdi_sampler_check_batch(sampler, batch, out));
    return xdi_dmd_normals(&sampler->d, xdi_dmd_at(XD_DMD_STUDENT, XD_STREAM_STUDENT_NOISE, batch), out);
}
