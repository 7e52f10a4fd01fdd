/* A teacher with another tokenizer: two vocabularies, the projection between them, a text that both tokenize, and the
 * projected KL over the chunks they share, with its gradient, compared between the CPU and a GPU.
 *
 *     nvcc -O2 -arch=sm_90 examples/cuda/cross_tokenizer.cu xdistill_cuda.cu -o cross_tokenizer */
#define XDISTILL_IMPLEMENTATION
#include "../../xdistill.h"

#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST = 128 }; /* tokens of the text */
static const char text[] = "the teacher reads one tokenization of the text and the student another one";

/* One model: its tokenizer, the text in its tokens, the label of each position, and the logits. */
typedef struct side {
    xd_tokenizer *tokenizer;
    xd_encoder *encoder;
    xd_encoding tokens;
    int64_t vocabulary, labels[MOST], chunks[MOST];
    float *logits;
} side;

/* The bytes, and tokens of two characters and more, made of earlier ones: as lines "base64 rank". */
static xd_result open_side(xd_ctx *ctx, const char *merges, side *s) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    static char file[16384];
    xd_tokenizer_desc desc = {};
    size_t at = 0;
    for (s->vocabulary = 0;; s->vocabulary++) {
        unsigned char token[16] = { (unsigned char)s->vocabulary };
        int length = 1, read = 0;
        if (s->vocabulary >= 256 && sscanf(merges, "%15s%n", (char *)token, &read) != 1) break;
        if (read > 0) merges += read, length = (int)strlen((char *)token);
        for (int i = 0; i < length; i += 3) {
            const unsigned word = (unsigned)token[i] << 16 | (unsigned)token[i + 1] << 8 | token[i + 2];
            for (int k = 0; k < 4; k++) file[at++] = i + k > length ? '=' : digits[word >> (18 - 6 * k) & 63];
        }
        at += (size_t)sprintf(file + at, " %d\n", (int)s->vocabulary);
    }
    desc.pattern = "[^ ]+| +";
    xd_result r = xd_tokenizer_load_memory(ctx, file, at, &desc, &s->tokenizer);
    if (r == XD_OK) r = xd_encoder_create(ctx, s->tokenizer, &s->encoder);
    return r == XD_OK ? xd_encode(s->encoder, text, sizeof text - 1, NULL, &s->tokens) : r;
}

/* Position t predicts token t + 1, and so takes its chunk. The logits stand for a model's. */
static void predict(const xd_alignment *both, xd_chunk_side which, const xd_align_side *tokens, side *s) {
    const int64_t count = tokens->count;
    xd_chunk_ids(both, which, tokens, s->chunks, NULL);
    for (int64_t t = 0; t < count; t++) s->labels[t] = t + 1 < count ? s->tokens.ids[t + 1] : XD_IGNORE_INDEX;
    for (int64_t t = 0; t < count; t++) s->chunks[t] = t + 1 < count ? s->chunks[t + 1] : -1;
    s->logits = (float *)malloc((size_t)(count * s->vocabulary) * sizeof(float));
    for (int64_t i = 0; i < count * s->vocabulary; i++) s->logits[i] = 4.0f * sinf(0.37f * (float)(i % 9973));
}

/* Loss and gradient; logits, gradient and projection are memory of the context's device, lists host memory. */
static xd_result distill(xd_ctx *ctx, const side side[2], float *student, float *teacher, float *gradient,
                         const xd_projection *projection, int64_t chunks, xd_xtoken_values *out) {
    xd_xtoken_teacher t = xd_xtoken_teacher_defaults(XD_XTOKEN_PROJECTED);
    xd_xtoken_desc d = xd_xtoken_defaults();
    xd_vocab *vocab = NULL;
    xd_result r = xd_vocab_create_even(ctx, NULL, side[0].vocabulary, &vocab);
    t.projected.projection = projection;
    t.logits = { teacher, XD_DTYPE_F32, side[1].tokens.count, side[1].vocabulary, 0 };
    t.student_chunks = side[0].chunks, t.teacher_chunks = side[1].chunks, t.chunks = chunks;
    d.student = { student, XD_DTYPE_F32, side[0].tokens.count, side[0].vocabulary, 0 };
    d.common.gradient = { gradient, XD_DTYPE_F32, side[0].tokens.count, side[0].vocabulary, 0 };
    d.vocab = vocab, d.common.labels.data = side[0].labels, d.temperature = 2.0;
    d.teachers = &t, d.teacher_count = 1, d.columns = 128; /* the teacher's most probable columns on this text */
    if (r == XD_OK) r = xd_xtoken_loss(ctx, &d, out);
    xd_vocab_destroy(vocab);
    return r;
}

int main(void) {
    static const char *const merges[2] = { "th the er in on an te text de stu dent student",
                                           "te ea ch tea teach er teacher re at io ion to ken token" };
    side side[2] = {};
    xd_ctx *ctx = NULL;
    xd_cuda *gpu = NULL;
    xd_alignment both = {}; /* of the two tokenizations */
    xd_projection m = {}, there = {};
    xd_xtoken_values cpu, on_gpu;
    float *device[2] = {}, *gradient[2] = {};
    double off = 0.0, most = 0.0;
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    xd_result r = XD_OK;
    for (int i = 0; i < 2 && r == XD_OK; i++) r = open_side(ctx, merges[i], &side[i]);
    const xd_align_side a = { side[0].tokens.spans, NULL, NULL, NULL, side[0].tokens.count };
    const xd_align_side b = { side[1].tokens.spans, NULL, NULL, NULL, side[1].tokens.count };
    if (r == XD_OK) r = xd_align_bytes(ctx, &a, &b, &both, NULL);
    const xd_projection_desc pair = { side[0].tokenizer, side[1].tokenizer, NULL };
    if (r == XD_OK) r = xd_projection_build(ctx, &pair, &m, NULL);
    const size_t size = (size_t)(a.count * side[0].vocabulary);
    for (int i = 0; i < 2 && r == XD_OK; i++) {
        const size_t bytes = (size_t)(side[i].tokens.count * side[i].vocabulary) * sizeof(float);
        predict(&both, (xd_chunk_side)i, i ? &b : &a, &side[i]);
        gradient[i] = (float *)calloc(size, sizeof(float));
        if (cudaMalloc((void **)&device[i], 2 * bytes)) return printf("there is no GPU, or no room on it\n"), 0;
        cudaMemcpy(device[i], side[i].logits, bytes, cudaMemcpyHostToDevice);
    }
    if (r == XD_OK) r = distill(ctx, side, side[0].logits, side[1].logits, gradient[0], &m, both.count, &cpu);
    if (r == XD_OK && (r = xd_cuda_create(ctx, NULL, &gpu)) == XD_OK) r = xd_projection_upload(ctx, &m, &there);
    if (r == XD_OK) r = distill(ctx, side, device[0], device[1], device[0] + size, &there, both.count, &on_gpu);
    if (r == XD_OK) r = xd_read(ctx, gradient[1], device[0] + size, size * sizeof(float));
    if (r != XD_OK) return fprintf(stderr, "%s\n", xd_last_error(ctx)->message), 1;
    for (size_t i = 0; i < size; i++) off = fmax(off, fabs((double)gradient[0][i] - (double)gradient[1][i]));
    for (size_t i = 0; i < size; i++) most = fmax(most, fabs((double)gradient[0][i]));
    printf("%d and %d tokens in %d chunks: KL %.7f on the CPU, %.7f on the GPU; gradient off by %.1e of the largest\n",
           (int)a.count, (int)b.count, (int)both.count, cpu.kd, on_gpu.kd, off / most);
    xd_projection_unload(ctx, &there), xd_cuda_destroy(gpu);
    xd_projection_destroy(ctx, &m), xd_alignment_destroy(ctx, &both);
    for (int i = 0; i < 2; i++) {
        cudaFree(device[i]), free(gradient[i]), free(side[i].logits);
        xd_encoder_destroy(side[i].encoder), xd_tokenizer_destroy(side[i].tokenizer);
    }
    xd_ctx_destroy(ctx);
    return fabs(cpu.loss - on_gpu.loss) < 1e-5 * cpu.loss && off < 1e-5 * most ? 0 : 1;
}
