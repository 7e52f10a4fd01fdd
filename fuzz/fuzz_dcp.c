/* Any bytes are the .metadata of a PyTorch checkpoint, or an item of one of its files, or refused. Of an accepted .metadata every
 * element of every tensor is in one chunk and every chunk in one range; of an accepted item every element of the tensor is within its
 * bytes. */
#include "fuzz.h"

#include <errno.h>

#include "../tools/dcp_metadata.h"

static const uint8_t *current;
static size_t current_bytes;

static int read_bytes(void *user, intptr_t file, void *buffer, size_t bytes, uint64_t offset) {
    (void)user;
    FUZZ_CHECK(file == 0 && offset <= current_bytes && bytes <= current_bytes - offset);
    memcpy(buffer, current + offset, bytes);
    return 0;
}

static xd_ctx *item_ctx(void) {
    static xd_ctx *ctx;
    xd_ctx_desc desc;
    if (ctx) return ctx;
    memset(&desc, 0, sizeof desc);
    desc.files.read = read_bytes;
    FUZZ_CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    return ctx;
}

static void check_metadata(const uint8_t *bytes, size_t length) {
    dcp d;
    memset(&d, 0, sizeof d);
    if (dcp_open_memory(&d, fuzz_ctx(), "input", bytes, length) == XD_OK) {
        int64_t held = 0, whole = 0;
        for (int64_t i = 0; i < d.chunk_count; i++) {
            const dcp_tensor *t = &d.tensors[d.chunks[i].tensor];
            for (int k = 0; k < t->ndim; k++)
                FUZZ_CHECK(d.chunks[i].begin[k] + d.chunks[i].size[k] <= t->shape[k]);
            held = (int64_t)((uint64_t)held + (uint64_t)item_numel(d.chunks[i].size, t->ndim));
        }
        for (int64_t i = 0; i < d.tensor_count; i++)
            whole = (int64_t)((uint64_t)whole + (uint64_t)item_numel(d.tensors[i].shape, d.tensors[i].ndim));
        FUZZ_CHECK(held == whole);
        for (int64_t i = 0; i < d.entry_count; i++) FUZZ_CHECK(dcp_is_plain(&d.entries[i].file));
    }
    dcp_close(&d);
}

static void check_item(const uint8_t *bytes, size_t length) {
    item_archive archive;
    item_tensor t;
    item_range r;
    memset(&r, 0, sizeof r);
    r.ctx = item_ctx();
    r.label = "input";
    r.length = length;
    current = bytes;
    current_bytes = length;
    if (item_open_tensor(&r, &archive, &t) != XD_OK) return;
    const uint64_t size = xd_dtype_size(t.dtype);
    int64_t last = t.offset;
    FUZZ_CHECK(archive.data.begin <= length && archive.data.length <= length - archive.data.begin);
    if (item_numel(t.shape, t.ndim) == 0) return;
    for (int d = 0; d < t.ndim; d++) last += (t.shape[d] - 1) * t.stride[d];
    FUZZ_CHECK(last >= 0 && (uint64_t)(last + 1) * size <= archive.data.length);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    uint8_t *copy =
        (uint8_t *)malloc(bytes ? bytes : 1); /* of this very size, so that a sanitizer sees its end */
    FUZZ_CHECK(copy != NULL);
    if (bytes) memcpy(copy, data, bytes);
    if (bytes > 1 && copy[0] == 'P')
        check_item(copy, bytes);
    else
        check_metadata(copy, bytes);
    free(copy);
    return 0;
}
