/* A loss across tokenizers behind three C calls, for bench/torch/xtoken.py: one context, one thread, memory of
 * the caller. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct xtoken_shim {
    xd_ctx *ctx;
    xd_vocab *vocab;
    xd_projection projection;
    xd_exact_map map;
    xd_xtoken_teacher teacher;
    xd_xtoken_desc d;
    xd_xtoken_values values;
} xtoken_shim;

/* What the caller lends, for as long as the shim lives. */
typedef struct xtoken_inputs {
    void *student, *teacher, *gradient; /* [rows, student_size], [rows, teacher_size] */
    int64_t rows, student_size, teacher_size;
    const int64_t *student_chunks, *teacher_chunks;
    int64_t chunks;
    const int32_t *ids; /* [student_size, entries] */
    const float *weights;
    int64_t entries;
    double temperature;
    int bf16;
} xtoken_inputs;

static void shim_require(xtoken_shim *s, xd_result result) {
    if (result == XD_OK) return;
    fprintf(stderr, "%s: %s\n", xd_result_name(result), xd_last_error(s->ctx)->message);
    exit(2);
}

static xd_rows shim_rows(const xtoken_inputs *in, void *data, int64_t cols) {
    const xd_rows r = { data, in->bf16 ? XD_DTYPE_BF16 : XD_DTYPE_F32, in->rows, cols, 0 };
    return r;
}

XD_API xtoken_shim *xtoken_shim_open(const xtoken_inputs *in, int gold) {
    xtoken_shim *s = (xtoken_shim *)calloc(1, sizeof *s);
    const xd_projection_rows rows = { (int32_t *)in->ids, (float *)in->weights, in->student_size,
                                      in->entries };
    if (!s) exit(2);
    shim_require(s, xd_ctx_create(NULL, &s->ctx));
    shim_require(s, xd_vocab_create(s->ctx, NULL, 0, in->student_size, in->student_size, &s->vocab));
    if (gold) shim_require(s, xd_exact_map_create(s->ctx, &rows, in->teacher_size, false, &s->map));
    if (!gold)
        shim_require(
            s, xd_projection_from_rows(s->ctx, &rows, in->student_size, in->teacher_size, &s->projection));
    s->teacher.kind = gold ? XD_XTOKEN_GOLD : XD_XTOKEN_PROJECTED;
    s->teacher.logits = shim_rows(in, in->teacher, in->teacher_size);
    s->teacher.student_chunks = in->student_chunks;
    s->teacher.teacher_chunks = in->teacher_chunks;
    s->teacher.chunks = in->chunks;
    s->teacher.projection = &s->projection;
    s->teacher.map = &s->map;
    s->d.student = shim_rows(in, in->student, in->student_size);
    s->d.gradient = shim_rows(in, in->gradient, in->student_size);
    s->d.vocab = s->vocab;
    s->d.teachers = &s->teacher;
    s->d.teacher_count = 1;
    s->d.temperature = in->temperature;
    s->d.compat = true;
    s->d.workspace_bytes = xd_xtoken_workspace_bytes(&s->d);
    s->d.workspace = malloc(s->d.workspace_bytes);
    return s;
}

XD_API double xtoken_shim_run(xtoken_shim *s) {
    shim_require(s, xd_xtoken_loss(s->ctx, &s->d, &s->values));
    return s->values.kd;
}

XD_API void xtoken_shim_close(xtoken_shim *s) {
    xd_projection_free(s->ctx, &s->projection);
    xd_exact_map_free(s->ctx, &s->map);
    xd_vocab_destroy(s->vocab);
    xd_ctx_destroy(s->ctx);
    free(s->d.workspace);
    free(s);
}
