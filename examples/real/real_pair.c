/* real_pair.c - two real vocabularies: what they share, how their tokens of a text line up, and a few steps
 * of distillation at their full sizes. The models are small and random: what is measured is what grows with
 * the vocabularies. */
#include "real_lesson.h"

#include <stdio.h>
#include <string.h>

/* Both sides. */
typedef struct real_sides {
    xd_tokenizer *student, *teacher;
    real_text text, teacher_text;
    xd_projection projection;
    float *teacher_weights;
    real_lesson lesson;
} real_sides;

static xd_result real_load_side(xd_ctx *ctx, const char *path, xd_tokenizer_preset preset,
                                xd_tokenizer **out) {
    xd_tokenizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.preset = preset;
    desc.path = path;
    return xd_tokenizer_load(ctx, &desc, out);
}

/* ---- vocabularies ---- */

/* Student tokens of text whose bytes are a token of the teacher's, and all of them. */
static void real_overlap(const real_sides *s, int64_t *same, int64_t *all) {
    const int32_t size = xd_tokenizer_describe(s->student).size;
    *same = *all = 0;
    for (int32_t id = 0; id < size; id++) {
        const xd_token token = xd_tokenizer_token(s->student, id);
        if (token.kind != XD_TOKEN_KIND_NORMAL) continue;
        ++*all;
        if (xd_tokenizer_find(s->teacher, token.bytes, token.length) >= 0) ++*same;
    }
}

static xd_result real_pair_vocabularies(xd_ctx *ctx, const real_options *o, real_sides *s) {
    xd_projection_report r;
    int64_t same = 0, all = 0;
    const double start = xd_now(ctx);
    XD_TRY(real_load_side(ctx, o->path[0], o->preset[0], &s->student));
    XD_TRY(real_load_side(ctx, o->path[1], o->preset[1], &s->teacher));
    real_overlap(s, &same, &all);
    const double loaded = xd_now(ctx) - start, empty = real_peak_mib();
    XD_TRY(xd_projection_build(ctx, &(xd_projection_desc){ s->student, s->teacher, NULL, NULL },
                               &s->projection, &r));
    const double built = xd_now(ctx) - start - loaded;
    const double dense = (double)s->projection.student_size * (double)s->projection.teacher_size * 2.0;
    printf(
        "vocabularies       %lld and %lld ids; %lld of %lld student tokens are the teacher's too (%.1f%%)\n",
        (long long)s->projection.student_size, (long long)s->projection.teacher_size, (long long)same,
        (long long)all, 100.0 * (double)same / (double)all);
    printf(
        "projection         %lld entries, %lld of %lld ids covered, %.3f pieces a token, %.3f%% bytes lost, "
        "%.1f s\n",
        (long long)r.entries, (long long)r.covered, (long long)r.tokens, r.mean_pieces, 100.0 * r.lost_bytes,
        built);
    printf(
        "memory             %.0f MiB at most so far, %.0f before the projection; as a dense bf16 matrix it "
        "alone would have %.1f GB\n",
        real_peak_mib(), empty, dense * 1e-9);
    return real_record(
        ctx, o,
        "{\"pair\": \"%s\", \"with\": \"%s\", \"student_size\": %lld, \"teacher_size\": %lld, "
        "\"same\": %lld, \"of\": %lld, \"entries\": %lld, \"covered\": %lld, \"pieces\": %.4f, "
        "\"lost_bytes\": %.6f, \"seconds\": %.1f, \"peak_mib\": %.0f}",
        real_name(o->path[0]), real_name(o->path[1]), (long long)s->projection.student_size,
        (long long)s->projection.teacher_size, (long long)same, (long long)all, (long long)r.entries,
        (long long)r.covered, r.mean_pieces, r.lost_bytes, built, real_peak_mib());
}

/* ---- alignment ---- */

static xd_result real_pair_text(xd_ctx *ctx, const real_options *o, real_sides *s, const char *path) {
    xd_align_report r;
    const double start = xd_now(ctx);
    real_lesson_free(ctx, &s->lesson);
    real_text_free(ctx, &s->text);
    real_text_free(ctx, &s->teacher_text);
    XD_TRY(real_text_load(ctx, s->student, path, o->bytes, &s->text));
    XD_TRY(real_text_load(ctx, s->teacher, path, o->bytes, &s->teacher_text));
    const double encoded = xd_now(ctx) - start;
    s->lesson.text = &s->text;
    s->lesson.spans = s->teacher_text.spans;
    s->lesson.teacher_ids = s->teacher_text.ids;
    s->lesson.teacher_count = s->teacher_text.count;
    XD_TRY(real_lesson_align(ctx, &s->lesson, &r));
    const double aligned = xd_now(ctx) - start - encoded;
    printf("%s: %zu bytes, %lld and %lld tokens in %.1f s; %lld chunks in %.3f s, %.4f a student token, %lld "
           "not "
           "exact, %lld of one side, %lld bytes lost\n",
           real_name(path), s->text.bytes, (long long)s->text.count, (long long)s->teacher_text.count,
           encoded, (long long)r.chunks, aligned, (double)r.chunks / (double)s->text.count,
           (long long)(r.chunks - r.exact), (long long)r.one_sided, (long long)r.lost_bytes);
    return real_record(ctx, o,
                       "{\"align\": \"%s\", \"student\": \"%s\", \"teacher\": \"%s\", \"bytes\": %zu, "
                       "\"student_tokens\": %lld, "
                       "\"teacher_tokens\": %lld, \"chunks\": %lld, \"exact\": %lld, \"one_sided\": %lld, "
                       "\"lost_bytes\": %lld}",
                       real_name(path), real_name(o->path[0]), real_name(o->path[1]), s->text.bytes,
                       (long long)s->text.count, (long long)s->teacher_text.count, (long long)r.chunks,
                       (long long)r.exact, (long long)r.one_sided, (long long)r.lost_bytes);
}

/* ---- steps ---- */

/* A decoder just large enough to be one; the teacher's columns are rounded up as released models do. */
static nn_config real_tiny_config(int64_t vocab, int padding) {
    nn_config c;
    memset(&c, 0, sizeof c);
    c.vocab = (int)((vocab + padding - 1) / padding * padding);
    c.hidden = 64;
    c.layers = 1;
    c.heads = c.kv_heads = 2;
    c.head_dim = 32;
    c.ffn = 128;
    c.rope_theta = 10000.0f;
    c.norm_eps = 1e-5f;
    c.tied = true;
    return c;
}

static xd_result real_random_teacher(xd_ctx *ctx, real_sides *s) {
    nn_model model;
    bool failed = false;
    s->lesson.teacher = real_tiny_config(s->projection.teacher_size, 256);
    const char *problem = nn_model_init(&s->lesson.teacher, NULL, NULL, &model);
    XD_REQUIRE(ctx, !problem, XD_ERROR_ARGUMENT, "model: %s", problem);
    s->teacher_weights = (float *)real_room(ctx, model.float_count, sizeof(float), &failed);
    if (!failed) nn_model_randomize(&model, 7, s->teacher_weights);
    nn_model_free(&model);
    s->lesson.teacher_weights = s->teacher_weights;
    return failed ? XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a teacher") : XD_OK;
}

/* Over the last of the texts. */
static xd_result real_pair_steps(xd_ctx *ctx, const real_options *o, real_sides *s) {
    real_lesson *lesson = &s->lesson;
    XD_REQUIRE(ctx, s->text.count > 2 * REAL_ROW, XD_ERROR_DATA, "%lld tokens of text are too few",
               (long long)s->text.count);
    XD_TRY(real_random_teacher(ctx, s));
    lesson->source = REAL_LIVE;
    lesson->student = real_tiny_config(s->projection.student_size, 1);
    lesson->projection = &s->projection;
    lesson->split_vocabulary = true;
    lesson->rows = 2;
    lesson->steps = o->steps ? o->steps : 5;
    lesson->seed = o->seed;
    lesson->name = "training";
    XD_TRY(real_run(ctx, o, real_lesson_rank, lesson));
    printf("%d steps of %d rows   %d ranks share %lld columns; loss %.4f -> %.4f; %.1f s a step; %.0f MiB at "
           "most\n",
           lesson->steps, lesson->rows, o->ranks, (long long)s->projection.student_size, lesson->first_loss,
           lesson->last_loss, lesson->seconds / lesson->steps, real_peak_mib());
    return real_record(ctx, o,
                       "{\"steps\": %d, \"with\": \"%s\", \"ranks\": %d, \"rows\": %d, \"first_loss\": %.6f, "
                       "\"last_loss\": %.6f, \"seconds_a_step\": %.2f, \"peak_mib\": %.0f}",
                       lesson->steps, real_name(o->path[1]), o->ranks, lesson->rows, lesson->first_loss,
                       lesson->last_loss, lesson->seconds / lesson->steps, real_peak_mib());
}

xd_result real_pair(xd_ctx *ctx, const real_options *o) {
    real_sides s;
    memset(&s, 0, sizeof s);
    xd_result result = real_pair_vocabularies(ctx, o, &s);
    for (int i = 2; i < o->paths && result == XD_OK; i++) result = real_pair_text(ctx, o, &s, o->path[i]);
    if (result == XD_OK) result = real_pair_steps(ctx, o, &s);
    real_lesson_free(ctx, &s.lesson);
    real_text_free(ctx, &s.text);
    real_text_free(ctx, &s.teacher_text);
    xd_release(ctx, s.teacher_weights);
    xd_projection_destroy(ctx, &s.projection);
    xd_tokenizer_destroy(s.student);
    xd_tokenizer_destroy(s.teacher);
    return result;
}
