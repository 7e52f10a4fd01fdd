/* nn_transformer.c - the passes over the whole model.
 *
 *     x = embedding of the ids
 *     for each layer:   x = x + attention(norm(x));    x = x + feed_forward(norm(x))
 *     logits = head(norm(x))
 *
 * Tensor-parallel: every rank computes a part of what is added to x, and the parts are summed: two sums a
 * layer forward, and two backward, where a norm's gradient gathers what the ranks know about it.
 * Context-parallel: a rank has the queries of its own positions and the keys and values of all, so keys and
 * values are gathered, and their gradients summed. With fixed blocks of positions that is one more sum over these.
 *
 * A pass opens the root, then one layer after another, and the root closes last. */
#include "nn_transformer.h"
#include "nn_layers.h"
#include "nn_matmul.h"
#include "nn_sequence.h"

#include <stddef.h>
#include <string.h>

/* Returns from the calling function when a communication failed. */
#define NN_TRY(call)              \
    do {                          \
        const int code_ = (call); \
        if (code_) return code_;  \
    } while (0)

/* ---- the workspace ---- */

/* Nodes that a rank holds while it adds pieces: fewer than the pieces for all but short sums. */
static int64_t nn_most_nodes(const nn_model *model) {
    const int64_t heads = model->share.kv_count > 0 ? model->share.kv_count : 1;
    int64_t nodes = 8; /* of NN_PIECES pieces: no more than 1 + 2 log2(8) at once */
    if (!model->tp.invariant) return 0;
    for (int64_t n = 8; n < heads; n *= 2) nodes += 2;
    return nodes;
}

/* The sizes everything is made of. */
typedef struct nn_sizes {
    int64_t rows;     /* tokens held here = queries */
    int64_t key_rows; /* tokens of the whole context = keys */
    int keys;         /* of one sequence */
    int64_t hidden, ffn, q_width, kv_width;
} nn_sizes;

/* What one layer keeps for its backward pass. */
typedef struct nn_kept {
    float *x, *input_rms, *attn_in;    /* the layer's input, and its norm */
    float *q, *k, *v, *probs, *heads;  /* heads = what the attention heads put out */
    float *middle, *post_rms, *ffn_in; /* x after attention, and its norm */
    float *gate, *up, *act;
    float *raw_q, *raw_k, *q_rms, *k_rms; /* queries and keys before their norms */
} nn_kept;

/* What is needed once, not once a layer. */
typedef struct nn_space {
    nn_sizes size;
    float *layers;                    /* the nn_kept of layer 0 */
    int64_t layer_step;               /* floats from one layer's to the next; 0 when the layers share it */
    float *last, *last_rms, *head_in; /* the last layer's output, and its norm */
    float *cosine, *sine;
    float *part;                   /* [rows, hidden]: this rank's part of a sum */
    float *forest;                 /* nodes of that size; NULL unless sums are made of pieces */
    float *local_kv, *gathered_kv; /* context-parallel: own keys or values, everybody's in rank order */
    nn_sequence sequence;          /* its sums over positions are for the backward pass */
    float *key_nodes, *key_root; /* with blocks: as its nodes and root, of the gradients of keys and values */
    /* backward only */
    float *d_x, *d_q, *d_k, *d_v, *d_heads, *d_scores, *d_gate, *d_up, *d_act;
    float *d_local_k, *d_local_v;
    int64_t total; /* floats of all this */
} nn_space;

/* Takes `count` floats off a buffer; with base NULL only the offset moves: the planning run. Rounded up to
 * whole cache lines. */
static float *nn_take(float *base, int64_t *offset, int64_t count) {
    float *taken = base ? base + *offset : NULL;
    *offset += (count + 15) / 16 * 16;
    return taken;
}

static int nn_key_count(const nn_model *model, const nn_batch *batch) {
    int keys = 0;
    if (model->cp.size == 1) return batch->positions;
    for (int r = 0; r < model->cp.size; r++) keys += batch->cp_count[r];
    return keys;
}

static nn_sizes nn_sizes_of(const nn_model *model, const nn_batch *batch) {
    const nn_config *c = &model->config;
    nn_sizes s;
    s.keys = nn_key_count(model, batch);
    s.rows = (int64_t)batch->sequences * batch->positions;
    s.key_rows = (int64_t)batch->sequences * s.keys;
    s.hidden = c->hidden;
    s.ffn = model->share.ffn_count;
    s.kv_width = (int64_t)model->share.kv_count * c->head_dim;
    s.q_width = s.kv_width * (c->heads / c->kv_heads);
    return s;
}

static nn_kept nn_take_layer(const nn_model *model, const nn_sizes *s, float *base, int64_t *offset) {
    const int64_t heads = s->q_width / model->config.head_dim;
    const bool norms = model->config.extra == NN_QK_NORM;
    nn_kept a;
    a.x = nn_take(base, offset, s->rows * s->hidden);
    a.input_rms = nn_take(base, offset, s->rows);
    a.attn_in = nn_take(base, offset, s->rows * s->hidden);
    a.q = nn_take(base, offset, s->rows * s->q_width);
    a.k = nn_take(base, offset, s->key_rows * s->kv_width);
    a.v = nn_take(base, offset, s->key_rows * s->kv_width);
    a.probs = nn_take(base, offset, heads * s->rows * s->keys);
    a.heads = nn_take(base, offset, s->rows * s->q_width);
    a.middle = nn_take(base, offset, s->rows * s->hidden);
    a.post_rms = nn_take(base, offset, s->rows);
    a.ffn_in = nn_take(base, offset, s->rows * s->hidden);
    a.gate = nn_take(base, offset, s->rows * s->ffn);
    a.up = nn_take(base, offset, s->rows * s->ffn);
    a.act = nn_take(base, offset, s->rows * s->ffn);
    a.raw_q = nn_take(base, offset, norms ? s->rows * s->q_width : 0);
    a.raw_k = nn_take(base, offset, norms ? s->rows * s->kv_width : 0);
    a.q_rms = nn_take(base, offset, norms ? s->rows * heads : 0);
    a.k_rms = nn_take(base, offset, norms ? s->rows * heads : 0);
    return a;
}

/* `apart`: gradients of the keys and values here have room beside those of all. */
static void nn_take_backward(const nn_sizes *s, bool apart, float *base, int64_t *offset, nn_space *w) {
    w->d_x = nn_take(base, offset, s->rows * s->hidden);
    w->d_q = nn_take(base, offset, s->rows * s->q_width);
    w->d_k = nn_take(base, offset, s->key_rows * s->kv_width);
    w->d_v = nn_take(base, offset, s->key_rows * s->kv_width);
    w->d_heads = nn_take(base, offset, s->rows * s->q_width);
    w->d_scores = nn_take(base, offset, s->rows * s->keys);
    w->d_gate = nn_take(base, offset, s->rows * s->ffn);
    w->d_up = nn_take(base, offset, s->rows * s->ffn);
    w->d_act = nn_take(base, offset, s->rows * s->ffn);
    w->d_local_k = apart ? nn_take(base, offset, s->rows * s->kv_width) : w->d_k;
    w->d_local_v = apart ? nn_take(base, offset, s->rows * s->kv_width) : w->d_v;
}

static int64_t nn_larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* Floats of a layer's weights before one of them, here. */
static int64_t nn_layer_offset(const nn_model *model, int weight) {
    int64_t offset = 0;
    for (int i = 0; i < weight; i++) offset += nn_param_count(nn_block_param(model, 0, i));
    return offset;
}

/* Of keys and values together, as their gradients are. */
static int64_t nn_keys_floats(const nn_sizes *s) {
    return 2 * s->key_rows * s->kv_width;
}

/* Room for gradients that are open together: those of a layer, of the last norm and the head, of the embedding. */
static void nn_take_sums(const nn_model *model, const nn_sizes *s, float *base, int64_t *offset,
                         nn_space *w) {
    const int64_t vocab = model->share.vocab_count * s->hidden, keys = nn_keys_floats(s);
    const int64_t nodes = nn_positions_nodes(&w->sequence.at);
    const int64_t all = nn_larger(nn_layer_offset(model, NN_LAYER_WEIGHTS), s->hidden + vocab);
    int64_t largest = nn_larger(nn_larger(vocab, keys), s->hidden);
    for (int i = 0; i < NN_LAYER_WEIGHTS; i++)
        largest = nn_larger(largest, nn_param_count(nn_block_param(model, 0, i)));
    w->sequence.nodes = nn_take(base, offset, nodes * all);
    w->sequence.root = nn_take(base, offset, model->cp.size > 1 ? all : 0);
    w->sequence.room = nn_take(base, offset, nn_sums_room(largest));
    w->key_nodes = nn_take(base, offset, nodes * keys);
    w->key_root = nn_take(base, offset, model->cp.size > 1 ? keys : 0);
}

static nn_sequence nn_sequence_of(const nn_model *model, const nn_batch *batch) {
    nn_sequence s;
    memset(&s, 0, sizeof s);
    s.sequences = batch->sequences;
    s.positions = batch->positions;
    s.blocks = model->cp.invariant;
    s.at = nn_positions_share(model->cp.size, model->cp.rank, nn_key_count(model, batch));
    return s;
}

static nn_space nn_plan(const nn_model *model, const nn_batch *batch, bool training, float *base) {
    const bool gathers = model->cp.size > 1;
    const int layers = nn_layers_end(model) - nn_layers_begin(model);
    nn_space w;
    nn_sizes s;
    int64_t offset = 0, layer = 0;
    memset(&w, 0, sizeof w);
    w.size = s = nn_sizes_of(model, batch);
    w.sequence = nn_sequence_of(model, batch);
    (void)nn_take_layer(model, &s, NULL, &layer);
    w.layer_step = training && !model->recompute ? layer : 0;
    w.layers = nn_take(base, &offset, w.layer_step && layers > 1 ? layer * layers : layer);
    /* Forward alone, the last output takes the place of the layers' shared x. */
    w.last = training ? nn_take(base, &offset, s.rows * s.hidden) : w.layers;
    w.last_rms = nn_take(base, &offset, s.rows);
    w.head_in = nn_take(base, &offset, s.rows * s.hidden);
    w.cosine = nn_take(base, &offset, (int64_t)batch->positions * (model->config.head_dim / 2));
    w.sine = nn_take(base, &offset, (int64_t)batch->positions * (model->config.head_dim / 2));
    w.part = nn_take(base, &offset, s.rows * s.hidden);
    if (model->tp.invariant) w.forest = nn_take(base, &offset, nn_most_nodes(model) * s.rows * s.hidden);
    if (gathers) {
        w.local_kv = nn_take(base, &offset, s.rows * s.kv_width);
        w.gathered_kv = nn_take(base, &offset, s.key_rows * s.kv_width);
    }
    if (training) nn_take_backward(&s, gathers || w.sequence.blocks, base, &offset, &w);
    if (training && w.sequence.blocks) nn_take_sums(model, &s, base, &offset, &w);
    w.total = offset;
    return w;
}

/* That of a stage without layers is there too: its input. */
static nn_kept nn_layer_space(const nn_model *model, const nn_space *w, int layer) {
    int64_t offset = 0;
    layer -= nn_layers_begin(model);
    return nn_take_layer(model, &w->size, w->layers + layer * w->layer_step, &offset);
}

int64_t nn_workspace_floats(const nn_model *model, const nn_batch *batch, bool training) {
    return nn_plan(model, batch, training, NULL).total;
}

/* ---- pieces ---- */

static int nn_sum(const nn_group *group, float *x, int64_t count) {
    return group->size == 1 ? 0 : group->all_reduce_sum(group->user, x, count);
}

static void nn_add_to(int64_t count, const float *a, const float *b, float *out) {
    for (int64_t i = 0; i < count; i++) out[i] = a[i] + b[i];
}

/* y [rows, out] = x [rows, in] * weight^T, weight [out, in]. */
static void nn_linear(int64_t rows, int64_t in, int64_t out, const float *x, const float *weight, float *y) {
    nn_matmul(nn_dense(x, rows, in), nn_transpose(nn_dense(weight, out, in)), y, out, false);
}

/* Where the gradient of a layer's weight goes. */
static nn_place nn_layer_place(const nn_model *model, const nn_weights *b, int weight) {
    const nn_place place = { b->gradient[weight], nn_layer_offset(model, weight),
                             nn_layer_offset(model, NN_LAYER_WEIGHTS) };
    return place;
}

/* The gradient of a layer's matrix += d_y^T * x. */
static void nn_matrix_gradient(const nn_model *model, const nn_weights *b, const nn_space *w, int weight,
                               const float *x, const float *d_y) {
    const nn_param *p = nn_block_param(model, 0, weight);
    const nn_matrix_slope slope = { p->cols, p->rows, x, d_y, nn_layer_place(model, b, weight) };
    nn_sequence_matrix(&w->sequence, &slope);
}

/* d_x = d_y * weight, of a layer's matrix. */
static void nn_linear_backward(const nn_model *model, const nn_weights *b, const nn_space *w, int weight,
                               const float *d_y, float *d_x) {
    const nn_param *p = nn_block_param(model, 0, weight);
    nn_matmul(nn_dense(d_y, w->size.rows, p->rows), nn_dense(b->value[weight], p->rows, p->cols), d_x,
              p->cols, false);
}

/* From w->part, through a layer's norm, to w->d_x. */
static void nn_norm_gradient(const nn_model *model, const nn_weights *b, const nn_space *w, int weight,
                             const float *x, const float *inverse_rms) {
    const nn_norm_slope slope = {
        w->size.hidden, x, b->value[weight], inverse_rms, w->part, w->d_x, nn_layer_place(model, b, weight)
    };
    nn_sequence_norm(&w->sequence, &slope);
}

/* Sums by blocks of positions to the gradients of an open layer. */
static int nn_give_layer(const nn_model *model, const nn_weights *b, const nn_space *w) {
    const float *sum;
    if (!w->sequence.blocks) return 0;
    NN_TRY(nn_sequence_join(&w->sequence, &model->cp, nn_layer_offset(model, NN_LAYER_WEIGHTS), &sum));
    for (int i = 0; i < NN_LAYER_WEIGHTS; i++)
        nn_add_to(nn_param_count(nn_block_param(model, 0, i)), b->gradient[i],
                  sum + nn_layer_offset(model, i), b->gradient[i]);
    return 0;
}

/* ---- sums over the tensor-parallel ranks ---- */

/* One product whose inner dimension is split over the ranks. Element (r, i) of `a`, times row i of `weight` seen as [width,
 * hidden], i the number of the input. */
typedef struct nn_product {
    const float *a; /* [rows, width] */
    const float *weight;
    bool by_columns; /* weight is [hidden, width]: an output projection; else [width, hidden]: the way
                      * back through one */
    int64_t width;   /* held here */
    int64_t piece;   /* inputs of a piece */
} nn_product;

/* out [rows, hidden] (+)= the product over the inputs [begin, end). */
static void nn_multiply_range(const nn_product *p, const nn_sizes *s, int64_t begin, int64_t end, float *out,
                              bool add) {
    const nn_view a = nn_block(p->a + begin, s->rows, end - begin, p->width);
    const nn_view b = p->by_columns
                          ? nn_transpose(nn_block(p->weight + begin, s->hidden, end - begin, p->width))
                          : nn_dense(p->weight + begin * s->hidden, end - begin, s->hidden);
    nn_matmul(a, b, out, s->hidden, add);
}

/* Neighbours of the same size that make an aligned block become one: sizes are powers of two, `sizes` those of the nodes. */
static int nn_merge(float *forest, int64_t count, int64_t end, int64_t *sizes, int nodes) {
    while (nodes >= 2 && sizes[nodes - 1] == sizes[nodes - 2] && end % (2 * sizes[nodes - 1]) == 0) {
        float *left = forest + (nodes - 2) * count;
        nn_add_to(count, left, left + count, left);
        sizes[nodes - 2] *= 2;
        nodes--;
    }
    return nodes;
}

/* w->part = the sum, over all ranks, of products whose pieces go together: one to three of them. */
static int nn_sum_pieces(const nn_model *model, const nn_space *w, const nn_product *products, int n,
                         nn_pieces pieces) {
    const int64_t count = w->size.rows * w->size.hidden;
    int64_t sizes[64];
    int nodes = 0;
    for (int i = 0; i < pieces.count; i++) {
        for (int j = 0; j < n; j++) {
            const nn_product *p = &products[j];
            const int64_t begin = i * p->piece,
                          end = begin + p->piece < p->width ? begin + p->piece : p->width;
            nn_multiply_range(p, &w->size, begin, end, w->forest + nodes * count, j > 0);
        }
        sizes[nodes++] = 1;
        nodes = nn_merge(w->forest, count, pieces.first + i + 1, sizes, nodes);
    }
    return model->tp.sum_pieces(model->tp.user, w->forest, pieces, count, w->part);
}

/* w->part = that sum, whichever way the group sums. */
static int nn_sum_products(const nn_model *model, const nn_space *w, const nn_product *products, int n,
                           nn_pieces pieces) {
    if (model->tp.invariant) return nn_sum_pieces(model, w, products, n, pieces);
    for (int j = 0; j < n; j++)
        nn_multiply_range(&products[j], &w->size, 0, products[j].width, w->part, j > 0);
    return nn_sum(&model->tp, w->part, w->size.rows * w->size.hidden);
}

/* Pieces of a width of which [begin, begin + count) is held here. */
static nn_pieces nn_pieces_of(int width, int begin, int count) {
    const int length = nn_piece_length(width);
    const nn_pieces pieces = { (begin + length - 1) / length, (count + length - 1) / length,
                               (width + length - 1) / length };
    return pieces;
}

static nn_pieces nn_heads_pieces(const nn_model *model) {
    const nn_pieces pieces = { model->share.kv_begin, model->share.kv_count, model->config.kv_heads };
    return pieces;
}

/* Floats of a key/value head's query heads. */
static int64_t nn_q_piece(const nn_model *model) {
    return (int64_t)model->config.head_dim * (model->config.heads / model->config.kv_heads);
}

static nn_pieces nn_ffn_pieces(const nn_model *model) {
    return nn_pieces_of(model->config.ffn, model->share.ffn_begin, model->share.ffn_count);
}

/* One rank at most has a row of the embedding: each rank's part is a piece. */
static int nn_sum_embedding(const nn_model *model, const nn_space *w, float *x) {
    const int64_t count = w->size.rows * w->size.hidden;
    const nn_pieces pieces = { model->tp.rank, 1, model->tp.size };
    if (!model->tp.invariant) return nn_sum(&model->tp, x, count);
    for (int64_t i = 0; i < count; i++) w->forest[i] = x[i] + 0.0f; /* no rank's zeros are negative */
    return model->tp.sum_pieces(model->tp.user, w->forest, pieces, count, x);
}

/* Each rank knows some rows of the embedding; the sum over the ranks knows all. */
static int nn_embed(const nn_model *model, const float *table, const nn_batch *batch, const nn_space *w,
                    float *x) {
    const int64_t hidden = w->size.hidden;
    for (int64_t r = 0; r < w->size.rows; r++) {
        const int64_t row = (int64_t)batch->ids[r] - model->share.vocab_begin;
        if (row >= 0 && row < model->share.vocab_count)
            memcpy(x + r * hidden, table + row * hidden, (size_t)hidden * sizeof *x);
        else
            memset(x + r * hidden, 0, (size_t)hidden * sizeof *x);
    }
    return nn_sum_embedding(model, w, x);
}

static int nn_embed_backward(const nn_model *model, const nn_batch *batch, const nn_space *w,
                             float *d_table) {
    const nn_share *share = &model->share;
    const int64_t count = share->vocab_count * w->size.hidden;
    const nn_embed_slope slope = { w->size.hidden, share->vocab_begin,   share->vocab_count, batch->ids,
                                   w->d_x,         { d_table, 0, count } };
    const float *sum;
    nn_sequence_embed(&w->sequence, &slope);
    if (!w->sequence.blocks) return 0;
    NN_TRY(nn_sequence_join(&w->sequence, &model->cp, count, &sum));
    nn_add_to(count, d_table, sum, d_table);
    return 0;
}

/* ---- keys and values over the sequence axis ---- */

/* From rank order [rank][sequence][that rank's positions] to [sequence][all positions, rank after rank]. */
static void nn_arrange(const nn_model *model, const nn_batch *batch, const nn_space *w, const float *gathered,
                       float *out) {
    const int64_t width = w->size.kv_width;
    int64_t first = 0;
    for (int r = 0; r < model->cp.size; r++) {
        const int64_t count = batch->cp_count[r];
        for (int s = 0; s < batch->sequences; s++, gathered += count * width)
            memcpy(out + (s * (int64_t)w->size.keys + first) * width, gathered,
                   (size_t)(count * width) * sizeof *out);
        first += count;
    }
}

/* What comes between a projection and its rotation: the biases, or the norms of heads. */
typedef struct nn_between {
    const float *bias; /* [width] */
    const float *norm; /* [head_dim] */
    float *raw, *rms;  /* with a norm: what it reads, and 1 / rms of each head */
} nn_between;

static nn_between nn_between_of(const nn_model *model, const nn_weights *b, const nn_kept *a, int weight) {
    const nn_extra extra = model->config.extra;
    nn_between between;
    memset(&between, 0, sizeof between);
    if (extra == NN_QKV_BIAS) between.bias = b->value[NN_Q_BIAS + weight - NN_Q];
    if (extra != NN_QK_NORM || weight == NN_V) return between;
    between.norm = b->value[weight == NN_Q ? NN_Q_NORM : NN_K_NORM];
    between.raw = weight == NN_Q ? a->raw_q : a->raw_k;
    between.rms = weight == NN_Q ? a->q_rms : a->k_rms;
    return between;
}

/* x [rows, width], in place. */
static void nn_go_between(const nn_model *model, const nn_between *between, int64_t rows, int64_t width,
                          float *x) {
    const int head_dim = model->config.head_dim;
    for (int64_t r = 0; between->bias && r < rows; r++)
        nn_add_to(width, x + r * width, between->bias, x + r * width);
    if (!between->norm) return;
    memcpy(between->raw, x, (size_t)(rows * width) * sizeof *x);
    nn_rmsnorm(rows * width / head_dim, head_dim, model->config.norm_eps, between->raw, between->norm, x,
               between->rms);
}

/* The way back: d [rows, width] in place; gradients of the extra weights are added. `room` is as large as d. */
static void nn_back_between(const nn_model *model, const nn_weights *b, const nn_kept *a, int weight,
                            int64_t rows, int64_t width, float *d, float *room) {
    const nn_between between = nn_between_of(model, b, a, weight);
    const int head_dim = model->config.head_dim;
    const size_t bytes = (size_t)(rows * width) * sizeof *d;
    float *d_bias = between.bias ? b->gradient[NN_Q_BIAS + weight - NN_Q] : NULL;
    for (int64_t r = 0; d_bias && r < rows; r++) nn_add_to(width, d_bias, d + r * width, d_bias);
    if (!between.norm) return;
    memset(room, 0, bytes);
    nn_rmsnorm_backward(rows * width / head_dim, head_dim, between.raw, between.norm, between.rms, d, room,
                        b->gradient[weight == NN_Q ? NN_Q_NORM : NN_K_NORM]);
    memcpy(d, room, bytes);
}

/* out [key_rows, kv_width] = x * weight^T for the positions of all ranks; rotated when `rotate`. */
static int nn_project_kv(const nn_model *model, const nn_batch *batch, const nn_space *w, const float *x,
                         const float *weight, const nn_between *between, bool rotate, float *out) {
    const nn_sizes *s = &w->size;
    const bool gathers = model->cp.size > 1;
    float *local = gathers ? w->local_kv : out;
    nn_linear(s->rows, s->hidden, s->kv_width, x, weight, local);
    nn_go_between(model, between, s->rows, s->kv_width, local);
    if (rotate)
        nn_rope(s->rows, batch->positions, model->share.kv_count, model->config.head_dim, w->cosine, w->sine,
                1.0f, local);
    if (!gathers) return 0;

    int64_t counts[NN_MOST_RANKS];
    for (int r = 0; r < model->cp.size; r++)
        counts[r] = (int64_t)batch->sequences * batch->cp_count[r] * s->kv_width;
    NN_TRY(model->cp.all_gather_v(model->cp.user, local, w->gathered_kv, counts));
    nn_arrange(model, batch, w, w->gathered_kv, out);
    return 0;
}

/* Of the gradients of all keys (or values), the rows of this rank's own positions. */
static void nn_own_kv(const nn_model *model, const nn_batch *batch, const nn_space *w, const float *d_all,
                      float *d_local) {
    const int64_t width = w->size.kv_width;
    int64_t first = 0;
    for (int r = 0; r < model->cp.rank; r++) first += batch->cp_count[r];
    for (int s = 0; s < batch->sequences; s++)
        memcpy(d_local + s * (int64_t)batch->positions * width,
               d_all + (s * (int64_t)w->size.keys + first) * width,
               (size_t)(batch->positions * width) * sizeof *d_local);
}

/* The same, after these are summed over the ranks. */
static int nn_collect_kv(const nn_model *model, const nn_batch *batch, const nn_space *w, float *d_all,
                         float *d_local) {
    if (model->cp.size == 1) return 0;
    NN_TRY(model->cp.all_reduce_sum(model->cp.user, d_all, w->size.key_rows * w->size.kv_width));
    nn_own_kv(model, batch, w, d_all, d_local);
    return 0;
}

/* What attention in a layer is about. */
typedef struct nn_attending {
    const nn_model *model;
    const nn_batch *batch;
    const nn_space *space;
    const nn_kept *kept;
} nn_attending;

/* How many parts the positions here have, and which they are: the blocks, or all at once. */
static int64_t nn_part_count(const nn_space *w) {
    return w->sequence.blocks ? w->sequence.at.count : 1;
}

static xd_interval nn_part_of(const nn_space *w, int64_t part) {
    const xd_interval all = { 0, w->sequence.positions };
    return w->sequence.blocks ? nn_sequence_part(&w->sequence, part) : all;
}

/* A part's queries of sequence number `sequence`, as nn_layers.h wants them. Each part has its probabilities one after another. */
static nn_attention nn_attention_of(const nn_attending *of, int sequence, xd_interval part) {
    const nn_model *model = of->model;
    const nn_sizes *s = &of->space->size;
    const nn_batch *batch = of->batch;
    const int64_t first = sequence * (int64_t)batch->positions + part.begin;
    nn_attention view;
    view.kv_heads = model->share.kv_count;
    view.heads = model->share.kv_count * (model->config.heads / model->config.kv_heads);
    view.head_dim = model->config.head_dim;
    view.queries = (int)(part.end - part.begin);
    view.keys = s->keys;
    view.query_pos = batch->position ? batch->position + part.begin : NULL;
    view.query_first = (int)part.begin;
    view.key_pos = model->cp.size > 1 ? batch->cp_position : batch->position;
    view.q = of->kept->q + first * s->q_width;
    view.k = of->kept->k + sequence * (int64_t)s->keys * s->kv_width;
    view.v = of->kept->v + sequence * (int64_t)s->keys * s->kv_width;
    view.probs = of->kept->probs + first * view.heads * s->keys;
    return view;
}

bool nn_batch_fits(const nn_model *model, const nn_batch *batch) {
    const nn_group *cp = &model->cp;
    const int keys = nn_key_count(model, batch);
    int64_t first = 0;
    if (!nn_sequence_fits(cp, keys, batch->cp_count, cp->size > 1 ? batch->cp_position : batch->position))
        return false;
    for (int r = 0; r < cp->rank && cp->invariant; r++) first += batch->cp_count[r];
    for (int i = 0; i < batch->positions && cp->invariant && cp->size > 1; i++)
        if ((batch->position ? batch->position[i] : i) != first + i) return false;
    return true;
}

/* ---- forward ---- */

static int nn_attention_block(const nn_model *model, const nn_weights *b, const nn_batch *batch,
                              const nn_space *w, const nn_kept *a) {
    const nn_sizes *s = &w->size;
    nn_rmsnorm(s->rows, s->hidden, model->config.norm_eps, a->x, b->value[NN_INPUT_NORM], a->attn_in,
               a->input_rms);
    const nn_between q = nn_between_of(model, b, a, NN_Q), k = nn_between_of(model, b, a, NN_K),
                     v = nn_between_of(model, b, a, NN_V);
    nn_linear(s->rows, s->hidden, s->q_width, a->attn_in, b->value[NN_Q], a->q);
    nn_go_between(model, &q, s->rows, s->q_width, a->q);
    nn_rope(s->rows, batch->positions, (int)(s->q_width / model->config.head_dim), model->config.head_dim,
            w->cosine, w->sine, 1.0f, a->q);
    NN_TRY(nn_project_kv(model, batch, w, a->attn_in, b->value[NN_K], &k, true, a->k));
    NN_TRY(nn_project_kv(model, batch, w, a->attn_in, b->value[NN_V], &v, false, a->v));
    const nn_attending of = { model, batch, w, a };
    for (int64_t n = 0; n < batch->sequences * nn_part_count(w); n++) {
        const xd_interval part = nn_part_of(w, n % nn_part_count(w));
        const int sequence = (int)(n / nn_part_count(w));
        const nn_attention view = nn_attention_of(&of, sequence, part);
        nn_attention_forward(&view,
                             a->heads + (sequence * (int64_t)batch->positions + part.begin) * s->q_width);
    }
    const nn_product project = { a->heads, b->value[NN_O], true, s->q_width, nn_q_piece(model) };
    NN_TRY(nn_sum_products(model, w, &project, 1, nn_heads_pieces(model)));
    nn_add_to(s->rows * s->hidden, a->x, w->part, a->middle);
    return 0;
}

static int nn_ffn_block(const nn_model *model, const nn_weights *b, const nn_space *w, const nn_kept *a,
                        float *out) {
    const nn_sizes *s = &w->size;
    nn_rmsnorm(s->rows, s->hidden, model->config.norm_eps, a->middle, b->value[NN_POST_NORM], a->ffn_in,
               a->post_rms);
    nn_linear(s->rows, s->hidden, s->ffn, a->ffn_in, b->value[NN_GATE], a->gate);
    nn_linear(s->rows, s->hidden, s->ffn, a->ffn_in, b->value[NN_UP], a->up);
    nn_swiglu(s->rows * s->ffn, a->gate, a->up, a->act);
    const nn_product down = { a->act, b->value[NN_DOWN], true, s->ffn, nn_piece_length(model->config.ffn) };
    NN_TRY(nn_sum_products(model, w, &down, 1, nn_ffn_pieces(model)));
    nn_add_to(s->rows * s->hidden, a->middle, w->part, out);
    return 0;
}

static int nn_layers_forward(const nn_model *model, const nn_source *source, const nn_batch *batch,
                             nn_pass pass, const nn_space *w) {
    const int end = nn_layers_end(model);
    for (int i = nn_layers_begin(model); i < end; i++) {
        const nn_kept a = nn_layer_space(model, w, i);
        float *out = i + 1 < end ? nn_layer_space(model, w, i + 1).x : w->last;
        nn_weights b;
        NN_TRY(source->begin(source->user, i, pass, &b));
        if (pass == NN_FORWARD && model->recompute)
            NN_TRY(source->keep(source->user, i, a.x, w->size.rows * w->size.hidden));
        NN_TRY(nn_attention_block(model, &b, batch, w, &a));
        NN_TRY(nn_ffn_block(model, &b, w, &a, out));
        NN_TRY(source->end(source->user, i));
    }
    return 0;
}

/* Into the first layer: the embedding, or what the stage before put out. */
static int nn_enter(const nn_model *model, const nn_weights *b, const nn_batch *batch, const nn_space *w,
                    const float *input) {
    const size_t bytes = (size_t)(w->size.rows * w->size.hidden) * sizeof *input;
    float *x = nn_layer_space(model, w, nn_layers_begin(model)).x;
    if (input)
        memcpy(x, input, bytes);
    else
        NN_TRY(nn_embed(model, b->value[NN_EMBED], batch, w, x));
    if (nn_layers_begin(model) == nn_layers_end(model) && w->last != x) memcpy(w->last, x, bytes);
    return 0;
}

int nn_forward_stage(const nn_model *model, const nn_source *source, const nn_batch *batch, bool training,
                     const nn_ends *ends) {
    const nn_pass pass = training ? NN_FORWARD : NN_INFERENCE;
    const nn_space w = nn_plan(model, batch, training, ends->workspace);
    const nn_sizes *s = &w.size;
    const bool last = !model->cut.is || model->cut.last;
    double frequency[NN_MOST_HEAD / 2];
    nn_weights b;
    if (pass == NN_FORWARD && model->recompute && !source->keep) return NN_NO_INPUTS;
    if (!nn_batch_fits(model, batch)) return (int)XD_ERROR_UNSUPPORTED;
    nn_rope_frequencies(&model->config, frequency);
    nn_rope_table(batch->positions, batch->position, model->config.head_dim / 2, frequency, w.cosine, w.sine);
    NN_TRY(source->begin(source->user, NN_ROOT, pass, &b));
    NN_TRY(nn_enter(model, &b, batch, &w, ends->input));
    NN_TRY(nn_layers_forward(model, source, batch, pass, &w));
    if (last) {
        nn_rmsnorm(s->rows, s->hidden, model->config.norm_eps, w.last, b.value[NN_NORM], w.head_in,
                   w.last_rms);
        nn_linear(s->rows, s->hidden, model->share.vocab_count, w.head_in, b.value[NN_HEAD], ends->output);
    } else
        memcpy(ends->output, w.last, (size_t)(s->rows * s->hidden) * sizeof *w.last);
    return source->end(source->user, NN_ROOT);
}

int nn_forward_from(const nn_model *model, const nn_source *source, const nn_batch *batch, bool training,
                    float *workspace, float *logits) {
    const nn_ends ends = { workspace, NULL, logits };
    return nn_forward_stage(model, source, batch, training, &ends);
}

int nn_forward(const nn_model *model, const float *weights, const nn_batch *batch, bool training,
               float *workspace, float *logits) {
    nn_flat flat = { model, weights, NULL };
    const nn_source source = nn_flat_source(&flat);
    return nn_forward_from(model, &source, batch, training, workspace, logits);
}

/* ---- backward ---- */

/* In: w->d_x = the gradient of the block's output, out: of its input. What flows around the block stays in
 * d_x; what flows through it is gathered in w->part, summed over the ranks, and goes through the norm. */
static int nn_ffn_backward(const nn_model *model, const nn_weights *b, const nn_space *w, const nn_kept *a) {
    const nn_sizes *s = &w->size;
    nn_linear_backward(model, b, w, NN_DOWN, w->d_x, w->d_act);
    nn_matrix_gradient(model, b, w, NN_DOWN, a->act, w->d_x);
    nn_swiglu_backward(s->rows * s->ffn, a->gate, a->up, w->d_act, w->d_gate, w->d_up);
    const int64_t piece = nn_piece_length(model->config.ffn);
    const nn_product back[2] = { { w->d_gate, b->value[NN_GATE], false, s->ffn, piece },
                                 { w->d_up, b->value[NN_UP], false, s->ffn, piece } };
    nn_matrix_gradient(model, b, w, NN_GATE, a->ffn_in, w->d_gate);
    nn_matrix_gradient(model, b, w, NN_UP, a->ffn_in, w->d_up);
    NN_TRY(nn_sum_products(model, w, back, 2, nn_ffn_pieces(model)));
    nn_norm_gradient(model, b, w, NN_POST_NORM, a->middle, a->post_rms);
    return 0;
}

/* What a part's queries give: their w->d_q = ..., and to all keys and values d_k = ..., d_v = ... */
static void nn_part_backward(const nn_attending *of, xd_interval part, float *d_k, float *d_v) {
    const nn_space *w = of->space;
    const nn_sizes *s = &w->size;
    memset(d_k, 0, (size_t)(s->key_rows * s->kv_width) * sizeof *d_k);
    memset(d_v, 0, (size_t)(s->key_rows * s->kv_width) * sizeof *d_v);
    for (int i = 0; i < of->batch->sequences; i++) {
        const nn_attention view = nn_attention_of(of, i, part);
        const int64_t q_at = (i * (int64_t)of->batch->positions + part.begin) * s->q_width,
                      kv_at = i * (int64_t)s->keys * s->kv_width;
        nn_attention_backward(&view, w->d_heads + q_at, w->d_q + q_at, d_k + kv_at, d_v + kv_at, w->d_scores);
    }
}

/* The gradients of keys, and of values behind them, that one block gives. */
static void nn_keys_block(const void *user, int64_t block, float *out) {
    const nn_attending *of = (const nn_attending *)user;
    nn_part_backward(of, nn_part_of(of->space, block), out, out + nn_keys_floats(&of->space->size) / 2);
}

/* By blocks of positions: w->d_q, w->d_local_k, w->d_local_v. */
static int nn_blocks_backward(const nn_attending *of) {
    const nn_space *w = of->space;
    const int64_t count = nn_keys_floats(&w->size);
    const nn_block_sum sum = { nn_keys_block, of, 0, count };
    const float *d_keys;
    nn_sequence keys = w->sequence;
    keys.nodes = w->key_nodes;
    keys.root = w->key_root;
    nn_sequence_add(&keys, count, &sum);
    NN_TRY(nn_sequence_join(&keys, &of->model->cp, count, &d_keys));
    nn_own_kv(of->model, of->batch, w, d_keys, w->d_local_k);
    nn_own_kv(of->model, of->batch, w, d_keys + count / 2, w->d_local_v);
    return 0;
}

/* The same with all queries here at once. */
static int nn_queries_backward(const nn_attending *of) {
    const nn_space *w = of->space;
    nn_part_backward(of, nn_part_of(w, 0), w->d_k, w->d_v);
    NN_TRY(nn_collect_kv(of->model, of->batch, w, w->d_k, w->d_local_k));
    return nn_collect_kv(of->model, of->batch, w, w->d_v, w->d_local_v);
}

/* w->d_heads -> w->d_q, w->d_local_k, w->d_local_v, turned back to where the projections left them. */
static int nn_heads_backward(const nn_model *model, const nn_batch *batch, const nn_space *w,
                             const nn_kept *a) {
    const nn_sizes *s = &w->size;
    const nn_attending of = { model, batch, w, a };
    const int head_dim = model->config.head_dim;
    NN_TRY(w->sequence.blocks ? nn_blocks_backward(&of) : nn_queries_backward(&of));
    nn_rope(s->rows, batch->positions, (int)(s->q_width / head_dim), head_dim, w->cosine, w->sine, -1.0f,
            w->d_q);
    nn_rope(s->rows, batch->positions, (int)(s->kv_width / head_dim), head_dim, w->cosine, w->sine, -1.0f,
            w->d_local_k);
    return 0;
}

static int nn_attention_block_backward(const nn_model *model, const nn_weights *b, const nn_batch *batch,
                                       const nn_space *w, const nn_kept *a) {
    const nn_sizes *s = &w->size;
    nn_linear_backward(model, b, w, NN_O, w->d_x, w->d_heads);
    nn_matrix_gradient(model, b, w, NN_O, a->heads, w->d_x);
    NN_TRY(nn_heads_backward(model, batch, w, a));
    nn_back_between(model, b, a, NN_Q, s->rows, s->q_width, w->d_q, w->d_heads);
    nn_back_between(model, b, a, NN_K, s->rows, s->kv_width, w->d_local_k, w->d_heads);
    nn_back_between(model, b, a, NN_V, s->rows, s->kv_width, w->d_local_v, w->d_heads);
    const nn_product back[3] = {
        { w->d_q, b->value[NN_Q], false, s->q_width, nn_q_piece(model) },
        { w->d_local_k, b->value[NN_K], false, s->kv_width, model->config.head_dim },
        { w->d_local_v, b->value[NN_V], false, s->kv_width, model->config.head_dim },
    };
    nn_matrix_gradient(model, b, w, NN_Q, a->attn_in, w->d_q);
    nn_matrix_gradient(model, b, w, NN_K, a->attn_in, w->d_local_k);
    nn_matrix_gradient(model, b, w, NN_V, a->attn_in, w->d_local_v);
    NN_TRY(nn_sum_products(model, w, back, 3, nn_heads_pieces(model)));
    nn_norm_gradient(model, b, w, NN_INPUT_NORM, a->x, a->input_rms);
    return 0;
}

/* A layer whose forward runs again. */
typedef struct nn_layer {
    const nn_model *model;
    const nn_batch *batch;
    const nn_space *space;
} nn_layer;

/* What the layer puts out goes where nobody reads it any more. */
static int nn_layer_again(void *argument, const nn_weights *weights, const float *input) {
    const nn_layer *l = (const nn_layer *)argument;
    const nn_kept a = nn_layer_space(l->model, l->space, 0);
    memcpy(a.x, input, (size_t)(l->space->size.rows * l->space->size.hidden) * sizeof *input);
    NN_TRY(nn_attention_block(l->model, weights, l->batch, l->space, &a));
    return nn_ffn_block(l->model, weights, l->space, &a, l->space->last);
}

static int nn_layers_backward(const nn_model *model, const nn_source *source, const nn_batch *batch,
                              const nn_space *w) {
    nn_layer layer = { model, batch, w };
    for (int i = nn_layers_end(model) - 1; i >= nn_layers_begin(model); i--) {
        const nn_kept a = nn_layer_space(model, w, i);
        nn_weights b;
        NN_TRY(source->begin(source->user, i, NN_BACKWARD, &b));
        if (model->recompute) NN_TRY(source->recompute(source->user, i, nn_layer_again, &layer));
        NN_TRY(nn_ffn_backward(model, &b, w, &a));
        NN_TRY(nn_attention_block_backward(model, &b, batch, w, &a));
        NN_TRY(nn_give_layer(model, &b, w));
        NN_TRY(source->end(source->user, i));
    }
    return 0;
}

/* Out of the head: w->d_x = the gradient of the last layer's output. */
static int nn_head_backward(const nn_model *model, const nn_weights *b, const nn_space *w,
                            const float *d_logits) {
    const nn_sizes *s = &w->size;
    const nn_share *share = &model->share;
    const nn_product head = { d_logits, b->value[NN_HEAD], false, share->vocab_count,
                              nn_piece_length(model->config.vocab) };
    const int64_t width = s->hidden, floats = width + share->vocab_count * width;
    const nn_matrix_slope matrix = {
        width, share->vocab_count, w->head_in, d_logits, { b->gradient[NN_HEAD], width, floats }
    };
    const nn_norm_slope norm = {
        width, w->last, b->value[NN_NORM], w->last_rms, w->part, w->d_x, { b->gradient[NN_NORM], 0, floats }
    };
    const float *sum;
    if (!model->frozen_ends) nn_sequence_matrix(&w->sequence, &matrix);
    NN_TRY(nn_sum_products(model, w, &head, 1,
                           nn_pieces_of(model->config.vocab, share->vocab_begin, share->vocab_count)));
    memset(w->d_x, 0, (size_t)(s->rows * s->hidden) * sizeof *w->d_x);
    nn_sequence_norm(&w->sequence, &norm);
    if (!w->sequence.blocks) return 0;
    NN_TRY(nn_sequence_join(&w->sequence, &model->cp, floats, &sum));
    nn_add_to(width, b->gradient[NN_NORM], sum, b->gradient[NN_NORM]);
    nn_add_to(floats - width, b->gradient[NN_HEAD], sum + width, b->gradient[NN_HEAD]);
    return 0;
}

int nn_backward_stage(const nn_model *model, const nn_source *source, const nn_batch *batch,
                      const nn_ends *ends) {
    const nn_space w = nn_plan(model, batch, true, ends->workspace);
    const size_t bytes = (size_t)(w.size.rows * w.size.hidden) * sizeof *w.d_x;
    const bool first = !model->cut.is || model->cut.first, last = !model->cut.is || model->cut.last;
    nn_weights b;
    NN_TRY(source->begin(source->user, NN_ROOT, NN_BACKWARD, &b));
    if (last)
        NN_TRY(nn_head_backward(model, &b, &w, ends->input));
    else
        memcpy(w.d_x, ends->input, bytes);
    NN_TRY(nn_layers_backward(model, source, batch, &w));
    if (first && !model->frozen_ends) NN_TRY(nn_embed_backward(model, batch, &w, b.gradient[NN_EMBED]));
    if (!first) memcpy(ends->output, w.d_x, bytes);
    return source->end(source->user, NN_ROOT);
}

int nn_backward_from(const nn_model *model, const nn_source *source, const nn_batch *batch, float *workspace,
                     const float *d_logits) {
    const nn_ends ends = { workspace, d_logits, NULL };
    return nn_backward_stage(model, source, batch, &ends);
}

int nn_backward(const nn_model *model, const float *weights, const nn_batch *batch, float *workspace,
                const float *d_logits, float *d_weights) {
    nn_flat flat = { model, weights, d_weights };
    const nn_source source = nn_flat_source(&flat);
    return nn_backward_from(model, &source, batch, workspace, d_logits);
}

/* ---- sources ---- */

static int nn_flat_begin(void *user, int block, nn_pass pass, nn_weights *out) {
    const nn_flat *flat = (const nn_flat *)user;
    for (int i = 0; i < nn_block_weights(flat->model, block); i++) {
        const int64_t at = nn_block_param(flat->model, block, i)->offset;
        out->value[i] = flat->weights + at;
        out->gradient[i] = pass == NN_BACKWARD ? flat->gradients + at : NULL;
    }
    return 0;
}

static int nn_flat_end(void *user, int block) {
    (void)user, (void)block;
    return 0;
}

nn_source nn_flat_source(nn_flat *flat) {
    const nn_source source = { flat, nn_flat_begin, nn_flat_end, NULL, NULL };
    return source;
}

int nn_pass_by(const nn_model *model, const nn_source *source, nn_pass pass) {
    const int begin = nn_layers_begin(model), end = nn_layers_end(model);
    nn_weights b;
    NN_TRY(source->begin(source->user, NN_ROOT, pass, &b));
    for (int i = begin; i < end; i++) {
        const int layer = pass == NN_BACKWARD ? end - 1 - (i - begin) : i;
        NN_TRY(source->begin(source->user, layer, pass, &b));
        NN_TRY(source->end(source->user, layer));
    }
    return source->end(source->user, NN_ROOT);
}
