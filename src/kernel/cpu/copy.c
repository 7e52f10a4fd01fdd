/* Copies: of bytes, and strided ones. */

#include "kernel/copy.h"
#include "kernel/internal.h"

#include <string.h>

/* ---- bytes ---- */

enum {
    XDI_COPY_LINE = 64,
    XDI_COPY_TURN = 2048,     /* bytes of one stream, then of the other; lines are asked for so far ahead */
    XDI_COPY_LEAST = 1 << 17, /* bytes of a copy that a cache of one core does not hold */
    XDI_COPY_MOST = 1 << 23   /* and that one of all cores does */
};

static void xdi_copy_turn(unsigned char *to, const unsigned char *from) {
    for (size_t i = 0; i < XDI_COPY_TURN; i += XDI_COPY_LINE) {
        __builtin_prefetch((const void *)((uintptr_t)from + i + XDI_COPY_TURN));
        __builtin_prefetch((const void *)((uintptr_t)to + i + XDI_COPY_TURN), 1);
        memcpy(to + i, from + i, XDI_COPY_LINE);
    }
}

/* Two streams, because one alone waits: a processor follows each of them by itself, but not across a page. What does not fit into a
 * shared cache is left to memcpy, which goes past it. */
XD_PRIVATE void xdi_copy_bytes(void *to, const void *from, size_t bytes) {
    unsigned char *target = (unsigned char *)to;
    const unsigned char *source = (const unsigned char *)from;
    const size_t half = bytes / (2 * XDI_COPY_TURN) * XDI_COPY_TURN;
    if (bytes == 0 || to == from) return;
    if (bytes < XDI_COPY_LEAST || bytes > XDI_COPY_MOST) {
        memcpy(to, from, bytes);
        return;
    }
    for (size_t at = 0; at < half; at += XDI_COPY_TURN) {
        xdi_copy_turn(target + at, source + at);
        xdi_copy_turn(target + half + at, source + half + at);
    }
    memcpy(target + 2 * half, source + 2 * half, bytes - 2 * half);
}

/* As for copies: lines that another core has, or a far cache, come in time only when they are asked for. */
static void xdi_fill_turn(unsigned char *to, int value) {
    for (size_t i = 0; i < XDI_COPY_TURN; i += XDI_COPY_LINE) {
        __builtin_prefetch((const void *)((uintptr_t)to + i + XDI_COPY_TURN), 1);
        memset(to + i, value, XDI_COPY_LINE);
    }
}

XD_PRIVATE void xdi_fill_bytes(void *to, uint8_t value, size_t bytes) {
    unsigned char *target = (unsigned char *)to;
    const size_t half = bytes / (2 * XDI_COPY_TURN) * XDI_COPY_TURN;
    if (bytes == 0) return;
    if (bytes < XDI_COPY_LEAST || bytes > XDI_COPY_MOST) {
        memset(to, value, bytes);
        return;
    }
    for (size_t at = 0; at < half; at += XDI_COPY_TURN) {
        xdi_fill_turn(target + at, value);
        xdi_fill_turn(target + half + at, value);
    }
    memset(target + 2 * half, value, bytes - 2 * half);
}

/* ---- strided copies ---- */

enum { XDI_COPY_SQUARE = 32 /* elements of a side: the lines of both arrays stay in the nearest cache */ };

/* Elements one by one; steps are in bytes. */
static void xdi_copy_line(const char *src, int64_t src_step, char *dst, int64_t dst_step, int64_t count,
                          size_t size) {
    if (size == 4)
        for (int64_t i = 0; i < count; i++) memcpy(dst + i * dst_step, src + i * src_step, 4);
    else if (size == 2)
        for (int64_t i = 0; i < count; i++) memcpy(dst + i * dst_step, src + i * src_step, 2);
    else
        for (int64_t i = 0; i < count; i++) memcpy(dst + i * dst_step, src + i * src_step, size);
}

/* The dimension with the nearest neighbours, besides the last: with the last it makes the squares of a transposition. */
static int xdi_copy_partner(const xd_copy *copy) {
    int best = copy->ndim - 2;
    for (int d = best - 1; d >= 0; d--)
        if (copy->src_stride[d] + copy->dst_stride[d] < copy->src_stride[best] + copy->dst_stride[best])
            best = d;
    return best;
}

/* Dimensions `side` and the last, of which one is far in either array, square by square. */
static void xdi_copy_squares(const xd_copy *copy, int side, const char *src, char *dst, size_t size) {
    const int last = copy->ndim - 1;
    const int64_t bytes = (int64_t)size, rows = copy->extent[side], columns = copy->extent[last];
    const int64_t src_step = copy->src_stride[last] * bytes, dst_step = copy->dst_stride[last] * bytes;
    for (int64_t r = 0; r < rows; r += XDI_COPY_SQUARE)
        for (int64_t c = 0; c < columns; c += XDI_COPY_SQUARE) {
            const int64_t end = rows - r < XDI_COPY_SQUARE ? rows : r + XDI_COPY_SQUARE;
            const int64_t count = columns - c < XDI_COPY_SQUARE ? columns - c : (int64_t)XDI_COPY_SQUARE;
            for (int64_t i = r; i < end; i++)
                xdi_copy_line(src + i * copy->src_stride[side] * bytes + c * src_step, src_step,
                              dst + i * copy->dst_stride[side] * bytes + c * dst_step, dst_step, count, size);
        }
}

XD_PRIVATE void xdi_copy_run(const xd_copy *copy, const void *src, void *dst, size_t size) {
    const int last = copy->ndim - 1;
    const bool dense = copy->src_stride[last] == 1 && copy->dst_stride[last] == 1;
    const int side = dense || last == 0 ? -1 : xdi_copy_partner(copy);
    const size_t block = (size_t)copy->extent[last] * size;
    int64_t at[XD_DIMS_MAX] = { 0 }, s = copy->src_offset, d = copy->dst_offset;
    int dim;
    do {
        const char *from = (const char *)src + (size_t)s * size;
        char *to = (char *)dst + (size_t)d * size;
        if (dense)
            memcpy(to, from, block);
        else if (side >= 0)
            xdi_copy_squares(copy, side, from, to, size);
        else
            xdi_copy_line(from, copy->src_stride[last] * (int64_t)size, to,
                          copy->dst_stride[last] * (int64_t)size, copy->extent[last], size);
        for (dim = last - 1; dim >= 0; dim--) {
            if (dim == side) continue;
            s += copy->src_stride[dim];
            d += copy->dst_stride[dim];
            if (++at[dim] < copy->extent[dim]) break;
            s -= copy->src_stride[dim] * copy->extent[dim];
            d -= copy->dst_stride[dim] * copy->extent[dim];
            at[dim] = 0;
        }
    } while (dim >= 0);
}
