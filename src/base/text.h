#ifndef XDI_BASE_TEXT_H
#define XDI_BASE_TEXT_H

#include "base/config.h"

/* Bytes; not terminated. */
typedef struct xd_text {
    const char *data;
    int64_t size;
} xd_text;

/* Strings of tokens: those of a vocabulary by id, or of a sequence in order. */
typedef struct xd_texts {
    const xd_text *texts; /* [count] */
    int64_t count;
} xd_texts;

/* What a token is besides its text: a token with a role and no bytes is paired with the other side's token of the
 * same role at the same offset in the text. */
typedef enum xd_token_role { XD_TOKEN_TEXT = 0, XD_TOKEN_BOS, XD_TOKEN_EOS, XD_TOKEN_SPECIAL } xd_token_role;

/* Where a token comes from: bytes [begin, end) of the original text. The spans of tokens that share a character, or a
 * cluster of characters that was normalised as a whole, may be equal or lie one inside another. */
typedef struct xd_token_span {
    int64_t begin, end;
} xd_token_span;

#endif
