/* real.c - the library on real models and vocabularies; tools/demo_real.sh fetches the files and runs it.
 *
 *   real check MODEL.gguf TEXT...            bits per byte and speed of the model over the beginning of texts
 *   real cache MODEL.gguf TEXT CACHE         what the model says about a text, for later distillation
 *   real student alone TOKENIZER TEXT HELDOUT                 trains a small student on the text,
 *   real student live TOKENIZER TEXT HELDOUT MODEL.gguf       on it and the running model,
 *   real student cached TOKENIZER TEXT HELDOUT MODEL.gguf CACHE   or on it and the cache
 *   real judge MODEL.gguf HELDOUT            what the model is worth on rows of that length, and what it writes
 *   real figure PICTURE.svg DIR...           draws what `student` and `judge` left in folders, prints their samples
 *   real pair STUDENT TEACHER TEXT...        two vocabularies: overlap, projection, alignment, a few steps;
 *                                            --student-preset and --teacher-preset for rank files
 *
 *   --ranks N      threads (2)               --bytes N      read no more of a text
 *   --steps N      of training               --seed N       of training (1)
 *   --out FILE     adds the results to it, a line of JSON each
 *   --save DIR     keeps the student there, as a directory that transformers opens, with its curve; the teacher's
 *                  curve alone
 *   --overwrite    replaces a finished student that is there */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "real.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct real_command {
    const char *name;
    int least, most; /* paths */
    xd_result (*run)(xd_ctx *ctx, const real_options *o);
} real_command;

static const real_command real_commands[] = {
    { "check", 2, 6, real_check },     { "cache", 3, 3, real_cache },
    { "student", 4, 6, real_student }, { "pair", 3, 6, real_pair },
    { "judge", 2, 2, real_judge },     { "figure", 2, REAL_MOST_PATHS, real_figure },
};

static bool real_number(const char *text, int64_t most, int64_t *out) {
    char *end = NULL;
    const long long value = text ? strtoll(text, &end, 10) : 0;
    if (value < 1 || value > most || *end) return false;
    *out = value;
    return true;
}

static bool real_preset(const char *name, xd_tokenizer_preset *out) {
    static const char *const names[] = { "none", "gpt2", "cl100k", "o200k", "llama3", "llama4", "qwen" };
    for (int i = 0; name && i < 7; i++)
        if (strcmp(name, names[i]) == 0) {
            *out = (xd_tokenizer_preset)i;
            return true;
        }
    return false;
}

/* One option and its value; false when it cannot be understood. */
static bool real_option(const char *name, const char *value, real_options *o) {
    int64_t number = 0;
    if (strcmp(name, "--out") == 0) return (o->out = value) != NULL;
    if (strcmp(name, "--save") == 0) return (o->save = value) != NULL && strlen(value) < 400;
    if (strcmp(name, "--student-preset") == 0) return real_preset(value, &o->preset[0]);
    if (strcmp(name, "--teacher-preset") == 0) return real_preset(value, &o->preset[1]);
    if (!real_number(value, (int64_t)1 << 40, &number)) return false;
    if (strcmp(name, "--bytes") == 0) return (o->bytes = number) > 0;
    if (strcmp(name, "--seed") == 0) return (o->seed = (uint64_t)number) > 0;
    if (number > 1000000) return false;
    if (strcmp(name, "--steps") == 0) return (o->steps = (int)number) > 0;
    return strcmp(name, "--ranks") == 0 && number <= 64 && (o->ranks = (int)number) > 0;
}

static bool real_parse(int argc, char **argv, real_options *o) {
    memset(o, 0, sizeof *o);
    o->ranks = 2;
    o->seed = 1;
    if (argc < 2) return false;
    o->command = argv[1];
    for (int i = 2; i < argc; i++) {
        if (strcmp(argv[i], "--overwrite") == 0) {
            o->overwrite = true;
        } else if (argv[i][0] == '-') {
            if (!real_option(argv[i], argv[i + 1], o)) return false; /* argv ends with NULL */
            i++;
        } else {
            if (o->paths == REAL_MOST_PATHS) return false;
            o->path[o->paths++] = argv[i];
        }
    }
    return true;
}

static const real_command *real_command_of(const real_options *o) {
    for (size_t i = 0; i < sizeof real_commands / sizeof real_commands[0]; i++)
        if (strcmp(real_commands[i].name, o->command) == 0 && o->paths >= real_commands[i].least &&
            o->paths <= real_commands[i].most)
            return &real_commands[i];
    return NULL;
}

int main(int argc, char **argv) {
    real_options options;
    xd_ctx *ctx = NULL;
    const real_command *command = real_parse(argc, argv, &options) ? real_command_of(&options) : NULL;
    if (!command) {
        fprintf(stderr, "usage: real check MODEL.gguf TEXT...\n"
                        "       real cache MODEL.gguf TEXT CACHE\n"
                        "       real student alone|live|cached TOKENIZER TEXT HELDOUT [MODEL.gguf [CACHE]]\n"
                        "       real pair STUDENT TEACHER TEXT... [--student-preset NAME] "
                        "[--teacher-preset NAME]\n"
                        "       real judge MODEL.gguf HELDOUT\n"
                        "       real figure PICTURE.svg DIR...\n"
                        "       [--ranks N] [--bytes N] [--steps N] [--seed N] [--out FILE] [--save DIR] "
                        "[--overwrite]\n");
        return 2;
    }
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return 1;
    const xd_result result = command->run(ctx, &options);
    if (result != XD_OK)
        fprintf(stderr, "real: %s: %s\n", xd_result_name(result), xd_last_error(ctx)->message);
    xd_ctx_destroy(ctx);
    return result != XD_OK;
}
