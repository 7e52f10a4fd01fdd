/* golden [--cpu=LEVEL] [--invariant] DIR...: runs every vector file below the directories against the public API; see golden.h.
 * Ends with `N passed, N failed, N skipped`; skips are listed by reason and count. On a machine without the level the exit
 * status is 77. A file that kills its process has failed, the others still run. Built with GOLDEN_CUDA it runs on a GPU, or
 * on its emulation, what golden_host_only does not list. */
#define _DEFAULT_SOURCE /* scandir */
#include "runner.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "xd_test_cpu.h"
#if defined(XD_EMU)
#    include "emu_api.h"
#endif

enum { GOLDEN_REASONS = 64 };

typedef struct golden_reason {
    char text[GOLDEN_REASON];
    int count;
} golden_reason;

typedef struct golden_totals {
    int passed, failed, skipped;
    golden_reason reasons[GOLDEN_REASONS];
    int reason_count;
} golden_totals;

/* The files to run. */
typedef struct golden_files {
    char **paths;
    int count, unreadable;
} golden_files;

static const struct {
    const char *area;
    const golden_kind *kinds;
} golden_areas[] = {
    { "ema", golden_kinds_ema },
    { "optim", golden_kinds_optim },
    { "shard", golden_kinds_shard },
    { "classic", golden_kinds_head },
    { "classic", golden_kinds_uld },
    { "classic", golden_kinds_classic },
    { "xtoken-parts", golden_kinds_sequence },
    { "xtoken-parts", golden_kinds_projection_parts },
    { "xtoken-parts", golden_kinds_chunks },
    { "xtoken-parts", golden_kinds_xtoken_parts },
    { "xtoken", golden_kinds_xtoken },
    { "align", golden_kinds_align },
    { "align", golden_kinds_projection },
    { "dmd", golden_kinds_dmd_steps },
    { "dmd", golden_kinds_dmd },
    { "dmd", golden_kinds_dmd_losses },
};

/* What has no form on a GPU. Every other case has to run there by kernels: the answer "not supported" fails. A kind of NULL is
 * the whole area. */
static const struct {
    const char *area, *kind, *reason;
} golden_host_only[] = {
    { "align", NULL, "of the host: text, alignments, building of projections" },
    { "xtoken-parts", "exact map", "of the host: text, alignments, building of projections" },
    { "xtoken-parts", "sparse projection", "of the host: text, alignments, building of projections" },
    { "shard", NULL, "of the host: tables of positions and shards" },
    { "xtoken-parts", "sequence layouts", "of the host: tables of positions and shards" },
    { "xtoken-parts", "valid chunks", "of the host: tables of positions and shards" },
    { "ema", "ema decay table", "of the host: one number a step" },
    { "dmd", "times", "of the host: one number a sample" },
    { "dmd", "f-distill table", "of the host: one number a ratio" },
};

/* What has no INVARIANT form on a device. */
static const struct {
    const char *area, *kind, *reason;
} golden_not_invariant[] = {
    { "classic", "fused linear JSD", "no INVARIANT form: the gradient of hidden states on a GPU" },
};

/* ---- running ---- */

/* Kernels launched so far on an emulated GPU; where they are not counted, one more in each call. */
static long golden_launches(void) {
#if defined(XD_EMU)
    return emu_launch_count();
#else
    static long calls;
    return ++calls;
#endif
}

static const char *golden_reason_for_host(const char *area, const char *kind) {
    for (size_t i = 0; i < sizeof golden_host_only / sizeof *golden_host_only; i++)
        if (strcmp(golden_host_only[i].area, area) == 0 &&
            (!golden_host_only[i].kind || strcmp(golden_host_only[i].kind, kind) == 0))
            return golden_host_only[i].reason;
    return NULL;
}

static const char *golden_reason_for_mode(const char *area, const char *kind) {
    for (size_t i = 0; i < sizeof golden_not_invariant / sizeof *golden_not_invariant; i++)
        if (strcmp(golden_not_invariant[i].area, area) == 0 &&
            strcmp(golden_not_invariant[i].kind, kind) == 0)
            return golden_not_invariant[i].reason;
    return NULL;
}

static void golden_run_kind(golden_case *c, const char *area, const golden_kind *kind) {
    const bool on_device = golden_on_device(c->ctx);
    const char *reason = on_device ? golden_reason_for_host(area, kind->name) : NULL;
    if (on_device && !reason && xd_ctx_settings(c->ctx)->reduction == XD_REDUCTION_INVARIANT)
        reason = golden_reason_for_mode(area, kind->name);
    const long before = golden_launches();
    if (reason) {
        golden_skip(c, reason);
        return;
    }
    golden_read_nothing(c);
    kind->run(c);
    if (golden_launches() == before && !c->skip[0]) golden_fail(c, "ran without a kernel of the device");
}

static void golden_run_kinds(golden_case *c, const char *area) {
    bool known = false;
    for (size_t i = 0; i < sizeof golden_areas / sizeof *golden_areas; i++) {
        if (strcmp(golden_areas[i].area, area) != 0) continue;
        known = true;
        for (const golden_kind *kind = golden_areas[i].kinds; kind->name; kind++) {
            if (!kind->claims(c)) continue;
            golden_run_kind(c, area, kind);
            return;
        }
    }
    if (known)
        golden_fail(c, "no kind of area %s knows origin %s", area, golden_text(c, "origin"));
    else
        golden_fail(c, "unknown area %s", area);
}

static void golden_count_skip(golden_totals *totals, const char *text) {
    totals->skipped++;
    int i = 0;
    while (i < totals->reason_count && strcmp(totals->reasons[i].text, text) != 0) i++;
    if (i == GOLDEN_REASONS) i = GOLDEN_REASONS - 1; /* counted under the last reason rather than lost */
    if (i == totals->reason_count) {
        snprintf(totals->reasons[i].text, sizeof totals->reasons[i].text, "%s", text);
        totals->reason_count++;
    }
    totals->reasons[i].count++;
}

static void golden_run_file(xd_ctx *ctx, const char *path, golden_outcome *outcome) {
    golden_case c;
    if (golden_case_open(&c, ctx, path)) {
        const char *area = golden_text(&c, "area");
        if (!golden_is(&c, "format", "xdistill-golden-1") || !area)
            golden_fail(&c, "not a golden vector: no format xdistill-golden-1 or no area in its metadata");
        else
            golden_run_kinds(&c, area);
        if (!c.failures && !c.skip[0]) golden_judge_unread(&c);
    }
    memset(outcome, 0, sizeof *outcome);
    outcome->verdict = c.failures ? GOLDEN_FAILED : c.skip[0] ? GOLDEN_SKIPPED : GOLDEN_PASSED;
    memcpy(outcome->reason, c.skip, sizeof c.skip);
    golden_case_close(&c);
}

/* In a process of its own: context and device are opened there, no process has those of another. */
static void golden_work(const xd_ctx_desc *desc, const char *const *paths, int count) {
    golden_outcome outcome;
    xd_ctx *ctx = NULL;
    golden_device *device = NULL;
    memset(&outcome, 0, sizeof outcome);
    outcome.verdict = GOLDEN_STOP;
    if (xd_ctx_create(desc, &ctx) != XD_OK) {
        golden_worker_tell(&outcome);
        return;
    }
    if (golden_device_open(ctx, &device) == XD_OK) {
        for (int i = 0; i < count; i++) {
            golden_run_file(ctx, paths[i], &outcome);
            golden_worker_tell(&outcome);
        }
    } else {
        fprintf(stderr, "golden: %s\n", xd_last_error(ctx)->message);
        golden_worker_tell(&outcome);
    }
    golden_device_close(device);
    xd_ctx_destroy(ctx);
}

static int golden_by_name(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int golden_visible(const struct dirent *entry) {
    return entry->d_name[0] != '.';
}

static void golden_add_file(golden_files *files, const char *path) {
    char **paths = (char **)realloc(files->paths, (size_t)(files->count + 1) * sizeof *paths);
    char *copy = (char *)malloc(strlen(path) + 1);
    if (!paths || !copy) {
        fprintf(stderr, "golden: no memory for the name %s\n", path);
        exit(2);
    }
    strcpy(copy, path);
    files->paths = paths;
    files->paths[files->count++] = copy;
}

/* A file, or a directory with everything below it in the order of names. */
static void golden_walk(const char *path, golden_files *files) {
    struct stat status;
    const size_t length = strlen(path);
    if (stat(path, &status) != 0) {
        printf("FAILED %s: cannot be read\n", path);
        files->unreadable++;
        return;
    }
    if (!S_ISDIR(status.st_mode)) {
        if (length > 12 && strcmp(path + length - 12, ".safetensors") == 0) golden_add_file(files, path);
        return;
    }
    struct dirent **entries;
    const int count = scandir(path, &entries, golden_visible, golden_by_name);
    for (int i = 0; i < count; i++) {
        char below[4096];
        snprintf(below, sizeof below, "%s/%s", path, entries[i]->d_name);
        golden_walk(below, files);
        free(entries[i]);
    }
    if (count >= 0) free(entries);
}

static void golden_add_up(const golden_outcome *outcomes, int count, golden_totals *totals) {
    for (int i = 0; i < count; i++)
        if (outcomes[i].verdict == GOLDEN_SKIPPED)
            golden_count_skip(totals, outcomes[i].reason);
        else if (outcomes[i].verdict == GOLDEN_PASSED)
            totals->passed++;
        else
            totals->failed++;
}

/* Runs every file and adds up; false when there is no process, context or device to run them. */
static bool golden_run(const xd_ctx_desc *desc, golden_files *files, golden_totals *totals) {
    const size_t bytes = (size_t)(files->count + 1) * sizeof(golden_outcome);
    golden_outcome *outcomes = (golden_outcome *)calloc(1, bytes);
    const bool ran = outcomes && golden_workers_run(golden_work, desc, (const char *const *)files->paths,
                                                    files->count, outcomes);
    if (ran) golden_add_up(outcomes, files->count, totals);
    totals->failed += files->unreadable;
    free(outcomes);
    for (int i = 0; i < files->count; i++) free(files->paths[i]);
    free(files->paths);
    return ran;
}

static bool golden_option(const char *argument, xd_ctx_desc *desc) {
    if (strncmp(argument, "--cpu=", 6) == 0) return xd_test_cpu_find(argument + 6, &desc->cpu);
    desc->reduction = XD_REDUCTION_INVARIANT;
    return strcmp(argument, "--invariant") == 0;
}

int main(int argc, char **argv) {
    static golden_totals totals;
    golden_files files;
    xd_ctx_desc desc;
    int first = 1;
    memset(&files, 0, sizeof files);
    memset(&desc, 0, sizeof desc);
    desc.cpu = xd_test_cpu();
    while (first < argc && argv[first][0] == '-' && golden_option(argv[first], &desc)) first++;
    if (first == argc || argv[first][0] == '-') {
        fprintf(stderr,
                "usage: golden [--cpu=plain|portable|avx2|avx512|avx512_bf16] [--invariant] DIR...\n");
        return 2;
    }
    if (!xd_cpu_supports(desc.cpu)) {
        printf("this machine has no %s\n", xd_cpu_level_name(desc.cpu));
        return 77;
    }
    for (int i = first; i < argc; i++) golden_walk(argv[i], &files);
    if (!golden_run(&desc, &files, &totals)) return 2;
    for (int i = 0; i < totals.reason_count; i++)
        printf("skipped %d: %s\n", totals.reasons[i].count, totals.reasons[i].text);
    printf("%d passed, %d failed, %d skipped\n", totals.passed, totals.failed, totals.skipped);
    return totals.failed ? 1 : 0;
}
