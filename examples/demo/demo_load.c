/* demo_load.c - what a run reads before its ranks start: texts, tokenizers, the teacher and the way between both. */
#include "demo_data.h"

#include "../common/model_directory.h"

#include <stdio.h>
#include <string.h>

nn_config demo_config(int vocab, bool teacher) {
    nn_config c;
    memset(&c, 0, sizeof c);
    c.vocab = vocab;
    c.hidden = teacher ? 256 : 128;
    c.layers = teacher ? 4 : 2;
    c.heads = c.hidden / 32;
    c.kv_heads = c.heads / 2;
    c.head_dim = 32;
    c.ffn = 3 * c.hidden;
    c.rope_theta = 10000.0f;
    c.norm_eps = 1e-5f;
    c.tied = true;
    return c;
}

xd_result demo_reader_open_tokenizer(xd_ctx *ctx, const char *directory, demo_reader *reader) {
    snprintf(reader->path, sizeof reader->path, "%s/tokenizer.json", directory);
    return xd_tokenizer_load(ctx, &(xd_tokenizer_desc){ .path = reader->path }, &reader->tokenizer);
}

xd_result demo_reader_open(xd_ctx *ctx, const char *directory, const char *text, const char *heldout,
                           size_t heldout_bytes, demo_reader *reader) {
    XD_TRY(demo_reader_open_tokenizer(ctx, directory, reader));
    XD_TRY(demo_text_load(ctx, reader->tokenizer, heldout, heldout_bytes, &reader->heldout));
    const xd_result enough = demo_text_check(ctx, &reader->heldout, heldout);
    if (enough != XD_OK && heldout_bytes)
        return XD_FAIL(ctx, enough,
                       "the first %zu bytes of %s are %lld tokens: --heldout-bytes must leave %d",
                       heldout_bytes, heldout, (long long)reader->heldout.count, DEMO_ROW + 2);
    XD_TRY(enough);
    if (!text) return XD_OK;
    XD_TRY(demo_text_load(ctx, reader->tokenizer, text, 0, &reader->text));
    return demo_text_check(ctx, &reader->text, text);
}

static void demo_reader_close(xd_ctx *ctx, demo_reader *reader) {
    demo_text_free(ctx, &reader->text);
    demo_text_free(ctx, &reader->heldout);
    xd_tokenizer_destroy(reader->tokenizer);
}

xd_result demo_lesson_load(xd_ctx *ctx, size_t heldout_bytes, demo_lesson *l) {
    const demo_data *data = &l->data;
    XD_TRY(demo_reader_open(ctx, data->tokenizer, data->text, data->heldout, heldout_bytes, &l->student));
    XD_TRY(demo_reader_open(ctx, data->teacher, data->text, data->heldout, heldout_bytes, &l->teacher));
    XD_TRY(model_directory_load(ctx, data->teacher, &l->model, &l->model_weights));
    return demo_bridge_make(ctx, l->student.tokenizer, &l->student.text, l->teacher.tokenizer,
                            &l->teacher.text, &l->bridge);
}

void demo_lesson_tell(const demo_lesson *l, demo_job *job) {
    job->tokenizer = l->student.tokenizer;
    job->teacher_tokenizer = l->teacher.tokenizer;
    job->text = &l->student.text;
    job->heldout = &l->student.heldout;
    job->teacher_heldout = &l->teacher.heldout;
    job->tokenizer_path = l->student.path;
    if (l->model_weights) job->teacher = &l->model;
    job->teacher_weights = l->model_weights;
    if (l->bridge.first_chunk) job->bridge = &l->bridge;
}

void demo_lesson_free(xd_ctx *ctx, demo_lesson *l) {
    xd_release(ctx, l->model_weights);
    nn_model_free(&l->model);
    demo_bridge_free(ctx, &l->bridge);
    demo_reader_close(ctx, &l->student);
    demo_reader_close(ctx, &l->teacher);
}
