/* nn_patch.h - a small transformer over the patches of an image, conditioned on time and class, as a network of xd_dmd.
 *
 * An image [side, side] is cut into patches, each a token; ranks may share the tokens of their samples. A layer is attention
 * of every token to every other and a feed-forward part; both read a normalised stream that is scaled and shifted, and are
 * multiplied by a gate before they are added to it. Shift, scale and gate are linear in an embedding of time and class: by
 * one map for all layers, plus a table of each layer. Gates and output begin as zeros.
 *
 * The root holds what stands before and behind the layers and stays open during a pass; each layer is a block "blocks.N" of type
 * "layer", opened where a pass enters it and closed where it leaves. Samples and weights are F32. */
#ifndef NN_PATCH_H
#define NN_PATCH_H

#include "nn_split.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nn_patch_config {
    int side;  /* of an image, in pixels */
    int patch; /* side of a patch; there are (side / patch)^2 tokens, a multiple of 8 */
    int width; /* of the stream; a multiple of 8 heads */
    int layers, heads;
    int ffn; /* inner width of the feed-forward part */
    int frequencies; /* sines and cosines of the time together, even; half as many frequencies, 1 to 1000 in equal ratios */
    int labels;      /* classes; the last is "none" */
    xd_comm *cp;     /* ranks with the other tokens of the same samples, in eighths; NULL -> all are here */
    nn_split *split; /* ranks that share the heads and the inner width of the feed-forward part, each whole
                      * heads and pieces: a piece is an eighth of the width, rounded up. NULL -> these are
                      * here, and sums over them are whole */
} nn_patch_config;

/* 16, 4, 96, 4, 4, 240, 64, 11: 423,664 weights, no ranks. Pure. */
nn_patch_config nn_patch_defaults(void);

/* The sealed model, without memory for weights. First values depend on the seed and the name of a weight. Local. Errors:
 * ARGUMENT (sizes that do not divide, heads that the ranks of a split do not divide, more of these than pieces, with both
 * numbers), those of the description. */
xd_result nn_patch_describe(xd_ctx *ctx, const nn_patch_config *config, uint64_t seed, xd_model **out);

/* The pixels of an image that this rank has: those of its tokens, which follow each other. Pure. */
xd_interval nn_patch_pixels(const nn_patch_config *config);

/* The passes of a model, with all memory that they need. */
typedef struct nn_patch nn_patch;

/* Prepares passes over a model of nn_patch_describe, wrapped or with storage of its own.
 *
 *   samples   most of one call
 *   slots     forwards that are open at once, each until its last backward; 0 -> inference alone
 *
 * The model, and config->cp, must outlive it. Local; the same on all ranks of cp. Errors: ARGUMENT (as above; negative
 * counts; a model without these blocks; more ranks than eighths, or a rank whose tokens are no whole rows of patches, with
 * the numbers), MEMORY. */
xd_result nn_patch_create(xd_ctx *ctx, const nn_patch_config *config, xd_model *model, int64_t samples,
                          int slots, nn_patch **out);

/* Chooses what is a feature: the streams behind these layers, ascending, [width, side / patch, side / patch] of a sample each, for
 * nn_patch_network calls from here on. Without it that is the stream behind the middle one, (layers - 1) / 2. Local. Errors,
 * nothing changed: ARGUMENT (a layer that there is not, or that does not follow the one before it, with both numbers). */
xd_result nn_patch_capture(nn_patch *passes, const int *layers, int count);

/* Its functions: flow is predicted, images are rows of side * side pixels, the condition is int32_t labels [samples], NULL for
 * samples without a class. Times are in [0, 1]. Features are those of nn_patch_capture.
 *
 * With cp, images and the gradients by them are this rank's pixels of each sample; features, and the gradients by them, are
 * whole and the same on every rank, and so are times, condition and the gradients by weights. Keys, values and features are
 * gathered, and sums over tokens are made of those over each eighth of them along the canonical tree of xd_leaves: any number
 * of ranks has the bits of one. Collective over cp then, and over the ranks of a split.
 *
 * A pass allocates nothing. A backward by features alone and without weights opens no layer behind the last of them. A
 * sample's prediction and the gradient by it have the same bits whichever samples are computed with it, and with `keep` as
 * without. Collective as the blocks of the model are. Errors, before a block is opened: ARGUMENT (samples, slot or a label out of
 * range, with both numbers), STATE (a backward of a slot with another number of samples); then those of the blocks. */
xd_network nn_patch_network(nn_patch *passes);

/* NULL is fine. Local. */
void nn_patch_destroy(nn_patch *passes);

#ifdef __cplusplus
}
#endif

#endif /* NN_PATCH_H */
