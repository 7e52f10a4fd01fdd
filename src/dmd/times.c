/* Times from draws. */

#include "dmd/internal.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define XDI_TIME_LEAST 1e-12              /* whose logarithm is the least */
#define XDI_TIME_STEPS ((int64_t)1 << 53) /* those that doubles can count */

XD_API xd_time_sampler xd_times_defaults(xd_dmd_recipe recipe) {
    xd_time_sampler s;
    memset(&s, 0, sizeof s);
    s.kind = XD_TIME_SHIFTED;
    s.min_t = 0.001, s.max_t = 0.999;
    s.shift = 5.0;
    s.deviation = 1.0;
    s.freedom = 0.01;
    s.count = 1000, s.last = 999;
    s.dtype = XD_DTYPE_F32;
    if (recipe == XD_DMD_FASTGEN || recipe == XD_DMD_DATA_FREE) {
        s.kind = XD_TIME_UNIFORM;
        s.min_t = 0.002, s.max_t = 80.0;
        s.mean = -1.1, s.deviation = 2.0;
        s.grid = XD_NOISE_EDM, s.first = 2, s.last = 998;
        s.dtype = XD_DTYPE_F64;
    }
    if (recipe == XD_DMD_DATA_FREE) s.min_t = 0.02, s.max_t = 0.98;
    if (recipe == XD_DMD_ORIGINAL) {
        s.kind = XD_TIME_STEP;
        s.min_t = 0.0, s.max_t = 1.0;
        s.first = 20, s.last = 980;
    }
    return s;
}

XD_PRIVATE void xdi_times_narrow(xd_time_sampler *sampler, const xd_noise_schedule *schedule) {
    if (sampler->min_t < schedule->min_t) sampler->min_t = schedule->min_t;
    if (sampler->max_t > schedule->max_t) sampler->max_t = schedule->max_t;
}

/* ---- checks ---- */

/* The ends to which times are clamped. */
static double xdi_time_low(const xd_time_sampler *s) {
    const float nearest = (float)s->min_t;
    if (s->dtype != XD_DTYPE_F32) return s->min_t;
    return (double)((double)nearest < s->min_t ? nextafterf(nearest, HUGE_VALF) : nearest);
}

static double xdi_time_high(const xd_time_sampler *s) {
    const float nearest = (float)s->max_t;
    if (s->dtype != XD_DTYPE_F32) return s->max_t;
    return (double)((double)nearest > s->max_t ? nextafterf(nearest, -HUGE_VALF) : nearest);
}

static bool xdi_time_is_list(const xd_time_sampler *s) {
    return s->kind == XD_TIME_LIST;
}

static bool xdi_time_has_index(const xd_time_sampler *s) {
    return s->kind == XD_TIME_GRID || s->kind == XD_TIME_LIST || s->kind == XD_TIME_STEP;
}

/* The last and the first index of a draw. */
static int64_t xdi_time_last(const xd_time_sampler *s) {
    return xdi_time_is_list(s) ? s->list_count - (s->list_to_end ? 1 : 2) : s->last;
}

static int64_t xdi_time_first(const xd_time_sampler *s) {
    return xdi_time_is_list(s) ? 0 : s->first;
}

static xd_result xdi_times_check_range(xd_ctx *ctx, const xd_time_sampler *s) {
    XD_REQUIRE(ctx, s->kind >= XD_TIME_UNIFORM && s->kind <= XD_TIME_STEP, XD_ERROR_ARGUMENT,
               "kind %d is no distribution of times", (int)s->kind);
    XD_REQUIRE(ctx, s->min_t >= 0.0 && s->min_t < s->max_t && isfinite(s->max_t), XD_ERROR_ARGUMENT,
               "times from min_t %.9g to max_t %.9g: 0 <= min_t < max_t is needed", s->min_t, s->max_t);
    XD_REQUIRE(ctx, s->dtype == XD_DTYPE_NONE || s->dtype == XD_DTYPE_F64 || s->dtype == XD_DTYPE_F32,
               XD_ERROR_DTYPE, "times of type %s: F64 or F32 is needed", xd_dtype_name(s->dtype));
    XD_REQUIRE(ctx, xdi_time_low(s) <= xdi_time_high(s), XD_ERROR_ARGUMENT,
               "there is no f32 from min_t %.17g to max_t %.17g", s->min_t, s->max_t);
    return XD_OK;
}

static xd_result xdi_times_check_indices(xd_ctx *ctx, const xd_time_sampler *s) {
    XD_REQUIRE(ctx, s->first >= 0 && s->first <= s->last, XD_ERROR_ARGUMENT, "indices from %lld to %lld",
               (long long)s->first, (long long)s->last);
    if (s->kind == XD_TIME_STEP) {
        const double low = (double)s->first / (double)s->count, high = (double)s->last / (double)s->count;
        XD_REQUIRE(ctx, s->count >= 1 && s->count <= XDI_TIME_STEPS, XD_ERROR_ARGUMENT,
                   "%lld steps: 1 to 2^53 are possible", (long long)s->count);
        XD_REQUIRE(ctx, low >= s->min_t && high <= s->max_t, XD_ERROR_ARGUMENT,
                   "steps %lld to %lld of %lld are times %.9g to %.9g, outside min_t %.9g to max_t %.9g",
                   (long long)s->first, (long long)s->last, (long long)s->count, low, high, s->min_t,
                   s->max_t);
        return XD_OK;
    }
    XD_REQUIRE(ctx, s->count >= 2 && s->last < s->count, XD_ERROR_ARGUMENT,
               "indices from %lld to %lld of a grid of %lld times", (long long)s->first, (long long)s->last,
               (long long)s->count);
    XD_REQUIRE(ctx, s->grid == XD_NOISE_EDM || s->grid == XD_NOISE_FLOW, XD_ERROR_ARGUMENT,
               "a grid of kind %d: EDM or FLOW is needed", (int)s->grid);
    return XD_OK;
}

static xd_result xdi_times_check_numbers(xd_ctx *ctx, const xd_time_sampler *s) {
    const bool normal =
        s->kind == XD_TIME_LOG_NORMAL || s->kind == XD_TIME_LOG_T || s->kind == XD_TIME_LOGIT_NORMAL;
    XD_REQUIRE(ctx, s->kind != XD_TIME_SHIFTED || (s->shift >= 1.0 && isfinite(s->shift)), XD_ERROR_ARGUMENT,
               "shift is %g: at least 1 is needed", s->shift);
    XD_REQUIRE(ctx, !normal || (s->deviation > 0.0 && isfinite(s->deviation) && isfinite(s->mean)),
               XD_ERROR_ARGUMENT, "mean %g and deviation %g: a deviation above 0 is needed", s->mean,
               s->deviation);
    XD_REQUIRE(ctx, s->kind != XD_TIME_LOG_T || (s->freedom > 0.0 && isfinite(s->freedom)), XD_ERROR_ARGUMENT,
               "%g degrees of freedom: more than 0 are needed", s->freedom);
    return XD_OK;
}

static xd_result xdi_times_check_sampler(xd_ctx *ctx, const xd_time_sampler *s) {
    XD_REQUIRE(ctx, s, XD_ERROR_ARGUMENT, "no distribution of times is given");
    XD_TRY(xdi_times_check_range(ctx, s));
    XD_TRY(xdi_times_check_numbers(ctx, s));
    if (xdi_time_is_list(s)) return xdi_noise_check_list(ctx, s->list, s->list_count, s->max_t);
    return xdi_time_has_index(s) ? xdi_times_check_indices(ctx, s) : XD_OK;
}

/* The extremes of a checked sampler's times. */
static void xdi_times_extremes(const xd_time_sampler *s, double *low, double *high) {
    *low = xdi_time_low(s), *high = xdi_time_high(s);
    if (xdi_time_is_list(s)) *low = s->list[xdi_time_last(s)], *high = s->list[0];
    if (s->kind == XD_TIME_STEP) {
        *low = (double)s->first / (double)s->count;
        *high = (double)s->last / (double)s->count;
    }
}

XD_PRIVATE xd_result xdi_times_check(xd_ctx *ctx, const xd_time_sampler *sampler,
                                     const xd_noise_schedule *schedule) {
    double low, high;
    XD_TRY(xdi_times_check_sampler(ctx, sampler));
    if (!schedule) return XD_OK;
    XD_TRY(xdi_noise_check_range(ctx, schedule));
    xdi_times_extremes(sampler, &low, &high);
    XD_REQUIRE(ctx, low >= schedule->min_t && high <= schedule->max_t, XD_ERROR_ARGUMENT,
               "times from %.9g to %.9g are drawn, those of the schedule are %.9g to %.9g", low, high,
               schedule->min_t, schedule->max_t);
    return XD_OK;
}

/* ---- distributions ---- */

/* The number above which a normal one is with probability q, 0 < q <= 1/2: a start with an error below 5e-4 (Abramowitz and
 * Stegun 26.2.23), and two steps of Halley's method, each of which triples the digits. */
static double xdi_normal_above(double q) {
    const double t = sqrt(-2.0 * log(q > DBL_MIN ? q : DBL_MIN));
    const double above = 2.515517 + t * (0.802853 + t * 0.010328);
    const double below = 1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308));
    double x = t - above / below;
    for (int i = 0; i < 2; i++) {
        const double error = 0.5 * erfc(x * 0.70710678118654752) - q;
        const double step = error * 2.5066282746310005 * exp(0.5 * x * x);
        x += step / (1.0 - 0.5 * x * step);
    }
    return x;
}

static double xdi_normal_of(double uniform) {
    return uniform < 0.5 ? -xdi_normal_above(uniform) : xdi_normal_above(1.0 - uniform);
}

static double xdi_normal_below(double x) {
    return 0.5 * erfc(-x * 0.70710678118654752);
}

/* The logarithm of the probability below x. Far out it is that of Mills' ratio, whose seventh term is below 1e-14 there. */
static const double xdi_normal_far = -36.0;

static double xdi_normal_log_below(double x) {
    const double v = 1.0 / (x * x);
    if (x > xdi_normal_far) return log(xdi_normal_below(x));
    const double mills = v * (1.0 - v * (3.0 - v * (15.0 - v * (105.0 - v * 945.0))));
    return -0.5 * x * x - log(-x) - 0.91893853320467274 + log1p(-mills); /* ln sqrt(2 pi) */
}

/* The number below which a normal one is with a probability, by its logarithm, when that is too small for a double. Newton's
 * method: the logarithm's slope is -x, nearly. */
static double xdi_normal_of_log(double logarithm) {
    double x = -sqrt(-2.0 * logarithm);
    for (int i = 0; i < 8; i++) x += (xdi_normal_log_below(x) - logarithm) / x;
    return x;
}

/* A normal number in [a, b] whose b is not above -a. */
static double xdi_lower_normal(double a, double b, double uniform) {
    const double low = xdi_normal_below(a), high = xdi_normal_below(b), q = low + uniform * (high - low);
    if (q > 1e-280) return xdi_normal_of(q);
    const double top = xdi_normal_log_below(b), ratio = exp(xdi_normal_log_below(a) - top);
    const double share = ratio + uniform * (1.0 - ratio);
    const double x = share > 0.0 ? xdi_normal_of_log(top + log(share)) : a;
    return x > a ? x : a;
}

/* A normal number in [a, b]. Where most of that is above 0 the other tail is used: probabilities near 1 have no digits left. */
static double xdi_truncated_normal(double a, double b, double uniform) {
    return a + b > 0.0 ? -xdi_lower_normal(-b, -a, 1.0 - uniform) : xdi_lower_normal(a, b, uniform);
}

/* Degrees of freedom from which on w has the scale 1 / sqrt(n). */
static const double xdi_student_many = 1e7;

/* ln cosh w */
static double xdi_log_cosh(double w) {
    const double size = fabs(w), half = sinh(0.5 * size);
    if (size < 1.0) return log1p(2.0 * half * half); /* where the sum below would cancel */
    return size + log1p(exp(-2.0 * size)) - 0.69314718055994531;
}

/* Student's t with n degrees of freedom in a range. With x = sqrt(n) sinh w its density is (cosh w)^-n in w up to a factor: smooth
 * and without a long tail. It is taken relative to that at `base`, the range's point of most mass, 0 or above: however far out in a
 * tail the range is, it has digits. Since the range is finite, the factor is not needed. */
typedef struct xdi_student {
    double n, base, height; /* height: ln cosh of the base */
} xdi_student;

static double xdi_student_density(const xdi_student *s, double w) {
    return exp(-s->n * (xdi_log_cosh(w) - s->height));
}

/* From there on nothing is added that a double could hold: ln cosh is convex, so it rises from the base on at least as from 0, and
 * at least by the slope that it has there. */
static double xdi_student_reach(const xdi_student *s) {
    const double n = s->n, slope = n * tanh(s->base);
    const double end = n > xdi_student_many ? 40.0 / sqrt(n) : 745.2 / n + 0.7;
    return slope > 0.0 && 745.2 / slope < end ? 745.2 / slope : end;
}

/* Its integral from the base to w: Gauss's formula of eight points on pieces over which it changes little. */
static double xdi_student_integral(const xdi_student *s, double w) {
    static const double at[4] = { 0.18343464249564981, 0.52553240991632899, 0.79666647741362673,
                                  0.96028985649753618 };
    static const double weight[4] = { 0.36268378337836199, 0.31370664587788727, 0.22238103445337448,
                                      0.10122853629037626 };
    const double n = s->n, size = fabs(w - s->base), end = xdi_student_reach(s);
    const double reach = size < end ? size : end, slope = n * tanh(s->base);
    const double smooth = n > 3.0 ? 1.0 / sqrt(1.0 + n) : 0.5;
    const double widest = slope * smooth > 2.0 ? 2.0 / slope : smooth;
    const int pieces = 1 + (int)(reach / widest);
    const double half = (w < s->base ? -0.5 : 0.5) * reach / (double)pieces;
    double sum = 0.0;
    for (int i = 0; i < pieces; i++) {
        const double middle = s->base + half * (double)(2 * i + 1);
        for (int k = 0; k < 4; k++)
            sum += weight[k] * (xdi_student_density(s, middle - half * at[k]) +
                                xdi_student_density(s, middle + half * at[k]));
    }
    return half * sum;
}

/* A number of Student's t in [a, b]: Newton's method, by halves where that leaves the range. */
static double xdi_student_in(double a, double b, double n, double uniform) {
    const double root = sqrt(n), unit = n > xdi_student_many ? 1.0 / root : 1.0;
    double low = asinh(a / root), high = asinh(b / root);
    const double base = low > 0.0 ? low : 0.0;
    const xdi_student s = { n, base, xdi_log_cosh(base) };
    const double first = xdi_student_integral(&s, low), all = xdi_student_integral(&s, high) - first;
    const double target = first + uniform * all;
    double w = low + uniform * (high - low);
    for (int i = 0; i < 200; i++) {
        const double error = xdi_student_integral(&s, w) - target;
        if (error > 0.0)
            high = w;
        else
            low = w;
        double next = w - error / xdi_student_density(&s, w);
        if (!(next > low && next < high)) next = low + 0.5 * (high - low);
        const bool settled = fabs(next - w) <= 1e-15 * (unit + fabs(w));
        w = next;
        if (settled) break;
    }
    return root * sinh(w);
}

/* A range below 0 is one above it, mirrored. */
static double xdi_truncated_student(double a, double b, double n, double uniform) {
    return b < 0.0 ? -xdi_student_in(-b, -a, n, 1.0 - uniform) : xdi_student_in(a, b, n, uniform);
}

/* ---- from a draw ---- */

/* The range of the LOG kinds in units of the distribution. */
static double xdi_time_log(const xd_time_sampler *s, double uniform) {
    const double least = s->min_t > XDI_TIME_LEAST ? s->min_t : XDI_TIME_LEAST;
    const double a = (log(least) - s->mean) / s->deviation, b = (log(s->max_t) - s->mean) / s->deviation;
    if (uniform <= 0.0 || uniform >= 1.0) return uniform > 0.0 ? s->max_t : least;
    const double x = s->kind == XD_TIME_LOG_T ? xdi_truncated_student(a, b, s->freedom, uniform)
                                              : xdi_truncated_normal(a, b, uniform);
    return exp(x * s->deviation + s->mean);
}

static double xdi_time_of(const xd_time_sampler *s, double draw) {
    const double width = s->max_t - s->min_t, u = draw * width + s->min_t;
    switch (s->kind) {
    case XD_TIME_SHIFTED: return u * s->shift / (u * (s->shift - 1.0) + 1.0);
    case XD_TIME_LOG_NORMAL:
    case XD_TIME_LOG_T: return xdi_time_log(s, draw);
    case XD_TIME_LOGIT_NORMAL: return width / (1.0 + exp(-(draw * s->deviation + s->mean))) + s->min_t;
    case XD_TIME_LIST: return s->list[(int64_t)draw];
    case XD_TIME_STEP: return xdi_step_time(s->count, (int64_t)draw, s->dtype == XD_DTYPE_F32);
    case XD_TIME_GRID:
        return s->grid == XD_NOISE_EDM ? xdi_edm_time(s->min_t, s->max_t, s->count, (int64_t)draw)
                                       : xdi_even_step(s->min_t, s->max_t, s->count, (int64_t)draw);
    default: break;
    }
    return u;
}

/* Of a checked sampler and draw. */
static double xdi_time_rounded(const xd_time_sampler *s, double draw) {
    const double exact = xdi_time_of(s, draw), low = xdi_time_low(s), high = xdi_time_high(s);
    const double t = s->dtype == XD_DTYPE_F32 ? (double)(float)exact : exact;
    if (xdi_time_is_list(s) || s->kind == XD_TIME_STEP) return t;
    return t > low ? (t < high ? t : high) : low;
}

XD_PRIVATE xd_result xdi_time_of_draw(xd_ctx *ctx, const xd_time_sampler *sampler, double draw, double *out) {
    XD_TRY(xdi_times_check_sampler(ctx, sampler));
    if (xdi_time_has_index(sampler)) {
        const int64_t first = xdi_time_first(sampler), last = xdi_time_last(sampler);
        XD_REQUIRE(ctx, draw >= (double)first && draw <= (double)last && draw == floor(draw),
                   XD_ERROR_ARGUMENT, "%g is no index from %lld to %lld", draw, (long long)first,
                   (long long)last);
    } else if (sampler->kind == XD_TIME_LOGIT_NORMAL) {
        XD_REQUIRE(ctx, !isnan(draw), XD_ERROR_ARGUMENT, "the normal number %g", draw);
    } else {
        XD_REQUIRE(ctx, draw >= 0.0 && draw <= 1.0, XD_ERROR_ARGUMENT,
                   "the uniform number %g is not in [0, 1]", draw);
    }
    *out = xdi_time_rounded(sampler, draw);
    return XD_OK;
}

/* ---- from counters ---- */

XD_API int64_t xd_draw_index(const xd_philox *random, int64_t block, int64_t count) {
    const int64_t index = (int64_t)(xd_philox_uniform_f64(random, block) * (double)count);
    return index < count ? index : count - 1;
}

static double xdi_time_at(const xd_time_sampler *s, const xd_philox *random, int64_t block) {
    const double uniform = xd_philox_uniform_f64(random, block);
    const int64_t first = xdi_time_first(s), last = xdi_time_last(s);
    double draw = uniform;
    if (s->kind == XD_TIME_LOGIT_NORMAL) draw = xdi_normal_of(uniform);
    if (xdi_time_has_index(s)) draw = (double)(first + xd_draw_index(random, block, last - first + 1));
    return xdi_time_rounded(s, draw);
}

/* One draw a chunk of the frames of one sample. */
static void xdi_times_of_frames(const xd_time_sampler *s, const xd_philox *random, int64_t frames,
                                double *times) {
    const int64_t longer = frames % s->chunk;
    for (int64_t i = 0; i < frames; i++)
        times[i] = xdi_time_at(s, random, i < longer ? 0 : (i - longer) / s->chunk);
}

static xd_result xdi_times_of_samples(xd_ctx *ctx, const xd_time_sampler *sampler, const xd_philox *random,
                                      int64_t count, double *times) {
    const int64_t first = (int64_t)random->sample;
    xd_philox at = *random;
    XD_TRY(xdi_times_check_sampler(ctx, sampler));
    XD_REQUIRE(ctx, count >= 0 && first <= ((int64_t)1 << 32) - count, XD_ERROR_ARGUMENT,
               "%lld samples from sample %lld: they are numbered from 0 to 2^32 - 1", (long long)count,
               (long long)first);
    for (int64_t i = 0; i < count; i++) {
        at.sample = (uint32_t)(first + i);
        times[i] = xdi_time_at(sampler, &at, 0);
    }
    return XD_OK;
}

XD_API xd_result xd_times_draw(xd_ctx *ctx, const xd_time_sampler *sampler, const xd_philox *random,
                               int64_t count, double *times) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, sampler, random);
    XDI_GIVEN_LIST(ctx, times, count);
    if (sampler->chunk == 0) return xdi_times_of_samples(ctx, sampler, random, count, times);
    XD_TRY(xdi_times_check_sampler(ctx, sampler));
    XD_REQUIRE(ctx, sampler->chunk >= 1 && sampler->chunk <= count, XD_ERROR_ARGUMENT,
               "chunks of %lld frames of %lld", (long long)sampler->chunk, (long long)count);
    xdi_times_of_frames(sampler, random, count, times);
    return XD_OK;
}
