#ifndef XDI_DMD_LOSSES_H
#define XDI_DMD_LOSSES_H

#include "base/internal.h"
#include "dmd/denoise.h"
#include "dmd/gan.h"
#include "dmd/samples.h"
#include "dmd/vsd.h"
#include "kernel/kernels.h"

/* What the losses over samples share. */

/* One call of a loss: its desc's common part, its arguments for the kernels, the exchanged words. */
typedef struct xdi_sample_call {
    xd_ctx *ctx;
    const xd_dmd_loss_kernels *kernels;
    const xd_sample_common *common;
    xd_sample_args *args; /* samples, elements and mask are the caller's */
    bool measured;        /* has sums of elements */
    int64_t *all_sums;
    void *owned;
} xdi_sample_call;

/* samples.c: a matrix of F32, BF16 or F16; SHAPE unless it is [samples, elements]. */
XD_PRIVATE xd_result xdi_sample_check_rows(xd_ctx *ctx, const char *name, const xd_rows *rows,
                                           int64_t samples, int64_t elements);
/* samples.c: a gradient of this shape, or none; over one of the inputs only with its dtype and stride. */
XD_PRIVATE xd_result xdi_sample_check_gradient(xd_ctx *ctx, const char *name, const xd_rows *gradient,
                                               const xd_rows *const *inputs, int count);
/* samples.c: weight, N, status. */
XD_PRIVATE xd_result xdi_sample_check_common(xd_ctx *ctx, const xd_sample_common *common);
/* samples.c: a status on a GPU. */
XD_PRIVATE xd_result xdi_sample_check_status(xd_ctx *ctx, const xd_status *status);

/* samples.c: bytes of workspace; 0 when samples or elements are negative or it does not fit. */
XD_PRIVATE size_t xdi_sample_bytes(xdi_sample_call *call);
/* samples.c: adds this workspace to an open plan. Returns `checked`, or its own error. Local. */
XD_PRIVATE xd_result xdi_sample_plan(xdi_sample_call *call, xd_result checked);
/* samples.c: before the first exchange: memory, arguments, then the agreement of all ranks on `checked`. Collective; when it
 * succeeds, or not, xdi_sample_close ends the call. */
XD_PRIVATE xd_result xdi_sample_open(xdi_sample_call *call, xd_result checked);
/* samples.c: parts -> all_sums. Collective over split. */
XD_PRIVATE xd_result xdi_sample_exchange(const xd_launch *launch, xdi_sample_call *call);

/* samples.c: whether samples can be finished one after the other: they are this rank's alone, N is known, and, unless an element
 * is finished at once, they are small enough for the device and enough for all threads. */
XD_PRIVATE bool xdi_sample_goes_alone(const xdi_sample_call *call, bool at_once);

/* Writes the gradients, when the factor is known. */
typedef xd_result (*xdi_sample_slope)(const xd_launch *launch, const void *args);
/* samples.c: from samples to the value, then the gradients, unless `slope` is NULL, then what status says. Collective over comm. */
XD_PRIVATE xd_result xdi_sample_finish(xdi_sample_call *call, xdi_sample_slope slope, const void *user,
                                       xd_sample_values *out);
XD_PRIVATE void xdi_sample_close(xdi_sample_call *call);

/* vsd.c, denoise.c, gan.c: bytes of workspace; 0 for sizes that are negative or do not fit. No pointer is followed. */
XD_PRIVATE size_t xdi_vsd_workspace(xd_ctx *ctx, const xd_vsd_desc *desc);
XD_PRIVATE size_t xdi_denoise_workspace(xd_ctx *ctx, const xd_denoise_desc *desc);
XD_PRIVATE size_t xdi_gan_workspace(xd_ctx *ctx, const xd_gan_desc *desc);

#endif
