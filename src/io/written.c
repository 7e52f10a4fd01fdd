/* Which bytes of a file's tensors are written: each must be, and once. */

#include "io/internal.h"

#include <string.h>

static xd_result xdi_written_grow(xd_ctx *ctx, xdi_written *w) {
    const size_t room = w->room ? 2 * w->room : 64;
    xdi_written_piece *pieces = (xdi_written_piece *)xd_allocate(ctx, room * sizeof *pieces);
    XD_REQUIRE(ctx, pieces, XD_ERROR_MEMORY, "no room to note %llu written pieces", (unsigned long long)room);
    if (w->count) memcpy(pieces, w->pieces, w->count * sizeof *pieces);
    xd_release(ctx, w->pieces);
    w->pieces = pieces;
    w->room = room;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_written_reserve(xd_ctx *ctx, xdi_written *w) {
    return w->count < w->room ? XD_OK : xdi_written_grow(ctx, w);
}

XD_PRIVATE void xdi_written_note(xdi_written *w, int64_t tensor, uint64_t begin, uint64_t end) {
    xdi_written_piece *last = w->count ? &w->pieces[w->count - 1] : NULL;
    if (begin == end) return;
    if (last && last->tensor == tensor && last->end == begin) {
        last->end = end;
        return;
    }
    xdi_written_piece *piece = &w->pieces[w->count++];
    piece->tensor = tensor;
    piece->begin = begin;
    piece->end = end;
}

static int xdi_written_by_place(const void *a, const void *b) {
    const xdi_written_piece *one = (const xdi_written_piece *)a, *other = (const xdi_written_piece *)b;
    if (one->tensor != other->tensor) return one->tensor < other->tensor ? -1 : 1;
    if (one->begin != other->begin) return one->begin < other->begin ? -1 : 1;
    return (one->end > other->end) - (one->end < other->end);
}

/* The pieces of one tensor are order[*at] and those after it. */
static xd_result xdi_written_check_tensor(xd_ctx *ctx, const xdi_written *w, const void *const *order,
                                          size_t *at, int64_t tensor, const char *name, uint64_t bytes) {
    uint64_t end = 0;
    for (; *at < w->count; ++*at) {
        const xdi_written_piece *piece = (const xdi_written_piece *)order[*at];
        if (piece->tensor != tensor || piece->begin > end) break;
        const uint64_t twice = piece->end < end ? piece->end : end;
        XD_REQUIRE(ctx, piece->begin == end, XD_ERROR_STATE,
                   "tensor \"%.80s\": bytes %llu to %llu of %llu are written more than once", name,
                   (unsigned long long)piece->begin, (unsigned long long)twice - 1,
                   (unsigned long long)bytes);
        end = piece->end;
    }
    const xdi_written_piece *next = *at < w->count ? (const xdi_written_piece *)order[*at] : NULL;
    const uint64_t hole = next && next->tensor == tensor ? next->begin : bytes;
    XD_REQUIRE(ctx, end == bytes, XD_ERROR_STATE,
               "tensor \"%.80s\": bytes %llu to %llu of %llu are not written", name, (unsigned long long)end,
               (unsigned long long)hole - 1, (unsigned long long)bytes);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_written_check(xd_ctx *ctx, const xdi_written *w, int64_t count,
                                       const char *const *names, const uint64_t *bytes) {
    size_t at = 0;
    const void **order = (const void **)xd_allocate(ctx, w->count * sizeof *order);
    XD_REQUIRE(ctx, order, XD_ERROR_MEMORY, "no room to sort %llu written pieces",
               (unsigned long long)w->count);
    for (size_t i = 0; i < w->count; i++) order[i] = &w->pieces[i];
    xdi_sort(order, w->count, xdi_written_by_place);
    xd_result result = XD_OK;
    for (int64_t i = 0; i < count && result == XD_OK; i++)
        result = xdi_written_check_tensor(ctx, w, order, &at, i, names[i], bytes[i]);
    xd_release(ctx, (void *)order);
    return result;
}
