/* images_files.c - what a training leaves behind, and goes on from. */
#include "images_run.h"

#include "../common/folders.h"

#include <stdio.h>
#include <string.h>

xd_result images_agree_on(const images_run *run, xd_result result) {
    return xd_agree(run->world, result);
}

static void images_path(const images_run *run, const char *name, char out[480]) {
    snprintf(out, 480, "%s/%s", run->directory, name);
}

static const char IMAGES_CHECKPOINTS[] = "checkpoints", IMAGES_WARM_UP_CHECKPOINTS[] = "warm-up-checkpoints";

/* ---- settings ---- */

/* What decides about the bits of a run. */
static void images_describe(const images_run *run, char out[256]) {
    const images_recipe *recipe = run->recipe;
    char gan[96] = "";
    if (recipe->real)
        snprintf(gan, sizeof gan, ", GAN %.17g, R1 %.17g, %lld real pictures", recipe->gan, recipe->gan_r1,
                 (long long)recipe->real->set.count);
    snprintf(out, 256, "seed %llu, warm-up %d, lead %d, steps %d with %d critics, batch %d%s\n",
             (unsigned long long)run->options->seed, recipe->warm_up, recipe->lead, recipe->steps,
             recipe->critics, recipe->batch, gan);
}

/* An older run's settings, "" without one. */
static xd_result images_older(xd_ctx *ctx, const char *path, char out[256]) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *file = fopen(path, "rb");
    out[0] = 0;
    if (!file) return XD_OK;
    fclose(file);
    XD_TRY(xd_file_load(ctx, path, 255, &text, &bytes));
    memcpy(out, text, bytes);
    out[bytes] = 0;
    xd_release(ctx, text);
    return XD_OK;
}

/* Nothing of an older run may be taken for this one's. */
static xd_result images_forget(const images_run *run) {
    static const char *const files[] = { "metrics.jsonl", "warm-up/model.safetensors",
                                         "student/model.safetensors", "student-ema/model.safetensors" };
    char path[480];
    for (int i = 0; i < 4; i++) {
        images_path(run, files[i], path);
        (void)remove(path); /* it may not be there */
    }
    if (run->recipe->warm_up > 0) {
        images_path(run, IMAGES_WARM_UP_CHECKPOINTS, path);
        XD_TRY(folders_forget_checkpoints(xd_comm_ctx(run->world), path));
    }
    images_path(run, IMAGES_CHECKPOINTS, path);
    return folders_forget_checkpoints(xd_comm_ctx(run->world), path);
}

static bool images_has_checkpoint(const images_run *run, const char *folder) {
    int64_t step = 0;
    char path[480];
    images_path(run, folder, path);
    return xd_checkpoint_find(xd_comm_ctx(run->world), path, &step) == XD_OK;
}

static xd_result images_make_folders(const images_run *run) {
    char path[480];
    images_path(run, IMAGES_CHECKPOINTS, path);
    XD_TRY(folders_make(xd_comm_ctx(run->world), path));
    if (run->recipe->warm_up == 0) return XD_OK;
    images_path(run, IMAGES_WARM_UP_CHECKPOINTS, path);
    return folders_make(xd_comm_ctx(run->world), path);
}

static bool images_exists(const images_run *run, const char *name) {
    char path[480];
    images_path(run, name, path);
    FILE *file = fopen(path, "rb");
    if (file) fclose(file);
    return file != NULL;
}

/* Rank 0's part of images_prepare. */
static xd_result images_find(images_run *run) {
    xd_ctx *ctx = xd_comm_ctx(run->world);
    const images_options *o = run->options;
    char settings[480], mine[256], older[256];
    images_path(run, "settings.txt", settings);
    images_describe(run, mine);
    XD_TRY(images_make_folders(run));
    XD_TRY(images_older(ctx, settings, older));
    if (o->resume && older[0]) {
        XD_REQUIRE(ctx, strcmp(mine, older) == 0, XD_ERROR_MISMATCH, "%s was begun with %.*s, not with %.*s",
                   settings, (int)strcspn(older, "\n"), older, (int)strcspn(mine, "\n"), mine);
        run->warmed = run->recipe->warm_up > 0 && images_exists(run, "warm-up/model.safetensors");
        run->warms_on = !run->warmed && images_has_checkpoint(run, IMAGES_WARM_UP_CHECKPOINTS);
        run->resumes = images_has_checkpoint(run, IMAGES_CHECKPOINTS);
        return XD_OK;
    }
    XD_REQUIRE(
        ctx, o->overwrite || !images_exists(run, "student-ema/model.safetensors"), XD_ERROR_STATE,
        "%s holds a finished student: --overwrite replaces it, --resume goes on, --out names another folder",
        run->directory);
    XD_TRY(images_forget(run));
    return xd_file_save(ctx, settings, mine, strlen(mine));
}

xd_result images_prepare(images_run *run) {
    int64_t found[3];
    snprintf(run->directory, sizeof run->directory, "%s/%s", run->options->out, run->recipe->name);
    snprintf(run->warm_directory, sizeof run->warm_directory, "%s/warm-up", run->directory);
    XD_TRY(images_agree_on(run, xd_comm_rank(run->world) == 0 ? images_find(run) : XD_OK));
    found[0] = run->warmed;
    found[1] = run->warms_on;
    found[2] = run->resumes;
    XD_TRY(xd_broadcast(run->world, found, 3, XD_DTYPE_I64, 0));
    run->warmed = found[0] != 0;
    run->warms_on = found[1] != 0;
    run->resumes = found[2] != 0;
    return XD_OK;
}

/* ---- checkpoints ---- */

/* Student, fake score and discriminator, each with optimizer and average, if it has one. */
typedef struct images_trained {
    int count;
    xd_checkpoint_network networks[XD_DMD_TEACHER];
    xd_checkpoint_average averages[XD_DMD_TEACHER];
} images_trained;

static void images_networks(images_run *run, images_trained *out) {
    static const char *const names[] = { NULL, "fake", "discriminator" };
    xd_checkpoint_network *networks = out->networks;
    xd_checkpoint_average *averages = out->averages;
    memset(out, 0, sizeof *out);
    out->count = run->warming ? 1 : run->recipe->real ? 3 : 2; /* warm-up trains the student alone */
    for (int i = 0; i < out->count; i++) {                     /* in the order of their roles */
        const images_role *role = &run->roles[i];
        averages[i].name = "average";
        averages[i].ema = role->average;
        networks[i].name = names[i];
        networks[i].parts = role->parts;
        networks[i].part_count = role->count;
        networks[i].optimizer = role->optimizer;
        networks[i].averages = &averages[i];
        networks[i].average_count = role->average ? 1 : 0;
    }
}

xd_result images_save(images_run *run, int step) {
    images_trained trained;
    xd_checkpoint_save_desc save;
    char root[480], *state = NULL;
    images_networks(run, &trained);
    images_path(run, run->warming ? IMAGES_WARM_UP_CHECKPOINTS : IMAGES_CHECKPOINTS, root);
    XD_TRY(xd_dmd_state_save(run->dmd, &state));
    memset(&save, 0, sizeof save);
    save.root = root;
    save.step = step;
    save.networks = trained.networks;
    save.network_count = trained.count;
    save.state = state;
    save.keep = 2;
    save.overwrite = true;
    const xd_result result = xd_checkpoint_save(run->world, &save);
    xd_release(xd_comm_ctx(run->world), state);
    return result;
}

/* The first `lines` lines of metrics.jsonl: later ones are of steps that will be made again. */
static xd_result images_cut_metrics(const images_run *run, int lines) {
    xd_ctx *ctx = xd_comm_ctx(run->world);
    char path[480], *text = NULL;
    size_t bytes = 0, end = 0;
    images_path(run, "metrics.jsonl", path);
    XD_TRY(xd_file_load(ctx, path, (size_t)1 << 30, &text, &bytes));
    while (end < bytes && lines > 0) lines -= text[end++] == '\n';
    const xd_result result = xd_file_save(ctx, path, text, end);
    xd_release(ctx, text);
    return result;
}

xd_result images_load(images_run *run, int *step) {
    images_trained trained;
    xd_checkpoint_load_desc load;
    xd_checkpoint_report report;
    char root[480], *state = NULL;
    images_networks(run, &trained);
    images_path(run, run->warming ? IMAGES_WARM_UP_CHECKPOINTS : IMAGES_CHECKPOINTS, root);
    memset(&load, 0, sizeof load);
    load.root = root;
    load.step = XD_CHECKPOINT_NEWEST;
    load.networks = trained.networks;
    load.network_count = trained.count;
    XD_TRY(xd_checkpoint_load(run->world, &load, &report, &state));
    xd_result result = xd_dmd_state_load(run->dmd, state, NULL);
    xd_release(xd_comm_ctx(run->world), state);
    *step = (int)report.step;
    if (xd_comm_rank(run->world) == 0)
        images_say("%s: goes on after step %d of %s", run->recipe->name, *step,
                   run->warming ? "warm-up" : "matching");
    for (int i = 0; i < trained.count && result == XD_OK; i++)
        result = xd_parallel_publish(run->roles[i].parallel);
    if (result == XD_OK && xd_comm_rank(run->world) == 0)
        result = images_cut_metrics(run, run->warming ? *step : run->recipe->warm_up + *step);
    return images_agree_on(run, result);
}

/* ---- metrics ---- */

/* A line for each step. Of warm-up: its mean squared error, and the norm of its gradient before clipping. Of matching: the
 * values of the terms, |x - T| as "distance", and norms of the gradients of the networks that had their turn, before
 * clipping; with a discriminator its terms too. In steps of the student: mean and deviation of all pixels that it drew; which
 * part of its average does not move; and the norms of the gradients of its two terms, with their weights, by these pixels:
 * those by weights come in one backward and are not told apart. Every pixel counts: there are no masks. */
xd_result images_note(images_run *run, int step, const xd_dmd_values *values) {
    xd_ctx *ctx = xd_comm_ctx(run->world);
    char path[480], judged[200] = "", drawn[240] = "";
    const images_spread *s = &run->spread;
    if (run->recipe->real)
        snprintf(
            judged, sizeof judged,
            "\"generator\": %.17g, \"discriminator\": %.17g, \"r1\": %.17g, \"discriminator_norm\": %.17g, ",
            values->generator, values->discriminator, values->r1, values->norms[XD_DMD_DISCRIMINATOR]);
    if (!run->warming && xd_dmd_trains(&run->desc, XD_DMD_STUDENT, step - 1)) {
        const int used =
            snprintf(drawn, sizeof drawn,
                     "\"mean\": %.17g, \"deviation\": %.17g, \"stuck\": %.17g, \"vsd_norm\": %.17g, ",
                     s->mean, s->deviation, s->stuck, s->vsd_norm);
        if (run->recipe->real)
            snprintf(drawn + used, sizeof drawn - (size_t)used, "\"generator_norm\": %.17g, ",
                     s->generator_norm);
    }
    images_path(run, "metrics.jsonl", path);
    FILE *file = fopen(path, "ab");
    XD_REQUIRE(ctx, file, XD_ERROR_IO, "cannot write %s", path);
    if (run->warming)
        fprintf(file, "{\"warm_up\": %d, \"regression\": %.17g, \"norm\": %.17g, \"skipped\": %s}\n", step,
                values->regression, values->norms[XD_DMD_STUDENT], values->skipped ? "true" : "false");
    else
        fprintf(file,
                "{\"step\": %d, \"vsd\": %.17g, \"distance\": %.17g, \"fake_score\": %.17g, "
                "\"student_norm\": %.17g, "
                "\"fake_score_norm\": %.17g, %s%s\"skipped\": %s}\n",
                step, values->vsd, values->distance, values->fake_score, values->norms[XD_DMD_STUDENT],
                values->norms[XD_DMD_FAKE_SCORE], judged, drawn, values->skipped ? "true" : "false");
    const bool failed = ferror(file) != 0;
    XD_REQUIRE(ctx, fclose(file) == 0 && !failed, XD_ERROR_IO, "cannot write %s", path);
    return XD_OK;
}
