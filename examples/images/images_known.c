/* images_known.c - the teacher at 50 steps, which takes longer to measure than a student to train: measured once. */
#include "images.h"

#include "../common/json_fields.h"

#include <stdio.h>
#include <string.h>

static bool images_read_distances(const xd_json *list, int count, double *out) {
    int i = 0;
    for (const xd_json *item = xd_json_first(list); item; item = xd_json_next(item), i++)
        if (i >= count || !xd_json_double(item, &out[i])) return false;
    return i == count;
}

/* What is known is of so many pictures and generations: others are measured. */
static void images_read_known(const xd_json *root, const images_options *options, images_row *row) {
    int64_t count = 0, generations = 0;
    if (!xd_json_int64(xd_json_find(root, "count"), &count) || count != options->count) return;
    if (!xd_json_int64(xd_json_find(root, "generations"), &generations) ||
        generations != options->generations)
        return;
    row->known =
        images_read_distances(xd_json_find(root, "distances"), options->generations, row->distance) &&
        xd_json_double(xd_json_find(root, "accuracy"), &row->accuracy);
    if (!row->known) row->accuracy = 0.0;
}

xd_result images_recall(xd_ctx *ctx, const images_options *options, images_row *row) {
    char path[480];
    xd_json *root = NULL;
    snprintf(path, sizeof path, "%s/teacher_50.json", options->data);
    FILE *file = options->teacher_50 ? NULL : fopen(path, "rb");
    if (!file) return XD_OK;
    fclose(file);
    XD_TRY(xd_json_load(ctx, NULL, path, &root));
    images_read_known(root, options, row);
    xd_json_destroy(ctx, root);
    return XD_OK;
}

xd_result images_remember(xd_ctx *ctx, const images_options *options, const images_row *row) {
    char path[480];
    xd_json_writer writer = xd_json_writer_create(ctx), *w = &writer;
    xd_json_write_object(w);
    json_field_int(w, "count", options->count);
    json_field_int(w, "generations", options->generations);
    xd_json_write_key(w, "distances");
    xd_json_write_array(w);
    for (int i = 0; i < options->generations; i++) xd_json_write_double(w, row->distance[i]);
    xd_json_write_end(w);
    json_field_double(w, "accuracy", row->accuracy);
    xd_json_write_end(w);
    snprintf(path, sizeof path, "%s/teacher_50.json", options->out);
    return json_save(ctx, w, path);
}
