#ifndef XDI_BASE_TEXT_H
#define XDI_BASE_TEXT_H

#include "base/config.h"

/* Bytes; not terminated. */
typedef struct xd_text {
    const char *data;
    int64_t size;
} xd_text;

/* Strings of tokens: a vocabulary by id, or a sequence. */
typedef struct xd_texts {
    const xd_text *texts; /* [count] */
    int64_t count;
} xd_texts;

/* The role of a token. Without bytes it is paired with the other side's token of this role at the same offset. */
typedef enum xd_token_role { XD_TOKEN_TEXT = 0, XD_TOKEN_BOS, XD_TOKEN_EOS, XD_TOKEN_SPECIAL } xd_token_role;

/* Bytes [begin, end) of the original text. Spans of tokens that share a character, or a cluster normalised as a whole, may be
 * equal or nested. */
typedef struct xd_token_span {
    int64_t begin, end;
} xd_token_span;

#endif
