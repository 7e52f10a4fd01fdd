#ifndef XDI_DMD_NETWORK_H
#define XDI_DMD_NETWORK_H

#include "dmd/convert.h"

/* The caller's networks of a distillation: docs/diffusion.md. */

/* One forward or its backward. Arrays are in device memory, valid during the call: samples dense [samples, elements],
 * features and logits f32. A forward's outputs stay until its slot's next. */
typedef struct xd_network_call {
    int slot; /* of a forward and its backward, 0 to 2; student and fake score: 0 */
    int64_t samples;
    const void *hidden;    /* x_t, of the samples' dtype; discriminator: NULL */
    const double *times;   /* [samples] on the host, as scaled; discriminator: NULL */
    const void *condition; /* the batch's, or its `negative` */
    /* Forward. */
    bool keep; /* a backward follows; otherwise an inference */
    void *raw; /* out: prediction, of the samples' dtype; discriminator: logits [samples, heads] */
    /* Out: [feature_count] arrays [samples, feature_elements]; NULL -> not wanted. A discriminator's input. */
    float *const *features;
    /* Backward; NULL -> no gradient. */
    const float *raw_gradient;             /* d loss / d raw */
    const float *const *feature_gradients; /* [feature_count]; not of a discriminator */
    float *hidden_gradient;                /* out, or NULL: d loss / d hidden, overwritten */
    float *const *input_gradients;         /* out, or NULL: discriminator, [feature_count] */
    bool weights;                          /* weights get gradients; false: open blocks as for an inference */
    int64_t micro_batch;                   /* micro-batch of this rank, as in xd_pass */
    bool more;                             /* another backward of it follows, as in xd_pass */
    const float *const *directions;        /* v of `penalty`, [feature_count] */
} xd_network_call;

/* A network by its functions, whose failures the library returns. */
typedef struct xd_network {
    void *user;
    xd_prediction predicts;          /* the type of `raw` */
    int feature_count;               /* of the teacher; discriminator: those it reads, 0 -> not compared */
    const int64_t *feature_elements; /* [feature_count] elements of a sample */
    int64_t heads;                   /* discriminator: logits of a sample */
    xd_result (*forward)(void *user, const xd_network_call *call);
    xd_result (*backward)(void *user, const xd_network_call *call); /* NULL if never called */
    xd_guidance guidance; /* fake score: in the student's term; teacher: `rescale` alone; others: none */
    /* Discriminator: adds the gradient by weights of the sum of <v, d logits / d features> at an open slot, a second-order
     * backward, for XD_DMD_PENALTY_SLOPE. NULL -> not offered. */
    xd_result (*penalty)(void *user, const xd_network_call *call);
} xd_network;

#endif
