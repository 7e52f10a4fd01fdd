/* nn_model.h - a small decoder-only transformer of the Llama type: what its weights are and where they lie.
 *
 * Names, shapes and orientation ([out, in]) are those of a Hugging Face Llama directory, so a file of these
 * weights is a file any other program reads. All weights of a rank lie one after another in one buffer of
 * floats, and so do their gradients: an optimizer sees one long vector, a checkpoint sees a table of names.
 */
#ifndef NN_MODEL_H
#define NN_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The largest tensor- or context-parallel group, and the widest head. */
enum { NN_MOST_RANKS = 64, NN_MOST_HEAD = 1024 };

/* What some models have in attention beside matrices. */
typedef enum nn_extra {
    NN_NO_EXTRA = 0,
    NN_QKV_BIAS, /* a bias of queries, keys and values: Qwen2 */
    NN_QK_NORM   /* a norm over each head of queries and keys: Qwen3 */
} nn_extra;

/* Rotary angles of longer contexts. Zero: plain ones. With `original` 0 every frequency is divided by the factor; else only those
 * whose wave is long for that context, with a smooth way between (Llama 3). */
typedef struct nn_rope_scaling {
    float factor;    /* 0 -> none */
    float low, high; /* waves per original context: below low all of the factor, above high nothing */
    int original;    /* positions */
} nn_rope_scaling;

/* The numbers of a config.json. Everything but the last two is required. */
typedef struct nn_config {
    int vocab;  /* entries of the vocabulary */
    int hidden; /* width of the residual stream */
    int layers;
    int heads;        /* query heads; a multiple of kv_heads */
    int kv_heads;     /* key and value heads, each shared by heads / kv_heads query heads */
    int head_dim;     /* even */
    int ffn;          /* inner width of the feed-forward part */
    float rope_theta; /* base of the rotary angles, usually 10000 */
    float norm_eps;
    bool tied;      /* the head is the embedding; there is no lm_head.weight */
    nn_extra extra; /* on one tensor-parallel rank, without an `invariant` group */
    nn_rope_scaling rope_scaling;
} nn_config;

/* Which of the pieces of a sum a rank has: [first, first + count) of `total`. */
typedef struct nn_pieces {
    int first, count, total;
} nn_pieces;

/* A group of ranks that share a model (tensor-parallel) or a sequence (context-parallel). Zero = one rank
 * alone; the functions are then never called. They return 0, or a code that nn_forward and nn_backward hand
 * on. */
typedef struct nn_group {
    int size, rank;
    void *user;
    /* x[i] = the sum of every rank's x[i]; the same bits everywhere. */
    int (*all_reduce_sum)(void *user, float *x, int64_t count);
    /* received = every rank's part, in rank order, counts[r] floats from rank r. */
    int (*all_gather_v)(void *user, const float *send, float *received, const int64_t *counts);
    /* Sums are made of pieces that do not depend on the number of ranks, and added along the canonical tree of xd_leaves, so that
     * every split has the bits of one rank with it. Slower. Ranks are cut between pieces: tensor-parallel ones as below, context-
     * parallel ones between the eight blocks of positions of nn_patch_positions.h, each a run of them. */
    bool invariant;
    /* x = the root of the tree over all ranks' pieces; forest holds this rank's nodes, each `count` floats. Called only when
     * `invariant`. */
    int (*sum_pieces)(void *user, const float *forest, nn_pieces pieces, int64_t count, float *x);
} nn_group;

/* Pieces of the width of the feed-forward part and of the vocabulary: ceil(width / 8) long, the last one shorter, no more than
 * eight. Those of attention are key/value heads with their query heads. */
enum { NN_PIECES = 8 };
int nn_piece_length(int width);

/* What one tensor-parallel rank holds: whole key/value heads with their query heads, a range of the
 * feed-forward width and a range of the vocabulary. Ranges may be uneven, and empty. */
typedef struct nn_share {
    int kv_begin, kv_count;
    int ffn_begin, ffn_count;
    int vocab_begin, vocab_count;
} nn_share;

/* One weight: a matrix [rows, cols], or a vector of `rows` (dims = 1, cols = 1). */
typedef struct nn_param {
    char name[64];
    int dims;
    int rows, cols;           /* held here */
    int full_rows, full_cols; /* of the whole weight */
    int row_begin, col_begin; /* where the part held here begins */
    int64_t offset;           /* floats from the start of the buffer */
} nn_param;

/* A block is a layer, 0 and up, or NN_ROOT: what stands before and behind the layers. Its weights, in the order of the
 * table. */
enum { NN_ROOT = -1 };
enum { NN_EMBED, NN_NORM, NN_HEAD, NN_ROOT_WEIGHTS };
enum { NN_INPUT_NORM, NN_Q, NN_K, NN_V, NN_O, NN_POST_NORM, NN_GATE, NN_UP, NN_DOWN, NN_LAYER_WEIGHTS };
/* Those of nn_extra come behind. */
enum {
    NN_Q_BIAS = NN_LAYER_WEIGHTS,
    NN_K_BIAS,
    NN_V_BIAS,
    NN_Q_NORM = NN_LAYER_WEIGHTS,
    NN_K_NORM,
    NN_MOST_WEIGHTS = NN_LAYER_WEIGHTS + 3
};

/* The part of the model that a stage of a pipeline has: set after nn_model_init. Zero is the whole model. The table of weights
 * stays that of the whole. */
typedef struct nn_cut {
    bool is;          /* a cut */
    bool first, last; /* it has the embedding; the last norm and the head */
    int begin, end;   /* its layers */
    bool copies;      /* head and embedding are copies of one weight, whose gradients xd_pipeline_finish adds
                       * up; not `tied` */
} nn_cut;

typedef struct nn_model {
    nn_config config;
    nn_share share;
    nn_group tp, cp;
    int param_count;
    nn_param *params;    /* in the order of the buffer */
    int64_t float_count; /* length of the buffer of weights, and of the gradients */
    /* Set after nn_model_init: layers keep their input alone for the backward pass, which runs their forward again. */
    bool recompute;
    /* Set after nn_model_init: the backward pass gives embedding and head no gradient. Not with an `invariant` context-parallel
     * group. */
    bool frozen_ends;
    nn_cut cut;
} nn_model;

/* Whether a block's weight is there; its layers are [nn_layers_begin, nn_layers_end). */
bool nn_cut_has(const nn_cut *cut, int block, int weight);
int nn_layers_begin(const nn_model *model);
int nn_layers_end(const nn_model *model);

/* Lays out the part of the model that tensor-parallel rank tp.rank holds.
 *
 *   tp, cp  the groups; NULL = this rank alone
 *   out     zero on failure; nn_model_free releases it
 *
 * Returns NULL, or what is wrong with the configuration, in words. */
const char *nn_model_init(const nn_config *config, const nn_group *tp, const nn_group *cp, nn_model *out);

void nn_model_free(nn_model *model);

/* Random starting weights, normal with standard deviation 0.02 (less for the two projections that write into
 * the residual stream, norms start at one). A weight depends on the seed, its name's place in the table and
 * its position in the whole tensor, so every split of the model starts from the same numbers. */
void nn_model_randomize(const nn_model *model, uint64_t seed, float *weights);

/* frequency [head_dim / 2]: radians a position of each rotary plane. */
void nn_rope_frequencies(const nn_config *config, double *frequency);

/* Floats of a weight that are held here. */
int64_t nn_param_count(const nn_param *param);

/* The standard deviation of its random starting values; 0 for norms, which start at one. */
float nn_param_deviation(const nn_model *model, const nn_param *param);

/* True for what weight decay applies to: matrices, not norms. */
bool nn_param_decays(const nn_param *param);

/* Weights of a block, and one of them by its number above. When the head is tied, that of NN_HEAD is the embedding. */
int nn_layer_weights(const nn_config *config);
int nn_block_weights(const nn_model *model, int block);
const nn_param *nn_block_param(const nn_model *model, int block, int weight);

/* The index of `name` in model->params, or -1. */
int nn_param_find(const nn_model *model, const char *name);

#ifdef __cplusplus
}
#endif

#endif /* NN_MODEL_H */
