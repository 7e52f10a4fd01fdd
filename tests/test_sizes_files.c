/* Counts of files, writers and texts that disagree with what they belong to are refused with both numbers; helpers/sizes.h says
 * what is asked. tests/build/check_sizes.py holds the list of numbers against docs/api.txt. Less than a tenth of a second of processor. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "makers.h"
#include "xd_private.h" /* xdi_: the scene has private structs */
#include "xd_test.h"
#include "xd_test_topology.h"
#include "sizes_xtoken.h"
#include "weights_calls.h"

#include <unistd.h>

enum { FILE_BYTES = 8192, TENSORS = 2, TENSOR_BYTES = 24 };

/* A byte-level tokenizer of two bytes and their pair. */
static const char tokenizer_json[] =
    "{\"added_tokens\":[],\"normalizer\":null,\"post_processor\":null,\"decoder\":{\"type\":\"ByteLevel\"},"
    "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false},"
    "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]}}";

/* A file in memory, of which calls get all but the last `cut` bytes. */
typedef struct image {
    char data[FILE_BYTES];
    size_t bytes;
} image;

typedef struct stage {
    xsizes x; /* first */
    char directory[96], file[128];
    image tensors, cached, projected;
    xd_weights_entry entry[TENSORS];
    xd_weights_desc reading;
    xd_weights_writer_desc writer;
    xd_topology topology;
    xd_layout *layout;
    xd_named_tensor tensor[TENSORS];
    xd_weights_gather_desc gather;
    xd_tokenizer *tokenizer;
    xd_encoder *encoder;
    xd_tokenizer_desc loading;
    xd_tokenizer_special special;
    xd_decode_desc decode;
    xd_projection saved;
    int64_t cut, index, first_byte, bytes, text_bytes;
    float numbers[64];
} stage;
#define STAGE(data) stage *s = (stage *)(data)
#define CTX (s->x.base.ctx)

static const int64_t shape[2] = { 2, 3 };

static void set_stage(void *data) {
    STAGE(data);
    static const int32_t tokens[3] = { 0, 1, 2 };
    xsizes_set(data);
    memset(&s->reading, 0, sizeof s->reading);
    for (int i = 0; i < TENSORS; i++)
        s->entry[i] = (xd_weights_entry){ i ? "v" : "w", XD_DTYPE_F32, 2, shape };
    s->writer = (xd_weights_writer_desc){ .entries = s->entry, .entry_count = TENSORS };
    s->gather =
        (xd_weights_gather_desc){ .directory = s->directory, .tensors = s->tensor, .tensor_count = TENSORS };
    s->loading = (xd_tokenizer_desc){ .specials = &s->special };
    s->special = (xd_tokenizer_special){ "<end>", 3 };
    s->decode = (xd_decode_desc){ .ids = tokens, .count = 3 };
    s->saved = s->x.projection;
    s->saved.origin.options = xd_projection_defaults();
    s->cut = s->index = s->first_byte = 0;
    s->bytes = TENSOR_BYTES;
    s->text_bytes = 10;
}

/* ---- the calls ---- */

static xd_result call_open(void *data) {
    STAGE(data);
    xd_weights *file = NULL;
    const size_t bytes = s->tensors.bytes - (size_t)s->cut;
    XD_TRY(weights_open_memory(CTX, s->tensors.data, bytes, &s->reading, &file));
    xd_weights_close(file);
    return XD_OK;
}
static xd_result call_range(void *data) {
    STAGE(data);
    xd_weights *file = NULL;
    XD_TRY(weights_open_memory(CTX, s->tensors.data, s->tensors.bytes, NULL, &file));
    const xd_result result =
        weights_read_bytes(file, s->index, (uint64_t)s->first_byte, (size_t)s->bytes, s->numbers);
    xd_weights_close(file);
    return result;
}
static xd_result call_box(void *data) {
    STAGE(data);
    const int64_t offset[2] = { 0, 0 };
    xd_weights *file = NULL;
    XD_TRY(weights_open_memory(CTX, s->tensors.data, s->tensors.bytes, NULL, &file));
    const xd_result result = weights_read_box(file, s->index, offset, shape, s->numbers);
    xd_weights_close(file);
    return result;
}
static xd_result call_write(void *data) {
    STAGE(data);
    const xd_weights_writer_desc desc = { .entries = s->entry, .entry_count = TENSORS };
    xd_weights_writer *writer = NULL;
    XD_TRY(weights_write_file(CTX, s->file, &desc, &writer));
    const xd_result result = xd_weights_writer_write(writer, s->index, 0, XD_WEIGHTS_REST, s->numbers);
    xd_weights_writer_abort(writer);
    return result;
}
static xd_result call_weights(void *data) {
    STAGE(data);
    xd_weights_writer *writer = NULL;
    XD_TRY(weights_write_directory(CTX, s->directory, &s->writer, &writer));
    const xd_result result =
        xd_weights_writer_write(writer, s->index, (uint64_t)s->first_byte, (size_t)s->bytes, s->numbers);
    xd_weights_writer_abort(writer);
    return result;
}
static xd_result call_gather(void *data) {
    STAGE(data);
    return xd_weights_gather(s->x.base.comm, &s->gather);
}
static xd_result call_cache(void *data) {
    STAGE(data);
    xd_teacher_cache *cache = NULL;
    const size_t bytes = s->cached.bytes - (size_t)s->cut;
    XD_TRY(cache_open_memory(CTX, s->cached.data, bytes, NULL, &cache));
    xd_teacher_cache_close(cache);
    return XD_OK;
}
static xd_result call_entries(void *data) {
    STAGE(data);
    int32_t tokens[XK];
    double probabilities[XK];
    return cache_entries(CTX, s->x.cache, s->index, tokens, probabilities);
}
static xd_result call_document(void *data) {
    STAGE(data);
    xd_cached_document document;
    return xd_teacher_cache_find_document(CTX, s->x.cache, s->index, &document);
}
/* The block's tokens cover more of the document than the text has. */
static xd_result call_append(void *data) {
    STAGE(data);
    xd_teacher_cache_writer *writer = NULL;
    XD_TRY(cache_writer_create(CTX, s->file, &s->x.cache_desc, &writer));
    xd_result result = xd_teacher_cache_writer_document(writer, "a document", (size_t)s->text_bytes);
    if (result == XD_OK) result = xd_teacher_cache_writer_append(writer, &s->x.block);
    xd_teacher_cache_writer_abort(writer);
    return result;
}
static xd_result call_load(void *data) {
    STAGE(data);
    xd_tokenizer *tokenizer = NULL;
    const size_t bytes = sizeof tokenizer_json - 1 - (size_t)s->cut;
    XD_TRY(tokenizer_load_memory(CTX, tokenizer_json, bytes, &s->loading, &tokenizer));
    xd_tokenizer_destroy(tokenizer);
    return XD_OK;
}
static xd_result call_load_file(void *data) {
    STAGE(data);
    xd_tokenizer *tokenizer = NULL;
    FILE *out = fopen(s->file, "wb");
    if (out) CHECK(fwrite(tokenizer_json, sizeof tokenizer_json - 1, 1, out) == 1 && fclose(out) == 0);
    const xd_result result = tokenizer_load(CTX, s->file, &s->loading, &tokenizer);
    xd_tokenizer_destroy(tokenizer);
    remove(s->file);
    return result;
}
static xd_result call_encode(void *data) {
    STAGE(data);
    xd_encoding encoding;
    return xd_encode(s->encoder, "abbaababab", (size_t)s->text_bytes, NULL, &encoding);
}
static xd_result call_decode(void *data) {
    STAGE(data);
    size_t length = 0;
    return xd_tokenizer_decode(CTX, s->tokenizer, &s->decode, &length);
}
static xd_result call_save(void *data) {
    STAGE(data);
    const xd_result result = xd_projection_save(CTX, s->file, &s->saved);
    remove(s->file);
    return result;
}
static xd_result call_projection(void *data) {
    STAGE(data);
    xd_projection out;
    const size_t bytes = s->projected.bytes - (size_t)s->cut;
    XD_TRY(projection_load_memory(CTX, s->projected.data, bytes, NULL, &out));
    xd_projection_destroy(CTX, &out);
    return XD_OK;
}

/* ---- objects ---- */

/* The bytes of s->file, which goes. */
static void read_image(stage *s, image *out) {
    FILE *in = fopen(s->file, "rb");
    CHECK(in != NULL);
    if (!in) return;
    out->bytes = fread(out->data, 1, FILE_BYTES, in);
    CHECK(out->bytes > 0 && out->bytes < FILE_BYTES);
    fclose(in);
    remove(s->file);
}

static void make_files(stage *s) {
    const xd_weights_writer_desc desc = { .entries = s->entry, .entry_count = TENSORS };
    xd_weights_writer *tensors = NULL;
    xd_teacher_cache_writer *cache = NULL;
    CHECK_EQ_INT(weights_write_file(CTX, s->file, &desc, &tensors), XD_OK);
    for (int i = 0; i < TENSORS; i++)
        CHECK_EQ_INT(xd_weights_writer_write(tensors, i, 0, XD_WEIGHTS_REST, s->numbers), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_commit(tensors), XD_OK);
    read_image(s, &s->tensors);
    CHECK_EQ_INT(cache_writer_create(CTX, s->file, &s->x.cache_desc, &cache), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_document(cache, "a document", 10), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_append(cache, &s->x.block), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_commit(cache), XD_OK);
    read_image(s, &s->cached);
    CHECK_EQ_INT(xd_projection_save(CTX, s->file, &s->saved), XD_OK);
    read_image(s, &s->projected);
}

static void open_stage(void *data) {
    STAGE(data);
    xsizes_open(data);
    snprintf(s->directory, sizeof s->directory, "%s-directory", s->x.path);
    snprintf(s->file, sizeof s->file, "%s/file", s->directory);
    CHECK_EQ_INT(xd_ctx_settings(CTX)->files.make_directory(NULL, s->directory), 0);
    set_stage(data);
    make_files(s);
    s->topology = line_of("tp", s->x.base.ranks);
    xd_layout_desc layout = { .ndim = 2, .shape = { shape[0], shape[1] }, .topology = &s->topology };
    layout.placement[0].kind = XD_SHARD;
    CHECK_EQ_INT(xd_layout_create(CTX, &layout, &s->layout), XD_OK);
    for (int i = 0; i < TENSORS; i++)
        s->tensor[i] = (xd_named_tensor){ i ? "v" : "w", xd_tensor_view(s->layout, s->x.base.rank, s->numbers,
                                                                        XD_DTYPE_F32) };
    CHECK_EQ_INT(tokenizer_load_memory(CTX, tokenizer_json, sizeof tokenizer_json - 1, NULL, &s->tokenizer),
                 XD_OK);
    CHECK_EQ_INT(encoder_create(CTX, s->tokenizer, &s->encoder), XD_OK);
}

static void close_stage(void *data) {
    STAGE(data);
    char path[160];
    snprintf(path, sizeof path, "%s/model.safetensors", s->directory);
    remove(path);
    CHECK_EQ_INT(rmdir(s->directory), 0); /* nothing else is left */
    xd_encoder_destroy(s->encoder);
    xd_tokenizer_destroy(s->tokenizer);
    xd_layout_destroy(s->layout);
    xsizes_close(data);
}

#define AT(name, field, wrong, call, result, text, local) \
    { name, offsetof(stage, field), sizeof(((stage *)0)->field), wrong, call, result, text, local }
static const sizes_count counts[] = {
    AT("xd_weights_desc.bytes", cut, 1, call_open, XD_ERROR_FORMAT, "", true),
    AT("xd_weights_desc.max_header_bytes", reading.max_header_bytes, 8, call_open, XD_ERROR_FORMAT, "8",
       true),
    AT("xd_weights_read(index)", index, TENSORS, call_range, XD_ERROR_ARGUMENT, "tensor 2 of 2", true),
    AT("xd_weights_read_desc.first_byte", first_byte, 1, call_range, XD_ERROR_ARGUMENT,
       "24 bytes from 1 of tensor|which has 24", true),
    AT("xd_weights_read_desc.bytes", bytes, TENSOR_BYTES + 1, call_range, XD_ERROR_ARGUMENT,
       "25 bytes from 0 of tensor|which has 24", true),
    AT("xd_weights_read(index)", index, -1, call_box, XD_ERROR_ARGUMENT, "tensor -1 of 2", true),
    AT("xd_weights_writer_write(index)", index, TENSORS, call_write, XD_ERROR_ARGUMENT, "tensor 2 of 2",
       true),
    AT("xd_weights_writer_desc.entry_count", writer.entry_count, -1, call_weights, XD_ERROR_ARGUMENT,
       "-1 tensors", true),
    AT("xd_weights_writer_desc.metadata_count", writer.metadata_count, -1, call_weights, XD_ERROR_ARGUMENT,
       "-1 pairs of metadata", true),
    AT("xd_weights_writer_write(index)", index, TENSORS, call_weights, XD_ERROR_ARGUMENT, "tensor 2 of 2",
       true),
    AT("xd_weights_writer_write(first_byte)", first_byte, 1, call_weights, XD_ERROR_ARGUMENT,
       "24 bytes from 1 of tensor|which has 24", true),
    AT("xd_weights_writer_write(bytes)", bytes, TENSOR_BYTES + 1, call_weights, XD_ERROR_ARGUMENT,
       "25 bytes from 0 of tensor|which has 24", true),
    AT("xd_weights_gather_desc.root", gather.root, 5, call_gather, XD_ERROR_ARGUMENT, "root 5 of ", false),
    AT("xd_weights_gather_desc.root", gather.root, 1, call_gather, XD_ERROR_MISMATCH,
       "rank 1 passed root = 1, rank 0 passed 0", false),
    AT("xd_weights_gather_desc.tensor_count", gather.tensor_count, -1, call_gather, XD_ERROR_ARGUMENT,
       "-1 tensors", false),
    AT("xd_weights_gather_desc.tensor_count", gather.tensor_count, 1, call_gather, XD_ERROR_MISMATCH,
       "rank 1 passed tensor_count = 1, rank 0 passed ", false),
    AT("xd_weights_gather_desc.staging_bytes", gather.staging_bytes, 12, call_gather, XD_ERROR_MISMATCH,
       "rank 1 passed staging_bytes = 12, rank 0 passed ", false),
    AT("xd_weights_gather_desc.metadata_count", gather.metadata_count, -1, call_gather, XD_ERROR_ARGUMENT,
       "-1 pairs of metadata", true),
    AT("xd_teacher_cache_open_desc.data_bytes", cut, 1, call_cache, XD_ERROR_FORMAT, "", true),
    AT("xd_teacher_cache_read_desc.first, ids", index, XQ, call_entries, XD_ERROR_ARGUMENT,
       "1 positions from 6 on, it has 6", true),
    AT("xd_teacher_cache_find_document(d)", index, 1, call_document, XD_ERROR_ARGUMENT, "document 1 of 1",
       true),
    AT("xd_teacher_cache_writer_document(bytes)", text_bytes, 3, call_append, XD_ERROR_ARGUMENT,
       "row 3 is bytes 3 to 4 of 3", true),
    AT("xd_tokenizer_desc.special_count", loading.special_count, -1, call_load, XD_ERROR_ARGUMENT,
       "-1 special tokens", true),
    AT("xd_tokenizer_desc.data_bytes", cut, 1, call_load, XD_ERROR_FORMAT, "", true),
    AT("xd_tokenizer_desc.max_bytes", loading.max_bytes, 100, call_load_file, XD_ERROR_FORMAT, "100", true),
    AT("xd_encode(bytes)", text_bytes, INT64_MAX, call_encode, XD_ERROR_ARGUMENT,
       "a text of 9223372036854775807 bytes; less than ", true),
    AT("xd_decode_desc.count", decode.count, -1, call_decode, XD_ERROR_ARGUMENT, "-1 ids", true),
    AT("xd_decode_desc.capacity", decode.capacity, 4, call_decode, XD_ERROR_ARGUMENT,
       "3 ids without out, a capacity of 4 bytes", true),
    AT("xd_projection.entries", saved.entries, 3, call_save, XD_ERROR_ARGUMENT,
       "a projection of 3 entries whose rows end at 20", true),
    AT("xd_projection_options.k", saved.origin.options.k, 0, call_save, XD_ERROR_ARGUMENT,
       "k 0 is outside [1, 1024]", true),
    AT("xd_projection_options.max_pieces", saved.origin.options.max_pieces, 33, call_save, XD_ERROR_ARGUMENT,
       "max_pieces 33 is outside [1, 32]", true),
    AT("xd_projection_load_desc.data_bytes", cut, 1, call_projection, XD_ERROR_FORMAT,
       " bytes for 12 student ids and 20 entries", true),
};
#undef AT

static const sizes_table table = {
    sizeof(stage), open_stage, set_stage, close_stage, NULL, 0, counts, sizeof counts / sizeof *counts,
};

XD_TEST(counts_of_files_that_disagree_are_refused_and_nothing_is_written) {
    for (int ranks = 1; ranks <= SIZES_RANKS; ranks++) CHECK(sizes_run_table(&table, ranks) > 4);
}

/* ---- queries without a result ---- */

#define ASK(name, right)                                        \
    do {                                                        \
        const bool asked = (right);                             \
        if (!asked) printf("    %s = %d\n", name, (int)number); \
        CHECK(asked);                                           \
    } while (0)

static void ask_file(const xd_weights *file, int64_t number) {
    ASK("xd_weights_at(index)", xd_weights_at(file, number) == NULL);
    ASK("xd_weights_data(index)", xd_weights_data(file, number) == NULL);
    ASK("xd_weights_file_at(index)", xd_weights_file_at(file, number) == NULL);
}

static xd_result query_rank(xd_comm *world, void *argument) {
    stage *s = (stage *)calloc(1, sizeof *s);
    xd_weights *model = NULL;
    (void)argument;
    s->x.base.ctx = xd_comm_ctx(world);
    s->x.base.comm = world;
    s->x.base.ranks = 1;
    open_stage(s);
    CHECK_EQ_INT(call_gather(s), XD_OK);
    CHECK_EQ_INT(weights_open_directory(CTX, s->directory, NULL, &model), XD_OK);
    CHECK(xd_weights_file_at(model, 0) && xd_weights_data(model, 0));
    const int64_t numbers[4] = { -1, TENSORS, INT64_MAX, INT64_MIN };
    for (int i = 0; i < 4; i++) {
        const int64_t number = numbers[i];
        ask_file(model, number);
    }
    xd_weights_close(model);
    close_stage(s);
    free(s);
    return XD_OK;
}

XD_TEST(queries_of_what_a_file_lacks_answer_nothing) {
    CHECK_EQ_INT(xd_run_threads(1, NULL, query_rank, NULL, NULL), XD_OK);
}

XD_TEST_MAIN()
