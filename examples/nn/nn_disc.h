/* nn_disc.h - a discriminator over features of another network, as a network of xd_dmd: one small head for each feature.
 *
 * A head reads a feature [channels, height, width] and gives one logit: a convolution of 4 x 4 with stride 2 and an edge of one
 * zero to half the channels, group norm (epsilon 1e-5, scale and shift for each channel), LeakyReLU with slope 0.2, a convolution
 * of 1 x 1 to one channel, and the mean over all places. That is the head for image transformers of Model-Optimizer and FastGen,
 * with 8 channels^2 + 2 channels + 1 weights.
 *
 * Each head is a block "heads.N" of type "head", opened where a pass enters it and closed where it leaves; the root has no
 * weights. Features, logits and weights are F32. */
#ifndef NN_DISC_H
#define NN_DISC_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { NN_DISC_MOST_HEADS = 16 };

/* Of a sample's array, in this order. */
typedef struct nn_disc_feature {
    int channels;      /* even; half of them are a multiple of their groups */
    int height, width; /* at least 2 */
} nn_disc_feature;

typedef struct nn_disc_config {
    int heads; /* 1 to NN_DISC_MOST_HEADS */
    nn_disc_feature features[NN_DISC_MOST_HEADS];
} nn_disc_config;

/* Groups that the norm of so many channels has: a quarter of up to 32 channels, rounded down, at least 1; of more the largest
 * divisor that is at most 32. Pure. */
int nn_disc_groups(int channels);

/* The sealed model, without memory for weights. Convolutions begin as uniform numbers within 1 / sqrt(inputs of an output), which
 * depend on the seed and the name of a weight, so every rank has the same; norms as one and zero. Local. Errors: ARGUMENT
 * (sizes that do not divide, with both numbers), those of the description. */
xd_result nn_disc_describe(xd_ctx *ctx, const nn_disc_config *config, uint64_t seed, xd_model **out);

/* The passes of a model, with all memory that they need. */
typedef struct nn_disc nn_disc;

/* Prepares passes over a model of nn_disc_describe, wrapped or with storage of its own.
 *
 *   samples   most of one call
 *   slots     forwards that are open at once, each until its last backward; 0 -> inference alone
 *
 * The model must outlive it. Local. Errors: ARGUMENT (as above; negative counts; a model without these blocks), MEMORY. */
xd_result nn_disc_create(xd_ctx *ctx, const nn_disc_config *config, xd_model *model, int64_t samples,
                         int slots, nn_disc **out);

/* Its functions: logits [samples, heads] of `features`, of which there is one for each head, in the order of the config. Times and
 * condition are not read.
 *
 * The penalty of a slope is offered. A pass allocates nothing. A sample's logits and the gradient by its features have the
 * same bits whichever samples are computed with it, and with `keep` as without; gradients by weights are sums in the order of
 * the samples. Collective as the blocks of the model are. Errors, before a block is opened: ARGUMENT (samples or slot out of
 * range, with both numbers), STATE (a backward of a slot with another number of samples); then those of the blocks. */
xd_network nn_disc_network(nn_disc *passes);

/* NULL is fine. Local. */
void nn_disc_destroy(nn_disc *passes);

#ifdef __cplusplus
}
#endif

#endif /* NN_DISC_H */
