/* What all ranks of a load or a save are told of the directory that they share: one code, one text. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp */
#endif

#include "checkpoint_files.h"

#include <errno.h>
#include <time.h>

/* Rank r has elements [16 r, 16 r + 16) of one tensor; that of the last rank is longer. */
enum { RANKS = 3, EACH = 16, LAST = 40, ELEMENTS = (RANKS - 1) * EACH + LAST, STEP = 7 };

/* What is done to a directory with one checkpoint, and what every rank is to be told. */
typedef struct job {
    const char *root; /* of the load */
    int64_t step;
    xd_checkpoint_check check;
    xd_result expected;
    const char *text; /* "" -> any */
} job;

typedef struct scene {
    xd_ctx *ctx;
    xd_comm *world;
    int rank;
    float values[LAST];
    xd_tensor_part part;
    xd_checkpoint_network network;
    xd_checkpoint_save_desc save;
    xd_checkpoint_load_desc load;
} scene;

static void open_scene(scene *s, xd_comm *world, const char *root, int64_t step) {
    memset(s, 0, sizeof *s);
    s->ctx = xd_comm_ctx(world);
    s->world = world;
    s->rank = xd_comm_rank(world);
    s->part.name = "w";
    s->part.dtype = XD_DTYPE_F32;
    s->part.ndim = 1;
    s->part.shape[0] = ELEMENTS;
    s->part.range.begin = (int64_t)EACH * s->rank;
    s->part.range.end = s->rank == RANKS - 1 ? ELEMENTS : s->part.range.begin + EACH;
    s->part.data = s->values;
    for (int i = 0; i < LAST; i++) s->values[i] = (float)(100 * s->rank + i);
    s->network.parts = &s->part;
    s->network.part_count = 1;
    s->save.root = s->load.root = root;
    s->save.step = s->load.step = step;
    s->save.networks = s->load.networks = &s->network;
    s->save.network_count = s->load.network_count = 1;
}

/* The same message on every rank. */
static void check_told_alike(const scene *s, const char *text) {
    char mine[sizeof(((xd_error *)0)->message)], first[sizeof mine];
    memset(mine, 0, sizeof mine);
    snprintf(mine, sizeof mine, "%s", xd_last_error(s->ctx)->message);
    memcpy(first, mine, sizeof mine);
    CHECK(strstr(mine, text) != NULL);
    if (!strstr(mine, text)) printf("rank %d: \"%s\" lacks \"%s\"\n", s->rank, mine, text);
    CHECK_EQ_INT(xd_broadcast(s->world, first, sizeof first, XD_DTYPE_U8, 0), XD_OK);
    CHECK_EQ_STR(mine, first);
}

static xd_result load_rank(xd_comm *world, void *argument) {
    const job *j = (const job *)argument;
    scene s;
    float before[LAST];
    char *state = NULL;
    open_scene(&s, world, j->root, j->step);
    s.load.check = j->check;
    memcpy(before, s.values, sizeof before);
    CHECK_EQ_INT(xd_checkpoint_load(world, &s.load, NULL, &state), j->expected);
    if (j->expected != XD_OK) check_told_alike(&s, j->text);
    CHECK(memcmp(before, s.values, sizeof before) == 0 && state == NULL);
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    return XD_OK;
}

static xd_result save_rank(xd_comm *world, void *argument) {
    const job *j = (const job *)argument;
    scene s;
    open_scene(&s, world, j->root, j->step);
    CHECK_EQ_INT(xd_checkpoint_save(world, &s.save), j->expected);
    if (j->expected != XD_OK) check_told_alike(&s, j->text);
    return XD_OK;
}

static void run(xd_rank_function function, job j) {
    const xd_ctx_desc desc = { .timeout_seconds = 60 };
    CHECK_EQ_INT(xd_run_threads(RANKS, &desc, function, &j, NULL), XD_OK);
}

/* ---- loads ---- */

/* A root with the checkpoint STEP. */
static const char *saved_root(void) {
    const char *root = new_root();
    run(save_rank, (job){ .root = root, .step = STEP });
    return root;
}

/* Changes a byte of a file of the checkpoint, or cuts it there. */
static void damage(const char *root, const char *name, long offset, bool cut) {
    char path[400];
    snprintf(path, sizeof path, "%s/step-%d/%s", root, (int)STEP, name);
    FILE *f = fopen(path, "r+b");
    CHECK(f && fseek(f, offset, offset < 0 ? SEEK_END : SEEK_SET) == 0);
    const int byte = f ? fgetc(f) : 0;
    if (f && !cut) CHECK(fseek(f, -1, SEEK_CUR) == 0 && fputc(byte ^ 1, f) != EOF);
    const long at = f ? ftell(f) : 0;
    if (f) fclose(f);
    if (cut) CHECK(truncate(path, at - 1) == 0);
}

XD_TEST(where_there_is_no_checkpoint_every_rank_is_told_that_it_is_missing) {
    const char *root = new_root();
    job j = { .root = path_in(root, "nothing"), .step = XD_CHECKPOINT_NEWEST, .expected = XD_ERROR_MISSING };
    char text[200];
    snprintf(text, sizeof text, "%s/nothing: there is no such directory", root);
    j.text = text;
    run(load_rank, j);
    j.root = root;
    snprintf(text, sizeof text, "%s: none of 0 directories of steps is a checkpoint", root);
    run(load_rank, j);
    CHECK(mkdir(path_in(root, "step-3"), 0777) == 0);
    snprintf(text, sizeof text, "%s: none of 1 directories of steps is a checkpoint", root);
    run(load_rank, j);
    j.step = 3;
    snprintf(text, sizeof text, "%s/step-3 is no checkpoint: it has no manifest.json", root);
    run(load_rank, j);
    remove_all(root);
}

XD_TEST(what_one_rank_finds_damaged_is_damaged_for_all) {
    char text[200];
    for (int i = 0; i < 5; i++) {
        static const char *const files[] = { "manifest.json", "state.json", "model.safetensors",
                                             "model.safetensors", "model.safetensors" };
        static const long offsets[] = { 40, 20, -1, -1, -(long)(sizeof(float) * (ELEMENTS - EACH)) };
        const char *root = saved_root();
        job j = { .root = root, .step = STEP, .expected = XD_ERROR_CORRUPT, .text = text };
        damage(root, files[i], offsets[i], i == 2);
        if (i == 3) j.check = XD_CHECKPOINT_CHECK_ALL; /* one rank compares the only block */
        snprintf(text, sizeof text, i < 3 ? "%s/step-%d" : "%s/step-%d/model.safetensors: block 0", root,
                 (int)STEP);
        run(load_rank, j);
        remove_all(root);
    }
}

static xd_result other_shape_rank(xd_comm *world, void *argument) {
    const job *j = (const job *)argument;
    scene s;
    open_scene(&s, world, j->root, STEP);
    s.part.shape[0]++;
    if (s.rank == RANKS - 1) s.part.range.end++;
    CHECK_EQ_INT(xd_checkpoint_load(world, &s.load, NULL, NULL), XD_ERROR_SHAPE);
    check_told_alike(&s, "1 tensors have another shape in");
    /* What only one rank can know is told to the others as its failure. */
    s.load.staging_bytes = s.rank == 1 ? 1 : 0;
    CHECK_EQ_INT(xd_checkpoint_load(world, &s.load, NULL, NULL),
                 s.rank == 1 ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(strstr(xd_last_error(s.ctx)->message, "staging_bytes 1 is less than 64") != NULL);
    return XD_OK;
}

XD_TEST(another_shape_is_another_shape_for_all) {
    const char *root = saved_root();
    run(other_shape_rank, (job){ .root = root });
    remove_all(root);
}

/* ---- a disk that fails ---- */

typedef struct failing {
    xd_files real;
    size_t read, written; /* bytes of calls that fail; 0 -> none */
} failing;

static int failing_read(void *user, intptr_t file, void *buffer, size_t bytes, uint64_t offset) {
    const failing *f = (const failing *)user;
    return bytes == f->read ? EIO : f->real.read(f->real.user, file, buffer, bytes, offset);
}

static int failing_write(void *user, intptr_t file, const void *buffer, size_t bytes, uint64_t offset) {
    const failing *f = (const failing *)user;
    return bytes == f->written ? ENOSPC : f->real.write(f->real.user, file, buffer, bytes, offset);
}

/* Rank 0 takes its time to remove what it has begun. */
static int slow_remove(void *user, const char *path) {
    const failing *f = (const failing *)user;
    const struct timespec nap = { 0, 20000000 };
    nanosleep(&nap, NULL);
    return f->real.remove(f->real.user, path);
}

/* Names in a directory. */
static int names_of(const char *path) {
    int count = 0;
    DIR *names = opendir(path);
    while (names && readdir(names)) count++;
    if (names) closedir(names);
    return count - 2;
}

static xd_result failing_rank(xd_comm *world, void *argument) {
    const job *j = (const job *)argument;
    scene s;
    open_scene(&s, world, j->root, j->step);
    s.load.check = XD_CHECKPOINT_CHECK_NONE;
    const bool loads = j->step == STEP;
    CHECK_EQ_INT(loads ? xd_checkpoint_load(world, &s.load, NULL, NULL) : xd_checkpoint_save(world, &s.save),
                 XD_ERROR_IO);
    if (!loads) CHECK_EQ_INT(names_of(j->root), 2); /* on every rank, when its call returns */
    check_told_alike(&s, j->text);
    return XD_OK;
}

/* Only the last rank moves so many bytes at once. */
XD_TEST(a_file_that_one_rank_cannot_read_or_write_fails_alike_on_all) {
    const char *root = saved_root();
    xd_ctx *ctx = NULL;
    failing f = { .read = LAST * sizeof(float) };
    xd_ctx_desc desc = { .timeout_seconds = 60 };
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    f.real = desc.files = xd_ctx_settings(ctx)->files;
    /* Callbacks that others have with their own `user`, which is that of the system's. */
    CHECK(f.real.user == NULL);
    desc.files.read = failing_read;
    desc.files.write = failing_write;
    desc.files.remove = slow_remove;
    desc.files.user = &f;
    job j = { .root = root, .step = STEP, .text = "model.safetensors" };
    CHECK_EQ_INT(xd_run_threads(RANKS, &desc, failing_rank, &j, NULL), XD_OK);
    f = (failing){ .real = f.real, .written = LAST * sizeof(float) };
    j.step = STEP + 1;
    CHECK_EQ_INT(xd_run_threads(RANKS, &desc, failing_rank, &j, NULL), XD_OK);
    CHECK_EQ_STR(names_in(ctx, root), "latest step-7 ");
    xd_ctx_destroy(ctx);
    remove_all(root);
}

/* ---- a file system without a sync of directories ---- */

typedef struct unsynced {
    int error, lines; /* of the sync; that were logged of it */
} unsynced;

static int refuse_sync(void *user, const char *path) {
    (void)path;
    return ((const unsynced *)user)->error;
}

static void count_lines(void *user, xd_log_level level, const char *line) {
    unsynced *u = (unsynced *)user;
    if (!strstr(line, "no sync of directories here")) return;
    CHECK_EQ_INT(level, XD_LOG_INFO);
    u->lines++;
}

XD_TEST(a_save_goes_on_where_directories_cannot_be_synced_and_makes_the_folders_above_its_root) {
    static const int errors[] = { EINVAL, ENOTSUP, EOPNOTSUPP, EIO };
    const char *root = saved_root();
    char deep[200];
    snprintf(deep, sizeof deep, "%s/runs//of/today/", root);
    for (int i = 0; i < 4; i++) {
        const bool fails = errors[i] == EIO;
        unsynced u = { errors[i], 0 };
        xd_ctx_desc desc = { .logger = { count_lines, &u }, .log_level = XD_LOG_INFO };
        xd_ctx *ctx = NULL;
        xd_comm *self = NULL;
        scene s;
        desc.files.sync_directory = refuse_sync;
        desc.files.user = &u;
        CHECK(xd_ctx_create(&desc, &ctx) == XD_OK && xd_comm_self(ctx, &self) == XD_OK);
        float values[ELEMENTS] = { 1.0f };
        open_scene(&s, self, deep, 20 + i);
        s.part.data = values;
        s.part.range.end = ELEMENTS;
        CHECK_EQ_INT(xd_checkpoint_save(self, &s.save), fails ? XD_ERROR_IO : XD_OK);
        s.save.overwrite = true;
        CHECK_EQ_INT(xd_checkpoint_save(self, &s.save), fails ? XD_ERROR_IO : XD_OK);
        CHECK_EQ_INT(u.lines, fails ? 0 : 1); /* once a context */
        CHECK(!fails || strstr(xd_last_error(ctx)->message, "sync of the directory: "));
        xd_comm_destroy(self);
        xd_ctx_destroy(ctx);
    }
    CHECK_EQ_INT(names_of(path_in(root, "runs/of/today")), 4);
    remove_all(root);
}

/* ---- saves ---- */

XD_TEST(a_save_that_the_root_refuses_is_refused_on_all_ranks) {
    const char *root = saved_root();
    job j = {
        .root = root, .step = STEP, .expected = XD_ERROR_STATE, .text = "exists, and overwrite is false"
    };
    run(save_rank, j);
    j.root = path_in(root, "latest/below");
    j.expected = XD_ERROR_IO;
    j.text = "latest/below: make";
    run(save_rank, j);
    remove_all(root);
}

/* ---- model directories ---- */

static xd_result import_rank(xd_comm *world, void *argument) {
    const job *j = (const job *)argument;
    const xd_weight_map map = { .theirs = "w", .ours = "w" };
    scene s;
    open_scene(&s, world, j->root, STEP);
    char there[200];
    snprintf(there, sizeof there, "%s/step-%d", j->root, (int)STEP);
    xd_weights_import_desc d = { .directory = s.rank == 1 ? "/nowhere/of-rank-1" : there };
    d.weights.parts = &s.part;
    d.weights.part_count = 1;
    d.weights.maps = &map;
    d.weights.map_count = 1;
    const xd_result result = xd_weights_import(world, &d, NULL);
    CHECK(result == XD_ERROR_IO || result == XD_ERROR_MISSING);
    check_told_alike(&s, "/nowhere/of-rank-1");
    int code = (int)result, most = 0;
    CHECK_EQ_INT(xd_all_reduce(world, &code, &most, 1, XD_DTYPE_I32, XD_MAX), XD_OK);
    CHECK_EQ_INT(code, most);
    return XD_OK;
}

XD_TEST(a_directory_that_one_rank_does_not_reach_is_told_alike) {
    const char *root = saved_root();
    run(import_rank, (job){ .root = root });
    remove_all(root);
}

/* By rank 0 alone, and in pieces of all ranks, of which one has no directory. */
static xd_result export_rank(xd_comm *world, void *argument) {
    const job *j = (const job *)argument;
    const xd_weight_map map = { .theirs = "w", .ours = "w" };
    scene s;
    open_scene(&s, world, j->root, STEP);
    xd_weights_export_desc d = { .directory = "/nowhere/at-all", .pieces = j->step != 0 };
    if (d.pieces && s.rank != 1) d.directory = j->root;
    d.weights.parts = &s.part;
    d.weights.part_count = 1;
    d.weights.maps = &map;
    d.weights.map_count = 1;
    CHECK_EQ_INT(xd_weights_export(world, &d), j->expected);
    check_told_alike(&s, j->text);
    return XD_OK;
}

XD_TEST(an_export_to_no_directory_is_told_alike) {
    const char *root = new_root();
    run(export_rank, (job){ .expected = XD_ERROR_IO, .text = "/nowhere/at-all", .root = root });
    run(export_rank, (job){ .expected = XD_ERROR_IO, .text = "/nowhere/at-all", .root = root, .step = 1 });
    CHECK_EQ_INT(remove(root), 0); /* empty */
}

XD_TEST_MAIN()
