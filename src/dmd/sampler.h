#ifndef XDI_DMD_SAMPLER_H
#define XDI_DMD_SAMPLER_H

#include "dmd/dmd.h"

/* Samplers: docs/diffusion.md. EULER and HEUN need rates (not VP). */
typedef enum xd_sampler_kind {
    XD_SAMPLER_ODE = 0, /* predicted noise */
    XD_SAMPLER_SDE,     /* new noise */
    XD_SAMPLER_EULER,   /* one forward a step */
    XD_SAMPLER_HEUN     /* two, but one to t = 0 */
} xd_sampler_kind;

/* Settings. Pointers are borrowed until xd_sampler_destroy. */
typedef struct xd_sampler_desc {
    xd_network network; /* guidance.on: false; guidance.rescale: with `guided` */
    xd_noise_schedule schedule;
    bool v_is_flow; /* of xd_conversion */
    /* As in xd_dmd_desc. */
    double network_scale;
    xd_dtype network_dtype;
    xd_dtype list_dtype; /* F32: rounded, still descending; NONE -> not rounded */
    xd_sampler_kind kind;
    int steps;          /* >= 1 */
    const double *list; /* [steps + 1] descending, last 0 */
    bool guided;        /* away from the negative condition */
    double guidance_scale;
    int64_t samples;        /* maximum of a call */
    int64_t elements;       /* of a sample on this rank */
    int64_t first_element;  /* this rank's first */
    xd_dtype dtype;         /* of samples: F32, BF16, F16 */
    uint64_t seed;          /* of noise */
    int64_t step;           /* 0 to 2^32 - 1 */
    int64_t whole_elements; /* 0 -> elements */
    xd_comm *split;         /* ranks with the other elements, for rescale; NULL -> none */
} xd_sampler_desc;

/* Returns ODE, F32, guidance scale 1, network_dtype F32, zeros. Pure. */
XD_API xd_sampler_desc xd_sampler_defaults(void);

/* Returns the student's settings, without guidance and `split`. Pure. */
XD_API xd_sampler_desc xd_sampler_of_student(const xd_dmd_desc *desc);

/* A sampler. */
typedef struct xd_sampler xd_sampler;

/* Checks the settings and allocates all memory. Collective over `split` if given, else local. Errors: ARGUMENT
 * (forward, steps, samples, list, rates, guidance, elements), DTYPE, MISMATCH, MEMORY; those of xd_prediction_mix. */
XD_API xd_result xd_sampler_create(xd_ctx *ctx, const xd_sampler_desc *desc, xd_sampler **out);

/* Destroys it. Local. */
XD_API void xd_sampler_destroy(xd_sampler *sampler);

/* Writes samples from batch->first on to out [samples, elements], device memory. batch->noise NULL -> drawn
 * from XD_STREAM_STUDENT_NOISE; batch->real is not read. Collective over `split` with rescale, and as the network's
 * calls; samples may be 0. Allocates nothing; waits for a GPU with rescale. Deterministic. Errors, `out` undefined:
 * ARGUMENT (samples, arrays), those of the network. */
XD_API xd_result xd_sampler_run(xd_sampler *sampler, const xd_dmd_batch *batch, void *out);

#endif
