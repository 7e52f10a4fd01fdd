/* Optimizers, averages, casts and scaling of arrays, by the spans of a level, and the plain spans. */

#include "kernel/dmd_scalar.h"
#include "kernel/internal.h"
#include "kernel/optimizer_scalar.h"
#include "kernel/span.h"

#include <math.h>
#include <string.h>

XD_PRIVATE xd_update_rules xdi_update_rules_of(const xd_update_args *args) {
    xd_update_rules rules;
    rules.one_minus_beta1 = args->one_minus_beta1;
    rules.one_minus_beta2 = args->one_minus_beta2;
    rules.beta2 = args->beta2;
    rules.eps = args->eps;
    rules.momentum = args->momentum;
    rules.couple_decay = args->couple_decay;
    rules.maximize = args->maximize;
    return rules;
}

XD_PRIVATE xd_update_scalars xdi_update_scalars_of(const xd_update_args *args, const xd_update_array *a) {
    xd_update_scalars s;
    s.scaled = args->gradient_scale != NULL;
    s.scale = s.scaled ? *args->gradient_scale : 1.0f;
    s.decay = a->decay;
    s.weight_decay = a->weight_decay;
    s.step_size = a->step_size;
    s.root_correction = a->root_correction;
    s.fresh = a->fresh;
    return s;
}

/* ---- the plain spans ---- */

static void xdi_plain_widen(const uint16_t *from, xd_dtype dtype, float *to, int64_t n) {
    if (dtype == XD_DTYPE_BF16)
        for (int64_t i = 0; i < n; i++) to[i] = xd_bits_from_bf16(from[i]);
    else
        for (int64_t i = 0; i < n; i++) to[i] = xd_bits_from_f16(from[i]);
}

static void xdi_plain_narrow(const float *from, uint16_t *to, xd_dtype dtype, int64_t n) {
    if (dtype == XD_DTYPE_BF16)
        for (int64_t i = 0; i < n; i++) to[i] = xd_bits_to_bf16(from[i]);
    else
        for (int64_t i = 0; i < n; i++) to[i] = xd_bits_to_f16(from[i]);
}

static void xdi_plain_adam(const xd_update_args *args, const xd_update_array *a, const float *gradient,
                           int64_t at, int64_t n) {
    const xd_update_rules rules = xdi_update_rules_of(args);
    const xd_update_scalars s = xdi_update_scalars_of(args, a);
    for (int64_t i = 0; i < n; i++)
        xd_adam_element(&rules, &s, gradient[i], &a->master[at + i], &a->first[at + i], &a->second[at + i]);
}

static void xdi_plain_sgd(const xd_update_args *args, const xd_update_array *a, const float *gradient,
                          int64_t at, int64_t n) {
    const xd_update_rules rules = xdi_update_rules_of(args);
    const xd_update_scalars s = xdi_update_scalars_of(args, a);
    for (int64_t i = 0; i < n; i++)
        xd_sgd_element(&rules, &s, gradient[i], &a->master[at + i], &a->first[at + i]);
}

static void xdi_plain_lerp(const xdi_span_average *average, float *target, const float *source, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        target[i] = xd_lerp_f32(average->weight, average->keep, average->weighted_sum, target[i], source[i]);
}

/* scale: x <- x * factor, one f32 rounding and one more where x is narrower. */
static void xdi_plain_scale(float *x, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

static void xdi_plain_add(float *sum, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) sum[i] += x[i];
}

/* The square of an f32 is exact in double and can neither overflow nor underflow there, so the sum needs no
 * scaling, and it is finite when the elements are. */
static double xdi_plain_power_sum(const void *data, xd_dtype dtype, xd_norm_type type, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        const double magnitude = fabs(xd_load_f64(data, dtype, i));
        if (type != XD_NORM_MAX)
            sum += type == XD_NORM_L2 ? magnitude * magnitude : magnitude;
        else if (!(magnitude <= sum)) /* NaN too: the sum then stays NaN */
            sum = isnan(sum) ? sum : magnitude;
    }
    return sum;
}

static void xdi_plain_round(const xd_philox *random, int64_t element, const float *from, uint16_t *to,
                            int64_t n) {
    for (int64_t i = 0; i < n;) {
        uint32_t words[4];
        const int64_t block = (element + i) / XD_ROUNDED_PER_BLOCK;
        xd_philox_words(random, block, words);
        for (; i < n && (element + i) / XD_ROUNDED_PER_BLOCK == block; i++)
            to[i] = xd_round_to_bf16(from[i], xd_round_bits(words, element + i));
    }
}

static void xdi_plain_mix(const xdi_span_mix *mix, const float *p, const float *q, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const double value = xd_mix_of(mix->factors, q != NULL, (double)p[i], q ? (double)q[i] : 0.0);
        out[i] = mix->to_odd ? xd_float_to_odd(value) : (float)value;
    }
}

static void xdi_plain_compensated(float weight, const float *source, float *target, uint16_t *compensation,
                                  int64_t n) {
    for (int64_t i = 0; i < n; i++) xd_lerp_compensated(weight, source[i], &target[i], &compensation[i]);
}

static const xdi_span_kernels xdi_plain_spans = {
    xdi_plain_widen, xdi_plain_narrow, xdi_plain_adam,        xdi_plain_sgd, xdi_plain_lerp,
    xdi_plain_scale, xdi_plain_add,    xdi_plain_power_sum,   NULL,          false,
    xdi_plain_round, xdi_plain_mix,    xdi_plain_compensated, NULL,          NULL,
};

/* ---- averages ---- */

/* The source of an average as the target's dtype would hold it, widened again. */
static const float *xdi_lerp_source(const xdi_span_kernels *spans, const xd_lerp_array *a, int64_t at,
                                    int64_t n, float *buffer) {
    uint16_t rounded[XDI_SPAN];
    const float *source = buffer;
    if (a->source_dtype == XD_DTYPE_F64)
        for (int64_t i = 0; i < n; i++) buffer[i] = (float)((const double *)a->source)[at + i];
    else
        source = xdi_span_widen(spans, a->source, a->source_dtype, at, n, buffer);
    if (a->target_dtype == XD_DTYPE_F32 || a->target_dtype == a->source_dtype) return source;
    spans->narrow(source, rounded, a->target_dtype, n);
    spans->widen(rounded, a->target_dtype, buffer, n);
    return buffer;
}

static void xdi_lerp_span(const xdi_span_kernels *spans, double keep, bool weighted_sum,
                          const xd_lerp_array *a, int64_t at, int64_t n) {
    float source_room[XDI_SPAN], target_room[XDI_SPAN];
    xdi_span_average average;
    if (a->target_dtype == XD_DTYPE_F64) {
        double *target = (double *)a->target;
        for (int64_t i = at; i < at + n; i++)
            target[i] =
                xd_lerp_f64(keep, weighted_sum, target[i], xd_load_f64(a->source, a->source_dtype, i));
        return;
    }
    average.weight = (float)(1.0 - keep);
    average.keep = (float)keep;
    average.weighted_sum = weighted_sum;
    if (spans->lerp_bf16 && a->target_dtype == XD_DTYPE_F32 && a->source_dtype == XD_DTYPE_BF16) {
        spans->lerp_bf16(&average, (float *)a->target + at, (const uint16_t *)a->source + at, n);
        return;
    }
    const float *source = xdi_lerp_source(spans, a, at, n, source_room);
    if (a->target_dtype == XD_DTYPE_F32) {
        spans->lerp(&average, (float *)a->target + at, source, n);
        return;
    }
    spans->widen((const uint16_t *)a->target + at, a->target_dtype, target_room, n);
    spans->lerp(&average, target_room, source, n);
    spans->narrow(target_room, (uint16_t *)a->target + at, a->target_dtype, n);
}

static bool xdi_lerp_takes(xd_dtype dtype) {
    return xdi_span_takes(dtype) || dtype == XD_DTYPE_F64;
}

static xd_result xdi_lerp_check(const xd_launch *launch, xd_dtype target, xd_dtype source, int64_t k) {
    XD_REQUIRE(launch->ctx, xdi_lerp_takes(target) && xdi_lerp_takes(source), XD_ERROR_DTYPE,
               "array %lld: cannot average %s into %s", (long long)k, xd_dtype_name(source),
               xd_dtype_name(target));
    return XD_OK;
}

typedef struct xdi_lerp_job {
    const xd_lerp_args *args;
    const xdi_span_kernels *spans;
} xdi_lerp_job;

static int64_t xdi_lerp_count(const void *job, int64_t k) {
    return ((const xdi_lerp_job *)job)->args->arrays[k].count;
}

static void xdi_lerp_part(const void *job, int64_t k, int64_t begin, int64_t end) {
    const xdi_lerp_job *j = (const xdi_lerp_job *)job;
    for (int64_t at = begin; at < end; at += XDI_SPAN)
        xdi_lerp_span(j->spans, j->args->keep, j->args->weighted_sum, &j->args->arrays[k], at,
                      xdi_span_length(end, at));
}

XD_PRIVATE xd_result xdi_lerp_run(const xd_launch *launch, const xd_lerp_args *args,
                                  const xdi_span_kernels *spans) {
    for (int64_t k = 0; k < args->array_count; k++)
        XD_TRY(xdi_lerp_check(launch, args->arrays[k].target_dtype, args->arrays[k].source_dtype, k));
    if (xd_status_refuses(launch->status)) return XD_OK;
    const xdi_lerp_job job = { args, spans };
    const xdi_walk walk = { &job, args->array_count, xdi_lerp_count, xdi_lerp_part };
    return xdi_walk_run(launch, &walk);
}

/* ---- averages in other formats ---- */

typedef struct xdi_average_job {
    const xd_average_args *args;
    const xdi_span_kernels *spans;
} xdi_average_job;

/* Elements [at, at + n) of the source, rounded to f32. */
static const float *xdi_average_source(const xdi_span_kernels *spans, const xd_average_array *a, int64_t at,
                                       int64_t n, float *buffer) {
    if (a->source_dtype != XD_DTYPE_F64)
        return xdi_span_widen(spans, a->source, a->source_dtype, at, n, buffer);
    for (int64_t i = 0; i < n; i++) buffer[i] = (float)((const double *)a->source)[at + i];
    return buffer;
}

/* What BF16 shadows are rounded from is the average with the source as it is, not rounded first: the mean is exact. */
static void xdi_average_random(const xdi_average_job *j, const xd_average_array *a, int64_t at, int64_t n) {
    const xd_philox random = xd_average_random(j->args->seed, a->key, j->args->iteration);
    float source_room[XDI_SPAN], values[XDI_SPAN];
    xdi_span_average average;
    average.weight = (float)(1.0 - j->args->keep);
    average.keep = (float)j->args->keep;
    average.weighted_sum = false;
    j->spans->widen((const uint16_t *)a->target + at, XD_DTYPE_BF16, values, n);
    j->spans->lerp(&average, values, xdi_average_source(j->spans, a, at, n, source_room), n);
    (j->spans->round ? j->spans->round : xdi_plain_round)(&random, a->origin + at, values,
                                                          (uint16_t *)a->target + at, n);
}

static void xdi_average_move(const xdi_average_job *j, const xd_average_array *a, int64_t at, int64_t n) {
    const xd_lerp_array plain = { a->target, a->source, a->count, a->target_dtype, a->source_dtype };
    const float weight = (float)(1.0 - j->args->keep);
    float room[XDI_SPAN];
    if (a->random) {
        xdi_average_random(j, a, at, n);
    } else if (a->compensation) {
        (j->spans->compensated ? j->spans->compensated
                               : xdi_plain_compensated)(weight, xdi_average_source(j->spans, a, at, n, room),
                                                        (float *)a->target + at, a->compensation + at, n);
    } else {
        xdi_lerp_span(j->spans, j->args->keep, j->args->weighted_sum, &plain, at, n);
    }
}

static xd_result xdi_average_check(const xd_launch *launch, const xd_average_args *args, int64_t k) {
    const xd_average_array *a = &args->arrays[k];
    XD_TRY(xdi_lerp_check(launch, a->target_dtype, a->source_dtype, k));
    XD_REQUIRE(launch->ctx, !a->random || (a->target_dtype == XD_DTYPE_BF16 && !a->compensation),
               XD_ERROR_DTYPE, "array %lld: BF16 is rounded at random, not %s", (long long)k,
               xd_dtype_name(a->target_dtype));
    XD_REQUIRE(launch->ctx,
               (!a->compensation && args->kind != XD_AVERAGE_ADD) || a->target_dtype == XD_DTYPE_F32,
               XD_ERROR_DTYPE, "array %lld: F32 has a compensation and is added to, not %s", (long long)k,
               xd_dtype_name(a->target_dtype));
    return XD_OK;
}

/* ---- steps ---- */

static xd_result xdi_update_check(const xd_launch *launch, const xd_update_args *args) {
    for (int64_t k = 0; k < args->array_count; k++) {
        const xd_update_array *a = &args->arrays[k];
        XD_REQUIRE(launch->ctx, xdi_span_takes(a->gradient_dtype), XD_ERROR_DTYPE,
                   "array %lld: gradients are F32, BF16 or F16, not %s", (long long)k,
                   xd_dtype_name(a->gradient_dtype));
        XD_REQUIRE(launch->ctx, !a->value || xdi_span_takes(a->value_dtype), XD_ERROR_DTYPE,
                   "array %lld: parameters are F32, BF16 or F16, not %s", (long long)k,
                   xd_dtype_name(a->value_dtype));
        XD_REQUIRE(launch->ctx, a->master || a->count == 0 || (a->value_dtype == XD_DTYPE_BF16 && a->steps),
                   XD_ERROR_DTYPE, "array %lld: %s values have a master copy, BF16 ones a step count",
                   (long long)k, xd_dtype_name(a->value_dtype));
        if (a->average) XD_TRY(xdi_lerp_check(launch, a->average_dtype, XD_DTYPE_F32, k));
        for (int i = 0; i < args->average_count; i++)
            if (args->averages[i].arrays[k].target) XD_TRY(xdi_average_check(launch, &args->averages[i], k));
    }
    return XD_OK;
}

/* The array with the scalars of its next step, t, computed in double and rounded once. */
static xd_update_array xdi_update_next(const xd_update_args *args, const xd_update_array *array, bool adam) {
    xd_update_array a = *array;
    if (!a.steps) return a;
    const int64_t t = *a.steps + 1;
    a.fresh = t == 1;
    a.step_size = xd_update_step_size(a.learning_rate, args->beta1_exact, t, adam);
    if (adam) a.root_correction = xd_update_root_correction(args->beta2_exact, t);
    return a;
}

typedef struct xdi_update_job {
    const xd_update_args *args;
    const xdi_span_kernels *spans;
    xdi_span_update update;
} xdi_update_job;

static int64_t xdi_update_count(const void *job, int64_t k) {
    return ((const xdi_update_job *)job)->args->arrays[k].count;
}

/* Updates a span whose value is the parameter: in a buffer of f32. */
static void xdi_update_rounded(const xdi_update_job *j, const xd_update_array *a, const float *gradient,
                               int64_t at, int64_t n) {
    const xd_philox random = xd_update_random(j->args->rounding_seed, a->key, *a->steps + 1);
    float values[XDI_SPAN];
    xd_update_array span = *a;
    j->spans->widen((const uint16_t *)a->value + at, XD_DTYPE_BF16, values, n);
    span.master = values;
    span.first = a->first + at;
    if (a->second) span.second = a->second + at;
    j->update(j->args, &span, gradient, 0, n);
    (j->spans->round ? j->spans->round : xdi_plain_round)(&random, a->origin + at, values,
                                                          (uint16_t *)a->value + at, n);
}

/* The averages beside those of the arrays, of a span of array k that has just been updated. */
static void xdi_update_averages(const xdi_update_job *j, int64_t k, int64_t at, int64_t n) {
    for (int i = 0; i < j->args->average_count; i++) {
        const xdi_average_job job = { &j->args->averages[i], j->spans };
        if (job.args->arrays[k].target) xdi_average_move(&job, &job.args->arrays[k], at, n);
    }
}

/* A span is updated, rounded to the narrow copy and averaged while it is in the cache. */
static void xdi_update_part(const void *job, int64_t k, int64_t begin, int64_t end) {
    const xdi_update_job *j = (const xdi_update_job *)job;
    const xd_update_args *args = j->args;
    const xd_update_array next = xdi_update_next(args, &args->arrays[k], j->update == j->spans->adam),
                          *a = &next;
    float widened[XDI_SPAN];
    xd_lerp_array average;
    average.target = a->average;
    average.target_dtype = a->average_dtype;
    average.source = a->value ? a->value : a->master;
    average.source_dtype = a->value ? a->value_dtype : XD_DTYPE_F32;
    for (int64_t at = begin; at < end; at += XDI_SPAN) {
        const int64_t n = xdi_span_length(end, at);
        const float *gradient = xdi_span_widen(j->spans, a->gradient, a->gradient_dtype, at, n, widened);
        if (a->master)
            j->update(args, a, gradient, at, n);
        else
            xdi_update_rounded(j, a, gradient, at, n);
        if (a->master && a->value) xdi_span_narrow(j->spans, a->master + at, a->value, a->value_dtype, at, n);
        if (a->average) xdi_lerp_span(j->spans, args->keep, args->weighted_sum, &average, at, n);
        xdi_update_averages(j, k, at, n);
    }
}

XD_PRIVATE xd_result xdi_update_run(const xd_launch *launch, const xd_update_args *args,
                                    const xdi_span_kernels *spans, xdi_span_update update) {
    const xdi_update_job job = { args, spans, update };
    const xdi_walk walk = { &job, args->array_count, xdi_update_count, xdi_update_part };
    XD_TRY(xdi_update_check(launch, args));
    if (xd_status_refuses(launch->status)) return XD_OK;
    XD_TRY(xdi_walk_run(launch, &walk));
    for (int64_t k = 0; k < args->array_count; k++)
        if (args->arrays[k].steps) ++*args->arrays[k].steps;
    return XD_OK;
}

static bool xdi_cast_takes(xd_dtype dtype) {
    return xdi_span_takes(dtype) || dtype == XD_DTYPE_F64 || dtype == XD_DTYPE_I32 || dtype == XD_DTYPE_I64 ||
           dtype == XD_DTYPE_U8 || dtype == XD_DTYPE_BOOL;
}

static void xdi_cast_spans(const xdi_span_kernels *spans, const xd_cast_array *a, int64_t begin,
                           int64_t end) {
    float widened[XDI_SPAN];
    for (int64_t at = begin; at < end; at += XDI_SPAN) {
        const int64_t n = xdi_span_length(end, at);
        if (a->target_dtype == XD_DTYPE_F32)
            spans->widen((const uint16_t *)a->source + at, a->source_dtype, (float *)a->target + at, n);
        else
            spans->narrow(xdi_span_widen(spans, a->source, a->source_dtype, at, n, widened),
                          (uint16_t *)a->target + at, a->target_dtype, n);
    }
}

typedef struct xdi_cast_job {
    const xd_cast_array *arrays;
    const xdi_span_kernels *spans;
} xdi_cast_job;

static int64_t xdi_cast_count(const void *job, int64_t k) {
    return ((const xdi_cast_job *)job)->arrays[k].count;
}

static void xdi_cast_part(const void *job, int64_t k, int64_t begin, int64_t end) {
    const xdi_cast_job *j = (const xdi_cast_job *)job;
    const xd_cast_array *a = &j->arrays[k];
    const size_t size = xd_dtype_size(a->target_dtype);
    if (a->target_dtype == a->source_dtype)
        memcpy((char *)a->target + (size_t)begin * size, (const char *)a->source + (size_t)begin * size,
               (size_t)(end - begin) * size);
    else if (xdi_span_takes(a->target_dtype) && xdi_span_takes(a->source_dtype))
        xdi_cast_spans(j->spans, a, begin, end);
    else if (a->target_dtype == XD_DTYPE_F32 &&
             a->source_dtype == XD_DTYPE_F64) /* what selections end with */
        for (int64_t i = begin; i < end; i++) ((float *)a->target)[i] = (float)((const double *)a->source)[i];
    else
        for (int64_t i = begin; i < end; i++)
            xd_store_f64(a->target, a->target_dtype, i, xd_load_f64(a->source, a->source_dtype, i));
}

/* cast: target[i] = source[i], rounded to nearest even where the target is narrower. */
XD_PRIVATE xd_result xdi_cast_run(const xd_launch *launch, const xd_cast_array *arrays, int64_t array_count,
                                  const xdi_span_kernels *spans) {
    for (int64_t k = 0; k < array_count; k++) {
        const xd_cast_array *a = &arrays[k];
        XD_REQUIRE(launch->ctx,
                   a->target_dtype == a->source_dtype ||
                       (xdi_cast_takes(a->target_dtype) && xdi_cast_takes(a->source_dtype)),
                   XD_ERROR_DTYPE, "array %lld: cannot convert %s to %s", (long long)k,
                   xd_dtype_name(a->source_dtype), xd_dtype_name(a->target_dtype));
    }
    if (xd_status_refuses(launch->status)) return XD_OK;
    const xdi_cast_job job = { arrays, spans };
    const xdi_walk walk = { &job, array_count, xdi_cast_count,
                            xdi_cast_part }; /* an empty array may be NULL */
    return xdi_walk_run(launch, &walk);
}

/* ---- averages that are counted ---- */

static int64_t xdi_average_count(const void *job, int64_t k) {
    return ((const xdi_average_job *)job)->args->arrays[k].count;
}

/* xdi_average_move, and how many elements it left as they were although their sources differ. */
static int64_t xdi_average_counted(const xdi_average_job *j, const xd_average_array *a, int64_t at,
                                   int64_t n) {
    const size_t size = xd_dtype_size(a->target_dtype);
    const char *target = (const char *)a->target + (size_t)at * size;
    double before[XDI_SPAN]; /* room for elements of any type */
    uint16_t lacked[XDI_SPAN];
    int64_t unmoved = 0;
    memcpy(before, target, (size_t)n * size);
    memset(lacked, 0, sizeof lacked);
    if (a->compensation) memcpy(lacked, a->compensation + at, (size_t)n * sizeof *lacked);
    xdi_average_move(j, a, at, n);
    for (int64_t i = 0; i < n; i++) {
        const size_t offset = (size_t)i * size;
        const bool same = memcmp((const char *)before + offset, target + offset, size) == 0 &&
                          (!a->compensation || a->compensation[at + i] == lacked[i]);
        const double was = xd_load_f64(before, a->target_dtype, i);
        if (!xd_average_stays(same, was, xd_load_f64(a->target, a->target_dtype, at + i))) continue;
        unmoved += xd_average_differs(xd_load_f64(a->source, a->source_dtype, at + i), was, lacked[i]);
    }
    return unmoved;
}

static void xdi_average_add(const xdi_average_job *j, const xd_average_array *a, int64_t at, int64_t n) {
    float room[XDI_SPAN];
    const float *source = xdi_average_source(j->spans, a, at, n, room);
    float *target = (float *)a->target + at;
    for (int64_t i = 0; i < n; i++) target[i] = xd_fmaf(j->args->factor, source[i], target[i]);
}

static void xdi_average_part(const void *job, int64_t k, int64_t begin, int64_t end) {
    const xdi_average_job *j = (const xdi_average_job *)job;
    const xd_average_array *a = &j->args->arrays[k];
    int64_t unmoved = 0;
    for (int64_t at = begin; at < end; at += XDI_SPAN) {
        const int64_t n = xdi_span_length(end, at);
        if (j->args->kind == XD_AVERAGE_ADD)
            xdi_average_add(j, a, at, n);
        else if (j->args->kind == XD_AVERAGE_MOVE && j->args->unmoved)
            unmoved += xdi_average_counted(j, a, at, n);
        else if (j->args->kind == XD_AVERAGE_MOVE)
            xdi_average_move(j, a, at, n);
    }
    if (j->args->kind == XD_AVERAGE_COPY) {
        const xd_cast_array cast = { a->target, a->source, a->count, a->target_dtype, a->source_dtype };
        const xdi_cast_job copy = { &cast, j->spans };
        xdi_cast_part(&copy, 0, begin, end);
        if (a->compensation)
            memset(a->compensation + begin, 0, (size_t)(end - begin) * sizeof *a->compensation);
    }
    if (unmoved) __atomic_add_fetch(j->args->unmoved, unmoved, __ATOMIC_RELAXED); /* of several threads */
}

XD_PRIVATE xd_result xdi_average_run(const xd_launch *launch, const xd_average_args *args,
                                     const xdi_span_kernels *spans) {
    for (int64_t k = 0; k < args->array_count; k++) XD_TRY(xdi_average_check(launch, args, k));
    if (xd_status_refuses(launch->status)) return XD_OK;
    const xdi_average_job job = { args, spans };
    const xdi_walk walk = { &job, args->array_count, xdi_average_count, xdi_average_part };
    return xdi_walk_run(launch, &walk);
}

static int64_t xdi_swap_count(const void *job, int64_t k) {
    return ((const xd_swap_array *)job)[k].bytes;
}

static void xdi_swap_part(const void *job, int64_t k, int64_t begin, int64_t end) {
    const xd_swap_array *s = &((const xd_swap_array *)job)[k];
    char *a = (char *)s->a, *b = (char *)s->b, room[4 * XDI_SPAN];
    for (int64_t at = begin, n; at < end; at += n) {
        n = end - at < (int64_t)sizeof room ? end - at : (int64_t)sizeof room;
        memcpy(room, a + at, (size_t)n);
        memcpy(a + at, b + at, (size_t)n);
        memcpy(b + at, room, (size_t)n);
    }
}

/* swap: a block at a time, whatever the status. */
XD_PRIVATE xd_result xdi_swap_run(const xd_launch *launch, const xd_swap_array *arrays, int64_t array_count) {
    const xdi_walk walk = { arrays, array_count, xdi_swap_count, xdi_swap_part };
    return xdi_walk_run(launch, &walk);
}

typedef struct xdi_scale_job {
    const xd_scale_args *args;
    const xdi_span_kernels *spans;
} xdi_scale_job;

static int64_t xdi_scale_count(const void *job, int64_t k) {
    (void)k;
    return ((const xdi_scale_job *)job)->args->count;
}

static void xdi_scale_part(const void *job, int64_t k, int64_t begin, int64_t end) {
    const xdi_scale_job *j = (const xdi_scale_job *)job;
    const xd_scale_args *args = j->args;
    float values[XDI_SPAN];
    (void)k;
    for (int64_t at = begin; at < end; at += XDI_SPAN) {
        const int64_t n = xdi_span_length(end, at);
        if (args->dtype == XD_DTYPE_F32) {
            j->spans->scale((float *)args->data + at, args->factor, n);
            continue;
        }
        j->spans->widen((const uint16_t *)args->data + at, args->dtype, values, n);
        j->spans->scale(values, args->factor, n);
        j->spans->narrow(values, (uint16_t *)args->data + at, args->dtype, n);
    }
}

XD_PRIVATE xd_result xdi_scale_run(const xd_launch *launch, const xd_scale_args *args,
                                   const xdi_span_kernels *spans) {
    const xdi_scale_job job = { args, spans };
    const xdi_walk walk = { &job, 1, xdi_scale_count, xdi_scale_part };
    XD_REQUIRE(launch->ctx, xdi_span_takes(args->dtype), XD_ERROR_DTYPE,
               "scaling takes F32, BF16 or F16, not %s", xd_dtype_name(args->dtype));
    return xdi_walk_run(launch, &walk);
}

/* ---- the table ---- */

XDI_SPAN_ENTRIES(plain, xdi_plain_spans)
