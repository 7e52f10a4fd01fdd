/* lesson_inside.h - what the parts of a run share. */
#ifndef LESSON_INSIDE_H
#define LESSON_INSIDE_H

#include "judge.h"
#include "lesson.h"
#include "losses.h"
#include "pairing.h"

/* What all ranks see. They share the weights: each steps some of the parameters, all read them after a barrier. */
typedef struct lesson_job {
    const lesson_desc *desc;
    lesson *out;
    nn_model model;
    float *weights, *best;
    xd_optimizer_state *states; /* [param_count] of whoever steps it */
    int64_t begin, end;         /* of the buffer: what is trained */
    int done;                   /* steps */
    int points, best_point;
    int stop; /* the step to end behind, because of Ctrl-C; 0 -> none. Rank 0 sets it before that step */
    double saved, save_seconds; /* when the state was, and how long it took */
} lesson_job;

/* A rank's. */
typedef struct lesson_rank {
    lesson_job *job;
    xd_ctx *ctx;
    xd_comm *world;
    nn_batch batch;
    int first_row;
    judge judge;
    xd_vocab *columns;
    xd_param *params; /* all that are trained, with this rank's gradients */
    int param_count;
    int own_begin, own_end; /* of them, those that this rank steps */
    xd_optimizer *optimizer;
    float *gradient, *workspace, *logits, *values;
    float *beside; /* a second gradient of the logits; NULL where there is one loss */
    int32_t *ids, *labels, *cached_ids;
    double *probabilities;
    int64_t *starts; /* [rows] of this step's rows */
    pairing_row pair_row;
    float *teacher_workspace, *teacher_logits; /* of a teacher that runs */
    loss_room losses;
} lesson_rank;

/* lesson_pair.c: logits -> their gradient, and the loss of all ranks. Collective. */
xd_result lesson_pair_loss(lesson_rank *r, double *loss);

/* lesson_step.c: one step; *loss is that of all ranks. Collective. */
xd_result lesson_step(lesson_rank *r, int step, double *loss);

/* lesson_live.c: the same from a teacher that runs, and what it takes. Collective but for memory. */
xd_result lesson_live_create(lesson_rank *r);
void lesson_live_free(lesson_rank *r);
xd_result lesson_live_loss(lesson_rank *r, double *loss);
int64_t lesson_live_bytes(const lesson_desc *d);

/* lesson_state.c. Saves: rank 0, while the others wait. Loads: before ranks run (weights, best, curves), and on each rank
 * (moments). */
xd_result lesson_state_save(xd_ctx *ctx, const lesson_job *job);
xd_result lesson_state_load(xd_ctx *ctx, lesson_job *job, xd_weights **file);
xd_result lesson_state_moments(lesson_rank *r, const xd_weights *file);

#endif /* LESSON_INSIDE_H */
