/* Any text is a manifest or refused; what an accepted one lists lies in the directory and within its files, without gap or
 * overlap. Each input is tried as it is, and again with the checksum at its end put right. */
#include "fuzz.h"

static void use_file(const xd_checkpoint *c, int64_t index) {
    const xd_checkpoint_file_info *f = xd_checkpoint_file_at(c, index);
    FUZZ_CHECK(f->name[0] && f->name[0] != '.' && !strchr(f->name, '/') && !strchr(f->name, '\\'));
    FUZZ_CHECK(f->bytes <= (uint64_t)INT64_MAX);
}

static uint64_t use_tensor(const xd_checkpoint *c, int64_t index) {
    const xd_checkpoint_tensor_info *t = xd_checkpoint_tensor_at(c, index);
    const xd_checkpoint_file_info *f = xd_checkpoint_file_at(c, t->file);
    uint64_t bytes = xd_dtype_size(t->dtype);
    for (int i = 0; i < t->ndim; i++) {
        FUZZ_CHECK(t->shape[i] >= 0);
        bytes *= (uint64_t)t->shape[i];
    }
    FUZZ_CHECK(bytes == t->end - t->begin && t->begin <= t->end && t->end <= f->bytes);
    FUZZ_CHECK(strcmp(f->group, t->group) == 0);
    FUZZ_CHECK(xd_checkpoint_tensor_find(c, t->group, t->name) == index);
    return bytes;
}

static void use(const xd_checkpoint *c) {
    const xd_checkpoint_info info = xd_checkpoint_describe(c);
    uint64_t room = 0, used = 0;
    FUZZ_CHECK(info.step >= 0 && info.block_bytes >= 4096);
    for (int64_t i = 0; i < info.file_count; i++) {
        use_file(c, i);
        room += xd_checkpoint_file_at(c, i)->bytes;
    }
    for (int64_t i = 0; i < info.tensor_count; i++) used += use_tensor(c, i);
    FUZZ_CHECK(used <= room);
    FUZZ_CHECK(xd_checkpoint_tensor_at(c, info.tensor_count) == NULL);
    FUZZ_CHECK(xd_checkpoint_file_at(c, info.file_count) == NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    char *copy = (char *)malloc(bytes + 1), digits[9];
    FUZZ_CHECK(copy != NULL);
    if (bytes) memcpy(copy, data, bytes);
    for (int round = 0; round < 2; round++) {
        xd_checkpoint *c = NULL;
        if (xd_checkpoint_open(fuzz_ctx(), &(xd_checkpoint_desc){ .text = copy, .bytes = bytes }, &c) ==
            XD_OK)
            use(c);
        xd_checkpoint_close(c);
        if (bytes < 11) break;
        memcpy(copy + bytes - 11, "00000000", 8);
        snprintf(digits, sizeof digits, "%08x", (unsigned)xd_crc32c(0, copy, bytes));
        memcpy(copy + bytes - 11, digits, 8);
    }
    free(copy);
    return 0;
}
