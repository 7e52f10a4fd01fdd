/* bpe_split.c - see bpe_split.h. */
#include "bpe_split.h"

#include <string.h>

typedef enum bpe_class { BPE_SPACE, BPE_LETTER, BPE_DIGIT, BPE_OTHER } bpe_class;

static bpe_class bpe_class_of(uint8_t c) {
    if (c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f') return BPE_SPACE;
    if ((c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z')) return BPE_LETTER;
    return c >= '0' && c <= '9' ? BPE_DIGIT : BPE_OTHER;
}

/* '(?:[sdmt]|ll|ve|re) */
static size_t bpe_contraction(const uint8_t *text, size_t length) {
    if (length < 2 || text[0] != '\'') return 0;
    if (strchr("sdmt", text[1]) && text[1]) return 2;
    if (length < 3) return 0;
    return memcmp(text + 1, "ll", 2) == 0 || memcmp(text + 1, "ve", 2) == 0 || memcmp(text + 1, "re", 2) == 0
               ? 3
               : 0;
}

/* Bytes from `text` on that are of the class of the first one. */
static size_t bpe_run(const uint8_t *text, size_t length) {
    const bpe_class kind = bpe_class_of(text[0]);
    size_t n = 1;
    while (n < length && bpe_class_of(text[n]) == kind) n++;
    return n;
}

size_t bpe_piece_length(const uint8_t *text, size_t length) {
    if (length == 0) return 0;
    const size_t contraction = bpe_contraction(text, length);
    if (contraction) return contraction;
    if (bpe_class_of(text[0]) != BPE_SPACE) return bpe_run(text, length);
    /* One blank belongs to the word after it. */
    if (text[0] == ' ' && length > 1 && bpe_class_of(text[1]) != BPE_SPACE)
        return 1 + bpe_run(text + 1, length - 1);
    /* A longer run leaves its last character to what follows, unless nothing follows. */
    const size_t run = bpe_run(text, length);
    return run > 1 && run < length ? run - 1 : run;
}

static int bpe_is_printable(int byte) {
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

uint32_t bpe_byte_to_character(uint8_t byte) {
    uint32_t next = 256;
    if (bpe_is_printable(byte)) return byte;
    for (int b = 0; b < byte; b++)
        if (!bpe_is_printable(b)) next++;
    return next;
}

int bpe_character_to_byte(uint32_t character) {
    if (character < 256) return bpe_is_printable((int)character) ? (int)character : -1;
    for (int b = 0; b < 256; b++)
        if (bpe_byte_to_character((uint8_t)b) == character) return b;
    return -1;
}
