/* lm.h - a language model of the Llama type: a GGUF file, or a Hugging Face directory. */
#ifndef LM_H
#define LM_H

#include "../../examples/common/gguf_model.h"
#include "../../examples/nn/nn_transformer.h"
#include "xdistill.h"

/* A model; read only, so all ranks share it. */
typedef struct lm {
    const char *path, *name; /* the caller's path, and its last part */
    nn_config config;
    nn_model model; /* of one rank alone */
    float *weights; /* NULL before lm_load_weights */
    xd_tokenizer *tokenizer;
    char *tokenizer_text; /* [tokenizer_bytes] its tokenizer.json */
    size_t tokenizer_bytes;
    int32_t end_of_text; /* -1 -> none is known */
    char end_token[64];  /* its text; empty -> none */
    int positions;       /* of a context, at most */
    gguf *file;          /* of a GGUF file */
} lm;

/* Reads sizes and tokenizer, no weights. Errors: IO (nothing there), FORMAT, UNSUPPORTED by name, DATA (a tokenizer with more
 * tokens than the embedding has rows). Free with lm_free. */
xd_result lm_open(xd_ctx *ctx, const char *path, lm *out);

/* Reads the weights, as floats: 4 bytes each. */
xd_result lm_load_weights(xd_ctx *ctx, lm *m);
void lm_free(xd_ctx *ctx, lm *m);

/* A file that begins as a GGUF file does. */
bool lm_is_gguf(const char *path);

/* Weights that a model has, and those of its embedding, or of embedding and head. */
int64_t lm_weight_count(const nn_config *config);
int64_t lm_end_count(const nn_config *config);

#endif /* LM_H */
