/* Labels of the next token when a sequence is split over ranks. */

#include "base/internal.h"
#include "kernel/ids.h"
#include "loss/internal.h"
#include "loss/shift.h"

#include <string.h>

static int64_t xdi_shift_ignored(const xd_shift_desc *d) {
    return d->has_ignore_index ? d->ignore_index : XD_IGNORE_INDEX;
}

/* labels[b, i] = the id after position positions[i], where next_id/next_mask are whole sequences. */
static void xdi_shift_fill(const xd_shift_desc *d, xd_ids ids, const uint8_t *mask, void *labels) {
    const int64_t fill = xdi_shift_ignored(d);
    for (int64_t b = 0; b < d->sequences; b++)
        for (int64_t i = 0; i < d->held; i++) {
            const int64_t next = d->positions[i] + 1, at = b * d->length + next;
            const bool counts = next < d->length && (!mask || mask[at]);
            const int64_t label = counts ? xd_id_at(ids, at) : fill;
            if (d->ids.dtype == XD_DTYPE_I32)
                ((int32_t *)labels)[b * d->held + i] = (int32_t)label;
            else
                ((int64_t *)labels)[b * d->held + i] = label;
        }
}

static xd_result xdi_shift_validate(xd_ctx *ctx, const xd_shift_desc *d) {
    XD_REQUIRE(ctx, d->sequences >= 0 && d->length >= 0 && d->held >= 0, XD_ERROR_ARGUMENT,
               "%lld sequences of %lld positions, %lld held", (long long)d->sequences, (long long)d->length,
               (long long)d->held);
    XDI_GIVEN_LIST(ctx, d->positions, d->held);
    for (int64_t i = 0; i < d->held; i++)
        XD_REQUIRE(ctx, d->positions[i] >= 0 && d->positions[i] < d->length, XD_ERROR_ARGUMENT,
                   "position %lld is outside the sequence of %lld", (long long)d->positions[i],
                   (long long)d->length);
    const int64_t fill = xdi_shift_ignored(d);
    XD_REQUIRE(ctx, d->ids.dtype != XD_DTYPE_I32 || fill == (int32_t)fill, XD_ERROR_ARGUMENT,
               "ignore_index %lld does not fit into labels of 32 bits", (long long)fill);
    return xdi_vocab_check_ids(ctx, "ids", &d->ids);
}

/* Words of whole sequences, their masks and the holders of each position; false when their bytes are too many. */
static bool xdi_shift_words(const xd_shift_desc *d, int64_t *words) {
    size_t ids = 0, count = 0, bytes = 0;
    const bool fits = xdi_size_multiply((size_t)d->sequences, (size_t)d->length, &ids) &&
                      xdi_size_multiply(ids, 2, &count) && count <= SIZE_MAX - (size_t)d->length - 1 &&
                      xdi_size_multiply(count + (size_t)d->length + 1, sizeof(int64_t), &bytes);
    *words = fits ? (int64_t)(count + (size_t)d->length) : 0;
    return fits;
}

/* Ids and mask of whole sequences, and how many ranks hold each position, summed over ranks: what no rank holds stays 0.
 * One exchange. */
typedef struct xdi_shift_whole {
    int64_t *ids;     /* [B, length] */
    int64_t *mask;    /* [B, length] */
    int64_t *holders; /* [length] */
    int64_t words;
} xdi_shift_whole;

static void xdi_shift_scatter(const xd_shift_desc *d, xdi_shift_whole *whole) {
    for (int64_t i = 0; i < d->held; i++) whole->holders[d->positions[i]]++;
    for (int64_t b = 0; b < d->sequences; b++)
        for (int64_t i = 0; i < d->held; i++) {
            const int64_t to = b * d->length + d->positions[i], from = b * d->held + i;
            whole->ids[to] = xd_id_at(d->ids, from);
            whole->mask[to] = !d->mask || d->mask[from] ? 1 : 0;
        }
}

static xd_result xdi_shift_exchange(xd_ctx *ctx, const xd_shift_desc *d, xdi_shift_whole *whole) {
    XD_TRY(xd_all_reduce(d->comm, whole->ids, whole->ids, whole->words, XD_DTYPE_I64, XD_SUM));
    for (int64_t p = 0; p < d->length; p++)
        XD_REQUIRE(ctx, whole->holders[p] == 1, XD_ERROR_SHAPE,
                   "position %lld is held by %lld ranks, not by 1", (long long)p,
                   (long long)whole->holders[p]);
    return XD_OK;
}

XD_API xd_result xd_next_token_labels(xd_ctx *ctx, const xd_shift_desc *desc, void *labels) {
    XDI_GIVEN(ctx, ctx, desc);
    xdi_shift_whole whole;
    xd_result result = xdi_shift_validate(ctx, desc);
    if (result == XD_OK && desc->sequences > 0 && desc->held > 0) result = XDI_CHECK_GIVEN(ctx, labels);
    if (!desc->comm) {
        if (result == XD_OK) xdi_shift_fill(desc, desc->ids, desc->mask, labels);
        return result;
    }
    memset(&whole, 0, sizeof whole);
    if (result == XD_OK) {
        if (xdi_shift_words(desc, &whole.words))
            whole.ids = (int64_t *)xd_allocate(ctx, ((size_t)whole.words + 1) * sizeof(int64_t));
        if (!whole.ids)
            result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld sequences of %lld ids",
                             (long long)desc->sequences, (long long)desc->length);
    }
    result = xdi_vocab_agree_rows(desc->comm, result,
                                  desc->sequences); /* a product of both could agree by chance */
    if (result == XD_OK) result = xdi_vocab_agree_rows(desc->comm, XD_OK, desc->length);
    const int64_t total = result == XD_OK ? desc->sequences * desc->length : 0;
    if (result == XD_OK) {
        whole.mask = whole.ids + total;
        whole.holders = whole.mask + total;
        xdi_shift_scatter(desc, &whole);
        result = xdi_shift_exchange(ctx, desc, &whole);
    }
    if (result == XD_OK) {
        uint8_t *mask = (uint8_t *)whole.mask; /* narrowed in place: byte i is written after word i is read */
        for (int64_t i = 0; i < total; i++) mask[i] = whole.mask[i] != 0;
        xdi_shift_fill(desc, xd_ids_of(whole.ids, XD_DTYPE_I64), mask, labels);
    }
    xd_release(ctx, whole.ids);
    return result;
}

XD_API xd_result xd_load_balanced_positions(xd_ctx *ctx, int64_t length, int rank, int ranks,
                                            int64_t *positions) {
    XDI_GIVEN(ctx, ctx, positions);
    XD_REQUIRE(ctx, ranks > 0 && rank >= 0 && rank < ranks, XD_ERROR_ARGUMENT, "rank %d of %d", rank, ranks);
    XD_REQUIRE(ctx, length >= 0 && (ranks == 1 || length % (2 * ranks) == 0), XD_ERROR_SHAPE,
               "length %lld is not a multiple of %d", (long long)length, 2 * ranks);
    const int64_t held = length / ranks, piece = held / 2, second = (2 * (int64_t)ranks - 1 - rank) * piece;
    for (int64_t i = 0; i < held; i++)
        positions[i] = ranks == 1 ? i : i < piece ? rank * piece + i : second + (i - piece);
    return XD_OK;
}
