/* pair_steps.h - a few training steps between two vocabularies at their full sizes. */
#ifndef PAIR_STEPS_H
#define PAIR_STEPS_H

#include "pairing.h"

/* Student and teacher are small and random: what is measured is what grows with the vocabularies. Ranks share the student's columns. */
typedef struct pair_steps_desc {
    const pairing *text;
    const xd_projection *projection;
    int steps, ranks;
    uint64_t seed;
} pair_steps_desc;

enum { PAIR_STEPS_ROW = 128, PAIR_STEPS_ROWS = 2 };

typedef struct pair_steps {
    double first_loss, last_loss, seconds;
} pair_steps;

/* Errors: DATA (a text that is too short); MEMORY. */
xd_result pair_steps_run(xd_ctx *ctx, const pair_steps_desc *desc, pair_steps *out);

#endif /* PAIR_STEPS_H */
