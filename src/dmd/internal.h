#ifndef XDI_DMD_INTERNAL_H
#define XDI_DMD_INTERNAL_H

#include "base/fail.h"
#include "dmd/convert.h"
#include "dmd/times.h"
#include "kernel/internal.h"

/* noise_schedule.c: the schedule's lower bound on divisors; a divisor with it. */
XD_PRIVATE double xdi_noise_least(const xd_noise_schedule *schedule);
XD_PRIVATE double xdi_noise_divisor(const xd_noise_schedule *schedule, double divisor);

/* noise_schedule.c: number i of `count` >= 2 even steps from a to b; both ends are exact. */
XD_PRIVATE double xdi_even_step(double a, double b, int64_t count, int64_t i);

/* noise_schedule.c: time `index` of EDM's grid. */
XD_PRIVATE double xdi_edm_time(double min_t, double max_t, int64_t count, int64_t index);

#endif
