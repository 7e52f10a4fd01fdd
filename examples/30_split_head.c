/* This example trains a model whose output weights are split over three ranks at uneven places, with
 * two data ranks, in buffers of the program's own. It saves after 20 steps on six ranks. One rank
 * goes on from there, and has the bits of one rank that made all steps.
 *
 *     cc -std=c99 -O2 examples/30_split_head.c -o split_head -lm -lpthread
 *     ./split_head FOLDER
 */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* The model has the last token's row of `embed` as hidden state, and `head` above it. */
enum { VOCABULARY = 400, WIDTH = 16, ALL = VOCABULARY * WIDTH, ROWS = 32, MICRO_BATCHES = 6 };

/* Bits do not depend on the cut if each place is a multiple of XD_HEAD_TILE. */
static const xd_interval cut[] = { { 0, 128 }, { 128, 320 }, { 320, VOCABULARY } };

typedef struct net {
    float embed[ALL], head[ALL];     /* the first rows of head: this rank's */
    float d_embed[ALL], d_head[ALL];
} net;

typedef struct run {
    int data, tp, first, last; /* ranks of each kind, and steps */
    const char *folder;
    net n; /* out, of rank 0 */
} run;

/* Loss and gradients of one micro-batch: token t is followed by 7 t + 3. */
static xd_result train_micro_batch(xd_ctx *ctx, const xd_vocab *vocab, net *n, int64_t number) {
    const xd_vocab_info own = xd_vocab_describe(vocab);
    float hidden[ROWS * WIDTH], d_hidden[ROWS * WIDTH];
    int32_t tokens[ROWS], labels[ROWS];
    xd_loss_values values;
    for (int i = 0; i < ROWS; i++) {
        tokens[i] = (int32_t)(number * ROWS + i) * 13 % VOCABULARY;
        labels[i] = (tokens[i] * 7 + 3) % VOCABULARY;
        memcpy(hidden + i * WIDTH, n->embed + tokens[i] * WIDTH, WIDTH * sizeof(float));
    }
    const xd_head_loss_desc d = {
        .loss = { .vocab = vocab, .hard_weight = 1.0,
                  .common = { .labels = xd_ids_of(labels, XD_DTYPE_I32),
                              .denominator_value = MICRO_BATCHES * ROWS } }, /* of the whole step */
        .student = { .hidden = xd_rows_of(hidden, XD_DTYPE_F32, ROWS, WIDTH),
                     .weight = xd_rows_of(n->head, XD_DTYPE_F32, own.end - own.begin, WIDTH) },
        .hidden_gradient = xd_rows_of(d_hidden, XD_DTYPE_F32, ROWS, WIDTH), /* complete on all ranks */
        .weight_gradient = n->d_head,
    };
    XD_TRY(xd_head_loss(ctx, &d, &values));
    for (int i = 0; i < ROWS * WIDTH; i++)
        n->d_embed[tokens[i / WIDTH] * WIDTH + i % WIDTH] += d_hidden[i];
    return XD_OK;
}

/* `embed` is whole on every rank of tp, and `head` is split as the vocabulary is. */
static xd_result describe(xd_comm *world, const xd_topology *tp, const xd_vocab *vocab, net *n,
                          xd_layout *layouts[2], xd_model **model) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_vocab_info own = xd_vocab_describe(vocab);
    xd_layout_desc rows = { .ndim = 2, .shape = { VOCABULARY, WIDTH }, .topology = tp };
    XD_TRY(xd_layout_create(ctx, &rows, &layouts[0]));
    rows.placement[0] = (xd_placement){ .kind = XD_SHARD, .dim = 0, .offsets = own.offsets };
    XD_TRY(xd_layout_create(ctx, &rows, &layouts[1]));
    XD_TRY(xd_model_create(ctx, &(xd_model_desc){ .rank = xd_comm_rank(world) }, model));

    xd_weight_desc w = { .name = "embed", .dtype = XD_DTYPE_F32, .ndim = 2,
                         .shape = { VOCABULARY, WIDTH }, .layout = layouts[0],
                         .value = n->embed, .gradient = n->d_embed, .room = ALL };
    XD_TRY(xd_weight_add(xd_model_root(*model), &w, NULL));
    w.name = "head";
    w.layout = layouts[1];
    w.value = n->head;
    w.gradient = n->d_head;
    w.room = (own.end - own.begin) * WIDTH;
    XD_TRY(xd_weight_add(xd_model_root(*model), &w, NULL));
    for (int i = 0; i < ALL; i++)
        n->embed[i] = 0.3f * sinf(1.7f * (float)i);
    for (int64_t i = 0; i < w.room; i++)
        n->head[i] = 0.3f * cosf(2.3f * (float)(own.begin * WIDTH + i));
    return xd_model_seal(*model);
}

static xd_result train(xd_comm *world, const run *r, const xd_vocab *vocab, xd_parallel *parallel,
                       net *n) {
    xd_optimizer *adamw;
    xd_param params[2];
    xd_tensor_part parts[2];
    int64_t count;
    XD_TRY(xd_parallel_params(parallel, 2, params, &count));
    XD_TRY(xd_parallel_parts(parallel, 2, parts, &count));
    xd_optimizer_desc d = xd_adamw_defaults(params, count);
    d.learning_rate = 0.01;
    XD_TRY(xd_optimizer_create(xd_comm_ctx(world), &d, &adamw));
    const xd_checkpoint_network all = { .parts = parts, .part_count = count, .optimizer = adamw };
    const xd_checkpoint_load_desc load = { r->folder, r->first, &all, 1 };
    const xd_checkpoint_save_desc save = { r->folder, r->last, &all, 1, .overwrite = true };

    if (r->first > 0) XD_TRY(xd_checkpoint_load(world, &load, NULL, NULL));
    XD_TRY(xd_parallel_publish(parallel));
    for (int step = r->first; step < r->last; step++) {
        for (int64_t k = 0; k < xd_parallel_micro_batches(parallel).own; k++) {
            const int64_t number = xd_parallel_micro_batch(parallel, k);
            memset(n->d_embed, 0, sizeof n->d_embed);
            memset(n->d_head, 0, sizeof n->d_head);
            XD_TRY(train_micro_batch(xd_comm_ctx(world), vocab, n, step * MICRO_BATCHES + number));
            XD_TRY(xd_parallel_push_micro_batch(parallel));
        }
        XD_TRY(xd_parallel_reduce(parallel));
        XD_TRY(xd_optimizer_step(adamw, NULL, NULL));
        XD_TRY(xd_parallel_publish(parallel));
    }
    if (r->tp > 1) XD_TRY(xd_checkpoint_save(world, &save));
    xd_optimizer_destroy(adamw);
    return XD_OK;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    run *r = argument;
    xd_mesh *mesh, *columns;
    xd_comm *data, *tp;
    xd_vocab *vocab;
    xd_layout *layouts[2];
    xd_model *model;
    xd_parallel *parallel;
    net n;
    const xd_mesh_desc grid = { .axes = { { "data", r->data }, { "tp", r->tp } } };
    XD_TRY(xd_mesh_create(world, &grid, &mesh));
    XD_TRY(xd_mesh_group(mesh, "data", &data));
    XD_TRY(xd_mesh_group(mesh, "tp", &tp));
    XD_TRY(xd_mesh_derive(mesh, &(xd_mesh_derive_desc){ .axes = "tp" }, &columns));
    const xd_vocab_desc v = { .size = VOCABULARY, .tp = tp,
                              .columns = r->tp > 1 ? &cut[xd_comm_rank(tp)] : NULL };
    XD_TRY(xd_vocab_create(xd_comm_ctx(world), &v, &vocab));
    XD_TRY(describe(world, xd_mesh_topology(columns), vocab, &n, layouts, &model));
    XD_TRY(xd_ddp_create(model, &(xd_ddp_desc){ data, MICRO_BATCHES }, &parallel));
    XD_TRY(train(world, r, vocab, parallel, &n));
    if (xd_comm_rank(world) == 0) r->n = n;

    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    for (int i = 0; i < 2; i++)
        xd_layout_destroy(layouts[i]);
    xd_vocab_destroy(vocab);
    xd_mesh_destroy(columns);
    xd_mesh_destroy(mesh);
    return XD_OK;
}

int main(int argc, char **argv) {
    const char *folder = argc > 1 ? argv[1] : "build/split-head";
    static run one = { 1, 1, 0, 40 }, six = { 2, 3, 0, 20 }, rest = { 1, 1, 20, 40 };
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    xd_error error = { 0 };
    six.folder = rest.folder = folder;
    if (xd_run_threads(1, &invariant, run_rank, &one, &error) != XD_OK ||
        xd_run_threads(6, &invariant, run_rank, &six, &error) != XD_OK ||
        xd_run_threads(1, &invariant, run_rank, &rest, &error) != XD_OK) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    if (memcmp(one.n.embed, rest.n.embed, sizeof one.n.embed) != 0 ||
        memcmp(one.n.head, rest.n.head, sizeof one.n.head) != 0)
        return 1;
    printf("six ranks, then one, have the bits of one\n");
    return 0;
}
