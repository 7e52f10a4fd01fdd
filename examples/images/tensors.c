/* tensors.c - floats in safetensors files. */
#include "tensors.h"

#include <stdio.h>
#include <string.h>

int64_t tensors_count(const xd_weights_entry *entry) {
    int64_t count = 1;
    for (int d = 0; d < entry->ndim; d++) count *= entry->shape[d];
    return count;
}

static xd_result tensors_write(xd_ctx *ctx, xd_weights_writer *writer, int64_t index,
                               const xd_weights_entry *entry, const float *values) {
    const int64_t count = tensors_count(entry);
    if (entry->dtype == XD_DTYPE_F32)
        return xd_weights_writer_write(writer, index, 0, XD_WEIGHTS_REST, values);
    XD_REQUIRE(ctx, entry->dtype == XD_DTYPE_BF16, XD_ERROR_DTYPE, "%s is %s, neither F32 nor BF16",
               entry->name, xd_dtype_name(entry->dtype));
    uint16_t *bits = (uint16_t *)xd_allocate(ctx, (size_t)count * sizeof *bits + 1);
    XD_REQUIRE(ctx, bits, XD_ERROR_MEMORY, "no room for the %lld elements of %s", (long long)count,
               entry->name);
    for (int64_t i = 0; i < count; i++) bits[i] = xd_bf16_from_f32(values[i]);
    const xd_result result = xd_weights_writer_write(writer, index, 0, XD_WEIGHTS_REST, bits);
    xd_release(ctx, bits);
    return result;
}

xd_result tensors_save(xd_ctx *ctx, const xd_weights_writer_desc *desc, const float *const *values) {
    xd_weights_writer *writer = NULL;
    xd_result result = xd_weights_writer_create(ctx, desc, &writer);
    for (int64_t i = 0; i < desc->entry_count && result == XD_OK; i++)
        result = tensors_write(ctx, writer, i, &desc->entries[i], values[i]);
    if (result == XD_OK) return xd_weights_writer_commit(writer);
    xd_weights_writer_abort(writer);
    return result;
}

/* "[32, 16, 3, 3]" */
static void tensors_shape(char text[128], int dims, const int64_t *shape) {
    size_t length = (size_t)snprintf(text, 128, "[");
    for (int d = 0; d < dims && length < 128; d++)
        length += (size_t)snprintf(text + length, 128 - length, "%s%lld", d ? ", " : "", (long long)shape[d]);
    if (length < 128) snprintf(text + length, 128 - length, "]");
}

xd_result tensors_read(xd_ctx *ctx, const char *path, const xd_weights *file, const xd_weights_entry *entry,
                       float *values) {
    const int64_t index = xd_weights_find(file, entry->name), count = tensors_count(entry);
    XD_REQUIRE(ctx, index >= 0, XD_ERROR_MISSING, "%s has no tensor %s", path, entry->name);
    const xd_weights_tensor *info = xd_weights_at(file, index);
    XD_REQUIRE(ctx, info->dtype == entry->dtype, XD_ERROR_DTYPE, "%s: %s is %s, not %s", path, entry->name,
               xd_dtype_name(info->dtype), xd_dtype_name(entry->dtype));
    bool same = info->ndim == entry->ndim;
    for (int d = 0; same && d < entry->ndim; d++) same = info->shape[d] == entry->shape[d];
    if (!same) {
        char found[128], wanted[128];
        tensors_shape(found, info->ndim, info->shape);
        tensors_shape(wanted, entry->ndim, entry->shape);
        return XD_FAIL(ctx, XD_ERROR_SHAPE, "%s: %s is %s, not %s", path, entry->name, found, wanted);
    }
    const uint8_t *bytes = (const uint8_t *)xd_weights_data(file, index);
    if (entry->dtype == XD_DTYPE_F32) {
        memcpy(values, bytes, (size_t)count * sizeof(float));
        return XD_OK;
    }
    for (int64_t i = 0; i < count; i++) {
        uint16_t bits;
        memcpy(&bits, bytes + 2 * i, sizeof bits); /* the format does not align its data */
        values[i] = xd_f32_from_bf16(bits);
    }
    return XD_OK;
}
