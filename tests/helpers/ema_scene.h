/* What tests of averages share: parameters of a list, numbers for them, bits of random roundings. */
#ifndef EMA_SCENE_H
#define EMA_SCENE_H

#include "xdistill.h"
#include "xd_test.h"
#include "averages.h"

#include <stdlib.h>

static inline xd_ctx *scene_ctx(xd_cpu_level level, int threads) {
    const xd_ctx_desc desc = { .cpu = level, .threads = threads };
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    return ctx;
}

static inline xd_param scene_param(const char *name, void *value, xd_dtype dtype, int64_t count) {
    xd_param p;
    memset(&p, 0, sizeof p);
    p.name = name;
    p.value = value;
    p.dtype = dtype;
    p.count = count;
    return p;
}

static inline xd_ema *scene_ema(xd_ctx *ctx, const xd_param *params, int64_t count, xd_ema_desc desc) {
    xd_ema *ema = NULL;
    CHECK_EQ_INT(average_create(ctx, params, count, &desc, &ema), XD_OK);
    return ema;
}

static inline xd_ema_desc scene_decay(double decay) {
    xd_ema_desc d = xd_ema_defaults(XD_EMA_CONSTANT);
    d.decay = decay;
    d.init_from_current = true;
    return d;
}

/* Numbers in [-1, 1), in any dtype. */
static inline void scene_fill(void *values, xd_dtype dtype, int64_t n, uint32_t seed) {
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        xd_store_f64(values, dtype, i, (double)(seed >> 8) / 8388608.0 - 1.0);
    }
}

static inline bool scene_says(xd_ctx *ctx, const char *words) {
    return strstr(xd_last_error(ctx)->message, words) != NULL;
}

#endif
