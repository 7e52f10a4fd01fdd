/* nn_transformer.c - the passes over the whole model.
 *
 *     x = embedding of the ids
 *     for each layer:   x = x + attention(norm(x));    x = x + feed_forward(norm(x))
 *     logits = head(norm(x))
 *
 * Tensor-parallel: every rank computes a part of what is added to x, and the parts are summed: two sums a
 * layer forward, and two backward, where a norm's gradient gathers what the ranks know about it.
 * Context-parallel: a rank has the queries of its own positions and the keys and values of all, so keys and
 * values are gathered, and their gradients summed.
 *
 * A pass opens the root, then one layer after another, and the root closes last. */
#include "nn_transformer.h"
#include "nn_layers.h"
#include "nn_matmul.h"

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
    return a;
}

static void nn_take_backward(const nn_sizes *s, bool gathers, float *base, int64_t *offset, nn_space *w) {
    w->d_x = nn_take(base, offset, s->rows * s->hidden);
    w->d_q = nn_take(base, offset, s->rows * s->q_width);
    w->d_k = nn_take(base, offset, s->key_rows * s->kv_width);
    w->d_v = nn_take(base, offset, s->key_rows * s->kv_width);
    w->d_heads = nn_take(base, offset, s->rows * s->q_width);
    w->d_scores = nn_take(base, offset, s->rows * s->keys);
    w->d_gate = nn_take(base, offset, s->rows * s->ffn);
    w->d_up = nn_take(base, offset, s->rows * s->ffn);
    w->d_act = nn_take(base, offset, s->rows * s->ffn);
    w->d_local_k = gathers ? nn_take(base, offset, s->rows * s->kv_width) : w->d_k;
    w->d_local_v = gathers ? nn_take(base, offset, s->rows * s->kv_width) : w->d_v;
}

static nn_space nn_plan(const nn_model *model, const nn_batch *batch, bool training, float *base) {
    const bool gathers = model->cp.size > 1;
    const int layers = nn_layers_end(model) - nn_layers_begin(model);
    nn_space w;
    nn_sizes s;
    int64_t offset = 0, layer = 0;
    memset(&w, 0, sizeof w);
    w.size = s = nn_sizes_of(model, batch);
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
    if (training) nn_take_backward(&s, gathers, base, &offset, &w);
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

/* y [rows, out] = x [rows, in] * weight^T, weight [out, in]. */
static void nn_linear(int64_t rows, int64_t in, int64_t out, const float *x, const float *weight, float *y) {
    nn_matmul(nn_dense(x, rows, in), nn_transpose(nn_dense(weight, out, in)), y, out, false);
}

/* d_weight += d_y^T * x. */
static void nn_weight_gradient(int64_t rows, int64_t in, int64_t out, const float *x, const float *d_y,
                               float *d_weight) {
    nn_matmul(nn_transpose(nn_dense(d_y, rows, out)), nn_dense(x, rows, in), d_weight, in, true);
}

/* d_x = d_y * weight,  d_weight += d_y^T * x. */
static void nn_linear_backward(int64_t rows, int64_t in, int64_t out, const float *x, const float *weight,
                               const float *d_y, float *d_x, float *d_weight) {
    nn_matmul(nn_dense(d_y, rows, out), nn_dense(weight, out, in), d_x, in, false);
    nn_weight_gradient(rows, in, out, x, d_y, d_weight);
}

static void nn_add_to(int64_t count, const float *a, const float *b, float *out) {
    for (int64_t i = 0; i < count; i++) out[i] = a[i] + b[i];
}

/* ---- sums over the tensor-parallel ranks ---- */

/* One product whose inner dimension is split over the ranks. Element (r, i) of `a`, times row i of `weight` seen as [width,
 * hidden], i the number of the input. */
typedef struct nn_product {
    const float *a; /* [rows, width] */
    const float *weight;
    bool
        by_columns; /* weight is [hidden, width]: an output projection; else [width, hidden]: the way back through one */
    int64_t width; /* held here */
    int64_t piece; /* inputs of a piece */
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

static void nn_embed_backward(const nn_model *model, const nn_batch *batch, const nn_space *w,
                              float *d_table) {
    const int64_t hidden = w->size.hidden;
    for (int64_t r = 0; r < w->size.rows; r++) {
        const int64_t row = (int64_t)batch->ids[r] - model->share.vocab_begin;
        if (row < 0 || row >= model->share.vocab_count) continue;
        nn_add_to(hidden, d_table + row * hidden, w->d_x + r * hidden, d_table + row * hidden);
    }
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

/* out [key_rows, kv_width] = x * weight^T for the positions of all ranks; rotated when `rotate`. */
static int nn_project_kv(const nn_model *model, const nn_batch *batch, const nn_space *w, const float *x,
                         const float *weight, bool rotate, float *out) {
    const nn_sizes *s = &w->size;
    const bool gathers = model->cp.size > 1;
    float *local = gathers ? w->local_kv : out;
    nn_linear(s->rows, s->hidden, s->kv_width, x, weight, local);
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

/* The gradients of all keys (or values), summed over the ranks; then the rows of this rank's own positions.
 */
static int nn_collect_kv(const nn_model *model, const nn_batch *batch, const nn_space *w, float *d_all,
                         float *d_local) {
    const int64_t width = w->size.kv_width;
    int64_t first = 0;
    if (model->cp.size == 1) return 0;
    NN_TRY(model->cp.all_reduce_sum(model->cp.user, d_all, w->size.key_rows * width));
    for (int r = 0; r < model->cp.rank; r++) first += batch->cp_count[r];
    for (int s = 0; s < batch->sequences; s++)
        memcpy(d_local + s * (int64_t)batch->positions * width,
               d_all + (s * (int64_t)w->size.keys + first) * width,
               (size_t)(batch->positions * width) * sizeof *d_local);
    return 0;
}

/* Sequence number `sequence` of a layer, as nn_layers.h wants it. */
static nn_attention nn_attention_of(const nn_model *model, const nn_batch *batch, const nn_space *w,
                                    const nn_kept *a, int sequence) {
    const nn_sizes *s = &w->size;
    nn_attention view;
    view.kv_heads = model->share.kv_count;
    view.heads = model->share.kv_count * (model->config.heads / model->config.kv_heads);
    view.head_dim = model->config.head_dim;
    view.queries = batch->positions;
    view.keys = s->keys;
    view.query_pos = batch->position;
    view.key_pos = model->cp.size > 1 ? batch->cp_position : batch->position;
    view.q = a->q + sequence * (int64_t)batch->positions * s->q_width;
    view.k = a->k + sequence * (int64_t)s->keys * s->kv_width;
    view.v = a->v + sequence * (int64_t)s->keys * s->kv_width;
    view.probs = a->probs + sequence * (int64_t)view.heads * batch->positions * s->keys;
    return view;
}

/* ---- forward ---- */

static int nn_attention_block(const nn_model *model, const nn_weights *b, const nn_batch *batch,
                              const nn_space *w, const nn_kept *a) {
    const nn_sizes *s = &w->size;
    nn_rmsnorm(s->rows, s->hidden, model->config.norm_eps, a->x, b->value[NN_INPUT_NORM], a->attn_in,
               a->input_rms);
    nn_linear(s->rows, s->hidden, s->q_width, a->attn_in, b->value[NN_Q], a->q);
    nn_rope(s->rows, batch->positions, (int)(s->q_width / model->config.head_dim), model->config.head_dim,
            w->cosine, w->sine, 1.0f, a->q);
    NN_TRY(nn_project_kv(model, batch, w, a->attn_in, b->value[NN_K], true, a->k));
    NN_TRY(nn_project_kv(model, batch, w, a->attn_in, b->value[NN_V], false, a->v));
    for (int i = 0; i < batch->sequences; i++) {
        const nn_attention view = nn_attention_of(model, batch, w, a, i);
        nn_attention_forward(&view, a->heads + i * (int64_t)batch->positions * s->q_width);
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
    nn_weights b;
    if (pass == NN_FORWARD && model->recompute && !source->keep) return NN_NO_INPUTS;
    nn_rope_table(batch->positions, batch->position, model->config.head_dim, model->config.rope_theta,
                  w.cosine, w.sine);
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
    nn_linear_backward(s->rows, s->ffn, s->hidden, a->act, b->value[NN_DOWN], w->d_x, w->d_act,
                       b->gradient[NN_DOWN]);
    nn_swiglu_backward(s->rows * s->ffn, a->gate, a->up, w->d_act, w->d_gate, w->d_up);
    const int64_t piece = nn_piece_length(model->config.ffn);
    const nn_product back[2] = { { w->d_gate, b->value[NN_GATE], false, s->ffn, piece },
                                 { w->d_up, b->value[NN_UP], false, s->ffn, piece } };
    nn_weight_gradient(s->rows, s->hidden, s->ffn, a->ffn_in, w->d_gate, b->gradient[NN_GATE]);
    nn_weight_gradient(s->rows, s->hidden, s->ffn, a->ffn_in, w->d_up, b->gradient[NN_UP]);
    NN_TRY(nn_sum_products(model, w, back, 2, nn_ffn_pieces(model)));
    nn_rmsnorm_backward(s->rows, s->hidden, a->middle, b->value[NN_POST_NORM], a->post_rms, w->part, w->d_x,
                        b->gradient[NN_POST_NORM]);
    return 0;
}

/* w->d_heads -> w->d_q, w->d_local_k, w->d_local_v, turned back to where the projections left them. */
static int nn_heads_backward(const nn_model *model, const nn_batch *batch, const nn_space *w,
                             const nn_kept *a) {
    const nn_sizes *s = &w->size;
    const int head_dim = model->config.head_dim;
    memset(w->d_k, 0, (size_t)(s->key_rows * s->kv_width) * sizeof *w->d_k);
    memset(w->d_v, 0, (size_t)(s->key_rows * s->kv_width) * sizeof *w->d_v);
    for (int i = 0; i < batch->sequences; i++) {
        const nn_attention view = nn_attention_of(model, batch, w, a, i);
        const int64_t q_at = i * (int64_t)batch->positions * s->q_width,
                      kv_at = i * (int64_t)s->keys * s->kv_width;
        nn_attention_backward(&view, w->d_heads + q_at, w->d_q + q_at, w->d_k + kv_at, w->d_v + kv_at,
                              w->d_scores);
    }
    NN_TRY(nn_collect_kv(model, batch, w, w->d_k, w->d_local_k));
    NN_TRY(nn_collect_kv(model, batch, w, w->d_v, w->d_local_v));
    nn_rope(s->rows, batch->positions, (int)(s->q_width / head_dim), head_dim, w->cosine, w->sine, -1.0f,
            w->d_q);
    nn_rope(s->rows, batch->positions, (int)(s->kv_width / head_dim), head_dim, w->cosine, w->sine, -1.0f,
            w->d_local_k);
    return 0;
}

static int nn_attention_block_backward(const nn_model *model, const nn_weights *b, const nn_batch *batch,
                                       const nn_space *w, const nn_kept *a) {
    const nn_sizes *s = &w->size;
    nn_linear_backward(s->rows, s->q_width, s->hidden, a->heads, b->value[NN_O], w->d_x, w->d_heads,
                       b->gradient[NN_O]);
    NN_TRY(nn_heads_backward(model, batch, w, a));
    const nn_product back[3] = {
        { w->d_q, b->value[NN_Q], false, s->q_width, nn_q_piece(model) },
        { w->d_local_k, b->value[NN_K], false, s->kv_width, model->config.head_dim },
        { w->d_local_v, b->value[NN_V], false, s->kv_width, model->config.head_dim },
    };
    nn_weight_gradient(s->rows, s->hidden, s->q_width, a->attn_in, w->d_q, b->gradient[NN_Q]);
    nn_weight_gradient(s->rows, s->hidden, s->kv_width, a->attn_in, w->d_local_k, b->gradient[NN_K]);
    nn_weight_gradient(s->rows, s->hidden, s->kv_width, a->attn_in, w->d_local_v, b->gradient[NN_V]);
    NN_TRY(nn_sum_products(model, w, back, 3, nn_heads_pieces(model)));
    nn_rmsnorm_backward(s->rows, s->hidden, a->x, b->value[NN_INPUT_NORM], a->input_rms, w->part, w->d_x,
                        b->gradient[NN_INPUT_NORM]);
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
    nn_weight_gradient(s->rows, s->hidden, share->vocab_count, w->head_in, d_logits, b->gradient[NN_HEAD]);
    NN_TRY(nn_sum_products(model, w, &head, 1,
                           nn_pieces_of(model->config.vocab, share->vocab_begin, share->vocab_count)));
    memset(w->d_x, 0, (size_t)(s->rows * s->hidden) * sizeof *w->d_x);
    nn_rmsnorm_backward(s->rows, s->hidden, w->last, b->value[NN_NORM], w->last_rms, w->part, w->d_x,
                        b->gradient[NN_NORM]);
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
    if (first)
        nn_embed_backward(model, batch, &w, b.gradient[NN_EMBED]);
    else
        memcpy(ends->output, w.d_x, bytes);
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
    for (int i = 0; i < nn_block_weights(block); i++) {
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
