/* sample.c - a model continues a beginning, and repeatable numbers. */
#include "sample.h"
#include "utf8.h"

#include "../nn/nn_transformer.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- numbers ---- */

/* splitmix64 */
static uint64_t sample_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

double sample_random(uint64_t seed, uint64_t stream, uint64_t counter) {
    return (double)(sample_mix(seed ^ sample_mix(stream ^ sample_mix(counter))) >> 11) / 9007199254740992.0;
}

/* ---- text ---- */

enum { SAMPLE_TOKENS = 64 };

/* An entry drawn from softmax(logits / 0.8). */
static int32_t sample_draw(const float *logits, int count, double uniform) {
    double max = -INFINITY, sum = 0.0, passed = 0.0;
    for (int i = 0; i < count; i++) max = fmax(max, (double)logits[i]);
    for (int i = 0; i < count; i++) sum += exp(((double)logits[i] - max) / 0.8);
    for (int i = 0; i < count; i++) {
        passed += exp(((double)logits[i] - max) / 0.8);
        if (passed > uniform * sum) return i;
    }
    return count - 1;
}

/* A model may begin a character and not end it: such bytes become question marks. */
static void sample_mend_text(char *text, size_t length) {
    for (size_t i = 0; i < length;) {
        const size_t bytes = utf8_character((const unsigned char *)text + i, length - i);
        if (bytes == 0 || text[i] == 0) text[i] = '?';
        i += bytes ? bytes : 1;
    }
}

/* The beginning as ids; how many, 0 on failure. */
static int sample_begin(xd_ctx *ctx, const xd_tokenizer *tokenizer, const char *beginning,
                        int32_t ids[SAMPLE_TOKENS]) {
    xd_encoder *encoder = NULL;
    xd_encoding encoding;
    int count = 0;
    if (xd_encoder_create(ctx, &(xd_encoder_desc){ .tokenizer = tokenizer }, &encoder) != XD_OK) return 0;
    if (xd_encode(encoder, beginning, strlen(beginning), NULL, &encoding) == XD_OK)
        for (; count < encoding.count && count < SAMPLE_TOKENS; count++) ids[count] = encoding.ids[count];
    xd_encoder_destroy(encoder);
    return count;
}

/* The whole text is run again for every token: at this size that costs less than the code to keep keys and
 * values would. */
xd_result sample_write(xd_ctx *ctx, const nn_model *whole, const float *weights,
                       const xd_tokenizer *tokenizer, const char *beginning, uint64_t seed,
                       char sample[SAMPLE_BYTES]) {
    int32_t ids[SAMPLE_TOKENS];
    nn_batch batch;
    size_t length = 0;
    memset(&batch, 0, sizeof batch);
    batch.sequences = 1;
    batch.positions = SAMPLE_TOKENS;
    batch.ids = ids;
    const int vocab = whole->config.vocab;
    float *workspace =
        (float *)xd_allocate(ctx, ((size_t)nn_workspace_floats(whole, &batch, false) + 1) * sizeof(float));
    float *logits = (float *)xd_allocate(ctx, (size_t)SAMPLE_TOKENS * (size_t)vocab * sizeof(float));
    int count = workspace && logits ? sample_begin(ctx, tokenizer, beginning, ids) : 0;
    const bool failed = count == 0;
    for (; !failed && count < SAMPLE_TOKENS; count++) {
        batch.positions = count;
        (void)nn_forward(whole, weights, &batch, false, workspace, logits); /* one rank: nothing can fail */
        ids[count] = sample_draw(logits + (int64_t)(count - 1) * vocab, vocab,
                                 sample_random(seed, 2, (uint64_t)count));
    }
    xd_release(ctx, workspace);
    xd_release(ctx, logits);
    if (failed) return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a sample");
    XD_TRY(xd_tokenizer_decode(
        ctx, tokenizer,
        &(xd_decode_desc){ .ids = ids, .count = count, .out = sample, .capacity = SAMPLE_BYTES - 1 },
        &length));
    if (length > SAMPLE_BYTES - 1) length = SAMPLE_BYTES - 1;
    sample_mend_text(sample, length);
    sample[length] = 0;
    return XD_OK;
}

void sample_print(const char *name, const char *sample) {
    printf("\n%s:\n  ", name);
    for (const char *c = sample; *c; c++) {
        if (*c == '\n')
            printf(" / ");
        else
            putchar(*c);
    }
    putchar('\n');
}
