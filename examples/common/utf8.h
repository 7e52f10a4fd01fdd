/* utf8.h - whether bytes are a character. */
#ifndef UTF8_H
#define UTF8_H

#include <stddef.h>

/* Bytes of the character that begins at `text`, or 0 when it is not UTF-8. */
static inline size_t utf8_character(const unsigned char *text, size_t left) {
    const unsigned char lead = text[0];
    const size_t bytes = lead < 0x80   ? 1
                         : lead < 0xc2 ? 0
                         : lead < 0xe0 ? 2
                         : lead < 0xf0 ? 3
                         : lead < 0xf5 ? 4
                                       : 0;
    const unsigned char least = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const unsigned char most = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (bytes > left) return 0;
    if (bytes > 1 && (text[1] < least || text[1] > most)) return 0;
    for (size_t i = 2; i < bytes; i++)
        if ((text[i] & 0xc0) != 0x80) return 0;
    return bytes;
}

#endif /* UTF8_H */
