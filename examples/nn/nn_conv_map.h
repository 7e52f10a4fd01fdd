/* nn_conv_map.h - the convolution of images by 3 x 3 places, with zeros around them, as a matrix product.
 *
 * Rows are places, one line of an image after another: [samples, height * width, channels]. */
#ifndef NN_CONV_MAP_H
#define NN_CONV_MAP_H

#include "nn_patch_pieces.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { NN_CONV_SEEN = 9 /* places that one sees */ };

typedef struct nn_conv_map {
    int64_t samples, height, width; /* of images: any sizes from 1 */
    int64_t in, out;                /* channels */
    const float *weight, *bias;     /* [out, in, 3, 3], [out] */
    float *columns;                 /* room [rows, 9 in] */
} nn_conv_map;

/* y [rows, out] = what each place sees of x [rows, in] by the weight, and the bias. */
void nn_conv_map_forward(const nn_conv_map *map, const float *x, float *y);

/* d_x = ..., d_weight += ..., d_bias += ...; what is NULL is left out, and then x is not read without a weight's gradient. */
void nn_conv_map_backward(const nn_conv_map *map, const float *x, const float *d_y, float *d_x,
                          float *const gradients[2]);

/* The same where x has the channels of this rank's pieces, `in` of the map: y is the sum over all ranks. Collective. */
xd_result nn_conv_map_join(const nn_conv_map *map, const nn_pieces *in, const float *x, float *y);

/* d_x = ... where d_y has those of this rank's pieces, `out` of the map. Collective. */
xd_result nn_conv_map_join_backward(const nn_conv_map *map, const nn_pieces *out, const float *d_y,
                                    float *d_x);

#ifdef __cplusplus
}
#endif

#endif /* NN_CONV_MAP_H */
