/* From losses of rows to one value: which rows count, and what their sum is divided by. */

#include "loss/internal.h"

#include <math.h>
#include <string.h>

/* Offsets of a reduction's parts in its words, after this rank's record and all ranks' records. */
enum {
    XDI_REDUCTION_FACTOR,
    XDI_REDUCTION_PART,
    XDI_REDUCTION_DENOMINATOR = XDI_REDUCTION_PART + XD_COUNT_WORDS
};
enum {
    XDI_REDUCTION_DENOMINATOR_WORDS = (int)(sizeof(xd_denominator) / sizeof(int64_t)),
    XDI_REDUCTION_EXTRA = XDI_REDUCTION_DENOMINATOR + XDI_REDUCTION_DENOMINATOR_WORDS
};

static int xdi_reduction_ranks(const xdi_reduction *in) {
    return in->comm ? xd_comm_size(in->comm) : 1;
}

XD_PRIVATE xdi_reduction xdi_reduction_of(const xd_loss_common *common, int64_t rows) {
    xdi_reduction in;
    memset(&in, 0, sizeof in);
    in.positions.count = rows;
    in.positions.labels = common->labels;
    in.positions.has_ignore_index = common->has_ignore_index;
    in.positions.ignore_index = common->ignore_index;
    in.positions.mask = common->mask;
    in.positions.weights = common->row_weight;
    in.scale = common->scale;
    in.denominator = common->denominator;
    in.denominator_value = common->denominator_value;
    in.comm = common->comm;
    in.status = common->status;
    return in;
}

XD_PRIVATE xd_result xdi_reduction_check(xd_ctx *ctx, const xdi_reduction *in) {
    XD_REQUIRE(ctx, isfinite(in->hard_weight) && isfinite(in->soft_weight), XD_ERROR_ARGUMENT,
               "loss weights %g and %g must be finite", in->hard_weight, in->soft_weight);
    XD_REQUIRE(ctx, isfinite(in->denominator_value) && in->denominator_value >= 0.0, XD_ERROR_ARGUMENT,
               "denominator %g must be finite and not negative", in->denominator_value);
    XD_TRY(xdi_vocab_check_ids(ctx, "labels", &in->positions.labels));
    XD_REQUIRE(ctx, in->status || xd_ctx_kernels(ctx)->device == XD_DEVICE_CPU, XD_ERROR_ARGUMENT,
               "a loss on a GPU needs a status: its findings are not read on the host during the step");
    return XD_OK;
}

XD_PRIVATE int64_t xdi_reduction_words(const xdi_reduction *in) {
    return (int64_t)XD_RECORD_WORDS * (xdi_reduction_ranks(in) + 1) + XDI_REDUCTION_EXTRA;
}

/* Counts the rows of this call over all ranks, where the caller gave no denominator. */
static xd_result xdi_reduction_count(const xdi_reduction *in, const xd_kernels *kernels,
                                     const xd_launch *launch, int64_t *part, xd_denominator *out) {
    xd_positions rows = in->positions;
    rows.weights = NULL;
    XD_TRY(kernels->memory.fill(launch, part, 0, XD_COUNT_WORDS * sizeof *part));
    XD_TRY(kernels->rows.count(launch, &rows, part));
    if (xdi_reduction_ranks(in) > 1)
        XD_TRY(xd_all_reduce(in->comm, part, part, XD_COUNT_WORDS, XD_DTYPE_I64, XD_SUM));
    return kernels->rows.denominator(launch, part, out);
}

XD_PRIVATE xd_result xdi_reduction_begin(xd_ctx *ctx, const xdi_reduction *in, double *row_scale,
                                         int64_t *words, xd_row_args *args) {
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    const xd_launch launch = xd_ctx_launch(ctx);
    int64_t *extra = words + XD_RECORD_WORDS * (xdi_reduction_ranks(in) + 1);
    memset(args, 0, sizeof *args);
    args->positions = in->positions;
    args->scale = in->scale;
    args->denominator = in->denominator;
    args->denominator_value = in->denominator_value;
    args->row_scale = row_scale;
    args->factor = (double *)(void *)(extra + XDI_REDUCTION_FACTOR);
    args->hard_weight = in->hard_weight;
    args->soft_weight = in->soft_weight;
    args->fixed = xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT;
    args->record = words;
    args->ranks = xdi_reduction_ranks(in);
    args->records = args->ranks > 1 ? words + XD_RECORD_WORDS : words;
    if (!in->denominator && in->denominator_value == 0.0) {
        xd_denominator *own = (xd_denominator *)(void *)(extra + XDI_REDUCTION_DENOMINATOR);
        XD_TRY(xdi_reduction_count(in, kernels, &launch, extra + XDI_REDUCTION_PART, own));
        args->denominator = own;
    }
    return kernels->rows.scales(&launch, args);
}

XD_PRIVATE xd_result xdi_reduction_end(xd_ctx *ctx, const xdi_reduction *in, xd_row_args *args,
                                       xd_loss_values *out) {
    const xd_kernels *kernels = xd_ctx_kernels(ctx);
    const bool host = kernels->device == XD_DEVICE_CPU;
    xd_launch launch = xd_ctx_launch(ctx);
    xd_loss_values values;
    xd_status found;
    memset(&found, 0, sizeof found);
    launch.status = in->status ? in->status : &found;
    args->values = host ? &values : out; /* the caller's stays untouched when findings are an error */
    XD_TRY(kernels->rows.sum(&launch, args));
    if (args->ranks > 1)
        XD_TRY(xdi_comm_all_gather_equal(in->comm, args->record, args->record + XD_RECORD_WORDS,
                                         XD_RECORD_WORDS, XD_DTYPE_I64));
    XD_TRY(kernels->rows.finish(&launch, args));
    if (!in->status) XD_TRY(xdi_status_check(ctx, &found, in->vocabulary));
    if (host) *out = values;
    return XD_OK;
}
