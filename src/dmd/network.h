#ifndef XDI_DMD_NETWORK_H
#define XDI_DMD_NETWORK_H

#include "dmd/convert.h"

/* Networks: docs/diffusion.md. */

/* One forward or its backward. Arrays are device memory, valid during the call, a forward's outputs until its slot's
 * next. Samples are dense [samples, elements] of their dtype; features, logits, gradients f32. */
typedef struct xd_network_call {
    int slot; /* 0 to 2; student, fake score: 0 */
    int64_t samples;
    const void *hidden;    /* x_t; discriminator: NULL */
    const double *times;   /* [samples], host, scaled; discriminator: NULL */
    const void *condition; /* or the batch's `negative` */
    /* Forward. */
    bool keep; /* a backward follows; false: an inference */
    void *raw; /* out: prediction, or logits [samples, heads] */
    /* Out, a discriminator's input: [feature_count] arrays [samples, feature_elements]; NULL -> not wanted. */
    float *const *features;
    /* Backward; NULL -> no gradient. */
    const float *raw_gradient;             /* by `raw` */
    const float *const *feature_gradients; /* [feature_count]; discriminator: none */
    float *hidden_gradient;                /* out, or NULL: by `hidden`, overwritten */
    float *const *input_gradients;         /* out, or NULL: discriminator, [feature_count] */
    bool weights;                          /* they get gradients; false: blocks open as for an inference */
    int64_t micro_batch;                   /* as in xd_pass */
    bool more;                             /* as in xd_pass */
    const float *const *directions;        /* of `penalty`, [feature_count] */
} xd_network_call;

/* A network. The library returns its functions' errors. */
typedef struct xd_network {
    void *user;
    xd_prediction predicts;          /* `raw` */
    int feature_count;               /* teacher's; discriminator: those it reads, 0 -> not compared */
    const int64_t *feature_elements; /* [feature_count] of a sample */
    int64_t heads;                   /* discriminator: logits of a sample */
    xd_result (*forward)(void *user, const xd_network_call *call);
    xd_result (*backward)(void *user, const xd_network_call *call); /* NULL if never called */
    xd_guidance guidance; /* fake score: in the student's term; teacher: `rescale` alone */
    /* Discriminator, XD_DMD_PENALTY_SLOPE: adds the gradient by weights of the sum of <directions, d logits /
     * d features> at an open slot. NULL -> not offered. */
    xd_result (*penalty)(void *user, const xd_network_call *call);
} xd_network;

#endif
