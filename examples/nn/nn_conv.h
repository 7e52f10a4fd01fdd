/* nn_conv.h - a small convolutional network over images, conditioned on time and class, as a network of xd_dmd.
 *
 * A convolution makes the stream [inner, height, width] of an image [channels, height, width]; residual blocks add to it
 * (nn_conv_block.h); a norm, SiLU and a convolution make the prediction. Every convolution is 3 x 3 with zeros around the
 * image, which keeps its size. An embedding of time and class is added within each block by a map of its own. Second
 * convolutions and the output begin as zeros.
 *
 * The root holds what stands before and behind the blocks and stays open during a pass; each block is one "blocks.N" of type
 * "residual", opened where a pass enters it and closed where it leaves. Samples and weights are F32. */
#ifndef NN_CONV_H
#define NN_CONV_H

#include "nn_split.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nn_conv_config {
    int height, width; /* of an image, in pixels; from 1 */
    int channels;      /* of an image */
    int inner;         /* channels of the stream */
    int groups;        /* of each norm; divide `inner` */
    int blocks;
    int frequencies; /* sines and cosines of the time together, even; half as many frequencies, 1 to 1000 in equal ratios */
    int embedding; /* width of what time and class make together */
    int labels;    /* classes; the last is "none" */
    /* Ranks that share the channels between the two convolutions of each block, whole groups each, so that every norm is of one
     * rank: sums over them are those of the groups, eight by default, along the canonical tree. At most 8 ranks, and as many as
     * groups, which they need not divide. NULL -> these are here, and sums over them are whole. */
    nn_split *split;
} nn_conv_config;

/* 16 x 16, 1, 32, 8, 4, 64, 64, 11: 88,353 weights, no ranks. Pure. */
nn_conv_config nn_conv_defaults(void);

/* The sealed model, without memory for weights. First values depend on the seed and the name of a weight. Local. Errors:
 * ARGUMENT (sizes out of their ranges, groups that do not divide the channels, more ranks than groups, with both numbers),
 * those of the description. */
xd_result nn_conv_describe(xd_ctx *ctx, const nn_conv_config *config, uint64_t seed, xd_model **out);

/* The passes of a model, with all memory that they need. */
typedef struct nn_conv nn_conv;

/* Prepares passes over a model of nn_conv_describe, wrapped or with storage of its own.
 *
 *   samples   most of one call
 *   slots     forwards that are open at once, each until its last backward; 0 -> inference alone
 *
 * The model must outlive it. Local. Errors: ARGUMENT (as above; negative counts; a model without these blocks, with the
 * numbers), MEMORY. */
xd_result nn_conv_create(xd_ctx *ctx, const nn_conv_config *config, xd_model *model, int64_t samples,
                         int slots, nn_conv **out);

/* Chooses what is a feature: the streams behind these blocks, ascending, [inner, height, width] of a sample each, for
 * nn_conv_network calls from here on. Without it that is the stream behind the middle one, (blocks - 1) / 2. Local. Errors,
 * nothing changed: ARGUMENT (a block that there is not, or that does not follow the one before it, with both numbers). */
xd_result nn_conv_capture(nn_conv *passes, const int *blocks, int count);

/* Its functions: flow is predicted, images are [channels, height, width], the condition is int32_t labels [samples], NULL for
 * samples without a class. Times are in [0, 1]. Features are those of nn_conv_capture.
 *
 * A pass allocates nothing. A backward by features alone and without weights opens no block behind the last of them. A
 * sample's prediction and the gradient by it have the same bits whichever samples are computed with it, and with `keep` as
 * without; gradients by weights are sums over the samples of a call in their order. Collective as the blocks of the model
 * are, and over the ranks of a split. Errors, before a block is opened: ARGUMENT (samples, slot or a label out of range, with
 * both numbers), STATE (a backward of a slot with another number of samples); then those of the blocks. */
xd_network nn_conv_network(nn_conv *passes);

/* NULL is fine. Local. */
void nn_conv_destroy(nn_conv *passes);

#ifdef __cplusplus
}
#endif

#endif /* NN_CONV_H */
