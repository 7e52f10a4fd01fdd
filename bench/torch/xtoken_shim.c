/* A loss across tokenizers behind three C calls, for bench/torch/xtoken.py: positions are cut over the ranks of a
 * sequence, a thread each, on memory of the caller. Built into a shared library by `make bench-torch`. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What the caller lends, for as long as the shim lives. */
typedef struct xtoken_inputs {
    void *student, *teacher, *gradient; /* [rows, student_size], [rows, teacher_size] */
    int64_t rows, student_size, teacher_size;
    const int64_t *student_chunks, *teacher_chunks;
    int64_t chunks;
    const int32_t *ids; /* [student_size, entries] */
    const float *weights;
    int64_t entries;
    const int64_t *labels; /* [rows] or NULL */
    double temperature, kd_weight, ce_weight;
    int bf16;
} xtoken_inputs;

enum { SHIM_THREADS = 16 };

typedef struct xtoken_shim {
    xtoken_inputs in;
    xd_ctx *ctx; /* of the projection and the map */
    xd_projection projection;
    xd_exact_map map;
    bool gold;
    int threads;
    void *workspace[SHIM_THREADS]; /* of each rank, made by its first run */
    size_t workspace_bytes[SHIM_THREADS];
    double loss;
} xtoken_shim;

static void shim_require(xd_ctx *ctx, xd_result result) {
    if (result == XD_OK) return;
    fprintf(stderr, "%s: %s\n", xd_result_name(result), xd_last_error(ctx)->message);
    exit(2);
}

/* Rows [begin, end) of one of the matrices. */
static xd_rows shim_rows(const xtoken_inputs *in, void *data, int64_t cols, int64_t begin, int64_t end) {
    const xd_dtype dtype = in->bf16 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    const xd_rows r = { (char *)data + (size_t)(begin * cols) * xd_dtype_size(dtype), dtype, end - begin, cols, 0 };
    return r;
}

XD_API xtoken_shim *xtoken_shim_open(const xtoken_inputs *in, int gold, int threads) {
    xtoken_shim *s = (xtoken_shim *)calloc(1, sizeof *s);
    const xd_projection_rows rows = { (int32_t *)in->ids, (float *)in->weights, in->student_size,
                                      in->entries };
    if (!s || threads < 1 || threads > SHIM_THREADS) exit(2);
    s->in = *in;
    s->gold = gold != 0;
    s->threads = threads;
    shim_require(NULL, xd_ctx_create(NULL, &s->ctx));
    if (gold)
        shim_require(s->ctx, xd_exact_map_create(s->ctx, &(xd_exact_map_desc){ &rows, in->teacher_size, false }, &s->map));
    else
        shim_require(s->ctx, xd_projection_from_rows(s->ctx, &rows, in->student_size, in->teacher_size,
                                                     &s->projection));
    return s;
}

static xd_result shim_run_rank(xd_comm *sequence, void *shim) {
    xtoken_shim *s = (xtoken_shim *)shim;
    const xtoken_inputs *in = &s->in;
    const int rank = xd_comm_rank(sequence);
    const int64_t begin = in->rows * rank / s->threads, end = in->rows * (rank + 1) / s->threads;
    xd_ctx *ctx = xd_comm_ctx(sequence);
    xd_xtoken_teacher teacher;
    xd_xtoken_desc d;
    xd_xtoken_values values;
    xd_vocab *vocab;
    teacher = xd_xtoken_teacher_defaults(s->gold ? XD_XTOKEN_GOLD : XD_XTOKEN_PROJECTED);
    d = xd_xtoken_defaults();
    shim_require(ctx, xd_vocab_create(ctx, &(xd_vocab_desc){ .size = in->student_size }, &vocab));
    teacher.logits = shim_rows(in, in->teacher, in->teacher_size, begin, end);
    teacher.student_chunks = in->student_chunks + begin;
    teacher.teacher_chunks = in->teacher_chunks + begin;
    teacher.chunks = in->chunks;
    teacher.projected.projection = &s->projection;
    teacher.gold.map = &s->map;
    d.student = shim_rows(in, in->student, in->student_size, begin, end);
    d.common.gradient = shim_rows(in, in->gradient, in->student_size, begin, end);
    d.vocab = vocab;
    d.sequence_comm = s->threads > 1 ? sequence : NULL;
    d.teachers = &teacher;
    d.teacher_count = 1;
    d.temperature = in->temperature;
    d.kd_weight = in->kd_weight;
    d.ce_weight = in->ce_weight;
    if (in->labels) d.common.labels.data = in->labels + begin;
    d.compat = true;
    if (!s->workspace[rank]) {
        xd_planned planned;
        shim_require(ctx, xd_plan_begin(ctx, NULL));
        shim_require(ctx, xd_xtoken_loss(ctx, &d, &values));
        shim_require(ctx, xd_plan_end(ctx, &planned));
        s->workspace_bytes[rank] = planned.workspace;
        s->workspace[rank] = malloc(s->workspace_bytes[rank]);
    }
    d.common.workspace = s->workspace[rank];
    d.common.workspace_bytes = s->workspace_bytes[rank];
    shim_require(ctx, xd_xtoken_loss(ctx, &d, &values));
    if (rank == 0) s->loss = values.loss;
    xd_vocab_destroy(vocab);
    return XD_OK;
}

XD_API double xtoken_shim_run(xtoken_shim *s) {
    if (xd_run_threads(s->threads, NULL, shim_run_rank, s, NULL) != XD_OK) exit(2);
    return s->loss;
}

XD_API void xtoken_shim_close(xtoken_shim *s) {
    xd_projection_destroy(s->ctx, &s->projection);
    xd_exact_map_destroy(s->ctx, &s->map);
    xd_ctx_destroy(s->ctx);
    for (int i = 0; i < s->threads; i++) free(s->workspace[i]);
    free(s);
}
