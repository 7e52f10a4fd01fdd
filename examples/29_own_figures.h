/* 29_own_figures.h - your data, how far points are from it, and a picture of both. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST = 100000, POINTS = 2000 };
static float data[MOST * D];
static int rows;

/* Numbers of a root mean square of about 1, as noise has: scale yours. Without a file: an open ring. */
static bool read_data(const char *path) {
    FILE *file = path ? fopen(path, "r") : NULL;
    while (file && rows < MOST * D && fscanf(file, "%f", &data[rows]) == 1) rows++;
    for (int i = 0; !path && i < 3000; i++) {
        const double angle = 0.7 + 4.9 * i / 3000;
        data[rows++] = (float)(1.6 * cos(angle) + sin(77.7 * i) / 8);
        data[rows++] = (float)(1.6 * sin(angle) + cos(33.3 * i) / 8);
        for (int j = 2; j < D; j++) data[rows++] = 0;
    }
    double squares = 0;
    for (int i = 0; i < rows; i++) squares += (double)(data[i] * data[i]) / rows;
    rows /= D;
    printf("%d rows of %d, root mean square %.1f\n", rows, D, sqrt(squares));
    if (file) fclose(file);
    return rows > 0;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Rows along a direction, in order. */
static void project(const float *points, int count, const float *direction, double *out) {
    for (int i = 0; i < count; i++) {
        out[i] = 0;
        for (int j = 0; j < D; j++) out[i] += (double)(points[i * D + j] * direction[j]);
    }
    qsort(out, (size_t)count, sizeof *out, ascending);
}

/* Sliced Wasserstein distance (W2) of POINTS points to the data: on a line the cheapest way is in order. */
static double distance_to_data(const float *points) {
    static double a[POINTS], b[MOST];
    double sum = 0;
    xd_philox random = { .seed = 3, .stream = XD_STREAM_USER };
    for (; random.sample < 64; random.sample++) {
        float direction[D], length = 0;
        xd_philox_fill_normal(&random, 0, D, direction);
        for (int j = 0; j < D; j++) length += direction[j] * direction[j];
        for (int j = 0; j < D; j++) direction[j] /= sqrtf(length);
        project(points, POINTS, direction, a);
        project(data, rows, direction, b);
        for (int i = 0; i < POINTS; i++) {
            const double off = a[i] - b[(int64_t)i * rows / POINTS];
            sum += off * off / (64.0 * POINTS);
        }
    }
    return sqrt(sum);
}

/* The first two numbers of rows, in a panel of 220 x 220 that reaches from -3 to 3. */
static void draw(FILE *svg, int panel, const char *title, const float *points, int count) {
    fprintf(svg, "<g transform='translate(%d 30)'><text y='-8'>%s</text>", 10 + panel * 240, title);
    fprintf(svg, "<rect width='220' height='220' fill='none' stroke='#ccc'/>"
                 "<path stroke='#0057a0' stroke-width='2' stroke-linecap='round' d='");
    for (int i = 0; i < count; i += (count + 799) / 800) {
        const float *at = points + i * D;
        fprintf(svg, "M%.1f %.1fh0", 110 + 36.7 * (double)at[0], 110 - 36.7 * (double)at[D > 1]);
    }
    fprintf(svg, "'/></g>\n");
}
