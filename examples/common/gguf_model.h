/* gguf_model.h - a Llama-type model out of a GGUF file: sizes, weights and tokenizer. */
#ifndef GGUF_MODEL_H
#define GGUF_MODEL_H

#include "../nn/nn_model.h"
#include "gguf.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The sizes of a model of architecture llama, qwen2 or qwen3. Local. Errors: UNSUPPORTED for another, for rotary angles that do not
 * turn whole heads, or are scaled but linearly or as in Llama 3; FORMAT when a size is missing or absurd. */
xd_result gguf_model_config(xd_ctx *ctx, const gguf *file, nn_config *out);

/* Tokens of a context, where the file says them. */
bool gguf_model_context(const gguf *file, int64_t *out);

/* The weights that this rank's model holds, in its order. Queries and keys are stored with the two
 * coordinates of a rotary plane side by side; nn_rope wants them half a head apart, so their rows are put in
 * that order.
 *
 *   weights  [model->float_count]
 *
 * Local. Errors: MISSING, SHAPE naming the tensor; UNSUPPORTED as gguf_read; MEMORY. */
xd_result gguf_model_weights(xd_ctx *ctx, const gguf *file, const nn_model *model, float *weights);

/* The tokenizer.json that the file's tokenizer would be. *text [*bytes] is freed with xd_release. Errors as below. */
xd_result gguf_model_tokenizer_json(xd_ctx *ctx, const gguf *file, char **text, size_t *bytes);

/* The tokenizer, by way of the tokenizer.json it would be. Byte-level BPE ("gpt2") with the split rules named
 * smollm, starcoder, gpt-2, default, llama-bpe or qwen2; or the pieces and scores of SentencePiece ("llama"). Local. Errors: UNSUPPORTED for others, by name; as
 * xd_tokenizer_load. */
xd_result gguf_model_tokenizer(xd_ctx *ctx, const gguf *file, xd_tokenizer **out);

#ifdef __cplusplus
}
#endif

#endif /* GGUF_MODEL_H */
