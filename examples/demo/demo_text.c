/* demo_text.c - texts as ids, and which rows a step reads. */
#include "demo.h"

#include "../common/sample.h"

#include <stdio.h>
#include <string.h>

bool demo_is_file(const char *path) {
    FILE *there = fopen(path, "rb");
    if (there) fclose(there);
    return there != NULL;
}

/* Takes a copy of an encoding, which is the encoder's. */
static xd_result demo_text_keep(xd_ctx *ctx, const xd_encoding *encoding, demo_text *out) {
    const size_t count = (size_t)encoding->count;
    out->ids = (int32_t *)xd_allocate(ctx, (count + 1) * sizeof *out->ids);
    out->spans = (xd_token_span *)xd_allocate(ctx, (count + 1) * sizeof *out->spans);
    if (!out->ids || !out->spans) return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %zu tokens", count);
    memcpy(out->ids, encoding->ids, count * sizeof *out->ids);
    memcpy(out->spans, encoding->spans, count * sizeof *out->spans);
    out->count = encoding->count;
    return XD_OK;
}

static xd_result demo_text_encode(xd_ctx *ctx, const xd_tokenizer *tokenizer, const char *text, size_t bytes,
                                  demo_text *out) {
    xd_encoder *encoder = NULL;
    xd_encode_desc desc;
    xd_encoding encoding;
    memset(&desc, 0, sizeof desc);
    desc.parse_special = true; /* the texts are ours */
    XD_TRY(xd_encoder_create(ctx, &(xd_encoder_desc){ .tokenizer = tokenizer }, &encoder));
    xd_result result = xd_encode(encoder, text, bytes, &desc, &encoding);
    if (result == XD_OK) result = demo_text_keep(ctx, &encoding, out);
    xd_encoder_destroy(encoder);
    return result;
}

xd_result demo_text_load(xd_ctx *ctx, const xd_tokenizer *tokenizer, const char *path, size_t most_bytes,
                         demo_text *out) {
    char *text = NULL;
    size_t bytes = 0;
    memset(out, 0, sizeof *out);
    XD_TRY(xd_file_load(ctx, path, 0, &text, &bytes));
    if (most_bytes && bytes > most_bytes) bytes = most_bytes;
    const xd_result result = demo_text_encode(ctx, tokenizer, text, bytes, out);
    xd_release(ctx, text);
    if (result == XD_OK && out->count) out->bytes = (int64_t)bytes - out->spans[0].end;
    if (result != XD_OK) demo_text_free(ctx, out);
    return result;
}

void demo_text_free(xd_ctx *ctx, demo_text *text) {
    xd_release(ctx, text->ids);
    xd_release(ctx, text->spans);
    memset(text, 0, sizeof *text);
}

xd_result demo_text_check(xd_ctx *ctx, const demo_text *text, const char *path) {
    if (text->count >= DEMO_ROW + 2) return XD_OK;
    return XD_FAIL(ctx, XD_ERROR_DATA, "%s has %lld tokens, at least %d are needed", path,
                   (long long)text->count, DEMO_ROW + 2);
}

int64_t demo_row_start(const demo_text *text, double share, uint64_t seed, int step, int row) {
    const int64_t tokens = (int64_t)((double)text->count * share);
    const int64_t places =
        tokens > DEMO_ROW ? tokens - DEMO_ROW : 1; /* the last token's label is inside, too */
    return (int64_t)(sample_random(seed, 1, (uint64_t)step * DEMO_BATCH + (uint64_t)row) * (double)places);
}
