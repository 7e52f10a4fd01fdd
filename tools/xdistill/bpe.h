/* bpe.h - trains the vocabulary of a byte-level BPE tokenizer on a text. */
#ifndef BPE_H
#define BPE_H

#include "xdistill.h"

enum { BPE_LEAST_ENTRIES = 257, BPE_MOST_ENTRIES = 65536 };

typedef struct bpe_desc {
    const char *text; /* [bytes] */
    size_t bytes;
    int entries;        /* at most; fewer when no pair occurs twice */
    const char *pieces; /* how text falls into pieces, which no entry crosses; bpe_pieces names them */
} bpe_desc;

/* What a training found. */
typedef struct bpe_report {
    int entries;
    int64_t pieces; /* different ones */
} bpe_report;

/* The names of ways to cut text; NULL behind the last. */
const char *bpe_pieces(int i);

/* *json is a tokenizer.json of *json_bytes; free with free(). Entry 0 is <|endoftext|>, entries 1 to 256 are the bytes. Every later
 * entry joins two earlier ones: the pair that occurs most often inside pieces, the pair of lowest ids among equals. The same text
 * gives the same file. Errors: ARGUMENT (entries, pieces), MEMORY, those of xd_encode. */
xd_result bpe_train(xd_ctx *ctx, const bpe_desc *desc, char **json, size_t *json_bytes, bpe_report *report);

#endif /* BPE_H */
