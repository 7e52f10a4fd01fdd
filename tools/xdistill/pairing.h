/* pairing.h - a text in the tokens of a student and of a teacher with another tokenizer, side by side. */
#ifndef PAIRING_H
#define PAIRING_H

#include "text.h"

/* Positions of the teacher that a row has beside one of the student, at most. */
enum { PAIRING_PLACES = 2 };

/* Read only once it is made, so all ranks share it. */
typedef struct pairing {
    const tokens *student, *teacher; /* the same text */
    xd_alignment chunks;             /* of the two */
    int32_t *chunk_of;               /* [student->count] the chunk of a student's token */
    xd_projection projection;
} pairing;

/* Aligns both. `report` may be NULL. Errors: MEMORY. Free with pairing_free. */
xd_result pairing_align(xd_ctx *ctx, const tokens *student, const tokens *teacher, pairing *out,
                        xd_align_report *report);

/* The same, and builds the projection that the text itself gives: a student's token stands for the teacher's tokens that begin where it
 * does, as often as they do so. */
xd_result pairing_create(xd_ctx *ctx, const tokens *student, const tokens *teacher, const int vocabularies[2],
                         pairing *out);
void pairing_free(xd_ctx *ctx, pairing *p);

/* A row of the student's, and what of the teacher belongs to it. Of a chunk its first tokens count: there both models have read the
 * same text. */
typedef struct pairing_row {
    int length, places;       /* positions of the student; at most so many of the teacher */
    int64_t *student_chunks;  /* [length] */
    int64_t *teacher_chunks;  /* [places] */
    int64_t *cache_positions; /* [places] in the part */
    uint8_t *mask;            /* [length] chunks that count */
    int64_t part;             /* of the cache; all of a row is in one */
    int64_t from;             /* the teacher's token that the first of its positions has read last */
    int held;                 /* positions of the teacher that the row takes; 0 -> no chunk */
} pairing_row;

/* `most`: positions that the teacher reads at once, 0 -> any number. Errors: MEMORY. Free with pairing_row_free. */
xd_result pairing_row_create(xd_ctx *ctx, int length, int most, pairing_row *out);
void pairing_row_free(xd_ctx *ctx, pairing_row *row);

/* The row whose first token is `start` of the student's, each of whose tokens predicts the next. `part_tokens`: of a part of the
 * teacher's cache, 0 -> there is none, and the teacher reads [from, from + held) of its tokens. */
void pairing_read_row(const pairing *p, int64_t part_tokens, int64_t start, pairing_row *row);

#endif /* PAIRING_H */
