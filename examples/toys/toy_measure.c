/* toy_measure.c - how far points are from fresh ones, and where they are. */
#include "toys.h"

#include <math.h>
#include <stdlib.h>

enum { TOY_DIRECTIONS = 64 };

static int toy_order(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* out = the points along a direction, in order. */
static void toy_project(const float *points, double angle, double *out) {
    const double c = cos(angle), s = sin(angle);
    for (int64_t i = 0; i < TOY_POINTS; i++)
        out[i] = c * (double)points[i * TOY_ELEMENTS] + s * (double)points[i * TOY_ELEMENTS + 1];
    qsort(out, TOY_POINTS, sizeof *out, toy_order);
}

/* Along a line the cheapest transport is in order; W2 is the root of its mean square, here over directions too. */
static double toy_sliced_distance(const float *a, const float *b, double *room) {
    double sum = 0.0, *const p = room, *const q = room + TOY_POINTS;
    for (int k = 0; k < TOY_DIRECTIONS; k++) {
        const double angle = 3.14159265358979323846 * k / TOY_DIRECTIONS;
        toy_project(a, angle, p);
        toy_project(b, angle, q);
        for (int i = 0; i < TOY_POINTS; i++) sum += (p[i] - q[i]) * (p[i] - q[i]);
    }
    return sqrt(sum / ((double)TOY_DIRECTIONS * TOY_POINTS));
}

static void toy_count_modes(const float *points, toy_figures *out) {
    int64_t masses[TOY_MODES] = { 0 }, within = 0, least = TOY_POINTS;
    for (int64_t i = 0; i < TOY_POINTS; i++) {
        double nearest = INFINITY, centre[TOY_ELEMENTS];
        int mode = 0;
        for (int m = 0; m < TOY_MODES; m++) {
            toy_mode(m, centre);
            const double away = hypot((double)points[i * TOY_ELEMENTS] - centre[0],
                                      (double)points[i * TOY_ELEMENTS + 1] - centre[1]);
            if (away < nearest) nearest = away, mode = m;
        }
        masses[mode]++;
        within += nearest <= 3.0 * toy_deviation();
    }
    for (int m = 0; m < TOY_MODES; m++)
        if (masses[m] < least) least = masses[m];
    out->least_mode = (double)least / TOY_POINTS;
    out->within = (double)within / TOY_POINTS;
}

xd_result toy_measure(xd_ctx *ctx, toy_kind kind, uint64_t seed, const float *points, toy_figures *out) {
    double *room = (double *)xd_allocate(ctx, 2 * TOY_POINTS * sizeof *room);
    float *fresh = (float *)xd_allocate(ctx, TOY_POINTS * TOY_ELEMENTS * sizeof *fresh);
    if (room && fresh) {
        toy_fresh(kind, seed, TOY_POINTS, fresh);
        out->distance = toy_sliced_distance(points, fresh, room);
        out->least_mode = out->within = 0.0;
        if (kind == TOY_GAUSSIANS) toy_count_modes(points, out);
    }
    const bool failed = !room || !fresh;
    xd_release(ctx, fresh);
    xd_release(ctx, room);
    return failed ? XD_FAIL(ctx, XD_ERROR_MEMORY, "no room to measure %d points", TOY_POINTS) : XD_OK;
}
