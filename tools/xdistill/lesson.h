/* lesson.h - training a student on a text, alone or from a teacher's cache, and keeping the best of it. */
#ifndef LESSON_H
#define LESSON_H

#include "../../examples/nn/nn_transformer.h"
#include "cache.h"
#include "pairing.h"
#include "text.h"

/* How often a student is measured on the way, and after how many times without a better one a run ends. */
enum { LESSON_POINTS = 16, LESSON_PATIENCE = 5 };

/* What a run is. */
typedef struct lesson_desc {
    const char *name; /* in progress and files: "student" */
    nn_config student;
    bool frozen_ends;   /* embedding and head stay */
    const float *start; /* the first weights, of the whole model */
    const tokens *text, *choose;
    const cached *teacher; /* what it said; NULL with live NULL -> the text alone */
    const lm *live;        /* or a teacher that runs on every row */
    const pairing *pair;   /* of a teacher with another tokenizer; NULL -> it has the student's */
    double kd_weight, ce_weight, temperature, learning_rate;
    int rows, row; /* of a step, over all ranks; tokens of a row */
    int steps, ranks;
    bool stop_early;
    uint64_t seed;
    const char *state; /* a file: what an interrupted run left there is continued */
    const char *facts; /* settings that a state must have, in words */
} lesson_desc;

/* What it gave. Free with lesson_free. */
typedef struct lesson {
    float *best, *last;            /* weights of the whole model */
    float *losses;                 /* [steps] */
    double heldout[LESSON_POINTS]; /* bits per byte of `choose` */
    int heldout_at[LESSON_POINTS];
    int steps, points, best_point;
    double seconds; /* of this run, without what came before an interruption */
} lesson;

xd_result lesson_run(xd_ctx *ctx, const lesson_desc *desc, lesson *out);
void lesson_free(xd_ctx *ctx, lesson *l);

/* Steps that an interrupted run with these settings has done; 0 -> there is none. */
int lesson_done(xd_ctx *ctx, const char *state, const char *facts);

/* Memory of a run, in bytes. */
int64_t lesson_bytes(const lesson_desc *desc);

/* After how many steps point `i` is, and how many points there are. */
int lesson_point_count(int steps);
int lesson_point_step(int i, int steps);

#endif /* LESSON_H */
