/* First values of boxes of tensors. */

#include "kernel/cpu/internal.h"

enum { XDI_FILL_SPAN = 512 /* numbers formed at a time */ };

typedef struct xdi_fill_job {
    const xd_fill_args *args;
    const xd_copy *box;
} xdi_fill_job;

/* Elements whose indices follow each other. */
static void xdi_fill_span(const xd_fill_args *args, int64_t index, int64_t n, float *values) {
    const int64_t inside = args->limit > index ? args->limit - index : 0, random = n < inside ? n : inside;
    if (args->init.kind == XD_INIT_NORMAL) xd_philox_fill_normal(&args->random, index, random, values);
    if (args->init.kind == XD_INIT_UNIFORM) xd_philox_fill_uniform(&args->random, index, random, values);
    const bool drawn = xd_init_is_random(&args->init);
    for (int64_t i = 0; i < random; i++) values[i] = xd_init_value(&args->init, drawn ? values[i] : 0.0f);
    for (int64_t i = random; i < n; i++) values[i] = 0.0f;
}

/* Elements [begin, end) of a box. */
static void xdi_fill_piece(const xd_launch *launch, const void *args, int64_t begin, int64_t end, int slot) {
    const xdi_fill_job *job = (const xdi_fill_job *)args;
    const xd_copy *box = job->box;
    const int last = box->ndim - 1;
    float values[XDI_FILL_SPAN];
    (void)launch, (void)slot;
    for (int64_t at = begin, n; at < end; at += n) {
        const int64_t row = box->extent[last] - at % box->extent[last];
        int64_t index, place;
        n = box->src_stride[last] == 1 ? row : 1;
        if (n > end - at) n = end - at;
        if (n > XDI_FILL_SPAN) n = XDI_FILL_SPAN;
        xd_fill_places(box, at, &index, &place);
        xdi_fill_span(job->args, index, n, values);
        for (int64_t i = 0; i < n; i++)
            xd_element_store(job->args->out, job->args->dtype, place + i * box->dst_stride[last],
                             (double)values[i]);
    }
}

XD_PRIVATE xd_result xdi_fill_cpu(const xd_launch *launch, const xd_fill_args *args) {
    for (int64_t k = 0; k < args->box_count; k++) {
        const xdi_fill_job job = { args, &args->boxes[k] };
        int64_t count = 1;
        for (int d = 0; d < job.box->ndim; d++) count *= job.box->extent[d];
        XD_TRY(xdi_spread_elements(launch, count, 1, xdi_fill_piece, &job));
    }
    return XD_OK;
}
