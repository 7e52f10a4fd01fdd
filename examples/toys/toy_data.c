/* toy_data.c - distributions in the plane. */
#include "toys.h"

#include <math.h>

static const double TOY_PI = 3.14159265358979323846;

const char *const toy_names[TOY_KINDS] = { "moons", "gaussians" };

/* Eight modes on a circle, an eighth of its radius wide. */
void toy_mode(int mode, double centre[TOY_ELEMENTS]) {
    const double angle = 2.0 * TOY_PI * mode / TOY_MODES;
    centre[0] = 1.6 * cos(angle);
    centre[1] = 1.6 * sin(angle);
}

double toy_deviation(void) {
    return 0.2;
}

/* Half circles that reach into each other, around the origin and of a deviation of about 1. */
static void toy_moon(double where, double centre[TOY_ELEMENTS]) {
    const bool upper = where < 0.5;
    const double angle = TOY_PI * (upper ? 2.0 * where : 2.0 * where - 1.0);
    centre[0] = 1.4 * (upper ? cos(angle) - 0.5 : 0.5 - cos(angle));
    centre[1] = 1.4 * (upper ? sin(angle) - 0.25 : 0.25 - sin(angle));
}

void toy_fresh(toy_kind kind, uint64_t seed, int64_t count, float *points) {
    xd_philox random = { .seed = seed, .stream = TOY_STREAM_FRESH };
    for (; (int64_t)random.sample < count; random.sample++)
        toy_draw(kind, &random, points + random.sample * TOY_ELEMENTS);
}

void toy_draw(toy_kind kind, const xd_philox *random, float point[TOY_ELEMENTS]) {
    const double where = xd_philox_uniform_f64(random, 0);
    const double deviation = kind == TOY_GAUSSIANS ? toy_deviation() : 0.1;
    double centre[TOY_ELEMENTS];
    float normals[TOY_ELEMENTS];
    xd_philox_fill_normal(random, 4, TOY_ELEMENTS, normals);
    if (kind == TOY_GAUSSIANS)
        toy_mode((int)(where * TOY_MODES), centre);
    else
        toy_moon(where, centre);
    for (int i = 0; i < TOY_ELEMENTS; i++) point[i] = (float)(centre[i] + deviation * (double)normals[i]);
}
