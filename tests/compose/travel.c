/* travel.c - weights on their way from one layout to the next in files of others: under other names, as a model directory that rank 0
 * writes, or in pieces of all ranks. */
#include "rank.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH_ROOM = 256, NAME_ROOM = 96 };

typedef struct travel {
    char directory[PATH_ROOM], theirs[PARTS][NAME_ROOM];
    xd_weight_map maps[PARTS];
    xd_mapped_weights weights;
} travel;

static void name_all(const rank *r, travel *t) {
    memset(t, 0, sizeof *t);
    snprintf(t->directory, sizeof t->directory, "%s/theirs", r->job->directory);
    for (int64_t i = 0; i < r->count; i++) {
        snprintf(t->theirs[i], sizeof t->theirs[i], "transformer.%s", r->parts[i].name);
        t->maps[i].theirs = t->theirs[i];
        t->maps[i].ours = r->parts[i].name;
    }
    t->weights.parts = r->parts;
    t->weights.part_count = r->count;
    t->weights.maps = t->maps;
    t->weights.map_count = r->count;
}

/* A directory without files. */
static xd_result make_empty(xd_ctx *ctx, const char *path) {
    mkdir(path, 0777);
    DIR *entries = opendir(path);
    XD_REQUIRE(ctx, entries, XD_ERROR_IO, "%s cannot be read", path);
    for (const struct dirent *e = readdir(entries); e; e = readdir(entries)) {
        char file[PATH_ROOM + NAME_ROOM + 256];
        snprintf(file, sizeof file, "%s/%s", path, e->d_name);
        unlink(file); /* not . and .. */
    }
    closedir(entries);
    return XD_OK;
}

xd_result travel_out(const rank *r) {
    travel t;
    name_all(r, &t);
    XD_TRY(xd_agree(r->over, xd_comm_rank(r->over) == 0 ? make_empty(r->home, t.directory) : XD_OK));
    const xd_weights_export_desc d = { .directory = t.directory,
                                       .weights = t.weights,
                                       .pieces = r->job->config->imports == 2 };
    return xd_weights_export(r->over, &d);
}

xd_result travel_in(const rank *r) {
    travel t;
    name_all(r, &t);
    for (int64_t i = 0; i < r->count; i++) { /* none of what is there now stays */
        const xd_tensor_part *p = &r->parts[i];
        const size_t bytes = (size_t)(p->range.end - p->range.begin) * xd_dtype_size(p->dtype);
        if (bytes > 0) memset(p->data, 0xff, bytes);
    }
    const xd_weights_import_desc d = { .directory = t.directory, .weights = t.weights };
    return xd_weights_import(r->over, &d, NULL);
}
