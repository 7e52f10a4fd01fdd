/* images_run.h - one student's training, between the files that it is made of. */
#ifndef IMAGES_RUN_H
#define IMAGES_RUN_H

#include "../common/progress.h"
#include "images.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { IMAGES_MOST_LEAF = 32, IMAGES_PIECES = 8 };

/* What is added up over the pixels of the student's pictures: they, their squares, and squares of the gradients of either term. */
enum { IMAGES_PIXELS, IMAGES_SQUARES, IMAGES_VSD, IMAGES_GENERATOR, IMAGES_SUMS };

/* What the student drew in a step. */
typedef struct images_spread {
    double sums[IMAGES_MICRO_BATCHES][IMAGES_PIECES]
               [IMAGES_SUMS];        /* of a micro-batch's pixels in an eighth of each picture */
    int64_t unmoved;                 /* of this rank's elements of the average */
    double mean, deviation;          /* of all pixels */
    double stuck;                    /* share of the average that is not its weights and did not move */
    double vsd_norm, generator_norm; /* of the gradients of either term by the pictures of a step,
                                      * with its weight */
} images_spread;

/* What each role told in its last turn; < 0: it had none yet. */
typedef struct images_latest {
    double distance, fake_score;
} images_latest;

typedef struct images_run {
    xd_comm *world;
    images_ranks ranks;
    xd_interval pixels; /* of each picture, that this rank has */
    const images_options *options;
    const images_recipe *recipe;
    images_role roles[XD_DMD_ROLES];
    xd_dmd_desc desc;
    xd_dmd *dmd;
    bool warming, warmed; /* warm-up is under way; was finished by an earlier run */
    bool warms_on;        /* there is a checkpoint of warm-up to go on from */
    bool resumes;         /* there is one of matching */
    int step;             /* that is being made */
    int64_t micro_batch;  /* whose batch was asked for last */
    images_spread spread;
    float pull[IMAGES_MOST_LEAF *
               IMAGE_PIXELS]; /* the discriminator's part of a micro-batch's gradient by its pictures */
    int drawn_at;             /* step whose classes are drawn */
    int32_t classes[IMAGES_MOST_LEAF];
    float real[IMAGES_MOST_LEAF * IMAGE_PIXELS];
    char directory[400], warm_directory[440];
    /* Of rank 0. */
    progress line;
    double began; /* when the first step of this part was done; < 0: not yet */
    int began_at; /* steps before it */
    images_latest latest;
} images_run;

/* Finds out what an earlier run has left, or removes it; makes the folder. Collective. Errors: STATE (a finished run that may not
 * be replaced), MISMATCH (a run with other settings is to go on), IO. */
xd_result images_prepare(images_run *run);

/* Everything that a step changes, of warm-up while it is under way, otherwise of matching. Collective. */
xd_result images_save(images_run *run, int step);
xd_result images_load(images_run *run, int *step);

/* images_watch.c: run->desc has a student whose pictures, and their gradients, are looked at; before a step of the student;
 * and after it. The last is collective. */
void images_watch(images_run *run);
void images_watch_clear(images_run *run);
xd_result images_watch_read(images_run *run);

/* Takes over what a step of matching tells of the roles that had their turn in it, and says the latest of all. */
void images_keep_latest(images_run *run, int step, const xd_dmd_values *values);
void images_say_latest(const images_latest *latest, char out[96]);

/* Adds a line to metrics.jsonl. Rank 0's. */
xd_result images_note(images_run *run, int step, const xd_dmd_values *values);

/* A result of rank 0 on all ranks. Collective. */
xd_result images_agree_on(const images_run *run, xd_result result);

#ifdef __cplusplus
}
#endif

#endif /* IMAGES_RUN_H */
