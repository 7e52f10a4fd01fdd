/* text.h - a text that somebody brings: what it must be, its parts, its tokens. */
#ifndef TEXT_H
#define TEXT_H

#include "xdistill.h"

/* A text is cut into TEXT_PIECES pieces at the ends of lines. Held-out ones are spread evenly over it: the first, third, ... of
 * them choose the best student, the others are for the report. */
enum { TEXT_PIECES = 40 };
typedef enum text_part { TEXT_TRAIN, TEXT_CHOOSE, TEXT_REPORT, TEXT_PARTS } text_part;

typedef struct text_split {
    char *data[TEXT_PARTS];
    size_t bytes[TEXT_PARTS];
} text_split;

/* Reads a file that must be UTF-8 text. Free with xd_release. Errors: IO; DATA (empty, a zero byte, not UTF-8: with the byte). */
xd_result text_load(xd_ctx *ctx, const char *path, char **data, size_t *bytes);

/* What is cut. */
typedef struct text_split_desc {
    const char *path;
    double held_out; /* the share of both held-out parts together */
    const char
        *report; /* a text for the report; its pieces of the other are learned from then; NULL -> none */
} text_split_desc;

/* Reads and cuts a text. Free with text_split_free. Errors: those of text_load; DATA (too short for parts). */
xd_result text_split_load(xd_ctx *ctx, const text_split_desc *desc, text_split *out);
void text_split_free(xd_ctx *ctx, text_split *split);

/* The first words of a text, at most four of a line, for a model to go on from. */
enum { TEXT_BEGINNING = 48 };
void text_beginning(const char *data, size_t bytes, char out[TEXT_BEGINNING]);

/* A text in a tokenizer's tokens; the text itself stays the caller's. */
typedef struct tokens {
    const char *data;
    size_t bytes;
    int32_t *ids;         /* [count] */
    xd_token_span *spans; /* [count] in data */
    int64_t count;
} tokens;

xd_result tokens_encode(xd_ctx *ctx, const xd_tokenizer *tokenizer, const char *data, size_t bytes,
                        tokens *out);
void tokens_free(xd_ctx *ctx, tokens *t);

#endif /* TEXT_H */
