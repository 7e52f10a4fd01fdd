/* The first line of the input is a split pattern, the rest is text: the pattern is refused, or its matches go
 * on and are not empty; a hostile one is stopped. The pattern goes through a rank file, which is the way to
 * hand one in. */
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    xd_ctx *ctx = fuzz_ctx();
    const uint8_t *line = bytes ? (const uint8_t *)memchr(data, '\n', bytes) : NULL;
    if (!line || bytes > 4096) return 0;
    const size_t length = (size_t)(line - data);
    char *pattern = (char *)malloc(length + 1);
    memcpy(pattern, data, length);
    pattern[length] = '\0';
    /* Bytes "a" and "b" and both together: the rest of a text has no token. */
    const xd_tokenizer_desc desc = { XD_TOKENIZER_PRESET_NONE, pattern, NULL, 0, 0, NULL, NULL };
    xd_tokenizer *tokenizer = NULL;
    xd_encoder *encoder = NULL;
    xd_encoding e;
    if (xd_tokenizer_load_memory(ctx, "YQ== 0\nYg== 1\nYWI= 2\n", 21, &desc, &tokenizer) == XD_OK) {
        FUZZ_CHECK(xd_encoder_create(ctx, tokenizer, &encoder) == XD_OK);
        if (xd_encode(encoder, (const char *)line + 1, bytes - length - 1, NULL, &e) == XD_OK) {
            int64_t letters = 0, written = 0; /* every a and b must come out, in one token or another */
            for (const uint8_t *c = line + 1; c < data + bytes; c++) letters += *c == 'a' || *c == 'b';
            for (int64_t i = 0; i < e.count; i++)
                written += (int64_t)xd_tokenizer_token(tokenizer, e.ids[i]).length;
            FUZZ_CHECK(letters == written);
        }
    }
    xd_encoder_destroy(encoder);
    xd_tokenizer_destroy(tokenizer);
    free(pattern);
    return 0;
}
