/* Averages formed after training: the least squares of profiles, and sums of snapshots. */

#include "train/post_hoc.h"

#include "base/scalar.h"
#include "train/internal.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* ---- widths ---- */

/* The largest root of (g + 2)^2 (g + 3) = (g + 1) / sigma^2, by Newton's steps from above: there the difference is convex and
 * rises, so they go down until rounding stops them. */
XD_PRIVATE xd_result xdi_post_hoc_gamma(xd_ctx *ctx, double sigma_rel, double *gamma) {
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

/* A profile with its exponent. */
static xd_result xdi_profile_resolve(xd_ctx *ctx, const xd_post_hoc_profile *given,
                                     xd_post_hoc_profile *out) {
    *out = *given;
    return given->sigma_rel == 0.0 ? XD_OK : xdi_post_hoc_gamma(ctx, given->sigma_rel, &out->gamma);
}

/* Checks everything and fills in exponents and the target's iteration. */
static xd_result xdi_post_hoc_check(xd_ctx *ctx, const xd_post_hoc_desc *d, xd_post_hoc_profile *snapshots,
                                    xd_post_hoc_profile *target) {
    int64_t last = 0;
    for (int64_t i = 0; i < d->snapshot_count; i++) {
        xd_post_hoc_profile *p = &snapshots[i];
        XD_TRY(xdi_profile_resolve(ctx, &d->snapshots[i], p));
        XD_TRY(xdi_profile_check(ctx, "snapshot", i, p));
        if (p->iteration > last) last = p->iteration;
        for (int64_t k = 0; k < i; k++)
            XD_REQUIRE(ctx, p->iteration != snapshots[k].iteration || p->gamma != snapshots[k].gamma,
                       XD_ERROR_ARGUMENT, "snapshots %lld and %lld have the same profile", (long long)k,
                       (long long)i);
    }
    XD_TRY(xdi_profile_resolve(ctx, &d->target, target));
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

/* The coefficients, in memory of 2 n^2 + 5 n numbers, for profiles that are checked. */
static void xdi_post_hoc_find(xdi_post_hoc *p, double *memory, const xd_post_hoc_profile *target,
                              double *coefficients, double *error) {
    const size_t n = (size_t)p->n;
    p->matrix = memory;
    p->factor = p->matrix + n * n;
    p->right = p->factor + n * n;
    p->y = p->right + n;
    p->pivot = p->y + n;
    p->change = p->pivot + n;
    p->order = (int64_t *)(void *)(p->change + n);
    xdi_post_hoc_run(p, target);
    for (int64_t i = 0; i < p->n; i++)
        coefficients[i] = p->y[i] * xdi_profile_length(target) / xdi_profile_length(&p->snapshots[i]);
    *error = xdi_post_hoc_distance(p);
}

/* ---- sums ---- */

static bool xdi_post_hoc_adds(xd_dtype dtype) {
    return xdi_train_takes(dtype) || dtype == XD_DTYPE_F64;
}

static xd_result xdi_post_hoc_check_coefficients(xd_ctx *ctx, const double *coefficients, int64_t count) {
    for (int64_t k = 0; k < count; k++)
        XD_REQUIRE(ctx, fabs(coefficients[k]) <= (double)FLT_MAX, XD_ERROR_ARGUMENT,
                   "the coefficient %g of snapshot %lld of %lld is no f32", coefficients[k], (long long)k,
                   (long long)count);
    return XD_OK;
}

static xd_result xdi_post_hoc_check_targets(xd_ctx *ctx, const xd_post_hoc_desc *d) {
    XD_REQUIRE(ctx, d->target_count >= 0 && (d->targets || d->target_count == 0), XD_ERROR_ARGUMENT,
               "%lld targets at %p", (long long)d->target_count, (const void *)d->targets);
    XD_REQUIRE(ctx, d->read || d->target_count == 0, XD_ERROR_ARGUMENT, "%lld targets, nothing that reads",
               (long long)d->target_count);
    XD_REQUIRE(ctx, xdi_post_hoc_adds(d->dtype), XD_ERROR_DTYPE,
               "parameters of snapshots are F32, BF16, F16 or F64, not %s", xd_dtype_name(d->dtype));
    for (int64_t i = 0; i < d->target_count; i++) {
        const xd_param *p = &d->targets[i];
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
    const xd_post_hoc_desc *desc;
    void *read;
    float *sum;
} xdi_post_hoc_room;

static xd_result xdi_post_hoc_take(xd_ctx *ctx, const xdi_post_hoc_room *room, const char *name,
                                   const int64_t at[2], void *to) {
    xdi_clear_error(ctx);
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

static xd_result xdi_post_hoc_add_all(xd_ctx *ctx, const xdi_post_hoc_room *room) {
    const xd_param *targets = room->desc->targets;
    for (int64_t i = 0; i < room->desc->target_count; i++) {
        const int64_t last[2] = { room->desc->snapshot_count - 1, i };
        if (targets[i].count == 0) continue;
        if (targets[i].buffer)
            XD_TRY(xdi_post_hoc_take(ctx, room, targets[i].name, last, targets[i].value));
        else
            XD_TRY(xdi_post_hoc_add(ctx, room, &targets[i], i));
    }
    return XD_OK;
}

static xd_result xdi_post_hoc_fill(xd_ctx *ctx, const xd_post_hoc_desc *d) {
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    xdi_post_hoc_room room;
    size_t largest = 0;
    if (d->target_count == 0) return XD_OK;
    for (int64_t i = 0; i < d->target_count; i++)
        if (!d->targets[i].buffer && (size_t)d->targets[i].count > largest)
            largest = (size_t)d->targets[i].count;
    room.desc = d;
    room.read = memory->allocate(ctx, largest * xd_dtype_size(d->dtype) + 1);
    room.sum = (float *)memory->allocate(ctx, largest * sizeof *room.sum + 1);
    xd_result result = XD_OK;
    if (!room.read || !room.sum)
        result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a parameter of %llu elements and its sum",
                         (unsigned long long)largest);
    if (result == XD_OK) result = xdi_post_hoc_add_all(ctx, &room);
    memory->release(ctx, room.sum);
    memory->release(ctx, room.read);
    return result;
}

/* The coefficients for a target, in memory of n profiles and 2 n^2 + 6 n numbers. */
static xd_result xdi_post_hoc_choose(xd_ctx *ctx, const xd_post_hoc_desc *desc, void *memory,
                                     const double **coefficients, double *distance) {
    const size_t n = (size_t)desc->snapshot_count;
    xd_post_hoc_profile target, *snapshots = (xd_post_hoc_profile *)memory;
    double *numbers = (double *)(void *)(snapshots + n);
    xdi_post_hoc p;
    memset(&p, 0, sizeof p);
    XD_TRY(xdi_post_hoc_check(ctx, desc, snapshots, &target));
    p.snapshots = snapshots;
    p.n = desc->snapshot_count;
    xdi_post_hoc_find(&p, numbers + n, &target, numbers, distance);
    *coefficients = numbers;
    return XD_OK;
}

static xd_result xdi_post_hoc_take_memory(xd_ctx *ctx, int64_t snapshots, void **memory) {
    const size_t n = (size_t)snapshots;
    size_t bytes = 0;
    const bool fits =
        n < (1u << 24) &&
        xdi_size_multiply(n, sizeof(xd_post_hoc_profile) + (2 * n + 6) * sizeof(double), &bytes);
    *memory = fits ? xd_allocate(ctx, bytes) : NULL;
    XD_REQUIRE(ctx, *memory, XD_ERROR_MEMORY, "no room for the inner products of %lld snapshots",
               (long long)snapshots);
    return XD_OK;
}

XD_API xd_result xd_post_hoc_average(xd_ctx *ctx, const xd_post_hoc_desc *desc, double *coefficients,
                                     double *error) {
    XDI_GIVEN(ctx, ctx, desc);
    xd_post_hoc_desc d = *desc;
    void *memory = NULL;
    double distance = 0.0;
    xd_result result = XD_OK;
    if (d.dtype == XD_DTYPE_NONE) d.dtype = XD_DTYPE_F32;
    XD_REQUIRE(ctx, d.snapshot_count >= 1 && (d.snapshots || d.coefficients), XD_ERROR_ARGUMENT,
               "%lld snapshots at %p, coefficients at %p", (long long)d.snapshot_count,
               (const void *)d.snapshots, (const void *)d.coefficients);
    XD_TRY(xdi_post_hoc_check_targets(ctx, &d));
    if (!d.coefficients) {
        XD_TRY(xdi_post_hoc_take_memory(ctx, d.snapshot_count, &memory));
        result = xdi_post_hoc_choose(ctx, &d, memory, &d.coefficients, &distance);
    }
    if (result == XD_OK) result = xdi_post_hoc_check_coefficients(ctx, d.coefficients, d.snapshot_count);
    if (result == XD_OK) result = xdi_post_hoc_fill(ctx, &d);
    if (result == XD_OK && coefficients) /* which may be those of the desc */
        memmove(coefficients, d.coefficients, (size_t)d.snapshot_count * sizeof *coefficients);
    if (result == XD_OK && error) *error = distance;
    xd_release(ctx, memory);
    return result;
}
