#ifndef XDI_DMD_DMD_H
#define XDI_DMD_DMD_H

#include "dmd/denoise.h"
#include "dmd/fdistill.h"
#include "dmd/gan.h"
#include "dmd/network.h"
#include "dmd/times.h"
#include "dmd/vsd.h"
#include "model/parallel.h"
#include "train/ema.h"
#include "train/optimizer.h"

/* Distribution-matching distillation (Yin et al., "Improved Distribution Matching Distillation", 2024): a student of few steps
 * learns from a many-step teacher, with a second diffusion model, the fake score, that follows what the student generates. */
typedef struct xd_dmd xd_dmd;

/* The networks of a distillation. The first three train. */
typedef enum xd_dmd_role {
    XD_DMD_STUDENT = 0,
    XD_DMD_FAKE_SCORE,
    XD_DMD_DISCRIMINATOR,
    XD_DMD_TEACHER,
    XD_DMD_ROLES
} xd_dmd_role;

/* Samples of one leaf on this rank: of whole samples, or this rank's elements of each. Noise and times depend on where a sample
 * is in the step, `first` + row, and on nothing else of the layout. */
typedef struct xd_dmd_batch {
    int64_t samples;       /* at most xd_dmd_sizes.samples; 0 is fine */
    int64_t first;         /* number, in the whole step, of row 0 */
    const void *real;      /* [samples, elements]; required by the discriminator's term, and by a student of
                            * several steps without roll-outs; otherwise NULL is fine */
    const void *noise;     /* [samples, elements] pure noise; NULL -> drawn */
    const void *condition; /* handed to networks; may be NULL */
    const void *negative;  /* the same for what guidance leads away from; may be NULL without guidance */
} xd_dmd_batch;

/* How much there is. */
typedef struct xd_dmd_sizes {
    int64_t samples;        /* most that a leaf has on this rank */
    int64_t step_samples;   /* of all leaves of all ranks, each sample once: losses are means over them */
    int64_t elements;       /* of a sample on this rank */
    int64_t whole_elements; /* of a whole sample; 0 -> elements */
    int64_t first_element;  /* in the whole sample, of this rank's; they follow each other */
    xd_dtype dtype;         /* of samples: F32, BF16, F16 */
    xd_comm *split; /* ranks that hold the other elements of the same samples; NULL -> there are none */
} xd_dmd_sizes;

/* At which rungs roll-outs end. */
typedef enum xd_dmd_deal {
    /* One drawn rung for all samples of the step; the last noise on the way there is the batch's. */
    XD_DMD_ONE_RUNG = 0,
    /* Sample number k of the step at rung k mod steps: exactly what xd_sampler_run hands to the student there, from the batch's
     * noise on. Takes steps - 1 forwards without gradient for all samples. */
    XD_DMD_RUNGS_IN_TURN
} xd_dmd_deal;

/* How the student generates. */
typedef struct xd_dmd_rungs {
    int steps;          /* >= 1 */
    const double *list; /* [steps + 1] descending, the last 0 (xd_noise_steps); with student_times in F32
                         * also when rounded to it; borrowed until xd_dmd_destroy */
    bool roll_out;      /* training samples of several steps come from the student itself (backward
                         * simulation); otherwise from noised real ones, at a drawn rung for each sample */
    bool fresh_noise;   /* between rungs new noise (sde); otherwise what the prediction implies (ode) */
    xd_dmd_deal deal;   /* with roll_out */
} xd_dmd_rungs;

/* Warm-up of the student by regression (xd_dmd_warm_up). */
typedef struct xd_dmd_regression {
    int substeps;         /* of Euler that the teacher takes from rung to rung; 0 -> there is no warm-up */
    int64_t step_samples; /* noises of a step, of all leaves of all ranks together; 0 ->
                           * xd_dmd_sizes.step_samples */
} xd_dmd_regression;

/* f-distill: samples of the student's term of matching have weights from the logits that the discriminator gives their noised
 * forms, as xd_fdistill_weights makes them of all samples of the step, however many leaves and ranks those are in. */
typedef struct xd_dmd_fdistill {
    bool on; /* false: nothing else here is read; true: there is a discriminator */
    xd_f_divergence divergence;
    double lower, upper; /* of the ratio; 0 < lower <= upper */
    int bins;            /* of times; 0 -> ratios are not normalised; at most XD_FDISTILL_BINS_MAX */
    double rate;         /* of the bins' average over steps, in [0, 1] */
    double min_t, max_t; /* what the bins divide; both 0 -> those of xd_dmd_desc.student_times */
} xd_dmd_fdistill;

/* What keeps the discriminator smooth where real samples are, with r1_weight before it. */
typedef enum xd_dmd_penalty {
    /* The mean, over real samples and heads, of the squared change of a logit under a small perturbation of the sample (the
     * references: one more pass of teacher and discriminator). */
    XD_DMD_PENALTY_DIFFERENCE = 0,
    /* Half the mean, over real samples, of |d (sum of the logits) / d features|^2: the zero-centred gradient penalty R1
     * (Mescheder et al., "Which Training Methods for GANs do actually Converge?", 2018) on the features that the
     * discriminator reads; needs xd_network.penalty. */
    XD_DMD_PENALTY_SLOPE
} xd_dmd_penalty;

/* The adversarial terms; used with a discriminator only. */
typedef struct xd_dmd_gan {
    xd_gan_kind kind;
    double weight;    /* of the generator's term in the student's loss; > 0 */
    bool same_noise;  /* time and noise of the real samples are those of the generated ones in the same
                       * update */
    double r1_weight; /* 0 -> no penalty */
    double r1_alpha;  /* size of its perturbation; of DIFFERENCE */
    bool r1_on_clean; /* compat: perturbs real samples before they are noised, and does not noise them
                       * (the references); of DIFFERENCE */
    xd_dmd_fdistill fdistill;
    xd_dmd_penalty penalty; /* what r1_weight weighs */
} xd_dmd_gan;

/* What is drawn, in the order in which xd_dmd asks. */
typedef struct xd_dmd_draw {
    xd_philox random; /* seed, stream, micro and step; `sample` is that of row 0 */
    int64_t rows;
    int64_t columns; /* 1 -> a number for each row */
    int64_t first;   /* element of the whole sample that column 0 is */
} xd_dmd_draw;

/* Draws of the caller's instead of Philox: recorded ones, to compare with another program. */
typedef struct xd_dmd_draws {
    void *user;
    xd_result (*normals)(void *user, const xd_dmd_draw *draw, float *out); /* [rows, columns], on the host */
    xd_result (*numbers)(void *user, const xd_dmd_draw *draw, const xd_time_sampler *sampler,
                         double *out); /* [rows] draws of xd_time_of_draw */
    xd_result (*rungs)(void *user, const xd_dmd_draw *draw, int64_t count,
                       int64_t *out); /* [rows] in [0, count) */
} xd_dmd_draws;

/* What trains a role. */
typedef struct xd_dmd_trainer {
    xd_parallel *parallel;   /* the model's wrapper; of a teacher too, when FSDP has sharded it */
    xd_optimizer *optimizer; /* over xd_parallel_params of it */
    xd_ema *const *averages; /* [average_count] follow each of the role's steps */
    int average_count;
    double max_norm; /* of the gradient; 0 -> not clipped */
    xd_comm *norm;   /* ranks that share the model's parts, for its norm, with those that step with it; NULL
                      * -> xd_dmd_desc.data */
} xd_dmd_trainer;

/* Settings. Start from xd_dmd_defaults. What pointers lead to is borrowed until xd_dmd_destroy. */
typedef struct xd_dmd_desc {
    /* By role; a discriminator without `forward` is none. Predictions of all three others are converted, they need not be of one
     * type. */
    xd_network networks[XD_DMD_ROLES];
    xd_dmd_trainer trainers[XD_DMD_ROLES]; /* for xd_dmd_step; of the teacher `parallel` alone is read */
    xd_comm *data;                         /* ranks with other samples; NULL -> there are none */
    xd_dmd_sizes sizes;
    xd_noise_schedule schedule;
    bool v_is_flow;                            /* as in xd_conversion */
    xd_time_sampler student_times, fake_times; /* the discriminator's are fake_times */
    double network_scale;                      /* times are multiplied by it for networks; 0 -> as they are */
    xd_dtype network_dtype;                    /* and rounded to it: F32, BF16, F16, F64; NONE -> F32 */
    xd_dmd_rungs rungs;
    bool guided; /* the teacher has guidance, with this scale (xd_guidance_mix); its xd_network.guidance
                  * has more */
    double guidance_scale;
    xd_vsd_normaliser normaliser;
    xd_denoise_form fake_loss; /* where and with what weight the fake score's loss compares; `native` and
                                * v_is_flow are not read */
    xd_dmd_gan gan;
    xd_dmd_recipe alternation; /* MODELOPT: the student at steps 0, f, 2f; FASTGEN: f - 1, 2f - 1; else
                                * the others. ORIGINAL: at 0, f, 2f, and the others in every step */
    int64_t frequency;         /* f; at least 2, ORIGINAL 1; steps here are those after `lead` */
    bool own_samples;  /* the others train on what the student generated in its last step, if there was one
                        * that was not skipped; otherwise anew */
    bool allow_shared; /* teacher and fake score may be one network */
    uint64_t seed;
    const xd_dmd_draws *draws; /* NULL -> Philox; an entry of NULL too */
    int64_t lead; /* steps of the others alone, before step 0 of the alternation: on samples made anew */
    xd_dmd_regression regression;
} xd_dmd_desc;

/* The columns of the references: times, rungs, frequency and weights as in their configurations; MODELOPT: rectified flow, one
 * step, frequency 5, fake score in X0; FASTGEN: in the teacher's own space (here FLOW), new noise between rungs; ORIGINAL: its
 * alternation, integer times, EPS. Networks, sizes, trainers and rungs.list are still to be given. Pure. */
XD_API xd_dmd_desc xd_dmd_defaults(xd_dmd_recipe recipe);

/* Terms of a step, means over its samples; 0 where they had no part. */
typedef struct xd_dmd_values {
    double vsd, generator;    /* the student's loss is vsd + gan.weight generator */
    double fake_score;        /* the fake score's */
    double discriminator, r1; /* the discriminator's is discriminator + gan.r1_weight r1 */
    bool skipped;             /* something was not finite: no role has stepped */
    double distance; /* mean |x - T|: how far the student's samples are from what the teacher makes of them */
    double regression; /* of xd_dmd_warm_up */
    /* Of the gradient before clipping, of each role that had its turn; what was found may be in it. */
    double norms[XD_DMD_ROLES];
} xd_dmd_values;

/* What resumes a run. */
typedef struct xd_dmd_record {
    int64_t step; /* calls of xd_dmd_step, skipped ones too; also the step of their random numbers */
    int64_t updates[XD_DMD_ROLES]; /* of each role by xd_dmd_step, without skipped ones */
    uint64_t seed;
    int64_t warm_up; /* calls of xd_dmd_warm_up_step, skipped ones too; also the step of its random numbers */
} xd_dmd_record;

/* Checks everything and takes all memory that later calls need.
 *
 * Roles may have wrappers of different kinds, as long as those that train have the same leaves on each rank. Where ranks have
 * different numbers of leaves and some role is under FSDP, the sums of DDP begin in xd_dmd_step's reduction from now on, not
 * beside the last backward on its queue (xd_ddp_desc.reductions): FSDP has a place for them in its order that all ranks
 * share.
 *
 * Collective over data and sizes.split where they are given: the settings that decide are compared. Errors, nothing kept,
 * on the rank that has one and PEER on the others: ARGUMENT (a network without functions, without features for a
 * discriminator, a number out of its range, with the number; an optimizer that has none of its wrapper's weights; wrappers
 * that deal leaves differently: FSDP deals as DDP does with xd_fsdp_desc.accumulate_whole), MISMATCH, naming the first
 * setting that differs, STATE (one network or one wrapper twice), DTYPE, MEMORY; those of xd_noise_check,
 * xd_prediction_check, xd_times_check and xd_noise_steps_check. */
XD_API xd_result xd_dmd_create(xd_ctx *ctx, const xd_dmd_desc *desc, xd_dmd **out);

/* What xd_dmd_create takes. Local, allocates nothing. Errors: those of it that one rank can see. */
XD_API xd_result xd_dmd_bytes(xd_ctx *ctx, const xd_dmd_desc *desc, xd_memory_bytes *out);

/* NULL is fine. Local. */
XD_API void xd_dmd_destroy(xd_dmd *dmd);

/* The terms of one leaf, for a loop of one's own: forwards, losses, backwards with their gradients, no step. Their gradients
 * and values are this leaf's part of the step's means.
 *
 *   student         forward; time, noise; fake score and teacher, each twice with guidance; the term of matching; with a discriminator, its gradient
 *                   through the teacher too; backward of the student
 *   fake_score      the student's samples as an inference (or its own, own_samples); time, noise; forward, loss, backward
 *   discriminator   the same samples, those of the fake score's term with their noise when that was the last call for this leaf;
 *                   teacher on them and on noised real ones; logits, loss, backward; before that, with a penalty on the slope,
 *                   a backward by features alone and xd_network.penalty
 *
 *   leaf     this rank's leaf of the step, for networks and own_samples
 *   values   its fields are added to; NULL -> not read back from a device
 *
 * Collective over sizes.split, and over what the networks' own calls are collective over. Errors: those of the networks; ARGUMENT
 * (samples, missing arrays), STATE (own samples, of another number). Findings (something that is not finite) are counted for
 * xd_dmd_step or xd_dmd_findings, and the sample has gradient 0. */
XD_API xd_result xd_dmd_student(xd_dmd *dmd, int64_t leaf, const xd_dmd_batch *batch, xd_dmd_values *values);
XD_API xd_result xd_dmd_fake_score(xd_dmd *dmd, int64_t leaf, const xd_dmd_batch *batch,
                                   xd_dmd_values *values);
XD_API xd_result xd_dmd_discriminator(xd_dmd *dmd, int64_t leaf, const xd_dmd_batch *batch,
                                      xd_dmd_values *values);

/* Warm-up, for a loop of one's own: the teacher goes down from noise, by xd_dmd_regression.substeps steps of Euler from rung to
 * rung, guided as desc says; at each rung x_r it passes the student learns its mean velocity to the next, in the space FLOW:
 *
 *   loss = mean over noises, rungs and elements of (student(x_r, t_r) - (x_{r+1} - x_r) / (t_{r+1} - t_r))^2
 *
 * Forwards of a leaf: steps * substeps of the teacher, twice that with guidance, and steps of the student, each followed by
 * its backward (`more` but for the last; a student with several FSDP units needs xd_fsdp_desc.accumulate_whole for that, as
 * does such a discriminator). Noise is the batch's, or drawn for warm-up alone; batch->real is not read. In narrow dtypes the
 * velocity is that of rounded ends.
 *
 *   values   regression is added to; NULL -> not read back from a device
 *
 * Collective, findings and errors as of xd_dmd_student; STATE (no sub-steps, or a schedule other than FLOW). */
XD_API xd_result xd_dmd_warm_up(xd_dmd *dmd, int64_t leaf, const xd_dmd_batch *batch, xd_dmd_values *values);

/* f-distill, for a loop of one's own. Weights of samples are those of the whole step, so the logits of all its leaves come first:
 *
 *   xd_dmd_ratios for each leaf; xd_dmd_weigh; xd_dmd_student for each leaf, with the same batches
 *
 * xd_dmd_ratios is the student's sample, time and noise, the teacher's features and the discriminator's logits, as inferences, with
 * the random numbers of xd_dmd_student, which makes the same once more: one forward of each of the three networks (of the
 * student, with its roll-out) is the price. Calls of draws are asked twice for the same. A leaf that has its logits already begins
 * another step. xd_dmd_weigh makes the weights, each good for one xd_dmd_student, and the bins' next values; after a finding no bin
 * changes. Whoever skips the step afterwards puts the bins back (xd_dmd_bins, xd_dmd_set_bins); xd_dmd_step does.
 *
 * Collective: xd_dmd_ratios as xd_dmd_student, xd_dmd_weigh over xd_dmd_desc.data. Allocate nothing. Deterministic; in INVARIANT
 * mode weights and bins have the same bits for every split of the step over ranks and leaves, since their sums are exact.
 * Errors: STATE (no f-distill; xd_dmd_student of a leaf without weights, or with another number of samples), those of
 * xd_dmd_student and of xd_fdistill_weights. */
XD_API xd_result xd_dmd_ratios(xd_dmd *dmd, int64_t leaf, const xd_dmd_batch *batch);
XD_API xd_result xd_dmd_weigh(xd_dmd *dmd);

/* The bins, [xd_dmd_fdistill.bins] mean ratios by time, all 1 at first: a part of what resumes a run. The same on every rank.
 * Local; they wait for a GPU. Errors: STATE (no f-distill), ARGUMENT (another number of bins, or a value that is not above 0
 * and finite: with the numbers), those of the device. */
XD_API xd_result xd_dmd_bins(xd_dmd *dmd, double *out);
XD_API xd_result xd_dmd_set_bins(xd_dmd *dmd, const double *values, int count);

/* What the terms have found since the last call of this, of xd_dmd_step or of xd_dmd_warm_up_step, on this rank: not_finite counts
 * samples. Clears it. For a loop of one's own, which is to skip its step, on all ranks, when any has found something. Waits for a
 * GPU. Local. Errors: those of the device. */
XD_API xd_result xd_dmd_findings(xd_dmd *dmd, xd_status *out);

/* Gives the batch of a leaf, by its number in the whole step; called again for each phase of a step, which is that of
 * xd_dmd_describe. What it points to is read until the next call of this. */
typedef xd_result (*xd_dmd_batch_function)(void *user, int64_t leaf, xd_dmd_batch *batch);

/* One step: the roles whose turn it is compute their leaves, gradients are summed, clipped, stepped and published, averages
 * follow. With f-distill the student's turn goes through the leaves twice, for the logits first; a skipped or failed step
 * leaves the bins as they were. When something was not finite on any rank, no role steps and the step is over all the same.
 *
 *   values   out; the same on every rank, and in INVARIANT mode on every layout; may be NULL
 *
 * Collective over data and split. Allocates nothing. Errors: those of the terms and of xd_parallel_reduce and _publish, the same on
 * every rank unless a network's own exchange failed; STATE (a role without a trainer). After an error of the batch or of a network
 * under DDP nothing has changed, and the same step may be made again; networks close their blocks before they return an
 * error. Under FSDP other ranks may wait in a gather meanwhile, and where sums are begun on a queue it may have one of them:
 * then the ranks are out of step, and the world is at its end. */
XD_API xd_result xd_dmd_step(xd_dmd *dmd, xd_dmd_batch_function batch, void *user, xd_dmd_values *values);

/* One step of warm-up: every leaf's xd_dmd_warm_up, then the student alone is summed, clipped, stepped and published, as by
 * xd_dmd_step. Learning rates and averages of its own are the caller's to set before and after. Steps of warm-up have a
 * counter of their own, so a run has as many as it likes before its first xd_dmd_step. Collective, values and errors as of
 * xd_dmd_step and xd_dmd_warm_up. */
XD_API xd_result xd_dmd_warm_up_step(xd_dmd *dmd, xd_dmd_batch_function batch, void *user,
                                     xd_dmd_values *values);

/* Whether a role has its turn in a step. Pure. */
XD_API bool xd_dmd_has_turn(const xd_dmd_desc *desc, xd_dmd_role role, int64_t step);

/* What to save beside weights, optimizers and averages, and to set after they were loaded: what the student has generated before is
 * then forgotten. Local. Errors: ARGUMENT (negative counts), MISMATCH (another seed, with both), STATE (own_samples, which are not
 * saved, and a step that is not the student's). */
XD_API xd_dmd_record xd_dmd_describe(const xd_dmd *dmd);
XD_API xd_result xd_dmd_resume(xd_dmd *dmd, const xd_dmd_record *record);

#endif
