/* Any GGUF file is a model of the demonstration with real vocabularies, or refused: sizes that a model can have, and a tokenizer. */
#include "fuzz.h"

#include "../examples/common/gguf.c"
#include "../examples/common/gguf_model.c"
#include "../examples/common/gguf_pieces.c"
#include "../examples/common/gguf_tokenizer.c"
#include "../examples/nn/nn_model.c"

static void use_tokenizer(const gguf *file) {
    xd_tokenizer *tokenizer = NULL;
    xd_encoder *encoder = NULL;
    xd_encoding encoding;
    if (gguf_model_tokenizer(fuzz_ctx(), file, &tokenizer) != XD_OK) {
        FUZZ_CHECK(xd_last_error(fuzz_ctx())->message[0]);
        return;
    }
    FUZZ_CHECK(xd_encoder_create(fuzz_ctx(), &(xd_encoder_desc){ .tokenizer = tokenizer }, &encoder) ==
               XD_OK);
    if (xd_encode(encoder, "ab 12", 5, NULL, &encoding) != XD_OK)
        FUZZ_CHECK(xd_last_error(fuzz_ctx())->message[0]);
    xd_encoder_destroy(encoder);
    xd_tokenizer_destroy(tokenizer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    gguf *file = NULL;
    nn_config c;
    if (gguf_parse(fuzz_ctx(), data, bytes, &file) != XD_OK) return 0;
    if (gguf_model_config(fuzz_ctx(), file, &c) == XD_OK) {
        FUZZ_CHECK(c.hidden >= 1 && c.layers >= 1 && c.heads >= 1 && c.ffn >= 1 && c.kv_heads >= 1);
        FUZZ_CHECK(c.head_dim >= 2 && c.head_dim % 2 == 0 && c.vocab >= 1 && c.heads % c.kv_heads == 0);
        FUZZ_CHECK(c.rope_theta > 0.0f && c.norm_eps >= 0.0f);
    }
    use_tokenizer(file);
    gguf_close(file);
    return 0;
}
