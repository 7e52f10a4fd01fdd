/* real_keep.c - what stays of a model that was trained or measured: curve.json beside it. */
#include "real.h"

#include "../common/json_fields.h"

#include <stdio.h>
#include <string.h>

xd_result real_keep_begin(xd_ctx *ctx, const real_options *o) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    XD_REQUIRE(ctx, o->overwrite || !model_directory_is_finished(o->save), XD_ERROR_STATE,
               "%s holds a finished model: --overwrite replaces it, --save names another folder", o->save);
    XD_REQUIRE(ctx, files->make_directory(files->user, o->save) == 0, XD_ERROR_IO,
               "cannot make the directory %s", o->save);
    return XD_OK;
}

static void real_write_doubles(xd_json_writer *w, const char *key, const double *values, int count) {
    xd_json_write_key(w, key);
    xd_json_write_array(w);
    for (int i = 0; i < count; i++) xd_json_write_double(w, values[i]);
    xd_json_write_end(w);
}

static void real_write_curve(xd_json_writer *w, const real_curve *curve) {
    xd_json_write_object(w);
    json_field_string(w, "name", curve->name);
    json_field_int(w, "vocabulary", curve->vocabulary);
    json_field_string(w, "sample", curve->sample);
    json_field_double(w, "bits_per_byte", curve->end);
    xd_json_write_key(w, "losses");
    xd_json_write_array(w);
    for (int i = 0; i < curve->steps; i++) xd_json_write_double(w, (double)curve->losses[i]);
    xd_json_write_end(w);
    xd_json_write_key(w, "heldout_at");
    xd_json_write_array(w);
    for (int i = 0; i < curve->points; i++) xd_json_write_int64(w, curve->heldout_at[i]);
    xd_json_write_end(w);
    real_write_doubles(w, "heldout", curve->heldout, curve->points);
    xd_json_write_end(w);
}

xd_result real_keep_curve(xd_ctx *ctx, const char *directory, const real_curve *curve) {
    char path[512];
    xd_json_writer w = xd_json_writer_create(ctx);
    real_write_curve(&w, curve);
    snprintf(path, sizeof path, "%s/curve.json", directory);
    return json_save(ctx, &w, path);
}
