/* Damage to a checkpoint is found and named, and manifests are not trusted. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp, pwrite */
#endif

#include "checkpoint_files.h"
#include "checkpoint_scene.h"

#include <errno.h>
#include <fcntl.h>

/* ---- each byte in turn ---- */

XD_TEST(every_flipped_byte_of_a_checkpoint_is_found) {
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    scene *s = (scene *)malloc(sizeof *s);
    const xd_ctx_desc plain = scene_ctx_desc();
    const char *root = new_root(), *directory = path_in(root, "step-2");
    const xd_checkpoint_file config = { "config.json", "{}\n", 3 };
    xd_checkpoint_save_desc desc;
    const char **names = NULL;
    int64_t count = 0;
    size_t all = 0;
    char file[400];
    CHECK_EQ_INT(xd_ctx_create(&plain, &ctx), XD_OK);
    CHECK_EQ_INT(xd_comm_self(ctx, &self), XD_OK);
    scene_create(s, ctx, 0, 1, 0);
    memset(&desc, 0, sizeof desc);
    s->network.average_count = 0;
    desc.root = root;
    desc.step = 2;
    desc.networks = &s->network;
    desc.network_count = 1;
    desc.files = &config;
    desc.file_count = 1;
    desc.block_bytes = 4096;
    CHECK_EQ_INT(xd_checkpoint_save(self, &desc), XD_OK);
    CHECK_EQ_INT(xd_checkpoint_verify(ctx, directory), XD_OK);
    CHECK_EQ_INT(xd_file_list(ctx, directory, &names, &count), XD_OK);
    CHECK_EQ_INT(count, 5);
    for (int64_t i = 0; i < count; i++) {
        char *data = NULL;
        size_t bytes = 0;
        snprintf(file, sizeof file, "%s/%s", directory, names[i]);
        CHECK_EQ_INT(xd_file_load(ctx, file, 0, &data, &bytes), XD_OK);
        all += bytes;
        FILE *f = fopen(file, "r+b");
        for (size_t k = 0; f && k < bytes; k++) {
            const char flipped = (char)(data[k] ^ 1 << k % 8);
            CHECK(pwrite(fileno(f), &flipped, 1, (off_t)k) == 1);
            const xd_result result = xd_checkpoint_verify(ctx, directory);
            CHECK(result == XD_ERROR_CORRUPT || result == XD_ERROR_FORMAT);
            CHECK(strstr(xd_last_error(ctx)->message, names[i]) != NULL);
            CHECK(pwrite(fileno(f), data + k, 1, (off_t)k) == 1);
        }
        if (f) fclose(f);
        CHECK_EQ_INT(xd_checkpoint_verify(ctx, directory), XD_OK);
        CHECK(truncate(file, (off_t)bytes - 1) == 0);
        CHECK(xd_checkpoint_verify(ctx, directory) != XD_OK);
        int64_t step = -1;
        CHECK_EQ_INT(xd_checkpoint_find(ctx, root, &step), XD_ERROR_MISSING);
        CHECK_EQ_INT(step, -1);
        CHECK(remove(file) == 0);
        CHECK_EQ_INT(xd_checkpoint_verify(ctx, directory),
                     strcmp(names[i], "manifest.json") == 0 ? XD_ERROR_IO : XD_ERROR_MISSING);
        write_file(file, data, bytes);
        xd_release(ctx, data);
    }
    CHECK(all > 8192 && all <= 32768);
    CHECK_EQ_INT(xd_checkpoint_verify(ctx, directory), XD_OK);
    xd_release(ctx, (void *)names);
    remove_all(root);
    scene_destroy(s);
    free(s);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

/* ---- damage that a load meets ---- */

enum { BIG = 3 << 20 /* elements: three blocks of the default size, and the header */ };

static uint64_t bytes_read; /* by all calls of the counting context */

static int count_read(void *user, intptr_t file, void *buffer, size_t bytes, uint64_t offset) {
    (void)user;
    bytes_read += bytes;
    return pread((int)file, buffer, bytes, (off_t)offset) == (ssize_t)bytes ? 0 : EIO;
}

typedef struct big {
    xd_ctx *ctx;
    xd_comm *self;
    float *values;
    xd_tensor_part part[2];
    xd_checkpoint_network network;
    xd_checkpoint_load_desc load;
    char root[64];
} big;

static void big_create(big *b) {
    xd_ctx_desc desc = scene_ctx_desc();
    xd_checkpoint_save_desc save;
    memset(b, 0, sizeof *b);
    desc.files.read = count_read;
    CHECK_EQ_INT(xd_ctx_create(&desc, &b->ctx), XD_OK);
    CHECK_EQ_INT(xd_comm_self(b->ctx, &b->self), XD_OK);
    b->values = (float *)malloc(2 * BIG * sizeof *b->values);
    for (int i = 0; i < 2 * BIG; i++) b->values[i] = (float)i;
    for (int i = 0; i < 2; i++) {
        b->part[i].name = i ? "second" : "first";
        b->part[i].dtype = XD_DTYPE_F32;
        b->part[i].ndim = 2;
        b->part[i].shape[0] = 3072;
        b->part[i].shape[1] = 1024;
        b->part[i].range.end = BIG;
        b->part[i].data = b->values + i * BIG;
    }
    b->network.parts = b->part;
    b->network.part_count = 2;
    strcpy(b->root, new_root());
    memset(&save, 0, sizeof save);
    save.root = b->load.root = b->root;
    save.networks = b->load.networks = &b->network;
    save.network_count = b->load.network_count = 1;
    CHECK_EQ_INT(xd_checkpoint_save(b->self, &save), XD_OK);
    memset(b->values, 0, 2 * BIG * sizeof *b->values);
}

static void big_destroy(big *b) {
    remove_all(b->root);
    free(b->values);
    xd_comm_destroy(b->self);
    xd_ctx_destroy(b->ctx);
}

XD_TEST(a_load_reads_what_the_rank_holds_and_the_blocks_of_that) {
    big b;
    xd_region columns;
    const uint64_t block = 4 << 20;
    big_create(&b);
    b.part[1].range.end = 0; /* no element of it */
    b.part[0].range.begin = 10;
    b.part[0].range.end = 20;
    b.load.check = XD_CHECKPOINT_CHECK_NONE;
    bytes_read = 0;
    CHECK_EQ_INT(xd_checkpoint_load(b.self, &b.load, NULL, NULL), XD_OK);
    const uint64_t others = bytes_read - 40; /* manifest, state */
    CHECK(others < 10000);
    for (int i = 0; i < 10; i++) CHECK_NEAR(b.values[i], 10 + i, 0);
    b.load.check = XD_CHECKPOINT_CHECK_TOUCHED;
    bytes_read = 0;
    CHECK_EQ_INT(xd_checkpoint_load(b.self, &b.load, NULL, NULL), XD_OK);
    CHECK_EQ_INT(bytes_read - others, 40 + block);
    b.load.check = XD_CHECKPOINT_CHECK_ALL;
    bytes_read = 0;
    CHECK_EQ_INT(xd_checkpoint_load(b.self, &b.load, NULL, NULL), XD_OK);
    CHECK(bytes_read > 2 * (uint64_t)BIG * 4 && bytes_read < 2 * (uint64_t)BIG * 4 + 20000);

    /* a column: its rows are near each other, so one read has many of them */
    columns = region_whole(2, b.part[0].shape);
    columns.interval[1][0].begin = 1000;
    b.part[0].region = &columns;
    b.part[0].range.begin = 0;
    b.part[0].range.end = 3072 * 24;
    b.load.check = XD_CHECKPOINT_CHECK_NONE;
    b.load.staging_bytes = 1 << 20;
    bytes_read = 0;
    CHECK_EQ_INT(xd_checkpoint_load(b.self, &b.load, NULL, NULL), XD_OK);
    CHECK(bytes_read - others < (uint64_t)BIG * 4);
    for (int row = 0; row < 3072; row++)
        for (int k = 0; k < 24; k++) CHECK_NEAR(b.values[row * 24 + k], row * 1024 + 1000 + k, 0);
    big_destroy(&b);
}

XD_TEST(a_damaged_block_is_named_with_its_tensors_and_nothing_is_loaded) {
    big b;
    struct stat info;
    big_create(&b);
    const char *file = path_in(path_in(b.root, "step-0"), "model.safetensors");
    CHECK(stat(file, &info) == 0);
    CHECK_EQ_INT(info.st_size % 4096, 0); /* the header fills whole pages, and so do these tensors */
    const int handle = open(file, O_RDWR);
    CHECK(pwrite(handle, "x", 1, 9 << 20) == 1);
    close(handle);
    CHECK_EQ_INT(xd_checkpoint_load(b.self, &b.load, NULL, NULL), XD_ERROR_CORRUPT);
    const char *message = xd_last_error(b.ctx)->message;
    CHECK(strstr(message, "step-0/model.safetensors: block 2 (4194304 bytes at 8388608)") != NULL);
    CHECK(strstr(message, "\"first\"") != NULL && strstr(message, "\"second\"") == NULL);
    for (int i = 0; i < 2 * BIG; i += 1000) CHECK_NEAR(b.values[i], 0, 0);
    CHECK_EQ_INT(xd_checkpoint_verify(b.ctx, path_in(b.root, "step-0")), XD_ERROR_CORRUPT);
    b.part[0].range.end = 1 << 20; /* what this rank holds now lies in whole blocks */
    b.part[1].range.begin = BIG - (1 << 20);
    CHECK_EQ_INT(xd_checkpoint_load(b.self, &b.load, NULL, NULL), XD_OK);
    CHECK_NEAR(b.values[(1 << 20) - 1], (1 << 20) - 1, 0);
    CHECK_NEAR(b.values[BIG], 2 * BIG - (1 << 20), 0);
    big_destroy(&b);
}

/* ---- manifests that lie ---- */

/* The manifest with one text replaced by another, and its checksum set right. */
static xd_result open_edited(xd_ctx *ctx, const char *manifest, const char *from, const char *to) {
    xd_checkpoint *c = NULL;
    const char *at = strstr(manifest, from);
    char *text = (char *)malloc(strlen(manifest) + strlen(to) + 1);
    CHECK(at != NULL);
    sprintf(text, "%.*s%s%s", at ? (int)(at - manifest) : 0, manifest, to, at ? at + strlen(from) : "");
    char *self = strstr(text, "\"self\":\"");
    if (self && strlen(self) == 19) {
        char digits[9];
        memcpy(self + 8, "00000000", 8);
        snprintf(digits, sizeof digits, "%08x", (unsigned)xd_crc32c(0, text, strlen(text)));
        memcpy(self + 8, digits, 8);
    }
    const xd_result result =
        xd_checkpoint_open(ctx, &(xd_checkpoint_desc){ .text = text, .bytes = strlen(text) }, &c);
    xd_checkpoint_close(c);
    free(text);
    return result;
}

XD_TEST(a_manifest_with_bad_content_and_the_right_checksum_is_refused) {
    static const struct {
        const char *from, *to, *says;
    } edits[] = {
        { "\"format\":1", "\"format\":2", "format 2" },
        { "\"step\":0", "\"step\":-1", "no step" },
        { "\"step\":0", "\"step\":1.5", "no step" },
        { "\"block_bytes\":4194304", "\"block_bytes\":4194305", "blocks of 4194305 bytes" },
        { "\"block_bytes\":4194304", "\"block_bytes\":1", "blocks of 1 bytes" },
        { "\"block_bytes\":4194304", "\"block_bytes\":4096", "blocks, not" },
        { "\"files\":[", "\"files\":{\"x\":[", "" },
        { "\"files\":[", "\"other\":[", "no list of files" },
        { "\"tensors\":[", "\"other\":[", "no list of tensors" },
        { "\"model.safetensors\"", "\"../model.safetensors\"", "does not lie in the directory" },
        { "\"model.safetensors\"", "\"/etc/passwd\"", "does not lie in the directory" },
        { "\"model.safetensors\"", "\"manifest.json\"", "does not lie in the directory" },
        { "\"model.safetensors\"", "\"state.json\"", "two files are named" },
        { "\"group\":\"model\"", "\"group\":\"\"", "the group is no name" },
        { "\"group\":\"model\",", "", "lies in no file of tensors" },
        { "\"bytes\":25169920", "\"bytes\":99999999999999999999", "no length" },
        { "\"bytes\":25169920", "\"bytes\":9223372036854775807", "blocks, not" },
        { "\"bytes\":25169920", "\"bytes\":25169921", "the file at 25169921" },
        { "\"bytes\":25169920", "\"bytes\":25169919", "the file at 25169919" },
        { "\"bytes\":25169920", "\"bytes\":-1", "no length" },
        { "\"blocks\":[", "\"blocks\":[4294967296,", "blocks, not" },
        { "\"blocks\":[", "\"blocks\":[\"", "" },
        { "\"name\":\"first\"", "\"name\":\"second\"", "two tensors of model are named" },
        { "\"name\":\"first\"", "\"name\":\"\"", "has no name" },
        { "\"file\":0", "\"file\":2", "lies in no file" },
        { "\"file\":0", "\"file\":1", "lies in no file" },
        { "\"file\":0", "\"file\":-1", "lies in no file" },
        { "\"dtype\":\"F32\"", "\"dtype\":\"F33\"", "unknown dtype" },
        { "\"dtype\":\"F32\"", "\"dtype\":\"F64\"", "needs 25165824 bytes" },
        { "\"shape\":[3072,1024]", "\"shape\":[3072,1025]", "needs 12595200 bytes" },
        { "\"shape\":[3072,1024]", "\"shape\":[3072,-1]", "size 1 of its shape" },
        { "\"shape\":[3072,1024]", "\"shape\":[9223372036854775807,1024]", "overflows" },
        { "\"shape\":[3072,1024]", "\"shape\":[1,1,1,1,1,1,1,1,3072,1024]", "has 10 dimensions" },
        { "\"begin\":4096", "\"begin\":4095", "begins at 4095" },
        { "\"begin\":4096", "\"begin\":0", "begins at 0" },
        { "\"begin\":4096,\"end\":12587008", "\"begin\":4100,\"end\":12587012", "the one before ends at" },
        { "\"begin\":4096,\"end\":12587008", "\"begin\":4096,\"end\":12587000", "needs 12582912 bytes" },
        { "\"fingerprint\":\"", "\"fingerprint\":\"g", "no fingerprint" },
        { "\"self\":\"", "\"self\":\"0", "does not end with its checksum" },
        { "\"}\n", "\"}", "does not end with its checksum" },
    };
    big b;
    char *manifest = NULL;
    size_t bytes = 0;
    big_create(&b);
    const char *path = path_in(path_in(b.root, "step-0"), "manifest.json");
    CHECK_EQ_INT(xd_file_load(b.ctx, path, 0, &manifest, &bytes), XD_OK);
    CHECK_EQ_INT(open_edited(b.ctx, manifest, "first", "first"), XD_OK);
    for (size_t i = 0; i < sizeof edits / sizeof edits[0]; i++) {
        const xd_result result = open_edited(b.ctx, manifest, edits[i].from, edits[i].to);
        CHECK_EQ_INT(result, XD_ERROR_FORMAT);
        if (!strstr(xd_last_error(b.ctx)->message, edits[i].says))
            CHECK_EQ_STR(xd_last_error(b.ctx)->message, edits[i].says);
    }
    for (size_t length = 0; length < bytes; length += 1 + length / 40) { /* cut short */
        xd_checkpoint *c = NULL;
        CHECK_EQ_INT(
            xd_checkpoint_open(b.ctx, &(xd_checkpoint_desc){ .text = manifest, .bytes = length }, &c),
            XD_ERROR_FORMAT);
        CHECK(c == NULL);
    }
    xd_release(b.ctx, manifest);
    big_destroy(&b);
}

XD_TEST(a_manifest_that_differs_from_a_header_or_a_fingerprint_is_found_by_verify) {
    static const char *const edits[][3] = {
        { "\"name\":\"first\"", "\"name\":\"third\"",
          "the manifest and the header differ about tensor \"third\"" },
        { "\"fingerprint\":\"", NULL, "has fingerprint" },
        { "\"crc32c\":", NULL, "has checksum" },
    };
    big b;
    char *manifest = NULL;
    size_t bytes = 0;
    big_create(&b);
    const char *directory = path_in(b.root, "step-0"), *path = path_in(directory, "manifest.json");
    CHECK_EQ_INT(xd_file_load(b.ctx, path, 0, &manifest, &bytes), XD_OK);
    for (size_t i = 0; i < sizeof edits / sizeof edits[0]; i++) {
        char *text = (char *)malloc(bytes + 1), digits[9];
        memcpy(text, manifest, bytes + 1);
        char *at = strstr(text, edits[i][0]);
        CHECK(at != NULL);
        if (!at) continue;
        if (edits[i][1])
            memcpy(at, edits[i][1], strlen(edits[i][1]));
        else
            at[strlen(edits[i][0])] = at[strlen(edits[i][0])] == '1' ? '2' : '1';
        memcpy(text + bytes - 11, "00000000", 8);
        snprintf(digits, sizeof digits, "%08x", (unsigned)xd_crc32c(0, text, bytes));
        memcpy(text + bytes - 11, digits, 8);
        write_file(path, text, bytes);
        CHECK_EQ_INT(xd_checkpoint_verify(b.ctx, directory), XD_ERROR_CORRUPT);
        if (!strstr(xd_last_error(b.ctx)->message, edits[i][2]))
            CHECK_EQ_STR(xd_last_error(b.ctx)->message, edits[i][2]);
        free(text);
    }
    xd_release(b.ctx, manifest);
    big_destroy(&b);
}

XD_TEST_MAIN()
