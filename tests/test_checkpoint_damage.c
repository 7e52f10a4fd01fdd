/* Damage to a checkpoint is found and named, and manifests are not trusted. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp, pwrite */
#endif

#include "checkpoint_files.h"
#include "checkpoint_scene.h"

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

XD_TEST_MAIN()
