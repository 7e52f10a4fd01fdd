/* demo_rank.h - one rank's place and memory, for programs that train students. demo_run.c says how it works. */
#ifndef DEMO_RANK_H
#define DEMO_RANK_H

#include "demo.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of one vocabulary: this rank's columns of them, the whole ones where a loss needs those. */
typedef struct demo_logits {
    float *own;   /* [rows, own columns] */
    float *whole; /* [rows, vocabulary]; the same memory when this rank holds all columns */
    xd_vocab *vocab;
} demo_logits;

/* Buffers are made once; nothing but the workspace of a loss in a step. */
typedef struct demo_rank {
    const demo_job *job;
    xd_ctx *ctx;
    xd_comm *world, *tp, *cp, *rows; /* rows = "dp,cp"; NULL for a group of one */
    xd_mesh *mesh;
    int dp_rank, cp_rank, tp_rank;

    nn_model model, teacher;
    nn_batch batch;                /* this rank's sequences and positions */
    int64_t sequences[DEMO_BATCH]; /* [batch.sequences] their numbers in the batch of DEMO_BATCH */
    int passes;                    /* the model takes the batch in that many equal parts */
    int most_passes; /* of all ranks; those behind a rank's own open the student's blocks only */
    nn_batch part;   /* one of them; its ids are set before each pass */
    /* Floats of the student's workspace for one part, kept from forward to backward. */
    int64_t part_workspace;
    xd_leaves leaves;     /* INVARIANT mode: this rank's sequences */
    xd_leaf_stack *stack; /* and their gradients; NULL in the other modes */
    int32_t *position, *cp_count, *cp_position;

    /* The batch as the student reads it, and as the teacher does. */
    int32_t *ids, *teacher_ids;       /* [sequences, positions] */
    int64_t *labels, *teacher_labels; /* what follows them */
    int64_t *chunks, *teacher_chunks; /* the chunk of what follows; numbered within a sequence */
    int64_t *heads, *teacher_heads;   /* the same where a chunk begins, else -1 */
    float *row_weight;                /* of the cross entropy against the labels, for one arm */
    int64_t *places, *place_chunks;   /* of the recorded teacher, for the same positions, and their chunks */

    demo_learner *learners; /* [arm_count] */
    float *gradient, *teacher_weights;
    float *workspace, *teacher_workspace;
    demo_logits logits, teacher_logits;
    float *exchange; /* [positions, teacher's vocabulary]; NULL for a tp of one */
    void *loss_workspace;
    size_t loss_workspace_bytes;
    bool asks_teacher; /* some arm learns from its logits */
    bool staged;       /* a stage of a pipeline: room for passes is not made here */
    bool asks_nobody;  /* one that has no loss */
    double teacher_seconds;
    double seconds; /* of the run that was trained last */
} demo_rank;

/* Takes `count` things of `size` bytes; *failed remembers that one could not be had. */
void *demo_room(demo_rank *r, int64_t count, size_t size, bool *failed);

/* This rank's rows of the batch of logits. */
int64_t demo_rank_rows(const demo_rank *r);

/* The same for floats. */
float *demo_floats(demo_rank *r, int64_t count, bool *failed);

/* Whether sequences are leaves. */
bool demo_is_invariant(const demo_rank *r);

/* Fills in place, mesh and models; demo_rank_close in any case. Collective over world. */
xd_result demo_rank_join(demo_rank *r, xd_comm *world, const demo_job *job);

/* Gives the rank its range of the batch's sequences, in one pass, or one each in INVARIANT mode. */
void demo_rank_take_range(demo_rank *r);

/* Room for the batch, its losses and the teacher, once sequences, passes and most_passes are known. Local. */
xd_result demo_rank_make_buffers(demo_rank *r);
void demo_rank_close(demo_rank *r);

/* The whole batch through a model, part by part, from `ids` to `logits`. When `training` each part keeps a
 * workspace of its own. */
xd_result demo_forward(demo_rank *r, const nn_model *model, const nn_source *source, const int32_t *ids,
                       bool training, float *workspace, float *logits);

/* Part `pass` of the student's backward pass, from the gradient that stands in the place of its logits. */
xd_result demo_backward(demo_rank *r, const nn_source *source, int pass);

/* The teacher's forward pass of a step. */
xd_result demo_ask_teacher(demo_rank *r);

/* Of a step: warm-up over the first fifteenth, then a cosine down to a twentieth. */
double demo_learning_rate(double peak, int step, int steps);

/* The optimizer that every student has. */
xd_optimizer_desc demo_optimizer_of(const xd_param *params, int64_t count);

/* Clips the gradients, whose norm is one over `comm`, and steps at out->learning_rate; the average, which may be NULL, follows.
 * Fills in the norm. Collective over comm. */
xd_result demo_update(xd_ctx *ctx, xd_comm *comm, xd_optimizer *optimizer, xd_ema *average, demo_step *out);

/* ---- demo_flat.c ---- */

/* The gradient and, in INVARIANT mode, room for the leaves of this rank's range. Local. */
xd_result demo_flat_open(demo_rank *r);
void demo_flat_close(demo_rank *r);

/* Weights, and where their gradients are. [model.param_count] */
void demo_flat_list_params(const demo_rank *r, float *weights, xd_param *params);

/* This rank's gradient: in r->gradient, or as leaves on the stack. */
xd_result demo_flat_backward(demo_rank *r, const float *weights);

/* r->gradient = the gradient of the whole batch. Collective over "dp,cp". */
xd_result demo_flat_sum(demo_rank *r);

/* ---- demo_loss.c ---- */

/* What all losses of a run need at most. */
xd_result demo_make_loss_workspace(demo_rank *r);

/* The rows of a step out of the first `share` of the text, on both sides when there is a teacher. The same on every
 * mesh. */
void demo_read_batch(demo_rank *r, double share, uint64_t seed, int step);

/* Whole rows of the teacher's logits, where a rank has some of their columns only. Collective over tp. */
xd_result demo_complete_teacher(demo_rank *r);

/* What one sequence came to. */
typedef struct demo_leaf_loss {
    double loss, hard, soft; /* as in demo_step */
} demo_leaf_loss;

/* Chunks that count in the whole batch, by which the teacher's term of a sequence is divided. Collective over "dp,cp". */
xd_result demo_count_chunks(demo_rank *r, const demo_arm *arm, double *chunks);

/* The same for this rank's sequence k alone, whose logits are given. Collective over tp. */
xd_result demo_leaf_learn(demo_rank *r, const demo_arm *arm, int k, double chunks, float *logits,
                          demo_leaf_loss *out);

/* The sum of all sequences of the batch, in their order, from this rank's [batch.sequences]. Collective over "dp,cp". */
xd_result demo_sum_leaves(demo_rank *r, const demo_leaf_loss *own, demo_step *out);

/* Student's logits -> loss, and the gradient in their place. Collective over the mesh. */
xd_result demo_arm_loss(demo_rank *r, const demo_arm *arm, demo_step *out);

/* ---- demo_keep.c ---- */

/* What a file in bf16 holds of them. */
void demo_round_to_bf16(float *weights, int64_t count);

/* The student from everybody's share, whole on rank 0, which saves it when asked to, in job->save_directory, and lets it
 * write. Collective over the mesh. Errors: STATE for a finished model of another run there. */
xd_result demo_keep_student(demo_rank *r, const float *own, bool save, char sample[SAMPLE_BYTES]);

/* ---- demo_measure.c ---- */

/* Bits per byte of the held-out text. Collective over the mesh. */
xd_result demo_evaluate_student(demo_rank *r, const nn_source *source, double *bits_per_byte);
xd_result demo_evaluate_teacher(demo_rank *r, double *bits_per_byte);

/* The same of some of its rows, which are *bytes long together; see DEMO_GLANCE_ROWS. */
xd_result demo_glance_at_student(demo_rank *r, const nn_source *source, double *bits_per_byte,
                                 int64_t *bytes);

#ifdef __cplusplus
}
#endif

#endif /* DEMO_RANK_H */
