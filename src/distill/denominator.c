#include <math.h>

/* What one rank adds to the count; five integers, so that the sum over ranks is exact. */
typedef struct xdi_denominator_part {
    int64_t positions;
    xd_fixed weight;
    int64_t refused; /* weights that cannot be */
    int64_t reserved;
} xdi_denominator_part;

XD_PRIVATE bool xdi_denominator_counts(const int64_t *labels, int64_t ignore_index, const uint8_t *mask,
                                       int64_t i) {
    if (mask && !mask[i]) return false;
    return !labels || labels[i] != (ignore_index ? ignore_index : XD_IGNORE_INDEX);
}

static void xdi_denominator_batch(const xd_positions *batch, xdi_denominator_part *part) {
    for (int64_t i = 0; i < batch->count; i++) {
        if (!xdi_denominator_counts(batch->labels, batch->ignore_index, batch->mask, i)) continue;
        part->positions++;
        if (!batch->weights)
            part->weight.high += (int64_t)1 << 30;
        else if (!(batch->weights[i] >= 0.0f) || !xd_fixed_add(&part->weight, (double)batch->weights[i]))
            part->refused++;
    }
}

XD_API xd_result xd_denominator_count(xd_ctx *ctx, xd_comm *comm, const xd_positions *batches,
                                      int64_t batch_count, xd_denominator *out) {
    xdi_denominator_part part = { 0, { 0, 0 }, 0, 0 };
    for (int64_t b = 0; b < batch_count; b++) {
        if (batches[b].count < 0)
            part.refused++;
        else
            xdi_denominator_batch(&batches[b], &part);
    }
    if (comm && xd_comm_size(comm) > 1)
        XDI_TRY(xd_all_reduce(comm, &part, &part, (int64_t)(sizeof part / sizeof(int64_t)), XD_DTYPE_I64,
                              XD_SUM));
    XDI_REQUIRE(ctx, part.refused == 0, XD_ERROR_ARGUMENT,
                "%lld weights of positions are negative, not finite or too large (or counts negative)",
                (long long)part.refused);
    out->positions = part.positions;
    out->value = xd_fixed_value(part.weight);
    out->inverse = out->value > 0.0 ? 1.0 / out->value : 0.0;
    return XD_OK;
}
