/* vocabulary.h - tokenizers from the files that people have. */
#ifndef VOCABULARY_H
#define VOCABULARY_H

#include "../../examples/common/options.h"
#include "xdistill.h"

/* A Hugging Face directory, a GGUF file, a tokenizer.json, a rank file (with a preset) or a SentencePiece model. Free with
 * xd_tokenizer_destroy. Errors: IO (nothing there), FORMAT, UNSUPPORTED by name. */
xd_result vocabulary_open(xd_ctx *ctx, const char *path, xd_tokenizer_preset preset, xd_tokenizer **out);

/* The rules of a rank file: XD_TOKENIZER_PRESET_NONE and false for a name that is not known. */
bool vocabulary_preset(const char *name, xd_tokenizer_preset *out);

/* The names of presets, as help and errors list them. */
#define VOCABULARY_PRESETS "gpt2, cl100k, o200k, llama3, llama4 or qwen"

#endif /* VOCABULARY_H */
