/* demo_data.c - finds the files of a folder of data; demo_data.h has the layout. */
#include "demo_data.h"

#include <stdio.h>
#include <string.h>

static const char demo_default_directory[] = "data";

/* out = directory/name, which is there; or "". */
static bool demo_try_path(const char *directory, const char *name, demo_path out) {
    snprintf(out, sizeof(demo_path), "%s/%s", directory, name);
    if (demo_is_file(out)) return true;
    out[0] = 0;
    return false;
}

static xd_result demo_find_text(xd_ctx *ctx, const char *directory, const char *const names[2],
                                demo_path out) {
    if (demo_try_path(directory, names[0], out) || demo_try_path(directory, names[1], out)) return XD_OK;
    return XD_FAIL(ctx, XD_ERROR_MISSING, "%s has no %s (nor %s): data/README.md tells what --data takes",
                   directory, names[0], names[1]);
}

/* The folder `name` that has `file`: here, or in the default one. */
static void demo_find_folder(const char *directory, const char *name, const char *file, demo_path out) {
    const char *const places[] = { directory, demo_default_directory };
    demo_path path;
    for (int i = 0; i < 2; i++) {
        snprintf(out, sizeof(demo_path), "%s/%s", places[i], name);
        if (demo_try_path(out, file, path)) return;
    }
    snprintf(out, sizeof(demo_path), "%s/%s", directory, name); /* what opens it says that it is missing */
}

xd_result demo_data_find(xd_ctx *ctx, const char *directory, bool trains, demo_data *out) {
    static const char *const texts[] = { "text.txt", "kjv_student.txt" };
    static const char *const heldouts[] = { "heldout.txt", "kjv_heldout.txt" };
    memset(out, 0, sizeof *out);
    demo_find_folder(directory, "student", "tokenizer.json", out->tokenizer);
    demo_find_folder(directory, "teacher", "model.safetensors", out->teacher);
    XD_TRY(demo_find_text(ctx, directory, heldouts, out->heldout));
    if (trains) XD_TRY(demo_find_text(ctx, directory, texts, out->text));
    if (!demo_try_path(directory, "teacher.xdcache", out->cache))
        (void)demo_try_path(directory, "smollm2/kjv_student.xdcache", out->cache);
    return XD_OK;
}
