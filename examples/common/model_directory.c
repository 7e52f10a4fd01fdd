/* model_directory.c - Hugging Face directories of the Llama models of examples/nn. */
#include "model_directory.h"
#include "json_fields.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- config.json ---- */

static bool model_int(const xd_json *root, const char *key, int *out) {
    int64_t value = 0;
    if (!xd_json_int64(xd_json_find(root, key), &value) || value <= 0 || value > 1 << 24) return false;
    *out = (int)value;
    return true;
}

/* The types of models that are known. */
typedef struct model_family {
    const char *type, *architecture;
    nn_extra extra;
} model_family;

static const model_family model_families[] = {
    { "llama", "LlamaForCausalLM", NN_NO_EXTRA },
    { "qwen2", "Qwen2ForCausalLM", NN_QKV_BIAS },
    { "qwen3", "Qwen3ForCausalLM", NN_QK_NORM },
};

enum { MODEL_FAMILIES = sizeof model_families / sizeof model_families[0] };

static bool model_is_of(const nn_config *c, const model_family *family) {
    return c->extra == family->extra;
}

/* ---- rotary angles ---- */

static double model_number(const xd_json *object, const char *key, double otherwise) {
    double value = otherwise;
    (void)xd_json_double(xd_json_find(object, key), &value);
    return value;
}

/* "rope_theta" and "rope_scaling" stand at the top, or in newer files everything under "rope_parameters". */
static xd_result model_read_rope(xd_ctx *ctx, const char *path, const xd_json *root, nn_config *c) {
    const xd_json *newer = xd_json_find(root, "rope_parameters"), *older = xd_json_find(root, "rope_scaling");
    const xd_json *scaling = xd_json_first(newer) ? newer : older;
    const char *type = xd_json_string(xd_json_find(scaling, "rope_type"), NULL);
    if (!type) type = xd_json_string(xd_json_find(scaling, "type"), NULL);
    c->rope_theta = (float)model_number(root, "rope_theta", model_number(newer, "rope_theta", 10000.0));
    if (!type || strcmp(type, "default") == 0) return XD_OK;
    const bool smooth = strcmp(type, "llama3") == 0;
    XD_REQUIRE(ctx, smooth || strcmp(type, "linear") == 0, XD_ERROR_UNSUPPORTED,
               "%s: rotary angles of type \"%.40s\": default, linear and llama3 are known", path, type);
    c->rope_scaling.factor = (float)model_number(scaling, "factor", 0.0);
    XD_REQUIRE(ctx, c->rope_scaling.factor >= 1.0f, XD_ERROR_FORMAT, "%s: rotary angles with a factor of %g",
               path, (double)c->rope_scaling.factor);
    if (!smooth) return XD_OK;
    c->rope_scaling.low = (float)model_number(scaling, "low_freq_factor", 1.0);
    c->rope_scaling.high = (float)model_number(scaling, "high_freq_factor", 4.0);
    XD_REQUIRE(ctx,
               model_int(scaling, "original_max_position_embeddings", &c->rope_scaling.original) &&
                   c->rope_scaling.high > c->rope_scaling.low,
               XD_ERROR_FORMAT, "%s: rotary angles of llama3 without their four numbers", path);
    return XD_OK;
}

/* What the sizes do not say, and nn_forward could not do. */
static xd_result model_config_check(xd_ctx *ctx, const char *path, const xd_json *root, nn_config *c) {
    static const char *const flags[] = { "attention_bias", "mlp_bias", "use_sliding_window" };
    const char *type = xd_json_string(xd_json_find(root, "model_type"), NULL);
    const char *activation = xd_json_string(xd_json_find(root, "hidden_act"), NULL);
    int family = 0;
    bool flag = false;
    while (type && family < MODEL_FAMILIES && strcmp(type, model_families[family].type) != 0) family++;
    XD_REQUIRE(ctx, family < MODEL_FAMILIES, XD_ERROR_UNSUPPORTED,
               "%s: a model of type \"%.40s\": llama, qwen2 and qwen3 are known", path, type);
    XD_REQUIRE(ctx, !activation || strcmp(activation, "silu") == 0, XD_ERROR_UNSUPPORTED,
               "%s: activation \"%.40s\": silu is known", path, activation);
    for (int i = 0; i < 3; i++)
        XD_REQUIRE(ctx, !xd_json_bool(xd_json_find(root, flags[i]), &flag) || !flag, XD_ERROR_UNSUPPORTED,
                   "%s: %s is true, which is not known here", path, flags[i]);
    c->extra = model_families[family].extra;
    return model_read_rope(ctx, path, root, c);
}

static xd_result model_config_load(xd_ctx *ctx, const char *path, nn_config *out) {
    xd_json *root = NULL;
    nn_config c;
    double eps = 1e-6;
    memset(&c, 0, sizeof c);
    XD_TRY(xd_json_load(ctx, NULL, path, &root));
    const xd_result known = model_config_check(ctx, path, root, &c);
    if (known != XD_OK) {
        xd_json_destroy(ctx, root);
        return known;
    }
    const bool sizes = model_int(root, "vocab_size", &c.vocab) && model_int(root, "hidden_size", &c.hidden) &&
                       model_int(root, "num_hidden_layers", &c.layers) &&
                       model_int(root, "num_attention_heads", &c.heads) &&
                       model_int(root, "intermediate_size", &c.ffn);
    if (!model_int(root, "num_key_value_heads", &c.kv_heads)) c.kv_heads = c.heads;
    if (sizes && !model_int(root, "head_dim", &c.head_dim)) c.head_dim = c.hidden / c.heads;
    (void)xd_json_double(xd_json_find(root, "rms_norm_eps"), &eps);
    (void)xd_json_bool(xd_json_find(root, "tie_word_embeddings"), &c.tied);
    c.norm_eps = (float)eps;
    xd_json_destroy(ctx, root);
    if (!sizes) return XD_FAIL(ctx, XD_ERROR_FORMAT, "%s lacks a size of a Llama model", path);
    *out = c;
    return XD_OK;
}

/* A float as one would write it: 1e-5, not the 9.99999975e-06 that it is as a double. */
static void model_write_float(xd_json_writer *w, const char *key, float value) {
    char text[32];
    snprintf(text, sizeof text, "%.7g", (double)value);
    json_field_double(w, key, strtod(text, NULL));
}

/* Without such a token null, or transformers would take its own default for one. */
static void model_write_ends(xd_json_writer *w, const model_extras *e) {
    static const char *const keys[] = { "bos_token_id", "eos_token_id" };
    for (int i = 0; i < 2; i++) {
        xd_json_write_key(w, keys[i]);
        if (e->end_token)
            xd_json_write_int64(w, e->end_of_text);
        else
            xd_json_write_null(w);
    }
}

static void model_write_rope(xd_json_writer *w, const nn_config *c) {
    const nn_rope_scaling *s = &c->rope_scaling;
    model_write_float(w, "rope_theta", c->rope_theta);
    if (s->factor == 0.0f) return;
    xd_json_write_key(w, "rope_scaling");
    xd_json_write_object(w);
    json_field_string(w, "rope_type", s->original ? "llama3" : "linear");
    model_write_float(w, "factor", s->factor);
    if (s->original) {
        model_write_float(w, "low_freq_factor", s->low);
        model_write_float(w, "high_freq_factor", s->high);
        json_field_int(w, "original_max_position_embeddings", s->original);
    }
    xd_json_write_end(w);
}

static void model_write_config(xd_json_writer *w, const nn_config *c, const model_extras *e) {
    int family = 0;
    while (!model_is_of(c, &model_families[family])) family++;
    xd_json_write_key(w, "architectures");
    xd_json_write_array(w);
    xd_json_write_string(w, model_families[family].architecture);
    xd_json_write_end(w);
    json_field_string(w, "model_type", model_families[family].type);
    json_field_string(w, "dtype", "bfloat16");
    json_field_string(w, "torch_dtype", "bfloat16");
    json_field_string(w, "hidden_act", "silu");
    json_field_int(w, "vocab_size", c->vocab);
    json_field_int(w, "hidden_size", c->hidden);
    json_field_int(w, "intermediate_size", c->ffn);
    json_field_int(w, "num_hidden_layers", c->layers);
    json_field_int(w, "num_attention_heads", c->heads);
    json_field_int(w, "num_key_value_heads", c->kv_heads);
    json_field_int(w, "head_dim", c->head_dim);
    json_field_int(w, "max_position_embeddings", e->positions);
    model_write_float(w, "rms_norm_eps", c->norm_eps);
    model_write_rope(w, c);
    json_field_bool(w, "tie_word_embeddings", c->tied);
    json_field_bool(w, "attention_bias", false);
    json_field_bool(w, "mlp_bias", false);
    model_write_ends(w, e);
}

static void model_write_generation(xd_json_writer *w, const model_extras *e) {
    json_field_bool(w, "do_sample", true);
    json_field_double(w, "temperature", 0.8);
    model_write_ends(w, e);
}

static void model_write_tokenizer(xd_json_writer *w, const model_extras *e) {
    json_field_string(w, "tokenizer_class", "PreTrainedTokenizerFast");
    if (e->end_token) {
        json_field_string(w, "bos_token", e->end_token);
        json_field_string(w, "eos_token", e->end_token);
    }
    json_field_int(w, "model_max_length", e->positions);
    json_field_bool(w, "clean_up_tokenization_spaces", false);
}

/* ---- model.safetensors ---- */

/* Writes every weight as bf16; `bits` has room for the largest. */
static xd_result model_tensors_write(xd_weights_writer *writer, const nn_model *m, const float *weights,
                                     uint16_t *bits) {
    for (int i = 0; i < m->param_count; i++) {
        const float *from = weights + m->params[i].offset;
        for (int64_t j = 0; j < nn_param_count(&m->params[i]); j++) bits[j] = xd_bf16_from_f32(from[j]);
        XD_TRY(xd_weights_writer_write(writer, i, 0, XD_WEIGHTS_REST, bits));
    }
    return XD_OK;
}

static xd_result model_tensors_save(xd_ctx *ctx, const char *path, const nn_model *m, const float *weights) {
    xd_weights_writer_desc desc;
    xd_weights_writer *writer = NULL;
    const size_t count = (size_t)m->param_count;
    xd_weights_entry *entries = (xd_weights_entry *)xd_allocate(ctx, count * sizeof *entries);
    int64_t *shapes = (int64_t *)xd_allocate(ctx, 2 * count * sizeof *shapes);
    uint16_t *bits = (uint16_t *)xd_allocate(ctx, (size_t)m->float_count * sizeof *bits);
    xd_result result = XD_OK;
    if (!entries || !shapes || !bits) result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room to write %s", path);
    for (int i = 0; i < m->param_count && result == XD_OK; i++) {
        shapes[2 * i] = m->params[i].rows;
        shapes[2 * i + 1] = m->params[i].cols;
        entries[i].name = m->params[i].name;
        entries[i].dtype = XD_DTYPE_BF16;
        entries[i].ndim = m->params[i].dims;
        entries[i].shape = &shapes[2 * i];
    }
    memset(&desc, 0, sizeof desc);
    desc.file = path;
    desc.entries = entries;
    desc.entry_count = m->param_count;
    if (result == XD_OK) result = xd_weights_writer_create(ctx, &desc, &writer);
    if (result == XD_OK) result = model_tensors_write(writer, m, weights, bits);
    if (result == XD_OK)
        result = xd_weights_writer_commit(writer);
    else
        xd_weights_writer_abort(writer);
    xd_release(ctx, entries);
    xd_release(ctx, shapes);
    xd_release(ctx, bits);
    return result;
}

/* An element of a file; the format does not align its data. */
static float model_element(xd_dtype dtype, const uint8_t *at) {
    uint16_t half;
    float whole;
    if (dtype == XD_DTYPE_F32) {
        memcpy(&whole, at, sizeof whole);
        return whole;
    }
    memcpy(&half, at, sizeof half);
    return dtype == XD_DTYPE_BF16 ? xd_f32_from_bf16(half) : xd_f32_from_f16(half);
}

/* One weight of an open file. */
static xd_result model_tensor_read(xd_ctx *ctx, const xd_weights *file, const nn_param *p, float *out) {
    const int64_t index = xd_weights_find(file, p->name), count = nn_param_count(p);
    if (index < 0) return XD_FAIL(ctx, XD_ERROR_MISSING, "the file has no tensor %s", p->name);
    const xd_weights_tensor *info = xd_weights_at(file, index);
    const xd_dtype dtype = info->dtype;
    if (dtype != XD_DTYPE_BF16 && dtype != XD_DTYPE_F16 && dtype != XD_DTYPE_F32)
        return XD_FAIL(ctx, XD_ERROR_DTYPE, "%s is %s, not F32, F16 or BF16", p->name, xd_dtype_name(dtype));
    if (info->ndim != p->dims || info->shape[0] != p->rows || (p->dims == 2 && info->shape[1] != p->cols))
        return XD_FAIL(ctx, XD_ERROR_SHAPE, "%s does not have the %d x %d elements of the configuration",
                       p->name, p->rows, p->cols);
    const uint8_t *bytes = (const uint8_t *)xd_weights_data(file, index);
    const int64_t width = dtype == XD_DTYPE_F32 ? 4 : 2;
    for (int64_t i = 0; i < count; i++) out[i] = model_element(dtype, bytes + width * i);
    return XD_OK;
}

xd_result model_directory_weights(xd_ctx *ctx, const char *directory, const nn_model *m, float *weights) {
    xd_weights_desc desc;
    xd_weights *file = NULL;
    xd_result result = XD_OK;
    memset(&desc, 0, sizeof desc);
    desc.directory = directory;
    XD_TRY(xd_weights_open(ctx, &desc, &file));
    for (int i = 0; i < m->param_count && result == XD_OK; i++)
        result = model_tensor_read(ctx, file, &m->params[i], weights + m->params[i].offset);
    xd_weights_close(file);
    return result;
}

/* ---- directories ---- */

static void model_path(char out[512], const char *directory, const char *name) {
    snprintf(out, 512, "%s/%s", directory, name);
}

xd_result model_directory_config(xd_ctx *ctx, const char *directory, nn_config *out) {
    char path[512];
    model_path(path, directory, "config.json");
    return model_config_load(ctx, path, out);
}

xd_result model_directory_load(xd_ctx *ctx, const char *directory, nn_model *model, float **weights) {
    nn_config config;
    XD_TRY(model_directory_config(ctx, directory, &config));
    const char *problem = nn_model_init(&config, NULL, NULL, model);
    if (problem) return XD_FAIL(ctx, XD_ERROR_FORMAT, "%s/config.json: %s", directory, problem);
    float *read = (float *)xd_allocate(ctx, (size_t)model->float_count * sizeof *read);
    const xd_result result = read ? model_directory_weights(ctx, directory, model, read)
                                  : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %s", directory);
    if (result == XD_OK) {
        *weights = read;
        return XD_OK;
    }
    xd_release(ctx, read);
    nn_model_free(model);
    return result;
}

/* Finishes a writer that holds one open object, and writes it as a file of the directory. */
static xd_result model_json_save(xd_ctx *ctx, xd_json_writer *w, const char *directory, const char *name) {
    char path[512];
    xd_json_write_end(w);
    model_path(path, directory, name);
    return json_save(ctx, w, path);
}

static xd_json_writer model_json_open(xd_ctx *ctx) {
    xd_json_writer w = xd_json_writer_create(ctx);
    w.indent = 2;
    xd_json_write_object(&w);
    return w;
}

static xd_result model_copy(xd_ctx *ctx, const char *from, const char *to) {
    char *data = NULL;
    size_t bytes = 0;
    XD_TRY(xd_file_load(ctx, from, 0, &data, &bytes));
    const xd_result result = xd_file_save(ctx, to, data, bytes);
    xd_release(ctx, data);
    return result;
}

static xd_result model_files_save(xd_ctx *ctx, const char *directory, const nn_model *model,
                                  const float *weights, const model_extras *extras) {
    char path[512];
    xd_json_writer w = model_json_open(ctx);
    model_write_config(&w, &model->config, extras);
    XD_TRY(model_json_save(ctx, &w, directory, "config.json"));
    w = model_json_open(ctx);
    model_write_generation(&w, extras);
    XD_TRY(model_json_save(ctx, &w, directory, "generation_config.json"));
    w = model_json_open(ctx);
    model_write_tokenizer(&w, extras);
    XD_TRY(model_json_save(ctx, &w, directory, "tokenizer_config.json"));
    model_path(path, directory, "tokenizer.json");
    XD_TRY(extras->tokenizer_text ? xd_file_save(ctx, path, extras->tokenizer_text, extras->tokenizer_bytes)
                                  : model_copy(ctx, extras->tokenizer, path));
    model_path(path, directory, "model.safetensors");
    return model_tensors_save(ctx, path, model, weights);
}

xd_result model_directory_save(xd_ctx *ctx, const char *directory, const nn_model *model, float *weights,
                               const model_extras *extras) {
    xd_publish_directory *made = NULL;
    for (int64_t i = 0; i < model->float_count; i++)
        weights[i] = xd_f32_from_bf16(xd_bf16_from_f32(weights[i]));
    XD_TRY(xd_publish_directory_create(ctx, &(xd_publish_directory_desc){ directory }, &made));
    const xd_result result = model_files_save(ctx, xd_publish_directory_path(made), model, weights, extras);
    if (result == XD_OK) return xd_publish_directory_commit(made);
    xd_publish_directory_abort(made);
    return result;
}

bool model_directory_is_finished(const char *directory) {
    char path[512];
    model_path(path, directory, "model.safetensors");
    FILE *there = fopen(path, "rb");
    if (there) fclose(there);
    return there != NULL;
}

bool model_directory_holds(xd_ctx *ctx, const char *directory, const nn_model *model, const float *weights) {
    nn_model other;
    float *held = NULL;
    if (model_directory_load(ctx, directory, &other, &held) != XD_OK) return false;
    bool same = other.float_count == model->float_count && other.param_count == model->param_count;
    for (int64_t i = 0; same && i < model->float_count; i++)
        same = xd_bf16_from_f32(held[i]) == xd_bf16_from_f32(weights[i]);
    xd_release(ctx, held);
    nn_model_free(&other);
    return same;
}
