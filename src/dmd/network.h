#ifndef XDI_DMD_NETWORK_H
#define XDI_DMD_NETWORK_H

#include "dmd/convert.h"

/* The caller's networks of a distillation: docs/diffusion.md. A call opens and closes the blocks of its model (model/pass.h);
 * xd_dmd_step sums and steps. Under FSDP all ranks of a model make the same calls in the same order. A rank without samples
 * left gets samples = 0 and opens and closes blocks without computing. */

/* One forward, or its backward. Arrays are in device memory and valid during the call. Those of samples are dense [samples,
 * elements], features and logits f32. Outputs of a forward stay until the slot's next forward. */
typedef struct xd_network_call {
    int slot; /* of the open forward and its backward: 0 to 2; student and fake score: 0. Open once at a time */
    int64_t samples;
    const void *hidden;    /* x_t, of the samples' dtype; discriminator: NULL, `features` is the input */
    const double *times;   /* [samples] on the host, by xd_dmd_desc.network_scale; discriminator: NULL */
    const void *condition; /* the batch's `condition`, or `negative` for guidance */
    /* Forward. */
    bool keep; /* a backward of the slot follows; otherwise an inference */
    void *raw; /* out: the prediction, of the samples' dtype; discriminator: f32 logits [samples, heads] */
    /* Out: [feature_count] arrays [samples, feature_elements]; NULL -> not wanted. Input of a discriminator and its backward. */
    float *const *features;
    /* Backward; NULL -> no gradient. */
    const float *raw_gradient;             /* d loss / d raw */
    const float *const *feature_gradients; /* [feature_count]; not of a discriminator */
    float *hidden_gradient;                /* out, or NULL: d loss / d hidden, overwritten */
    float *const *input_gradients;         /* out, or NULL: [feature_count] by a discriminator's input */
    bool weights; /* weights get gradients, as a backward of `leaf`; otherwise open blocks as for an inference */
    int64_t leaf; /* this rank's micro-batch of the step, as in xd_pass */
    bool more;    /* another backward of this micro-batch follows, as in xd_pass */
    const float *const *directions; /* of `penalty`: v, [feature_count] arrays like a discriminator's input */
} xd_network_call;

/* A network by its functions. The library's call returns their failures, with the context's message. */
typedef struct xd_network {
    void *user;
    xd_prediction predicts; /* the type of `raw` */
    /* Of the teacher: the features for the discriminator. Discriminator: those it reads, must be equal; 0 -> not compared. */
    int feature_count;
    const int64_t *feature_elements; /* [feature_count] elements of a sample in each */
    int64_t heads;                   /* discriminator: logits of a sample */
    xd_result (*forward)(void *user, const xd_network_call *call);
    xd_result (*backward)(void *user, const xd_network_call *call); /* NULL if never called */
    xd_guidance guidance; /* fake score: in the student's term; teacher: `rescale` alone; others: none */
    /* Discriminator: adds the gradient by weights, at the features of an open slot, of
     *
     *     sum over samples of <v, d (sum of a sample's logits) / d its features>,      v = directions, constant
     *
     * It is a second-order backward of the micro-batch. NULL -> not offered; XD_DMD_PENALTY_SLOPE needs it. */
    xd_result (*penalty)(void *user, const xd_network_call *call);
} xd_network;

#endif
