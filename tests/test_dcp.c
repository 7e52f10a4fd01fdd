/* tools/dcp.h: checkpoints of PyTorch's torch.distributed.checkpoint become model directories, and whatever lies is refused. That
 * PyTorch writes what is made by hand here, tests/build/test_dcp.py says. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp */
#endif

#include "dcp_scene.h"

#include <errno.h>

#include "../tools/dcp_join.h"
#include "weights_calls.h"

static xd_ctx *new_ctx(void) {
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    return ctx;
}

/* Converts root/from to root/to. */
static xd_result convert(xd_ctx *ctx, const char *root, const char *select, bool tensors_only,
                         uint64_t shard) {
    dcp_convert_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.source = path_in(root, "from");
    desc.target = path_in(root, "to");
    desc.select = select;
    desc.tensors_only = tensors_only;
    desc.max_shard_bytes = shard;
    return join_directory(ctx, &desc);
}

/* A new root with the files of the scene in root/from. */
static const char *save(const dcp_scene *s, xd_ctx *ctx) {
    const char *root = new_root();
    CHECK_EQ_INT(mkdir(path_in(root, "from"), 0777), 0);
    dcp_scene_save(s, ctx, path_in(root, "from"));
    return root;
}

/* Nothing but the source is in the root. */
static void check_nothing(xd_ctx *ctx, const char *root) {
    const char **names = NULL;
    int64_t count = 0;
    CHECK_EQ_INT(xd_file_list(ctx, root, &names, &count), XD_OK);
    for (int64_t i = 0; i < count; i++)
        if (strcmp(names[i], "from") != 0) printf("left: %s\n", names[i]);
    CHECK_EQ_INT(count, 1);
    xd_release(ctx, (void *)names);
}

/* Whether a directory has the tensors of the scene, bit for bit, under names without the first `skipped` bytes. */
static void check_tensors(const dcp_scene *s, xd_ctx *ctx, const char *directory, const char *select) {
    xd_weights *files = NULL;
    const size_t skipped = select ? strlen(select) : 0;
    CHECK_EQ_INT(weights_open_directory(ctx, directory, NULL, &files), XD_OK);
    for (int t = 0; files && t < DCP_TENSORS; t++) {
        const dcp_made *made = &s->tensor[t];
        unsigned char read[DCP_MOST * 8];
        const bool wanted = !select || strncmp(made->name, select, skipped) == 0;
        const int64_t index = xd_weights_find(files, made->name + (wanted ? skipped : 0));
        CHECK((index >= 0) == wanted);
        if (index < 0) continue;
        const xd_weights_tensor *info = xd_weights_at(files, index);
        CHECK_EQ_INT(info->dtype, made->type);
        CHECK_EQ_INT(info->ndim, made->ndim);
        CHECK(memcmp(info->shape, made->shape, (size_t)made->ndim * sizeof *made->shape) == 0);
        const size_t bytes = (size_t)dcp_made_numel(made) * xd_dtype_size(made->type);
        CHECK_EQ_INT(info->end - info->begin, bytes);
        CHECK_EQ_INT(weights_read_bytes(files, index, 0, bytes, read), XD_OK);
        CHECK(memcmp(read, s->value[t], bytes) == 0);
    }
    xd_weights_close(files);
}

XD_TEST(a_checkpoint_in_chunks_becomes_whole_tensors_with_the_same_bits) {
    static dcp_scene s;
    xd_ctx *ctx = new_ctx();
    for (int wide = 0; wide < 2; wide++)
        for (uint64_t shard = 0; shard <= 40; shard += 40) {
            dcp_scene_create(&s);
            s.wide = wide != 0;
            dcp_scene_files(&s);
            dcp_scene_metadata(&s);
            const char *root = save(&s, ctx);
            char *text = NULL;
            size_t bytes = 0;
            CHECK_EQ_INT(convert(ctx, root, NULL, false, shard), XD_OK);
            check_tensors(&s, ctx, path_in(root, "to"), NULL);
            CHECK_EQ_INT(xd_file_load(ctx, path_in(root, "to/objects.json"), 0, &text, &bytes), XD_OK);
            CHECK_EQ_STR(text, "{\n  \"step\": 12\n}");
            xd_release(ctx, text);
            CHECK_EQ_INT(convert(ctx, root, NULL, false, shard),
                         XD_ERROR_STATE); /* not over files that are there */
            remove_all(root);
        }
    xd_ctx_destroy(ctx);
}

/* Without "model.", or without "step", which is an object. */
XD_TEST(what_begins_with_a_prefix_is_left_out) {
    static const char *const prefixes[2] = { "model.", "step" };
    static dcp_scene s;
    xd_ctx *ctx = new_ctx();
    dcp_scene_create(&s);
    dcp_scene_files(&s);
    dcp_scene_metadata(&s);
    for (int i = 0; i < 2; i++) {
        const char *root = save(&s, ctx);
        xd_weights *file = NULL;
        char *text = NULL;
        size_t bytes = 0;
        dcp_convert_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.source = path_in(root, "from");
        desc.target = path_in(root, "to");
        desc.without = prefixes[i];
        CHECK_EQ_INT(join_directory(ctx, &desc), XD_OK);
        CHECK_EQ_INT(weights_open_file(ctx, path_in(root, "to/model.safetensors"), NULL, &file), XD_OK);
        CHECK_EQ_INT(weights_count(file), i == 0 ? 2 : DCP_TENSORS);
        CHECK(xd_weights_find(file, "scalar") >= 0 && xd_weights_find(file, "empty") >= 0);
        xd_weights_close(file);
        CHECK_EQ_INT(xd_file_load(ctx, path_in(root, "to/objects.json"), 0, &text, &bytes), XD_OK);
        CHECK_EQ_STR(text, i == 0 ? "{\n  \"step\": 12\n}" : "{}");
        xd_release(ctx, text);
        remove_all(root);
    }
    xd_ctx_destroy(ctx);
}

/* A type that cannot be read is that of its tensor: torchtitan saves tables of complex64. */
XD_TEST(a_tensor_of_a_type_that_cannot_be_read_can_be_left_out) {
    static const char header[] = "{\"rope\":{\"dtype\":\"C64\",\"shape\":[1],\"data_offsets\":[0,8]},"
                                 "\"w\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[8,10]}}";
    unsigned char bytes[8 + sizeof header - 1 + 10] = { sizeof header - 1 };
    static dcp_scene s;
    xd_ctx *ctx = new_ctx();
    memcpy(bytes + 8, header, sizeof header - 1);
    for (int form = 0; form < 2; form++) {
        dcp_convert_desc desc;
        dcp_scene_create(&s);
        dcp_scene_files(&s);
        s.tensor[0].dtype = "complex64";
        dcp_scene_metadata(&s);
        const char *root = form ? new_root() : save(&s, ctx);
        if (form) CHECK_EQ_INT(mkdir(path_in(root, "from"), 0777), 0);
        if (form)
            CHECK_EQ_INT(xd_file_save(ctx, path_in(root, "from/piece.safetensors"), bytes, sizeof bytes),
                         XD_OK);
        memset(&desc, 0, sizeof desc);
        desc.source = path_in(root, "from");
        desc.target = path_in(root, "to");
        CHECK_EQ_INT(join_directory(ctx, &desc), XD_ERROR_UNSUPPORTED);
        CHECK(strstr(
            xd_last_error(ctx)->message,
            form ? "tensor \"rope\" is of type C64, which cannot be converted; --without rope leaves it out"
                 : "tensor \"model.a\" is of type complex64"));
        check_nothing(ctx, root);
        xd_weights *files = NULL;
        desc.without = form ? "rope" : "model.a";
        CHECK_EQ_INT(join_directory(ctx, &desc), XD_OK);
        CHECK_EQ_INT(weights_open_directory(ctx, path_in(root, "to"), NULL, &files), XD_OK);
        CHECK(xd_weights_find(files, form ? "w" : "model.b") >= 0);
        CHECK_EQ_INT(xd_weights_find(files, desc.without), -1);
        xd_weights_close(files);
        remove_all(root);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(a_prefix_selects_tensors_and_is_left_out) {
    static dcp_scene s;
    xd_ctx *ctx = new_ctx();
    dcp_scene_create(&s);
    dcp_scene_files(&s);
    dcp_scene_metadata(&s);
    const char *root = save(&s, ctx);
    CHECK_EQ_INT(convert(ctx, root, "model.", false, 0), XD_OK);
    check_tensors(&s, ctx, path_in(root, "to"), "model.");
    CHECK(access(path_in(root, "to/objects.json"), F_OK) != 0);
    remove_all(path_in(root, "to"));
    CHECK_EQ_INT(convert(ctx, root, "optim.", false, 0), XD_ERROR_MISSING);
    CHECK(strstr(xd_last_error(ctx)->message, "begins with \"optim.\"") != NULL);
    CHECK_EQ_INT(convert(ctx, root, NULL, true, 0), XD_OK);
    check_tensors(&s, ctx, path_in(root, "to"), NULL);
    CHECK(access(path_in(root, "to/objects.json"), F_OK) != 0);
    remove_all(root);
    xd_ctx_destroy(ctx);
}

/* ---- hostile pickles ---- */

typedef struct hostile {
    const char *bytes;
    size_t count;
    int where;
    const char *says;
} hostile;

#define META "ctorch.distributed.checkpoint.metadata\n"
#define HOSTILE(bytes, says) \
    { bytes, sizeof(bytes) - 1, PICKLE_METADATA, says }
#define HOSTILE_TENSOR(bytes, says) \
    { bytes, sizeof(bytes) - 1, PICKLE_TENSOR, says }

static const hostile hostiles[] = {
    HOSTILE("\x80\x02"
            "cos\nsystem\n(X\x02\x00\x00\x00idtR.",
            "byte 2: \"os.system\" is not in the list of classes"),
    HOSTILE("\x80\x04\x8c\x08"
            "builtins\x8c\x04"
            "eval\x93.",
            "byte 18: \"builtins.eval\" is not in the list"),
    HOSTILE("\x80\x04\x8c\x05"
            "torch\x8c\x04"
            "load\x93.",
            "\"torch.load\" is not in the list"),
    HOSTILE("ctorch\nSize.__class__\n.", "\"torch.Size.__class__\" is not in the list"),
    HOSTILE("cbuiltins\ngetattr\n.", "\"builtins.getattr\" is not in the list"),
    HOSTILE("ccodecs\n_de\x1b[2Jcode\n.", "\"codecs._de\\x1b[2Jcode\" is not in the list"),
    HOSTILE("(ios\nsystem\n.", "byte 1: instruction 0x69, INST, is not in the list"),
    HOSTILE("(o.", "byte 1: instruction 0x6f, OBJ, is not in the list"),
    HOSTILE("\x82\x01.", "EXT1"),
    HOSTILE("\x84\x01\x00\x00\x00.", "EXT4"),
    HOSTILE("Pabc\n.", "PERSID"),
    HOSTILE("NQ.", "a reference to a storage outside of a tensor"),
    HOSTILE(")}\x92.", "NEWOBJ_EX"),
    HOSTILE("N)R.", "byte 2: a call of what is no class"),
    HOSTILE("ctorch._utils\n_rebuild_tensor_v2\n)R.",
            "\"torch._utils._rebuild_tensor_v2\" is not in the list"),
    HOSTILE_TENSOR("cpathlib\nPosixPath\n)R.", "\"pathlib.PosixPath\" is not in the list"),
    HOSTILE_TENSOR("ctorch._utils\n_rebuild_parameter\n)R.", "_rebuild_parameter\" is not in the list"),
    HOSTILE(META "Metadata\n)R.", "\"Metadata\" is not made this way"),
    HOSTILE(META "Metadata\n(Nt\x81.", "arguments of a new \"Metadata\""),
    HOSTILE("ctorch\nSize\n)\x81.", "\"Size\" is not made this way"),
    HOSTILE("ctorch\nSize\n]R.", "that are no tuple"),
    HOSTILE("ccollections\nOrderedDict\n(]tR.", "arguments of an OrderedDict"),
    HOSTILE("}}b.", "a state for what has none"),
    HOSTILE(META "Metadata\n)\x81}b}b.", "a second state of a \"Metadata\""),
    HOSTILE("N2.", "DUP"),
    HOSTILE("NN0.", "POP"),
    HOSTILE("Ng0\n.", "GET"),
    HOSTILE("L1L\n.", "LONG"),
    HOSTILE("S'x'\n.", "STRING"),
    HOSTILE("\x8b\xff\xff\xff\x7f.", "LONG4"),
    HOSTILE("\x8a\xff.", "an integer of 255 bytes"),
    HOSTILE("X\xff\xff\xff\xff"
            "ab.",
            "takes 4294967295 bytes, and 3 are left"),
    HOSTILE("\x8d\xff\xff\xff\xff\xff\xff\xff\xff.", "takes 18446744073709551615 bytes, and 1 are left"),
    HOSTILE("\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
            "a frame of 9223372036854775807 bytes, and 2 are left"),
    HOSTILE("h\x05.", "byte 0: the value of memory 5, and 0 have been kept"),
    HOSTILE("Nr\xff\xff\xff\x7f.", "the value of memory 2147483647, and 0 have been kept"),
    HOSTILE("a.", "a value that is not on the stack"),
    HOSTILE("t.", "looks for a mark, and there is none"),
    HOSTILE("N(\x85.", "a tuple of 1 values, and 0 are on the stack"),
    HOSTILE("]N(a.", "a value that is not on the stack"),
    HOSTILE("N", "byte 1: the pickle has no end"),
    HOSTILE("", "byte 0: the pickle has no end"),
    HOSTILE("N.N", "1 bytes after the end"),
    HOSTILE("NN.", "an end with 0 marks and 2 values"),
    HOSTILE("(N.", "an end with 1 marks and 1 values"),
    HOSTILE("\x80\x09N.", "protocol 9, of 2 to 5"),
    HOSTILE("N\x80\x02.", "a protocol that is not at the beginning"),
    HOSTILE("}(Nu.", "a key without a value"),
    HOSTILE(")(Ne.", "items for what is no list"),
    HOSTILE("NNNs.", "items for what is no dict"),
    HOSTILE("NN\x93.", "a class whose name is no text"),
    HOSTILE("cos", "a name that does not end"),
    HOSTILE("\x96\x01\x00\x00\x00\x00\x00\x00\x00"
            "a.",
            "BYTEARRAY8"),
    HOSTILE("\x97.", "NEXT_BUFFER"),
    HOSTILE("(\x91.", "FROZENSET"),
    HOSTILE("\xff.", "instruction 0xff, unknown, is not in the list"),
    HOSTILE("]q\x00h\x00"
            "a.",
            "the pickle is no Metadata"),
    HOSTILE(META "Metadata\n)\x81.", "no dicts state_dict_metadata and storage_data"),
    HOSTILE_TENSOR("N.", "an item that is no tensor"),
};
enum { HOSTILES = sizeof hostiles / sizeof *hostiles };

XD_TEST(hostile_pickles_are_refused_with_what_they_ask_for_and_where) {
    xd_ctx *ctx = new_ctx();
    CHECK(HOSTILES >= 30);
    for (int i = 0; i < HOSTILES; i++) {
        const hostile *h = &hostiles[i];
        unsigned char *bytes =
            (unsigned char *)malloc(h->count ? h->count : 1); /* a sanitizer sees its end */
        xd_result result;
        memcpy(bytes, h->bytes, h->count);
        if (h->where == PICKLE_METADATA) {
            dcp d;
            memset(&d, 0, sizeof d);
            result = dcp_open_memory(&d, ctx, "a pickle", bytes, h->count);
            dcp_close(&d);
        } else {
            item_archive archive;
            item_tensor tensor;
            pickle p;
            memset(&archive, 0, sizeof archive);
            result = pickle_open(&p, ctx, "a pickle", bytes, h->count, h->where);
            if (result == XD_OK) result = item_read_tensor(&archive, &p, &tensor);
            pickle_close(&p);
        }
        CHECK_EQ_INT(result, XD_ERROR_FORMAT);
        if (!strstr(xd_last_error(ctx)->message, h->says)) printf("%d: %s\n", i, xd_last_error(ctx)->message);
        CHECK(strstr(xd_last_error(ctx)->message, h->says) != NULL);
        free(bytes);
    }
    xd_ctx_destroy(ctx);
}

/* What a caller's memory has at most at once. */
typedef struct meter {
    size_t now, most;
} meter;

static void *meter_allocate(void *user, size_t bytes) {
    meter *m = (meter *)user;
    size_t *block = (size_t *)malloc(bytes + 16);
    if (!block) return NULL;
    *block = bytes;
    m->now += bytes;
    if (m->now > m->most) m->most = m->now;
    return block + 2;
}

static void meter_release(void *user, void *memory) {
    size_t *block = (size_t *)memory - 2;
    ((meter *)user)->now -= *block;
    free(block);
}

/* One byte makes a value of some forty: how many there may be is bounded, whatever the bytes. */
XD_TEST(a_pickle_of_one_byte_again_and_again_takes_bounded_memory) {
    static const struct {
        const char *bytes, *says;
    } cases[] = { { "N", "byte 1048576: more than 1048576 values wait to become one" },
                  { "(", "byte 1048576: more than 1048576 marks" },
                  { ")", "more than 1048576 values wait to become one" },
                  { "]q\x00", "more than 1048576 values wait to become one" } };
    enum { BYTES = 8 << 20 };
    meter m = { 0, 0 };
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    unsigned char *bytes = (unsigned char *)malloc(BYTES);
    memset(&desc, 0, sizeof desc);
    desc.allocator.allocate = meter_allocate;
    desc.allocator.release = meter_release;
    desc.allocator.user = &m;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const size_t each = cases[i].bytes[1] ? 3 : 1;
        dcp d;
        for (size_t k = 0; k < BYTES; k++) bytes[k] = (unsigned char)cases[i].bytes[k % each];
        memset(&d, 0, sizeof d);
        m.most = m.now;
        CHECK_EQ_INT(dcp_open_memory(&d, ctx, "a pickle", bytes, BYTES), XD_ERROR_FORMAT);
        if (!strstr(xd_last_error(ctx)->message, cases[i].says))
            CHECK_EQ_STR(xd_last_error(ctx)->message, cases[i].says);
        CHECK(m.most < (size_t)160 << 20);
        dcp_close(&d);
    }
    free(bytes);
    xd_ctx_destroy(ctx);
}

XD_TEST(every_beginning_of_a_pickle_is_refused) {
    static dcp_scene s;
    xd_ctx *ctx = new_ctx();
    dcp_scene_create(&s);
    dcp_scene_files(&s);
    dcp_scene_metadata(&s);
    for (size_t length = 0; length <= s.metadata.count; length++) {
        unsigned char *bytes = (unsigned char *)malloc(length ? length : 1);
        dcp d;
        memset(&d, 0, sizeof d);
        memcpy(bytes, s.metadata.data, length);
        CHECK_EQ_INT(dcp_open_memory(&d, ctx, "a pickle", bytes, length),
                     length == s.metadata.count ? XD_OK : XD_ERROR_FORMAT);
        dcp_close(&d);
        free(bytes);
    }
    xd_ctx_destroy(ctx);
}

/* ---- tensors that lie ---- */

typedef struct tensor_lie {
    int64_t size[2], stride[2], elements;
    const char *says; /* NULL: it is true */
} tensor_lie;

XD_TEST(a_tensor_that_leaves_its_storage_is_refused) {
    static const tensor_lie lies[] = {
        { { 3, 2 }, { 2, 1 }, 6, NULL },
        { { 3, 2 }, { 1, 3 }, 6, NULL },
        { { 3, 0 }, { 1, INT64_MAX }, 6, NULL },
        { { 1, 6 }, { INT64_MAX, 1 }, 6, NULL },
        { { 3, 2 }, { 2, 1 }, 5, "a storage of 5 elements of 4 bytes, and data/0 has 24 bytes" },
        { { 3, 2 }, { 2, 1 }, INT64_MAX, "a storage of 9223372036854775807 elements" },
        { { 3, 2 }, { 2, 1 }, -6, "a storage without a number of elements" },
        { { 3, 3 }, { 0, 0 }, 6, "a tensor of 9 elements in a storage of 6" },
        { { INT64_MAX, INT64_MAX }, { 0, 0 }, 6, "in a storage of 6" },
        { { 3, 2 }, { 2, INT64_MAX }, 6, "stride 9223372036854775807 of dimension 1" },
        { { 3, 2 }, { 3, 1 }, 6, "stride 1 of dimension 1 leaves a storage of 6" },
        { { 3, 2 }, { 3, 0 }, 6, "the last element is 6 of a storage of 6" },
        { { 3, 2 }, { -1, 1 }, 6, "a tensor without a shape and strides" },
        { { -3, 2 }, { 2, 1 }, 6, "a tensor without a shape and strides" },
    };
    static dcp_bytes bytes;
    static dcp_scene s;
    xd_ctx *ctx = new_ctx();
    dcp_scene_create(&s);
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        dcp_piece piece = s.piece[0];
        item_archive archive;
        item_tensor tensor;
        pickle p;
        memset(&archive, 0, sizeof archive);
        archive.data.found = true;
        archive.data.length = 24;
        archive.storages = 1;
        memcpy(piece.size, lies[i].size, sizeof lies[i].size);
        memcpy(piece.stride, lies[i].stride, sizeof lies[i].stride);
        bytes.count = 0;
        put_tensor(&bytes, &s.tensor[0], &piece, lies[i].elements);
        CHECK_EQ_INT(pickle_open(&p, ctx, "a pickle", bytes.data, bytes.count, PICKLE_TENSOR), XD_OK);
        CHECK_EQ_INT(item_read_tensor(&archive, &p, &tensor), lies[i].says ? XD_ERROR_FORMAT : XD_OK);
        if (lies[i].says) CHECK(strstr(xd_last_error(ctx)->message, lies[i].says) != NULL);
        archive.storages = 2;
        CHECK_EQ_INT(item_read_tensor(&archive, &p, &tensor), XD_ERROR_FORMAT);
        pickle_close(&p);
    }
    xd_ctx_destroy(ctx);
}

/* ---- directories that lie ---- */

/* A change of the scene when its files are made and .metadata is not. */
static const char *lie(dcp_scene *s, int which, xd_result *result) {
    static char control[] = "a\nb";
    dcp_piece *p = s->piece;
    const dcp_piece other = p[3];
    *result = XD_ERROR_FORMAT;
    switch (which) {
    case 0: p[4].offset = 100000; return "bytes there, and the file has";
    case 1: p[0].length--; return "no end of an archive";
    case 2: p[0].length = 10; return "10 bytes are no archive";
    case 3: p[4].length = INT64_MAX; return "share bytes";
    case 4: p[0].offset = -1; return "a number \"offset\" of 0 or more";
    case 5: p[0].length = -1; return "a number \"length\" of 0 or more";
    case 6: p[1].offset = p[3].offset; return "\"model.a\" and \"model.b\" share bytes of \"__1_0.distcp\"";
    case 7: p[1].file = "../__1_0.distcp"; return "\"model.a\" is in \"../__1_0.distcp\", which is no file";
    case 8: p[1].file = "/etc/passwd"; return "no file of the directory";
    case 9: p[1].file = ".."; return "no file of the directory";
    case 10: p[1].file = control; return "\"a\\x0ab\", which is no file";
    case 11: p[1].file = ""; return "the name of a file has 0 bytes";
    case 12:
        p[1].file = "__7_0.distcp";
        *result = XD_ERROR_MISSING;
        return "__7_0.distcp: cannot open";
    case 13: p[1].begin[0] = 2; return "two of its 2 chunks overlap";
    case 14: p[3].begin[1] = 0; return "two of its 2 chunks overlap";
    case 15: p[1].size[0] = 1; return "has 15 elements, and its chunks have 12";
    case 16: p[1].begin[0] = 4; return "a chunk of 2 at 4, and dimension 0 has 5";
    case 17: p[1].begin[0] = -3; return "a chunk without offsets and sizes";
    case 18: p[1].size[0] = INT64_MAX; return "a chunk of 9223372036854775807 at 3";
    case 19: s->tensor[0].shape[0] = 6; return "has 18 elements, and its chunks have 15";
    case 20: s->tensor[4].shape[1] = s->tensor[4].shape[0] = INT64_MAX; return "more than 2^62 bytes";
    case 21:
        s->tensor[0].dtype = "complex64";
        *result = XD_ERROR_UNSUPPORTED;
        return "\"model.a\" is of type complex64, which cannot be converted; --without model.a leaves it out";
    case 22: s->tensor[0].dtype = "Size"; return "tensor \"model.a\" has no type";
    case 23:
        s->tensor[0].dtype = "float64";
        *result = XD_ERROR_DTYPE;
        return "F32, and .metadata says F64";
    case 24:
        p[3].file = p[2].file, p[3].offset = p[2].offset, p[3].length = p[2].length;
        p[2].file = other.file, p[2].offset = other.offset, p[2].length = other.length;
        *result = XD_ERROR_SHAPE;
        return "not the shape that .metadata says, of";
    case 25: s->skip_place = 1; return "a chunk of \"model.a\" is in no file";
    case 26:
        s->tensor[1].name = "model.a";
        *result = XD_ERROR_ARGUMENT;
        return "both named \"model.a\"";
    case 27:
        s->more = "\x8c\x15"
                  "transform_descriptors]";
        return "is transformed";
    case 35:
        s->object_class = true;
        dcp_scene_files(s);
        return "\"os.system\" is not in the list of classes; --tensors-only leaves objects out";
    case 28: s->object_file = "../x"; return "\"step\" is in \"../x\"";
    case 29: s->tensor[3].name = "step"; return "\"step\" is a tensor and an object";
    case 30: s->tensor[0].name = ""; return "the name of a tensor has 0 bytes";
    case 31:
        s->tensor[3].name = "__metadata__";
        *result = XD_ERROR_ARGUMENT;
        return "__metadata__";
    case 32:
        s->tensor[3].name = "\xff\xfe";
        *result = XD_ERROR_ARGUMENT;
        return "UTF-8";
    case 33: p[5].offset = p[0].offset, p[5].length = p[0].length; return "share bytes";
    case 34: s->object_offset = p[4].offset, s->object_length = p[4].length; return "share bytes";
    default: return NULL;
    }
}

XD_TEST(a_directory_that_lies_is_refused_and_nothing_is_left) {
    static dcp_scene s;
    xd_ctx *ctx = new_ctx();
    for (int which = 0;; which++) {
        xd_result result;
        dcp_scene_create(&s);
        dcp_scene_files(&s);
        const char *says = lie(&s, which, &result);
        if (!says) break;
        dcp_scene_metadata(&s);
        const char *root = save(&s, ctx);
        CHECK_EQ_INT(convert(ctx, root, NULL, false, 0), result);
        const char *message = xd_last_error(ctx)->message;
        if (!strstr(message, says)) printf("%d: %s\n", which, message);
        CHECK(strstr(message, says) != NULL);
        check_nothing(ctx, root);
        remove_all(root);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(without_metadata_there_is_no_checkpoint) {
    static dcp_scene s;
    xd_ctx *ctx = new_ctx();
    dcp_scene_create(&s);
    dcp_scene_files(&s);
    dcp_scene_metadata(&s);
    const char *root = save(&s, ctx);
    CHECK_EQ_INT(remove(path_in(root, "from/.metadata")), 0);
    CHECK_EQ_INT(convert(ctx, root, NULL, false, 0), XD_ERROR_IO);
    CHECK(strstr(xd_last_error(ctx)->message, "/from has neither model.safetensors nor") != NULL);
    CHECK_EQ_INT(mkfifo(path_in(root, "from/.metadata"), 0600), 0); /* opening it would wait */
    CHECK_EQ_INT(convert(ctx, root, NULL, false, 0), XD_ERROR_IO);
    check_nothing(ctx, root);
    remove_all(root);
    xd_ctx_destroy(ctx);
}

/* ---- pieces in safetensors files ---- */

enum { TALL = 1100, WIDE = 1000 };

/* Rows [0, 600) and [600, TALL) in columns [0, 300) and [300, WIDE): 4 pieces of a tensor of more than one window. */
static void write_piece(xd_ctx *ctx, const char *directory, int number) {
    static float data[600 * 700];
    const int64_t begin[2] = { number / 2 * 600, number % 2 * 300 };
    const int64_t shape[2] = { number / 2 ? TALL - 600 : 600, number % 2 ? WIDE - 300 : 300 };
    const xd_weights_entry entry = { "model.w", XD_DTYPE_F32, 2, shape };
    char info[100], name[64];
    xd_weights_pair pair = { "DCP_SHARDING_INFO", info };
    xd_weights_writer_desc d;
    xd_weights_writer *writer = NULL;
    memset(&d, 0, sizeof d);
    d.entries = &entry;
    d.entry_count = 1;
    d.metadata = &pair;
    d.metadata_count = 1;
    for (int64_t i = 0; i < shape[0] * shape[1]; i++)
        data[i] = (float)((begin[0] + i / shape[1]) * WIDE + begin[1] + i % shape[1]);
    snprintf(info, sizeof info, "{\"model.w\": {\"saved_offsets\": [%d, %d]}}", (int)begin[0], (int)begin[1]);
    snprintf(name, sizeof name, "shard-%05d-model-00001-of-00001.safetensors", number + 1);
    CHECK_EQ_INT(weights_write_file(ctx, path_in(directory, name), &d, &writer), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_write(writer, 0, 0, XD_WEIGHTS_REST, data), XD_OK);
    CHECK_EQ_INT(xd_weights_writer_commit(writer), XD_OK);
}

XD_TEST(pieces_of_ranks_become_one_file) {
    xd_ctx *ctx = new_ctx();
    const char *root = new_root();
    xd_weights *file = NULL;
    int64_t wrong = 0;
    CHECK_EQ_INT(mkdir(path_in(root, "from"), 0777), 0);
    for (int i = 0; i < 4; i++) write_piece(ctx, path_in(root, "from"), i);
    CHECK_EQ_INT(convert(ctx, root, "optim.", false, 0), XD_ERROR_MISSING);
    CHECK_EQ_INT(convert(ctx, root, "model.", false, 0), XD_OK);
    CHECK_EQ_INT(weights_open_file(ctx, path_in(root, "to/model.safetensors"), NULL, &file), XD_OK);
    CHECK_EQ_INT(weights_count(file), 1);
    CHECK_EQ_STR(xd_weights_at(file, 0)->name, "w");
    CHECK_EQ_INT(xd_weights_at(file, 0)->end - xd_weights_at(file, 0)->begin, TALL * WIDE * 4);
    for (int64_t i = 0; i < TALL * WIDE; i++) {
        float value;
        memcpy(&value, (const char *)xd_weights_data(file, 0) + i * 4, sizeof value);
        wrong += value != (float)i;
    }
    CHECK_EQ_INT(wrong, 0);
    xd_weights_close(file);
    remove_all(path_in(root, "to"));
    CHECK_EQ_INT(remove(path_in(root, "from/shard-00002-model-00001-of-00001.safetensors")), 0);
    CHECK_EQ_INT(convert(ctx, root, NULL, false, 0), XD_ERROR_FORMAT);
    CHECK(strstr(xd_last_error(ctx)->message, "its 3 pieces have") != NULL);
    check_nothing(ctx, root);
    remove_all(root);
    xd_ctx_destroy(ctx);
}

/* Every byte of the files is changed in turn: elements and pickles have checksums, and the rest is either refused or not read. */
XD_TEST(a_byte_that_changes_is_found_or_changes_nothing) {
    static dcp_scene s;
    xd_ctx *ctx = new_ctx();
    int64_t refused = 0;
    dcp_scene_create(&s);
    dcp_scene_files(&s);
    dcp_scene_metadata(&s);
    const char *root = save(&s, ctx);
    for (size_t i = 0; i < s.file[1].count; i += 3) {
        s.file[1].data[i] ^= 0x55;
        CHECK_EQ_INT(xd_file_save(ctx, path_in(root, "from/__1_0.distcp"), s.file[1].data, s.file[1].count),
                     XD_OK);
        s.file[1].data[i] ^= 0x55;
        const xd_result result = convert(ctx, root, NULL, false, 0);
        refused += result != XD_OK;
        if (result == XD_OK) check_tensors(&s, ctx, path_in(root, "to"), NULL);
        if (result == XD_OK) remove_all(path_in(root, "to"));
    }
    CHECK(refused * 3 > (int64_t)s.file[1].count / 2);
    for (size_t length = 0; length < s.file[1].count; length += 7) {
        CHECK_EQ_INT(xd_file_save(ctx, path_in(root, "from/__1_0.distcp"), s.file[1].data, length), XD_OK);
        CHECK_EQ_INT(convert(ctx, root, NULL, false, 0), XD_ERROR_FORMAT);
    }
    check_nothing(ctx, root);
    remove_all(root);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
