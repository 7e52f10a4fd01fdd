/* images_measure.c - how far generated pictures are from real ones, and how many a classifier takes for what they should be. */
#include "images.h"

#include "classifier.h"
#include "frechet.h"

#include <stdio.h>
#include <string.h>

enum { CALL = 100, SEEDS_FROM = 1000, FEATURES = CLASSIFIER_FEATURES };

typedef struct images_judge {
    images_ranks ranks;
    xd_comm *world;
    xd_interval pixels; /* of each picture, that this rank draws */
    const images_options *options;
    classifier classifier;
    frechet_gaussian real;
    images_role drawer; /* has the weights of the row in hand */
    float *pictures;    /* [CALL, IMAGE_PIXELS] */
    float *own, *parts; /* the same of this rank, and of one after the other; NULL where pictures are
                         * drawn whole */
    float *logits;      /* [CALL, IMAGE_CLASSES] */
    float *features;    /* [count, FEATURES] of all ranks, once gathered */
    int32_t classes[CALL];
} images_judge;

/* ---- drawing ---- */

/* A student's rungs, or the teacher's even steps along the flow. */
static xd_sampler_desc images_sampler(const images_judge *j, const images_row *row, int generation,
                                      double *even) {
    xd_sampler_desc d = xd_sampler_defaults();
    d.network = j->drawer.network;
    d.schedule = xd_noise_defaults(XD_NOISE_FLOW);
    d.kind = row->list ? XD_SAMPLER_ODE : XD_SAMPLER_EULER;
    d.steps = row->steps;
    d.list = row->list ? row->list : even;
    d.samples = CALL;
    d.elements = j->pixels.end - j->pixels.begin;
    d.first_element = j->pixels.begin;
    d.seed = (uint64_t)(SEEDS_FROM + generation);
    for (int i = 0; i <= row->steps; i++)
        even[i] = d.schedule.max_t * ((double)(row->steps - i) / row->steps);
    return d;
}

/* Of [count, part] of each rank that shares pictures, in the order of their pixels, [count, IMAGE_PIXELS]. */
static xd_result images_join(images_judge *j, int64_t count) {
    const int ranks = xd_comm_size(j->ranks.cp);
    const int64_t each = IMAGE_PIXELS / ranks;
    XD_TRY(xd_all_gather_even(j->ranks.cp, j->own, j->parts, count * each, XD_DTYPE_F32));
    for (int64_t i = 0; i < count * ranks; i++)
        memcpy(j->pictures + (i % count * ranks + i / count) * each, j->parts + i * each,
               (size_t)each * sizeof(float));
    return XD_OK;
}

/* The pictures of a call: picture number n is of class n mod 10. */
static xd_result images_draw(images_judge *j, xd_sampler *sampler, int64_t first, int64_t count) {
    xd_dmd_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.first = first;
    batch.samples = count;
    batch.condition = j->classes;
    for (int64_t i = 0; i < count; i++) j->classes[i] = (int32_t)((first + i) % IMAGE_CLASSES);
    XD_TRY(xd_sampler_run(sampler, &batch, j->own ? j->own : j->pictures));
    return j->own && count > 0 ? images_join(j, count) : XD_OK;
}

static int64_t images_count_right(const images_judge *j, int64_t count) {
    int64_t right = 0;
    for (int64_t i = 0; i < count; i++) {
        const float *logits = j->logits + i * IMAGE_CLASSES;
        int best = 0;
        for (int c = 1; c < IMAGE_CLASSES; c++)
            if (logits[c] > logits[best]) best = c;
        right += best == j->classes[i];
    }
    return right;
}

/* Calls are dealt to the data ranks; all make the same number, since parts of the network may be on other ranks. Of ranks
 * that share pictures the first counts. */
static xd_result images_draw_all(images_judge *j, images_row *row, xd_sampler *sampler, int64_t count,
                                 int64_t *right) {
    xd_ctx *ctx = xd_comm_ctx(j->world);
    const int64_t ranks = xd_comm_size(j->ranks.data), calls = (count + CALL - 1) / CALL;
    const bool counts = !j->ranks.cp || xd_comm_rank(j->ranks.cp) == 0;
    *right = 0;
    for (int64_t round = 0; round < (calls + ranks - 1) / ranks; round++) {
        const int64_t call = round * ranks + xd_comm_rank(j->ranks.data), first = call * CALL;
        const int64_t n = call >= calls ? 0 : count - first < CALL ? count - first : CALL;
        XD_TRY(images_draw(j, sampler, n ? first : 0, n));
        if (n == 0 || !counts) continue;
        XD_TRY(classifier_forward(ctx, &j->classifier, j->pictures, n, j->features + first * FEATURES,
                                  j->logits));
        *right += images_count_right(j, n);
        if (call == 0) memcpy(row->shown, j->pictures, sizeof row->shown);
    }
    return XD_OK;
}

/* ---- measuring ---- */

/* Every feature was computed by one rank: the sum of its bits with the zeros of the others is what all get. */
static xd_result images_gather(images_judge *j, int64_t count, int64_t *right) {
    XD_TRY(xd_all_reduce(j->world, j->features, j->features, count * FEATURES, XD_DTYPE_I32, XD_SUM));
    return xd_all_reduce(j->world, right, right, 1, XD_DTYPE_I64, XD_SUM);
}

static xd_result images_measure_once(images_judge *j, images_row *row, int generation) {
    const int64_t count = row->known ? CALL : j->options->count;
    double even[64];
    int64_t right = 0;
    xd_sampler *sampler = NULL;
    const xd_sampler_desc desc = images_sampler(j, row, generation, even);
    memset(j->features, 0, (size_t)(count * FEATURES) * sizeof *j->features);
    XD_TRY(xd_sampler_create(xd_comm_ctx(j->world), &desc, &sampler));
    xd_result result = images_draw_all(j, row, sampler, count, &right);
    xd_sampler_destroy(sampler);
    if (result == XD_OK) result = images_gather(j, count, &right);
    if (result != XD_OK || row->known || xd_comm_rank(j->world) != 0) return result;
    frechet_sums sums;
    frechet_gaussian drawn;
    frechet_begin(&sums, FEATURES);
    frechet_add(&sums, j->features, count);
    frechet_end(&sums, &drawn);
    row->distance[generation] = frechet_distance(&drawn, &j->real);
    row->accuracy += (double)right / (double)count / j->options->generations;
    return XD_OK;
}

/* Generation 0 comes last, for its pictures are shown. */
static xd_result images_measure_row(images_judge *j, images_row *row) {
    const int last = row->known ? 0 : j->options->generations - 1;
    XD_TRY(images_role_load(&j->drawer, row->directory));
    for (int generation = last; generation >= 0; generation--)
        XD_TRY(images_measure_once(j, row, generation));
    if (xd_comm_rank(j->world) == 0 && !row->known)
        images_say("%-20s distance %.3f", row->title, row->distance[0]);
    return XD_OK;
}

/* ---- set-up ---- */

static xd_result images_open_judge(images_judge *j) {
    xd_ctx *ctx = xd_comm_ctx(j->world);
    const images_shape shape = { &j->ranks, 0, CALL, 0 };
    char path[480];
    const int64_t rows = j->options->count > CALL ? j->options->count : CALL;
    XD_TRY(images_ranks_open(j->world, &j->options->mesh, &j->ranks));
    j->pixels = images_pixels(&j->ranks);
    j->pictures = (float *)xd_allocate(ctx, CALL * IMAGE_PIXELS * sizeof(float));
    if (j->ranks.cp) {
        j->own = (float *)xd_allocate(ctx, CALL * IMAGE_PIXELS * sizeof(float));
        j->parts = (float *)xd_allocate(ctx, CALL * IMAGE_PIXELS * sizeof(float));
        XD_REQUIRE(ctx, j->own && j->parts, XD_ERROR_MEMORY, "no room for parts of %d pictures", (int)CALL);
    }
    j->logits = (float *)xd_allocate(ctx, CALL * IMAGE_CLASSES * sizeof(float));
    j->features = (float *)xd_allocate(ctx, (size_t)(rows * FEATURES) * sizeof(float));
    XD_REQUIRE(ctx, j->pictures && j->logits && j->features, XD_ERROR_MEMORY,
               "no room for the features of %lld images", (long long)rows);
    snprintf(path, sizeof path, "%s/classifier.safetensors", j->options->data);
    XD_TRY(classifier_load(ctx, path, &j->classifier));
    snprintf(path, sizeof path, "%s/features.safetensors", j->options->data);
    XD_TRY(frechet_load(ctx, path, &j->real));
    return images_role_open(&shape, j->options->seed, &j->drawer);
}

static void images_close_judge(images_judge *j) {
    xd_ctx *ctx = xd_comm_ctx(j->world);
    images_role_close(&j->drawer);
    images_ranks_close(&j->ranks);
    if (j->own) xd_release(ctx, j->own);
    if (j->parts) xd_release(ctx, j->parts);
    classifier_free(ctx, &j->classifier);
    if (j->pictures) xd_release(ctx, j->pictures);
    if (j->logits) xd_release(ctx, j->logits);
    if (j->features) xd_release(ctx, j->features);
    xd_release(ctx, j);
}

xd_result images_measure(xd_comm *world, const images_options *options, images_row *rows, int count) {
    xd_ctx *ctx = xd_comm_ctx(world);
    images_judge *j = (images_judge *)xd_allocate(ctx, sizeof *j);
    XD_REQUIRE(ctx, j, XD_ERROR_MEMORY, "no room for what measures");
    memset(j, 0, sizeof *j);
    j->world = world;
    j->options = options;
    xd_result result = images_open_judge(j);
    for (int i = 0; i < count && result == XD_OK; i++) result = images_measure_row(j, &rows[i]);
    images_close_judge(j);
    return result;
}
