/* This example draws samples of 1, 4 and 16 steps as three panels of one picture. The flow of eight
 * Gaussian spots on a circle is a formula, so the network has no weights. The panels differ only in
 * the number of steps. One step brings every point to the middle, equally far from all spots.
 *
 *     cc -std=c99 -O2 examples/19_sampler_png.c -o sampler_png -lm -lpthread
 *     ./sampler_png sampler.png */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { SPOTS = 8, SIDE = 144, PANELS = 3, POINTS = 4096, CALLS = 10 };
static const double SPREAD = 0.1; /* standard deviation of a spot */
static const double TURN = 6.283185307179586;

/* In PNG a row begins with the number of its filter. Here it is 0, which means no filter. */
enum { ROW = 1 + PANELS * SIDE, BYTES = SIDE * ROW };
static uint8_t picture[BYTES];

/* Computes the mean of eps - x0 over all x0 and eps with x = (1 - t) x0 + t eps. It is the mean of
 * each spot, weighted by the probability of the spot. */
static xd_result flow(void *user, const xd_network_call *call) {
    (void)user;
    for (int64_t b = 0; b < call->samples; b++) {
        const float *x = (const float *)call->hidden + 2 * b;
        const double t = call->times[b];
        const double narrow = (1 - t) * SPREAD * SPREAD;
        const double v = (1 - t) * narrow + t * t;
        double total = 0, mean[2] = { 0 };

        for (int k = 0; k < SPOTS; k++) {
            const double spot[2] = { cos(TURN * k / SPOTS), sin(TURN * k / SPOTS) };
            const double away[2] = { x[0] - (1 - t) * spot[0], x[1] - (1 - t) * spot[1] };
            const double square = away[0] * away[0] + away[1] * away[1];
            const double weight = exp(-0.5 * square / v) + 1e-300;
            for (int i = 0; i < 2; i++) mean[i] += weight * ((t - narrow) / v * away[i] - spot[i]);
            total += weight;
        }
        for (int i = 0; i < 2; i++) ((float *)call->raw)[2 * b + i] = (float)(mean[i] / total);
    }
    return XD_OK;
}

/* ---- the PNG file ---- */

static void put(uint8_t *at, uint32_t number) {
    for (int i = 0; i < 4; i++) at[i] = (uint8_t)(number >> (24 - 8 * i));
}

/* A chunk has 4 bytes for the length of its data, 4 bytes for its name, the data, and 4 bytes for
 * the CRC of name and data. */
static bool write_chunk(FILE *file, uint8_t *chunk, const char *name, uint32_t bytes) {
    uint32_t crc = 0xffffffffu;
    put(chunk, bytes);
    memcpy(chunk + 4, name, 4);
    for (uint8_t *p = chunk + 4; p < chunk + 8 + bytes; p++) {
        crc ^= *p;
        for (int i = 0; i < 8; i++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    put(chunk + 8 + bytes, ~crc);
    return fwrite(chunk, 1, bytes + 12, file) == bytes + 12;
}

/* Writes the pixels as one stored block of deflate, then their Adler-32. Such a block has at most
 * 65535 bytes. */
static bool write_png(const char *path) {
    static uint8_t head[12 + 13], data[12 + 7 + BYTES + 4], end[12];
    const uint8_t stored[7] = { 0x78, 1, 1, BYTES & 255, BYTES >> 8,
                                ~BYTES & 255, ~BYTES >> 8 & 255 };
    uint32_t a = 1, b = 0;
    FILE *file = fopen(path, "wb");
    if (!file) return false;

    /* The bytes of `head` that remain 0 mean gray pixels, row after row. */
    put(head + 8, PANELS * SIDE);
    put(head + 12, SIDE);
    head[16] = 8; /* bits of a pixel */
    memcpy(data + 8, stored, 7);
    memcpy(data + 15, picture, BYTES);
    for (int i = 0; i < BYTES; i++) {
        a = (a + picture[i]) % 65521;
        b = (b + a) % 65521;
    }
    put(data + 15 + BYTES, b << 16 | a);

    const bool written = fwrite("\x89PNG\r\n\x1a\n", 1, 8, file) == 8 &&
                         write_chunk(file, head, "IHDR", 13) &&
                         write_chunk(file, data, "IDAT", sizeof data - 12) &&
                         write_chunk(file, end, "IEND", 0);
    return fclose(file) == 0 && written;
}

/* ---- the samples ---- */

/* Draws a panel, and adds up the mean distance of its points from the nearest spot. */
static xd_result draw(xd_ctx *ctx, int panel, int steps, double *away) {
    static float x[2 * POINTS];
    double list[17], points[SIDE][SIDE] = { { 0 } };
    xd_sampler_desc desc = xd_sampler_defaults();
    xd_sampler *sampler;
    for (int i = 0; i <= steps; i++) list[i] = 0.999 * (steps - i) / steps;
    desc.network = (xd_network){ .predicts = XD_PREDICT_FLOW, .forward = flow };
    desc.schedule = xd_noise_defaults(XD_NOISE_FLOW);
    desc.kind = XD_SAMPLER_EULER;
    desc.steps = steps;
    desc.list = list;
    desc.samples = POINTS;
    desc.elements = 2;
    XD_TRY(xd_sampler_create(ctx, &desc, &sampler));

    for (int call = 0; call < CALLS; call++) {
        const xd_dmd_batch batch = { .samples = POINTS, .first = call * POINTS };
        XD_TRY(xd_sampler_run(sampler, &batch, x));
        for (const float *p = x; p < x + 2 * POINTS; p += 2) {
            const double spot = TURN / SPOTS * round(atan2(p[1], p[0]) * SPOTS / TURN);
            const double column = (p[0] + 1.5) / 3 * SIDE, row = (1.5 - p[1]) / 3 * SIDE;
            if (row >= 0 && row < SIDE && column >= 0 && column < SIDE)
                points[(int)row][(int)column]++;
            *away += hypot(p[0] - cos(spot), p[1] - sin(spot)) / (CALLS * POINTS);
        }
    }
    xd_sampler_destroy(sampler);

    for (int i = 0; i < SIDE * SIDE; i++) {
        const int row = i / SIDE, column = i % SIDE;
        uint8_t *pixel = &picture[row * ROW + 1 + panel * SIDE + column];
        *pixel = (uint8_t)(255 * exp(-0.15 * points[row][column]));
    }
    return XD_OK;
}

int main(int argc, char **argv) {
    static const int steps[PANELS] = { 1, 4, 16 };
    const char *path = argc > 1 ? argv[1] : "build/sampler.png";
    double away[PANELS] = { 0 };
    xd_ctx *ctx = NULL;
    xd_result result = xd_ctx_create(NULL, &ctx);
    for (int k = 0; k < PANELS && result == XD_OK; k++)
        result = draw(ctx, k, steps[k], &away[k]);
    if (result != XD_OK)
        fprintf(stderr, "%s\n", ctx ? xd_last_error(ctx)->message : xd_result_name(result));
    xd_ctx_destroy(ctx);
    if (result != XD_OK || !write_png(path)) return 1;

    printf("%s: %d points in 1, 4 and 16 steps, %.3f, %.3f and %.3f from the nearest spot; "
           "those of the spots are %.3f away\n",
           path, CALLS * POINTS, away[0], away[1], away[2], SPREAD * sqrt(TURN / 4));
    return away[2] > away[1] || away[2] > 0.2;
}
