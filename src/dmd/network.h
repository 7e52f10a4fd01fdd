#ifndef XDI_DMD_NETWORK_H
#define XDI_DMD_NETWORK_H

#include "dmd/convert.h"

/* The networks of a distillation, which are the caller's: the library says what to compute and what for, and never looks inside.
 * A call opens and closes the blocks of its model itself (model/pass.h); leaves, sums, norms and steps are xd_dmd_step's.
 *
 * Under FSDP the ranks of a model make the same calls in the same order; a rank that has run out of samples is called with
 * samples = 0, to open and close blocks without computing. */

/* One forward, or the backward of one. Arrays of samples are [samples, elements] without gaps, in memory of the device; those of
 * features and logits f32. All of them are valid during the call only, but what a forward writes stays until the slot's next. */
typedef struct xd_network_call {
    int slot; /* which open forward, 0 to 2: its backward says the same number. One slot is open once; student and fake score
               * have slot 0 alone */
    int64_t samples;
    const void *hidden;  /* x_t, of the samples' dtype. For a discriminator NULL: features of `features` are
                          * its input */
    const double *times; /* [samples] as the network sees them (xd_dmd_desc.network_scale), on the host; for a
                          * discriminator NULL */
    const void *condition; /* the batch's, or `negative` of it for guidance: the caller's own */
    /* Forward. */
    bool keep; /* the slot's backward follows: keep what it needs. Without it the pass is an inference */
    void *raw; /* out: the prediction, of the samples' dtype; a discriminator's logits [samples, heads],
                * f32 */
    float *const *features; /* out: [feature_count] arrays [samples, feature_elements]; NULL -> not
                             * wanted. A discriminator's input, also in its backward */
    /* Backward; what is NULL has no gradient. */
    const float *raw_gradient;             /* by raw, or by the logits */
    const float *const *feature_gradients; /* [feature_count] by the features of a network that is not a
                                            * discriminator */
    float *hidden_gradient;                /* out, or NULL: by hidden, whole, not added to what is there */
    float *const *input_gradients;         /* out, or NULL: [feature_count] by a discriminator's input */
    bool weights; /* whether weights have gradients: a backward of leaf `leaf`. Otherwise its blocks are
                   * opened as for an inference, so that nothing counts as a leaf's backward */
    int64_t leaf; /* this rank's leaf of the step, as in xd_pass */
    bool more;    /* another backward of this leaf follows, as in xd_pass */
    const float *const *directions; /* of `penalty`: v, [feature_count] arrays of the sizes of a
                                     * discriminator's input */
} xd_network_call;

/* A network by its functions. A failure is returned, with its message in the context, by the library's call. */
typedef struct xd_network {
    void *user;
    xd_prediction predicts; /* what raw is */
    int feature_count; /* arrays of features that a forward can give; those of the teacher feed the discriminator. Of a
                        * discriminator: those that it reads, compared with the teacher's; 0 -> not compared */
    const int64_t *feature_elements; /* [feature_count] elements of a sample in each */
    int64_t heads;                   /* discriminator: logits of a sample */
    xd_result (*forward)(void *user, const xd_network_call *call);
    xd_result (*backward)(void *user, const xd_network_call *call); /* NULL for one that never has any */
    xd_guidance guidance; /* of the fake score in the student's term; of the teacher `rescale` alone, with
                           * xd_dmd_desc.guided. Others have none: the references guide the teacher
                           * only */
    /* Of a discriminator: adds the gradient by weights of
     *
     *   sum over samples of <v, d (sum of a sample's logits) / d its features>,      v = directions, which are constants
     *
     * at the features of an open slot, as a backward of the leaf (`weights` is true). That is of the second order: the derivative
     * along v is the one by the features again. NULL -> not offered; only XD_DMD_PENALTY_SLOPE asks for it. */
    xd_result (*penalty)(void *user, const xd_network_call *call);
} xd_network;

#endif
