/* vocabulary.c - tokenizers from the files that people have. */
#define _POSIX_C_SOURCE 200809L /* stat */
#include "vocabulary.h"
#include "lm.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static xd_result vocabulary_of_model(xd_ctx *ctx, const char *path, xd_tokenizer **out) {
    lm m;
    XD_TRY(lm_open(ctx, path, &m));
    *out = m.tokenizer;
    m.tokenizer = NULL;
    lm_free(ctx, &m);
    return XD_OK;
}

xd_result vocabulary_open(xd_ctx *ctx, const char *path, xd_tokenizer_preset preset, xd_tokenizer **out) {
    char inside[512];
    struct stat info;
    XD_REQUIRE(ctx, stat(path, &info) == 0, XD_ERROR_IO, "cannot open the tokenizer %s: %s", path,
               strerror(errno));
    if (!S_ISDIR(info.st_mode) && lm_is_gguf(path)) return vocabulary_of_model(ctx, path, out);
    snprintf(inside, sizeof inside, "%s/tokenizer.json", path);
    const xd_tokenizer_desc desc = { .path = S_ISDIR(info.st_mode) ? inside : path, .preset = preset };
    return xd_tokenizer_load(ctx, &desc, out);
}

bool vocabulary_preset(const char *name, xd_tokenizer_preset *out) {
    static const char *const names[] = { "", "gpt2", "cl100k", "o200k", "llama3", "llama4", "qwen" };
    *out = XD_TOKENIZER_PRESET_NONE;
    for (int i = 1; i < (int)(sizeof names / sizeof names[0]); i++)
        if (strcmp(name, names[i]) == 0) *out = (xd_tokenizer_preset)i;
    return *out != XD_TOKENIZER_PRESET_NONE;
}
