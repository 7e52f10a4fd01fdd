/* A clone without Git LFS has a pointer in the place of each large file: every reader says so. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "makers.h"
#include "xd_test.h"
#include "checkpoint_files.h"
#include "weights_calls.h"

static const char pointer[] =
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n";
enum { BYTES = sizeof pointer - 1 };

static void check(xd_ctx *ctx, const char *call, xd_result result) {
    const char *message = xd_last_error(ctx)->message;
    CHECK_EQ_INT(result, XD_ERROR_FORMAT);
    if (!strstr(message, "is a pointer of Git LFS, not the file itself")) CHECK_EQ_STR(message, call);
}

static const char *put_file(xd_ctx *ctx, const char *root, const char *name, const void *data, size_t bytes) {
    static char path[200];
    snprintf(path, sizeof path, "%s/%s", root, name);
    CHECK_EQ_INT(xd_file_save(ctx, path, data, bytes), XD_OK);
    return path;
}

XD_TEST(a_pointer_of_git_lfs_is_called_that_by_every_reader_of_a_file) {
    xd_ctx *ctx = NULL;
    char *text = NULL;
    size_t bytes = 0;
    xd_json *json = NULL;
    xd_weights *tensors = NULL;
    xd_tokenizer *tokenizer = NULL;
    xd_projection projection;
    xd_teacher_cache *cache = NULL;
    xd_weights_desc stream;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    const char *root = new_root();
    const char *path = put_file(ctx, root, "file", pointer, BYTES);
    memset(&stream, 0, sizeof stream);
    stream.mode = XD_WEIGHTS_STREAM;
    check(ctx, "xd_file_load", xd_file_load(ctx, path, 0, &text, &bytes));
    check(ctx, "xd_json_load", xd_json_load(ctx, NULL, path, &json));
    check(ctx, "a file", weights_open_file(ctx, path, NULL, &tensors));
    CHECK(strstr(xd_last_error(ctx)->message, root) != NULL);
    check(ctx, "a file, stream", weights_open_file(ctx, path, &stream, &tensors));
    check(ctx, "xd_tokenizer_load", tokenizer_load(ctx, path, NULL, &tokenizer));
    check(ctx, "xd_projection_load", projection_load(ctx, path, NULL, &projection));
    check(ctx, "xd_teacher_cache_open", cache_open(ctx, path, NULL, &cache));
    remove_all(root);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_pointer_of_git_lfs_is_called_that_in_memory) {
    xd_ctx *ctx = NULL;
    xd_json *json = NULL;
    xd_weights *tensors = NULL;
    xd_tokenizer *tokenizer = NULL;
    xd_projection projection;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    check(ctx, "xd_json_load_memory", xd_json_load_memory(ctx, NULL, pointer, BYTES, &json));
    check(ctx, "bytes of a file", weights_open_memory(ctx, pointer, BYTES, NULL, &tensors));
    check(ctx, "xd_tokenizer_load, bytes", tokenizer_load_memory(ctx, pointer, BYTES, NULL, &tokenizer));
    check(ctx, "xd_projection_load, bytes", projection_load_memory(ctx, pointer, BYTES, NULL, &projection));
    xd_ctx_destroy(ctx);
}

XD_TEST(a_pointer_of_git_lfs_is_called_that_in_directories) {
    static const char index[] = "{\"weight_map\":{\"w\":\"part.safetensors\"}}";
    xd_ctx *ctx = NULL;
    xd_weights *files = NULL;
    xd_checkpoint *checkpoint = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    const char *root = new_root();
    put_file(ctx, root, "model.safetensors.index.json", pointer, BYTES);
    check(ctx, "the index", weights_open_directory(ctx, root, NULL, &files));
    put_file(ctx, root, "model.safetensors.index.json", index, sizeof index - 1);
    put_file(ctx, root, "part.safetensors", pointer, BYTES);
    check(ctx, "a shard", weights_open_directory(ctx, root, NULL, &files));
    put_file(ctx, root, "model.safetensors", pointer, BYTES);
    check(ctx, "the model", weights_open_directory(ctx, root, NULL, &files));
    put_file(ctx, root, "manifest.json", pointer, BYTES);
    check(ctx, "xd_checkpoint_open",
          xd_checkpoint_open(ctx, &(xd_checkpoint_desc){ .directory = root }, &checkpoint));
    remove_all(root);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
