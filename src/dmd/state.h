#ifndef XDI_DMD_STATE_H
#define XDI_DMD_STATE_H

#include "dmd/denoise.h"
#include "dmd/dmd.h"
#include "dmd/sampler.h"
#include "base/fail.h"
#include "base/internal.h"
#include "comm/internal.h"
#include "kernel/kernels.h"
#include "train/clip.h"

/* Discriminator's slots, and the teacher's while their features are used. */
enum { XDI_DMD_SLOT_FAKE = 0, XDI_DMD_SLOT_REAL, XDI_DMD_SLOT_PERTURBED, XDI_DMD_SLOTS };

/* Each transition between rungs with new noise has a stream. */
enum { XDI_DMD_FRESH_STEPS = XD_STREAM_EMA - XD_STREAM_ROLLOUT };

/* A row of the table of values. A rank's own row has number -1 and the count of its findings. */
enum {
    XDI_DMD_NUMBER = 0,
    XDI_DMD_FIRST,
    XDI_DMD_SAMPLES,
    XDI_DMD_VSD,
    XDI_DMD_GENERATOR,
    XDI_DMD_FAKE_SCORE,
    XDI_DMD_DISCRIMINATOR,
    XDI_DMD_R1,
    XDI_DMD_DISTANCE,
    XDI_DMD_REGRESSION,
    XDI_DMD_COLUMNS
};

/* Features of one slot, f32. */
typedef struct xdi_dmd_features {
    float **values;         /* [feature_count] */
    float *logits;          /* [samples, heads] */
    float *logit_gradients; /* [samples, heads] */
} xdi_dmd_features;

/* Times of a micro-batch's samples, on the host. */
typedef struct xdi_dmd_times {
    double *exact;   /* [samples] t */
    double *network; /* [samples] as networks see them */
} xdi_dmd_times;

/* Tensors of a micro-batch, [samples, elements] of the samples' dtype, on the device. */
typedef struct xdi_dmd_tensors {
    void *noise;      /* pure: the batch's own or drawn */
    void *input;      /* of the student, or of the only network, at a rung */
    void *prediction; /* of the network that was called last */
    void *generated;  /* the student's clean samples at a rung; x in the end */
    void *epsilon;    /* pure noise of the next mix with clean samples: a rung's, then that of x_t */
    void *noised;     /* x_t, the input of teacher and fake score */
    void *teacher_x0; /* the teacher's clean samples */
    void *fake_x0;    /* the fake score's */
    void *guided_x0;  /* before they are rescaled; NULL without rescale */
    void *real;       /* real samples, noised; NULL without a discriminator */
    void *scratch;    /* of the function that gives it a name, and of those that get it as an argument */
} xdi_dmd_tensors;

/* Gradients of a micro-batch, f32, on the device. */
typedef struct xdi_dmd_gradients {
    float *generated;  /* [samples, elements] by x */
    float *noised;     /* [samples, elements] by x_t; NULL without a discriminator */
    float *prediction; /* [samples, elements] by a network's prediction */
    float **features;  /* [feature_count] arrays [samples, feature_elements] */
    float *penalty;    /* [samples, heads] by logits of real samples; ones where the penalty is a slope */
} xdi_dmd_gradients;

/* Factors of each sample on their way to the device. */
typedef struct xdi_dmd_factors {
    xd_mix *mixes, *host_mixes;          /* [samples] */
    xd_denoise_term *terms, *host_terms; /* [samples] */
} xdi_dmd_factors;

/* Random numbers of a micro-batch. */
typedef struct xdi_dmd_drawn {
    float *normals;      /* [samples, elements] on the device; NULL where none are copied or converted */
    float *host_normals; /* [samples, elements]; NULL where none are copied */
    double *times;       /* [samples] on the host */
    int64_t *rungs;      /* [samples] on the host */
} xdi_dmd_drawn;

/* What each loss gets besides its tensors. */
typedef struct xdi_dmd_results {
    xd_status *status;
    xd_sample_values *value;
    double *distances;      /* [samples] mean |x - T| */
    double *host_distances; /* [samples] */
    void *workspace;
    size_t workspace_bytes;
} xdi_dmd_results;

/* Deviations of samples, for guidance with rescale; zero without. */
typedef struct xdi_dmd_deviations {
    float *constant;              /* [samples, elements] on the device: one number */
    double *sums, *host_sums;     /* [samples] of squares */
    double *shift;                /* [samples] on the host: added to samples, in units of the number */
    double *conditional, *guided; /* [samples] on the host: variances */
} xdi_dmd_deviations;

/* Samples that the student generated in a step, for the others' next ones. */
typedef struct xdi_dmd_kept {
    void *samples;   /* [micro_batches] of `generated`; NULL without own_samples */
    int64_t *counts; /* [micro_batches] of samples; -1: none */
} xdi_dmd_kept;

/* Values of all micro-batches of all ranks. After the ranks comes what is sent; each ends with a row of its rank alone. */
typedef struct xdi_dmd_table {
    double *rows;    /* [ranks + 1][micro_batches + 1][XDI_DMD_COLUMNS] */
    int64_t *counts; /* [ranks] of xd_all_gather */
} xdi_dmd_table;

/* f-distill: logits and times of all samples of a step on this rank, without gaps; at most micro_batches * samples rows. */
typedef struct xdi_dmd_ratios {
    float *logits;    /* [rows, heads] */
    double *times;    /* [rows] */
    double *weights;  /* [rows] */
    double *bins;     /* [bins] */
    double *earlier;  /* [bins] before the last xdi_dmd_weigh */
    int64_t *first;   /* [micro_batches] on the host: a micro-batch's first row; -1: it has none */
    int64_t *samples; /* [micro_batches] on the host */
    int64_t rows;
    bool weighed;
} xdi_dmd_ratios;

struct xd_dmd {
    xd_ctx *ctx;
    xd_dmd_desc desc;
    int64_t micro_batches; /* of this rank, or the most of any rank under FSDP */
    void *memory;          /* of the device */
    xdi_dmd_tensors tensors;
    xdi_dmd_gradients gradients;
    xdi_dmd_factors factors;
    xdi_dmd_drawn draws;
    xdi_dmd_results results;
    xdi_dmd_deviations deviations;
    xdi_dmd_features features[XDI_DMD_SLOTS];
    float *ones;             /* [samples, heads] on the host where a penalty is a slope; else NULL */
    xd_gradient_norm *norms; /* [XD_DMD_ROLES] on the device */
    xdi_dmd_times input, noised, real;
    xdi_dmd_kept kept;
    xdi_dmd_ratios ratios;
    xdi_dmd_table table;
    const char *only_network; /* a sampler's, in messages; NULL: there are all */
    int64_t beyond;           /* a micro-batch beyond this rank's own, for ranks that gather; -1: none */
    /* that of `noised`, from the fake score's term to the discriminator's; -1: none */
    int64_t noised_micro_batch;
    xd_dmd_record record;
};

/* settings.c: whether there is a discriminator; elements of a whole sample; "the fake score" without its article. */
XD_PRIVATE bool xdi_dmd_adversarial(const xd_dmd_desc *desc);
XD_PRIVATE int64_t xdi_dmd_whole(const xd_dmd_sizes *sizes);
XD_PRIVATE const char *xdi_dmd_role_name(xd_dmd_role role);

/* settings.c: a number of the settings that all ranks, and all parts of a run, must share; and whether ranks do, in a distillation
 * or in a sampler. Collective. Errors: MISMATCH, with the first field that differs and both values. */
XD_PRIVATE uint64_t xdi_dmd_settings_hash(const xd_dmd_desc *desc);
XD_PRIVATE xd_result xdi_dmd_agree_settings(const xd_dmd_desc *desc, xd_comm *comm);
XD_PRIVATE xd_result xdi_sampler_agree_settings(const xd_sampler_desc *desc, xd_comm *comm);

/* tensors.c: samples, and gradients by them, as rows. */
XD_PRIVATE xd_rows xdi_dmd_rows(const xd_dmd_sizes *sizes, const void *data, int64_t samples);
XD_PRIVATE xd_rows xdi_dmd_gradient_rows(const xd_dmd_sizes *sizes, const float *data, int64_t samples);

/* tensors.c: out = c0 p + c1 q with the factors in factors.host_mixes. */
XD_PRIVATE xd_result xdi_dmd_mix(xd_dmd *d, xd_rows p, xd_rows q, xd_rows out);

/* tensors.c: to memory of the device, at once. */
XD_PRIVATE xd_result xdi_dmd_send(xd_ctx *ctx, void *to, const void *from, size_t bytes);

/* tensors.c: where normals are drawn. There: by the device, straight into the array. Otherwise on the host; apart: of a
 * device, so that they are copied; between: by way of draws.normals. */
XD_PRIVATE bool xdi_dmd_draws_there(const xd_ctx *ctx, const xd_dmd_desc *desc);
XD_PRIVATE bool xdi_dmd_draws_apart(const xd_ctx *ctx, const xd_dmd_desc *desc);
XD_PRIVATE bool xdi_dmd_draws_between(const xd_ctx *ctx, const xd_dmd_desc *desc);

/* tensors.c: normals of a stream into an array; times of a sampler. `role` keeps the draws of a step's phases apart; the
 * teacher's are those of warm-up, whose steps are counted apart. */
typedef struct xdi_dmd_where {
    xd_dmd_role role;
    uint8_t stream;
    int64_t first, samples;
} xdi_dmd_where;
XD_PRIVATE xd_result xdi_dmd_normals(xd_dmd *d, xdi_dmd_where where, void *out);
XD_PRIVATE xd_result xdi_dmd_draw_times(xd_dmd *d, xdi_dmd_where where, const xd_time_sampler *sampler,
                                        const xdi_dmd_times *out);
XD_PRIVATE xd_result xdi_dmd_draw_rungs(xd_dmd *d, xdi_dmd_where where, int64_t rows);

/* tensors.c: sets the time of a row, exact and as networks see it. */
XD_PRIVATE void xdi_dmd_set_time(const xd_dmd_desc *desc, const xdi_dmd_times *times, int64_t row, double t);

/* walk.c: x_t = alpha x + sigma eps at these times. */
XD_PRIVATE xd_result xdi_dmd_add_noise(xd_dmd *d, const xdi_dmd_times *times, xd_rows clean, xd_rows noise,
                                       xd_rows out);

/* Samples x_t at their times, on the device. */
typedef struct xdi_dmd_point {
    const void *x;
    const xdi_dmd_times *times;
} xdi_dmd_point;

/* walk.c: out = a network's prediction, tensors.prediction, at x_t converted to another type. */
typedef struct xdi_dmd_reading {
    xd_dmd_role role;
    xd_prediction to;
    xdi_dmd_point at;
} xdi_dmd_reading;
XD_PRIVATE xd_result xdi_dmd_read(xd_dmd *d, xdi_dmd_reading reading, int64_t samples, void *out);

/* walk.c: a time of the list as the samplers round theirs; where the draws of a batch are. */
XD_PRIVATE double xdi_dmd_rung_time(const xd_dmd_desc *desc, int64_t rung);
XD_PRIVATE xdi_dmd_where xdi_dmd_at(xd_dmd_role phase, int stream, const xd_dmd_batch *batch);

/* walk.c: one time for all rows. */
XD_PRIVATE void xdi_dmd_set_times(const xd_dmd_desc *desc, const xdi_dmd_times *times, int64_t samples,
                                  double t);

/* walk.c: the student's input, or the only network's, as a point. */
XD_PRIVATE xdi_dmd_point xdi_dmd_input_point(const xd_dmd *d);

/* walk.c: input = sigma of the first rung, as a double, times noise; a role's prediction at the input converted; from its
 * prediction at rung `rung` to the input at the next, through `generated`, with this noise. */
XD_PRIVATE xd_result xdi_dmd_begin(xd_dmd *d, const void *noise, int64_t samples);
XD_PRIVATE xd_result xdi_dmd_read_input(xd_dmd *d, xd_dmd_role role, xd_prediction to, int64_t samples,
                                        void *out);
XD_PRIVATE xd_result xdi_dmd_descend(xd_dmd *d, xd_dmd_role role, int64_t samples, int64_t rung,
                                     const void *noise);

/* walk.c: the teacher's prediction at x_t, guided if it is (through scratch); dx/dt of it; out = x_t + width dx/dt, which may lie
 * over x_t. */
XD_PRIVATE xd_result xdi_dmd_guide(xd_dmd *d, const xd_dmd_batch *batch, xdi_dmd_point at);
XD_PRIVATE xd_result xdi_dmd_slope(xd_dmd *d, int64_t samples, xdi_dmd_point at, void *out);
XD_PRIVATE xd_result xdi_dmd_euler(xd_dmd *d, int64_t samples, xdi_dmd_point at, double width, void *out);

/* input.c: `generated` from a forward of the student at its input, kept for a backward or not. */
XD_PRIVATE xd_result xdi_dmd_generate(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch, bool keep);

/* input.c: time and noise of x for a phase, and x_t. */
XD_PRIVATE xd_result xdi_dmd_noise(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch);

/* walk.c: a forward or backward of a role's network; nothing beyond this rank's micro-batches, unless others wait for it. */
XD_PRIVATE xd_result xdi_dmd_forward(xd_dmd *d, xd_dmd_role role, const xd_network_call *call);
XD_PRIVATE xd_result xdi_dmd_backward(xd_dmd *d, xd_dmd_role role, const xd_network_call *call);

/* walk.c: a discriminator's penalty, where xdi_dmd_backward would be called. */
XD_PRIVATE xd_result xdi_dmd_penalty(xd_dmd *d, const xd_network_call *call);

/* dmd.c: whether there is a penalty, of this kind. */
XD_PRIVATE bool xdi_dmd_penalised(const xd_dmd_desc *desc, xd_dmd_penalty penalty);

/* adversary.c: the generator's term: logits of the teacher's features in slot FAKE, and its gradient by x, added to
 * gradients.generated. */
XD_PRIVATE xd_result xdi_dmd_generator(xd_dmd *d, const xd_dmd_batch *batch, double *value);

/* ratios.c: f-distill: its settings; memory, and the bins at first; the workspace; STATE without it; the weights of a
 * micro-batch, NULL without it; nothing is known of a step yet; the end of a step that did not happen. */
XD_PRIVATE xd_result xdi_dmd_check_fdistill(xd_ctx *ctx, const xd_dmd_desc *desc);
XD_PRIVATE void xdi_dmd_lay_out_ratios(xd_dmd *d, xd_arena *host, xd_arena *device);
XD_PRIVATE xd_result xdi_dmd_begin_ratios(xd_dmd *d);
XD_PRIVATE size_t xdi_dmd_ratios_workspace(const xd_dmd *d);
XD_PRIVATE xd_result xdi_dmd_check_on(const xd_dmd *d);
XD_PRIVATE xd_result xdi_dmd_take_weights(xd_dmd *d, int64_t micro_batch, int64_t samples,
                                          const double **out);
XD_PRIVATE void xdi_dmd_forget_ratios(xd_dmd *d);
XD_PRIVATE xd_result xdi_dmd_undo_weigh(xd_dmd *d);

/* f-distill's weights of a step: adversary.c: logits of each micro-batch, ratios.c: once weights of all, then xd_dmd_student for
 * each. Collective as xd_dmd_student, and over xd_dmd_desc.data. Errors: STATE (no f-distill), those of xd_dmd_student and
 * xdi_fdistill_weights. */
XD_PRIVATE xd_result xdi_dmd_collect_ratios(xd_dmd *dmd, int64_t micro_batch, const xd_dmd_batch *batch);
XD_PRIVATE xd_result xdi_dmd_weigh(xd_dmd *dmd);

/* ratios.c: returns and sets the bins: [xd_dmd_fdistill.bins] mean ratios by time, initially 1, equal on all ranks. Waits for a
 * GPU. Errors: STATE (no f-distill), ARGUMENT (count, values not finite and > 0). */
XD_PRIVATE xd_result xdi_dmd_bins(xd_dmd *dmd, double *out);
XD_PRIVATE xd_result xdi_dmd_set_bins(xd_dmd *dmd, const double *values, int count);

/* sampler.c: the noise of a sampler's samples, before sigma. */
XD_PRIVATE xd_result xdi_sampler_noise(xd_sampler *sampler, const xd_dmd_batch *batch, void *out);

/* tensors.c: what each loss gets besides its tensors, which have so many numbers to a sample; micro_batch.c: adds the value
 * of the last loss. */
XD_PRIVATE xd_sample_common xdi_dmd_common(const xd_dmd *d, int64_t numbers);
XD_PRIVATE xd_result xdi_dmd_add_value(xd_dmd *d, double *value);

/* guidance.c: x0, clean samples with the condition, is mixed with those with the negative one, as `guidance` says. Through
 * guided_x0, and collective over split, when it rescales. */
XD_PRIVATE xd_result xdi_dmd_guide_clean(xd_dmd *d, const xd_guidance *guidance, int64_t samples, void *x0,
                                         const void *negative);

/* guidance.c: whether there are deviations; their memory; the workspace that they need. */
XD_PRIVATE bool xdi_dmd_rescales(const xd_dmd_desc *desc);
XD_PRIVATE void xdi_dmd_lay_out_deviations(xd_dmd *d, xd_arena *host, xd_arena *device);
XD_PRIVATE size_t xdi_dmd_guidance_workspace(const xd_dmd *d);

/* guidance.c: what settings say of a role: its scale, and how much it is rescaled. */
XD_PRIVATE xd_guidance xdi_dmd_guidance(const xd_dmd_desc *desc, xd_dmd_role role);

/* warm_up.c: the warm-up term of one micro-batch; adds to values->regression. Collective and errors as of xd_dmd_student; STATE
 * (no substeps, a schedule other than FLOW). */
XD_PRIVATE xd_result xdi_dmd_warm_up(xd_dmd *dmd, int64_t micro_batch, const xd_dmd_batch *batch,
                                     xd_dmd_values *values);

/* warm_up.c: noises of a step of warm-up. */
XD_PRIVATE int64_t xdi_dmd_warm_up_samples(const xd_dmd_desc *desc);

/* micro_batch.c: a micro-batch and its number fit into a step of so many samples; with guidance there is what leads away. */
XD_PRIVATE xd_result xdi_dmd_check_batch(const xd_dmd *d, int64_t micro_batch, const xd_dmd_batch *batch,
                                         int64_t step_samples);
XD_PRIVATE xd_result xdi_dmd_check_guidance(const xd_dmd *d, const xd_dmd_batch *batch, xd_dmd_role role);

/* dmd.c: arrays of times from memory of the host. */
XD_PRIVATE void xdi_dmd_take_times(xd_arena *host, int64_t samples, xdi_dmd_times *times);

/* dmd.c: the agreement of all ranks that make a call together. */
XD_PRIVATE xd_result xdi_dmd_agree(const xd_dmd_desc *desc, xd_result result);

/* input.c: `noise`: the batch's own or drawn. */
XD_PRIVATE xd_result xdi_dmd_take_noise(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch);

/* micro_batch.c: `generated` into what is kept of a micro-batch, or from it. */
XD_PRIVATE xd_result xdi_dmd_copy_kept(xd_dmd *d, int64_t micro_batch, int64_t samples, bool keep);

/* micro_batch.c: x of a micro-batch in `generated` for a phase that does not train the student. */
XD_PRIVATE xd_result xdi_dmd_fetch(xd_dmd *d, xd_dmd_role phase, int64_t micro_batch,
                                   const xd_dmd_batch *batch);

/* walk.c: a call of a network at a point, which writes `prediction`. */
XD_PRIVATE xd_network_call xdi_dmd_call(const xd_dmd_batch *batch, xdi_dmd_point at, void *prediction);

#endif
