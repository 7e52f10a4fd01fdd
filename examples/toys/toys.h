/* toys.h - what the parts of build/toys share. */
#ifndef TOYS_H
#define TOYS_H

#include "toy_net.h"

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the command line, toy_options.c ---- */

typedef struct toy_options {
    int steps, teacher_steps, ranks;
    double rate, fake_rate; /* of student and fake score */
    int turn;               /* steps: one of the student, the others of the fake score */
    uint64_t seed;
    int toy; /* a toy_kind, or TOY_KINDS for all */
    const char *out;
    bool help;
    char problem[256];
} toy_options;

bool toy_parse(int argc, char **argv, toy_options *options);
void toy_print_help(void);

/* ---- data, toy_data.c ---- */

typedef enum toy_kind { TOY_MOONS = 0, TOY_GAUSSIANS, TOY_KINDS } toy_kind;

enum { TOY_MODES = 8 };

/* That are generated, measured and compared; a multiple of TOY_CHUNK. */
#ifndef TOY_POINTS
#    define TOY_POINTS 10000
#endif

extern const char *const toy_names[TOY_KINDS];

/* What random numbers are for. */
enum {
    TOY_STREAM_TRAIN = XD_STREAM_USER, /* the teacher's samples, noise and times */
    TOY_STREAM_FRESH,                  /* data to compare with */
    TOY_STREAM_LEVEL                   /* noise and times of toy_find_level */
};

/* Points to compare with, [count, TOY_ELEMENTS]. */
void toy_fresh(toy_kind kind, uint64_t seed, int64_t count, float *points);

/* A point of the distribution from the numbers of `random`, blocks 0 and 1. */
void toy_draw(toy_kind kind, const xd_philox *random, float point[TOY_ELEMENTS]);

/* The centre of a mode of TOY_GAUSSIANS, and the deviation of each. */
void toy_mode(int mode, double centre[TOY_ELEMENTS]);
double toy_deviation(void);

/* ---- samplers, toy_sample.c ---- */

typedef struct toy_sampler {
    int steps;
    bool few; /* a student's: from prediction to prediction with new noise between; otherwise Euler's
               * method along the flow */
    uint64_t seed;
} toy_sampler;

/* TOY_POINTS points, of which this rank writes its part; the same for any number of ranks. Local. */
xd_result toy_sample(xd_comm *world, const xd_network *network, const toy_sampler *sampler, float *points);

enum { TOY_CHUNK = 250 }; /* samples in a call of the network */

/* What a distillation tells of a student that makes the data itself, with the teacher for its fake score: where others should come
 * to. Local. */
typedef struct toy_level {
    double fake_score, distance;
} toy_level;

xd_result toy_find_level(const xd_network *teacher, toy_kind kind, uint64_t seed, toy_level *out);

/* ---- training, toy_train.c ---- */

enum { TOY_BATCH = 256, TOY_MICRO_BATCHES = 8, TOY_ROWS = 4, TOY_RUNGS = 4 };

/* Samplers that are compared. */
typedef enum toy_row { TOY_TEACHER_50 = 0, TOY_TEACHER_4, TOY_STUDENT_4, TOY_STUDENT_1 } toy_row;

/* What xd_dmd_step told of each turn of a student. */
typedef struct toy_curve {
    toy_level level;
    double *fake_score; /* [options->steps] mean loss of the fake score's steps */
    double *distance;   /* [options->steps] mean |x - T| */
} toy_curve;

/* One toy from its data to the points of all samplers. */
typedef struct toy_run {
    const toy_options *options;
    toy_kind kind;
    float *points[TOY_ROWS]; /* [TOY_POINTS, TOY_ELEMENTS] each */
    toy_curve curve;         /* of the student of four steps; rank 0 writes it */
} toy_run;

/* On one of several ranks (xd_rank_function); `run` is shared by all. Collective. */
xd_result toy_run_rank(xd_comm *world, void *run);

/* ---- measures, toy_measure.c ---- */

typedef struct toy_figures {
    double distance;           /* sliced W2 to fresh data */
    double least_mode, within; /* TOY_GAUSSIANS: mass of the smallest mode; points within 3 deviations
                                * of one */
} toy_figures;

/* Errors: MEMORY. */
xd_result toy_measure(xd_ctx *ctx, toy_kind kind, uint64_t seed, const float *points, toy_figures *out);

/* ---- the figure, toy_figure.c ---- */

/* A panel for the data and one for each sampler, a row of panels for each toy. Replaces the file. Errors: IO. */
xd_result toy_figure_save(xd_ctx *ctx, const toy_run *runs, int count, const char *path);

/* toy_curves.c: losses of the student of four steps at each of its rungs, beside its points. figures [TOY_ROWS]. Replaces the file.
 * Errors: IO. */
xd_result toy_curves_save(xd_ctx *ctx, const toy_run *run, const toy_figures *figures, const char *path);

/* The head of a file on white, and points in a panel of 220 x 220. */
void toy_begin_svg(FILE *svg, double width, double height);
void toy_draw_points(FILE *svg, const float *points, int count, const char *color);

extern const char *const toy_row_names[TOY_ROWS];

#ifdef __cplusplus
}
#endif

#endif /* TOYS_H */
