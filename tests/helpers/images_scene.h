/* images_scene.h - contexts, errors, numbers and files for the tests of examples/images. */
#ifndef IMAGES_SCENE_H
#define IMAGES_SCENE_H

#include "xdistill.h"

#include "xd_test.h"

#include <stdlib.h>
#include <unistd.h>

static inline xd_ctx *new_ctx(void) {
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    return ctx;
}

/* Whether the last error says this. */
static inline bool says(const xd_ctx *ctx, const char *words) {
    const bool found = strstr(xd_last_error(ctx)->message, words) != NULL;
    if (!found) printf("\"%s\" is not in: %s\n", words, xd_last_error(ctx)->message);
    return found;
}

/* Repeatable numbers: [first, first + count) of a normal distribution. */
static inline void normal(uint64_t seed, int64_t count, float *out) {
    xd_philox random;
    memset(&random, 0, sizeof random);
    random.seed = seed;
    random.stream = XD_STREAM_USER;
    xd_philox_fill_normal(&random, 0, count, out);
}

/* A file of this process, removed by the caller. */
static inline const char *scratch(const char *name) {
    static char paths[4][200];
    static int at;
    at = (at + 1) % 4;
    snprintf(paths[at], sizeof paths[at], "/tmp/xdistill-images-%ld-%s", (long)getpid(), name);
    return paths[at];
}

#endif
