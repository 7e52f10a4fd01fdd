/* Model directories of others through a map: read on any ranks with any cut, and written again to the bit. */
#define XDISTILL_IMPLEMENTATION
#include "map_job.h"
#include "press_files.h"
#include "weights_calls.h"
#include "wrap_calls.h"

/* ---- round trips ---- */

static xd_result round_trip(xd_comm *world, void *argument) {
    map_job *j = (map_job *)argument;
    map_scene *s = map_create(xd_comm_rank(world), xd_comm_size(world), j->cut);
    xd_checkpoint_report report;
    xd_result result = map_import(world, s, j, &report);
    if (result == XD_OK) {
        __atomic_add_fetch(&j->wrong, map_wrong(s, 7), __ATOMIC_RELAXED);
        CHECK_EQ_INT(report.loaded, MAP_THEIRS);
        CHECK_EQ_INT(report.missing + report.unexpected + report.wrong_shape + report.converted, 0);
        CHECK_EQ_STR(report.names, "");
        result = map_export(world, s, j);
    }
    free(s);
    return result;
}

static void check_round_trip(int ranks, map_job j) {
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
            map_job j = { from, to, cut, cut % 2 ? 64 : 0, 0, 0, 0 };
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
    const map_job j = { from, to, 1, 0, 250, 0, 0 };
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
    const xd_weights_entry entry = { "theirs", XD_DTYPE_F32, 2, shape };
    xd_weights_writer_desc d;
    xd_weights_writer *writer = NULL;
    xd_ctx *ctx = NULL;
    float *data = (float *)malloc(TALL * WIDE * sizeof *data);
    for (int i = 0; i < TALL * WIDE; i++) data[i] = (float)i;
    memset(&d, 0, sizeof d);
    d.entries = &entry;
    d.entry_count = 1;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(weights_write_directory(ctx, directory, &d, &writer), XD_OK);
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
    XD_TRY(xd_mesh_derive(mesh, &(xd_mesh_derive_desc){ .axes = "tp" }, &tp));
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
    XD_TRY(w->kind == 0 ? wrap_over_ddp(model, data, NULL, &parallel)
                        : wrap_over_fsdp(model, data, NULL, &parallel));
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
    const xd_weights_entry entries[2] = { { "wte", XD_DTYPE_F32, 2, shapes[0] },
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
    CHECK_EQ_INT(weights_write_directory(ctx, directory, &d, &writer), XD_OK);
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
    const xd_weights_export_desc out = { .directory = c->directory, .weights = d.weights };
    CHECK_EQ_INT(xd_weights_export(world, &out), XD_ERROR_DTYPE); /* the file stays: it is read below */
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
    const xd_weights_entry entry = { "w", XD_DTYPE_F32, 2, shape };
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
    CHECK_EQ_INT(weights_write_directory(ctx, c.directory, &d, &writer), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_write(writer, 0, 0, sizeof data, data), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_commit(writer), XD_OK);
    xd_ctx_destroy(ctx);
    CHECK_EQ_INT(xd_run_threads(2, NULL, convert_rank, &c, NULL), XD_ERROR_DTYPE);
    c.converts = true;
    CHECK_EQ_INT(xd_run_threads(2, NULL, convert_rank, &c, NULL), XD_OK);
    remove_all(c.directory);
}

XD_TEST_MAIN()
