/* nn_disc_inside.h - what the description, memory and passes of the discriminator share. */
#ifndef NN_DISC_INSIDE_H
#define NN_DISC_INSIDE_H

#include "nn_disc_head.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a forward keeps of a head, of all samples; an inference, of one chunk. */
typedef struct nn_disc_trace {
    float *normed, *inverse; /* [rows, inner], [samples, groups] */
} nn_disc_trace;

typedef struct nn_disc_slot {
    bool keeps;
    int64_t samples; /* of its last forward; -1 before */
    nn_disc_trace heads[NN_DISC_MOST_HEADS];
} nn_disc_slot;

struct nn_disc {
    xd_ctx *ctx;
    nn_disc_config config;
    int64_t samples;                   /* most of a call */
    int64_t chunk[NN_DISC_MOST_HEADS]; /* samples computed together */
    nn_disc_sizes sizes[NN_DISC_MOST_HEADS];
    int64_t elements[NN_DISC_MOST_HEADS]; /* of the features */
    xd_block *blocks[NN_DISC_MOST_HEADS];
    int slot_count;
    nn_disc_slot *slots;                          /* [slot_count + 1]; the last is that of inference */
    float *columns, *d_columns, *inner, *tangent; /* room of any head's chunk */
    void *memory;
};

#ifdef __cplusplus
}
#endif

#endif /* NN_DISC_INSIDE_H */
