#ifndef XDI_DMD_SAMPLER_H
#define XDI_DMD_SAMPLER_H

#include "dmd/dmd.h"

/* Samplers, from sigma(list[0]) noise. ODE and SDE noise the predicted clean sample to the next time. EULER and HEUN follow
 * dx/dt = alpha' x0 + sigma' eps and need rates (not VP). */
typedef enum xd_sampler_kind {
    XD_SAMPLER_ODE = 0, /* with the predicted noise */
    XD_SAMPLER_SDE,     /* with new noise */
    XD_SAMPLER_EULER,   /* one forward a step */
    XD_SAMPLER_HEUN     /* two, but one to t = 0 */
} xd_sampler_kind;

/* Settings; pointers are borrowed until xd_sampler_destroy. */
typedef struct xd_sampler_desc {
    xd_network network; /* guidance.on must be false; guidance.rescale needs `guided` */
    xd_noise_schedule schedule;
    bool v_is_flow;         /* as in xd_conversion */
    double network_scale;   /* as in xd_dmd_desc */
    xd_dtype network_dtype; /* as in xd_dmd_desc */
    xd_dtype list_dtype;    /* F32: `list` is rounded, still descending; NONE -> as it is */
    xd_sampler_kind kind;
    int steps;          /* >= 1 */
    const double *list; /* [steps + 1] descending, the last 0, as of xd_noise_steps */
    bool guided;        /* away from the negative condition */
    double guidance_scale;
    int64_t samples;        /* maximum of a call */
    int64_t elements;       /* of a sample on this rank */
    int64_t first_element;  /* this rank's first in the sample */
    xd_dtype dtype;         /* of samples: F32, BF16, F16 */
    uint64_t seed;          /* of noise, as of xd_dmd's student in `step` */
    int64_t step;           /* 0 to 2^32 - 1 */
    int64_t whole_elements; /* for guidance.rescale; 0 -> elements */
    xd_comm *split;         /* ranks with the other elements, for guidance.rescale; NULL -> none */
} xd_sampler_desc;

/* Returns ODE, F32, guidance scale 1 and zeros; networks get times in f32. Pure. */
XD_API xd_sampler_desc xd_sampler_defaults(void);

/* Returns the settings of a distillation's student, without guidance and `split`. Pure. */
XD_API xd_sampler_desc xd_sampler_of_student(const xd_dmd_desc *desc);

/* A sampler. */
typedef struct xd_sampler xd_sampler;

/* Checks the settings and allocates all memory. Collective over `split` if given, local otherwise. Errors: ARGUMENT (forward,
 * steps, samples, list, rates, guidance, elements), DTYPE, MISMATCH, MEMORY; those of xd_prediction_mix. */
XD_API xd_result xd_sampler_create(xd_ctx *ctx, const xd_sampler_desc *desc, xd_sampler **out);

/* Destroys a sampler; NULL is fine. Local. */
XD_API void xd_sampler_destroy(xd_sampler *sampler);

/* Writes samples `first` to `first + samples - 1` to out [samples, elements] in device memory. Draws the
 * noise of the student in xd_dmd (XD_STREAM_STUDENT_NOISE) if batch->noise is NULL. Does not read batch->real.
 *
 * Collective over `split` with rescale, and as the network's calls are; a rank without samples passes 0. Allocates nothing;
 * waits for a GPU with rescale. Deterministic. Errors, `out` undefined: ARGUMENT (samples, arrays), those of the network. */
XD_API xd_result xd_sampler_run(xd_sampler *sampler, const xd_dmd_batch *batch, void *out);

#endif
