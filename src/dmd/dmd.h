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

/* Distribution-matching distillation (DMD2): docs/diffusion.md. */
typedef struct xd_dmd xd_dmd;

/* Networks; the first three train. */
typedef enum xd_dmd_role {
    XD_DMD_STUDENT = 0,
    XD_DMD_FAKE_SCORE,
    XD_DMD_DISCRIMINATOR,
    XD_DMD_TEACHER,
    XD_DMD_ROLES
} xd_dmd_role;

/* A micro-batch, on this rank. */
typedef struct xd_dmd_batch {
    int64_t samples;       /* at most xd_dmd_sizes.samples; may be 0 */
    int64_t first;         /* row 0's number in the step */
    const void *real;      /* [samples, elements]; NULL if not needed */
    const void *noise;     /* [samples, elements] pure noise; NULL -> drawn */
    const void *condition; /* may be NULL */
    const void *negative;  /* may be NULL without guidance */
} xd_dmd_batch;

/* Sizes. */
typedef struct xd_dmd_sizes {
    int64_t samples;        /* maximum of a batch */
    int64_t step_samples;   /* of all ranks, each once */
    int64_t elements;       /* of a sample on this rank */
    int64_t whole_elements; /* 0 -> elements */
    int64_t first_element;  /* of this rank's consecutive ones */
    xd_dtype dtype;         /* F32, BF16, F16 */
    xd_comm *split;         /* ranks with the other elements; NULL -> none */
} xd_dmd_sizes;

/* Ends of roll-outs. */
typedef enum xd_dmd_deal {
    XD_DMD_ONE_RUNG = 0, /* one drawn rung a step */
    XD_DMD_RUNGS_IN_TURN /* sample k at rung k mod steps */
} xd_dmd_deal;

/* How the student generates. */
typedef struct xd_dmd_rungs {
    int steps;          /* >= 1 */
    const double *list; /* [steps + 1] descending, also as F32 if student_times.dtype is that; last 0 */
    bool roll_out;      /* backward simulation, else noised real samples */
    bool fresh_noise;   /* between rungs: SDE, else ODE */
    xd_dmd_deal deal;   /* with roll_out */
    int64_t hold;       /* turns at a rung, in order; 0 -> drawn */
} xd_dmd_rungs;

/* Warm-up. */
typedef struct xd_dmd_regression {
    int substeps;         /* Euler steps between rungs; 0 -> no warm-up */
    int64_t step_samples; /* of all ranks; 0 -> that of xd_dmd_sizes */
} xd_dmd_regression;

/* f-distill. */
typedef struct xd_dmd_fdistill {
    bool on; /* needs a discriminator; false: nothing else is read */
    xd_f_divergence divergence;
    double lower, upper; /* of the ratio; 0 < lower <= upper */
    int bins;            /* at most XD_FDISTILL_BINS_MAX; 0 -> not normalised */
    double rate;         /* of bins' averages, in [0, 1] */
    double min_t, max_t; /* both 0 -> student_times' */
} xd_dmd_fdistill;

/* Penalties at real samples. */
typedef enum xd_dmd_penalty {
    XD_DMD_PENALTY_DIFFERENCE = 0, /* squared change under perturbation */
    XD_DMD_PENALTY_SLOPE           /* R1 by features; needs xd_network.penalty */
} xd_dmd_penalty;

/* A discriminator's terms. */
typedef struct xd_dmd_gan {
    xd_gan_kind kind;
    double weight;    /* generator's; > 0 */
    bool same_noise;  /* real samples have the noise and time of generated ones */
    double r1_weight; /* 0 -> no penalty */
    double r1_alpha;  /* DIFFERENCE: size of the perturbation */
    bool r1_on_clean; /* compat, DIFFERENCE: of clean samples */
    xd_dmd_fdistill fdistill;
    xd_dmd_penalty penalty;
} xd_dmd_gan;

/* A request for numbers, in the order of use. */
typedef struct xd_dmd_draw {
    xd_philox random; /* `sample` of row 0 */
    int64_t rows;
    int64_t columns;
    int64_t first; /* column 0's element of the sample */
} xd_dmd_draw;

/* The caller's numbers. */
typedef struct xd_dmd_draws {
    void *user;
    xd_result (*normals)(void *user, const xd_dmd_draw *draw, float *out); /* [rows, columns], host */
    xd_result (*numbers)(void *user, const xd_dmd_draw *draw, const xd_time_sampler *sampler,
                         double *out); /* [rows] U, Z or index: xd_time_kind */
    xd_result (*rungs)(void *user, const xd_dmd_draw *draw, int64_t count,
                       int64_t *out); /* [rows] in [0, count) */
} xd_dmd_draws;

/* What trains a role. */
typedef struct xd_dmd_trainer {
    xd_parallel *parallel;   /* a teacher's too under FSDP */
    xd_optimizer *optimizer; /* over xd_parallel_params */
    xd_ema *const *averages; /* [average_count] */
    int average_count;
    double max_norm; /* 0 -> not clipped */
    xd_comm *norm;   /* ranks of the gradient norm; NULL -> xd_dmd_desc.data */
} xd_dmd_trainer;

/* Settings. Pointers are borrowed until xd_dmd_destroy. */
typedef struct xd_dmd_desc {
    xd_network networks[XD_DMD_ROLES];     /* a discriminator without `forward`: none */
    xd_dmd_trainer trainers[XD_DMD_ROLES]; /* teacher: `parallel` alone */
    xd_comm *data;                         /* ranks with other samples; NULL -> none */
    xd_dmd_sizes sizes;
    xd_noise_schedule schedule;
    bool v_is_flow;                            /* of xd_conversion */
    xd_time_sampler student_times, fake_times; /* chunk 0; fake_times: the discriminator's too */
    double network_scale;                      /* factor of their times; 0 -> 1 */
    xd_dtype network_dtype;                    /* F32, BF16, F16, F64; NONE -> F32 */
    xd_dmd_rungs rungs;
    bool guided; /* guides the teacher */
    double guidance_scale;
    xd_vsd_normaliser normaliser;
    xd_denoise_form fake_loss; /* `native`, v_is_flow are not read */
    xd_dmd_gan gan;
    xd_dmd_recipe alternation;
    int64_t frequency; /* steps of a turn, one the student's; >= 2, ORIGINAL: >= 1 */
    bool own_samples;  /* others train on the student's last samples */
    bool allow_shared; /* teacher and fake score: one network */
    uint64_t seed;
    const xd_dmd_draws *draws; /* NULL, or a NULL entry -> Philox */
    int64_t lead;              /* steps of the others alone, before the alternation */
    xd_dmd_regression regression;
} xd_dmd_desc;

/* Returns settings, but no networks, sizes, trainers, rungs.list. Pure. */
XD_API xd_dmd_desc xd_dmd_defaults(xd_dmd_recipe recipe);

/* Means over a step's samples; 0 for other terms. */
typedef struct xd_dmd_values {
    double vsd, generator;      /* the student's loss: vsd + gan.weight generator */
    double fake_score;          /* its loss */
    double discriminator, r1;   /* its loss: discriminator + gan.r1_weight r1 */
    bool skipped;               /* after a finding */
    double distance;            /* mean |x - T| */
    double regression;          /* of xd_dmd_warm_up_step */
    double norms[XD_DMD_ROLES]; /* before clipping */
} xd_dmd_values;

/* Counters of calls. */
typedef struct xd_dmd_record {
    int64_t step;                  /* of xd_dmd_step, skipped ones too */
    int64_t updates[XD_DMD_ROLES]; /* without skipped ones */
    uint64_t seed;
    int64_t warm_up; /* of xd_dmd_warm_up_step, skipped ones too */
} xd_dmd_record;

/* Checks the settings and allocates all memory. Collective over data and sizes.split. Errors: ARGUMENT (functions,
 * features, numbers, optimizers, micro-batches), MISMATCH (settings), STATE (a network or wrapper twice), DTYPE,
 * MEMORY; those of xd_prediction_mix and xd_times_draw. */
XD_API xd_result xd_dmd_create(xd_ctx *ctx, const xd_dmd_desc *desc, xd_dmd **out);

/* Destroys it. Local. */
XD_API void xd_dmd_destroy(xd_dmd *dmd);

/* Compute a role's terms for one micro-batch of this rank, forwards to backwards, and count findings. They add to
 * values (may be NULL: not read back). Collective over sizes.split, and as the networks' calls. Errors: those of the
 * networks; ARGUMENT (samples, arrays), STATE (own_samples of another number, no discriminator, f-distill in
 * xd_dmd_student). */
XD_API xd_result xd_dmd_student(xd_dmd *dmd, int64_t micro_batch, const xd_dmd_batch *batch,
                                xd_dmd_values *values);
XD_API xd_result xd_dmd_fake_score(xd_dmd *dmd, int64_t micro_batch, const xd_dmd_batch *batch,
                                   xd_dmd_values *values);
XD_API xd_result xd_dmd_discriminator(xd_dmd *dmd, int64_t micro_batch, const xd_dmd_batch *batch,
                                      xd_dmd_values *values);

/* Returns and clears this rank's findings (not_finite: samples). Waits for a GPU. Local. Errors: those of the
 * device. */
XD_API xd_result xd_dmd_findings(xd_dmd *dmd, xd_status *out);

/* Fills in micro-batch `micro_batch`, a number in the whole step, for each pass over it. Its pointers are read until
 * the next call. */
typedef xd_result (*xd_dmd_batch_function)(void *user, int64_t micro_batch, xd_dmd_batch *batch);

/* Makes one step of all roles that train in it. After a finding on any rank no role steps; the step counts. Returns
 * values (may be NULL), the same on every rank, INVARIANT: for every layout. Collective over data and split. Allocates
 * nothing.
 * Errors: those of `batch`, the terms, xd_parallel_reduce and xd_parallel_publish; ARGUMENT (batches without each
 * sample once), STATE (a role without a trainer). */
XD_API xd_result xd_dmd_step(xd_dmd *dmd, xd_dmd_batch_function batch, void *user, xd_dmd_values *values);

/* Makes one warm-up step. Collective, values (may be NULL) and errors as of xd_dmd_step; STATE (no substeps, a schedule
 * other than FLOW). */
XD_API xd_result xd_dmd_warm_up_step(xd_dmd *dmd, xd_dmd_batch_function batch, void *user,
                                     xd_dmd_values *values);

/* Returns whether a role trains in a step. Pure. */
XD_API bool xd_dmd_trains(const xd_dmd_desc *desc, xd_dmd_role role, int64_t step);

/* Return and set the counters; set them after a load. Local. Errors: ARGUMENT (counts), MISMATCH (seed), STATE
 * (own_samples at a step without the student). */
XD_API xd_dmd_record xd_dmd_describe(const xd_dmd *dmd);
XD_API xd_result xd_dmd_resume(xd_dmd *dmd, const xd_dmd_record *record);

#endif
