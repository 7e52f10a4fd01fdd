/* dataset.c - idx files: four bytes of magic number, a big-endian size for each dimension, then the items. */
#include "dataset.h"

#include <stdio.h>
#include <string.h>

enum {
    IDX_MAGIC_IMAGES = 0x803, /* 8: bytes without sign; 3: dimensions */
    IDX_MAGIC_LABELS = 0x801,
    IDX_PIXELS = IDX_SIDE * IDX_SIDE,
    IDX_EDGE = (2 * IMAGE_SIDE - IDX_SIDE) / 2
};

static uint32_t idx_number(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | (uint32_t)at[3];
}

/* What both kinds of file have in common: the header, and a length that is what the header says. */
static xd_result idx_parse(xd_ctx *ctx, const char *name, const uint8_t *data, size_t bytes, uint32_t magic,
                           idx_view *out) {
    const size_t dimensions = magic & 0xff, header = 4 + 4 * dimensions;
    uint64_t item = 1;
    XD_REQUIRE(ctx, bytes >= header, XD_ERROR_FORMAT, "%s: %llu bytes, the header alone has %llu", name,
               (unsigned long long)bytes, (unsigned long long)header);
    XD_REQUIRE(
        ctx, idx_number(data) == magic, XD_ERROR_FORMAT, "%s: the magic number is 0x%08x, not 0x%08x: %s",
        name, (unsigned)idx_number(data), (unsigned)magic,
        data[0] == 0x1f && data[1] == 0x8b ? "it is compressed, gunzip it" : "no idx file of this kind");
    for (size_t d = 1; d < dimensions; d++) {
        const uint32_t side = idx_number(data + 4 + 4 * d);
        XD_REQUIRE(ctx, side == IDX_SIDE, XD_ERROR_FORMAT, "%s: dimension %d of the pictures is %u, not %d",
                   name, (int)d, (unsigned)side, IDX_SIDE);
        item *= IDX_SIDE;
    }
    const uint64_t count = idx_number(data + 4), expected = header + count * item;
    XD_REQUIRE(ctx, bytes == expected, XD_ERROR_FORMAT, "%s: %llu items make %llu bytes, but it has %llu",
               name, (unsigned long long)count, (unsigned long long)expected, (unsigned long long)bytes);
    out->count = (int64_t)count;
    out->items = data + header;
    return XD_OK;
}

xd_result idx_images(xd_ctx *ctx, const char *name, const uint8_t *data, size_t bytes, idx_view *out) {
    return idx_parse(ctx, name, data, bytes, IDX_MAGIC_IMAGES, out);
}

xd_result idx_labels(xd_ctx *ctx, const char *name, const uint8_t *data, size_t bytes, idx_view *out) {
    idx_view labels;
    XD_TRY(idx_parse(ctx, name, data, bytes, IDX_MAGIC_LABELS, &labels));
    for (int64_t i = 0; i < labels.count; i++)
        XD_REQUIRE(ctx, labels.items[i] < IMAGE_CLASSES, XD_ERROR_FORMAT,
                   "%s: label %lld is %d, there are %d classes", name, (long long)i, labels.items[i],
                   IMAGE_CLASSES);
    *out = labels;
    return XD_OK;
}

/* The edge is black in the files, too, so the mean of what is left of a 2 x 2 block is of four pixels always. */
void dataset_convert(const uint8_t *pixels, float *image) {
    for (int row = 0; row < IMAGE_SIDE; row++)
        for (int column = 0; column < IMAGE_SIDE; column++) {
            int sum = 0;
            for (int part = 0; part < 4; part++) {
                const int y = 2 * row + part / 2 - IDX_EDGE, x = 2 * column + part % 2 - IDX_EDGE;
                if (y >= 0 && y < IDX_SIDE && x >= 0 && x < IDX_SIDE) sum += pixels[y * IDX_SIDE + x];
            }
            image[row * IMAGE_SIDE + column] = (float)sum / 510.0f - 1.0f;
        }
}

static xd_result dataset_fill(xd_ctx *ctx, const idx_view *images, const idx_view *labels, dataset *out) {
    const size_t count = (size_t)images->count;
    out->count = images->count;
    out->images = (float *)xd_allocate(ctx, count * IMAGE_PIXELS * sizeof(float) + 1);
    out->labels = (int32_t *)xd_allocate(ctx, count * sizeof(int32_t) + 1);
    if (!out->images || !out->labels) {
        dataset_free(ctx, out);
        return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld pictures", (long long)images->count);
    }
    for (size_t i = 0; i < count; i++) {
        dataset_convert(images->items + i * IDX_PIXELS, out->images + i * IMAGE_PIXELS);
        out->labels[i] = labels->items[i];
    }
    return XD_OK;
}

xd_result dataset_load(xd_ctx *ctx, const char *directory, const char *split, dataset *out) {
    static const char *const kinds[] = { "images-idx3", "labels-idx1" };
    char path[2][512], *data[2] = { NULL, NULL };
    size_t bytes[2] = { 0, 0 };
    idx_view images, labels;
    xd_result result = XD_OK;
    memset(out, 0, sizeof *out);
    for (int i = 0; i < 2 && result == XD_OK; i++) {
        snprintf(path[i], sizeof path[i], "%s/%s-%s-ubyte", directory, split, kinds[i]);
        result = xd_file_load(ctx, path[i], 0, &data[i], &bytes[i]);
    }
    if (result == XD_OK) result = idx_images(ctx, path[0], (const uint8_t *)data[0], bytes[0], &images);
    if (result == XD_OK) result = idx_labels(ctx, path[1], (const uint8_t *)data[1], bytes[1], &labels);
    if (result == XD_OK && images.count != labels.count)
        result = XD_FAIL(ctx, XD_ERROR_FORMAT, "%s: %lld pictures, but %lld labels in %s", path[0],
                         (long long)images.count, (long long)labels.count, path[1]);
    if (result == XD_OK) result = dataset_fill(ctx, &images, &labels, out);
    xd_release(ctx, data[0]);
    xd_release(ctx, data[1]);
    return result;
}

void dataset_free(xd_ctx *ctx, dataset *set) {
    xd_release(ctx, set->images);
    xd_release(ctx, set->labels);
    memset(set, 0, sizeof *set);
}
