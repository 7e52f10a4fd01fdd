/* real_student.c - a small student with its own vocabulary learns from the real teacher: alone, live and from
 * the cache; every arm has the same rows and starts from the same weights. */
#include "real_lesson.h"

#include <stdio.h>
#include <string.h>

/* What an arm reads. */
typedef struct real_arm {
    real_teacher teacher; /* weights only when it is live */
    xd_tokenizer *tokenizer;
    real_text text, heldout, teacher_text;
    xd_teacher_cache *cache;
    xd_cached_position *positions;
    xd_token_span *spans;
    int32_t *ids;
    xd_projection projection;
    model_extras extras;
    real_lesson lesson;
} real_arm;

static nn_config real_student_config(int vocab) {
    nn_config c;
    memset(&c, 0, sizeof c);
    c.vocab = vocab;
    c.hidden = 128;
    c.layers = 2;
    c.heads = 4;
    c.kv_heads = 2;
    c.head_dim = 32;
    c.ffn = 384;
    c.rope_theta = 10000.0f;
    c.norm_eps = 1e-5f;
    c.tied = true;
    return c;
}

/* The teacher's tokens of the text, out of the cache. */
static xd_result real_arm_open_cache(xd_ctx *ctx, const char *path, real_arm *arm) {
    xd_projection_origin origin;
    xd_cached_document document;
    bool failed = false;
    memset(&origin, 0, sizeof origin);
    origin.student_hash = xd_tokenizer_describe(arm->tokenizer).hash;
    origin.teacher_hash = xd_tokenizer_describe(arm->teacher.tokenizer).hash;
    const xd_teacher_cache_open_desc open = { .path = path, .expected = &origin };
    XD_TRY(xd_teacher_cache_open(ctx, &open, &arm->cache));
    XD_TRY(xd_teacher_cache_find_document(ctx, arm->cache, 0, &document));
    const uint32_t checksum = xd_crc32c(0, arm->text.data, arm->text.bytes);
    XD_REQUIRE(ctx, document.text_bytes == (int64_t)arm->text.bytes && document.text_checksum == checksum,
               XD_ERROR_DATA, "%s is of another text: %lld bytes and %08x, here %zu and %08x", path,
               (long long)document.text_bytes, document.text_checksum, arm->text.bytes, checksum);
    arm->positions = (xd_cached_position *)real_room(ctx, document.count, sizeof *arm->positions, &failed);
    arm->spans = (xd_token_span *)real_room(ctx, document.count, sizeof *arm->spans, &failed);
    arm->ids = (int32_t *)real_room(ctx, document.count, sizeof *arm->ids, &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for %lld positions", (long long)document.count);
    const xd_teacher_cache_read_desc read = { .count = document.count, .positions = arm->positions };
    XD_TRY(xd_teacher_cache_read(ctx, arm->cache, &read));
    for (int64_t i = 0; i < document.count; i++) {
        arm->spans[i] = arm->positions[i].span;
        arm->ids[i] = arm->positions[i].id;
    }
    arm->lesson.cache = arm->cache;
    arm->lesson.spans = arm->spans;
    arm->lesson.teacher_ids = arm->ids;
    arm->lesson.teacher_count = document.count;
    return XD_OK;
}

static xd_result real_arm_load_teacher(xd_ctx *ctx, const real_options *o, real_arm *arm) {
    real_lesson *lesson = &arm->lesson;
    XD_TRY((lesson->source == REAL_CACHED ? real_teacher_open : real_teacher_load)(ctx, o->path[4],
                                                                                   &arm->teacher));
    lesson->projection = &arm->projection;
    if (lesson->source == REAL_CACHED) {
        XD_TRY(real_arm_open_cache(ctx, o->path[5], arm));
    } else {
        XD_TRY(real_text_load(ctx, arm->teacher.tokenizer, o->path[2], o->bytes, &arm->teacher_text));
        lesson->spans = arm->teacher_text.spans;
        lesson->teacher_ids = arm->teacher_text.ids;
        lesson->teacher_count = arm->teacher_text.count;
        lesson->teacher = arm->teacher.config;
        lesson->teacher_weights = arm->teacher.weights;
    }
    XD_TRY(real_lesson_align(ctx, lesson, NULL));
    return real_lesson_project(ctx, lesson, lesson->student.vocab, arm->teacher.config.vocab,
                               &arm->projection);
}

static xd_result real_arm_load(xd_ctx *ctx, const real_options *o, real_arm *arm) {
    real_lesson *lesson = &arm->lesson;
    lesson->name = o->path[0];
    lesson->source = strcmp(o->path[0], "live") == 0     ? REAL_LIVE
                     : strcmp(o->path[0], "cached") == 0 ? REAL_CACHED
                                                         : REAL_ALONE;
    XD_REQUIRE(ctx, lesson->source != REAL_ALONE || strcmp(o->path[0], "alone") == 0, XD_ERROR_ARGUMENT,
               "arm %s: alone, live and cached are known", o->path[0]);
    XD_REQUIRE(ctx, o->paths >= 4 + (int)lesson->source, XD_ERROR_ARGUMENT, "arm %s needs %d files",
               o->path[0], 3 + (int)lesson->source);
    XD_TRY(xd_tokenizer_load(ctx, &(xd_tokenizer_desc){ .path = o->path[1] }, &arm->tokenizer));
    XD_TRY(real_text_load(ctx, arm->tokenizer, o->path[2], o->bytes, &arm->text));
    XD_TRY(real_text_load(ctx, arm->tokenizer, o->path[3], 0, &arm->heldout));
    XD_REQUIRE(ctx, arm->text.count > REAL_ROW + 2 && arm->heldout.count > 1, XD_ERROR_DATA,
               "%lld and %lld tokens of text are too few", (long long)arm->text.count,
               (long long)arm->heldout.count);
    lesson->text = &arm->text;
    lesson->heldout = &arm->heldout;
    lesson->student = real_student_config(xd_tokenizer_describe(arm->tokenizer).size);
    lesson->rows = 8;
    lesson->steps = o->steps ? o->steps : 100;
    lesson->seed = o->seed;
    return lesson->source == REAL_ALONE ? XD_OK : real_arm_load_teacher(ctx, o, arm);
}

static void real_arm_free(xd_ctx *ctx, real_arm *arm) {
    real_lesson_free(ctx, &arm->lesson);
    xd_release(ctx, arm->lesson.losses);
    xd_projection_destroy(ctx, &arm->projection);
    xd_teacher_cache_close(arm->cache);
    xd_release(ctx, arm->positions);
    xd_release(ctx, arm->spans);
    xd_release(ctx, arm->ids);
    real_text_free(ctx, &arm->text);
    real_text_free(ctx, &arm->heldout);
    real_text_free(ctx, &arm->teacher_text);
    xd_tokenizer_destroy(arm->tokenizer);
    real_teacher_free(ctx, &arm->teacher);
}

/* What is kept of the run: room for its curve, and what goes with the model. */
static xd_result real_arm_keep(xd_ctx *ctx, const real_options *o, real_arm *arm) {
    real_lesson *lesson = &arm->lesson;
    bool failed = false;
    if (!o->save) return XD_OK;
    XD_TRY(real_keep_begin(ctx, o));
    lesson->losses = (float *)real_room(ctx, lesson->steps, sizeof *lesson->losses, &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for %d losses", lesson->steps);
    arm->extras.tokenizer = o->path[1];
    arm->extras.end_of_text = xd_tokenizer_find_special(arm->tokenizer, "<|endoftext|>");
    arm->extras.end_token = arm->extras.end_of_text >= 0 ? "<|endoftext|>" : NULL;
    arm->extras.positions = REAL_ROW;
    lesson->save = o->save;
    lesson->extras = &arm->extras;
    lesson->tokenizer = arm->tokenizer;
    return XD_OK;
}

static xd_result real_arm_keep_curve(xd_ctx *ctx, const real_options *o, const real_arm *arm) {
    const real_lesson *lesson = &arm->lesson;
    real_curve curve;
    int at[REAL_POINTS];
    char name[64];
    if (!o->save) return XD_OK;
    snprintf(name, sizeof name, "%s, %d steps", lesson->name, lesson->steps);
    memset(&curve, 0, sizeof curve);
    curve.name = name;
    curve.vocabulary = lesson->student.vocab;
    curve.losses = lesson->losses;
    curve.steps = lesson->steps;
    curve.heldout = lesson->points;
    curve.heldout_at = at;
    curve.points = real_point_count(lesson->steps);
    for (int i = 0; i < curve.points; i++) at[i] = real_point_step(i, lesson->steps);
    curve.end = lesson->bits_per_byte;
    curve.sample = lesson->sample;
    return real_keep_curve(ctx, o->save, &curve);
}

xd_result real_student(xd_ctx *ctx, const real_options *o) {
    real_arm arm;
    memset(&arm, 0, sizeof arm);
    const real_lesson *lesson = &arm.lesson;
    xd_result result = real_arm_load(ctx, o, &arm);
    if (result == XD_OK) result = real_arm_keep(ctx, o, &arm);
    if (result == XD_OK) result = real_run(ctx, o, real_lesson_rank, &arm.lesson);
    if (result == XD_OK) result = real_arm_keep_curve(ctx, o, &arm);
    if (result == XD_OK) {
        printf("%s, %d steps: %.4f bits per byte of %s, %.0f s\n", lesson->name, lesson->steps,
               lesson->bits_per_byte, o->path[3], lesson->seconds);
        result = real_record(ctx, o,
                             "{\"student\": \"%s\", \"steps\": %d, \"seed\": %llu, \"vocabulary\": %d, "
                             "\"bits_per_byte\": %.6f, \"seconds\": %.1f, \"kd\": %.6f, \"ce\": %.6f, "
                             "\"peak_mib\": %.0f}",
                             lesson->name, lesson->steps, (unsigned long long)lesson->seed,
                             lesson->student.vocab, lesson->bits_per_byte, lesson->seconds, lesson->last_kd,
                             lesson->last_ce, real_peak_mib());
    }
    real_arm_free(ctx, &arm);
    return result;
}
