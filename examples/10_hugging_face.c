/* Reads a Hugging Face directory, trains one step and writes another directory.
 *
 * Only the head is trained. It shares its weights with the embedding, whose rows replace the hidden
 * states that layers would compute. TO must exist. With copies of FROM's config.json and
 * tokenizer.json, it is a complete model.
 *
 *     cc -std=c99 -O2 examples/10_hugging_face.c -o hf -lm -lpthread
 *     ./hf [FROM TO]
 */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char name[] = "model.embed_tokens.weight";
static const char text[] = "In the beginning God created the heaven.";

/* Runs one optimizer step between two losses. */
static xd_result step(xd_ctx *ctx, const xd_head_loss_desc *desc, xd_optimizer *optimizer) {
    xd_loss_values before, after;
    XD_TRY(xd_head_loss(ctx, desc, &before));
    XD_TRY(xd_optimizer_step(optimizer, NULL, NULL));
    XD_TRY(xd_head_loss(ctx, desc, &after));
    printf("cross entropy %.4f, after the step %.4f\n", before.hard, after.hard);
    return XD_OK;
}

/* Trains weight, a bf16 matrix [V, H], on the text. The optimizer keeps f32 masters of it. */
static xd_result train(xd_ctx *ctx, xd_tokenizer *tokenizer, xd_rows weight) {
    const int64_t width = weight.cols;
    const int64_t count = weight.rows * width;
    /* A text has at most as many tokens as bytes. */
    uint16_t *hidden = malloc(sizeof text * (size_t)width * sizeof *hidden);
    float *gradient = calloc((size_t)count, sizeof *gradient);
    int64_t labels[sizeof text];
    xd_encoder *encoder;
    xd_encoding tokens;
    xd_vocab *vocab;
    xd_optimizer *optimizer;
    XD_REQUIRE(ctx, hidden && gradient, XD_ERROR_MEMORY, "no room for a gradient of %lld numbers",
               (long long)count);
    XD_TRY(xd_encoder_create(ctx, &(xd_encoder_desc){ .tokenizer = tokenizer }, &encoder));
    XD_TRY(xd_encode(encoder, text, sizeof text - 1, NULL, &tokens));
    XD_TRY(xd_vocab_create(ctx, &(xd_vocab_desc){ .size = weight.rows }, &vocab));
    const xd_param param = { name, weight.data, gradient, XD_DTYPE_BF16, .count = count };
    const xd_optimizer_desc adamw = xd_adamw_defaults(&param, 1);
    XD_TRY(xd_optimizer_create(ctx, &adamw, &optimizer));

    const uint16_t *embedding = weight.data;
    const int64_t rows = tokens.count - 1;
    for (int64_t t = 0; t < rows; t++) {
        memcpy(hidden + t * width, embedding + tokens.ids[t] * width, (size_t)width * 2);
        labels[t] = tokens.ids[t + 1];
    }
    const xd_head_loss_desc desc = {
        .loss.vocab = vocab,
        .loss.hard_weight = 1.0,
        .loss.common.labels.data = labels,
        .student.hidden = xd_rows_of(hidden, XD_DTYPE_BF16, rows, width),
        .student.weight = weight,
        .weight_gradient = gradient,
    };
    XD_TRY(step(ctx, &desc, optimizer));

    xd_optimizer_destroy(optimizer);
    xd_vocab_destroy(vocab);
    xd_encoder_destroy(encoder);
    free(gradient);
    free(hidden);
    return XD_OK;
}

/* Writes all tensors. The tensor `name` takes the new values. */
static xd_result save(xd_ctx *ctx, const xd_weights *from, const char *to, const void *values) {
    const int64_t count = xd_weights_describe(from).tensor_count;
    xd_weights_entry *entries = calloc((size_t)count, sizeof *entries);
    const xd_weights_writer_desc desc = { .directory = to,
                                          .entries = entries, .entry_count = count };
    xd_weights_writer *writer = NULL;
    if (!entries) return XD_ERROR_MEMORY;
    for (int64_t i = 0; i < count; i++) {
        const xd_weights_tensor *info = xd_weights_at(from, i);
        entries[i] = (xd_weights_entry){ info->name, info->dtype, info->ndim, info->shape };
    }

    xd_result result = xd_weights_writer_create(ctx, &desc, &writer);
    for (int64_t i = 0; i < count && result == XD_OK; i++) {
        const xd_weights_tensor *info = xd_weights_at(from, i);
        const bool trained = strcmp(info->name, name) == 0;
        const void *data = trained ? values : xd_weights_data(from, i);
        result = xd_weights_writer_write(writer, i, 0, XD_WEIGHTS_REST, data);
    }
    free(entries);
    if (result == XD_OK) return xd_weights_writer_commit(writer);
    xd_weights_writer_abort(writer);
    return result;
}

static xd_result run(xd_ctx *ctx, const char *from, const char *to) {
    char path[4096];
    xd_tokenizer *tokenizer;
    xd_weights *weights;
    snprintf(path, sizeof path, "%s/tokenizer.json", from);
    XD_TRY(xd_tokenizer_load(ctx, &(xd_tokenizer_desc){ .path = path }, &tokenizer));
    XD_TRY(xd_weights_open(ctx, &(xd_weights_desc){ .directory = from }, &weights));

    const int64_t index = xd_weights_find(weights, name);
    const xd_weights_tensor *info = xd_weights_at(weights, index);
    XD_REQUIRE(ctx, info, XD_ERROR_MISSING, "%s has no tensor %s", from, name);
    const size_t bytes = (size_t)(info->end - info->begin);
    const bool bf16_matrix = info->dtype == XD_DTYPE_BF16 && info->ndim == 2;
    XD_REQUIRE(ctx, bf16_matrix, XD_ERROR_DTYPE, "%s is no bf16 matrix", name);
    void *data = malloc(bytes);
    const xd_rows weight = xd_rows_of(data, XD_DTYPE_BF16, info->shape[0], info->shape[1]);
    XD_REQUIRE(ctx, data, XD_ERROR_MEMORY, "no room for %zu bytes of %s", bytes, name);
    XD_TRY(xd_weights_read(weights, index, NULL, data));
    XD_TRY(train(ctx, tokenizer, weight));
    XD_TRY(save(ctx, weights, to, data));

    xd_weights_close(weights);
    xd_tokenizer_destroy(tokenizer);
    free(data);
    return XD_OK;
}

int main(int argc, char **argv) {
    const char *from = argc > 2 ? argv[1] : "data/teacher";
    const char *to = argc > 2 ? argv[2] : "build";
    xd_ctx *ctx;
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    const xd_result result = run(ctx, from, to);
    if (result != XD_OK)
        fprintf(stderr, "%s: %s\n", xd_result_name(result), xd_last_error(ctx)->message);
    xd_ctx_destroy(ctx);
    return result == XD_OK ? 0 : 1;
}
