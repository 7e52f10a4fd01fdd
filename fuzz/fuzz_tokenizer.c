/* Any bytes are a tokenizer file, in one of four forms, or are refused; what is accepted encodes any text
 * with spans that do not go back, and decodes it again; two encoders agree. */
#include "fuzz.h"

static const char text[] =
    "Hi  there,\n\n I'LL 12345 na\xc3\xafve e\xcc\x81 \xef\xac\x81 \xe4\xb8\xad\xe6\x96\x87 <s>[INST] "
    "\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x9a\x80 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    "\xff\xc3 \xe2\x96\x81 ab.\t\r\n";

static void use(xd_ctx *ctx, const xd_tokenizer *tokenizer) {
    const xd_tokenizer_info info = xd_tokenizer_describe(tokenizer);
    const xd_encode_desc special = { true, false, true };
    xd_encoder *encoder = NULL;
    xd_encoding e;
    size_t length = 0;
    int32_t found = 0;
    for (int32_t id = -1; id <= info.size; id++) {
        const xd_token token = xd_tokenizer_token(tokenizer, id);
        found += token.kind != XD_TOKEN_KIND_NONE;
        if (token.length == 0 || token.kind != XD_TOKEN_KIND_NORMAL) continue;
        FUZZ_CHECK(xd_tokenizer_find(tokenizer, token.bytes, token.length) >= 0);
    }
    FUZZ_CHECK(found == info.tokens);
    FUZZ_CHECK(xd_encoder_create(ctx, &(xd_encoder_desc){ .tokenizer = tokenizer }, &encoder) == XD_OK);
    for (int round = 0; round < 2; round++) {
        if (xd_encode(encoder, text, sizeof text - 1, round ? &special : NULL, &e) != XD_OK) continue;
        int64_t begin = 0, end = 0;
        FUZZ_CHECK((e.roles != NULL) == (round == 1));
        for (int64_t i = 0; i < e.count; i++) {
            FUZZ_CHECK(e.spans[i].begin >= begin && e.spans[i].end >= end &&
                       e.spans[i].end >= e.spans[i].begin);
            begin = e.spans[i].begin;
            end = e.spans[i].end;
        }
        FUZZ_CHECK(end < (int64_t)sizeof text);
        FUZZ_CHECK(xd_tokenizer_decode(ctx, tokenizer, &(xd_decode_desc){ .ids = e.ids, .count = e.count },
                                       &length) == XD_OK);
    }
    xd_encoder_destroy(encoder);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    xd_ctx *ctx = fuzz_ctx();
    xd_tokenizer_desc desc = { .data = data, .data_bytes = bytes };
    for (int form = 0; form < 2; form++) {
        xd_tokenizer *tokenizer = NULL;
        desc.preset = form ? XD_TOKENIZER_PRESET_GPT2 : XD_TOKENIZER_PRESET_NONE;
        if (xd_tokenizer_load(ctx, &desc, &tokenizer) == XD_OK) use(ctx, tokenizer);
        xd_tokenizer_destroy(tokenizer);
    }
    return 0;
}
