/* Averages formed after training: the least squares of profiles, and sums of snapshots. */

#include "train/post_hoc.h"

#include "base/scalar.h"
#include "train/internal.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* ---- widths ---- */

XD_API xd_result xd_post_hoc_sigma_rel(xd_ctx *ctx, double gamma, double *sigma_rel) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, sigma_rel);
    XD_REQUIRE(ctx, gamma > -1.0 && gamma < HUGE_VAL, XD_ERROR_ARGUMENT,
               "the exponent %g is not above -1, or not finite", gamma);
    *sigma_rel = sqrt((gamma + 1.0) / (gamma + 3.0)) / (gamma + 2.0);
    return XD_OK;
}

/* The largest root of (g + 2)^2 (g + 3) = (g + 1) / sigma^2, by Newton's steps from above: there the difference is convex and
 * rises, so they go down until rounding stops them. */
XD_API xd_result xd_post_hoc_gamma(xd_ctx *ctx, double sigma_rel, double *gamma) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, gamma);
    const double widest = 1.0 / sqrt(12.0); /* as people write it; sqrt(1.0 / 12.0) is less by a unit */
    XD_REQUIRE(ctx, sigma_rel >= 1e-100 && sigma_rel <= widest, XD_ERROR_ARGUMENT,
               "the relative width %g is not in (0, %.17g]", sigma_rel, widest);
    const double target = 1.0 / (sigma_rel * sigma_rel);
    double g = 1.0 / sigma_rel, before;
    do {
        const double value = (g + 2.0) * (g + 2.0) * (g + 3.0) - target * (g + 1.0);
        const double slope = (g + 2.0) * (3.0 * g + 8.0) - target;
        before = g;
        g -= value / slope;
    } while (g > 0.0 && g < before);
    *gamma = g > 0.0 ? before : 0.0;
    return XD_OK;
}

/* ---- coefficients ---- */

/* The problem in profiles of length 1: matrix y = right. */
typedef struct xdi_post_hoc {
    const xd_post_hoc_profile *snapshots;
    int64_t n, rank;        /* snapshots, and those whose profiles are independent */
    double *matrix;         /* [n, n] inner products */
    double *factor;         /* [n, n] lower triangle, of the rows and columns in `order` */
    double *right, *y;      /* [n] */
    double *pivot, *change; /* [n] */
    int64_t *order;         /* [n] the snapshots that are taken, then the others */
} xdi_post_hoc;

/* The length of a profile. */
static double xdi_profile_length(const xd_post_hoc_profile *p) {
    return (p->gamma + 1.0) / sqrt((2.0 * p->gamma + 1.0) * (double)p->iteration);
}

/* The inner product of two profiles divided by their lengths; the later of the two is the integrand's upper bound. */
static double xdi_profile_cosine(const xd_post_hoc_profile *a, const xd_post_hoc_profile *b) {
    const xd_post_hoc_profile *late = a->iteration > b->iteration ? a : b, *early = late == a ? b : a;
    const double both = a->gamma + b->gamma + 1.0;
    const double power = pow((double)early->iteration / (double)late->iteration, late->gamma + 0.5);
    return sqrt((2.0 * a->gamma + 1.0) * (2.0 * b->gamma + 1.0)) / both * power;
}

static xd_result xdi_profile_check(xd_ctx *ctx, const char *what, int64_t index,
                                   const xd_post_hoc_profile *p) {
    XD_REQUIRE(ctx, p->iteration >= 1, XD_ERROR_ARGUMENT, "%s %lld is of iteration %lld", what,
               (long long)index, (long long)p->iteration);
    XD_REQUIRE(ctx, p->gamma > -0.5 && p->gamma < 1e15, XD_ERROR_ARGUMENT,
               "%s %lld: the exponent %g is not above -1/2, or too large", what, (long long)index, p->gamma);
    return XD_OK;
}

/* Checks everything and fills in the target's iteration. */
static xd_result xdi_post_hoc_check(xd_ctx *ctx, const xd_post_hoc_desc *d, xd_post_hoc_profile *target) {
    int64_t last = 0;
    XD_REQUIRE(ctx, d->snapshot_count >= 1 && d->snapshots, XD_ERROR_ARGUMENT, "%lld snapshots at %p",
               (long long)d->snapshot_count, (const void *)d->snapshots);
    for (int64_t i = 0; i < d->snapshot_count; i++) {
        const xd_post_hoc_profile *p = &d->snapshots[i];
        XD_TRY(xdi_profile_check(ctx, "snapshot", i, p));
        if (p->iteration > last) last = p->iteration;
        for (int64_t k = 0; k < i; k++)
            XD_REQUIRE(ctx, p->iteration != d->snapshots[k].iteration || p->gamma != d->snapshots[k].gamma,
                       XD_ERROR_ARGUMENT, "snapshots %lld and %lld have the same profile", (long long)k,
                       (long long)i);
    }
    *target = d->target;
    if (target->iteration == 0) target->iteration = last;
    XD_TRY(xdi_profile_check(ctx, "target", 0, target));
    XD_REQUIRE(ctx, target->iteration <= last, XD_ERROR_ARGUMENT,
               "an average of iteration %lld, the last snapshot is of %lld", (long long)target->iteration,
               (long long)last);
    return XD_OK;
}

static void xdi_post_hoc_exchange(xdi_post_hoc *p, int64_t i, int64_t k) {
    const int64_t order = p->order[i];
    const double pivot = p->pivot[i];
    p->order[i] = p->order[k];
    p->order[k] = order;
    p->pivot[i] = p->pivot[k];
    p->pivot[k] = pivot;
    for (int64_t c = 0; c < p->n && i != k; c++) {
        const double kept = p->factor[i * p->n + c];
        p->factor[i * p->n + c] = p->factor[k * p->n + c];
        p->factor[k * p->n + c] = kept;
    }
}

/* Cholesky's factor, the largest pivot first, until what is left is rounding. */
static void xdi_post_hoc_factor(xdi_post_hoc *p) {
    const int64_t n = p->n;
    for (p->rank = 0; p->rank < n; p->rank++) {
        const int64_t j = p->rank;
        int64_t best = j;
        for (int64_t i = j + 1; i < n; i++)
            if (p->pivot[i] > p->pivot[best]) best = i;
        if (p->pivot[best] <= 4.0 * DBL_EPSILON * (double)n) return;
        xdi_post_hoc_exchange(p, j, best);
        double *row = &p->factor[j * n];
        row[j] = sqrt(p->pivot[j]);
        for (int64_t i = j + 1; i < n; i++) {
            double *other = &p->factor[i * n];
            double sum = p->matrix[p->order[i] * n + p->order[j]];
            for (int64_t c = 0; c < j; c++) sum -= other[c] * row[c];
            other[j] = sum / row[j];
            p->pivot[i] -= other[j] * other[j];
        }
    }
}

/* change <- what the factor makes of change, in the order of the factor. */
static void xdi_post_hoc_solve(const xdi_post_hoc *p) {
    const int64_t n = p->n;
    double *x = p->change;
    for (int64_t i = 0; i < p->rank; i++) {
        for (int64_t c = 0; c < i; c++) x[i] -= p->factor[i * n + c] * x[c];
        x[i] /= p->factor[i * n + i];
    }
    for (int64_t i = p->rank; i-- > 0;) {
        for (int64_t c = i + 1; c < p->rank; c++) x[i] -= p->factor[c * n + i] * x[c];
        x[i] /= p->factor[i * n + i];
    }
}

/* right - matrix y in row `i`, with products and sums in twice the precision. */
static double xdi_post_hoc_residual(const xdi_post_hoc *p, int64_t i) {
    double sum = p->right[i], low = 0.0;
    for (int64_t c = 0; c < p->n; c++) {
        const double a = -p->matrix[i * p->n + c], b = p->y[c];
        const double product = xd_mul(a, b), next = xd_add(sum, product), moved = xd_sub(next, sum);
        low = xd_add(low, xd_fma(a, b, -product));
        low = xd_add(low, xd_add(xd_sub(sum, xd_sub(next, moved)), xd_sub(product, moved)));
        sum = next;
    }
    return sum + low;
}

/* The distance from the target, whose length is 1. */
static double xdi_post_hoc_distance(const xdi_post_hoc *p) {
    double square = 1.0;
    for (int64_t i = 0; i < p->n; i++) square -= p->y[i] * (p->right[i] + xdi_post_hoc_residual(p, i));
    return square > 0.0 ? sqrt(square) : 0.0;
}

static void xdi_post_hoc_run(xdi_post_hoc *p, const xd_post_hoc_profile *target) {
    enum { STEPS = 4 };
    const int64_t n = p->n;
    for (int64_t i = 0; i < n; i++) {
        p->order[i] = i;
        p->pivot[i] = 1.0;
        p->y[i] = 0.0;
        p->right[i] = xdi_profile_cosine(&p->snapshots[i], target);
        for (int64_t k = 0; k <= i; k++)
            p->matrix[i * n + k] = p->matrix[k * n + i] =
                i == k ? 1.0 : xdi_profile_cosine(&p->snapshots[i], &p->snapshots[k]);
    }
    xdi_post_hoc_factor(p);
    for (int step = 0; step < STEPS; step++) {
        for (int64_t i = 0; i < p->rank; i++) p->change[i] = xdi_post_hoc_residual(p, p->order[i]);
        xdi_post_hoc_solve(p);
        for (int64_t i = 0; i < p->rank; i++) p->y[p->order[i]] += p->change[i];
    }
}

XD_API xd_result xd_post_hoc_coefficients(xd_ctx *ctx, const xd_post_hoc_desc *desc, double *coefficients,
                                          double *error) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, desc, coefficients);
    xd_post_hoc_profile target;
    xdi_post_hoc p;
    size_t bytes = 0;
    XD_TRY(xdi_post_hoc_check(ctx, desc, &target));
    memset(&p, 0, sizeof p);
    const size_t n = (size_t)desc->snapshot_count;
    const bool fits = n < (1u << 24) && xdi_size_multiply(n, (2 * n + 5) * sizeof(double), &bytes);
    double *memory = fits ? (double *)xd_allocate(ctx, bytes) : NULL;
    XD_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for the inner products of %lld snapshots",
               (long long)desc->snapshot_count);
    p.snapshots = desc->snapshots;
    p.n = desc->snapshot_count;
    p.matrix = memory;
    p.factor = p.matrix + n * n;
    p.right = p.factor + n * n;
    p.y = p.right + n;
    p.pivot = p.y + n;
    p.change = p.pivot + n;
    p.order = (int64_t *)(void *)(p.change + n);
    xdi_post_hoc_run(&p, &target);
    for (int64_t i = 0; i < p.n; i++)
        coefficients[i] = p.y[i] * xdi_profile_length(&target) / xdi_profile_length(&p.snapshots[i]);
    if (error) *error = xdi_post_hoc_distance(&p);
    xd_release(ctx, memory);
    return XD_OK;
}

/* ---- sums ---- */

static bool xdi_post_hoc_adds(xd_dtype dtype) {
    return xdi_train_takes(dtype) || dtype == XD_DTYPE_F64;
}

static xd_result xdi_post_hoc_check_sum(xd_ctx *ctx, const xd_post_hoc_sum_desc *d, const xd_param *targets,
                                        int64_t count) {
    XD_REQUIRE(ctx, d->snapshot_count >= 1 && d->coefficients && d->read, XD_ERROR_ARGUMENT,
               "%lld snapshots, coefficients at %p%s", (long long)d->snapshot_count,
               (const void *)d->coefficients, d->read ? "" : ", nothing that reads");
    for (int64_t k = 0; k < d->snapshot_count; k++)
        XD_REQUIRE(ctx, fabs(d->coefficients[k]) <= (double)FLT_MAX, XD_ERROR_ARGUMENT,
                   "the coefficient %g of snapshot %lld of %lld is no f32", d->coefficients[k], (long long)k,
                   (long long)d->snapshot_count);
    XD_REQUIRE(ctx, xdi_post_hoc_adds(d->dtype), XD_ERROR_DTYPE,
               "parameters of snapshots are F32, BF16, F16 or F64, not %s", xd_dtype_name(d->dtype));
    XD_REQUIRE(ctx, count >= 0 && (targets || count == 0), XD_ERROR_ARGUMENT, "%lld targets at %p",
               (long long)count, (const void *)targets);
    for (int64_t i = 0; i < count; i++) {
        const xd_param *p = &targets[i];
        XD_REQUIRE(ctx, p->name, XD_ERROR_ARGUMENT, "target %lld has no name", (long long)i);
        XD_REQUIRE(ctx, p->count >= 0 && (p->value || p->count == 0), XD_ERROR_ARGUMENT,
                   "%s: %lld elements, value at %p", p->name, (long long)p->count, p->value);
        XD_REQUIRE(ctx, p->buffer ? xd_dtype_size(p->dtype) > 0 : xdi_post_hoc_adds(p->dtype), XD_ERROR_DTYPE,
                   "%s: %s cannot be a sum; buffers say so with the flag", p->name, xd_dtype_name(p->dtype));
    }
    return XD_OK;
}

/* Memory of the device for one parameter: what is read, and the sum. */
typedef struct xdi_post_hoc_room {
    const xd_post_hoc_sum_desc *desc;
    void *read;
    float *sum;
} xdi_post_hoc_room;

static xd_result xdi_post_hoc_take(xd_ctx *ctx, const xdi_post_hoc_room *room, const char *name,
                                   const int64_t at[2], void *to) {
    xd_clear_error(ctx);
    const xd_result result = room->desc->read(room->desc->user, at[0], at[1], to);
    if (result != XD_OK && xd_last_error(ctx)->result == result)
        return result; /* with the reader's own words */
    XD_REQUIRE(ctx, result == XD_OK, result, "%s: snapshot %lld of %lld could not be read", name,
               (long long)at[0], (long long)room->desc->snapshot_count);
    return XD_OK;
}

/* One parameter. */
static xd_result xdi_post_hoc_add(xd_ctx *ctx, const xdi_post_hoc_room *room, const xd_param *p,
                                  int64_t index) {
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    const xd_launch launch = xdi_train_launch(ctx, NULL);
    xd_average_array array;
    xd_average_args args;
    memset(&array, 0, sizeof array);
    memset(&args, 0, sizeof args);
    array.target = room->sum;
    array.target_dtype = XD_DTYPE_F32;
    array.source = room->read;
    array.source_dtype = room->desc->dtype;
    array.count = p->count;
    args.arrays = &array;
    args.array_count = 1;
    args.kind = XD_AVERAGE_ADD;
    XD_TRY(kernels->memory.fill(&launch, room->sum, 0, (size_t)p->count * sizeof *room->sum));
    for (int64_t k = 0; k < room->desc->snapshot_count; k++) {
        const int64_t at[2] = { k, index };
        if (room->desc->coefficients[k] == 0.0) continue;
        args.factor = (float)room->desc->coefficients[k];
        XD_TRY(xdi_post_hoc_take(ctx, room, p->name, at, room->read));
        XD_TRY(kernels->optimizer.average(&launch, &args));
    }
    const xd_cast_array cast = { p->value, room->sum, p->count, p->dtype, XD_DTYPE_F32 };
    return kernels->optimizer.cast(&launch, &cast, 1);
}

static xd_result xdi_post_hoc_add_all(xd_ctx *ctx, const xdi_post_hoc_room *room, const xd_param *targets,
                                      int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t last[2] = { room->desc->snapshot_count - 1, i };
        if (targets[i].count == 0) continue;
        if (targets[i].buffer)
            XD_TRY(xdi_post_hoc_take(ctx, room, targets[i].name, last, targets[i].value));
        else
            XD_TRY(xdi_post_hoc_add(ctx, room, &targets[i], i));
    }
    return XD_OK;
}

XD_API xd_result xd_post_hoc_sum(xd_ctx *ctx, const xd_post_hoc_sum_desc *desc, const xd_param *targets,
                                 int64_t count) {
    XDI_GIVEN(ctx, ctx, desc);
    XDI_GIVEN_LIST(ctx, targets, count);
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    xd_post_hoc_sum_desc d = *desc;
    xdi_post_hoc_room room;
    size_t most = 0;
    if (d.dtype == XD_DTYPE_NONE) d.dtype = XD_DTYPE_F32;
    XD_TRY(xdi_post_hoc_check_sum(ctx, &d, targets, count));
    for (int64_t i = 0; i < count; i++)
        if (!targets[i].buffer && (size_t)targets[i].count > most) most = (size_t)targets[i].count;
    room.desc = &d;
    room.read = memory->allocate(ctx, most * xd_dtype_size(d.dtype) + 1);
    room.sum = (float *)memory->allocate(ctx, most * sizeof *room.sum + 1);
    xd_result result = XD_OK;
    if (!room.read || !room.sum)
        result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a parameter of %llu elements and its sum",
                         (unsigned long long)most);
    if (result == XD_OK) result = xdi_post_hoc_add_all(ctx, &room, targets, count);
    memory->release(ctx, room.sum);
    memory->release(ctx, room.read);
    return result;
}
