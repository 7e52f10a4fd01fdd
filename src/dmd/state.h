#ifndef XDI_DMD_STATE_H
#define XDI_DMD_STATE_H

#include "dmd/denoise.h"
#include "dmd/dmd.h"
#include "base/fail.h"
#include "base/internal.h"
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

/* A row of the table of values. A rank's own row has number -1 and the count of its findings. */
enum {
    XDI_DMD_NUMBER = 0,
    XDI_DMD_VSD,
    XDI_DMD_GENERATOR,
    XDI_DMD_FAKE_SCORE,
    XDI_DMD_DISCRIMINATOR,
    XDI_DMD_R1,
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

struct xd_dmd {
    xd_ctx *ctx;
    xd_dmd_desc desc;
    int64_t leaves; /* for which samples are kept */
    /* On the device. */
    void *memory;
    void *tensors[XDI_DMD_TENSORS];
    void *kept;             /* [leaves] of GENERATED */
    float *slope;           /* by x */
    float *hidden_slope;    /* by x_t */
    float *raw_slope;       /* by a network's prediction */
    float *normals;         /* drawn numbers on their way to another dtype */
    float **feature_slopes; /* [feature_count] */
    float *penalty;         /* [samples, heads] R1's gradient by the logits of real samples */
    xd_mix *mixes;
    xd_denoise_term *terms;
    xd_gradient_norm *norms; /* [XD_DMD_ROLES] */
    xd_status *status;
    xd_sample_values *value;
    void *workspace;
    size_t workspace_bytes;
    xdi_dmd_features features[XDI_DMD_SLOTS];
    /* On the host. */
    float *host_normals; /* NULL where the device is the host */
    xd_mix *host_mixes;
    xd_denoise_term *host_terms;
    double *draws;
    int64_t *rung;
    xdi_dmd_times input, noised, real;
    int64_t *kept_samples; /* [leaves] -1: none */
    double *
        table; /* [ranks + 1][leaves + 1][XDI_DMD_COLUMNS] values by leaf, and one row of a rank itself; what is sent last */
    int64_t *counts;     /* [ranks] of xd_all_gather */
    int64_t beyond;      /* a leaf beyond this rank's own that is gone through for others; -1: none */
    int64_t noised_leaf; /* whose x_t is in NOISED since the fake score's term; -1: nobody's */
    xd_dmd_record record;
};

/* dmd.c: whether there is a discriminator; elements of a whole sample. */
XD_PRIVATE bool xdi_dmd_adversarial(const xd_dmd_desc *desc);
XD_PRIVATE int64_t xdi_dmd_whole(const xd_dmd_sizes *sizes);

/* tensors.c: one of the arrays as rows. */
XD_PRIVATE xd_rows xdi_dmd_rows(const xd_dmd *d, const void *data, int64_t samples);
XD_PRIVATE xd_rows xdi_dmd_slopes(const xd_dmd *d, const float *data, int64_t samples);

/* tensors.c: out = c0 p + c1 q with the factors in host_mixes. */
XD_PRIVATE xd_result xdi_dmd_mix(xd_dmd *d, xd_rows p, xd_rows q, xd_rows out);

/* tensors.c: to memory of the device, at once. */
XD_PRIVATE xd_result xdi_dmd_send(xd_dmd *d, void *to, const void *from, size_t bytes);

/* tensors.c: normals of a stream into an array; times of a sampler. `role` keeps the draws of a step's two phases apart. */
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

/* input.c: x_t = alpha x + sigma eps at these times. */
XD_PRIVATE xd_result xdi_dmd_add_noise(xd_dmd *d, const xdi_dmd_times *times, xd_rows clean, xd_rows noise,
                                       xd_rows out);

/* input.c: a network's prediction at x_t converted to another type. */
typedef struct xdi_dmd_reading {
    xd_dmd_role role;
    xd_prediction to;
    const xdi_dmd_times *times;
    const void *hidden;
} xdi_dmd_reading;
XD_PRIVATE xd_result xdi_dmd_read(xd_dmd *d, xdi_dmd_reading reading, int64_t samples, void *out);

/* input.c: the student's input and its times; GENERATED from a forward of it, kept for a backward or not. */
XD_PRIVATE xd_result xdi_dmd_input(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch);
XD_PRIVATE xd_result xdi_dmd_generate(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch, bool keep);

/* input.c: time and noise of x for a phase, and x_t. */
XD_PRIVATE xd_result xdi_dmd_noise(xd_dmd *d, xd_dmd_role phase, const xd_dmd_batch *batch);

/* input.c: a forward or backward of a role's network; nothing beyond this rank's leaves, unless others wait for it. */
XD_PRIVATE xd_result xdi_dmd_forward(xd_dmd *d, xd_dmd_role role, const xd_network_call *call);
XD_PRIVATE xd_result xdi_dmd_backward(xd_dmd *d, xd_dmd_role role, const xd_network_call *call);

/* adversary.c: the generator's term: logits of the teacher's features in slot FAKE, and its gradient by x, added to `slope`. */
XD_PRIVATE xd_result xdi_dmd_generator(xd_dmd *d, const xd_dmd_batch *batch, double *value);

/* leaf.c: what each loss gets besides its tensors, which have so many numbers to a sample; adds the value of the last loss. */
XD_PRIVATE xd_sample_common xdi_dmd_common(const xd_dmd *d, int64_t numbers);
XD_PRIVATE xd_result xdi_dmd_add_value(xd_dmd *d, double *value);

/* leaf.c: a leaf and its batch fit. */
XD_PRIVATE xd_result xdi_dmd_check_batch(const xd_dmd *d, int64_t leaf, const xd_dmd_batch *batch);

/* leaf.c: GENERATED into what is kept of a leaf, or from it. */
XD_PRIVATE xd_result xdi_dmd_copy_kept(xd_dmd *d, int64_t leaf, int64_t samples, bool keep);

/* leaf.c: x of a leaf in GENERATED for a phase that does not train the student; and a call of the teacher or fake score at
 * times, with what it wants filled in by the caller. */
XD_PRIVATE xd_result xdi_dmd_fetch(xd_dmd *d, xd_dmd_role phase, int64_t leaf, const xd_dmd_batch *batch);
XD_PRIVATE xd_network_call xdi_dmd_call(const xd_dmd *d, const xd_dmd_batch *batch, const void *hidden,
                                        const xdi_dmd_times *times);

#endif
