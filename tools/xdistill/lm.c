/* lm.c - language models from files. */
#define _POSIX_C_SOURCE 200809L /* stat */
#include "lm.h"
#include "../../examples/common/model_directory.h"
#include "ranks.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

int64_t lm_end_count(const nn_config *c) {
    return (int64_t)c->vocab * c->hidden * (c->tied ? 1 : 2);
}

int64_t lm_weight_count(const nn_config *c) {
    const int64_t attention = (int64_t)c->hidden * c->head_dim * 2 * (c->heads + c->kv_heads);
    const int64_t layer = attention + 3 * (int64_t)c->hidden * c->ffn + 2 * (int64_t)c->hidden;
    return lm_end_count(c) + c->layers * layer + c->hidden;
}

/* ---- tokenizer ---- */

static void lm_find_end(lm *m, int64_t id) {
    m->end_of_text = -1;
    if (id < 0 || id >= xd_tokenizer_describe(m->tokenizer).size) return;
    const xd_token token = xd_tokenizer_token(m->tokenizer, (int32_t)id);
    if (token.length == 0 || token.length >= sizeof m->end_token) return;
    memcpy(m->end_token, token.bytes, token.length);
    m->end_token[token.length] = 0;
    m->end_of_text = (int32_t)id;
}

static xd_result lm_load_tokenizer(xd_ctx *ctx, lm *m) {
    const xd_tokenizer_desc desc = { .data = m->tokenizer_text, .data_bytes = m->tokenizer_bytes };
    XD_TRY(xd_tokenizer_load(ctx, &desc, &m->tokenizer));
    const int64_t size = xd_tokenizer_describe(m->tokenizer).size;
    XD_REQUIRE(ctx, size <= m->config.vocab, XD_ERROR_DATA,
               "%s: the tokenizer has %lld tokens, the embedding %d rows", m->path, (long long)size,
               m->config.vocab);
    return XD_OK;
}

/* ---- GGUF ---- */

bool lm_is_gguf(const char *path) {
    char magic[4] = { 0 };
    FILE *file = fopen(path, "rb");
    const bool whole = file && fread(magic, 1, sizeof magic, file) == sizeof magic;
    if (file) fclose(file);
    return whole && memcmp(magic, "GGUF", 4) == 0;
}

static xd_result lm_open_gguf(xd_ctx *ctx, lm *m) {
    int64_t positions = 0, end = -1;
    XD_REQUIRE(ctx, lm_is_gguf(m->path), XD_ERROR_FORMAT,
               "%s is neither a GGUF file nor a directory of a model", m->path);
    XD_TRY(gguf_open(ctx, m->path, &m->file));
    XD_TRY(gguf_model_config(ctx, m->file, &m->config));
    XD_TRY(gguf_model_tokenizer_json(ctx, m->file, &m->tokenizer_text, &m->tokenizer_bytes));
    XD_TRY(lm_load_tokenizer(ctx, m));
    if (gguf_model_context(m->file, &positions) && positions > 0 && positions < 1 << 24)
        m->positions = (int)positions;
    (void)gguf_int(m->file, "tokenizer.ggml.eos_token_id", &end);
    lm_find_end(m, end);
    return XD_OK;
}

/* ---- directories ---- */

/* What config.json says beside the sizes; "eos_token_id" may be a list. */
static xd_result lm_read_config(xd_ctx *ctx, lm *m, int64_t *end) {
    char path[512];
    xd_json *root = NULL;
    int64_t positions = 0;
    snprintf(path, sizeof path, "%s/config.json", m->path);
    XD_TRY(xd_json_load(ctx, NULL, path, &root));
    const xd_json *eos = xd_json_find(root, "eos_token_id");
    if (!xd_json_int64(eos, end)) (void)xd_json_int64(xd_json_first(eos), end);
    if (xd_json_int64(xd_json_find(root, "max_position_embeddings"), &positions) && positions > 0 &&
        positions < 1 << 24)
        m->positions = (int)positions;
    xd_json_destroy(ctx, root);
    return XD_OK;
}

/* A run's folder is named more often than the student in it. */
static xd_result lm_check_directory(xd_ctx *ctx, const char *directory) {
    char path[512];
    struct stat info;
    snprintf(path, sizeof path, "%s/config.json", directory);
    if (stat(path, &info) == 0) return XD_OK;
    snprintf(path, sizeof path, "%s/student/config.json", directory);
    const bool run = stat(path, &info) == 0;
    return XD_FAIL(ctx, XD_ERROR_IO, run ? "%s is a run: its student is %s/student" : "%s has no config.json",
                   directory, directory);
}

static xd_result lm_open_directory(xd_ctx *ctx, lm *m) {
    char path[512];
    int64_t end = -1;
    XD_REQUIRE(ctx, strlen(m->path) < 400, XD_ERROR_ARGUMENT, "a path of %zu bytes, 400 are allowed",
               strlen(m->path));
    XD_TRY(lm_check_directory(ctx, m->path));
    XD_TRY(model_directory_config(ctx, m->path, &m->config));
    XD_TRY(lm_read_config(ctx, m, &end));
    snprintf(path, sizeof path, "%s/tokenizer.json", m->path);
    XD_TRY(xd_file_load(ctx, path, 0, &m->tokenizer_text, &m->tokenizer_bytes));
    XD_TRY(lm_load_tokenizer(ctx, m));
    lm_find_end(m, end);
    return XD_OK;
}

/* ---- both ---- */

static xd_result lm_open_any(xd_ctx *ctx, lm *m) {
    struct stat info;
    XD_REQUIRE(ctx, stat(m->path, &info) == 0, XD_ERROR_IO, "cannot open the model %s: %s", m->path,
               strerror(errno));
    XD_TRY(S_ISDIR(info.st_mode) ? lm_open_directory(ctx, m) : lm_open_gguf(ctx, m));
    const char *problem = nn_model_init(&m->config, NULL, NULL, &m->model);
    return problem ? XD_FAIL(ctx, XD_ERROR_FORMAT, "%s: %s", m->path, problem) : XD_OK;
}

xd_result lm_open(xd_ctx *ctx, const char *path, lm *out) {
    memset(out, 0, sizeof *out);
    out->path = path;
    out->name = ranks_base_name(path);
    out->positions = 2048;
    out->end_of_text = -1;
    const xd_result result = lm_open_any(ctx, out);
    if (result != XD_OK) lm_free(ctx, out);
    return result;
}

xd_result lm_load_weights(xd_ctx *ctx, lm *m) {
    bool failed = false;
    m->weights = (float *)ranks_room(ctx, m->model.float_count, sizeof *m->weights, &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for the %lld weights of %s",
               (long long)m->model.float_count, m->path);
    return m->file ? gguf_model_weights(ctx, m->file, &m->model, m->weights)
                   : model_directory_weights(ctx, m->path, &m->model, m->weights);
}

void lm_free(xd_ctx *ctx, lm *m) {
    xd_tokenizer_destroy(m->tokenizer);
    xd_release(ctx, m->tokenizer_text);
    xd_release(ctx, m->weights);
    nn_model_free(&m->model);
    gguf_close(m->file);
    memset(m, 0, sizeof *m);
}
