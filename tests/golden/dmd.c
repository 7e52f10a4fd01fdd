/* Golden cases of the area dmd: noise schedules, conversions, times, guidance. */
#include "golden.h"
#include "dmd/internal.h"

#include <stdio.h>
#include <string.h>

enum { NAME = 64 };

/* ---- tensors mixed sample by sample ---- */

/* The factors of a sample, at its time. */
typedef xd_result (*mixer)(golden_case *c, const void *state, double t, xd_mix *out);

/* What two tensors of the file, or results, are mixed by: a time for each sample, or for each index of the leading dimensions. */
typedef struct mixing {
    const golden_array *shape; /* of the tensors */
    const golden_array *times;
    mixer factors;
    const void *state;
    xd_dtype dtype;
} mixing;

/* The dimensions to which a time belongs; the others are one row. */
static int time_dims(const golden_array *times) {
    int dims = times->ndim;
    while (dims > 1 && times->shape[dims - 1] == 1) dims--;
    return dims;
}

/* The time of a row: dimensions of length 1 are repeated. */
static double time_of_row(const mixing *m, int64_t row) {
    int64_t at = 0, stride = 1;
    for (int d = time_dims(m->times) - 1; d >= 0; d--) {
        const int64_t extent = m->shape->shape[d], index = row % extent;
        if (m->times->shape[d] != 1) at += index * stride;
        stride *= m->times->shape[d];
        row /= extent;
    }
    return at < m->times->count ? m->times->values[at] : 0.0;
}

static const void *as_dtype(golden_case *c, const double *values, int64_t count, xd_dtype dtype) {
    void *out = golden_memory(c, (size_t)(count + 1) * 8);
    for (int64_t i = 0; i < count; i++) xd_store_f64(out, dtype, i, values[i]);
    return out;
}

/* Mixed values, widened; NULL when a call failed. q NULL -> one tensor. */
static const double *mixed(golden_case *c, const mixing *m, const double *p, const double *q) {
    golden_loans loans;
    xd_mix_desc d;
    int64_t rows = 1;
    for (int i = 0; i < time_dims(m->times); i++) rows *= m->shape->shape[i];
    xd_mix *factors = (xd_mix *)golden_memory(c, (size_t)(rows + 1) * sizeof *factors);
    void *out = golden_memory(c, (size_t)(m->shape->count + 1) * 8);
    const int64_t columns = rows ? m->shape->count / rows : 0;
    for (int64_t r = 0; r < rows; r++)
        if (!golden_ok(c, m->factors(c, m->state, time_of_row(m, r), &factors[r]))) return NULL;
    memset(&d, 0, sizeof d);
    golden_loans_open(&loans, golden_ctx(c));
    d.p = golden_rows_in(&loans,
                         xd_rows_of(as_dtype(c, p, m->shape->count, m->dtype), m->dtype, rows, columns));
    if (q)
        d.q = golden_rows_in(&loans,
                             xd_rows_of(as_dtype(c, q, m->shape->count, m->dtype), m->dtype, rows, columns));
    d.out = golden_rows_out(&loans, xd_rows_of(out, m->dtype, rows, columns));
    d.mix = (const xd_mix *)golden_in(&loans, factors, (size_t)rows * sizeof *factors);
    if (!golden_ok(c, golden_back(&loans, xd_mix_rows(golden_ctx(c), &d)))) return NULL;
    return golden_widen(c, out, m->dtype, m->shape->count);
}

/* In the type of the run: out.NAME by double arithmetic, out32.NAME by float32. */
static void compare(golden_case *c, const char *result, const double *got, int64_t count, xd_dtype dtype) {
    char name[NAME];
    snprintf(name, sizeof name, "%s.%s", dtype == XD_DTYPE_F64 ? "out" : "out32", result);
    if (!got) return;
    if (dtype == XD_DTYPE_F64)
        golden_double(c, name, got, count);
    else
        golden_close(c, name, got, count);
}

/* ---- factors ---- */

/* A schedule of the file, and what is converted. */
typedef struct converter {
    xd_noise_schedule schedule;
    xd_conversion conversion;
    bool forward, target; /* x_t from x0 and eps; what `to` should have been */
} converter;

static xd_result converter_factors(golden_case *c, const void *state, double t, xd_mix *out) {
    const converter *k = (const converter *)state;
    xd_ctx *ctx = golden_ctx(c);
    if (k->forward) return xd_noise_mix(ctx, &k->schedule, t, out);
    if (k->target) return xdi_target_mix(ctx, &k->schedule, &k->conversion, t, out);
    return xd_prediction_mix(ctx, &k->schedule, &k->conversion, t, out);
}

static bool prediction_of(const char *name, size_t bytes, xd_prediction *out) {
    static const char *const names[] = { "x0", "eps", "v", "flow", "score" };
    for (int i = 0; i < 5; i++)
        if (strlen(names[i]) == bytes && memcmp(names[i], name, bytes) == 0) {
            *out = (xd_prediction)i;
            return true;
        }
    return false;
}

/* "x0_to_eps" */
static bool conversion_of(const char *name, xd_conversion *out) {
    const char *to = strstr(name, "_to_");
    return to && prediction_of(name, (size_t)(to - name), &out->from) &&
           prediction_of(to + 4, strlen(to + 4), &out->to);
}

/* X of out.X or out32.X, whichever is of the run's type; NULL for another tensor. */
static const char *result_name(const char *tensor, xd_dtype dtype) {
    const char *prefix = dtype == XD_DTYPE_F64 ? "out." : "out32.";
    return strncmp(tensor, prefix, strlen(prefix)) == 0 ? tensor + strlen(prefix) : NULL;
}

/* Every result of the file named PREFIX_FROM_to_TO. */
static void check_conversions(golden_case *c, mixing *m, converter *k, const double *raw, const double *x_t,
                              const char *prefix) {
    for (int i = 0; i < golden_tensor_count(c); i++) {
        const char *name = golden_tensor_name(c, i);
        const char *what = result_name(name, m->dtype);
        if (!what || strncmp(what, prefix, strlen(prefix)) != 0) continue;
        if (!conversion_of(what + strlen(prefix), &k->conversion)) continue;
        compare(c, what, mixed(c, m, raw, x_t), m->shape->count, m->dtype);
    }
}

/* ---- conversions under rectified flow ---- */

static bool flow_matching_claims(const golden_case *c) {
    return golden_origin_has(c, "flow_matching.py::add_noise");
}

static void check_named(golden_case *c, mixing *m, converter *k, const double *raw, const double *x_t) {
    static const struct {
        const char *name;
        xd_prediction from;
    } calls[] = { { "pred_noise_to_pred_x0", XD_PREDICT_EPS }, { "pred_x0_from_flow", XD_PREDICT_FLOW } };
    for (int i = 0; i < 2; i++) {
        k->conversion.from = calls[i].from;
        k->conversion.to = XD_PREDICT_X0;
        compare(c, calls[i].name, mixed(c, m, raw, x_t), m->shape->count, m->dtype);
    }
}

static void flow_matching_run(golden_case *c) {
    const golden_array t = golden_tensor(c, "in.t"), x0 = golden_tensor(c, "in.x0");
    const golden_array eps = golden_tensor(c, "in.eps"), raw = golden_tensor(c, "in.raw");
    converter k;
    mixing m = { &x0, &t, converter_factors, &k, XD_DTYPE_F64 };
    for (int i = 0; i < 2; i++) {
        memset(&k, 0, sizeof k);
        k.schedule = xd_noise_defaults(XD_NOISE_FLOW);
        k.schedule.min_t = golden_number(c, "cfg.min_t", 0.0);
        k.schedule.max_t = golden_number(c, "cfg.max_t", 1.0);
        k.conversion.v_is_flow = true;
        k.conversion.through_x0 = true;
        k.forward = true;
        m.dtype = i ? XD_DTYPE_F32 : XD_DTYPE_F64;
        const double *x_t = mixed(c, &m, x0.values, eps.values);
        compare(c, "x_t", x_t, x0.count, m.dtype);
        k.forward = false;
        if (!x_t) return;
        check_named(c, &m, &k, raw.values, x_t);
        check_conversions(c, &m, &k, raw.values, x_t, "");
        check_conversions(c, &m, &k, raw.values, x_t, "convert_");
    }
}

/* ---- schedules ---- */

static bool schedule_claims(const golden_case *c) {
    return golden_origin_has(c, "noise_schedule.py") && !golden_origin_has(c, "sample_t");
}

static xd_noise_kind kind_of(golden_case *c) {
    static const char *const names[] = { "rf", "rectified_flow", "edm",       "alphas", "trig",
                                         "sd", "sdxl",           "cogvideox", NULL };
    static const xd_noise_kind kinds[] = { XD_NOISE_FLOW, XD_NOISE_FLOW, XD_NOISE_EDM, XD_NOISE_VP,
                                           XD_NOISE_TRIG, XD_NOISE_VP,   XD_NOISE_VP,  XD_NOISE_VP };
    static const char *const classes[] = {
        "RFNoise", "RFNoise", "EDMNoise", "AlphasNoise", "TrigNoise", NULL
    };
    int absent = 0;
    for (int i = 0; classes[i]; i++)
        if (golden_origin_has(c, classes[i])) absent = i;
    return kinds[golden_choice(c, "cfg.schedule", names, absent)];
}

static xd_noise_schedule schedule_of(golden_case *c) {
    xd_noise_schedule s = xd_noise_defaults(kind_of(c));
    if (s.kind == XD_NOISE_EDM) golden_lacks(c, "cfg.rho", "7.0");
    s.min_t = golden_number(c, "cfg.min_t", s.min_t);
    s.max_t = golden_number(c, "cfg.max_t", s.max_t);
    s.clamp_min = golden_number(c, "cfg.clamp_min", 0.0);
    if (s.kind == XD_NOISE_VP) {
        const golden_array table = golden_tensor(c, "in.alphas_cumprod");
        s.table = table.values;
        s.table_count = table.count;
    }
    return s;
}

/* FastGen's flows and tables tell networks t times num_steps. */
static double network_scale(const xd_noise_schedule *s, int64_t count) {
    return xdi_noise_network_scale(s) != 1.0 ? (double)count : 1.0;
}

static void check_levels(golden_case *c, const xd_noise_schedule *s, int64_t count, const golden_array *t) {
    enum { ALPHA, SIGMA, ALPHA_RATE, SIGMA_RATE, RATIO, TIME, SEEN, RESULTS };
    static const char *const names[RESULTS] = { "alpha",    "sigma",         "alpha_prime", "sigma_prime",
                                                "sqrt_snr", "sqrt_snr_to_t", "rescale_t" };
    double *got[RESULTS];
    xd_ctx *ctx = golden_ctx(c);
    for (int k = 0; k < RESULTS; k++) got[k] = (double *)golden_memory(c, (size_t)(t->count + 1) * 8);
    for (int64_t i = 0; i < t->count; i++) {
        xd_noise_level level;
        if (!golden_ok(c, xdi_noise_level_at(ctx, s, t->values[i], &level))) return;
        got[ALPHA][i] = level.alpha, got[SIGMA][i] = level.sigma;
        got[ALPHA_RATE][i] = level.alpha_rate, got[SIGMA_RATE][i] = level.sigma_rate;
        if (!golden_ok(c, xdi_noise_ratio(ctx, s, t->values[i], &got[RATIO][i])) ||
            !golden_ok(c, xdi_noise_time_of_ratio(ctx, s, got[RATIO][i], true, &got[TIME][i])))
            return;
        got[SEEN][i] = xdi_noise_network_time(t->values[i], network_scale(s, count), XD_DTYPE_F64);
    }
    for (int k = 0; k < RESULTS; k++) compare(c, names[k], got[k], t->count, XD_DTYPE_F64);
}

/* The indices of the nearest sigmas, and the grid's times that are nearest to given ones. */
static void check_nearest(golden_case *c, const xd_noise_schedule *s, int64_t count, const golden_array *t) {
    golden_array query;
    memset(&query, 0, sizeof query);
    if (golden_has(c, "in.closest_sigma_query")) query = golden_tensor(c, "in.closest_sigma_query");
    double *index = (double *)golden_memory(c, (size_t)(query.count + 1) * 8);
    double *time = (double *)golden_memory(c, (size_t)(t->count + 1) * 8);
    xd_ctx *ctx = golden_ctx(c);
    int64_t nearest = 0;
    for (int64_t i = 0; i < query.count; i++) {
        if (!golden_ok(c, xdi_noise_nearest(ctx, s, count, query.values[i], &nearest))) return;
        index[i] = (double)nearest;
    }
    if (query.values) golden_exact(c, "out.closest_sigma_idx", index, query.count);
    for (int64_t i = 0; i < t->count; i++) {
        xd_noise_level level;
        if (!golden_ok(c, xdi_noise_level_at(ctx, s, t->values[i], &level)) ||
            !golden_ok(c, xdi_noise_nearest(ctx, s, count, level.sigma, &nearest)) ||
            !golden_ok(c, xdi_noise_grid_time(ctx, s, count, nearest, &time[i])))
            return;
        /* The peer's time of a step of the flow is index / num_steps, whatever the range. */
        if (s->kind == XD_NOISE_FLOW) time[i] = (double)nearest / (double)count;
    }
    compare(c, "sigma_idx_to_t", time, t->count, XD_DTYPE_F64);
}

/* The first and last sigmas of the grid. */
static void check_ends(golden_case *c, const xd_noise_schedule *s, int64_t count) {
    if (!golden_has(c, "out.sigmas_head_tail")) return;
    const golden_array ends = golden_tensor(c, "out.sigmas_head_tail");
    double *sigma = (double *)golden_memory(c, (size_t)(ends.count + 1) * 8);
    xd_ctx *ctx = golden_ctx(c);
    for (int64_t i = 0; i < ends.count; i++) {
        const int64_t at = i < ends.count / 2 ? i : count - ends.count + i;
        xd_noise_level level;
        double t = 0.0;
        if (!golden_ok(c, xdi_noise_grid_time(ctx, s, count, at, &t)) ||
            !golden_ok(c, xdi_noise_level_at(ctx, s, t, &level)))
            return;
        sigma[i] = level.sigma;
    }
    compare(c, "sigmas_head_tail", sigma, ends.count, XD_DTYPE_F64);
}

/* Which of the grid's times the steps of an EDM student are, in float as the peer's linspace. */
static int64_t list_index(golden_case *c, int64_t count, int steps, int i) {
    const float last = (float)(int64_t)(golden_number(c, "cfg.max_step_percent", 0.998) * (double)count);
    const float first = (float)(int64_t)(golden_number(c, "cfg.min_step_percent", 0.002) * (double)count);
    const float step = (first - last) / (float)steps;
    return (int64_t)(i < (steps + 1) / 2 ? last + step * (float)i : first - step * (float)(steps - i));
}

/* xd_noise_steps has EDM's list of 1000 times and the usual ends; of others the list is made of the grid. */
static bool list_of(golden_case *c, const xd_noise_schedule *s, int64_t count, int steps, double *list) {
    const bool usual = count == 1000 && golden_number(c, "cfg.max_step_percent", 0.998) == 0.998 &&
                       golden_number(c, "cfg.min_step_percent", 0.002) == 0.002;
    if (s->kind != XD_NOISE_EDM || usual) return golden_ok(c, xd_noise_steps(golden_ctx(c), s, steps, list));
    for (int i = 0; i < steps; i++)
        if (!golden_ok(
                c, xdi_noise_grid_time(golden_ctx(c), s, count, list_index(c, count, steps, i), &list[i])))
            return false;
    list[steps] = 0.0;
    return true;
}

static void check_lists(golden_case *c, const xd_noise_schedule *s, int64_t count) {
    for (int i = 0; i < golden_tensor_count(c); i++) {
        const char *name = golden_tensor_name(c, i);
        int steps = 0;
        if ((sscanf(name, "out.t_list_%d", &steps) != 1 && sscanf(name, "out32.t_list_%d", &steps) != 1) ||
            steps < 1)
            continue;
        double *list = (double *)golden_memory(c, (size_t)(steps + 1) * 8);
        if (!list_of(c, s, count, steps, list)) continue;
        if (name[3] == '.')
            golden_double(c, name, list, steps + 1);
        else
            golden_close(c, name, list, steps + 1);
    }
}

/* Noise of the largest sigma. */
static xd_result start_factors(golden_case *c, const void *state, double t, xd_mix *out) {
    const xd_noise_schedule *s = (const xd_noise_schedule *)state;
    xd_noise_level level;
    (void)t;
    out->c1 = 0.0;
    if (!golden_ok(c, xdi_noise_level_at(golden_ctx(c), s, s->max_t, &level))) return XD_ERROR_ARGUMENT;
    out->c0 = level.sigma;
    return XD_OK;
}

static void check_start(golden_case *c, const xd_noise_schedule *s, const golden_array *eps,
                        const golden_array *t, xd_dtype dtype) {
    const mixing m = { eps, t, start_factors, s, dtype };
    compare(c, "latents", mixed(c, &m, eps->values, NULL), eps->count, dtype);
}

static void check_process(golden_case *c, const xd_noise_schedule *s, const golden_array *t, xd_dtype dtype) {
    if (!golden_has(c, "in.x0") || !golden_has(c, "in.eps")) return;
    const golden_array x0 = golden_tensor(c, "in.x0"), eps = golden_tensor(c, "in.eps");
    const golden_array raw = golden_tensor(c, golden_has(c, "in.raw") ? "in.raw" : "in.eps");
    converter k;
    mixing m = { &x0, t, converter_factors, &k, dtype };
    memset(&k, 0, sizeof k);
    k.schedule = *s;
    k.conversion.through_x0 = true;
    k.forward = true;
    const double *x_t = mixed(c, &m, x0.values, eps.values);
    compare(c, "forward_process", x_t, x0.count, dtype);
    k.forward = false;
    k.target = true;
    k.conversion.to = XD_PREDICT_FLOW;
    if (golden_wants(c, "out.cond_velocity"))
        compare(c, "cond_velocity", mixed(c, &m, x0.values, eps.values), x0.count, dtype);
    k.target = false;
    if (x_t) check_conversions(c, &m, &k, raw.values, x_t, "convert_");
    check_start(c, s, &eps, t, dtype);
}

static void schedule_run(golden_case *c) {
    const xd_noise_schedule s = schedule_of(c);
    const golden_array t = golden_tensor(c, "in.t");
    const int64_t count = golden_integer(c, "cfg.num_steps", 1000, 2, 1 << 20);
    xd_noise_level last;
    if (!golden_ok(c, xdi_noise_check(golden_ctx(c), &s))) return;
    check_levels(c, &s, count, &t);
    check_nearest(c, &s, count, &t);
    check_ends(c, &s, count);
    check_lists(c, &s, count);
    if (golden_ok(c, xdi_noise_level_at(golden_ctx(c), &s, s.max_t, &last))) {
        if (s.kind == XD_NOISE_TRIG) /* the peer's sine is float32 */
            golden_close(c, "out.max_sigma", &last.sigma, 1);
        else
            compare(c, "max_sigma", &last.sigma, 1, XD_DTYPE_F64);
    }
    check_process(c, &s, &t, XD_DTYPE_F64);
    check_process(c, &s, &t, XD_DTYPE_F32);
}

/* ---- times ---- */

static bool times_claims(const golden_case *c) {
    return golden_wants(c, "out.t") &&
           (golden_origin_has(c, "sample_timesteps") || golden_origin_has(c, "sample_t"));
}

static const char *draws_name(const golden_case *c) {
    if (golden_has(c, "in.normal")) return "in.normal";
    return golden_has(c, "in.index") ? "in.index" : "in.uniform";
}

/* FastGen's calls have ranges of their own where the configuration gives none. */
static void fastgen_settings(golden_case *c, xd_time_sampler *s) {
    const xd_noise_kind kind = kind_of(c);
    const xd_noise_schedule schedule = xd_noise_defaults(kind);
    const bool below_one = kind == XD_NOISE_FLOW || kind == XD_NOISE_VP;
    s->min_t = golden_number(c, "cfg.min_t", below_one ? 0.001 : schedule.min_t);
    s->max_t = golden_number(c, "cfg.max_t", below_one ? 0.999 : schedule.max_t);
    s->mean = golden_number(c, "cfg.train_p_mean", kind == XD_NOISE_EDM ? -1.2 : 0.0);
    s->deviation = golden_number(c, "cfg.train_p_std", kind == XD_NOISE_EDM ? 1.2 : 1.0);
    s->freedom = golden_number(c, "cfg.log_t_df", s->freedom);
    if (kind != XD_NOISE_EDM) s->grid = XD_NOISE_FLOW, s->first = 0, s->last = s->count - 1;
}

static xd_time_sampler sampler_of(golden_case *c, golden_array *list) {
    static const char *const names[] = { "uniform",    "shifted", "lognormal", "logitnormal",
                                         "polynomial", "log_t",   "t_list",    NULL };
    static const xd_time_kind kinds[] = { XD_TIME_UNIFORM,      XD_TIME_SHIFTED, XD_TIME_LOG_NORMAL,
                                          XD_TIME_LOGIT_NORMAL, XD_TIME_GRID,    XD_TIME_LOG_T,
                                          XD_TIME_LIST };
    const bool fastgen = golden_origin_has(c, "FastGen");
    if (golden_is(c, "cfg.time_dist_type", "shifted_logitnormal"))
        golden_lacks(c, "cfg.time_dist_type", "without the shift");
    xd_time_sampler s = xd_times_defaults(fastgen ? XD_DMD_FASTGEN : XD_DMD_MODELOPT);
    s.kind = kinds[golden_choice(c, "cfg.time_dist_type", names, 0)];
    if (fastgen) fastgen_settings(c, &s);
    s.min_t = golden_number(c, "cfg.min_t", s.min_t);
    s.max_t = golden_number(c, "cfg.max_t", s.max_t);
    s.shift = golden_number(c, "cfg.shift", s.shift);
    s.mean = golden_number(c, "cfg.p_mean", s.mean);
    s.deviation = golden_number(c, "cfg.p_std", s.deviation);
    s.list_count = golden_numbers(c, "cfg.t_list", list->values, (int)list->count);
    s.list = list->values;
    if (s.list_count >= 2) s.kind = XD_TIME_LIST;
    return s;
}

static void times_run(golden_case *c) {
    enum { ROOM = 1024 };
    golden_array list;
    memset(&list, 0, sizeof list);
    list.count = ROOM;
    list.values = (double *)golden_memory(c, ROOM * sizeof(double));
    const golden_array draws = golden_tensor(c, draws_name(c));
    double *t = (double *)golden_memory(c, (size_t)(draws.count + 1) * 8);
    xd_time_sampler s = sampler_of(c, &list);
    for (int run = 0; run < 2; run++) {
        s.dtype = run ? XD_DTYPE_F32 : XD_DTYPE_F64;
        for (int64_t i = 0; i < draws.count; i++)
            if (!golden_ok(c, xdi_time_of_draw(golden_ctx(c), &s, draws.values[i], &t[i]))) return;
        compare(c, "t", t, draws.count, s.dtype);
    }
}

/* ---- guidance ---- */

static bool guidance_claims(const golden_case *c) {
    return golden_origin_has(c, "classifier_free_guidance");
}

static xd_result guidance_factors(golden_case *c, const void *state, double t, xd_mix *out) {
    (void)c, (void)t;
    *out = xdi_guidance_mix(*(const double *)state);
    return XD_OK;
}

static void guidance_run(golden_case *c) {
    const double scale = golden_number(c, "cfg.guidance_scale", 1.0);
    const golden_array with = golden_tensor(c, "in.cond"), without = golden_tensor(c, "in.uncond");
    double none = 0.0;
    golden_array one;
    memset(&one, 0, sizeof one); /* one row, whose time is not used */
    one.values = &none;
    one.count = one.ndim = 1;
    one.shape[0] = 1;
    mixing m = { &with, &one, guidance_factors, &scale, XD_DTYPE_F64 };
    compare(c, "guided", mixed(c, &m, with.values, without.values), with.count, XD_DTYPE_F64);
    m.dtype = XD_DTYPE_F32;
    compare(c, "guided", mixed(c, &m, with.values, without.values), with.count, XD_DTYPE_F32);
}

const golden_kind golden_kinds_dmd[] = {
    { "flow matching", flow_matching_claims, flow_matching_run },
    { "schedules", schedule_claims, schedule_run },
    { "times", times_claims, times_run },
    { "guidance", guidance_claims, guidance_run },
    { NULL, NULL, NULL },
};
