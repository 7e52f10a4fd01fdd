/* train.h - the transformer of examples/nn trained under a wrapper, and all that came out of it, whole. */
#ifndef EQUIVALENCE_TRAIN_H
#define EQUIVALENCE_TRAIN_H

#include "xdistill.h"

#include "../../examples/nn/nn_transformer.h"
#include "../../examples/nn/nn_patch_positions.h"

enum { TRAIN_STEPS = 20, TRAIN_LEAVES = 24, TRAIN_ROOM = 9000 };

typedef enum train_wrap { TRAIN_DDP, TRAIN_SHARDED, TRAIN_FSDP, TRAIN_HSDP } train_wrap;

/* How the ranks hold the model: dp * cp * tp of them, tensor-parallel ones side by side, then those that share sequences. */
typedef struct train_config {
    train_wrap wrap;
    int dp, tp;
    int groups;   /* HSDP: groups of data ranks, each with the whole model */
    bool whole;   /* FSDP, HSDP: a rank adds up its micro-batches and sends once a step, not once for each */
    bool workers; /* queues with threads of their own; FSDP gathers a unit ahead */
    bool bf16;    /* weightsare bf16, with f32 master weights, gradients and state; blocks show them as f32 */
    bool recompute; /* layers run their forward again in the backward pass */
    xd_reduction reduction;
    int steps;
    /* A pipeline of so many ranks, over the others: stages.c. 0 -> none; 1 -> one stage, run as one */
    int pp, virtual_stages;
    bool uneven; /* the first and the last chunk have no layers */
    bool copies; /* head and embedding are copies of one weight */
    /* So many ranks share the positions of a sequence, in fixed blocks; 1 -> one rank with these blocks; 0 -> none, and no blocks.
     * With a pipeline, not with copies */
    int cp;
    bool lengths; /* with cp: sequences of 3 to 13 positions instead of 11 each */
} train_config;

/* Whole tensors, one after another in the order of the whole model's table. */
typedef struct train_result {
    float values[TRAIN_ROOM], first[TRAIN_ROOM], second[TRAIN_ROOM], average[TRAIN_ROOM];
    double losses[TRAIN_STEPS], norms[TRAIN_STEPS];
    /* of rank 0, in no comparison: what wrapper, norm and optimizer exchanged, and bytes of what forwards keep */
    xd_comm_counters traffic;
    int64_t workspace, inputs;
    int64_t leaves;                                /* its own */
    double leaf_losses[TRAIN_STEPS][TRAIN_LEAVES]; /* of a pipeline, whose losses are sums of these */
} train_result;

/* A run that ranks share. */
typedef struct train_job {
    const train_config *config;
    train_result *out; /* zero before; each rank writes what it counts */
} train_job;

/* What each rank of dp * cp * tp runs. The context's allocator is train_allocator. A rank whose planned bytes are not those that
 * were counted fails with STATE and both numbers. Collective. */
xd_result train_rank(xd_comm *world, void *job);

/* The same for a pipeline, of pp * dp * tp ranks. Collective. */
xd_result train_stages_rank(xd_comm *world, void *job);

/* What both train, and on what: the micro-batch of a leaf. */
enum { TRAIN_POSITIONS = 5, TRAIN_MOST_POSITIONS = 13, TRAIN_VOCAB = 29 };
nn_config train_model(bool pipeline);
typedef struct train_data {
    int32_t *ids;    /* [positions] */
    int64_t *labels; /* likewise */
    float *teacher;  /* [positions, columns]; NULL -> not wanted */
    int column, columns;
    int first, positions; /* of the sequence, here */
} train_data;
void train_read_leaf(int step, int64_t leaf, const train_data *out);
int train_sum(void *user, float *x, int64_t count);

/* Of a leaf's sequence: which positions ranks have that share it, and what is here, ids excepted. */
typedef struct train_sequence {
    int32_t positions[TRAIN_MOST_POSITIONS]; /* 0, 1, 2, ... */
    int32_t cp_count[NN_POSITION_BLOCKS];
    int first;
} train_sequence;
nn_batch train_sequence_of(const train_config *config, int rank, int64_t leaf, train_sequence *sequence);
nn_group train_share_group(const train_config *config, int rank, xd_comm *comm);

/* An allocator that counts by thread. */
xd_allocator train_allocator(void);

/* Ranks of a configuration. */
int train_ranks(const train_config *config);

/* Runs a configuration on threads; false with a message. */
bool train_on_threads(const train_config *config, train_result *out, char message[512]);

/* Whether all is bit-equal; if not, `message` names the first tensor, the element and both values. */
bool train_equal(const train_result *a, const train_result *b, char message[512]);

/* The largest difference of two weights, and of two losses. */
double train_apart(const train_result *a, const train_result *b, double *losses);

/* "TP x FSDP dp=2 tp=4 ..." */
enum { TRAIN_NAME = 160 };
void train_name(const train_config *config, char name[TRAIN_NAME]);

#endif
