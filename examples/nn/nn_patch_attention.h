/* nn_patch_attention.h - attention of the tokens here to all tokens of their sample, some of which other ranks may have. */
#ifndef NN_PATCH_ATTENTION_H
#define NN_PATCH_ATTENTION_H

#include "nn_patch_positions.h"
#include "nn_patch_rows.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Room for one call. */
typedef struct nn_attention_room {
    float *turned;                    /* [width / heads, all tokens] */
    float *scores;                    /* [samples, heads, tokens, all tokens] */
    float *sent, *received, *columns; /* [2, the same]; as the next, only where ranks share tokens */
    float *own, *all;                 /* [rows, 2 width], [rows of all ranks, 2 width] */
} nn_attention_room;

/* width = heads * head_dim, head_dim and all tokens multiples of 8 */
typedef struct nn_full_attention {
    nn_grid grid; /* of the tokens here */
    int64_t heads;
    const nn_positions *at;
    const float *qkv; /* [rows, 3 width] */
    float *kept;  /* [rows of all ranks, 2 width] keys and values, written forward, read backward; NULL where
                   * all tokens are here */
    float *probs; /* [samples, heads, tokens, all tokens]: written forward, read backward */
    nn_attention_room room;
} nn_full_attention;

/* out [rows, width] = softmax(q k^T / sqrt(head_dim)) v. Collective where ranks share tokens. */
xd_result nn_full_attention_forward(const nn_full_attention *a, float *out);

/* d_qkv = ...; the gradient by a key or value is one sum over the queries of all ranks, in their order. Collective likewise. */
xd_result nn_full_attention_backward(const nn_full_attention *a, const float *d_out, float *d_qkv);

#ifdef __cplusplus
}
#endif

#endif /* NN_PATCH_ATTENTION_H */
