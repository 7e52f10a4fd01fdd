/* First values of weights. */

#include "base/half.h"
#include "base/philox.h"
#include "base/scalar.h"
#include "comm/topology.h"
#include "model/internal.h"
#include "tensor/interval.h"

#include <string.h>

enum { XDI_INIT_BLOCK = 4096 /* elements formed at a time */ };

/* A weight being filled: its values come in the order of a part of its region and leave in blocks. */
typedef struct xdi_init_work {
    const xd_weight *weight;
    xd_philox random;
    unsigned char *to; /* the place of the next value */
    xd_region parts[XD_REGION_FLAT_MAX];
    float values[XDI_INIT_BLOCK];
    uint64_t stored[XDI_INIT_BLOCK]; /* in the weight's type, which has at most 8 bytes */
} xdi_init_work;

/* Values of the elements from `first` on of the whole weight. */
static void xdi_init_values(xdi_init_work *w, int64_t first, int64_t n) {
    const xd_init init = w->weight->desc.init;
    if (init.kind == XD_INIT_NORMAL) xd_philox_fill_normal(&w->random, first, n, w->values);
    if (init.kind == XD_INIT_UNIFORM) xd_philox_fill_uniform(&w->random, first, n, w->values);
    for (int64_t i = 0; i < n; i++) {
        float x = w->values[i];
        if (init.kind == XD_INIT_UNIFORM) x = 2.0f * x - 1.0f; /* both exact */
        if (init.kind == XD_INIT_ZERO) x = 0.0f;
        if (init.kind == XD_INIT_CONSTANT) x = init.center;
        if (init.kind == XD_INIT_NORMAL || init.kind == XD_INIT_UNIFORM)
            x = xd_mulf(init.scale, x) + init.center;
        w->values[i] = x;
    }
}

/* The next n elements of the region to its storage. */
static xd_result xdi_init_put(xdi_init_work *w, int64_t n) {
    xd_ctx *ctx = w->weight->model->ctx;
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    const xd_dtype dtype = w->weight->desc.dtype;
    const size_t size = xd_dtype_size(dtype);
    const xd_launch launch = xd_ctx_launch(ctx);
    for (int64_t i = 0; i < n; i++) xd_store_f64(w->stored, dtype, i, (double)w->values[i]);
    XD_TRY(memory->copy(&launch, w->to, w->stored, (size_t)n * size, XD_COPY_TO_DEVICE));
    w->to += (size_t)n * size;
    return memory->synchronize(&launch); /* `stored` is used again */
}

/* A run of elements that are adjacent in the whole weight. Rows beyond shape[0] are padding. */
static xd_result xdi_init_run(xdi_init_work *w, int64_t first, int64_t count) {
    const xd_weight_desc *d = &w->weight->desc;
    int64_t whole = 1;
    for (int i = 0; i < d->ndim; i++) whole *= d->shape[i];
    for (int64_t done = 0; done < count;) {
        const int64_t left = count - done, n = left < XDI_INIT_BLOCK ? left : (int64_t)XDI_INIT_BLOCK;
        const int64_t begin = first + done, inside = whole > begin ? whole - begin : 0;
        xdi_init_values(w, begin, n < inside ? n : inside);
        for (int64_t i = inside; i < n; i++) w->values[i] = 0.0f;
        XD_TRY(xdi_init_put(w, n));
        done += n;
    }
    return XD_OK;
}

/* All runs of a region from dimension `dim` on; `first` is the flat index of what comes before it. */
static xd_result xdi_init_dimension(xdi_init_work *w, const xd_region *region, int dim, int64_t first) {
    const xd_weight_desc *d = &w->weight->desc;
    int64_t stored[XD_DIMS_MAX];
    xdi_weight_stored_shape(d, stored);
    if (d->ndim == 0) return xdi_init_run(w, 0, 1);
    for (int i = 0; i < region->count[dim]; i++) {
        const xd_interval part = region->interval[dim][i];
        if (dim == d->ndim - 1) {
            XD_TRY(xdi_init_run(w, first * stored[dim] + part.begin, part.end - part.begin));
            continue;
        }
        for (int64_t j = part.begin; j < part.end; j++)
            XD_TRY(xdi_init_dimension(w, region, dim + 1, first * stored[dim] + j));
    }
    return XD_OK;
}

static xd_result xdi_init_parts(xdi_init_work *w, xd_interval range) {
    const xd_weight *weight = w->weight;
    const uint64_t key = xd_hash(0, weight->name, strlen(weight->name));
    int count = 0;
    w->random.seed = weight->model->desc.seed;
    w->random.stream = XD_STREAM_INIT;
    w->random.sample = (uint32_t)(key & 0xffffffffu);
    w->random.step = (uint32_t)(key >> 32);
    XD_TRY(xd_region_flat_range(weight->model->ctx, &weight->region, range, w->parts, &count));
    for (int i = 0; i < count; i++) XD_TRY(xdi_init_dimension(w, &w->parts[i], 0, 0));
    return XD_OK;
}

XD_PRIVATE xd_result xdi_weight_fill(const xd_weight *weight, xd_interval range, void *to) {
    xd_ctx *ctx = weight->model->ctx;
    if (range.begin == range.end) return XD_OK;
    xdi_init_work *work = (xdi_init_work *)xd_allocate(ctx, sizeof *work);
    XD_REQUIRE(ctx, work, XD_ERROR_MEMORY, "no room for %d values", (int)XDI_INIT_BLOCK);
    work->weight = weight;
    work->to = (unsigned char *)to;
    const xd_result result = xdi_init_parts(work, range);
    xd_release(ctx, work);
    return result;
}

XD_API xd_result xd_model_init_weights(xd_model *model) {
    XD_TRY(xdi_model_require_storage(model));
    for (int64_t i = 0; i < model->weight_count; i++) {
        xd_weight *weight = model->weights[i];
        const xd_interval all = { 0, weight->count };
        if (weight->owner != weight || weight->ready) continue;
        XD_TRY(xdi_weight_fill(weight, all, weight->value));
        weight->ready = true;
    }
    return XD_OK;
}
