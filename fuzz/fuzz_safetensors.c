/* Any bytes are a file or refused; of an accepted file every tensor lies inside, and the tensors fill the data. */
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    xd_weights *file = NULL;
    xd_weights_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.skip_unknown = bytes > 0 && (bytes & 1);
    desc.data = data;
    desc.bytes = bytes;
    if (xd_weights_open(fuzz_ctx(), &desc, &file) != XD_OK) return 0;
    const uint8_t *end = data + bytes;
    uint64_t filled = 0;
    for (int64_t i = 0; i < xd_weights_describe(file).tensor_count; i++) {
        const xd_weights_tensor *info = xd_weights_at(file, i);
        const uint8_t *tensor = (const uint8_t *)xd_weights_data(file, i);
        const uint64_t length = info->end - info->begin;
        uint64_t expected = xd_dtype_size(info->dtype);
        for (int k = 0; k < info->ndim; k++) expected *= (uint64_t)info->shape[k];
        FUZZ_CHECK(xd_weights_find(file, info->name) == i);
        FUZZ_CHECK(length == expected && tensor >= data && length <= (uint64_t)(end - tensor));
        filled += length;
    }
    uint64_t header = 0;
    for (int i = 7; i >= 0; i--) header = header << 8 | data[i];
    FUZZ_CHECK(desc.skip_unknown || filled == bytes - 8 - header);
    xd_weights_close(file);
    return 0;
}
