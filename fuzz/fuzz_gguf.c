/* Any bytes are a file for the GGUF reader of examples/common, or refused; of an accepted file every array ends where it says,
 * and every tensor of a known kind can be read. */
#include "fuzz.h"

#include "../examples/common/gguf.c"

/* The first and the last row, as long as they are not large: the bytes of all rows were checked when the file was opened. */
static void read_ends(const gguf *file, const gguf_tensor *t) {
    float row[4096];
    int64_t elements, block;
    if (t->rows < 1 || t->cols < 1 || t->cols > 4096 || !gguf_block(t->type, &elements, &block)) return;
    FUZZ_CHECK(gguf_read(file, t, 0, 1, row) == XD_OK);
    FUZZ_CHECK(gguf_read(file, t, t->rows - 1, 1, row) == XD_OK);
    FUZZ_CHECK(gguf_read(file, t, t->rows, 1, row) != XD_OK);
}

static void read_known(const gguf *file) {
    static const char *const keys[] = { "a", "general.architecture", "llama.block_count",
                                        "tokenizer.ggml.tokens" };
    for (int i = 0; i < 4; i++) {
        gguf_array array;
        xd_text text;
        int64_t number;
        double real;
        bool flag;
        (void)gguf_int(file, keys[i], &number);
        (void)gguf_double(file, keys[i], &real);
        (void)gguf_bool(file, keys[i], &flag);
        if (gguf_string(file, keys[i], &text)) FUZZ_CHECK(text.size >= 0);
        if (gguf_strings(file, keys[i], &array))
            while (gguf_next_string(&array, &text)) FUZZ_CHECK(text.size >= 0);
        if (gguf_ints(file, keys[i], &array))
            while (gguf_next_int(&array, &number)) {
            }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    gguf *file = NULL;
    if (gguf_parse(fuzz_ctx(), data, bytes, &file) != XD_OK) return 0;
    read_known(file);
    for (int64_t i = 0; i < gguf_tensor_count(file); i++) read_ends(file, gguf_tensor_at(file, i));
    gguf_close(file);
    return 0;
}
