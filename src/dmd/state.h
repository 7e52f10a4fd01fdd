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

/* Arrays of one leaf's samples, [samples, elements] of their dtype. */
typedef enum xdi_dmd_tensor {
    XDI_DMD_NOISE = 0, /* pure */
    XDI_DMD_INPUT,     /* of the student */
    XDI_DMD_RAW,       /* what the network called last says */
    XDI_DMD_GENERATED, /* x */
    XDI_DMD_EPSILON,
    XDI_DMD_NOISED, /* x_t */
    XDI_DMD_TARGET, /* the teacher's clean samples */
    XDI_DMD_FAKE,   /* the fake score's */
    XDI_DMD_REAL,   /* real samples, noised */
    XDI_DMD_TENSORS
} xdi_dmd_tensor;

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

/* Features of one slot, and their gradients, f32. */
typedef struct xdi_dmd_features {
    float **values;         /* [feature_count] */
    float *logits, *slopes; /* [samples, heads], and the gradients by them */
} xdi_dmd_features;

/* A leaf's time and noise in use. */
typedef struct xdi_dmd_times {
    double *exact;   /* [samples] t */
    double *network; /* [samples] as networks see them */
} xdi_dmd_times;

/* f-distill: what is known of all samples of a step on this rank, leaf after leaf without gaps. Rows are [leaves * samples] at
 * most. */
typedef struct xdi_dmd_ratios {
    float *logits;    /* [rows, heads] */
    double *times;    /* [rows] */
    double *weights;  /* [rows] */
    double *bins;     /* [bins] */
    double *earlier;  /* [bins] before the last xdi_dmd_weigh */
    int64_t *first;   /* [leaves] on the host: a leaf's first row; -1: it has none */
    int64_t *samples; /* [leaves] on the host */
    int64_t rows;
    bool weighed;
} xdi_dmd_ratios;

struct xd_dmd {
    xd_ctx *ctx;
    xd_dmd_desc desc;
    int64_t leaves; /* for which samples are kept */
    /* On the device. */
    void *memory;
    void *tensors[XDI_DMD_TENSORS];
    void *kept;          /* [leaves] of GENERATED */
    float *slope;        /* by x */
    float *hidden_slope; /* by x_t */
    float *raw_slope;    /* by a network's prediction */
    float *normals; /* numbers drawn on the host, on their way into an array; NULL where they need none */
    float **feature_slopes; /* [feature_count] */
    /* [samples, heads] R1's gradient by the logits of real samples; ones where it is a slope */
    float *penalty;
    xd_mix *mixes;
    xd_denoise_term *terms;
    xd_gradient_norm *norms; /* [XD_DMD_ROLES] */
    xd_status *status;
    xd_sample_values *value;
    double *distances; /* [samples] mean |x - T| */
    void *workspace;
    size_t workspace_bytes;
    xdi_dmd_features features[XDI_DMD_SLOTS];
    xdi_dmd_ratios ratios;
    /* On the host. */
    float *host_normals; /* NULL where nothing that the host draws is copied */
    float *ones;         /* [samples, heads] where a penalty is a slope; else NULL */
    xd_mix *host_mixes;
    xd_denoise_term *host_terms;
    double *draws;   /* also numbers on their way from the device */
    double *spreads; /* [3 * samples] of guidance with rescale */
    int64_t *rung;
    xdi_dmd_times input, noised, real;
    int64_t *kept_samples; /* [leaves] -1: none */
    /* [ranks + 1][leaves + 1][XDI_DMD_COLUMNS] values by leaf, and one row of a rank itself; what is sent last */
    double *table;
    int64_t *counts;     /* [ranks] of xd_all_gather */
    const char *alone;   /* what messages call the only network, a sampler's; NULL: there are all */
    int64_t beyond;      /* a leaf beyond this rank's own that is gone through for others; -1: none */
    int64_t noised_leaf; /* whose x_t is in NOISED since the fake score's term; -1: nobody's */
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

/* tensors.c: one of the arrays as rows. */
XD_PRIVATE xd_rows xdi_dmd_rows(const xd_dmd *d, const void *data, int64_t samples);
XD_PRIVATE xd_rows xdi_dmd_slopes(const xd_dmd *d, const float *data, int64_t samples);

/* tensors.c: out = c0 p + c1 q with the factors in host_mixes. */
XD_PRIVATE xd_result xdi_dmd_mix(xd_dmd *d, xd_rows p, xd_rows q, xd_rows out);

/* tensors.c: to memory of the device, at once. */
XD_PRIVATE xd_result xdi_dmd_send(xd_dmd *d, void *to, const void *from, size_t bytes);

/* tensors.c: where normals are drawn. There: by the device, straight into the array. Otherwise on the host; apart: of a
 * device, so that they are copied; between: by way of an array of f32 on the device, `normals`. */
XD_PRIVATE bool xdi_dmd_draws_there(const xd_dmd *d);
XD_PRIVATE bool xdi_dmd_draws_apart(const xd_dmd *d);
XD_PRIVATE bool xdi_dmd_draws_between(const xd_dmd *d);

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
XD_PRIVATE void xdi_dmd_set_time(const xd_dmd *d, const xdi_dmd_times *times, int64_t row, double t);

/* walk.c: x_t = alpha x + sigma eps at these times. */
XD_PRIVATE xd_result xdi_dmd_add_noise(xd_dmd *d, const xdi_dmd_times *times, xd_rows clean, xd_rows noise,
                                       xd_rows out);

/* walk.c: a network's prediction at x_t converted to another type. */
typedef struct xdi_dmd_reading {
    xd_dmd_role role;
    xd_prediction to;
    const xdi_dmd_times *times;
    const void *hidden;
} xdi_dmd_reading;
XD_PRIVATE xd_result xdi_dmd_read(xd_dmd *d, xdi_dmd_reading reading, int64_t samples, void *out);

/* walk.c: a time of the list as the samplers round theirs; where the draws of a batch are. */
XD_PRIVATE double xdi_dmd_rung_time(const xd_dmd *d, int64_t rung);
XD_PRIVATE xdi_dmd_where xdi_dmd_at(xd_dmd_role phase, int stream, const xd_dmd_batch *batch);

/* walk.c: one time for all rows. */
XD_PRIVATE void xdi_dmd_set_times(const xd_dmd *d, const xdi_dmd_times *times, int64_t samples, double t);

/* walk.c: INPUT at the first rung = sigma of it, as a double, times noise; a role's prediction there converted; from what was
 * predicted at INPUT, rung `rung`, to the next, through GENERATED, with this noise. */
XD_PRIVATE xd_result xdi_dmd_begin(xd_dmd *d, const void *noise, int64_t samples);
XD_PRIVATE xd_result xdi_dmd_read_input(xd_dmd *d, xd_dmd_role role, xd_prediction to, int64_t samples,
                                        xdi_dmd_tensor out);
XD_PRIVATE xd_result xdi_dmd_descend(xd_dmd *d, xd_dmd_role role, int64_t samples, int64_t rung,
                                     xdi_dmd_tensor noise);

/* walk.c: RAW = the teacher's prediction at x_t, guided if it is (through REAL); the slope dx/dt of the last of these; x_t +
 * width times that of it, which may lie over x_t. */
typedef struct xdi_dmd_point {
    xdi_dmd_tensor tensor; /* x_t */
    const xdi_dmd_times *times;
} xdi_dmd_point;
XD_PRIVATE xd_result xdi_dmd_guide(xd_dmd *d, const xd_dmd_batch *batch, xdi_dmd_point at);
XD_PRIVATE xd_result xdi_dmd_slope(xd_dmd *d, int64_t samples, xdi_dmd_point at, xdi_dmd_tensor out);
XD_PRIVATE xd_result xdi_dmd_euler(xd_dmd *d, int64_t samples, xdi_dmd_point at, double width, void *out);

/* input.c: GENERATED from a forward of the student at its input, kept for a backward or not. */
XD_PRIVATE xd_result xdi_dmd_generate(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch, bool keep);

/* input.c: time and noise of x for a phase, and x_t. */
XD_PRIVATE xd_result xdi_dmd_noise(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch);

/* walk.c: a forward or backward of a role's network; nothing beyond this rank's leaves, unless others wait for it. */
XD_PRIVATE xd_result xdi_dmd_forward(xd_dmd *d, xd_dmd_role role, const xd_network_call *call);
XD_PRIVATE xd_result xdi_dmd_backward(xd_dmd *d, xd_dmd_role role, const xd_network_call *call);

/* walk.c: a discriminator's penalty, where xdi_dmd_backward would be called. */
XD_PRIVATE xd_result xdi_dmd_bend(xd_dmd *d, const xd_network_call *call);

/* dmd.c: whether there is a penalty, of this kind. */
XD_PRIVATE bool xdi_dmd_penalised(const xd_dmd_desc *desc, xd_dmd_penalty penalty);

/* adversary.c: the generator's term: logits of the teacher's features in slot FAKE, and its gradient by x, added to `slope`. */
XD_PRIVATE xd_result xdi_dmd_generator(xd_dmd *d, const xd_dmd_batch *batch, double *value);

/* ratios.c: f-distill: its settings; memory, and the bins at first; the workspace; STATE without it; the weights of a leaf, NULL
 * without it; nothing is known of a step yet; the end of a step that did not happen. */
XD_PRIVATE xd_result xdi_dmd_check_fdistill(xd_ctx *ctx, const xd_dmd_desc *desc);
XD_PRIVATE void xdi_dmd_lay_out_ratios(xd_dmd *d, xd_arena *host, xd_arena *device);
XD_PRIVATE xd_result xdi_dmd_begin_ratios(xd_dmd *d);
XD_PRIVATE size_t xdi_dmd_ratios_workspace(const xd_dmd *d);
XD_PRIVATE xd_result xdi_dmd_check_on(const xd_dmd *d);
XD_PRIVATE xd_result xdi_dmd_take_weights(xd_dmd *d, int64_t leaf, int64_t samples, const double **out);
XD_PRIVATE void xdi_dmd_forget_ratios(xd_dmd *d);
XD_PRIVATE xd_result xdi_dmd_undo_weigh(xd_dmd *d);

/* f-distill's weights of a step: adversary.c: logits of each micro-batch, ratios.c: once weights of all, then xd_dmd_student for
 * each. Collective as xd_dmd_student, and over xd_dmd_desc.data. Errors: STATE (no f-distill), those of xd_dmd_student and
 * xdi_fdistill_weights. */
XD_PRIVATE xd_result xdi_dmd_collect_ratios(xd_dmd *dmd, int64_t leaf, const xd_dmd_batch *batch);
XD_PRIVATE xd_result xdi_dmd_weigh(xd_dmd *dmd);

/* ratios.c: returns and sets the bins: [xd_dmd_fdistill.bins] mean ratios by time, initially 1, equal on all ranks. Waits for a
 * GPU. Errors: STATE (no f-distill), ARGUMENT (count, values not finite and > 0). */
XD_PRIVATE xd_result xdi_dmd_bins(xd_dmd *dmd, double *out);
XD_PRIVATE xd_result xdi_dmd_set_bins(xd_dmd *dmd, const double *values, int count);

/* sampler.c: the noise of a sampler's samples, before sigma. */
XD_PRIVATE xd_result xdi_sampler_noise(xd_sampler *sampler, const xd_dmd_batch *batch, void *out);

/* tensors.c: what each loss gets besides its tensors, which have so many numbers to a sample; leaf.c: adds the value of the last
 * loss. */
XD_PRIVATE xd_sample_common xdi_dmd_common(const xd_dmd *d, int64_t numbers);
XD_PRIVATE xd_result xdi_dmd_add_value(xd_dmd *d, double *value);

/* guidance.c: `out`, clean samples with the condition, is mixed with those with the negative one in REAL, as `guidance` says;
 * `scratch` is written when it rescales. Collective over split then. */
XD_PRIVATE xd_result xdi_dmd_guide_clean(xd_dmd *d, const xd_guidance *guidance, int64_t samples,
                                         xdi_dmd_tensor out, xdi_dmd_tensor scratch);

/* guidance.c: the workspace that its deviations need. */
XD_PRIVATE size_t xdi_dmd_guidance_workspace(const xd_dmd *d);

/* guidance.c: what settings say of a role: its scale, and how much it is rescaled. */
XD_PRIVATE xd_guidance xdi_dmd_guidance(const xd_dmd_desc *desc, xd_dmd_role role);

/* warm_up.c: the warm-up term of one micro-batch; adds to values->regression. Collective and errors as of xd_dmd_student; STATE
 * (no substeps, a schedule other than FLOW). */
XD_PRIVATE xd_result xdi_dmd_warm_up(xd_dmd *dmd, int64_t leaf, const xd_dmd_batch *batch,
                                     xd_dmd_values *values);

/* warm_up.c: noises of a step of warm-up. */
XD_PRIVATE int64_t xdi_dmd_warm_up_samples(const xd_dmd *d);

/* leaf.c: a leaf and its batch fit into a step of so many samples; with guidance there is what leads away. */
XD_PRIVATE xd_result xdi_dmd_check_batch(const xd_dmd *d, int64_t leaf, const xd_dmd_batch *batch,
                                         int64_t step_samples);
XD_PRIVATE xd_result xdi_dmd_check_guidance(const xd_dmd *d, const xd_dmd_batch *batch, xd_dmd_role role);

/* dmd.c: arrays of times from memory of the host. */
XD_PRIVATE void xdi_dmd_take_times(xd_arena *host, int64_t samples, xdi_dmd_times *times);

/* dmd.c: the agreement of all ranks that make a call together. */
XD_PRIVATE xd_result xdi_dmd_agree(const xd_dmd_desc *desc, xd_result result);

/* input.c: NOISE: the batch's own or drawn. */
XD_PRIVATE xd_result xdi_dmd_take_noise(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch);

/* leaf.c: GENERATED into what is kept of a leaf, or from it. */
XD_PRIVATE xd_result xdi_dmd_copy_kept(xd_dmd *d, int64_t leaf, int64_t samples, bool keep);

/* leaf.c: x of a leaf in GENERATED for a phase that does not train the student. */
XD_PRIVATE xd_result xdi_dmd_fetch(xd_dmd *d, xd_dmd_role phase, int64_t leaf, const xd_dmd_batch *batch);

/* walk.c: a call of a network at times, with what it wants filled in by the caller. */
XD_PRIVATE xd_network_call xdi_dmd_call(const xd_dmd *d, const xd_dmd_batch *batch, const void *hidden,
                                        const xdi_dmd_times *times);

#endif
