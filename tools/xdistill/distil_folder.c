/* distil_folder.c - the folder of a run: whose it is, with which settings, what is removed from it. */
#define _POSIX_C_SOURCE 200809L /* stat */
#include "distil.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static bool folder_has(const char *out, const char *name) {
    char path[512];
    struct stat info;
    snprintf(path, sizeof path, "%s/%s", out, name);
    return stat(path, &info) == 0;
}

static void folder_remove(const char *out, const char *name) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", out, name);
    (void)remove(path);
}

void distil_forget_states(const char *out) {
    folder_remove(out, "student.state");
    folder_remove(out, "alone.state");
}

/* ---- somebody else's files ---- */

/* Begins with the name of a file that runs leave: half-written ones have more behind it. */
static bool folder_is_ours(const char *name) {
    static const char *const ours[] = { ".lock",       "cache",       "student",    "alone",
                                        "result.json", "report.html", "report.txt", "curves.svg",
                                        "events.out",  "settings.txt" };
    for (size_t i = 0; i < sizeof ours / sizeof ours[0]; i++)
        if (strncmp(name, ours[i], strlen(ours[i])) == 0) return true;
    return false;
}

static xd_result folder_check_others(xd_ctx *ctx, const char *out) {
    const char **names = NULL;
    int64_t count = 0, other = 0;
    XD_TRY(xd_file_list(ctx, out, &names, &count));
    while (other < count && folder_is_ours(names[other])) other++;
    const xd_result result =
        other < count ? XD_FAIL(ctx, XD_ERROR_STATE,
                                "--out %s holds other files, such as %.100s: name a new or empty folder", out,
                                names[other])
                      : XD_OK;
    xd_release(ctx, (void *)names);
    return result;
}

/* ---- settings ---- */

/* Where two lists of settings begin to differ: the item of each, up to its comma. */
static void folder_difference(const char *there, const char *here, char item[2][128]) {
    size_t begin = 0;
    for (size_t i = 0; there[i] && there[i] == here[i]; i++)
        if (there[i] == ',') begin = i + 2;
    snprintf(item[0], 128, "%.*s", (int)strcspn(there + begin, ",\n"), there + begin);
    snprintf(item[1], 128, "%.*s", (int)strcspn(here + begin, ",\n"), here + begin);
}

static xd_result folder_check_settings(distil_run *r, const char *path) {
    char *text = NULL, item[2][128];
    size_t bytes = 0;
    XD_TRY(xd_file_load(r->ctx, path, 4096, &text, &bytes));
    xd_result result = XD_OK;
    if (strcmp(text, r->facts) != 0) {
        folder_difference(text, r->facts, item);
        result = XD_FAIL(r->ctx, XD_ERROR_STATE,
                         "the run in %s was begun with other settings: %s, here %s; give those, or "
                         "--overwrite, or another --out",
                         r->o->out, item[0], item[1]);
    }
    xd_release(r->ctx, text);
    return result;
}

static xd_result folder_settle(distil_run *r, const char *path) {
    if (!r->o->overwrite && folder_has(r->o->out, "settings.txt")) return folder_check_settings(r, path);
    return xd_file_save(r->ctx, path, r->facts, strlen(r->facts));
}

/* An unfinished run with these settings: it goes on, with --overwrite too. */
static bool folder_goes_on(distil_run *r, const char *path) {
    char *text = NULL;
    size_t bytes = 0;
    if (folder_has(r->o->out, "result.json") || !folder_has(r->o->out, "settings.txt")) return false;
    if (xd_file_load(r->ctx, path, 4096, &text, &bytes) != XD_OK) return false;
    const bool same = strcmp(text, r->facts) == 0;
    xd_release(r->ctx, text);
    return same;
}

/* What the old run told goes; what the teacher said stays when it is of this text and these settings. */
static void folder_clear(distil_run *r) {
    static const char *const told[] = { "result.json", "report.html", "report.txt", "curves.svg",
                                        "events.out.tfevents.xdistill" };
    static const char *const model[] = { "model.safetensors",      "config.json",
                                         "generation_config.json", "tokenizer.json",
                                         "tokenizer_config.json",  "" };
    static const char *const students[] = { "alone", "student" };
    for (size_t k = 0; k < 2 * (sizeof model / sizeof model[0]); k++) {
        char folder[512];
        snprintf(folder, sizeof folder, "%s/%s", r->o->out, students[k % 2]);
        if (!r->o->from || strncmp(r->o->from, folder, strlen(folder)) != 0)
            folder_remove(folder, model[k / 2]);
    }
    distil_forget_states(r->o->out);
    for (size_t i = 0; i < sizeof told / sizeof told[0]; i++) folder_remove(r->o->out, told[i]);
    cache_forget_others(r->ctx, &r->plan);
}

xd_result distil_open_folder(distil_run *r) {
    const char *out = r->o->out;
    char path[512];
    struct stat info;
    const bool there = stat(out, &info) == 0;
    XD_REQUIRE(r->ctx, !there || S_ISDIR(info.st_mode), XD_ERROR_IO, "--out %s is a file, not a directory",
               out);
    if (there) XD_TRY(folder_check_others(r->ctx, out));
    XD_TRY(folder_lock_take(r->ctx, out, "", &r->lock));
    snprintf(r->cache_folder, sizeof r->cache_folder, "%s/cache", out);
    XD_REQUIRE(
        r->ctx, r->o->overwrite || !folder_has(out, "result.json"), XD_ERROR_STATE,
        "%s holds a finished run: --overwrite replaces it and keeps what the teacher said, --out names "
        "another folder",
        out);
    snprintf(path, sizeof path, "%s/settings.txt", out);
    if (r->o->overwrite && !folder_goes_on(r, path)) folder_clear(r);
    return folder_settle(r, path);
}
