/* model_directory.h - the models of examples/nn as directories that Hugging Face transformers opens. */
#ifndef MODEL_DIRECTORY_H
#define MODEL_DIRECTORY_H

#include "../nn/nn_model.h"
#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a directory says besides the weights. */
typedef struct model_extras {
    const char *tokenizer; /* path of the tokenizer.json that goes with the model; copied */
    const char *end_token; /* its token that begins and ends a text; NULL -> it has none */
    int32_t end_of_text;   /* the id of that */
    int positions;         /* tokens that it was trained on at once */
    const char *
        tokenizer_text; /* [tokenizer_bytes] contents of a tokenizer.json instead of a path; NULL -> the path */
    size_t tokenizer_bytes;
} model_extras;

/* Reads config.json of a directory. Errors: IO; FORMAT (a size is missing); UNSUPPORTED (another type than llama,
 * qwen2 and qwen3, other biases, rotary angles or activation), by its name. */
xd_result model_directory_config(xd_ctx *ctx, const char *directory, nn_config *out);

/* Reads the weights of a whole model of that configuration: model.safetensors or the shards of its index, in F32, F16 or BF16.
 *
 *   weights  [model->float_count]
 *
 * Errors: IO, FORMAT; MISSING, DTYPE, SHAPE, with the tensor's name. */
xd_result model_directory_weights(xd_ctx *ctx, const char *directory, const nn_model *model, float *weights);

/* Both into a new model. *weights is freed with xd_release, the model with nn_model_free. */
xd_result model_directory_load(xd_ctx *ctx, const char *directory, nn_model *model, float **weights);

/* Writes config.json, generation_config.json, tokenizer.json, tokenizer_config.json and, last, model.safetensors (bf16)
 * into a directory that appears whole: whoever opens it meets the older model or this one. `weights` are rounded to what the
 * file holds. */
xd_result model_directory_save(xd_ctx *ctx, const char *directory, const nn_model *model, float *weights,
                               const model_extras *extras);

/* True when there is a model.safetensors: the directory holds a model that was finished. */
bool model_directory_is_finished(const char *directory);

/* True when the directory holds this very model: the same sizes and, rounded to bf16, the same weights. */
bool model_directory_holds(xd_ctx *ctx, const char *directory, const nn_model *model, const float *weights);

#ifdef __cplusplus
}
#endif

#endif /* MODEL_DIRECTORY_H */
