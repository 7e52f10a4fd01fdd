/* Wrappers whose ranks are beside the other settings; settings that are NULL -> all zero. */
#ifndef WRAP_CALLS_H
#define WRAP_CALLS_H

#include "xdistill.h"

#include <string.h>

static inline xd_result wrap_over_ddp(xd_model *model, xd_comm *data, const xd_ddp_desc *settings,
                                      xd_parallel **out) {
    xd_ddp_desc desc;
    memset(&desc, 0, sizeof desc);
    if (settings) desc = *settings;
    desc.data = data;
    return xd_ddp_create(model, &desc, out);
}

static inline xd_result wrap_over_fsdp(xd_model *model, xd_comm *data, const xd_fsdp_desc *settings,
                                       xd_parallel **out) {
    xd_fsdp_desc desc;
    memset(&desc, 0, sizeof desc);
    if (settings) desc = *settings;
    desc.data = data;
    return xd_fsdp_create(model, &desc, out);
}

#endif
