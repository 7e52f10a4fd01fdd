/* letters.h - words as grey pixels: small letters, digits, comma and space. */
#ifndef LETTERS_H
#define LETTERS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    LETTERS_SCALE = 2,   /* pixels of the picture for a dot of a letter */
    LETTERS_COLUMNS = 6, /* of dots, the last is empty */
    LETTERS_ROWS = 9,    /* of dots, the last two for what hangs below the line */
    LETTERS_HEIGHT = LETTERS_SCALE * LETTERS_ROWS
};

/* Pixels that a text is wide. Pure. */
int letters_width(const char *text);

/* Blackens the dots of a text with its upper left corner there; `stride` is the picture's width. Other characters stay blank. */
void letters_draw(const char *text, uint8_t *corner, int stride);

#ifdef __cplusplus
}
#endif

#endif /* LETTERS_H */
