#ifndef XDI_DMD_INTERNAL_H
#define XDI_DMD_INTERNAL_H

#include "base/fail.h"
#include "base/half.h"
#include "dmd/convert.h"
#include "dmd/times.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"

/* noise_schedule.c: the schedule's lower bound on divisors; a divisor with it. */
XD_PRIVATE double xdi_noise_least(const xd_noise_schedule *schedule);
XD_PRIVATE double xdi_noise_divisor(const xd_noise_schedule *schedule, double divisor);

/* noise_schedule.c: xd_noise_check without a look at the table's values. */
XD_PRIVATE xd_result xdi_noise_check(xd_ctx *ctx, const xd_noise_schedule *schedule);

/* noise_schedule.c: times descend from at most max_t to 0, at least two of them. */
XD_PRIVATE xd_result xdi_noise_check_list(xd_ctx *ctx, const double *list, int64_t count, double max_t);

/* noise_schedule.c: ARGUMENT where neighbours of a list that descends are one time when they are rounded to f32. */
XD_PRIVATE xd_result xdi_noise_check_list_f32(xd_ctx *ctx, const double *list, int64_t count);

/* noise_schedule.c: number i of `count` >= 2 even steps from a to b; both ends are exact. */
XD_PRIVATE double xdi_even_step(double a, double b, int64_t count, int64_t i);

/* noise_schedule.c: the time of step `index` of `count`: index / count, or as little above that as makes trunc(t count) the index
 * again. */
XD_PRIVATE double xdi_step_time(int64_t count, int64_t index, bool f32);

/* noise_schedule.c: time `index` of EDM's grid. */
XD_PRIVATE double xdi_edm_time(double min_t, double max_t, int64_t count, int64_t index);

/* convert.c: a matrix of floating elements with the shape of `out`. Sets a stride of 0 to the number of columns. */
XD_PRIVATE xd_result xdi_mix_check_rows(xd_ctx *ctx, const xd_rows *out, const char *name, xd_rows *x);

#endif
