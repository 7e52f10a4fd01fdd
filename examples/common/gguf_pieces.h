/* gguf_pieces.h - merges of a SentencePiece vocabulary, of which a GGUF file keeps the pieces and their scores alone. */
#ifndef GGUF_PIECES_H
#define GGUF_PIECES_H

#include "gguf.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a token is: "tokenizer.ggml.token_type". */
typedef enum gguf_token_kind {
    GGUF_TOKEN_NORMAL = 1,
    GGUF_TOKEN_UNKNOWN,
    GGUF_TOKEN_CONTROL,
    GGUF_TOKEN_USER,
    GGUF_TOKEN_UNUSED,
    GGUF_TOKEN_BYTE
} gguf_token_kind;

/* Two pieces that make a third. */
typedef struct gguf_merge {
    double score; /* of the third */
    int32_t whole, left, right;
    int32_t left_length, right_length; /* in characters */
} gguf_merge;

/* Every way in which a piece is made of two others: the better score first, of equal ones the longer left part. *out [*count] is freed
 * with xd_release. Errors: FORMAT (fewer scores or types than tokens), MEMORY. */
xd_result gguf_pieces_merges(xd_ctx *ctx, const gguf *file, gguf_merge **out, int64_t *count);

#ifdef __cplusplus
}
#endif

#endif /* GGUF_PIECES_H */
