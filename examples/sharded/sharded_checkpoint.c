/* sharded_checkpoint.c - saving by all ranks together, and loading on any others. */
#define _POSIX_C_SOURCE 200112L /* opendir, rmdir */
#include "sharded.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The list that saves and loads have in common: the student, its optimizer, its average. */
static xd_checkpoint_network sharded_network(const sharded_student *s, xd_checkpoint_average *average) {
    xd_checkpoint_network network;
    memset(&network, 0, sizeof network);
    average->name = SHARDED_AVERAGE_NAME;
    average->ema = s->average;
    network.parts = s->parts;
    network.part_count = s->count;
    network.optimizer = s->optimizer;
    network.averages = average;
    network.average_count = 1;
    return network;
}

xd_result sharded_save(const sharded_student *s, const char *directory, int step) {
    xd_checkpoint_average average;
    const xd_checkpoint_network network = sharded_network(s, &average);
    xd_checkpoint_save_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.root = directory;
    desc.step = step;
    desc.networks = &network;
    desc.network_count = 1;
    desc.overwrite = true;
    return xd_checkpoint_save(s->rank->world, &desc);
}

xd_result sharded_load(const sharded_student *s, const char *directory, int *step) {
    xd_checkpoint_average average;
    const xd_checkpoint_network network = sharded_network(s, &average);
    xd_checkpoint_load_desc desc;
    xd_checkpoint_report report;
    memset(&desc, 0, sizeof desc);
    desc.root = directory;
    desc.step = XD_CHECKPOINT_NEWEST;
    desc.networks = &network;
    desc.network_count = 1;
    XD_TRY(xd_checkpoint_load(s->rank->world, &desc, &report, NULL));
    *step = (int)report.step;
    return XD_OK;
}

/* ---- older ones ---- */

/* A folder with its files; checkpoints have no folders inside. */
static bool sharded_remove(const char *path) {
    char file[1500];
    DIR *folder = opendir(path);
    if (!folder) return false;
    for (const struct dirent *entry = readdir(folder); entry; entry = readdir(folder)) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        (void)remove(file);
    }
    (void)closedir(folder);
    return rmdir(path) == 0;
}

xd_result sharded_forget(xd_ctx *ctx, const char *directory) {
    char path[1024];
    xd_result result = XD_OK;
    DIR *folder = opendir(directory);
    XD_REQUIRE(ctx, folder, XD_ERROR_IO, "cannot read the directory %s", directory);
    for (const struct dirent *entry = readdir(folder); entry && result == XD_OK; entry = readdir(folder)) {
        if (strncmp(entry->d_name, "step-", 5) != 0) continue;
        snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
        if (!sharded_remove(path))
            result = XD_FAIL(ctx, XD_ERROR_IO, "cannot remove the checkpoint %s", path);
    }
    (void)closedir(folder);
    return result;
}
