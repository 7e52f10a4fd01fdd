/* examples/common/name_maps.h: a small Llama under the names of torchtitan and of Megatron, fused and interleaved, is read on two and
 * three ranks and written again to the bit. Where each element belongs is said here once more. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"
#include "checkpoint_files.h"

#include "../examples/common/name_maps.h"
#include "weights_calls.h"

enum { LAYERS = 3, D = 8, HEADS = 4, GROUPS = 2, HEAD = 3, HIDDEN = 7, VOCABULARY = 11, KINDS = 9 };
enum { PARTS = 3 + LAYERS * KINDS, MOST = 128 };
enum { TORCHTITAN, MEGATRON, MEGATRON_STACKED, FORMS };

/* ---- ours ---- */

static const struct {
    const char *name;
    int64_t rows, columns;
} kinds[KINDS] = {
    { "norm_1", D, 0 },       { "norm_2", D, 0 },       { "q", HEADS *HEAD, D },
    { "k", GROUPS *HEAD, D }, { "v", GROUPS *HEAD, D }, { "out", D, HEADS *HEAD },
    { "gate", HIDDEN, D },    { "up", HIDDEN, D },      { "down", D, HIDDEN },
};

/* A number for element (row, column) of one of our weights. */
static float value(int part, int64_t row, int64_t column) {
    return (float)(part * 1000 + row * 30 + column);
}

static void name_part(int i, char name[64], int64_t *rows, int64_t *columns) {
    static const char *const others[3] = { "embed.weight", "head.weight", "norm.weight" };
    if (i < 3) {
        strcpy(name, others[i]);
        *rows = i < 2 ? VOCABULARY : D;
        *columns = i < 2 ? D : 0;
        return;
    }
    snprintf(name, 64, "blocks.%d.%s.weight", (i - 3) / KINDS, kinds[(i - 3) % KINDS].name);
    *rows = kinds[(i - 3) % KINDS].rows;
    *columns = kinds[(i - 3) % KINDS].columns;
}

/* ---- theirs ---- */

typedef struct theirs {
    char names[PARTS][80];
    int64_t shape[PARTS][3];
    float data[PARTS][LAYERS * 20 * 12];
    xd_weights_entry entries[PARTS];
    int count;
} theirs;

static float *add(theirs *t, const char *name, int64_t layers, int64_t rows, int64_t columns) {
    const int at = t->count++;
    int ndim = 0;
    strcpy(t->names[at], name);
    if (layers) t->shape[at][ndim++] = layers;
    t->shape[at][ndim++] = rows;
    if (columns) t->shape[at][ndim++] = columns;
    t->entries[at].name = t->names[at];
    t->entries[at].dtype = XD_DTYPE_F32;
    t->entries[at].ndim = ndim;
    t->entries[at].shape = t->shape[at];
    return t->data[at];
}

static void fill(float *to, int part, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < (columns ? columns : 1); c++) *to++ = value(part, r, c);
}

/* Rows of linear_qkv: for each group its query heads, its key, its value. */
static void fill_qkv(float *to, int layer) {
    const int q = 3 + layer * KINDS + 2;
    for (int g = 0; g < GROUPS; g++)
        for (int h = 0; h < HEADS / GROUPS + 2; h++)
            for (int e = 0; e < HEAD; e++)
                for (int c = 0; c < D; c++) {
                    const bool query = h < HEADS / GROUPS;
                    const int part = query ? q : q + 1 + h - HEADS / GROUPS;
                    *to++ = value(part, (query ? g * (HEADS / GROUPS) + h : g) * HEAD + e, c);
                }
}

static void make_torchtitan(theirs *t) {
    static const char *const names[KINDS] = { "attention_norm",  "ffn_norm",        "attention.wq",
                                              "attention.wk",    "attention.wv",    "attention.wo",
                                              "feed_forward.w1", "feed_forward.w3", "feed_forward.w2" };
    char name[80];
    fill(add(t, "tok_embeddings.weight", 0, VOCABULARY, D), 0, VOCABULARY, D);
    fill(add(t, "output.weight", 0, VOCABULARY, D), 1, VOCABULARY, D);
    fill(add(t, "norm.weight", 0, D, 0), 2, D, 0);
    for (int i = 0; i < LAYERS * KINDS; i++) {
        snprintf(name, sizeof name, "layers.%d.%s.weight", i / KINDS, names[i % KINDS]);
        fill(add(t, name, 0, kinds[i % KINDS].rows, kinds[i % KINDS].columns), 3 + i, kinds[i % KINDS].rows,
             kinds[i % KINDS].columns);
    }
}

/* Tensor `kind` of one layer, at `to`. */
static void fill_megatron(float *to, int kind, int layer) {
    const int first = 3 + layer * KINDS;
    if (kind == 0) fill(to, first, D, 0);
    if (kind == 1) fill(to, first + 1, D, 0);
    if (kind == 2) fill_qkv(to, layer);
    if (kind == 3) fill(to, first + 5, D, HEADS * HEAD);
    if (kind == 4) fill(to, first + 6, HIDDEN, D);
    if (kind == 4) fill(to + HIDDEN * D, first + 7, HIDDEN, D);
    if (kind == 5) fill(to, first + 8, D, HIDDEN);
}

static void make_megatron(theirs *t, bool stacked) {
    enum { TENSORS = 6, QKV = (HEADS + 2 * GROUPS) * HEAD };
    static const struct {
        const char *name;
        int64_t rows, columns;
    } list[TENSORS] = {
        { "self_attention.linear_qkv.layer_norm_weight", D, 0 },
        { "mlp.linear_fc1.layer_norm_weight", D, 0 },
        { "self_attention.linear_qkv.weight", QKV, D },
        { "self_attention.linear_proj.weight", D, HEADS * HEAD },
        { "mlp.linear_fc1.weight", 2 * HIDDEN, D },
        { "mlp.linear_fc2.weight", D, HIDDEN },
    };
    char name[80];
    fill(add(t, "embedding.word_embeddings.weight", 0, VOCABULARY, D), 0, VOCABULARY, D);
    fill(add(t, "output_layer.weight", 0, VOCABULARY, D), 1, VOCABULARY, D);
    fill(add(t, "decoder.final_layernorm.weight", 0, D, 0), 2, D, 0);
    for (int k = 0; k < TENSORS; k++) {
        const int64_t size = list[k].rows * (list[k].columns ? list[k].columns : 1);
        float *all = NULL;
        snprintf(name, sizeof name, "decoder.layers.%s", list[k].name);
        if (stacked) all = add(t, name, LAYERS, list[k].rows, list[k].columns);
        for (int layer = 0; layer < LAYERS; layer++) {
            snprintf(name, sizeof name, "decoder.layers.%d.%s", layer, list[k].name);
            fill_megatron(stacked ? all + layer * size : add(t, name, 0, list[k].rows, list[k].columns), k,
                          layer);
        }
    }
}

/* ---- there and back ---- */

typedef struct job {
    int form;
    const char *from, *to;
    int64_t wrong;
} job;

static void make_maps(name_maps *m, int form) {
    const name_sizes sizes = { HEADS, GROUPS, HEAD, HIDDEN };
    m->count = 0;
    if (form == TORCHTITAN)
        name_torchtitan(m);
    else
        name_megatron(m, &sizes, form == MEGATRON_STACKED);
}

static xd_result run(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    const int64_t rank = xd_comm_rank(world), ranks = xd_comm_size(world);
    xd_tensor_part parts[PARTS];
    char names[PARTS][64];
    static __thread float data[PARTS][MOST];
    static __thread name_maps maps;
    xd_weights_import_desc in;
    xd_weights_export_desc out;
    memset(parts, 0, sizeof parts);
    memset(&in, 0, sizeof in);
    memset(&out, 0, sizeof out);
    make_maps(&maps, j->form);
    for (int i = 0; i < PARTS; i++) {
        int64_t rows, columns;
        name_part(i, names[i], &rows, &columns);
        parts[i].name = names[i];
        parts[i].dtype = XD_DTYPE_F32;
        parts[i].ndim = columns ? 2 : 1;
        parts[i].shape[0] = rows;
        parts[i].shape[1] = columns;
        const int64_t numel = rows * (columns ? columns : 1);
        parts[i].range.begin = numel * rank / ranks;
        parts[i].range.end = numel * (rank + 1) / ranks;
        parts[i].data = data[i];
    }
    in.directory = j->from;
    in.weights.parts = parts;
    in.weights.part_count = PARTS;
    in.weights.maps = maps.maps;
    in.weights.map_count = maps.count;
    out.directory = j->to;
    out.weights = in.weights;
    XD_TRY(xd_weights_import(world, &in, NULL));
    for (int i = 0; i < PARTS; i++)
        for (int64_t k = parts[i].range.begin; k < parts[i].range.end; k++) {
            const int64_t columns = parts[i].ndim == 2 ? parts[i].shape[1] : 1;
            if (data[i][k - parts[i].range.begin] != value(i, k / columns, k % columns))
                __atomic_add_fetch(&j->wrong, 1, __ATOMIC_RELAXED);
        }
    return xd_weights_export(world, &out);
}

/* Whether a directory has their tensors, and nothing else. */
static void check_directory(xd_ctx *ctx, const theirs *t, const char *directory) {
    xd_weights *reader = NULL;
    static float read[LAYERS * 20 * 12];
    CHECK_EQ_INT(weights_open_directory(ctx, directory, NULL, &reader), XD_OK);
    CHECK_EQ_INT(weights_count(reader), t->count);
    for (int i = 0; i < t->count; i++) {
        const int64_t index = xd_weights_find(reader, t->names[i]), zero[3] = { 0, 0, 0 };
        int64_t numel = 1;
        CHECK(index >= 0);
        if (index < 0) continue;
        for (int d = 0; d < t->entries[i].ndim; d++) numel *= t->shape[i][d];
        CHECK_EQ_INT(weights_read_box(reader, index, zero, t->shape[i], read), XD_OK);
        CHECK(memcmp(read, t->data[i], (size_t)numel * sizeof *read) == 0);
    }
    xd_weights_close(reader);
}

XD_TEST(a_llama_of_torchtitan_or_megatron_is_read_and_written_to_the_bit) {
    static theirs t;
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    for (int form = 0; form < FORMS; form++)
        for (int ranks = 1; ranks <= 3; ranks++) {
            char from[64], to[64];
            xd_error error;
            xd_weights_writer *writer = NULL;
            xd_weights_writer_desc d;
            strcpy(from, new_root());
            strcpy(to, new_root());
            memset(&t, 0, sizeof t);
            memset(&d, 0, sizeof d);
            if (form == TORCHTITAN)
                make_torchtitan(&t);
            else
                make_megatron(&t, form == MEGATRON_STACKED);
            d.entries = t.entries;
            d.entry_count = t.count;
            CHECK_EQ_INT(weights_write_directory(ctx, from, &d, &writer), XD_OK);
            for (int i = 0; i < t.count; i++) {
                size_t bytes = sizeof(float);
                for (int k = 0; k < t.entries[i].ndim; k++) bytes *= (size_t)t.shape[i][k];
                CHECK_EQ_INT(xd_weights_writer_write(writer, i, 0, bytes, t.data[i]), XD_OK);
            }
            CHECK_EQ_INT(xd_weights_writer_commit(writer), XD_OK);
            job j = { form, from, to, 0 };
            const xd_result result = xd_run_threads(ranks, NULL, run, &j, &error);
            CHECK_EQ_INT(result, XD_OK);
            if (result != XD_OK) printf("form %d: %s\n", form, error.message);
            CHECK_EQ_INT(j.wrong, 0);
            check_directory(ctx, &t, to);
            remove_all(from);
            remove_all(to);
        }
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
