/* gguf_model.c - names, order and rules of a Llama-type model in a GGUF file. */
#include "gguf_model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- sizes ---- */

static bool gguf_size(const gguf *file, const char *key, int *out) {
    int64_t value = 0;
    if (!gguf_int(file, key, &value) || value < 1 || value > 1 << 24) return false;
    *out = (int)value;
    return true;
}

/* The architectures that are known. */
typedef struct gguf_family {
    const char *name;
    nn_extra extra;
    bool pairs; /* rows of queries and keys have the coordinates of a rotary plane side by side */
} gguf_family;

static const gguf_family gguf_families[] = {
    { "llama", NN_NO_EXTRA, true },
    { "qwen2", NN_QKV_BIAS, false },
    { "qwen3", NN_QK_NORM, false },
};

enum { GGUF_FAMILIES = sizeof gguf_families / sizeof gguf_families[0] };

static xd_result gguf_family_of(xd_ctx *ctx, const gguf *file, const gguf_family **out) {
    xd_text name = { "", 0 };
    (void)gguf_string(file, "general.architecture", &name);
    for (int i = 0; i < GGUF_FAMILIES; i++)
        if (gguf_text_is(name, gguf_families[i].name)) {
            *out = &gguf_families[i];
            return XD_OK;
        }
    return XD_FAIL(ctx, XD_ERROR_UNSUPPORTED,
                   "a model of architecture \"%.*s\": llama, qwen2 and qwen3 are known", gguf_shown(name),
                   name.data);
}

/* A key of the architecture. */
typedef char gguf_key[64];

static const char *gguf_key_of(const gguf_family *family, const char *name, gguf_key out) {
    snprintf(out, sizeof(gguf_key), "%s.%s", family->name, name);
    return out;
}

/* Llama 3 has a divisor for every rotary plane as a tensor: its four numbers are known but for the factor, which is the largest. */
static xd_result gguf_read_divisors(xd_ctx *ctx, const gguf *file, const gguf_tensor *t, nn_config *c) {
    double plain[NN_MOST_HEAD / 2], scaled[NN_MOST_HEAD / 2];
    float divisor[NN_MOST_HEAD / 2], most = 0.0f;
    const int half = c->head_dim / 2;
    XD_REQUIRE(ctx, t->rows == 1 && t->cols == half && half <= NN_MOST_HEAD / 2, XD_ERROR_SHAPE,
               "rope_freqs.weight has %lld x %lld elements, half a head %d", (long long)t->rows,
               (long long)t->cols, half);
    XD_TRY(gguf_read(file, t, 0, 1, divisor));
    for (int i = 0; i < half; i++) most = divisor[i] > most ? divisor[i] : most;
    nn_rope_frequencies(c, plain);
    c->rope_scaling = (nn_rope_scaling){ most, 1.0f, 4.0f, 8192 };
    nn_rope_frequencies(c, scaled);
    for (int i = 0; i < half; i++)
        XD_REQUIRE(ctx, fabs(plain[i] / scaled[i] - (double)divisor[i]) < 1e-3 * (double)divisor[i],
                   XD_ERROR_UNSUPPORTED, "rope_freqs.weight divides plane %d by %g, Llama 3 by %g", i,
                   (double)divisor[i], plain[i] / scaled[i]);
    return XD_OK;
}

/* Rotary angles that the sizes do not say; only those that nn_forward can do. */
static xd_result gguf_read_rotary(xd_ctx *ctx, const gguf *file, const gguf_family *family, nn_config *c) {
    const gguf_tensor *divisors = gguf_tensor_find(file, "rope_freqs.weight");
    xd_text scaling = { "none", 4 };
    double factor = 0.0;
    int rotary = c->head_dim;
    gguf_key key;
    (void)gguf_size(file, gguf_key_of(family, "rope.dimension_count", key), &rotary);
    XD_REQUIRE(ctx, rotary == c->head_dim, XD_ERROR_UNSUPPORTED, "rotary angles on %d of a head's %d", rotary,
               c->head_dim);
    (void)gguf_string(file, gguf_key_of(family, "rope.scaling.type", key), &scaling);
    (void)gguf_double(file, gguf_key_of(family, "rope.scaling.factor", key), &factor);
    XD_REQUIRE(ctx, gguf_text_is(scaling, "none") || (gguf_text_is(scaling, "linear") && factor >= 1.0),
               XD_ERROR_UNSUPPORTED, "rotary angles scaled: %.*s by %g", gguf_shown(scaling), scaling.data,
               factor);
    if (gguf_text_is(scaling, "linear")) c->rope_scaling.factor = (float)factor;
    return divisors ? gguf_read_divisors(ctx, file, divisors, c) : XD_OK;
}

static xd_result gguf_read_sizes(xd_ctx *ctx, const gguf *file, const gguf_family *family, nn_config *c) {
    const gguf_tensor *embedding = gguf_tensor_find(file, "token_embd.weight");
    double theta = 10000.0, eps = 0.0;
    gguf_key key;
    const bool sizes = gguf_size(file, gguf_key_of(family, "embedding_length", key), &c->hidden) &&
                       gguf_size(file, gguf_key_of(family, "block_count", key), &c->layers) &&
                       gguf_size(file, gguf_key_of(family, "attention.head_count", key), &c->heads) &&
                       gguf_size(file, gguf_key_of(family, "feed_forward_length", key), &c->ffn) &&
                       gguf_double(file, gguf_key_of(family, "attention.layer_norm_rms_epsilon", key), &eps);
    XD_REQUIRE(ctx, sizes && embedding && embedding->rows <= 1 << 24, XD_ERROR_FORMAT,
               "a size of the model is missing");
    if (!gguf_size(file, gguf_key_of(family, "attention.head_count_kv", key), &c->kv_heads))
        c->kv_heads = c->heads;
    if (!gguf_size(file, gguf_key_of(family, "attention.key_length", key), &c->head_dim))
        c->head_dim = c->hidden / c->heads;
    (void)gguf_double(file, gguf_key_of(family, "rope.freq_base", key), &theta);
    c->vocab = (int)embedding->rows;
    c->rope_theta = (float)theta;
    c->norm_eps = (float)eps;
    XD_REQUIRE(ctx,
               c->vocab >= 1 && c->head_dim >= 2 && c->head_dim <= NN_MOST_HEAD && c->head_dim % 2 == 0 &&
                   c->heads % c->kv_heads == 0,
               XD_ERROR_FORMAT, "%d heads of %d on %d of keys and values, %d tokens: no such model", c->heads,
               c->head_dim, c->kv_heads, c->vocab);
    XD_REQUIRE(ctx, theta > 0.0 && theta <= 1e30 && eps >= 0.0 && eps < 1.0, XD_ERROR_FORMAT,
               "angles to the base %g and norms with epsilon %g: no such model", theta, eps);
    return XD_OK;
}

xd_result gguf_model_config(xd_ctx *ctx, const gguf *file, nn_config *out) {
    const gguf_family *family = NULL;
    nn_config c;
    memset(&c, 0, sizeof c);
    XD_TRY(gguf_family_of(ctx, file, &family));
    XD_TRY(gguf_read_sizes(ctx, file, family, &c));
    c.extra = family->extra;
    c.tied = gguf_tensor_find(file, "output.weight") == NULL;
    XD_TRY(gguf_read_rotary(ctx, file, family, &c));
    *out = c;
    return XD_OK;
}

bool gguf_model_context(const gguf *file, int64_t *out) {
    gguf_key key;
    for (int i = 0; i < GGUF_FAMILIES; i++)
        if (gguf_int(file, gguf_key_of(&gguf_families[i], "context_length", key), out)) return true;
    return false;
}

/* ---- weights ---- */

/* What follows "model.layers.N." and "blk.N.", the other names whole. */
static const char *const gguf_names[][2] = {
    { "model.embed_tokens.weight", "token_embd.weight" },
    { "model.norm.weight", "output_norm.weight" },
    { "lm_head.weight", "output.weight" },
    { "input_layernorm.weight", "attn_norm.weight" },
    { "self_attn.q_proj.weight", "attn_q.weight" },
    { "self_attn.k_proj.weight", "attn_k.weight" },
    { "self_attn.v_proj.weight", "attn_v.weight" },
    { "self_attn.o_proj.weight", "attn_output.weight" },
    { "post_attention_layernorm.weight", "ffn_norm.weight" },
    { "mlp.gate_proj.weight", "ffn_gate.weight" },
    { "mlp.up_proj.weight", "ffn_up.weight" },
    { "mlp.down_proj.weight", "ffn_down.weight" },
    { "self_attn.q_proj.bias", "attn_q.bias" },
    { "self_attn.k_proj.bias", "attn_k.bias" },
    { "self_attn.v_proj.bias", "attn_v.bias" },
    { "self_attn.q_norm.weight", "attn_q_norm.weight" },
    { "self_attn.k_norm.weight", "attn_k_norm.weight" },
};

static void gguf_name_of(const char *name, char out[64]) {
    const char *leaf = name;
    int layer = -1, stem = 0;
    if (sscanf(name, "model.layers.%d.%n", &layer, &stem) == 1 && stem > 0) leaf = name + stem;
    for (size_t i = 0; i < sizeof gguf_names / sizeof gguf_names[0]; i++) {
        if (strcmp(leaf, gguf_names[i][0]) != 0) continue;
        if (leaf == name)
            snprintf(out, 64, "%s", gguf_names[i][1]);
        else
            snprintf(out, 64, "blk.%d.%s", layer, gguf_names[i][1]);
    }
}

/* Row `row` of a query or key weight: (plane i, coordinate s) of a head is row s * half + i here and row
 * 2 i + s there. */
static int64_t gguf_rotary_row(int64_t row, int head_dim) {
    const int64_t head = row / head_dim, within = row % head_dim, half = head_dim / 2;
    return head * head_dim + 2 * (within % half) + within / half;
}

/* `head_dim` 0: rows are in the order that nn_rope wants. */
static xd_result gguf_weight(xd_ctx *ctx, const gguf *file, int head_dim, const nn_param *p, float *row,
                             float *out) {
    char name[64] = "";
    gguf_name_of(p->name, name);
    const bool rotary = head_dim > 0 && (strstr(name, "attn_q.") || strstr(name, "attn_k."));
    const gguf_tensor *tensor = gguf_tensor_find(file, name);
    XD_REQUIRE(ctx, tensor != NULL, XD_ERROR_MISSING, "the file has no tensor %s", name);
    if (p->dims == 1) {
        XD_REQUIRE(ctx, tensor->rows == 1 && tensor->cols == p->rows, XD_ERROR_SHAPE,
                   "tensor %s has %lld x %lld elements, the model %d", name, (long long)tensor->rows,
                   (long long)tensor->cols, p->rows);
        return gguf_read(file, tensor, 0, 1, out);
    }
    XD_REQUIRE(ctx, tensor->rows == p->full_rows && tensor->cols == p->full_cols, XD_ERROR_SHAPE,
               "tensor %s has %lld x %lld elements, the model %d x %d", name, (long long)tensor->rows,
               (long long)tensor->cols, p->full_rows, p->full_cols);
    for (int r = 0; r < p->rows; r++, out += p->cols) {
        const int64_t wanted = p->row_begin + r;
        XD_TRY(gguf_read(file, tensor, rotary ? gguf_rotary_row(wanted, head_dim) : wanted, 1, row));
        memcpy(out, row + p->col_begin, (size_t)p->cols * sizeof *out);
    }
    return XD_OK;
}

xd_result gguf_model_weights(xd_ctx *ctx, const gguf *file, const nn_model *model, float *weights) {
    const gguf_family *family = NULL;
    XD_TRY(gguf_family_of(ctx, file, &family));
    xd_result result = XD_OK;
    int widest = 1;
    for (int i = 0; i < model->param_count; i++)
        if (model->params[i].full_cols > widest) widest = model->params[i].full_cols;
    float *row = (float *)xd_allocate(ctx, (size_t)widest * sizeof *row);
    XD_REQUIRE(ctx, row != NULL, XD_ERROR_MEMORY, "no room for a row of %d floats", widest);
    for (int i = 0; i < model->param_count && result == XD_OK; i++)
        result = gguf_weight(ctx, file, family->pairs ? model->config.head_dim : 0, &model->params[i], row,
                             weights + model->params[i].offset);
    xd_release(ctx, row);
    return result;
}
