/* Cross-tokenizer distillation: the teacher and the student have different vocabularies.
 * The program tokenizes one text twice, and projects between the vocabularies. It computes the
 * projected KL over shared chunks, with its gradient, on the CPU and on a GPU, and compares them.
 *
 *     nvcc -O2 -arch=sm_90 examples/cuda/cross_tokenizer.cu xdistill_cuda.cu -o cross_tokenizer */
#define XDISTILL_IMPLEMENTATION
#include "../../xdistill.h"
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST_TOKENS = 128 };
static const char text[] =
    "the teacher reads one tokenization of the text and the student another one";
static const char *const paths[] = { "data/student/tokenizer.json", "data/teacher/tokenizer.json" };

/* One model. Labels and chunks have one element a position; logits [0] and gradient [0] are on
 * the CPU, [1] on the GPU. */
typedef struct side {
    xd_tokenizer *tokenizer;
    xd_encoder *encoder;
    xd_encoding tokens;
    xd_align_side spans;
    int64_t labels[MOST_TOKENS], chunks[MOST_TOKENS];
    xd_rows logits[2], gradient[2];
} side;

static xd_result open_side(xd_ctx *ctx, const char *path, side *s) {
    xd_tokenizer_desc file = {};
    file.path = path;
    XD_TRY(xd_tokenizer_load(ctx, &file, &s->tokenizer));
    const xd_encoder_desc encodes = { s->tokenizer };
    XD_TRY(xd_encoder_create(ctx, &encodes, &s->encoder));
    XD_TRY(xd_encode(s->encoder, text, sizeof text - 1, NULL, &s->tokens));
    s->spans.spans = s->tokens.spans;
    s->spans.count = s->tokens.count;
    return XD_OK;
}

/* Position t predicts token t + 1, and so has that token's chunk. */
static xd_result predict(xd_ctx *ctx, const xd_alignment *both, xd_chunk_side which, side *s) {
    const int64_t rows = s->tokens.count, columns = xd_tokenizer_describe(s->tokenizer).size;
    const size_t size = (size_t)(rows * columns), bytes = size * sizeof(float);
    float *host = (float *)malloc(2 * bytes);
    float *device = NULL;
    xd_chunk_ids(both, which, &s->spans, s->chunks, NULL);
    for (int64_t t = 0; t < rows - 1; t++) {
        s->labels[t] = s->tokens.ids[t + 1];
        s->chunks[t] = s->chunks[t + 1];
    }
    s->labels[rows - 1] = XD_IGNORE_INDEX;
    s->chunks[rows - 1] = -1;
    /* A formula stands for a model's logits. */
    for (size_t i = 0; i < size; i++) host[i] = 4.0f * sinf(0.37f * (float)(i % 9973));
    XD_REQUIRE(ctx, !cudaMalloc((void **)&device, 2 * bytes), XD_ERROR_DEVICE, "no room on a GPU");
    cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice);
    s->logits[0] = xd_rows_of(host, XD_DTYPE_F32, rows, columns);
    s->gradient[0] = xd_rows_of(host + size, XD_DTYPE_F32, rows, columns);
    s->logits[1] = xd_rows_of(device, XD_DTYPE_F32, rows, columns);
    s->gradient[1] = xd_rows_of(device + size, XD_DTYPE_F32, rows, columns);
    return XD_OK;
}

/* Computes the loss and its gradient on the context's device. Logits, gradient and projection
 * are in its memory; labels and chunks are in host memory. */
static xd_result distill(xd_ctx *ctx, const side s[2], int gpu, const xd_projection *m,
                         int64_t chunks, xd_xtoken_values *out) {
    xd_vocab *vocab;
    const xd_vocab_desc split = { s[0].logits[gpu].cols };
    XD_TRY(xd_vocab_create(ctx, &split, &vocab));
    xd_xtoken_teacher t = xd_xtoken_teacher_defaults(XD_XTOKEN_PROJECTED);
    t.logits = s[1].logits[gpu];
    t.projected.projection = m;
    t.student_chunks = s[0].chunks;
    t.teacher_chunks = s[1].chunks;
    t.chunks = chunks;

    xd_xtoken_desc d = xd_xtoken_defaults();
    d.student = s[0].logits[gpu];
    d.vocab = vocab;
    d.common.gradient = s[0].gradient[gpu];
    d.common.labels.data = s[0].labels;
    d.temperature = 2.0;
    d.teachers = &t;
    d.teacher_count = 1;
    d.columns = 128; /* the teacher's most probable ones on this text */
    XD_TRY(xd_xtoken_loss(ctx, &d, out));
    xd_vocab_destroy(vocab);
    return XD_OK;
}

static xd_result compare(xd_ctx *ctx, side s[2]) {
    xd_cuda *gpu;
    xd_alignment both = {};
    xd_projection m = {}, on_device = {};
    xd_xtoken_values cpu, on_gpu;
    for (int i = 0; i < 2; i++) XD_TRY(open_side(ctx, paths[i], &s[i]));
    XD_TRY(xd_align_bytes(ctx, &s[0].spans, &s[1].spans, &both, NULL));
    const xd_projection_desc pair = { s[0].tokenizer, s[1].tokenizer, NULL, NULL };
    XD_TRY(xd_projection_build(ctx, &pair, &m, NULL));
    XD_TRY(predict(ctx, &both, XD_CHUNK_STUDENT, &s[0]));
    XD_TRY(predict(ctx, &both, XD_CHUNK_TEACHER, &s[1]));
    XD_TRY(distill(ctx, s, 0, &m, both.count, &cpu));
    XD_TRY(xd_cuda_create(ctx, NULL, &gpu));
    XD_TRY(xd_projection_upload(ctx, &m, &on_device));
    XD_TRY(distill(ctx, s, 1, &on_device, both.count, &on_gpu));

    /* The GPU's gradient overwrites the logits on the host. */
    float *x = (float *)s[0].logits[0].data, *y = (float *)s[0].gradient[0].data;
    XD_TRY(xd_read(ctx, x, s[0].gradient[1].data, (size_t)(y - x) * sizeof(float)));
    double off = 0.0, most = 0.0;
    for (int64_t i = 0; i < y - x; i++) {
        off = fmax(off, fabs((double)x[i] - (double)y[i]));
        most = fmax(most, fabs((double)y[i]));
    }
    printf("%d and %d tokens in %d chunks: KL %.7f on the CPU, %.7f on the GPU; "
           "gradient off by %.1e of the largest\n", (int)s[0].tokens.count,
           (int)s[1].tokens.count, (int)both.count, cpu.kd, on_gpu.kd, off / most);

    xd_projection_unload(ctx, &on_device);
    xd_cuda_destroy(gpu);
    xd_projection_destroy(ctx, &m);
    xd_alignment_destroy(ctx, &both);
    const bool equal = fabs(cpu.loss - on_gpu.loss) < 1e-5 * cpu.loss && off < 1e-5 * most;
    return equal ? XD_OK : XD_FAIL(ctx, XD_ERROR_DATA, "they differ");
}

int main(void) {
    side s[2] = {};
    xd_ctx *ctx = NULL;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) || devices == 0) {
        printf("there is no GPU\n");
        return 0;
    }
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    if (compare(ctx, s) != XD_OK) {
        fprintf(stderr, "%s\n", xd_last_error(ctx)->message);
        return 1;
    }
    for (int i = 0; i < 2; i++) {
        cudaFree(s[i].logits[1].data);
        free(s[i].logits[0].data);
        xd_encoder_destroy(s[i].encoder);
        xd_tokenizer_destroy(s[i].tokenizer);
    }
    xd_ctx_destroy(ctx);
    return 0;
}
