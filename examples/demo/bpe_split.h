/* bpe_split.h - what training a byte-level vocabulary and using it share: how text falls into pieces, and how
 * bytes are spelled in a tokenizer.json. */
#ifndef BPE_SPLIT_H
#define BPE_SPLIT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The pattern that goes into a tokenizer.json. Its classes are ASCII only: everything else, any byte >= 0x80
 * included, is in the class "other", so bytes can be looked at one by one. */
#define BPE_SPLIT_PATTERN                                                     \
    "'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^ \\t\\n\\r\\fA-Za-z0-9]+|" \
    "[ \\t\\n\\r\\f]+(?![^ \\t\\n\\r\\f])|[ \\t\\n\\r\\f]+"

/* Bytes of the first piece of `text`, as BPE_SPLIT_PATTERN cuts it: 1..length, or 0 when length is 0. No
 * token crosses the border of a piece. */
size_t bpe_piece_length(const uint8_t *text, size_t length);

/* A tokenizer.json spells each byte as one printable character: itself, or one from U+0100 on. The code point
 * of a byte: */
uint32_t bpe_byte_to_character(uint8_t byte);

/* The byte of a code point, or -1 when no byte is spelled so. */
int bpe_character_to_byte(uint32_t character);

#ifdef __cplusplus
}
#endif

#endif /* BPE_SPLIT_H */
