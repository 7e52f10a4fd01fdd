#ifndef XDI_TRAIN_INTERNAL_H
#define XDI_TRAIN_INTERNAL_H

#include "base/internal.h"
#include "kernel/kernels.h"
#include "train/ema.h"
#include "train/optimizer.h"
#include "train/param.h"

/* param.c: true when some operation of this step found bad data, so that the step must not happen.
 * NULL is fine. On a device the host does not read it: always false, and the kernels read the status of the
 * launch below. */
XD_PRIVATE bool xdi_train_refused(const xd_ctx *ctx, const xd_status *status);

/* param.c: a launch without workspace, of a step that a finding in `status` prevents; NULL -> always step. */
XD_PRIVATE xd_launch xdi_train_launch(xd_ctx *ctx, const xd_status *status);

/* param.c: whether the tensors of a context are on a device. */
XD_PRIVATE bool xdi_train_on_device(const xd_ctx *ctx);

/* param.c: `bytes` and those of the device's list of `arrays` arrays, where it has one. */
XD_PRIVATE xd_memory_bytes xdi_train_with_list(const xd_ctx *ctx, xd_memory_bytes bytes, int64_t arrays);

/* param.c: a parameter's gradient dtype with its default filled in. */
XD_PRIVATE xd_dtype xdi_train_gradient_dtype(const xd_param *param);

/* param.c: true for parameters that have an optimizer's state: neither frozen nor a buffer; and for those of them that
 * a step changes, which have a gradient. */
XD_PRIVATE bool xdi_train_owns(const xd_param *param);
XD_PRIVATE bool xdi_train_steps(const xd_param *param);

/* param.c: whether a parameter has a gradient in this step. And STATE, naming the call that is missing, where one of a list waits
 * for its sum over the ranks. */
XD_PRIVATE bool xdi_train_has_gradient(const xd_param *param);
XD_PRIVATE xd_result xdi_train_check_summed(xd_ctx *ctx, const xd_param *params, int64_t count,
                                            const char *call);

/* param.c: the first field of a list's entry that differs from the one at creation, with both values, for a message. */
enum { XDI_CHANGED = 100 };
XD_PRIVATE const char *xdi_train_changed(const xd_param *then, const xd_param *now, char text[XDI_CHANGED]);

/* optimizer.c: the state of parameter `index` of the list; of one that is frozen the memory that is set aside for it, or NULL. */
XD_PRIVATE xd_optimizer_state xdi_optimizer_thawed_at(xd_optimizer *optimizer, int64_t index);

/* ema.c: true when the next update averages (it neither copies nor does nothing) and the average was created over
 * this very list, so that a step over its `count` entries can update it in the same pass. */
XD_PRIVATE bool xdi_ema_joins(const xd_ema *ema, const xd_param *list, int64_t count);

/* ema.c: makes it the average of the arrays of a step, if it has a format of the lerp entry; false otherwise. */
XD_PRIVATE bool xdi_ema_join_arrays(const xd_ema *ema, xd_update_args *args);

/* ema.c: makes it an average beside those, of any format; false when the list has more entries than it follows. */
XD_PRIVATE bool xdi_ema_join_beside(const xd_ema *ema, int64_t count, xd_average_args *args);

/* ema.c: the error that xd_ema_update would return for a changed list, or an exchanged one. */
XD_PRIVATE xd_result xdi_ema_unchanged(const xd_ema *ema);

/* ema.c: ARGUMENT when the last iteration was INT64_MAX. */
XD_PRIVATE xd_result xdi_ema_has_next(const xd_ema *ema);

/* ema.c: makes the update of parameter `index` of the list, array k of the step, update its shadow too, if possible. The
 * update after the step then skips this shadow. */
XD_PRIVATE void xdi_ema_join(const xd_ema *ema, int64_t index, xd_update_array *update);
XD_PRIVATE void xdi_ema_join_move(const xd_ema *ema, int64_t index, int64_t k);

/* ema.c: whether the last step that an average joined was one of this optimizer. */
XD_PRIVATE bool xdi_ema_joined_last(const xd_ema *ema, const xd_optimizer *optimizer);

/* ema.c: the same. From now on it is. */
XD_PRIVATE bool xdi_ema_joins_again(xd_ema *ema, const xd_optimizer *optimizer);

/* ema.c: begins the update of an average that has joined a step, before the step. On a device *turn is what the step reads of
 * it, where the host cannot know whether its counters advance; else NULL. */
XD_PRIVATE xd_result xdi_ema_begin(xd_ema *ema, const xd_status *status, const xd_average_turn **turn);

/* ema.c: the rest of xd_ema_update(ema, XD_EMA_NEXT, status), without the shadows that have joined the step. `same`: they are those
 * of the last step that it joined. */
XD_PRIVATE xd_result xdi_ema_follow(xd_ema *ema, bool same, const xd_status *status);

/* ema_state.c: entries of the list that an average follows, and the shadow that one of them has, tied ones the same. */
XD_PRIVATE int64_t xdi_ema_entries(const xd_ema *ema);
XD_PRIVATE xd_param xdi_ema_entry(const xd_ema *ema, int64_t index);

/* ema_state.c: the compensation of that shadow, of no dtype where the format has none. */
XD_PRIVATE xd_param xdi_ema_entry_compensation(const xd_ema *ema, int64_t index);

/* ema.c: the error of what cannot work while shadows and values are exchanged. */
XD_PRIVATE xd_result xdi_ema_in_place(const xd_ema *ema);

/* ema_state.c: sets the counters, when the shadows have been filled otherwise. */
XD_PRIVATE void xdi_ema_restore(xd_ema *ema, int64_t iteration, bool initialized);

/* post_hoc.c: the exponent of an average's relative width. ARGUMENT outside (0, 1 / sqrt(12)]. */
XD_PRIVATE xd_result xdi_post_hoc_gamma(xd_ctx *ctx, double sigma_rel, double *gamma);

/* param.c: true for the dtypes of parameters and gradients: F32, BF16, F16. */
XD_PRIVATE bool xdi_train_takes(xd_dtype dtype);

/* optimizer.c, ema.c: what a create takes. Errors: as the create, without MEMORY and those of names. */
XD_PRIVATE xd_result xdi_optimizer_bytes(xd_ctx *ctx, const xd_optimizer_desc *desc, xd_memory_bytes *out);
XD_PRIVATE xd_result xdi_ema_bytes(xd_ctx *ctx, const xd_ema_desc *desc, xd_memory_bytes *out);

#endif
