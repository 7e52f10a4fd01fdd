#ifndef XDI_BASE_TEXT_H
#define XDI_BASE_TEXT_H

#include "base/config.h"

/* Bytes; not terminated. */
typedef struct xd_text {
    const char *data;
    int64_t size;
} xd_text;

/* Tokens: a vocabulary by id, or a sequence. */
typedef struct xd_texts {
    const xd_text *texts; /* [count] */
    int64_t count;
} xd_texts;

/* Alignment pairs tokens without bytes by role and offset. */
typedef enum xd_token_role { XD_TOKEN_TEXT = 0, XD_TOKEN_BOS, XD_TOKEN_EOS, XD_TOKEN_SPECIAL } xd_token_role;

/* Bytes of the original text. Tokens that share a character or a normalised cluster may have equal or nested spans. */
typedef struct xd_token_span {
    int64_t begin, end;
} xd_token_span;

#endif
