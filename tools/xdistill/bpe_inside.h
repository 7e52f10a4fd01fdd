/* bpe_inside.h - what training shares with writing the file. */
#ifndef BPE_INSIDE_H
#define BPE_INSIDE_H

#include "bpe.h"

#include <stdint.h>

enum { BPE_SPECIAL = 1, BPE_BYTES = 256, BPE_FIRST_MERGE = BPE_SPECIAL + BPE_BYTES };

/* A way to cut text: by a pattern or into digits, then perhaps by ByteLevel's own pattern. */
typedef struct bpe_preset {
    const char *name;
    const char *split; /* NULL -> no stage Split */
    bool digits;       /* a stage Digits */
    bool gpt2;         /* ByteLevel splits, too */
} bpe_preset;

/* NULL -> there is none of that name. */
const bpe_preset *bpe_find_preset(const char *name);

/* The entries so far. */
typedef struct bpe_vocabulary {
    const bpe_preset *how;
    int32_t entries;
    int32_t merges[BPE_MOST_ENTRIES][2];
    uint8_t *spelling[BPE_MOST_ENTRIES]; /* the bytes of each entry */
    uint32_t length[BPE_MOST_ENTRIES];
} bpe_vocabulary;

/* bpe_file.c: the tokenizer.json of a vocabulary, freed with free(). Errors: MEMORY. */
xd_result bpe_write(xd_ctx *ctx, const bpe_vocabulary *v, char **json, size_t *bytes);

#endif /* BPE_INSIDE_H */
