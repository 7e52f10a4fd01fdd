/* checkpoint_files.h - directories of checkpoints in tests. */
#ifndef CHECKPOINT_FILES_H
#define CHECKPOINT_FILES_H

#include "xdistill.h"
#include "xd_test.h"

#include <dirent.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* An empty directory. The text is overwritten by the next call. */
static inline const char *new_root(void) {
    static char path[64];
    strcpy(path, "/tmp/xdistill-checkpoint-XXXXXX");
    CHECK(mkdtemp(path) != NULL);
    return path;
}

/* root/name. The text is overwritten by the eighth call from here. */
static inline const char *path_in(const char *root, const char *name) {
    static char paths[8][400];
    static int at;
    const size_t length = strlen(root) < 200 ? strlen(root) : 200;
    at = (at + 1) % 8;
    memcpy(paths[at], root, length);
    snprintf(paths[at] + length, sizeof paths[at] - length, "/%.150s", name);
    return paths[at];
}

static inline void remove_all(const char *path) {
    char name[900];
    DIR *d = opendir(path);
    for (const struct dirent *e; d && (e = readdir(d)) != NULL;) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        snprintf(name, sizeof name, "%.600s/%s", path, e->d_name);
        if (remove(name) != 0) remove_all(name);
    }
    if (d) closedir(d);
    rmdir(path);
}

/* The names in a directory, sorted, with a space behind each. The text is overwritten by the next call. */
static inline const char *names_in(xd_ctx *ctx, const char *directory) {
    static char text[2000];
    const char **names = NULL;
    int64_t count = 0;
    size_t used = 0;
    text[0] = '\0';
    CHECK_EQ_INT(xd_file_list(ctx, directory, &names, &count), XD_OK);
    for (int64_t i = 0; i < count; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s ", names[i]);
    xd_release(ctx, (void *)names);
    return text;
}

static inline void write_file(const char *path, const char *data, size_t bytes) {
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(data, 1, bytes, f) == bytes);
    if (f) fclose(f);
}

/* The number of files, and whether each has the same bytes in both directories. */
static inline int compare_directories(xd_ctx *ctx, const char *one, const char *other) {
    const char **names = NULL, **again = NULL;
    int64_t count = 0, other_count = 0;
    CHECK_EQ_INT(xd_file_list(ctx, one, &names, &count), XD_OK);
    CHECK_EQ_INT(xd_file_list(ctx, other, &again, &other_count), XD_OK);
    CHECK_EQ_INT(count, other_count);
    for (int64_t i = 0; i < count && i < other_count; i++) {
        char path[2][300], *text[2] = { NULL, NULL };
        size_t bytes[2] = { 0, 1 };
        CHECK_EQ_STR(names[i], again[i]);
        snprintf(path[0], sizeof path[0], "%s/%s", one, names[i]);
        snprintf(path[1], sizeof path[1], "%s/%s", other, names[i]);
        for (int k = 0; k < 2; k++) CHECK_EQ_INT(xd_file_load(ctx, path[k], 0, &text[k], &bytes[k]), XD_OK);
        CHECK(bytes[0] == bytes[1] && memcmp(text[0], text[1], bytes[0]) == 0);
        for (int k = 0; k < 2; k++) xd_release(ctx, text[k]);
    }
    xd_release(ctx, (void *)names);
    xd_release(ctx, (void *)again);
    return (int)count;
}

#endif
