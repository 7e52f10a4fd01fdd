/* fill.c - models that hold values before they are wrapped: the negatives of those that the library would form, which every layout
 * has alike. One rank alone gets them after the wrap, by its parts. */
#include "rank.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* The sign of each element, but of zeros: rows of padding stay what they are. */
static void negate(void *data, xd_dtype dtype, int64_t count) {
    const size_t size = xd_dtype_size(dtype);
    for (int64_t i = 0; i < count; i++) {
        unsigned char *at = (unsigned char *)data + (size_t)i * size;
        bool some = false;
        for (size_t b = 0; b < size; b++) some = some || at[b];
        if (some) at[size - 1] ^= 0x80;
    }
}

/* All of this rank's region of a weight that has values. */
static xd_tensor_part part_of(const xd_weight_info *w, void *data) {
    xd_tensor_part p;
    memset(&p, 0, sizeof p);
    p.name = w->name;
    p.dtype = w->desc->dtype;
    p.ndim = w->desc->ndim;
    memcpy(p.shape, w->desc->shape, sizeof p.shape);
    if (w->desc->stored_rows) p.shape[0] = w->desc->stored_rows;
    p.region = w->region;
    p.range.end = w->count;
    p.data = data;
    return p;
}

/* Values go from other memory into the model's, as after ranks were lost. */
static xd_result inherit(const rank *r, const xd_model *model) {
    xd_tensor_part from[PARTS], to[PARTS];
    xd_checkpoint_network networks[2];
    int64_t n = 0;
    memset(networks, 0, sizeof networks);
    for (int64_t i = 0; i < xd_model_describe(model).weight_count; i++) {
        xd_weight *weight = xd_model_weight_at(model, i);
        const xd_weight_info w = xd_weight_describe(weight);
        const size_t bytes = (size_t)w.count * xd_dtype_size(w.desc->dtype);
        if (w.owner != weight) continue;
        void *copy = malloc(bytes + 1);
        if (bytes > 0) memcpy(copy, w.value, bytes);
        if (bytes > 0) memset(w.value, 0xff, bytes);
        from[n] = part_of(&w, copy);
        to[n++] = part_of(&w, w.value);
    }
    networks[0].parts = from;
    networks[1].parts = to;
    networks[0].part_count = networks[1].part_count = n;
    const xd_state_inherit_desc d = { .from = &networks[0], .networks = &networks[1], .network_count = 1 };
    int64_t step = 0;
    const xd_result result = xd_state_inherit(is_staged(r) ? r->self : r->world, &d, &step, NULL);
    for (int64_t i = 0; i < n; i++) free((void *)from[i].data);
    return result;
}

/* Values go through a model directory of this rank: written, lost, and read again. */
static xd_result import(const rank *r, const xd_model *model) {
    xd_tensor_part parts[PARTS];
    char path[128];
    int64_t n = 0;
    for (int64_t i = 0; i < xd_model_describe(model).weight_count; i++) {
        xd_weight *weight = xd_model_weight_at(model, i);
        const xd_weight_info w = xd_weight_describe(weight);
        if (w.owner == weight) parts[n++] = part_of(&w, w.value);
    }
    if (n == 0) return XD_OK;
    snprintf(path, sizeof path, "%s/values-%d", r->job->directory, xd_comm_rank(r->world));
    mkdir(r->job->directory, 0700);
    mkdir(path, 0700);
    const xd_mapped_weights weights = { parts, n, NULL, 0 };
    const xd_weights_export_desc out = { .directory = path, .weights = weights };
    XD_TRY(xd_weights_export(r->self, &out));
    for (int64_t i = 0; i < n; i++)
        if (parts[i].data)
            memset(parts[i].data, 0xff,
                   (size_t)(parts[i].range.end - parts[i].range.begin) * xd_dtype_size(parts[i].dtype));
    const xd_weights_import_desc in = { .directory = path, .weights = weights };
    return xd_weights_import(r->self, &in, NULL);
}

xd_result fill_model(const rank *r, xd_model *model) {
    if (!r->job->config->filled || r->job->layout->late) return XD_OK;
    XD_TRY(xd_model_allocate(model));
    XD_TRY(xd_model_init_weights(model));
    for (int64_t i = 0; i < xd_model_describe(model).weight_count; i++) {
        xd_weight *weight = xd_model_weight_at(model, i);
        const xd_weight_info w = xd_weight_describe(weight);
        if (w.owner != weight) continue;
        negate(w.value, w.desc->dtype, w.count);
        XD_TRY(xd_weight_set_ready(weight));
    }
    /* Stages have other names on other ranks, and a rank alone must have whole tensors. */
    const bool whole = r->job->layout->tp == 1 && r->job->layout->ep <= 1;
    if (r->job->config->filled == 2 && (r->job->layout->tp == 1 || !is_staged(r))) return inherit(r, model);
    return r->job->config->filled == 3 && whole ? import(r, model) : XD_OK;
}

xd_result fill_parts(rank *r) {
    if (!r->job->config->filled || !r->job->layout->late) return XD_OK;
    for (int64_t i = 0; i < r->count; i++)
        negate(r->parts[i].data, r->parts[i].dtype, r->parts[i].range.end - r->parts[i].range.begin);
    return is_staged(r) ? stages_publish(r) : xd_parallel_publish(r->parallel);
}
