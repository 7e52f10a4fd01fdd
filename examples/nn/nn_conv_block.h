/* nn_conv_block.h - one residual block of the convolutional network on some samples, forward and backward:
 *
 *   h = conv1(silu(norm1(x))) + time(active)        x += conv2(silu(norm2(h)))
 *
 * Norms are over groups, with a scale and a shift of each channel. Rows are places of samples, as in nn_conv_map.h. Ranks may
 * share the channels of h, whole groups each, and with them its norm: conv1 and time make a rank's channels, and conv2 reads
 * them. */
#ifndef NN_CONV_BLOCK_H
#define NN_CONV_BLOCK_H

#include "nn_conv_map.h"
#include "nn_group_norm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Weights of a block, in their order. */
enum {
    NN_CONV_NORM1, /* [inner] scale, then shift */
    NN_CONV_NORM1_BIAS,
    NN_CONV_CONV1, /* [here, inner, 3, 3] */
    NN_CONV_CONV1_BIAS,
    NN_CONV_TIME, /* [here, embedding] */
    NN_CONV_TIME_BIAS,
    NN_CONV_NORM2, /* [here] */
    NN_CONV_NORM2_BIAS,
    NN_CONV_CONV2, /* [inner, here, 3, 3] */
    NN_CONV_CONV2_BIAS,
    NN_CONV_BLOCK_WEIGHTS
};

/* What a norm keeps for its backward: [rows, channels], [samples, groups]. */
typedef struct nn_conv_trace {
    int64_t channels, groups; /* of the stream, or those of h that are here */
    float *normed, *inverse;
} nn_conv_trace;

/* Room for the samples of one call. */
typedef struct nn_conv_room {
    float *columns;           /* [rows, 9 max(inner, channels)] */
    float *affine, *sigmoid;  /* [rows, inner] behind a norm's scale and shift */
    float *read;              /* [rows, inner] what a convolution reads */
    float *branch, *d_branch; /* [rows, inner] */
    float *time;              /* [samples, inner]: what time and class add, or the gradient by it */
    float *d_active;          /* [samples, embedding] */
    float *pixels;            /* [rows, channels] */
} nn_conv_room;

/* Some samples in a block. */
typedef struct nn_conv_part {
    nn_group_norm sizes; /* of the stream */
    int64_t height, width, embedding;
    const nn_pieces *pieces; /* the channels of h that are here, in groups */
    nn_conv_trace norms[2];  /* of these samples */
    nn_conv_room room;
    const float *active; /* [samples, embedding] of time and class */
    float *x;            /* [rows, inner] the stream: read and written */
} nn_conv_part;

/* A convolution of the part's images, from and to so many channels. */
nn_conv_map nn_conv_part_map(const nn_conv_part *part, const float *const weights[2], int64_t in,
                             int64_t out);

/* room.read = silu of what a norm has kept, by its scale and shift; leaves what the backward reads in room.affine and
 * room.sigmoid. */
void nn_conv_read(const nn_conv_part *part, const nn_conv_trace *kept, const float *const affine[2]);

/* After that: d [rows, inner] in, by room.read; out, by what the norm read. gradients += of scale and shift; NULL is left out. */
void nn_conv_read_backward(const nn_conv_part *part, const nn_conv_trace *kept, const float *const affine[2],
                           float *const gradients[2], float *d);

/* Collective where ranks share channels, as the backward. */
xd_result nn_conv_block_forward(const nn_conv_part *part, const float *const *weights);

/* part->x is not read.
 *
 *   gradients  [NN_CONV_BLOCK_WEIGHTS] +=; those that are NULL are left out
 *   d_x        [rows, inner] the gradient by what the block has written; out: by what it read
 *   d_active   [samples, embedding] += */
xd_result nn_conv_block_backward(const nn_conv_part *part, const float *const *weights,
                                 float *const *gradients, float *d_x, float *d_active);

#ifdef __cplusplus
}
#endif

#endif /* NN_CONV_BLOCK_H */
