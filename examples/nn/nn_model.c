/* nn_model.c - the table of weights, and random weights to start from. */
#include "nn_model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *nn_config_problem(const nn_config *c) {
    if (c->vocab <= 0 || c->hidden <= 0 || c->layers <= 0 || c->ffn <= 0) return "a size is not positive";
    if (c->heads <= 0 || c->kv_heads <= 0 || c->heads % c->kv_heads != 0)
        return "heads is not a multiple of kv_heads";
    if (c->head_dim <= 0 || c->head_dim % 2 != 0) return "head_dim is not even";
    if (c->head_dim > NN_MOST_HEAD) return "a head is wider than 1024";
    if (!(c->rope_theta > 0.0f) || !(c->norm_eps > 0.0f)) return "rope_theta or norm_eps is not positive";
    return NULL;
}

/* Rank `rank` of `size` gets [begin, begin + count): the first ranks get one more when it does not divide. */
static void nn_range(int total, const nn_group *group, int *begin, int *count) {
    const int each = total / group->size, more = total % group->size;
    *begin = group->rank * each + (group->rank < more ? group->rank : more);
    *count = each + (group->rank < more ? 1 : 0);
}

int nn_piece_length(int width) {
    return (width + NN_PIECES - 1) / NN_PIECES;
}

/* The same for pieces, when sums are made of them. */
static void nn_range_of_pieces(int total, const nn_group *group, int *begin, int *count) {
    const int length = nn_piece_length(total);
    int first, pieces;
    if (!group->invariant) {
        nn_range(total, group, begin, count);
        return;
    }
    nn_range((total + length - 1) / length, group, &first, &pieces);
    *begin = first * length < total ? first * length : total;
    *count = ((first + pieces) * length < total ? (first + pieces) * length : total) - *begin;
}

/* Appends one weight. Rows or columns are split, never both; a whole dimension has
 * begin 0. */
static void nn_add(nn_model *m, const char *name, const int full[2], const int begin[2], const int count[2]) {
    nn_param *p = &m->params[m->param_count++];
    snprintf(p->name, sizeof p->name, "%s", name);
    p->dims = full[1] ? 2 : 1;
    p->full_rows = full[0];
    p->full_cols = full[1] ? full[1] : 1;
    p->row_begin = begin[0];
    p->col_begin = begin[1];
    p->rows = count[0];
    p->cols = full[1] ? count[1] : 1;
    p->offset = m->float_count;
    m->float_count += nn_param_count(p);
}

static void nn_add_whole(nn_model *m, const char *name, int rows) {
    const int full[2] = { rows, 0 }, begin[2] = { 0, 0 };
    nn_add(m, name, full, begin, full);
}

/* Output features split over the ranks: each computes some of the outputs from the whole input. */
static void nn_add_rows(nn_model *m, const char *name, int rows, int cols, int row_begin, int row_count) {
    const int full[2] = { rows, cols }, begin[2] = { row_begin, 0 }, count[2] = { row_count, cols };
    nn_add(m, name, full, begin, count);
}

/* Input features split: each computes a part of every output, and the parts are summed. */
static void nn_add_cols(nn_model *m, const char *name, int rows, int cols, int col_begin, int col_count) {
    const int full[2] = { rows, cols }, begin[2] = { 0, col_begin }, count[2] = { rows, col_count };
    nn_add(m, name, full, begin, count);
}

/* `leaf`, with `room`, is the end of `name`. */
static void nn_add_extra(nn_model *m, const char *name, char *leaf, size_t room) {
    static const char *const biases[] = { "q_proj.bias", "k_proj.bias", "v_proj.bias" };
    static const char *const norms[] = { "q_norm.weight", "k_norm.weight" };
    const nn_config *c = &m->config;
    for (int i = 0; c->extra == NN_QKV_BIAS && i < 3; i++) {
        snprintf(leaf, room, "self_attn.%s", biases[i]);
        nn_add_whole(m, name, (i == 0 ? c->heads : c->kv_heads) * c->head_dim);
    }
    for (int i = 0; c->extra == NN_QK_NORM && i < 2; i++) {
        snprintf(leaf, room, "self_attn.%s", norms[i]);
        nn_add_whole(m, name, c->head_dim);
    }
}

static void nn_add_layer(nn_model *m, int index) {
    const nn_config *c = &m->config;
    const nn_share *s = &m->share;
    const int group = c->heads / c->kv_heads, q_width = c->head_dim * group, kv_width = c->head_dim;
    const int q_full = c->heads * c->head_dim, kv_full = c->kv_heads * c->head_dim;
    const int q_begin = s->kv_begin * q_width, q_count = s->kv_count * q_width;
    const int kv_begin = s->kv_begin * kv_width, kv_count = s->kv_count * kv_width;
    char name[64];
    const int stem = snprintf(name, sizeof name, "model.layers.%d.", index);
    char *leaf = name + stem;
    const size_t room = sizeof name - (size_t)stem;

    snprintf(leaf, room, "input_layernorm.weight");
    nn_add_whole(m, name, c->hidden);
    snprintf(leaf, room, "self_attn.q_proj.weight");
    nn_add_rows(m, name, q_full, c->hidden, q_begin, q_count);
    snprintf(leaf, room, "self_attn.k_proj.weight");
    nn_add_rows(m, name, kv_full, c->hidden, kv_begin, kv_count);
    snprintf(leaf, room, "self_attn.v_proj.weight");
    nn_add_rows(m, name, kv_full, c->hidden, kv_begin, kv_count);
    snprintf(leaf, room, "self_attn.o_proj.weight");
    nn_add_cols(m, name, c->hidden, q_full, q_begin, q_count);
    snprintf(leaf, room, "post_attention_layernorm.weight");
    nn_add_whole(m, name, c->hidden);
    snprintf(leaf, room, "mlp.gate_proj.weight");
    nn_add_rows(m, name, c->ffn, c->hidden, s->ffn_begin, s->ffn_count);
    snprintf(leaf, room, "mlp.up_proj.weight");
    nn_add_rows(m, name, c->ffn, c->hidden, s->ffn_begin, s->ffn_count);
    snprintf(leaf, room, "mlp.down_proj.weight");
    nn_add_cols(m, name, c->hidden, c->ffn, s->ffn_begin, s->ffn_count);
    nn_add_extra(m, name, leaf, room);
}

static nn_group nn_group_or_alone(const nn_group *group) {
    nn_group result;
    memset(&result, 0, sizeof result);
    if (group) result = *group;
    if (result.size == 0) result.size = 1;
    return result;
}

const char *nn_model_init(const nn_config *config, const nn_group *tp, const nn_group *cp, nn_model *out) {
    nn_model m;
    const char *problem = nn_config_problem(config);
    memset(out, 0, sizeof *out);
    if (problem) return problem;
    memset(&m, 0, sizeof m);
    m.config = *config;
    m.tp = nn_group_or_alone(tp);
    m.cp = nn_group_or_alone(cp);
    if (m.tp.size > NN_MOST_RANKS || m.cp.size > NN_MOST_RANKS)
        return "a group has more than NN_MOST_RANKS ranks";
    if (m.cp.invariant && m.cp.size > NN_PIECES)
        return "more context-parallel ranks than blocks of positions";
    if (config->extra && (m.tp.size > 1 || m.tp.invariant || m.cp.invariant))
        return "biases and norms of queries need one tensor-parallel rank, and no invariant sums";
    m.params =
        (nn_param *)calloc((size_t)config->layers * NN_MOST_WEIGHTS + NN_ROOT_WEIGHTS, sizeof *m.params);
    if (!m.params) return "out of memory";
    nn_range(config->kv_heads, &m.tp, &m.share.kv_begin, &m.share.kv_count);
    nn_range_of_pieces(config->ffn, &m.tp, &m.share.ffn_begin, &m.share.ffn_count);
    nn_range_of_pieces(config->vocab, &m.tp, &m.share.vocab_begin, &m.share.vocab_count);

    nn_add_rows(&m, "model.embed_tokens.weight", config->vocab, config->hidden, m.share.vocab_begin,
                m.share.vocab_count);
    for (int i = 0; i < config->layers; i++) nn_add_layer(&m, i);
    nn_add_whole(&m, "model.norm.weight", config->hidden);
    if (!config->tied)
        nn_add_rows(&m, "lm_head.weight", config->vocab, config->hidden, m.share.vocab_begin,
                    m.share.vocab_count);
    *out = m;
    return NULL;
}

void nn_model_free(nn_model *model) {
    if (!model) return;
    free(model->params);
    memset(model, 0, sizeof *model);
}

int64_t nn_param_count(const nn_param *param) {
    return (int64_t)param->rows * param->cols;
}

bool nn_param_decays(const nn_param *param) {
    return param->dims == 2;
}

int nn_layer_weights(const nn_config *config) {
    return NN_LAYER_WEIGHTS + (config->extra == NN_QKV_BIAS ? 3 : config->extra == NN_QK_NORM ? 2 : 0);
}

int nn_block_weights(const nn_model *model, int block) {
    return block == NN_ROOT ? (int)NN_ROOT_WEIGHTS : nn_layer_weights(&model->config);
}

bool nn_cut_has(const nn_cut *cut, int block, int weight) {
    if (!cut->is || block != NN_ROOT) return true;
    return weight == NN_EMBED ? cut->first : cut->last;
}

int nn_layers_begin(const nn_model *model) {
    return model->cut.is ? model->cut.begin : 0;
}

int nn_layers_end(const nn_model *model) {
    return model->cut.is ? model->cut.end : model->config.layers;
}

/* The table is the embedding, the layers, the last norm, and the head unless that is the embedding. */
const nn_param *nn_block_param(const nn_model *model, int block, int weight) {
    const int each = nn_layer_weights(&model->config), behind = 1 + model->config.layers * each;
    if (block != NN_ROOT) return &model->params[1 + block * each + weight];
    if (weight == NN_EMBED || (weight == NN_HEAD && model->config.tied)) return &model->params[0];
    return &model->params[weight == NN_NORM ? behind : behind + 1];
}

int nn_param_find(const nn_model *model, const char *name) {
    for (int i = 0; i < model->param_count; i++)
        if (strcmp(model->params[i].name, name) == 0) return i;
    return -1;
}

/* ---- rotary angles ---- */

/* What a frequency is divided by. */
static double nn_rope_divisor(const nn_rope_scaling *s, double frequency) {
    const double two_pi = 6.283185307179586, factor = (double)s->factor;
    if (factor == 0.0) return 1.0;
    if (s->original == 0) return factor;
    const double waves = s->original * frequency / two_pi;
    const double share = (waves - (double)s->low) / ((double)s->high - (double)s->low);
    if (share <= 0.0) return factor;
    return share >= 1.0 ? 1.0 : 1.0 / ((1.0 - share) / factor + share);
}

void nn_rope_frequencies(const nn_config *c, double *frequency) {
    for (int i = 0; i < c->head_dim / 2; i++) {
        const double plain = pow((double)c->rope_theta, -2.0 * i / c->head_dim);
        frequency[i] =
            c->rope_scaling.factor == 0.0f ? plain : plain / nn_rope_divisor(&c->rope_scaling, plain);
    }
}

/* ---- starting weights ---- */

/* splitmix64: a counter in, 64 well-mixed bits out. */
static uint64_t nn_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* One standard normal number per counter (Box-Muller). */
static float nn_normal(uint64_t key, uint64_t counter) {
    const double two_pi = 6.283185307179586;
    const uint64_t bits = nn_mix(key ^ nn_mix(counter));
    const double u = ((double)(bits >> 32) + 0.5) / 4294967296.0;
    const double v = (double)(bits & 0xffffffffu) / 4294967296.0;
    return (float)(sqrt(-2.0 * log(u)) * cos(two_pi * v));
}

static bool nn_ends_with(const char *text, const char *end) {
    const size_t a = strlen(text), b = strlen(end);
    return a >= b && strcmp(text + a - b, end) == 0;
}

float nn_param_deviation(const nn_model *model, const nn_param *param) {
    const bool writes_residual =
        nn_ends_with(param->name, "o_proj.weight") || nn_ends_with(param->name, "down_proj.weight");
    if (param->dims == 1) return 0.0f;
    return writes_residual ? 0.02f / sqrtf(2.0f * (float)model->config.layers) : 0.02f;
}

/* Norms start at one, biases at zero. */
static float nn_starts_at(const nn_param *p) {
    return nn_ends_with(p->name, ".bias") ? 0.0f : 1.0f;
}

void nn_model_randomize(const nn_model *model, uint64_t seed, float *weights) {
    for (int i = 0; i < model->param_count; i++) {
        const nn_param *p = &model->params[i];
        const float deviation = nn_param_deviation(model, p);
        const uint64_t key = nn_mix(seed + nn_mix((uint64_t)i));
        float *w = weights + p->offset;
        for (int r = 0; r < p->rows; r++)
            for (int c = 0; c < p->cols; c++) {
                const uint64_t element =
                    (uint64_t)(p->row_begin + r) * (uint64_t)p->full_cols + (uint64_t)(p->col_begin + c);
                *w++ = p->dims == 1 ? nn_starts_at(p) : deviation * nn_normal(key, element);
            }
    }
}
