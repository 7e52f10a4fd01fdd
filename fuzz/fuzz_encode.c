/* Any text through a byte-level tokenizer with a real split pattern: it comes back byte for byte, the spans
 * tile it, and with normalisation the spans still go on to its end. */
#include "fuzz.h"

#define SPLIT                                                                             \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}|" \
    " ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"

/* All bytes and a few merges; `form` is a normalizer or "". */
static xd_encoder *make(const char *form, xd_tokenizer **tokenizer) {
    static const char merges[] = "\"a a\",\"aa aa\",\"t h\",\"th e\",\"\xc3\x83 \xc2\xa9\"";
    static const char joined[] = ",\"aa\":256,\"aaaa\":257,\"th\":258,\"the\":259,\"\xc3\x83\xc2\xa9\":260";
    xd_encoder *encoder = NULL;
    char *file = (char *)malloc(16384);
    int used = sprintf(
        file,
        "{\"normalizer\":%s%s%s,\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":["
        "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" SPLIT "\"},\"behavior\":\"Isolated\"},"
        "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]},\"model\":{\"vocab\":{",
        *form ? "{\"type\":\"" : "null", form, *form ? "\"}" : "");
    for (int b = 0; b < 256; b++) {
        int point = b;
        if (b <= 32 || (b >= 127 && b <= 160) || b == 173)
            point = 256 + (b <= 32 ? b : b <= 160 ? b - 127 + 33 : 67);
        used += sprintf(file + used, "%s\"\\u%04x\":%d", b ? "," : "", point, b);
    }
    sprintf(file + used, "%s},\"merges\":[%s]}}", joined, merges);
    const xd_tokenizer_desc desc = { .data = file, .data_bytes = strlen(file) };
    FUZZ_CHECK(xd_tokenizer_load(fuzz_ctx(), &desc, tokenizer) == XD_OK);
    FUZZ_CHECK(xd_encoder_create(fuzz_ctx(), &(xd_encoder_desc){ .tokenizer = *tokenizer }, &encoder) ==
               XD_OK);
    free(file);
    return encoder;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static xd_tokenizer *tokenizers[3];
    static xd_encoder *encoders[3];
    static const char *const forms[] = { "", "NFC", "NFKC" };
    xd_ctx *ctx = fuzz_ctx();
    for (int f = 0; f < 3; f++) {
        xd_encoding e;
        size_t length = 0;
        int64_t at = 0;
        if (!encoders[f]) encoders[f] = make(forms[f], &tokenizers[f]);
        FUZZ_CHECK(xd_encode(encoders[f], (const char *)data, bytes, NULL, &e) == XD_OK);
        for (int64_t i = 0; i < e.count; at = e.spans[i++].end)
            FUZZ_CHECK(f == 0 ? e.spans[i].begin == at : e.spans[i].begin <= at && e.spans[i].end >= at);
        FUZZ_CHECK(at == (int64_t)bytes);
        FUZZ_CHECK(xd_tokenizer_decode(ctx, tokenizers[f],
                                       &(xd_decode_desc){ .ids = e.ids, .count = e.count },
                                       &length) == XD_OK);
        if (f > 0) continue;
        char *back = (char *)malloc(bytes + 1);
        FUZZ_CHECK(xd_tokenizer_decode(
                       ctx, tokenizers[f],
                       &(xd_decode_desc){ .ids = e.ids, .count = e.count, .out = back, .capacity = bytes },
                       &length) == XD_OK);
        FUZZ_CHECK(length == bytes && (bytes == 0 || memcmp(back, data, bytes) == 0));
        free(back);
    }
    return 0;
}
