/* Averages whose list is beside the other settings; settings that are NULL -> all zero. */
#ifndef AVERAGES_H
#define AVERAGES_H

#include "xdistill.h"

#include <string.h>

static inline xd_result average_create(xd_ctx *ctx, const xd_param *params, int64_t count,
                                       const xd_ema_desc *settings, xd_ema **out) {
    xd_ema_desc desc;
    memset(&desc, 0, sizeof desc);
    if (settings) desc = *settings;
    desc.params = params;
    desc.param_count = count;
    return xd_ema_create(ctx, &desc, out);
}

static inline xd_result average_load(xd_ema *ema, const xd_param *sources, int64_t count,
                                     const xd_ema_load_desc *settings, xd_ema_match *match) {
    xd_ema_load_desc desc;
    memset(&desc, 0, sizeof desc);
    if (settings) desc = *settings;
    desc.sources = sources;
    desc.source_count = count;
    return xd_ema_load(ema, &desc, match);
}

#endif
