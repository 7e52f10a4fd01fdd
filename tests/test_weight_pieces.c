/* Model directories in pieces: what each rank has written for itself is read on any other ranks with any cut, and pieces that lie
 * are refused. tests/build/test_dcp_hf.py compares with torch.distributed.checkpoint. */
#define XDISTILL_IMPLEMENTATION
#include "map_scene.h"
#include "failing_heap.h"
#include "weights_calls.h"

/* ---- through files of the ranks ---- */

typedef struct job {
    const char *from, *to; /* either may be NULL */
    int cut;
    size_t staging_bytes;
    int64_t wrong, pieces;
} job;

static xd_result pass(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    map_scene *s = map_create(xd_comm_rank(world), xd_comm_size(world), j->cut);
    xd_weights_import_desc in;
    xd_weights_export_desc out;
    xd_result result = XD_OK;
    memset(&in, 0, sizeof in);
    in.directory = j->from;
    in.weights = map_weights(s);
    in.staging_bytes = j->staging_bytes;
    memset(&out, 0, sizeof out);
    out.directory = j->to;
    out.weights = in.weights;
    out.staging_bytes = j->staging_bytes;
    out.pieces = true;
    result = xd_weights_import(world, &in, NULL);
    if (result == XD_OK) __atomic_add_fetch(&j->wrong, map_wrong(s, 7), __ATOMIC_RELAXED);
    if (result == XD_OK && j->to) result = xd_weights_export(world, &out);
    free(s);
    return result;
}

static void run(int ranks, job *j) {
    xd_error error;
    const xd_ctx_desc desc = map_ctx_desc();
    const xd_result result = xd_run_threads(ranks, &desc, pass, j, &error);
    CHECK_EQ_INT(result, XD_OK);
    if (result != XD_OK) printf("%d ranks, cut %d: %s\n", ranks, j->cut, error.message);
    CHECK_EQ_INT(j->wrong, 0);
}

/* Reads whole tensors of theirs, and boxes of them; returns the number of pieces. */
static int64_t check_reader(const char *directory) {
    xd_ctx *ctx = NULL;
    xd_weights *reader = NULL;
    int64_t pieces = 0;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(weights_open_directory(ctx, directory, NULL, &reader), XD_OK);
    if (!reader) printf("%s\n", xd_last_error(ctx)->message);
    for (int i = 0; i < MAP_THEIRS && reader; i++) {
        const map_tensor *t = &map_theirs[i];
        const size_t size = xd_dtype_size(t->dtype);
        const int64_t index = xd_weights_find(reader, t->name);
        const xd_weights_tensor *info = xd_weights_at(reader, index);
        unsigned char data[MAP_MOST * 8], want[8];
        int64_t offset[3] = { 0, 0, 0 }, wrong = 0, extent[3];
        CHECK(info != NULL);
        if (!info) continue;
        pieces += info->piece_count;
        CHECK_EQ_STR(info->name, t->name);
        CHECK_EQ_INT(info->dtype, t->dtype);
        CHECK_EQ_INT(info->ndim, t->ndim);
        CHECK(memcmp(info->shape, t->shape, (size_t)t->ndim * sizeof *t->shape) == 0);
        memcpy(extent, t->shape, sizeof extent);
        if (t->ndim > 1 && extent[1] > 1) offset[1] = extent[1]-- > 0; /* without the first column */
        CHECK_EQ_INT(weights_read_box(reader, index, offset, extent, data), XD_OK);
        int64_t position = 0;
        for (int64_t k = 0; k < map_numel(t); k++) {
            const int64_t inner = t->ndim > 2 ? t->shape[2] : 1;
            if (offset[1] == 1 && k / inner % t->shape[1] == 0) continue;
            map_value(i, k, 7, want);
            wrong += memcmp(data + (size_t)position++ * size, want, size) != 0;
        }
        CHECK_EQ_INT(wrong, 0);
    }
    if (reader) CHECK_EQ_INT(weights_count(reader), MAP_THEIRS);
    xd_weights_close(reader);
    xd_ctx_destroy(ctx);
    return pieces;
}

XD_TEST(pieces_of_any_cut_are_read_on_any_other_ranks_to_the_bit) {
    char from[64];
    strcpy(from, new_root());
    map_write(from, map_theirs, MAP_THEIRS, 7, 0);
    CHECK_EQ_INT(check_reader(from), MAP_THEIRS);
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int cut = 0; cut < MAP_CUTS; cut++) {
            char to[64];
            strcpy(to, new_root());
            job out = { from, to, cut, cut % 2 ? 64 : 0, 0, 0 };
            run(ranks, &out);
            const int64_t pieces = check_reader(to);
            CHECK(pieces >= MAP_THEIRS);
            CHECK(ranks == 1 || pieces > MAP_THEIRS);
            job in = { to, NULL, (cut + ranks) % MAP_CUTS, cut % 3 ? 0 : 64, 0, 0 };
            run(1 + (ranks + cut) % 4, &in);
            remove_all(to);
        }
    remove_all(from);
}

XD_TEST(pieces_of_one_save_do_not_mix_with_those_of_another) {
    char from[64], to[64];
    xd_error error;
    const xd_ctx_desc desc = map_ctx_desc();
    strcpy(from, new_root());
    strcpy(to, new_root());
    map_write(from, map_theirs, MAP_THEIRS, 7, 0);
    job j = { from, to, 1, 0, 0, 0 };
    run(3, &j);
    const int64_t pieces = check_reader(to);
    CHECK_EQ_INT(xd_run_threads(2, &desc, pass, &j, &error), XD_ERROR_STATE);
    CHECK(strstr(error.message, "is there already") != NULL);
    CHECK_EQ_INT(check_reader(to), pieces);
    remove_all(from);
    remove_all(to);
}

/* ---- failures ---- */

enum { HOLE = 1, PAIRS, HEAP };

typedef struct failing {
    const char *to;
    int what;
    int64_t request; /* of rank 1 that gets nothing; HEAP */
    int failed;
} failing;

static xd_result fail(xd_comm *world, void *argument) {
    failing *f = (failing *)argument;
    const int rank = xd_comm_rank(world);
    map_scene *s = map_create(rank, xd_comm_size(world), MAP_FLAT);
    xd_weights_export_desc d;
    memset(&d, 0, sizeof d);
    d.directory = f->to;
    d.weights = map_weights(s);
    d.pieces = true;
    if (f->what == HOLE && rank == 1) s->part[0].range.end--;
    if (f->what == PAIRS && rank == 1) d.metadata_count = -1;
    heap_fails_in = f->what == HEAP && rank == 1 ? f->request : 0;
    const xd_result result = xd_weights_export(world, &d);
    heap_fails_in = 0;
    if (result != XD_OK) __atomic_add_fetch(&f->failed, 1, __ATOMIC_RELAXED);
    free(s);
    return result;
}

static int files_in(const char *directory) {
    int count = 0;
    DIR *d = opendir(directory);
    for (const struct dirent *e; d && (e = readdir(d)) != NULL;) count += e->d_name[0] != '.';
    if (d) closedir(d);
    return count;
}

XD_TEST(an_export_in_pieces_that_fails_on_a_rank_fails_on_all_and_leaves_no_file) {
    char to[64];
    xd_error error;
    xd_ctx_desc desc = heap_desc(XD_REDUCTION_DETERMINISTIC);
    desc.files = map_ctx_desc().files;
    strcpy(to, new_root());
    failing f = { to, HOLE, 0, 0 };
    CHECK_EQ_INT(xd_run_threads(2, &desc, fail, &f, &error), XD_ERROR_MISMATCH);
    CHECK(strstr(error.message, "embed.weight") != NULL);
    CHECK_EQ_INT(f.failed, 2);
    failing pairs = { to, PAIRS, 0, 0 };
    CHECK_EQ_INT(xd_run_threads(2, &desc, fail, &pairs, &error), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(pairs.failed, 2);
    CHECK_EQ_INT(files_in(to), 0);
    bool done = false;
    int64_t request = 1;
    for (; !done && request < 2000; request++) {
        failing heap = { to, HEAP, request, 0 };
        done = xd_run_threads(2, &desc, fail, &heap, &error) == XD_OK;
        CHECK(done || heap.failed == 2);
        if (!done) CHECK_EQ_INT(files_in(to), 0);
    }
    CHECK(request > 20);
    CHECK_EQ_INT(heap_live, 0);
    remove_all(to);
}

/* ---- pieces that lie ---- */

enum { FILES = 3 };

/* A file with one tensor, F32 [rows, 4], and what it says about it. */
typedef struct file {
    int64_t rows;
    xd_dtype dtype;
    const char *info; /* NULL: nothing */
} file;

typedef struct lie {
    file files[FILES];
    xd_result result;
    const char *says;
} lie;

#define W(offsets) "{\"w\": {\"saved_offsets\": " offsets "}}"
static const lie lies[] = {
    { { { 3, XD_DTYPE_F32, W("[0, 0]") },
        { 2, XD_DTYPE_F32, W("[3, 0]") },
        { 1, XD_DTYPE_F32, W("[5, 0]") } },
      XD_OK,
      "" },
    { { { 3, XD_DTYPE_F32, W("[2, 0]") },
        { 2, XD_DTYPE_F32, W("[0, 0]") },
        { 0, XD_DTYPE_F32, W("[5, 0]") } },
      XD_OK,
      "" },
    { { { 3, XD_DTYPE_F32, W("[0, 0]") },
        { 2, XD_DTYPE_F32, W("[2, 0]") },
        { 1, XD_DTYPE_F32, W("[4, 0]") } },
      XD_ERROR_FORMAT,
      "two of the 3 pieces of tensor \"w\" overlap" },
    { { { 3, XD_DTYPE_F32, W("[0, 0]") },
        { 2, XD_DTYPE_F32, W("[4, 0]") },
        { 1, XD_DTYPE_F32, W("[6, 0]") } },
      XD_ERROR_FORMAT,
      "tensor \"w\" has 28 elements, and its 3 pieces have 24" },
    { { { 3, XD_DTYPE_F32, NULL }, { 2, XD_DTYPE_F32, W("[3, 0]") }, { 1, XD_DTYPE_F32, W("[5, 0]") } },
      XD_OK,
      "" },
    { { { 3, XD_DTYPE_F32, NULL }, { 2, XD_DTYPE_F32, NULL }, { 1, XD_DTYPE_F32, NULL } },
      XD_ERROR_FORMAT,
      "overlap" },
    { { { 3, XD_DTYPE_F32, W("[0, 0]") },
        { 2, XD_DTYPE_I32, W("[3, 0]") },
        { 1, XD_DTYPE_F32, W("[5, 0]") } },
      XD_ERROR_FORMAT,
      "are F32 in 2 dimensions and I32 in 2" },
    { { { 3, XD_DTYPE_F32, W("[0]") }, { 2, XD_DTYPE_F32, W("[3, 0]") }, { 1, XD_DTYPE_F32, W("[5, 0]") } },
      XD_ERROR_FORMAT,
      "has no 2 offsets of tensor \"w\"" },
    { { { 3, XD_DTYPE_F32, W("[0, -1]") },
        { 2, XD_DTYPE_F32, W("[3, 0]") },
        { 1, XD_DTYPE_F32, W("[5, 0]") } },
      XD_ERROR_FORMAT,
      "offset -1 of dimension 1" },
    { { { 3, XD_DTYPE_F32, W("[0.5, 0]") },
        { 2, XD_DTYPE_F32, W("[3, 0]") },
        { 1, XD_DTYPE_F32, W("[5, 0]") } },
      XD_ERROR_FORMAT,
      "offset 0 of dimension 0" },
    { { { 3, XD_DTYPE_F32, W("[9223372036854775807, 0]") },
        { 2, XD_DTYPE_F32, W("[3, 0]") },
        { 1, XD_DTYPE_F32, W("[5, 0]") } },
      XD_ERROR_FORMAT,
      "offset 9223372036854775807 of dimension 0, where it has 3" },
    { { { 3, XD_DTYPE_F32, W("[9223372036854775804, 0]") },
        { 2, XD_DTYPE_F32, W("[3, 0]") },
        { 1, XD_DTYPE_F32, W("[5, 0]") } },
      XD_ERROR_FORMAT,
      "reach further than 2^63 bytes" },
    { { { 3, XD_DTYPE_F32, "{\"v\": {\"saved_offsets\": [0, 0]}}" },
        { 2, XD_DTYPE_F32, W("[3, 0]") },
        { 1, XD_DTYPE_F32, W("[5, 0]") } },
      XD_ERROR_FORMAT,
      "has no 2 offsets of tensor \"w\"" },
    { { { 3, XD_DTYPE_F32, "{}" }, { 2, XD_DTYPE_F32, W("[3, 0]") }, { 1, XD_DTYPE_F32, W("[5, 0]") } },
      XD_ERROR_FORMAT,
      "a file of 1 tensors is that of 0" },
    { { { 3, XD_DTYPE_F32, "{" }, { 2, XD_DTYPE_F32, W("[3, 0]") }, { 1, XD_DTYPE_F32, W("[5, 0]") } },
      XD_ERROR_FORMAT,
      "" },
};

static void write_piece(xd_ctx *ctx, const char *directory, int number, const file *f) {
    char name[64];
    const int64_t shape[2] = { f->rows, 4 };
    const xd_weights_entry entry = { "w", f->dtype, 2, shape };
    const xd_weights_pair pair = { "DCP_SHARDING_INFO", f->info };
    const float data[12] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 };
    xd_weights_writer_desc d;
    xd_weights_writer *writer = NULL;
    memset(&d, 0, sizeof d);
    d.entries = &entry;
    d.entry_count = 1;
    d.metadata = &pair;
    d.metadata_count = f->info != NULL;
    snprintf(name, sizeof name, "shard-%05d-model-00001-of-00001.safetensors", number + 1);
    CHECK_EQ_INT(weights_write_file(ctx, path_in(directory, name), &d, &writer), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_write(writer, 0, 0, XD_WEIGHTS_REST, data), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_commit(writer), XD_OK);
}

XD_TEST(pieces_that_lie_are_refused) {
    xd_ctx *ctx = NULL;
    const xd_ctx_desc desc = map_ctx_desc();
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        const char *root = new_root();
        xd_weights *reader = NULL;
        for (int f = 0; f < FILES; f++) write_piece(ctx, root, f, &lies[i].files[f]);
        CHECK_EQ_INT(weights_open_directory(ctx, root, NULL, &reader), lies[i].result);
        CHECK((reader != NULL) == (lies[i].result == XD_OK));
        if (!reader && !strstr(xd_last_error(ctx)->message, lies[i].says))
            printf("%d: %s\n", (int)i, xd_last_error(ctx)->message);
        if (!reader) CHECK(strstr(xd_last_error(ctx)->message, lies[i].says) != NULL);
        xd_weights_close(reader);
        remove_all(root);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(a_reader_refuses_boxes_outside_of_a_tensor_and_directories_without_one) {
    xd_ctx *ctx = NULL;
    const char *root = new_root();
    xd_weights *reader = NULL;
    float box[24];
    const int64_t offset[2] = { 1, 2 }, size[2] = { 4, 2 }, more[2] = { 6, 2 };
    const xd_ctx_desc desc = map_ctx_desc();
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    CHECK_EQ_INT(weights_open_directory(ctx, root, NULL, &reader), XD_ERROR_IO);
    CHECK(strstr(xd_last_error(ctx)->message,
                 " has neither model.safetensors nor model.safetensors.index.json"));
    CHECK(strstr(xd_last_error(ctx)->message, "model.safetensors.index.json") != NULL);
    for (int f = 0; f < FILES; f++) write_piece(ctx, root, f, &lies[0].files[f]);
    CHECK_EQ_INT(weights_open_directory(ctx, root, NULL, &reader), XD_OK);
    CHECK_EQ_INT(weights_count(reader), 1);
    CHECK_EQ_INT(xd_weights_at(reader, 0)->piece_count, 3);
    CHECK(xd_weights_at(reader, 1) == NULL && xd_weights_at(reader, -1) == NULL);
    CHECK_EQ_INT(xd_weights_find(reader, "v"), -1);
    CHECK_EQ_INT(weights_read_box(reader, 0, offset, size, box), XD_OK);
    const float want[8] = { 7, 8, 11, 12, 3, 4, 7, 8 };
    CHECK(memcmp(box, want, sizeof want) == 0);
    CHECK_EQ_INT(weights_read_box(reader, 0, offset, more, box), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "6 indices from 1 of dimension 0, which has 6") != NULL);
    CHECK_EQ_INT(weights_read_box(reader, 1, offset, size, box), XD_ERROR_ARGUMENT);
    xd_weights_close(reader);
    xd_weights_close(NULL);
    remove_all(root);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
