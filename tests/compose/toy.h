/* toy.h - a small network whose passes go through the brackets of a wrapper: embedding, layers, a head. Its arithmetic is plain
 * loops, the same for a leaf whichever rank it is on. */
#ifndef TOY_H
#define TOY_H

#include "xdistill.h"

enum { TOY_LAYERS = 3, TOY_ROWS = 3, TOY_HIDDEN = 24, TOY_INNER = 16, TOY_VOCAB = 24, TOY_LEAVES = 12 };

typedef struct toy_sizes {
    int hidden, inner, layers, vocab;
    int rows;   /* of a leaf */
    int tied;   /* the head is the embedding */
    int frozen; /* bits: the embedding, the first and the second matrix of layers */
    int half;   /* weights are BF16; blocks show F32 all the same */
    int skips;  /* every third layer has no part in a step, each in its turn */
    int copies; /* the head is a copy of the embedding, each in a block of its own */
} toy_sizes;

/* The part of the network that a stage of a pipeline has. */
typedef struct toy_cut {
    bool first, last; /* the embedding; scale and head */
    int begin, end;   /* layers */
} toy_cut;

/* What one leaf keeps from forward to backward. */
typedef struct toy_kept {
    float h[TOY_LAYERS + 1][TOY_ROWS][TOY_HIDDEN]; /* before each layer, and after the last */
    float inner[TOY_LAYERS][TOY_ROWS][TOY_INNER];  /* before the bend */
} toy_kept;

typedef struct toy {
    toy_sizes size;
    toy_cut cut;
    xd_model *model;
    xd_block *embed, *head; /* of copies; else NULL: in the root */
    xd_block *layer[TOY_LAYERS], *mlp[TOY_LAYERS];
    bool plain; /* no brackets: values and gradients are where the model says, in the caller's storage */
} toy;

/* Describes the network; `storage` and `gradients` are the caller's for every weight, or NULL. Seals it. */
xd_result toy_describe(xd_ctx *ctx, const toy_sizes *size, float *storage, float *gradients, toy *out);

/* The same for a part of it, not sealed. */
xd_result toy_describe_stage(xd_ctx *ctx, const toy_sizes *size, const toy_cut *cut, toy *out);

/* Elements of all weights that are not ties. */
int64_t toy_count(const toy_sizes *size);

/* Numbers that depend on their place alone, in [-0.5, 0.5). */
float toy_number(int64_t a, int64_t b, int64_t c);

/* The token of a row of a leaf in a step, and what follows it. */
int toy_token(const toy_sizes *size, int step, int64_t leaf, int row);
int toy_label(const toy_sizes *size, int step, int64_t leaf, int row);

/* The passes of leaf `leaf` of a step, which is the rank's `k`th; -1: blocks are opened and closed alone.
 *   logits, d_logits   [rows, vocab]
 *   recompute          opens every layer once more for its forward, inside the backward */
xd_result toy_forward(const toy *t, xd_pass_kind kind, int step, int64_t leaf, toy_kept *kept, float *logits);
xd_result toy_backward(const toy *t, int step, int64_t leaf, int64_t k, bool recompute, toy_kept *kept,
                       const float *d_logits);

/* The same passes of a stage. Activations are [rows, TOY_HIDDEN].
 *   input    forward: NULL on the first stage; backward: the gradient of the output, on the last stage d_logits
 *   output   forward: on the last stage logits; backward: the gradient of the input, NULL on the first stage */
typedef struct toy_pass {
    xd_pass_kind kind;
    int step;
    int64_t leaf, k;
    bool recompute;
    toy_kept *kept;
    const float *input;
    float *output;
} toy_pass;
xd_result toy_forward_stage(const toy *t, const toy_pass *pass);
xd_result toy_backward_stage(const toy *t, const toy_pass *pass);

#endif
