/* Linked with bench/gpu.cu under -Wl,--wrap=xd_loss: the GPU's gradients are spoilt behind the library's back, and the benchmark must
 * find it. PLANTED=softmax halves all columns but the label's, PLANTED=label the label's alone, in the last of the rows that it looks
 * at. On the emulation: device memory is written from here. */
#define XDISTILL_IMPLEMENTED
#include "xdistill.h"

#include <stdlib.h>
#include <string.h>

extern "C" xd_result __real_xd_loss(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out);
extern "C" xd_result __wrap_xd_loss(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out);

extern "C" xd_result __wrap_xd_loss(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out) {
    const xd_result result = __real_xd_loss(ctx, desc, out);
    const bool label_alone = strcmp(getenv("PLANTED"), "label") == 0, plans = !desc->common.workspace;
    const int64_t *labels = static_cast<const int64_t *>(desc->common.labels.data);
    const int64_t row = 1, columns = desc->student.cols;
    const xd_rows gradient = desc->common.gradient;
    if (xd_ctx_kernels(ctx)->device == XD_DEVICE_CPU || plans || !labels) return result;
    for (int64_t c = 0; c < columns; c++) {
        const int64_t at = row * columns + c;
        if ((c == labels[row]) != label_alone) continue;
        xd_store_f64(gradient.data, gradient.dtype, at, 0.5 * xd_load_f64(gradient.data, gradient.dtype, at));
    }
    return result;
}
