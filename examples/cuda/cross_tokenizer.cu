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
static const char *const paths[2] = { "data/student/tokenizer.json", "data/teacher/tokenizer.json" };

/* One model: its tokenizer, the text in its tokens, the label and the chunk of each position, and the logits. */
typedef struct side {
    xd_tokenizer *tokenizer;
    xd_encoder *encoder;
    xd_encoding tokens;
    xd_align_side spans; /* of these */
    int64_t labels[MOST], chunks[MOST];
    xd_rows logits[2], gradient[2]; /* on the CPU; on the GPU */
} side;

static xd_result open_side(xd_ctx *ctx, const char *path, side *s) {
    XD_TRY(xd_tokenizer_load(ctx, path, NULL, &s->tokenizer));
    XD_TRY(xd_encoder_create(ctx, s->tokenizer, &s->encoder));
    XD_TRY(xd_encode(s->encoder, text, sizeof text - 1, NULL, &s->tokens));
    s->spans.spans = s->tokens.spans, s->spans.count = s->tokens.count;
    return XD_OK;
}

/* Position t predicts token t + 1, and so takes its chunk. The logits stand for a model's. */
static xd_result predict(xd_ctx *ctx, const xd_alignment *both, xd_chunk_side which, side *s) {
    const int64_t last = s->tokens.count - 1, size = s->tokens.count * xd_tokenizer_describe(s->tokenizer).size;
    float *here = (float *)malloc(2 * (size_t)size * sizeof(float)), *there = NULL;
    xd_chunk_ids(both, which, &s->spans, s->chunks, NULL);
    for (int64_t t = 0; t < last; t++) s->labels[t] = s->tokens.ids[t + 1], s->chunks[t] = s->chunks[t + 1];
    s->labels[last] = XD_IGNORE_INDEX, s->chunks[last] = -1;
    for (int64_t i = 0; i < size; i++) here[i] = 4.0f * sinf(0.37f * (float)(i % 9973));
    XD_REQUIRE(ctx, !cudaMalloc((void **)&there, 2 * (size_t)size * sizeof(float)), XD_ERROR_DEVICE, "there is no room on the GPU");
    cudaMemcpy(there, here, (size_t)size * sizeof(float), cudaMemcpyHostToDevice);
    s->logits[0] = s->gradient[0] = xd_rows_of(here, XD_DTYPE_F32, last + 1, size / (last + 1));
    s->logits[1] = s->gradient[1] = xd_rows_of(there, XD_DTYPE_F32, last + 1, size / (last + 1));
    s->gradient[0].data = here + size, s->gradient[1].data = there + size;
    return XD_OK;
}

/* Loss and gradient; logits, gradient and projection are memory of the context's device, lists host memory. */
static xd_result distill(xd_ctx *ctx, const side s[2], int gpu, const xd_projection *m, int64_t chunks, xd_xtoken_values *out) {
    xd_xtoken_teacher t = xd_xtoken_teacher_defaults(XD_XTOKEN_PROJECTED);
    xd_xtoken_desc d = xd_xtoken_defaults();
    xd_vocab *vocab;
    XD_TRY(xd_vocab_create_even(ctx, NULL, s[0].logits[gpu].cols, &vocab));
    t.logits = s[1].logits[gpu], t.projected.projection = m;
    t.student_chunks = s[0].chunks, t.teacher_chunks = s[1].chunks, t.chunks = chunks;
    d.student = s[0].logits[gpu], d.common.gradient = s[0].gradient[gpu], d.common.labels.data = s[0].labels;
    d.vocab = vocab, d.temperature = 2.0, d.teachers = &t, d.teacher_count = 1;
    d.columns = 128; /* the teacher's most probable ones on this text */
    XD_TRY(xd_xtoken_loss(ctx, &d, out));
    xd_vocab_destroy(vocab);
    return XD_OK;
}

static xd_result compare(xd_ctx *ctx, side s[2]) {
    xd_cuda *gpu;
    xd_alignment both = {}; /* of the two tokenizations */
    xd_projection m = {}, there = {};
    xd_xtoken_values cpu, on_gpu;
    double off = 0.0, most = 0.0;
    for (int i = 0; i < 2; i++) XD_TRY(open_side(ctx, paths[i], &s[i]));
    XD_TRY(xd_align_bytes(ctx, &s[0].spans, &s[1].spans, &both, NULL));
    const xd_projection_desc pair = { s[0].tokenizer, s[1].tokenizer, NULL };
    XD_TRY(xd_projection_build(ctx, &pair, &m, NULL));
    for (int i = 0; i < 2; i++) XD_TRY(predict(ctx, &both, i ? XD_CHUNK_TEACHER : XD_CHUNK_STUDENT, &s[i]));
    XD_TRY(distill(ctx, s, 0, &m, both.count, &cpu));
    XD_TRY(xd_cuda_create(ctx, NULL, &gpu));
    XD_TRY(xd_projection_upload(ctx, &m, &there));
    XD_TRY(distill(ctx, s, 1, &there, both.count, &on_gpu));
    float *x = (float *)s[0].logits[0].data, *y = (float *)s[0].gradient[0].data; /* x now takes the GPU's gradient */
    XD_TRY(xd_read(ctx, x, s[0].gradient[1].data, (size_t)(y - x) * sizeof(float)));
    for (int64_t i = 0; i < y - x; i++) off = fmax(off, fabs((double)x[i] - (double)y[i])), most = fmax(most, fabs((double)y[i]));
    printf("%d and %d tokens in %d chunks: KL %.7f on the CPU, %.7f on the GPU; gradient off by %.1e of the largest\n",
           (int)s[0].tokens.count, (int)s[1].tokens.count, (int)both.count, cpu.kd, on_gpu.kd, off / most);
    xd_projection_unload(ctx, &there), xd_cuda_destroy(gpu), xd_projection_destroy(ctx, &m), xd_alignment_destroy(ctx, &both);
    return fabs(cpu.loss - on_gpu.loss) < 1e-5 * cpu.loss && off < 1e-5 * most ? XD_OK : XD_FAIL(ctx, XD_ERROR_DATA, "they differ");
}

int main(void) {
    side s[2] = {};
    xd_ctx *ctx = NULL;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) || devices == 0) return printf("there is no GPU\n"), 0;
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    if (compare(ctx, s) != XD_OK) return fprintf(stderr, "%s\n", xd_last_error(ctx)->message), 1;
    for (int i = 0; i < 2; i++) cudaFree(s[i].logits[1].data), free(s[i].logits[0].data);
    for (int i = 0; i < 2; i++) xd_encoder_destroy(s[i].encoder), xd_tokenizer_destroy(s[i].tokenizer);
    xd_ctx_destroy(ctx);
    return 0;
}
