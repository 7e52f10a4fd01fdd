/* toy.h - a small network whose passes go through the brackets of a wrapper: embedding, layers, experts, a head. A row of a leaf is
 * a position of a sequence, and layers see the one before it. Its arithmetic is plain loops and the sums of share.h, the same for
 * a leaf whichever ranks it is on, and for a row whichever rank its expert is on. */
#ifndef TOY_H
#define TOY_H

#include "share.h"

enum { TOY_LAYERS = 3, TOY_ROWS = 3, TOY_HIDDEN = 24, TOY_INNER = 16, TOY_VOCAB = 24, TOY_MICRO_BATCHES = 12 };
enum { TOY_EXPERTS = 4, TOY_MEMBERS = 4 }; /* ranks that share the experts */

typedef struct toy_sizes {
    int hidden, inner, layers, vocab;
    int rows;    /* of a leaf */
    int tied;    /* the head is the embedding */
    int frozen;  /* bits: the embedding, the first and the second matrix of layers, the experts' matrices */
    int half;    /* weights are BF16, or F16 with 2; blocks show F32 all the same */
    int skips;   /* every third layer has no part in a step, each in its turn */
    int copies;  /* the head is a copy of the embedding, each in a block of its own */
    int experts; /* behind the layers, each row through one of them; 0 -> none */
} toy_sizes;

/* The part of the network that a stage of a pipeline has. */
typedef struct toy_cut {
    bool first, last; /* the embedding; scale and head */
    int begin, end;   /* layers */
} toy_cut;

/* Who got which rows of a leaf, and what came here of others. */
typedef struct toy_routes {
    int64_t order[TOY_ROWS]; /* as they are sent: by expert */
    int64_t sent[TOY_MEMBERS], came[TOY_MEMBERS];
    int64_t counts[TOY_MEMBERS * TOY_EXPERTS];      /* of each member, for each expert that is here */
    int64_t numbers[TOY_MEMBERS * TOY_ROWS];        /* of the rows that came, in their leaves */
    float rows[TOY_MEMBERS * TOY_ROWS][TOY_HIDDEN]; /* that came */
} toy_routes;

/* What one leaf keeps from forward to backward. */
typedef struct toy_kept {
    float h[TOY_LAYERS + 2][TOY_ROWS][TOY_HIDDEN]; /* before each layer, after the last, after the experts */
    float seen[TOY_LAYERS][TOY_ROWS][TOY_HIDDEN];  /* by each layer */
    float inner[TOY_LAYERS][TOY_ROWS][TOY_INNER];  /* before the bend; what is here of it */
    toy_routes routes;
} toy_kept;

typedef struct toy {
    toy_sizes size;
    toy_cut cut;
    xd_model *model;
    xd_block *embed, *head; /* of copies; else NULL: in the root */
    xd_block *layer[TOY_LAYERS], *mlp[TOY_LAYERS];
    xd_block *experts;
    sharing *share; /* whose rows, and which parts of matrices are here */
    bool plain;     /* no brackets: values and gradients are where the model says, in the caller's storage */
} toy;

/* Where the next weight's storage is, when it is the caller's. */
typedef struct toy_storage {
    float *values, *gradients;
    xd_dtype dtype;
} toy_storage;

/* Describes the network and seals it.
 *   storage   the caller's for every weight; zero -> the library's
 *   out       `share` is there, all else is filled in */
xd_result toy_describe(xd_ctx *ctx, const toy_sizes *size, toy_storage storage, toy *out);
void toy_destroy(toy *t);

/* The same for a part of it, not sealed; `share` is there. */
xd_result toy_describe_stage(xd_ctx *ctx, const toy_sizes *size, const toy_cut *cut, toy *out);

/* Elements of all weights that are not ties. */
int64_t toy_count(const toy_sizes *size);

/* Numbers that depend on their place alone, in [-0.5, 0.5). */
float toy_number(int64_t a, int64_t b, int64_t c);

/* The token of a row of a leaf in a step, and what follows it. */
int toy_token(const toy_sizes *size, int step, int64_t leaf, int row);
int toy_label(const toy_sizes *size, int step, int64_t leaf, int row);

/* The passes of a leaf through a stage, or the whole. Activations are [rows, TOY_HIDDEN], of which those of other ranks stay as they
 * are; logits [rows here, columns here].
 *   leaf        of the step, which is the rank's `k`th; -1: blocks are opened and closed alone
 *   beyond      and this rank opens none but the experts, to which rows of other ranks come
 *   recompute   opens every layer once more for its forward, inside the backward
 *   input       forward: NULL on the first stage; backward: the gradient of the output, on the last stage that of logits
 *   output      forward: on the last stage logits; backward: the gradient of the input, NULL on the first stage */
typedef struct toy_pass {
    xd_pass_kind kind;
    int step;
    int64_t leaf, k;
    bool beyond, recompute;
    toy_kept *kept;
    const float *input;
    float *output;
} toy_pass;
xd_result toy_forward(const toy *t, const toy_pass *pass);
xd_result toy_backward(const toy *t, const toy_pass *pass);

/* experts.c: their block, and their part of the passes. `d`: the gradient of what comes out of them, then of what goes in. */
xd_result toy_experts_add(toy *t, toy_storage *s);
xd_result toy_experts_forward(const toy *t, const toy_pass *pass);
xd_result toy_experts_backward(const toy *t, const toy_pass *pass, float d[TOY_ROWS][TOY_HIDDEN]);

/* toy.c, for them: a weight with its layout, and the caller's storage for it; what a block shows; and gradients, NULL for none. */
xd_result toy_add(const toy *t, xd_block *block, share_cut cut, xd_weight_desc d, toy_storage *s);
xd_result toy_open(const toy *t, xd_block *block, xd_pass pass, float **values, float **gradients);
xd_result toy_close(const toy *t, xd_block *block);
void toy_add_to(float *gradient, const float *sum, int64_t count);

#endif
