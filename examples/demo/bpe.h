/* bpe.h - byte-level BPE: reads a tokenizer.json, text to ids and back. */
#ifndef BPE_H
#define BPE_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A vocabulary; read only after loading, so ranks may share it. */
typedef struct bpe bpe;

/* Loads a tokenizer.json in the Hugging Face form: a BPE model over bytes, its split the one in bpe_split.h.
 *
 * Local. Errors: IO; FORMAT for what is not such a file, or a split this program does not know. */
xd_result bpe_load(xd_ctx *ctx, const char *path, bpe **out);

/* Frees a vocabulary. NULL is fine. */
void bpe_destroy(xd_ctx *ctx, bpe *vocabulary);

/* Number of entries; ids are 0 .. size - 1. */
int bpe_size(const bpe *vocabulary);

/* The id of an added token such as "<|endoftext|>", or -1. */
int32_t bpe_special(const bpe *vocabulary, const char *token);

/* ids = the entries of `text`; returns how many. ids must have room for `bytes` of them. Added tokens written
 * out in the text become their ids. Time grows with the square of the longest piece. */
int64_t bpe_encode(const bpe *vocabulary, const char *text, size_t bytes, int32_t *ids);

/* The bytes of one entry, not NUL-terminated; an added token is spelled out. NULL for an id out of range. */
const uint8_t *bpe_spelling(const bpe *vocabulary, int32_t id, size_t *bytes);

#ifdef __cplusplus
}
#endif

#endif /* BPE_H */
