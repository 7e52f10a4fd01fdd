/* reader.h - a model that reads a text token by token: keys and values of what it has read are kept. */
#ifndef READER_H
#define READER_H

#include "lm.h"

typedef struct reader_cache {
    float *values;  /* [layers, keys and values, room, width] */
    int room, past; /* positions; of them read */
    int64_t width;  /* of keys, and of values */
    int calls;      /* in a pass: keys of the first layer, its values, keys of the second, ... */
} reader_cache;

typedef struct reader {
    const lm *m;
    nn_model model;
    reader_cache cache;
    int most; /* tokens read at once */
    float *workspace, *logits;
    int32_t *position; /* [room] 0, 1, 2, ... */
} reader;

/* `room`: positions of the context, at most the model's; `most` <= room. Errors: MEMORY. The model has its weights, and stays. `out` does,
 * too: it must not move. */
xd_result reader_create(xd_ctx *ctx, const lm *m, int room, int most, reader *out);
void reader_free(xd_ctx *ctx, reader *r);

/* Forgets all. */
void reader_restart(reader *r);

/* Reads `count` more tokens, 1 to r->most and no more than there is room for. Returns the logits of what follows the last. */
const float *reader_read(reader *r, const int32_t *ids, int count);

#endif /* READER_H */
