#include <math.h>
#include <string.h>

/* One rank's contribution to a loss as int64 words, so that doubles and limbs travel together. */
enum {
    XDI_REDUCTION_HARD, /* a double's bits, or two limbs in INVARIANT mode */
    XDI_REDUCTION_SOFT = 2,
    XDI_REDUCTION_COUNTED = 4,
    XDI_REDUCTION_LABEL,
    XDI_REDUCTION_NOT_FINITE,
    XDI_REDUCTION_OVERFLOW,
    XDI_REDUCTION_FIRST_ROW,
    XDI_REDUCTION_FIRST_VALUE,
    XDI_REDUCTION_WORDS
};

static bool xdi_reduction_invariant(xd_ctx *ctx) {
    return xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT;
}

static int xdi_reduction_ranks(const xdi_reduction *in) {
    return in->comm ? xd_comm_size(in->comm) : 1;
}

XD_PRIVATE xd_result xdi_reduction_check(xd_ctx *ctx, const xdi_reduction *in) {
    XDI_REQUIRE(ctx, isfinite(in->hard_weight) && isfinite(in->soft_weight), XD_ERROR_ARGUMENT,
                "loss weights %g and %g must be finite", in->hard_weight, in->soft_weight);
    XDI_REQUIRE(ctx, isfinite(in->denominator_value) && in->denominator_value >= 0.0, XD_ERROR_ARGUMENT,
                "denominator %g must be finite and not negative", in->denominator_value);
    XDI_REQUIRE(ctx, !in->scale || isfinite(*in->scale), XD_ERROR_ARGUMENT, "scale %g must be finite",
                *in->scale);
    for (int64_t r = 0; in->row_weight && r < in->rows; r++)
        XDI_REQUIRE(ctx, isfinite((double)in->row_weight[r]), XD_ERROR_ARGUMENT,
                    "weight %g of row %lld must be finite", (double)in->row_weight[r], (long long)r);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_reduction_scales(xd_ctx *ctx, const xdi_reduction *in, double *row_scale,
                                          double *factor) {
    double inverse = 0.0;
    if (in->denominator) {
        inverse = in->denominator->inverse;
    } else if (in->denominator_value > 0.0) {
        inverse = 1.0 / in->denominator_value;
    } else {
        xd_positions batch;
        xd_denominator counted;
        batch.count = in->rows;
        batch.labels = in->labels;
        batch.ignore_index = in->ignore_index;
        batch.mask = in->mask;
        batch.weights = NULL;
        XDI_TRY(xd_denominator_count(ctx, in->comm, &batch, 1, &counted));
        inverse = counted.inverse;
    }
    *factor = (in->scale ? *in->scale : 1.0) * inverse;
    for (int64_t r = 0; r < in->rows; r++) {
        const bool counts = xdi_denominator_counts(in->labels, in->ignore_index, in->mask, r);
        row_scale[r] = counts ? (in->row_weight ? (double)in->row_weight[r] : 1.0) * *factor : 0.0;
    }
    return XD_OK;
}

XD_PRIVATE int64_t xdi_reduction_words(const xdi_reduction *in) {
    return (int64_t)XDI_REDUCTION_WORDS * (xdi_reduction_ranks(in) + 1) + xdi_reduction_ranks(in);
}

static void xdi_reduction_put(int64_t *word, double value) {
    memcpy(word, &value, sizeof value);
}

static double xdi_reduction_get(const int64_t *word) {
    double value;
    memcpy(&value, word, sizeof value);
    return value;
}

static void xdi_reduction_find(int64_t *mine, int64_t row, xdi_row_value value) {
    const int which = value.finding == (int)XD_ROW_LABEL      ? XDI_REDUCTION_LABEL
                      : value.finding == (int)XD_ROW_OVERFLOW ? XDI_REDUCTION_OVERFLOW
                                                              : XDI_REDUCTION_NOT_FINITE;
    if (mine[XDI_REDUCTION_LABEL] + mine[XDI_REDUCTION_NOT_FINITE] + mine[XDI_REDUCTION_OVERFLOW] == 0) {
        mine[XDI_REDUCTION_FIRST_ROW] = row;
        xdi_reduction_put(mine + XDI_REDUCTION_FIRST_VALUE, value.value);
    }
    mine[which]++;
}

/* This rank's rows: weighted sums, findings, how many count. */
static void xdi_reduction_sum(const xdi_reduction *in, const double *row_scale, xdi_row_reader read,
                              const void *rows, bool invariant, int64_t *mine) {
    double hard = 0.0, soft = 0.0;
    xd_fixed fixed_hard = { 0, 0 }, fixed_soft = { 0, 0 };
    memset(mine, 0, XDI_REDUCTION_WORDS * sizeof *mine);
    for (int64_t r = 0; r < in->rows; r++) {
        const double weight = in->row_weight ? (double)in->row_weight[r] : 1.0;
        if (xdi_denominator_counts(in->labels, in->ignore_index, in->mask, r)) mine[XDI_REDUCTION_COUNTED]++;
        if (row_scale[r] == 0.0) continue;
        xdi_row_value value = read(rows, r);
        if (value.finding != (int)XD_ROW_FINE) {
            xdi_reduction_find(mine, r, value);
            continue;
        }
        hard += weight * value.hard;
        soft += weight * value.soft;
        if (!invariant) continue;
        value.finding = (int)XD_ROW_OVERFLOW;
        if (!xd_fixed_add(&fixed_hard, weight * value.hard) ||
            !xd_fixed_add(&fixed_soft, weight * value.soft))
            xdi_reduction_find(mine, r, value);
    }
    if (invariant) {
        memcpy(mine + XDI_REDUCTION_HARD, &fixed_hard, sizeof fixed_hard);
        memcpy(mine + XDI_REDUCTION_SOFT, &fixed_soft, sizeof fixed_soft);
    } else {
        xdi_reduction_put(mine + XDI_REDUCTION_HARD, hard);
        xdi_reduction_put(mine + XDI_REDUCTION_SOFT, soft);
    }
}

/* Sum of one loss over the ranks' records, in rank order or as limbs. */
static double xdi_reduction_total(const int64_t *all, int ranks, int which, bool invariant) {
    double sum = 0.0;
    xd_fixed fixed = { 0, 0 };
    for (int i = 0; i < ranks; i++) {
        const int64_t *word = all + i * XDI_REDUCTION_WORDS + which;
        if (invariant) {
            fixed.high += word[0];
            fixed.low += word[1];
        } else {
            sum += xdi_reduction_get(word);
        }
    }
    return invariant ? xd_fixed_value(fixed) : sum;
}

static int64_t xdi_reduction_count(const int64_t *all, int ranks, int which) {
    int64_t sum = 0;
    for (int i = 0; i < ranks; i++) sum += all[i * XDI_REDUCTION_WORDS + which];
    return sum;
}

/* Adds the findings of all ranks; the first one is that of the lowest rank. */
static void xdi_reduction_status(const int64_t *all, int ranks, bool nothing, xd_status *status) {
    const int64_t label = xdi_reduction_count(all, ranks, XDI_REDUCTION_LABEL);
    const int64_t not_finite = xdi_reduction_count(all, ranks, XDI_REDUCTION_NOT_FINITE);
    const int64_t overflow = xdi_reduction_count(all, ranks, XDI_REDUCTION_OVERFLOW);
    const bool clean = status->label_out_of_range + status->not_finite + status->overflow == 0;
    for (int i = 0; i < ranks && clean; i++) {
        const int64_t *part = all + i * XDI_REDUCTION_WORDS;
        if (part[XDI_REDUCTION_LABEL] + part[XDI_REDUCTION_NOT_FINITE] + part[XDI_REDUCTION_OVERFLOW] == 0)
            continue;
        status->first_row = part[XDI_REDUCTION_FIRST_ROW];
        status->first_value = xdi_reduction_get(part + XDI_REDUCTION_FIRST_VALUE);
        break;
    }
    status->label_out_of_range += label;
    status->not_finite += not_finite;
    status->overflow += overflow;
    if (nothing) status->nothing_counted++;
}

XD_PRIVATE xd_result xdi_reduction_finish(xd_ctx *ctx, const xdi_reduction *in, const double *row_scale,
                                          double factor, xdi_row_reader read, const void *rows,
                                          int64_t *words, xd_loss_values *out) {
    const int ranks = xdi_reduction_ranks(in);
    const bool invariant = xdi_reduction_invariant(ctx);
    int64_t *mine = words, *counts = words + XDI_REDUCTION_WORDS, *all = counts + ranks;
    xd_status found;
    memset(&found, 0, sizeof found);
    xdi_reduction_sum(in, row_scale, read, rows, invariant, mine);
    if (ranks > 1) {
        for (int i = 0; i < ranks; i++) counts[i] = (int64_t)XDI_REDUCTION_WORDS;
        XDI_TRY(xd_all_gather(in->comm, mine, all, counts, XD_DTYPE_I64));
    } else {
        all = mine;
    }
    out->hard = xdi_reduction_total(all, ranks, XDI_REDUCTION_HARD, invariant) * factor;
    out->soft = xdi_reduction_total(all, ranks, XDI_REDUCTION_SOFT, invariant) * factor;
    out->loss = in->hard_weight * out->hard + in->soft_weight * out->soft;
    out->counted = xdi_reduction_count(all, ranks, XDI_REDUCTION_COUNTED);
    const bool nothing =
        in->denominator ? in->denominator->inverse == 0.0 : out->counted == 0 && in->denominator_value == 0.0;
    xdi_reduction_status(all, ranks, nothing, in->status ? in->status : &found);
    return in->status ? XD_OK : xd_status_check(ctx, &found);
}
