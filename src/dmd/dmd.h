#ifndef XDI_DMD_DMD_H
#define XDI_DMD_DMD_H

#include "dmd/denoise.h"
#include "dmd/gan.h"
#include "dmd/network.h"
#include "dmd/times.h"
#include "dmd/vsd.h"
#include "model/parallel.h"
#include "train/ema.h"
#include "train/optimizer.h"

/* Distribution-matching distillation (DMD2) of a many-step teacher into a few-step student: docs/diffusion.md. */
typedef struct xd_dmd xd_dmd;

/* The networks of a distillation. The first three train. */
typedef enum xd_dmd_role {
    XD_DMD_STUDENT = 0,
    XD_DMD_FAKE_SCORE,
    XD_DMD_DISCRIMINATOR,
    XD_DMD_TEACHER,
    XD_DMD_ROLES
} xd_dmd_role;

/* A micro-batch: samples, or this rank's elements of each. */
typedef struct xd_dmd_batch {
    int64_t samples;       /* at most xd_dmd_sizes.samples; may be 0 */
    int64_t first;         /* row 0's number in the step */
    const void *real;      /* [samples, elements]; NULL if not needed: docs/diffusion.md */
    const void *noise;     /* [samples, elements] pure; NULL -> drawn */
    const void *condition; /* for networks; may be NULL */
    const void *negative;  /* condition to guide away from; may be NULL without guidance */
} xd_dmd_batch;

/* Sizes. */
typedef struct xd_dmd_sizes {
    int64_t samples;        /* maximum of a micro-batch here */
    int64_t step_samples;   /* of all ranks, each once; losses are means over them */
    int64_t elements;       /* of a sample on this rank */
    int64_t whole_elements; /* of a whole sample; 0 -> elements */
    int64_t first_element;  /* this rank's first in the sample; they are consecutive */
    xd_dtype dtype;         /* of samples: F32, BF16, F16 */
    xd_comm *split;         /* ranks with the other elements; NULL -> none */
} xd_dmd_sizes;

/* Where roll-outs end: docs/diffusion.md. */
typedef enum xd_dmd_deal {
    XD_DMD_ONE_RUNG = 0, /* one drawn rung a step */
    XD_DMD_RUNGS_IN_TURN /* sample k at rung k mod steps */
} xd_dmd_deal;

/* How the student generates. */
typedef struct xd_dmd_rungs {
    int steps;          /* >= 1 */
    const double *list; /* [steps + 1] descending, also in F32 of student_times; last 0 (xd_noise_steps) */
    bool roll_out;      /* inputs by roll-outs (backward simulation), else noised real samples */
    bool fresh_noise;   /* new noise between rungs (SDE), else predicted (ODE) */
    xd_dmd_deal deal;   /* with roll_out */
} xd_dmd_rungs;

/* Warm-up of the student by regression (xd_dmd_warm_up_step). */
typedef struct xd_dmd_regression {
    int substeps;         /* Euler steps between rungs; 0 -> no warm-up */
    int64_t step_samples; /* noises, of all ranks; 0 -> xd_dmd_sizes.step_samples */
} xd_dmd_regression;

/* f-distill: weights of the student's samples by the discriminator's ratios, for another f-divergence: docs/diffusion.md. */
typedef struct xd_dmd_fdistill {
    bool on; /* needs a discriminator; false: nothing else is read */
    xd_f_divergence divergence;
    double lower, upper; /* of the ratio; 0 < lower <= upper */
    int bins;            /* of times; 0 -> ratios are not normalised; at most XD_FDISTILL_BINS_MAX */
    double rate;         /* of the bins' average over steps, in [0, 1] */
    double min_t, max_t; /* of the bins; both 0 -> xd_dmd_desc.student_times */
} xd_dmd_fdistill;

/* The penalty at real samples: docs/diffusion.md. */
typedef enum xd_dmd_penalty {
    XD_DMD_PENALTY_DIFFERENCE = 0, /* squared change under perturbation, as the references */
    XD_DMD_PENALTY_SLOPE           /* R1 by features; needs xd_network.penalty */
} xd_dmd_penalty;

/* The adversarial terms, with a discriminator. */
typedef struct xd_dmd_gan {
    xd_gan_kind kind;
    double weight;    /* of the generator's term in the student's loss; > 0 */
    bool same_noise;  /* real samples share time and noise of generated ones */
    double r1_weight; /* 0 -> no penalty */
    double r1_alpha;  /* DIFFERENCE: perturbation's size */
    bool r1_on_clean; /* compat, DIFFERENCE: perturbs clean samples without noise */
    xd_dmd_fdistill fdistill;
    xd_dmd_penalty penalty;
} xd_dmd_gan;

/* One request for random numbers, in order of use. */
typedef struct xd_dmd_draw {
    xd_philox random; /* seed, stream, micro, step; `sample` of row 0 */
    int64_t rows;
    int64_t columns; /* 1 -> a number a row */
    int64_t first;   /* column 0's element of the sample */
} xd_dmd_draw;

/* The caller's (recorded) numbers instead of Philox. */
typedef struct xd_dmd_draws {
    void *user;
    xd_result (*normals)(void *user, const xd_dmd_draw *draw, float *out); /* [rows, columns], on the host */
    xd_result (*numbers)(void *user, const xd_dmd_draw *draw, const xd_time_sampler *sampler,
                         double *out); /* [rows] draws, as xd_time_kind says */
    xd_result (*rungs)(void *user, const xd_dmd_draw *draw, int64_t count,
                       int64_t *out); /* [rows] in [0, count) */
} xd_dmd_draws;

/* What trains a role. */
typedef struct xd_dmd_trainer {
    xd_parallel *parallel;   /* the wrapper; a teacher's too under FSDP */
    xd_optimizer *optimizer; /* over xd_parallel_params */
    xd_ema *const *averages; /* [average_count], follow its steps */
    int average_count;
    double max_norm; /* of the gradient; 0 -> not clipped */
    xd_comm *norm;   /* ranks of the gradient norm: docs/diffusion.md; NULL -> xd_dmd_desc.data */
} xd_dmd_trainer;

/* Settings from xd_dmd_defaults. Pointers are borrowed until xd_dmd_destroy. */
typedef struct xd_dmd_desc {
    xd_network networks[XD_DMD_ROLES];     /* without `forward`: no discriminator */
    xd_dmd_trainer trainers[XD_DMD_ROLES]; /* of the teacher `parallel` alone is read */
    xd_comm *data;                         /* ranks with other samples; NULL -> none */
    xd_dmd_sizes sizes;
    xd_noise_schedule schedule;
    bool v_is_flow;                            /* as in xd_conversion */
    xd_time_sampler student_times, fake_times; /* the discriminator's are fake_times */
    double network_scale;                      /* factor of times for networks; 0 -> 1 */
    xd_dtype network_dtype;                    /* of these times: F32, BF16, F16, F64; NONE -> F32 */
    xd_dmd_rungs rungs;
    bool guided; /* guides the teacher */
    double guidance_scale;
    xd_vsd_normaliser normaliser;
    xd_denoise_form fake_loss; /* `native` and v_is_flow are not read */
    xd_dmd_gan gan;
    xd_dmd_recipe alternation; /* docs/diffusion.md */
    int64_t frequency;         /* steps from one of the student's to the next; >= 2, ORIGINAL: >= 1 */
    bool own_samples;          /* the others train on the student's last samples */
    bool allow_shared;         /* teacher and fake score may be one network */
    uint64_t seed;
    const xd_dmd_draws *draws; /* NULL -> Philox, also of an entry */
    int64_t lead;              /* steps of the others before the alternation */
    xd_dmd_regression regression;
} xd_dmd_desc;

/* Returns a reference's settings; networks, sizes, trainers and rungs.list are missing. Pure. */
XD_API xd_dmd_desc xd_dmd_defaults(xd_dmd_recipe recipe);

/* Terms of a step, means over its samples; 0 without a part. */
typedef struct xd_dmd_values {
    double vsd, generator;      /* student's loss: vsd + gan.weight generator */
    double fake_score;          /* fake score's loss */
    double discriminator, r1;   /* discriminator's loss: discriminator + gan.r1_weight r1 */
    bool skipped;               /* a finding: no role stepped */
    double distance;            /* mean |x - T| */
    double regression;          /* of xd_dmd_warm_up_step */
    double norms[XD_DMD_ROLES]; /* of gradients before clipping, of roles that train */
} xd_dmd_values;

/* Counters that resume a run. */
typedef struct xd_dmd_record {
    int64_t step;                  /* calls of xd_dmd_step, skipped ones too */
    int64_t updates[XD_DMD_ROLES]; /* without skipped ones */
    uint64_t seed;
    int64_t warm_up; /* calls of xd_dmd_warm_up_step, skipped ones too */
} xd_dmd_record;

/* Checks the settings and allocates all memory. Collective over data and sizes.split if given.
 *
 * Errors: ARGUMENT (functions, features, numbers, optimizers, micro-batches), MISMATCH (settings), STATE (a network or wrapper
 * twice), DTYPE, MEMORY; those of xd_prediction_mix and xd_times_draw. */
XD_API xd_result xd_dmd_create(xd_ctx *ctx, const xd_dmd_desc *desc, xd_dmd **out);

/* Destroys a distillation; NULL is fine. Local. */
XD_API void xd_dmd_destroy(xd_dmd *dmd);

/* Compute the terms of a role for one micro-batch, forwards to backwards, in a caller's own loop: docs/diffusion.md.
 *
 *   micro_batch   this rank's micro-batch of the step
 *   values        the call adds to its fields; NULL -> not read back from a device
 *
 * Collective over sizes.split, and as the networks' calls are. Findings are counted: xd_dmd_findings. Errors: those of the
 * networks; ARGUMENT (samples, arrays), STATE (own_samples of another number, no discriminator, f-distill in xd_dmd_student). */
XD_API xd_result xd_dmd_student(xd_dmd *dmd, int64_t micro_batch, const xd_dmd_batch *batch,
                                xd_dmd_values *values);
XD_API xd_result xd_dmd_fake_score(xd_dmd *dmd, int64_t micro_batch, const xd_dmd_batch *batch,
                                   xd_dmd_values *values);
XD_API xd_result xd_dmd_discriminator(xd_dmd *dmd, int64_t micro_batch, const xd_dmd_batch *batch,
                                      xd_dmd_values *values);

/* Returns and clears the findings of this rank's terms; not_finite counts samples. Waits for a GPU. Local. Errors: those of
 * the device. */
XD_API xd_result xd_dmd_findings(xd_dmd *dmd, xd_status *out);

/* Fills in micro-batch `micro_batch` of the whole step, for each pass over it. Pointers are read until the next call. */
typedef xd_result (*xd_dmd_batch_function)(void *user, int64_t micro_batch, xd_dmd_batch *batch);

/* Makes one step of all roles that train in it: terms, sums, clipping, optimizers, averages. After a finding on any rank no role
 * steps, but the step counts.
 *
 *   values   out; the same on every rank, in INVARIANT mode for every layout; may be NULL
 *
 * Collective over data and split. Allocates nothing. Errors: those of the terms, xd_parallel_reduce and xd_parallel_publish;
 * STATE (a role without a trainer). */
XD_API xd_result xd_dmd_step(xd_dmd *dmd, xd_dmd_batch_function batch, void *user, xd_dmd_values *values);

/* Makes one warm-up step of the student. Collective, values and errors as of xd_dmd_step; STATE (no substeps, a schedule other than FLOW).
 * batch->real is not read: docs/diffusion.md. */
XD_API xd_result xd_dmd_warm_up_step(xd_dmd *dmd, xd_dmd_batch_function batch, void *user,
                                     xd_dmd_values *values);

/* Returns whether a role trains in a step. Pure. */
XD_API bool xd_dmd_trains(const xd_dmd_desc *desc, xd_dmd_role role, int64_t step);

/* Return and set the counters. Set them after weights, optimizers and averages are loaded. Local. Errors: ARGUMENT (counts),
 * MISMATCH (seed), STATE (own_samples at a step without the student). */
XD_API xd_dmd_record xd_dmd_describe(const xd_dmd *dmd);
XD_API xd_result xd_dmd_resume(xd_dmd *dmd, const xd_dmd_record *record);

#endif
