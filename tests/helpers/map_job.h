/* map_job.h - an import or an export of a map_scene, with what a test of it wants and finds. */
#ifndef MAP_JOB_H
#define MAP_JOB_H

#include "map_scene.h"

typedef struct map_job {
    const char *from, *to;
    int cut;
    size_t staging_bytes;
    uint64_t max_shard_bytes;
    int64_t wrong, loaded;
} map_job;

static xd_result map_import(xd_comm *world, map_scene *s, const map_job *j, xd_checkpoint_report *report) {
    xd_weights_import_desc d;
    memset(&d, 0, sizeof d);
    d.directory = j->from;
    d.weights = map_weights(s);
    d.staging_bytes = j->staging_bytes;
    return xd_weights_import(world, &d, report);
}

static xd_result map_export(xd_comm *world, map_scene *s, const map_job *j) {
    xd_weights_export_desc d;
    memset(&d, 0, sizeof d);
    d.directory = j->to;
    d.weights = map_weights(s);
    d.staging_bytes = j->staging_bytes;
    d.max_shard_bytes = j->max_shard_bytes;
    return xd_weights_export(world, &d);
}

#endif
