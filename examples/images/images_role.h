/* images_role.h - a network of the demonstration: its model, wrapper, passes, optimizer and average. */
#ifndef IMAGES_ROLE_H
#define IMAGES_ROLE_H

#include "../nn/nn_disc.h"
#include "../nn/nn_patch.h"
#include "dataset.h"
#include "images_mesh.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { IMAGES_NO_CLASS = IMAGE_CLASSES }; /* the networks' last label */

/* How ranks hold networks, and what a step is. */
typedef struct images_shape {
    const images_ranks *ranks;
    int64_t micro_batches; /* of a step, all ranks together */
    int64_t samples;       /* most of a call */
    int slots;             /* open forwards at once */
} images_shape;

typedef struct images_role {
    xd_comm *world; /* all ranks; files and norms are theirs */
    xd_model *model;
    xd_parallel *parallel;
    nn_patch *passes; /* NULL for a discriminator */
    nn_disc *judge;   /* NULL for the others */
    xd_network network;
    int64_t count;
    xd_param *params;
    xd_tensor_part *parts;
    xd_optimizer *optimizer; /* NULL, as the average: of images_role_train */
    xd_ema *average;
} images_role;

/* Describes the network, wraps it, and makes room for its passes. images_role_close in any case, of a role that was zero
 * before. Collective. */
xd_result images_role_open(const images_shape *shape, uint64_t seed, images_role *out);
void images_role_close(images_role *role);

/* The same for a discriminator of what the other networks give as features. */
xd_result images_role_open_judge(const images_shape *shape, uint64_t seed, images_role *out);

/* The pixels of a picture that a rank has. Pure. */
xd_interval images_pixels(const images_ranks *ranks);

/* The learning rate over a run: rises over the first steps, stays, and falls along a cosine to a part of itself. */
typedef struct images_rate {
    double peak;
    int rising;    /* steps */
    double flat;   /* part of the run before it falls */
    double lowest; /* of the peak */
} images_rate;

double images_rate_at(const images_rate *rate, int step, int steps);

/* What trains a network. */
typedef struct images_trainer {
    images_rate rate;
    double beta1, beta2, decay;
    xd_ema_schedule schedule;
    double average; /* decay of the average; 0 -> there is none */
} images_trainer;

/* An optimizer and an average from here on, instead of older ones. Local. */
xd_result images_role_train(images_role *role, const images_trainer *trainer);

/* Weights of a model directory, or into one. Collective. */
xd_result images_role_load(images_role *role, const char *directory);
xd_result images_role_save(const images_role *role, const char *directory);

/* The weights of `role` become the average of `of`, which may be itself. Collective. */
xd_result images_role_take_average(images_role *role, const images_role *of);

/* Gradients of a step are summed and clipped, weights and average follow; for steps that xd_dmd does not make. Collective. */
xd_result images_role_step(images_role *role, double max_norm, double *norm);

#ifdef __cplusplus
}
#endif

#endif /* IMAGES_ROLE_H */
