/* cache_command.c - `xdistill cache write` and `cache inspect`. */
#define _POSIX_C_SOURCE 200809L /* stat */
#include "../../examples/common/folder_lock.h"
#include "cache.h"
#include "command.h"
#include "interrupt.h"
#include "ranks.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

typedef struct cache_options {
    const char *teacher, *text, *out, *cache;
    int likeliest, draws, ranks, contexts, positions;
    uint64_t seed;
    double temperature;
} cache_options;

#define CACHE_FIELD(field) offsetof(cache_options, field)

/* ---- write ---- */

static const option cache_write_table[] = {
    { .name = "--teacher",
      .value = "PATH",
      .kind = OPTION_PATH,
      .field = CACHE_FIELD(teacher),
      .help = "a GGUF file or a Hugging Face directory of type llama, qwen2 or qwen3" },
    { .name = "--text",
      .value = "FILE",
      .kind = OPTION_PATH,
      .field = CACHE_FIELD(text),
      .help = "UTF-8 text" },
    { .name = "--out",
      .value = "DIR",
      .kind = OPTION_PATH,
      .field = CACHE_FIELD(out),
      .help = "gets the parts, NNNN.xdcache; those that are there are not written again" },
    { .name = "--likeliest",
      .value = "N",
      .kind = OPTION_INT,
      .field = CACHE_FIELD(likeliest),
      .least = 1,
      .most = 512,
      .help = "tokens of a position (6)" },
    { .name = "--draws",
      .value = "N",
      .kind = OPTION_INT,
      .field = CACHE_FIELD(draws),
      .least = 0,
      .most = 512,
      .help = "and draws of the others (6); 0 keeps only what they have together" },
    { .name = "--seed",
      .value = "N",
      .kind = OPTION_UINT64,
      .field = CACHE_FIELD(seed),
      .least = 1,
      .most = 1000000000,
      .help = "of the draws (1)" },
    { .name = "--temperature",
      .value = "X",
      .kind = OPTION_DOUBLE,
      .field = CACHE_FIELD(temperature),
      .from = 0.1,
      .to = 100.0,
      .help = "of the probabilities (1)" },
    { .name = "--ranks",
      .value = "N",
      .kind = OPTION_INT,
      .field = CACHE_FIELD(ranks),
      .least = 1,
      .most = 64,
      .help = "threads (2)" },
    { .name = "--contexts",
      .value = "N",
      .kind = OPTION_INT,
      .field = CACHE_FIELD(contexts),
      .least = 1,
      .most = 1000000,
      .help = "of a part (8): a rank writes whole parts; with more than the text has there is one file" },
};

static const command_line cache_write_line = {
    "cache write",
    "--teacher PATH --text FILE --out DIR [options]",
    "Keeps what a teacher says about a text, for trainers of your own\n"
    "(xd_teacher_cache_open). An interrupted run goes on.",
    "xdistill cache write --teacher smollm2.gguf --text mine.txt --out cache",
    cache_write_table,
    (int)(sizeof cache_write_table / sizeof cache_write_table[0])
};

static xd_result cache_write_parts(xd_ctx *ctx, const cache_options *o, lm *teacher, const tokens *text) {
    cached all;
    const cache_plan plan = { .teacher = teacher,
                              .text = text,
                              .folder = o->out,
                              .k = o->likeliest,
                              .draws = o->draws,
                              .temperature = o->temperature,
                              .ranks = o->ranks,
                              .contexts = o->contexts,
                              .seed = o->seed };
    XD_REQUIRE(ctx, text->count > 0, XD_ERROR_DATA, "the text %s has no token", o->text);
    XD_REQUIRE(ctx, o->likeliest <= teacher->config.vocab, XD_ERROR_ARGUMENT, "--likeliest %d of %d tokens",
               o->likeliest, teacher->config.vocab);
    XD_TRY(lm_load_weights(ctx, teacher));
    XD_TRY(cache_write(ctx, &plan));
    XD_TRY(cached_open(ctx, &plan, &all));
    printf("%s: %lld tokens in %lld parts, %zu bytes, %.1f a token\n", o->out, (long long)text->count,
           (long long)all.part_count, all.bytes, (double)all.bytes / (double)text->count);
    cached_close(ctx, &all);
    return XD_OK;
}

static xd_result cache_write_text(xd_ctx *ctx, const cache_options *o, const char *data, size_t bytes) {
    lm teacher;
    tokens text;
    memset(&text, 0, sizeof text);
    XD_TRY(lm_open(ctx, o->teacher, &teacher));
    xd_result result = tokens_encode(ctx, teacher.tokenizer, data, bytes, &text);
    if (result == XD_OK) result = cache_write_parts(ctx, o, &teacher, &text);
    tokens_free(ctx, &text);
    lm_free(ctx, &teacher);
    return result;
}

static xd_result cache_write_run(xd_ctx *ctx, const cache_options *o) {
    folder_lock *lock = NULL;
    char *data = NULL;
    size_t bytes = 0;
    interrupt_listen();
    XD_TRY(text_load(ctx, o->text, &data, &bytes));
    xd_result result = folder_lock_take(ctx, o->out, "", &lock);
    if (result == XD_OK) result = cache_write_text(ctx, o, data, bytes);
    folder_lock_release(ctx, lock);
    xd_release(ctx, data);
    return result;
}

static int cache_write_command(xd_ctx *ctx, int count, char **words) {
    cache_options o;
    int status;
    memset(&o, 0, sizeof o);
    o.likeliest = o.draws = 6;
    o.temperature = 1.0;
    o.ranks = 2;
    o.seed = 1;
    if (!command_parse(&cache_write_line, count, words, &o, &status)) return status;
    if (!o.teacher || !o.text || !o.out)
        return command_lacks(&cache_write_line, !o.teacher ? "--teacher" : !o.text ? "--text" : "--out");
    return command_end(ctx, "cache write", cache_write_run(ctx, &o));
}

/* ---- inspect ---- */

static const option cache_inspect_table[] = {
    { .name = "--cache",
      .value = "PATH",
      .kind = OPTION_PATH,
      .field = CACHE_FIELD(cache),
      .help = "a file, or a folder of them" },
    { .name = "--positions",
      .value = "N",
      .kind = OPTION_INT,
      .field = CACHE_FIELD(positions),
      .least = 0,
      .most = 1000000,
      .help = "first ones of each file that are printed with their tokens (0)" },
};

static const command_line cache_inspect_line = {
    "cache inspect",
    "--cache PATH [options]",
    "Lists files of a teacher's predictions. Each is read and checked whole.",
    "xdistill cache inspect --cache run/cache --positions 3",
    cache_inspect_table,
    (int)(sizeof cache_inspect_table / sizeof cache_inspect_table[0])
};

/* A position on a line: the token, the next one and its log-probability, then ids and probabilities. */
static xd_result cache_print_positions(xd_ctx *ctx, const xd_teacher_cache *file, int64_t count,
                                       const xd_teacher_cache_desc *d) {
    int32_t ids[XD_CACHE_MAX_K];
    double probabilities[XD_CACHE_MAX_K];
    const int64_t entries = d->k + d->draws;
    const bool drawn = d->draws > 0;
    for (int64_t i = 0; i < count; i++) {
        xd_cached_position at;
        const xd_teacher_cache_read_desc read = { i, 1, &at, ids, probabilities };
        XD_TRY(xd_teacher_cache_read(ctx, file, &read));
        printf("  %lld: %d -> %d %.3f |", (long long)i, (int)at.id, (int)at.next, at.next_log_prob);
        for (int64_t e = 0; e < entries; e++)
            if (probabilities[e] > 0.0) printf(" %d %.4f", (int)ids[e], probabilities[e]);
        printf("; %s %.4f\n", drawn ? "the drawn ones are for" : "the rest", at.tail);
    }
    return XD_OK;
}

static xd_result cache_inspect_file(xd_ctx *ctx, const cache_options *o, const char *path) {
    xd_teacher_cache *file = NULL;
    XD_TRY(xd_teacher_cache_open(ctx, &(xd_teacher_cache_open_desc){ .path = path }, &file));
    const xd_teacher_cache_info info = xd_teacher_cache_describe(file);
    const int64_t shown = o->positions < info.positions ? o->positions : info.positions;
    printf("%s: teacher %s, positions %lld, documents %lld, vocabulary %lld, likeliest %lld, draws %lld, "
           "temperature %g, %zu bytes\n",
           ranks_base_name(path), info.desc.name, (long long)info.positions, (long long)info.documents,
           (long long)info.desc.vocabulary, (long long)info.desc.k, (long long)info.desc.draws,
           info.desc.temperature, info.bytes);
    const xd_result result = cache_print_positions(ctx, file, shown, &info.desc);
    xd_teacher_cache_close(file);
    return result;
}

static bool cache_is_part(const char *name) {
    const size_t length = strlen(name);
    return length > 8 && strcmp(name + length - 8, ".xdcache") == 0;
}

static xd_result cache_inspect_folder(xd_ctx *ctx, const cache_options *o) {
    const char **names = NULL;
    char path[1024];
    int64_t count = 0, parts = 0;
    XD_TRY(xd_file_list(ctx, o->cache, &names, &count));
    xd_result result = XD_OK;
    for (int64_t i = 0; i < count && result == XD_OK; i++) {
        if (!cache_is_part(names[i])) continue;
        snprintf(path, sizeof path, "%s/%.500s", o->cache, names[i]);
        result = cache_inspect_file(ctx, o, path);
        parts++;
    }
    if (result == XD_OK && parts == 0)
        result = XD_FAIL(ctx, XD_ERROR_MISSING, "%s has no file NAME.xdcache", o->cache);
    xd_release(ctx, (void *)names);
    return result;
}

static xd_result cache_inspect_run(xd_ctx *ctx, const cache_options *o) {
    struct stat info;
    XD_REQUIRE(ctx, stat(o->cache, &info) == 0, XD_ERROR_IO, "cannot open %s: %s", o->cache, strerror(errno));
    return S_ISDIR(info.st_mode) ? cache_inspect_folder(ctx, o) : cache_inspect_file(ctx, o, o->cache);
}

static int cache_inspect_command(xd_ctx *ctx, int count, char **words) {
    cache_options o;
    int status;
    memset(&o, 0, sizeof o);
    if (!command_parse(&cache_inspect_line, count, words, &o, &status)) return status;
    if (!o.cache) return command_lacks(&cache_inspect_line, "--cache");
    return command_end(ctx, "cache inspect", cache_inspect_run(ctx, &o));
}

int command_cache(xd_ctx *ctx, int count, char **words) {
    static const command_verb verbs[] = { { "write", cache_write_command, &cache_write_line },
                                          { "inspect", cache_inspect_command, &cache_inspect_line } };
    return command_of_verbs("cache", verbs, 2, ctx, count, words);
}
