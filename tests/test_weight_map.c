/* Model directories of others through a map: read on any ranks with any cut, written again to the bit, and refused by name where
 * the map and the files differ. */
#define XDISTILL_IMPLEMENTATION
#include "map_scene.h"
#include "press_files.h"

/* ---- round trips ---- */

typedef struct job {
    const char *from, *to;
    int cut;
    size_t staging_bytes;
    uint64_t max_shard_bytes;
    int64_t wrong, loaded;
} job;

static xd_result import_scene(xd_comm *world, map_scene *s, const job *j, xd_checkpoint_report *report) {
    xd_weights_import_desc d;
    memset(&d, 0, sizeof d);
    d.directory = j->from;
    d.weights = map_weights(s);
    d.staging_bytes = j->staging_bytes;
    return xd_weights_import(world, &d, report);
}

static xd_result export_scene(xd_comm *world, map_scene *s, const job *j) {
    xd_weights_export_desc d;
    memset(&d, 0, sizeof d);
    d.directory = j->to;
    d.weights = map_weights(s);
    d.staging_bytes = j->staging_bytes;
    d.max_shard_bytes = j->max_shard_bytes;
    return xd_weights_export(world, &d);
}

static xd_result round_trip(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    map_scene *s = map_create(xd_comm_rank(world), xd_comm_size(world), j->cut);
    xd_checkpoint_report report;
    xd_result result = import_scene(world, s, j, &report);
    if (result == XD_OK) {
        __atomic_add_fetch(&j->wrong, map_wrong(s, 7), __ATOMIC_RELAXED);
        CHECK_EQ_INT(report.loaded, MAP_THEIRS);
        CHECK_EQ_INT(report.missing + report.unexpected + report.wrong_shape + report.converted, 0);
        CHECK_EQ_STR(report.names, "");
        result = export_scene(world, s, j);
    }
    free(s);
    return result;
}

static void check_round_trip(int ranks, job j) {
    xd_error error;
    const xd_ctx_desc desc = map_ctx_desc();
    const xd_result result = xd_run_threads(ranks, &desc, round_trip, &j, &error);
    CHECK_EQ_INT(result, XD_OK);
    if (result != XD_OK) printf("%d ranks, cut %d: %s\n", ranks, j.cut, error.message);
    CHECK_EQ_INT(j.wrong, 0);
}

XD_TEST(every_cut_on_one_to_four_ranks_reads_each_element_and_writes_their_bits) {
    char from[64], to[64];
    strcpy(from, new_root());
    strcpy(to, new_root());
    map_write(from, map_theirs, MAP_THEIRS, 7, 0);
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int cut = 0; cut < MAP_CUTS; cut++) {
            job j = { from, to, cut, cut % 2 ? 64 : 0, 0, 0, 0 };
            check_round_trip(ranks, j);
            CHECK_EQ_INT(map_compare(to, 7), 1);
        }
    remove_all(from);
    remove_all(to);
}

XD_TEST(shards_with_an_index_are_read_and_written) {
    char from[64], to[64];
    strcpy(from, new_root());
    strcpy(to, new_root());
    map_write(from, map_theirs, MAP_THEIRS, 7, 300);
    const job j = { from, to, 1, 0, 250, 0, 0 };
    check_round_trip(3, j);
    CHECK(map_compare(to, 7) > 3);
    remove_all(from);
    remove_all(to);
}

/* ---- large tensors ---- */

enum { TALL = 700, WIDE = 900 };

typedef struct large {
    const char *from, *to;
    bool turned;
    size_t staging_bytes;
    uint64_t read[4]; /* bytes of each rank */
} large;

static __thread uint64_t bytes_read;
static xd_files real_files;

static int count_read(void *user, intptr_t file, void *buffer, size_t bytes, uint64_t offset) {
    bytes_read += bytes;
    return real_files.read(user, file, buffer, bytes, offset);
}

static xd_result through_large(xd_comm *world, void *argument) {
    large *l = (large *)argument;
    const int rank = xd_comm_rank(world), size = xd_comm_size(world);
    const int64_t rows = l->turned ? WIDE : TALL, columns = l->turned ? TALL : WIDE;
    const xd_weight_map map = { "theirs", "ours", l->turned, 0, 0, 0, 0 };
    const xd_interval mine = xd_chunk(rows, size, rank);
    float *data = (float *)malloc((size_t)(mine.end - mine.begin) * (size_t)columns * sizeof *data);
    int64_t wrong = 0;
    xd_tensor_part part;
    xd_weights_import_desc in;
    xd_weights_export_desc out;
    memset(&part, 0, sizeof part);
    part.name = "ours";
    part.dtype = XD_DTYPE_F32;
    part.ndim = 2;
    part.shape[0] = rows;
    part.shape[1] = columns;
    part.range.begin = mine.begin * columns;
    part.range.end = mine.end * columns;
    part.data = data;
    memset(&in, 0, sizeof in);
    in.directory = l->from;
    in.staging_bytes = l->staging_bytes;
    in.weights.parts = &part;
    in.weights.part_count = 1;
    in.weights.maps = &map;
    in.weights.map_count = 1;
    memset(&out, 0, sizeof out);
    out.directory = l->to;
    out.staging_bytes = l->staging_bytes;
    out.weights = in.weights;
    bytes_read = 0;
    const xd_result result = xd_weights_import(world, &in, NULL);
    l->read[rank] = bytes_read;
    for (int64_t r = mine.begin; r < mine.end; r++)
        for (int64_t c = 0; c < columns; c++)
            wrong += data[(r - mine.begin) * columns + c] != (float)(l->turned ? c * WIDE + r : r * WIDE + c);
    CHECK_EQ_INT(wrong, 0);
    XD_TRY(result);
    const xd_result written = xd_weights_export(world, &out);
    free(data);
    return written;
}

/* A matrix [TALL, WIDE] of 2.5 MB whose elements are their numbers. */
static void write_large(const char *directory) {
    static const int64_t shape[2] = { TALL, WIDE };
    const xd_safetensors_entry entry = { "theirs", XD_DTYPE_F32, 2, shape };
    xd_weights_writer_desc d;
    xd_weights_writer *writer = NULL;
    xd_ctx *ctx = NULL;
    float *data = (float *)malloc(TALL * WIDE * sizeof *data);
    for (int i = 0; i < TALL * WIDE; i++) data[i] = (float)i;
    memset(&d, 0, sizeof d);
    d.entries = &entry;
    d.entry_count = 1;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_create(ctx, directory, &d, &writer), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_write(writer, 0, 0, TALL * WIDE * sizeof *data, data), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_commit(writer), XD_OK);
    real_files = xd_ctx_settings(ctx)->files;
    xd_ctx_destroy(ctx);
    free(data);
}

XD_TEST(a_matrix_larger_than_the_staging_is_turned_in_tiles_and_ranks_read_what_they_hold) {
    char from[64], to[64];
    const uint64_t whole = (uint64_t)TALL * WIDE * sizeof(float);
    xd_ctx_desc desc;
    strcpy(from, new_root());
    strcpy(to, new_root());
    write_large(from);
    desc = map_ctx_desc();
    desc.files.read = count_read;
    for (int turned = 0; turned < 2; turned++)
        for (int k = 0; k < 3; k++) {
            static const size_t staging[3] = { 0, 40000, 1000 };
            xd_ctx *ctx = NULL;
            large l = { from, to, turned != 0, staging[k], { 0 } };
            CHECK_EQ_INT(xd_run_threads(4, &desc, through_large, &l, NULL), XD_OK);
            /* rows of ours are columns of theirs when they are turned: those of the others lie between them */
            for (int r = 0; r < 4; r++)
                CHECK(l.read[r] <= (turned ? whole : whole / 4) + 20000 && l.read[r] >= whole / 4 - 20000);
            CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
            char *one = NULL, *two = NULL;
            size_t one_bytes = 0, two_bytes = 0;
            CHECK_EQ_INT(xd_file_load(ctx, path_in(from, "model.safetensors"), 0, &one, &one_bytes), XD_OK);
            CHECK_EQ_INT(xd_file_load(ctx, path_in(to, "model.safetensors"), 0, &two, &two_bytes), XD_OK);
            CHECK_EQ_INT(one_bytes, two_bytes);
            CHECK(one && two && memcmp(one, two, one_bytes) == 0);
            xd_release(ctx, one);
            xd_release(ctx, two);
            xd_ctx_destroy(ctx);
        }
    remove_all(from);
    remove_all(to);
}

/* ---- wrapped models ---- */

enum { WRAP_D = 6, WRAP_V = 9, WRAP_DESCRIBED = 5 };

typedef struct wrapped {
    const char *from, *to;
    int kind; /* of the wrapper: DDP, FSDP, FSDP over a tensor-parallel pair */
    int64_t wrong;
} wrapped;

static const xd_weight_map wrapped_map[] = {
    { "wte", "embed", false, 0, 0, 0, 0 },
    { "c_attn", "q", true, 1, 0, 0, 8 },
    { "c_attn", "k", true, 1, 8, 0, 2 },
    { "c_attn", "v", true, 1, 10, 0, 2 },
};

static const int64_t wrapped_rows[WRAP_DESCRIBED] = { WRAP_V, 8, 2, 2, WRAP_V };

/* The embedding, which is the head too and has rows of padding, and q are cut by rows over the pair, v by
 * columns; k is whole on both. */
static xd_result describe_wrapped(xd_model *model, xd_layout *const cuts[4]) {
    static const char *const names[WRAP_DESCRIBED] = { "embed", "q", "k", "v", "head" };
    for (int i = 0; i < WRAP_DESCRIBED; i++) {
        xd_weight_desc w;
        memset(&w, 0, sizeof w);
        w.name = names[i];
        w.dtype = XD_DTYPE_F32;
        w.ndim = 2;
        w.shape[0] = wrapped_rows[i];
        w.shape[1] = WRAP_D;
        w.stored_rows = i == 0 || i == 4 ? WRAP_V + 3 : 0;
        w.tied_to = i == 4 ? "embed" : NULL;
        w.layout = i < 4 ? cuts[i] : NULL;
        XD_TRY(xd_weight_add(xd_model_root(model), &w, NULL));
    }
    return xd_model_seal(model);
}

/* What the files have at an element of a part; theirs count on from 0, wte first. */
static float wrapped_value(const char *name, int64_t r, int64_t c) {
    if (strcmp(name, "embed") == 0) return (float)(r * WRAP_D + c);
    const int64_t first = name[0] == 'q' ? 0 : name[0] == 'k' ? 8 : 10;
    return (float)(WRAP_V * WRAP_D + c * 12 + first + r);
}

static int64_t wrapped_wrong(const xd_tensor_part *p) {
    int64_t position = 0, wrong = 0;
    for (int a = 0; a < p->region->count[0]; a++)
        for (int64_t r = p->region->interval[0][a].begin; r < p->region->interval[0][a].end; r++)
            for (int b = 0; b < p->region->count[1]; b++)
                for (int64_t c = p->region->interval[1][b].begin; c < p->region->interval[1][b].end; c++) {
                    const int64_t at = position++ - p->range.begin;
                    if (at < 0 || at >= p->range.end - p->range.begin) continue;
                    wrong += ((const float *)p->data)[at] != wrapped_value(p->name, r, c);
                }
    return wrong;
}

static xd_result import_wrapped(xd_comm *world, wrapped *w, xd_parallel *parallel) {
    xd_tensor_part parts[WRAP_DESCRIBED];
    xd_weights_import_desc in;
    xd_weights_export_desc out;
    int64_t count = 0;
    XD_TRY(xd_parallel_parts(parallel, WRAP_DESCRIBED, parts, &count));
    CHECK_EQ_INT(count, 4);
    memset(&in, 0, sizeof in);
    in.directory = w->from;
    in.weights.parts = parts;
    in.weights.part_count = count;
    in.weights.maps = wrapped_map;
    in.weights.map_count = 4;
    memset(&out, 0, sizeof out);
    out.directory = w->to;
    out.weights = in.weights;
    XD_TRY(xd_weight_map_check(xd_comm_ctx(world), &in.weights));
    XD_TRY(xd_weights_import(world, &in, NULL));
    XD_TRY(xd_parallel_publish(parallel));
    for (int64_t i = 0; i < count; i++)
        __atomic_add_fetch(&w->wrong, wrapped_wrong(&parts[i]), __ATOMIC_RELAXED);
    return xd_weights_export(world, &out);
}

static xd_result through_wrapped(xd_comm *world, void *argument) {
    wrapped *w = (wrapped *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    const int pair = w->kind == 2 ? 2 : 1, rank = xd_comm_rank(world);
    xd_mesh *mesh = NULL, *tp = NULL;
    xd_comm *data = NULL;
    xd_layout *cuts[4] = { NULL, NULL, NULL, NULL };
    xd_model *model = NULL;
    xd_parallel *parallel = NULL;
    xd_model_desc d;
    xd_mesh_desc grid;
    memset(&d, 0, sizeof d);
    d.rank = rank;
    memset(&grid, 0, sizeof grid);
    grid.axes[0].name = "data";
    grid.axes[0].size = xd_comm_size(world) / pair;
    grid.axes[1].name = "tp";
    grid.axes[1].size = pair;
    XD_TRY(xd_mesh_create(world, &grid, &mesh));
    XD_TRY(xd_mesh_slice(mesh, "tp", &tp));
    XD_TRY(xd_mesh_group(mesh, "data", &data));
    for (int i = 0; i < 4; i++) {
        xd_layout_desc cut;
        memset(&cut, 0, sizeof cut);
        cut.ndim = 2;
        cut.shape[0] = wrapped_rows[i] + (i == 0 ? 3 : 0);
        cut.shape[1] = WRAP_D;
        cut.topology = xd_mesh_topology(tp);
        cut.placement[0].kind = i == 2 ? XD_REPLICATE : XD_SHARD;
        cut.placement[0].dim = i == 3;
        XD_TRY(xd_layout_create(ctx, &cut, &cuts[i]));
    }
    XD_TRY(xd_model_create(ctx, &d, &model));
    XD_TRY(describe_wrapped(model, cuts));
    XD_TRY(w->kind == 0 ? xd_ddp_create(model, data, NULL, &parallel)
                        : xd_fsdp_create(model, data, NULL, &parallel));
    const xd_result result = import_wrapped(world, w, parallel);
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    for (int i = 0; i < 4; i++) xd_layout_destroy(cuts[i]);
    xd_mesh_destroy(tp);
    xd_mesh_destroy(mesh);
    return result;
}

static void write_wrapped(const char *directory) {
    static const int64_t shapes[2][2] = { { WRAP_V, WRAP_D }, { WRAP_D, 12 } };
    const xd_safetensors_entry entries[2] = { { "wte", XD_DTYPE_F32, 2, shapes[0] },
                                              { "c_attn", XD_DTYPE_F32, 2, shapes[1] } };
    float data[WRAP_V * WRAP_D + WRAP_D * 12];
    xd_weights_writer_desc d;
    xd_weights_writer *writer = NULL;
    xd_ctx *ctx = NULL;
    for (int i = 0; i < WRAP_V * WRAP_D + WRAP_D * 12; i++) data[i] = (float)i;
    memset(&d, 0, sizeof d);
    d.entries = entries;
    d.entry_count = 2;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_create(ctx, directory, &d, &writer), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_write(writer, 0, 0, WRAP_V * WRAP_D * sizeof *data, data), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_write(writer, 1, 0, WRAP_D * 12 * sizeof *data, data + WRAP_V * WRAP_D),
                 XD_OK);
    CHECK_EQ_INT(xd_weights_writer_commit(writer), XD_OK);
    xd_ctx_destroy(ctx);
}

XD_TEST(wrapped_padded_tied_and_tensor_parallel_weights_are_read_and_written) {
    static const int runs[][2] = { { 0, 1 }, { 0, 3 }, { 1, 1 }, { 1, 2 },
                                   { 1, 3 }, { 1, 4 }, { 2, 2 }, { 2, 4 } };
    char from[64], to[64];
    strcpy(from, new_root());
    write_wrapped(from);
    for (int i = 0; i < 8; i++) {
        wrapped w = { from, to, runs[i][0], 0 };
        xd_error error;
        xd_ctx *ctx = NULL;
        char *one = NULL, *two = NULL;
        size_t one_bytes = 0, two_bytes = 0;
        strcpy(to, new_root());
        const xd_ctx_desc desc = map_ctx_desc();
        const xd_result result = xd_run_threads(runs[i][1], &desc, through_wrapped, &w, &error);
        CHECK_EQ_INT(result, XD_OK);
        if (result != XD_OK) printf("kind %d on %d ranks: %s\n", runs[i][0], runs[i][1], error.message);
        CHECK_EQ_INT(w.wrong, 0);
        CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
        CHECK_EQ_INT(xd_file_load(ctx, path_in(from, "model.safetensors"), 0, &one, &one_bytes), XD_OK);
        CHECK_EQ_INT(xd_file_load(ctx, path_in(to, "model.safetensors"), 0, &two, &two_bytes), XD_OK);
        CHECK(one && two && one_bytes == two_bytes && memcmp(one, two, one_bytes) == 0);
        xd_release(ctx, one);
        xd_release(ctx, two);
        xd_ctx_destroy(ctx);
        remove_all(to);
    }
    remove_all(from);
}

/* ---- types ---- */

typedef struct converting {
    char directory[64];
    bool converts;
} converting;

static xd_result convert_rank(xd_comm *world, void *argument) {
    const converting *c = (const converting *)argument;
    char text[200];
    static const xd_weight_map map[2] = { { "w", "a", true, 1, 0, 0, 2 }, { "w", "b", true, 1, 2, 0, 1 } };
    uint16_t a[2 * 3] = { 9, 9, 9, 9, 9, 9 };
    double b[3] = { 9, 9, 9 };
    const int rank = xd_comm_rank(world);
    xd_tensor_part part[2];
    xd_weights_import_desc d;
    xd_checkpoint_report report;
    memset(part, 0, sizeof part);
    part[0].name = "a";
    part[0].dtype = XD_DTYPE_BF16;
    part[0].ndim = part[1].ndim = 2;
    part[0].shape[0] = 2;
    part[0].shape[1] = part[1].shape[1] = 3;
    part[0].range.begin = rank == 0 ? 0 : 4;
    part[0].range.end = rank == 0 ? 4 : 6;
    part[0].data = a;
    part[1].name = "b";
    part[1].dtype = XD_DTYPE_F64;
    part[1].shape[0] = 1;
    part[1].range.end = rank == 0 ? 0 : 3;
    part[1].data = b;
    memset(&d, 0, sizeof d);
    d.directory = c->directory;
    d.weights.parts = part;
    d.weights.part_count = 2;
    d.weights.maps = map;
    d.weights.map_count = 2;
    d.convert = c->converts;
    CHECK_EQ_INT(xd_weight_map_check(xd_comm_ctx(world), &d.weights), XD_ERROR_DTYPE);
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message,
                 "\"b\" is F64, and what else is in \"w\" is BF16"));
    const xd_result result = xd_weights_import(world, &d, &report);
    if (!c->converts) {
        snprintf(text, sizeof text, "\"a\" is BF16 here, and \"w\" in %s is F32, and convert is false",
                 c->directory);
        CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, text));
        CHECK(a[0] == 9 && b[0] == 9.0);
        return result;
    }
    CHECK_EQ_INT(report.converted, 1);
    CHECK_EQ_INT(report.loaded, 1);
    for (int k = 0; k < (rank ? 2 : 4); k++) {
        const int index = k + (rank ? 4 : 0); /* (r, c) of ours is (c, r) of theirs */
        CHECK(xd_load_f64(a, XD_DTYPE_BF16, k) == (double)((index % 3) * 3 + index / 3));
    }
    for (int k = 0; k < 3 && rank; k++) CHECK(b[k] == (double)(3 * k + 2));
    return result;
}

XD_TEST(types_are_converted_only_when_asked_each_weight_of_a_fused_tensor_to_its_own) {
    static const int64_t shape[2] = { 3, 3 };
    const xd_safetensors_entry entry = { "w", XD_DTYPE_F32, 2, shape };
    const float data[9] = { 0, 1, 2, 3, 4, 5, 6, 7, 8 };
    converting c = { "", false };
    xd_weights_writer_desc d;
    xd_weights_writer *writer = NULL;
    xd_ctx *ctx = NULL;
    strcpy(c.directory, new_root());
    memset(&d, 0, sizeof d);
    d.entries = &entry;
    d.entry_count = 1;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_create(ctx, c.directory, &d, &writer), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_write(writer, 0, 0, sizeof data, data), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_commit(writer), XD_OK);
    xd_ctx_destroy(ctx);
    CHECK_EQ_INT(xd_run_threads(2, NULL, convert_rank, &c, NULL), XD_ERROR_DTYPE);
    c.converts = true;
    CHECK_EQ_INT(xd_run_threads(2, NULL, convert_rank, &c, NULL), XD_OK);
    remove_all(c.directory);
}

/* ---- refusals ---- */

typedef struct refusal {
    const char *from, *to;
    const xd_weight_map *maps;
    int64_t map_count, part_count;
    bool lenient, exports;
    xd_result result;
    const char *words;
    xd_checkpoint_report report;
} refusal;

/* Runs with other entries; nothing is changed, and every rank says the same. */
static xd_result refuse_rank(xd_comm *world, void *argument) {
    refusal *r = (refusal *)argument;
    map_scene *s = map_create(xd_comm_rank(world), xd_comm_size(world), 1);
    xd_weights_import_desc in;
    xd_weights_export_desc out;
    xd_checkpoint_report report;
    memset(&in, 0, sizeof in);
    in.directory = r->from;
    in.weights = map_weights(s);
    if (r->maps) {
        in.weights.maps = r->maps;
        in.weights.map_count = r->map_count;
    }
    if (r->part_count) in.weights.part_count = r->part_count;
    in.lenient = r->lenient;
    memset(&out, 0, sizeof out);
    out.directory = r->to;
    out.weights = in.weights;
    const xd_result result =
        r->exports ? xd_weights_export(world, &out) : xd_weights_import(world, &in, &report);
    CHECK_EQ_INT(result, r->result);
    const char *message = xd_last_error(xd_comm_ctx(world))->message;
    CHECK(result == XD_OK || strstr(message, r->words) != NULL);
    if (result != r->result || (result != XD_OK && !strstr(message, r->words)))
        printf("rank %d, wanted \"%s\": %s\n", xd_comm_rank(world), r->words, message);
    if (!r->lenient)
        for (int i = 0; i < MAP_PARTS; i++) CHECK(s->data[i][0] == 0xA5);
    if (xd_comm_rank(world) == 0 && !r->exports) r->report = report;
    free(s);
    return XD_OK;
}

static void refuse(refusal *r, xd_result result, const char *words) {
    r->result = result;
    r->words = words;
    CHECK_EQ_INT(xd_run_threads(3, NULL, refuse_rank, r, NULL), XD_OK);
}

/* The list of entries with one changed. */
static void refuse_entry(refusal *r, int index, xd_weight_map entry, xd_result result, const char *words) {
    xd_weight_map maps[MAP_ENTRIES];
    memcpy(maps, map_entries, sizeof maps);
    maps[index] = entry;
    r->maps = maps;
    r->map_count = MAP_ENTRIES;
    refuse(r, result, words);
    r->exports = true;
    refuse(r, result, words);
    r->exports = false;
    r->maps = NULL;
}

static xd_weight_map changed(int index) {
    return map_entries[index];
}

XD_TEST(entries_that_make_no_sense_are_refused_by_name_on_every_rank) {
    char from[64], to[64];
    refusal r;
    strcpy(from, new_root());
    strcpy(to, new_root());
    map_write(from, map_theirs, MAP_THEIRS, 7, 0);
    memset(&r, 0, sizeof r);
    r.from = from;
    r.to = to;
    xd_weight_map e = changed(0);
    e.theirs = NULL;
    refuse_entry(&r, 0, e, XD_ERROR_ARGUMENT, "entry 0 of the map: their name \"\" is empty");
    e = changed(1);
    e.ours = "blocks.{}.{}";
    refuse_entry(&r, 1, e, XD_ERROR_ARGUMENT, "entry 1 of the map: our name \"blocks.{}.{}\"");
    e = changed(2);
    e.length = -1;
    refuse_entry(&r, 2, e, XD_ERROR_ARGUMENT,
                 "entry 2 of the map, \"h.{}.attn.c_attn.weight\": -1 indices from 6");
    e = changed(2);
    e.length = 0;
    refuse_entry(&r, 2, e, XD_ERROR_ARGUMENT, "a part of dimension 1 has no length");
    e = changed(3);
    e.ours = NULL;
    refuse_entry(&r, 3, e, XD_ERROR_ARGUMENT,
                 "entry 3 of the map leaves \"h.{}.attn.c_attn.weight\" out and says");
    e = changed(0);
    e.ours = "embed.wight";
    refuse_entry(&r, 0, e, XD_ERROR_ARGUMENT, "entry 0 of the map: no weight here is \"embed.wight\"");
    e = changed(8);
    e.transpose = true;
    refuse_entry(&r, 8, e, XD_ERROR_ARGUMENT,
                 "tensor \"blocks.0.norm\" has 1 dimensions, of which the map exchanges");
    e = changed(9);
    e.dim = 0;
    refuse_entry(&r, 9, e, XD_ERROR_ARGUMENT,
                 "tensor \"blocks.0.left\": \"stack.fused\" has no dimension 0 that");
    e = changed(1);
    e.length = 7;
    refuse_entry(&r, 1, e, XD_ERROR_SHAPE,
                 "tensor \"blocks.0.q.weight\": indices [0, 7) of dimension 0, which has 6");
    e = changed(1);
    e.length = 5;
    refuse_entry(&r, 1, e, XD_ERROR_SHAPE,
                 "tensor \"blocks.0.q.weight\" of ours has 30 elements, the map names 25");
    e = changed(2);
    e.their_begin = 5;
    refuse_entry(
        &r, 2, e, XD_ERROR_ARGUMENT,
        "tensor \"h.0.attn.c_attn.weight\": the map has elements of it twice, for \"blocks.0.q.weight\" and "
        "\"blocks.0.k.weight\"");
    e = changed(3);
    e.their_begin = 9;
    refuse_entry(&r, 3, e, XD_ERROR_SHAPE,
                 "tensor \"h.0.attn.c_attn.weight\" of theirs has 55 elements, the map names 50");
    e = changed(13);
    e.our_begin = 1;
    refuse_entry(&r, 13, e, XD_ERROR_ARGUMENT,
                 "tensor \"gate_up\": the map has elements of it twice, for \"gate\" and \"up\"");
    e = changed(8);
    e.theirs = "h.{}.scale";
    refuse_entry(&r, 8, e, XD_ERROR_ARGUMENT, "tensor \"h.0.scale\": the map has elements of it twice");
    remove_all(from);
    remove_all(to);
}

/* Writes their files with a tensor replaced, or `count` of them. */
static void write_changed(const char *directory, int index, map_tensor t, int count) {
    map_tensor list[MAP_THEIRS + 1];
    memcpy(list, map_theirs, sizeof map_theirs);
    list[index] = t;
    map_write(directory, list, count, 7, 0);
}

XD_TEST(files_that_differ_are_refused_by_name_or_reported_when_lenient) {
    static const map_tensor more = { "h.0.attn.bias", XD_DTYPE_F32, 1, { 4 } };
    char from[64];
    refusal r;
    strcpy(from, new_root());
    memset(&r, 0, sizeof r);
    r.from = from;
    write_changed(from, MAP_THEIRS, more, MAP_THEIRS + 1);
    refuse(&r, XD_ERROR_UNEXPECTED, "has 1 tensors more: h.0.attn.bias");
    CHECK_EQ_INT(r.report.unexpected, 1);
    map_tensor t = map_theirs[1];
    t.shape[1] = 12;
    write_changed(from, 1, t, MAP_THEIRS);
    refuse(&r, XD_ERROR_SHAPE, "\"h.0.attn.c_attn.weight\" is [5, 12] there and [5, 10] by the map");
    t = map_theirs[1];
    t.ndim = 3;
    t.shape[2] = 1;
    write_changed(from, 1, t, MAP_THEIRS);
    refuse(&r, XD_ERROR_SHAPE, "\"h.0.attn.c_attn.weight\" is [5, 10, 1] there and [5, 10] by the map");
    t = map_theirs[3];
    t.dtype = XD_DTYPE_I16;
    write_changed(from, 3, t, MAP_THEIRS);
    refuse(&r, XD_ERROR_DTYPE, "\"blocks.0.q.bias\" is BF16 here, and \"h.0.attn.c_attn.bias\" in");
    map_write(from, map_theirs, MAP_THEIRS - 1, 7, 0);
    refuse(&r, XD_ERROR_MISSING, "1 of 17 tensors are not in");
    CHECK_EQ_STR(r.report.names, "empty");
    t = map_theirs[1];
    t.name = "other";
    write_changed(from, 1, t, MAP_THEIRS);
    refuse(&r, XD_ERROR_MISSING, "h.0.attn.c_attn.weight");
    r.lenient = true;
    refuse(&r, XD_OK, "");
    CHECK_EQ_INT(r.report.loaded, MAP_THEIRS - 1);
    CHECK_EQ_INT(r.report.missing, 1);
    CHECK_EQ_INT(r.report.unexpected, 1);
    CHECK_EQ_STR(r.report.names, "h.0.attn.c_attn.weight, other");
    remove_all(from);
    r.lenient = false;
    refuse(&r, XD_ERROR_IO, "");
}

/* Replaces a text of the index, which has it once. */
static void edit_index(const char *directory, const char *old, const char *text) {
    xd_ctx *ctx = NULL;
    char path[200], out[8000], *data = NULL;
    size_t bytes = 0;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", directory);
    CHECK_EQ_INT(xd_file_load(ctx, path, 0, &data, &bytes), XD_OK);
    const char *at = strstr(data, old);
    CHECK(at != NULL);
    if (at) snprintf(out, sizeof out, "%.*s%s%s", (int)(at - data), data, text, at + strlen(old));
    CHECK_EQ_INT(xd_file_save(ctx, path, out, strlen(out)), XD_OK);
    xd_release(ctx, data);
    xd_ctx_destroy(ctx);
}

/* Of an index that differs from its shards, each tensor that a shard has is there, and one that no shard has is missing. */
XD_TEST(an_index_that_differs_from_its_shards_is_reported_when_lenient) {
    char from[64];
    refusal r;
    strcpy(from, new_root());
    memset(&r, 0, sizeof r);
    r.from = from;
    map_write(from, map_theirs, MAP_THEIRS, 7, 300);
    edit_index(from, "\"turned\": \"", "\"renamed\": \"");
    refuse(&r, XD_ERROR_MISSING, "holds no tensor \"renamed\", where the index puts it");
    r.lenient = true;
    refuse(&r, XD_OK, "");
    CHECK_EQ_INT(r.report.loaded, MAP_THEIRS);
    CHECK_EQ_INT(r.report.missing + r.report.unexpected, 0);
    map_write(from, map_theirs, MAP_THEIRS, 7, 300);
    edit_index(from, "\"h.0.scale\": \"model-00005", "\"h.0.scale\": \"model-00004");
    r.lenient = false;
    refuse(&r, XD_ERROR_MISSING, "holds no tensor \"h.0.scale\", where the index puts it");
    r.lenient = true;
    refuse(&r, XD_OK, "");
    CHECK_EQ_INT(r.report.loaded, MAP_THEIRS);
    map_write(from, map_theirs, MAP_THEIRS - 1, 7, 300);
    edit_index(from, "\"turned\": \"", "\"empty\": \"");
    r.lenient = false;
    refuse(&r, XD_ERROR_MISSING, "holds no tensor \"empty\", where the index puts it");
    r.lenient = true;
    refuse(&r, XD_OK, "");
    CHECK_EQ_INT(r.report.loaded, MAP_THEIRS - 1);
    CHECK_EQ_INT(r.report.missing, 1);
    CHECK_EQ_STR(r.report.names, "empty");
    remove_all(from);
}

/* A tensor of a type that cannot be read is an error where it is asked for, and no other tensor's. */
XD_TEST(a_type_that_cannot_be_read_is_refused_where_it_is_asked_for) {
    static const char header[] = "{\"odd\":{\"dtype\":\"F8_E8M0\",\"shape\":[4],\"data_offsets\":[0,4]},"
                                 "\"plain\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[4,6]}}";
    const xd_weight_map out = { "odd", NULL, false, 0, 0, 0, 0 };
    const int64_t zero = 0, four = 4, two = 2;
    unsigned char file[8 + sizeof header - 1 + 6] = { sizeof header - 1 }, odd[4] = { 9, 9, 9, 9 },
                                               plain[2] = { 0, 0 };
    char path[200];
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    xd_weights_reader *reader = NULL;
    xd_tensor_part parts[2];
    xd_weights_import_desc in;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK && xd_comm_self(ctx, &self) == XD_OK);
    const char *from = new_root();
    snprintf(path, sizeof path, "%s/model.safetensors", from);
    memcpy(file + 8, header, sizeof header - 1);
    memcpy(file + sizeof file - 6, "abcdef", 6);
    CHECK_EQ_INT(xd_file_save(ctx, path, file, sizeof file), XD_OK);

    CHECK_EQ_INT(xd_weights_reader_open(ctx, from, NULL, &reader), XD_OK);
    CHECK_EQ_STR(xd_weights_reader_at(reader, 0)->type, "F8_E8M0");
    CHECK_EQ_INT(xd_weights_reader_at(reader, 0)->dtype, XD_DTYPE_NONE);
    CHECK_EQ_INT(xd_weights_reader_read(reader, 0, &zero, &four, odd), XD_ERROR_UNSUPPORTED);
    CHECK(strstr(xd_last_error(ctx)->message, "tensor \"odd\" is of type F8_E8M0, which cannot be read"));
    CHECK_EQ_INT(xd_weights_reader_read(reader, 1, &zero, &two, plain), XD_OK);
    CHECK(odd[0] == 9 && plain[0] == 'e' && plain[1] == 'f');
    xd_weights_reader_close(reader);

    memset(parts, 0, sizeof parts);
    for (int i = 0; i < 2; i++) {
        parts[i].name = i ? "plain" : "odd";
        parts[i].dtype = XD_DTYPE_U8;
        parts[i].ndim = 1;
        parts[i].shape[0] = parts[i].range.end = i ? 2 : 4;
        parts[i].data = i ? plain : odd;
    }
    memset(&in, 0, sizeof in);
    in.directory = from;
    in.weights.parts = parts;
    in.weights.part_count = 2;
    plain[0] = 0;
    CHECK_EQ_INT(xd_weights_import(self, &in, NULL), XD_ERROR_UNSUPPORTED);
    CHECK(strstr(xd_last_error(ctx)->message, "tensor \"odd\" in ") &&
          strstr(xd_last_error(ctx)->message, "F8_E8M0"));
    CHECK(plain[0] == 0);
    in.weights.parts = parts + 1;
    in.weights.part_count = 1;
    in.weights.maps = &out;
    in.weights.map_count = 1;
    CHECK_EQ_INT(xd_weights_import(self, &in, NULL), XD_OK);
    CHECK(plain[0] == 'e' && odd[0] == 9);
    remove_all(from);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

XD_TEST(an_entry_without_ours_leaves_a_tensor_out) {
    static const map_tensor more = { "h.12.attn.bias", XD_DTYPE_F32, 1, { 4 } };
    xd_weight_map maps[MAP_ENTRIES + 1];
    char from[64];
    refusal r;
    strcpy(from, new_root());
    memcpy(maps, map_entries, sizeof map_entries);
    memset(&maps[MAP_ENTRIES], 0, sizeof *maps);
    maps[MAP_ENTRIES].theirs = "h.{}.attn.bias";
    memset(&r, 0, sizeof r);
    r.from = from;
    r.maps = maps;
    r.map_count = MAP_ENTRIES + 1;
    r.lenient = true; /* what is loaded need not stay as it was */
    write_changed(from, MAP_THEIRS, more, MAP_THEIRS + 1);
    refuse(&r, XD_OK, "");
    CHECK_EQ_INT(r.report.unexpected, 0);
    CHECK_EQ_INT(r.report.loaded, MAP_THEIRS);
    r.lenient = false;
    maps[MAP_ENTRIES].theirs = "counts";
    refuse(&r, XD_ERROR_ARGUMENT,
           "tensor \"counts\" is \"counts\" in the files, which an entry of the map leaves out");
    remove_all(from);
}

static xd_result number_rank(xd_comm *world, void *argument) {
    map_scene *s = map_create(0, 1, 0);
    const char *to = (const char *)argument;
    for (int i = 0; i < 8; i++) {
        static const char *const words[] = {
            "-1 parts",         "-1 entries",      "17 entries of a map, maps is NULL",
            "staging_bytes 63", "-1 pairs",        "there is no directory",
            "-1 parts",         "staging_bytes 63"
        };
        xd_weights_import_desc in;
        xd_weights_export_desc out;
        memset(&in, 0, sizeof in);
        memset(&out, 0, sizeof out);
        in.directory = out.directory = i == 5 ? NULL : to;
        in.weights = map_weights(s);
        if (i == 0 || i == 6) in.weights.part_count = -1;
        if (i == 1) in.weights.map_count = -1;
        if (i == 2) in.weights.maps = NULL, in.weights.map_count = 17;
        if (i == 3 || i == 7) in.staging_bytes = out.staging_bytes = 63;
        out.weights = in.weights;
        if (i == 4) out.metadata_count = -1;
        CHECK_EQ_INT(i < 6 ? xd_weights_export(world, &out) : xd_weights_import(world, &in, NULL),
                     XD_ERROR_ARGUMENT);
        CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, words[i]) != NULL);
    }
    free(s);
    return XD_OK;
}

XD_TEST(numbers_and_pointers_that_cannot_be_are_refused) {
    char to[64];
    strcpy(to, new_root());
    CHECK_EQ_INT(xd_run_threads(1, NULL, number_rank, to, NULL), XD_OK);
    remove_all(to);
}

/* Numbers are as they are written: no zeros before them, nothing else. What follows the number may be digits too. */
XD_TEST(names_match_numbers_exactly) {
    static const char *const names[] = { "b.0.w",  "b.10.w",  "b.01.w", "b..w", "b.1x.w",
                                         "b.-1.w", "b.1.w.w", "x12",    "x112", "x02",
                                         "x2",     "x012",    "x13",    "x",    "x1234567892" };
    static const bool matches[] = { true, true, false, false, false, false, false, true,
                                    true, true, false, false, false, false, true };
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    for (int i = 0; i < 15; i++) {
        const xd_weight_map map = { "h.{}", i < 7 ? "b.{}.w" : "x{}2", false, 0, 0, 0, 0 };
        xd_tensor_part part;
        const xd_mapped_weights w = { &part, 1, &map, 1 };
        memset(&part, 0, sizeof part);
        part.name = names[i];
        part.dtype = XD_DTYPE_F32;
        CHECK_EQ_INT(xd_weight_map_check(ctx, &w), matches[i] ? XD_OK : XD_ERROR_ARGUMENT);
    }
    xd_ctx_destroy(ctx);
}

typedef struct differing {
    const char *from;
    int what;
} differing;

static xd_result differ(xd_comm *world, void *argument) {
    const differing *what = (const differing *)argument;
    const bool other = xd_comm_rank(world) == 1;
    map_scene *s = map_create(xd_comm_rank(world), xd_comm_size(world), 0);
    xd_weight_map maps[MAP_ENTRIES];
    xd_weights_import_desc d;
    memset(&d, 0, sizeof d);
    memcpy(maps, map_entries, sizeof maps);
    d.directory = what->from;
    d.weights = map_weights(s);
    d.weights.maps = maps;
    if (other && what->what == 0) d.lenient = true;
    if (other && what->what == 1) maps[12].length = 1;
    if (other && what->what == 2) maps[0].theirs = "wte";
    if (other && what->what == 3) s->part[0].shape[0]++;
    if (other && what->what == 4) d.staging_bytes = 128;
    if (other && what->what == 5) d.weights.map_count--;
    if (other && what->what == 6) d.directory = "/tmp/xdistill-map-nowhere";
    CHECK_EQ_INT(xd_weights_import(world, &d, NULL), what->what == 6 ? XD_ERROR_IO : XD_ERROR_MISMATCH);
    free(s);
    return XD_OK;
}

XD_TEST(ranks_that_pass_other_entries_settings_or_weights_get_mismatch) {
    char from[64];
    strcpy(from, new_root());
    map_write(from, map_theirs, MAP_THEIRS, 7, 0);
    for (int i = 0; i < 7; i++) {
        differing d = { from, i };
        CHECK_EQ_INT(xd_run_threads(3, NULL, differ, &d, NULL), XD_OK);
    }
    remove_all(from);
}

static xd_result open_others(xd_comm *world, void *argument) {
    const char *const *directories = (const char *const *)argument;
    map_scene *s = map_create(xd_comm_rank(world), xd_comm_size(world), 0);
    job j = { directories[xd_comm_rank(world) == 1], NULL, 0, 0, 0, 0, 0 };
    CHECK(import_scene(world, s, &j, NULL) != XD_OK);
    for (int i = 0; i < MAP_PARTS; i++) CHECK(s->data[i][0] == 0xA5);
    free(s);
    return XD_OK;
}

XD_TEST(ranks_that_see_other_files_or_none_read_nothing) {
    char one[64], two[64];
    const char *directories[2] = { one, two };
    strcpy(one, new_root());
    strcpy(two, new_root());
    map_write(one, map_theirs, MAP_THEIRS, 7, 0);
    CHECK_EQ_INT(xd_run_threads(3, NULL, open_others, (void *)directories, NULL), XD_OK);
    map_write(two, map_theirs, MAP_THEIRS, 7, 300);
    CHECK_EQ_INT(xd_run_threads(3, NULL, open_others, (void *)directories, NULL), XD_OK);
    remove_all(one);
    remove_all(two);
}

/* ---- files that fail ---- */

static xd_result import_pressed(xd_comm *world, void *argument) {
    const job *j = (const job *)argument;
    map_scene *s = map_create(xd_comm_rank(world), xd_comm_size(world), j->cut);
    const xd_result result = import_scene(world, s, j, NULL);
    free(s);
    return result;
}

static xd_result export_pressed(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    map_scene *s = map_create(xd_comm_rank(world), xd_comm_size(world), j->cut);
    for (int i = 0; i < MAP_PARTS; i++)
        for (int64_t k = 0; k < s->count[i]; k++) {
            int64_t there;
            const int their = map_origin(i, s->index[i][k], &there);
            map_value(their, there, 8, s->data[i] + (size_t)k * xd_dtype_size(map_own(i)->dtype));
        }
    const xd_result result = export_scene(world, s, j);
    free(s);
    return result;
}

XD_TEST(every_file_call_of_an_import_that_fails_fails_on_every_rank) {
    char from[64];
    press p;
    const xd_ctx_desc desc = press_desc(&p);
    long calls = 0, failed = 0;
    strcpy(from, new_root());
    map_write(from, map_theirs, MAP_THEIRS, 7, 0);
    for (long n = -1; n < calls || n < 0; n++) {
        job j = { from, NULL, 0, 64, 0, 0, 0 };
        p.calls = 0;
        p.at = n < 0 ? 1000000 : n;
        const xd_result result = xd_run_threads(2, &desc, import_pressed, &j, NULL);
        if (n < 0) {
            CHECK_EQ_INT(result, XD_OK);
            calls = p.calls;
        }
        failed += result != XD_OK;
    }
    CHECK(calls > 20 && failed > calls / 2); /* closing a file that was read may fail for all we care */
    remove_all(from);
}

XD_TEST(an_export_that_fails_at_any_file_call_leaves_the_older_model_or_the_new_one) {
    char from[64], to[64];
    press p;
    const xd_ctx_desc desc = press_desc(&p);
    long calls = 0, after_switch = 0; /* errors that say that the new model is in place */
    strcpy(from, new_root());
    strcpy(to, new_root());
    map_write(to, map_theirs, MAP_THEIRS, 7, 0);
    for (long n = -1; n < calls || n < 0; n++) {
        job j = { from, n < 0 ? from : to, 0, 0, 0, 0, 0 };
        p.calls = 0;
        p.at = n < 0 ? 1000000 : n;
        const xd_result result = xd_run_threads(2, &desc, export_pressed, &j, NULL);
        if (n < 0) calls = p.calls + 4; /* an older model takes a few more */
        if (n < 0) CHECK_EQ_INT(result, XD_OK);
        p.at = -1;
        if (n >= 0) {
            const int salt = map_salt(to);
            CHECK(result != XD_OK || salt == 8);
            CHECK(result == XD_OK || salt == 7 || after_switch++ < 8);
            (void)map_compare(to, salt);
        }
        map_write(to, map_theirs, MAP_THEIRS, 7, 0);
    }
    CHECK(calls > 20);
    remove_all(from);
    remove_all(to);
}

XD_TEST_MAIN()
