/* images.h - what the parts of the demonstration of image distillation share. images.c says what the program does. */
#ifndef IMAGES_H
#define IMAGES_H

#include "images_role.h"
#include "real_pictures.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- options ---- */

enum { IMAGES_MOST_GENERATIONS = 8 };

/* The command line, every default filled in. */
typedef struct images_options {
    images_mesh mesh;
    int ranks; /* of the mesh */
    int warm_up, steps,
        one_steps;   /* steps of each training; those of the critic beside the student's come on top */
    int count;       /* generated for each distance */
    int generations; /* seeds that distances are means of */
    int save_every;  /* student's steps between checkpoints, those of warm-up too */
    uint64_t seed;
    bool teacher_50; /* is measured again; otherwise the figure in `data` is told */
    bool resume, overwrite, help;
    const char *data, *out;
    const char *train_teacher; /* the full set's folder: nothing else is done then. NULL -> no */
    int teacher_steps;
    double gan;       /* weight of the adversarial term; 0 -> there is none */
    double gan_r1;    /* of the penalty on the discriminator's slope; 0 -> none */
    const char *real; /* folder of the real pictures for it */

    char problem[256]; /* what is wrong when images_parse says false */
} images_options;

/* `processes` of an MPI job are the ranks; 0 -> ranks are threads. */
bool images_parse(int argc, char **argv, int processes, images_options *out);
void images_print_help(void);

/* ---- recipes ---- */

enum { IMAGES_MOST_RUNGS = 4 };

/* How a student is made of the teacher. */
typedef struct images_recipe {
    const char *name; /* of its folder */
    int rungs;
    double list[IMAGES_MOST_RUNGS + 1];
    int warm_up; /* steps of regression */
    int lead;    /* steps of the fake score before the student's first */
    int steps;   /* of the student */
    int critics; /* of the fake score after each of the student's */
    int batch;
    images_trainer warming, student, fake, judge;
    double gan, gan_r1;        /* weights of the adversarial term and its penalty; 0 -> there is none */
    const real_pictures *real; /* for it */
} images_recipe;

/* Of 4 steps and of 1. */
enum { IMAGES_FOUR, IMAGES_ONE, IMAGES_STUDENTS };
void images_recipes(const images_options *options, images_recipe out[IMAGES_STUDENTS]);

/* ---- training ---- */

enum { IMAGES_MICRO_BATCHES = 8 }; /* of a step of either student */

/* A message of rank 0 to whoever watches; seconds since the program began come with it. */
void images_say(const char *format, ...);
double images_seconds(void);

/* Makes the student of a recipe, from the teacher in options->data or from its newest checkpoint. Its folder in options->out has
 * then the model directories warm-up (with warm_up), student and student-ema, checkpoints of both parts, and metrics.jsonl. Collective. */
xd_result images_distil(xd_comm *world, const images_options *options, const images_recipe *recipe);

/* ---- what is told ---- */

enum {
    IMAGES_TEACHER_50,
    IMAGES_TEACHER_8,
    IMAGES_TEACHER_4,
    IMAGES_TEACHER_1,
    IMAGES_WARMED,
    IMAGES_STUDENT_4,
    IMAGES_STUDENT_1,
    IMAGES_ROWS
};

enum { IMAGES_COLUMNS = 20 }; /* of the grid */

/* A way to make images, and what came of it. */
typedef struct images_row {
    const char *title;
    char directory[480]; /* of the model */
    int steps;
    const double *list;                                 /* [steps + 1]; NULL -> the teacher's Euler steps */
    bool known;                                         /* distances are those of an earlier measurement */
    double distance[IMAGES_MOST_GENERATIONS], accuracy; /* accuracy: mean over generations, in [0, 1] */
    float shown[IMAGES_COLUMNS * IMAGE_PIXELS];
} images_row;

/* Generates, and measures what came of it. Collective; results are rank 0's. */
xd_result images_measure(xd_comm *world, const images_options *options, images_row *rows, int count);

/* The teacher at 50 steps as it was measured before, from options->data, if that was of as many pictures; and the file of it, into
 * options->out. Local. */
xd_result images_recall(xd_ctx *ctx, const images_options *options, images_row *row);
xd_result images_remember(xd_ctx *ctx, const images_options *options, const images_row *row);

/* The table on standard output and as table.txt; grid.png. */
xd_result images_report(xd_ctx *ctx, const images_options *options, const images_row *rows, int count);

#ifdef __cplusplus
}
#endif

#endif /* IMAGES_H */
