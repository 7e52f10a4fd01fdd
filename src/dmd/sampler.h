#ifndef XDI_DMD_SAMPLER_H
#define XDI_DMD_SAMPLER_H

#include "dmd/dmd.h"

/* Samples from noise, with a network of few or of many steps. x starts as sigma(list[0]) noise. */
typedef enum xd_sampler_kind {
    /* A student's: at each time the clean sample is read off the prediction, and noised to the next time; schedules of any kind: */
    XD_SAMPLER_ODE = 0, /* with the noise that the prediction implies */
    XD_SAMPLER_SDE,     /* with new noise */
    /* Along dx/dt = alpha' x0 + sigma' eps, for schedules with rates (not VP): */
    XD_SAMPLER_EULER, /* one forward a step */
    XD_SAMPLER_HEUN   /* two, of the mean slope; but one in a step to t = 0, where a slope need not exist */
} xd_sampler_kind;

/* Settings. What pointers lead to is borrowed until xd_sampler_destroy. Start from xd_sampler_defaults, or from
 * xd_sampler_of_student. */
typedef struct xd_sampler_desc {
    /* Its forward is called without `keep`; of its guidance `rescale` alone is read, with `guided`. */
    xd_network network;
    xd_noise_schedule schedule;
    bool v_is_flow;         /* as in xd_conversion */
    double network_scale;   /* as in xd_dmd_desc */
    xd_dtype network_dtype; /* as in xd_dmd_desc */
    xd_dtype list_dtype;    /* F32: times of the list are rounded, and still descend; NONE -> as they are */
    xd_sampler_kind kind;
    int steps; /* >= 1 */
    /* [steps + 1] descending, the last 0: xd_noise_steps, or xd_noise_grid_time backwards. */
    const double *list;
    bool guided; /* away from the negative condition, with this scale (xd_guidance_mix) */
    double guidance_scale;
    int64_t samples;       /* most of a call */
    int64_t elements;      /* of a sample on this rank */
    int64_t first_element; /* in the whole sample, of this rank's */
    xd_dtype dtype;        /* of samples: F32, BF16, F16 */
    /* Of drawn noise, with `step` and the sample's number: that of xd_dmd's student in that step. */
    uint64_t seed;
    int64_t step;           /* 0 to 2^32 - 1 */
    int64_t whole_elements; /* of a whole sample, for network.guidance.rescale; 0 -> elements */
    /* Ranks that hold the other elements of the same samples, whose deviations rescaled guidance needs; NULL -> there are none. */
    xd_comm *split;
} xd_sampler_desc;

/* ODE, F32, guidance scale 1, everything else zero; times as networks see them in f32. Pure. */
XD_API xd_sampler_desc xd_sampler_defaults(void);

/* The sampler of a distillation's student: network, schedule, rungs and their noise, times, sizes and seed. Not guided, and
 * so without `split`, which the caller may add. Pure. */
XD_API xd_sampler_desc xd_sampler_of_student(const xd_dmd_desc *desc);

/* A network with its settings and memory. */
typedef struct xd_sampler xd_sampler;

/* Checks everything and takes all memory. Collective over `split` where it is given: the settings are compared; local
 * otherwise. Errors, nothing kept, with `split` on the rank that has one and PEER on the others: ARGUMENT (a network without
 * forward, steps, samples, a list that does not descend or has times outside the schedule's range, EULER or HEUN under a
 * schedule without rates, a rescale outside [0, 1] or without guidance, elements beyond the whole sample, with the number or
 * name), DTYPE, MISMATCH, MEMORY; those of xd_noise_check, xd_prediction_check and xd_noise_steps_check. */
XD_API xd_result xd_sampler_create(xd_ctx *ctx, const xd_sampler_desc *desc, xd_sampler **out);

/* What xd_sampler_create takes. Local, allocates nothing. Errors: those of it that one rank can see, but MEMORY. */
XD_API xd_result xd_sampler_bytes(xd_ctx *ctx, const xd_sampler_desc *desc, xd_memory_bytes *out);

/* NULL is fine. Local. */
XD_API void xd_sampler_destroy(xd_sampler *sampler);

/* out [samples, elements] = samples number `first` to `first + samples - 1`, in memory of the device. batch->noise NULL -> drawn
 * (xd_sampler_noise); batch->real is not read. For the student's list, kind and noise the network is called with the bits of
 * xd_dmd's roll-out (XD_DMD_RUNGS_IN_TURN), and a sample is the x that its last rung trains on. Guidance is xd_dmd's of the
 * teacher: with rescale among clean samples, as xd_guidance says, whatever the network predicts, and back to what it
 * predicts. In INVARIANT mode a split sample has the bits of a whole one then, as it has without.
 *
 * Collective over `split` with rescale, and over what the network's own calls are collective over; the number of those calls
 * depends on desc alone, so ranks without samples say samples = 0. Allocates nothing; with rescale it waits for a GPU.
 * Deterministic: a sample depends on its number, not on the batch, where the network's does not. Errors, with `out` undefined
 * once the network was called: ARGUMENT (samples, missing arrays), those of the network. What is not finite goes through. */
XD_API xd_result xd_sampler_run(xd_sampler *sampler, const xd_dmd_batch *batch, void *out);

/* out [samples, elements] = pure noise of samples `first` to `first + samples - 1`, before it is multiplied by sigma: that of
 * xd_dmd's student (XD_STREAM_STUDENT_NOISE), by seed, step and number. Fields of batch but `samples` and `first` are not
 * read. Local.
 * Errors: ARGUMENT (samples). */
XD_API xd_result xd_sampler_noise(xd_sampler *sampler, const xd_dmd_batch *batch, void *out);

#endif
