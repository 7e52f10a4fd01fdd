#ifndef XDI_TRAIN_INTERNAL_H
#define XDI_TRAIN_INTERNAL_H

#include "base/internal.h"
#include "kernel/kernels.h"
#include "train/param.h"

/* optimizer.c: true when some operation of this step found bad data, so that the step must not happen. NULL
 * is fine. */
XD_PRIVATE bool xdi_train_refused(const xd_status *status);

/* optimizer.c: a launch on the CPU without workspace. */
XD_PRIVATE xd_launch xdi_train_launch(xd_ctx *ctx);

/* optimizer.c: a parameter's gradient dtype with its default filled in. */
XD_PRIVATE xd_dtype xdi_train_gradient_dtype(const xd_param *param);

/* optimizer.c: true for the dtypes of parameters and gradients: F32, BF16, F16. */
XD_PRIVATE bool xdi_train_takes(xd_dtype dtype);

#endif
