/* Noise schedules: levels, ratios, grids, lists of steps. */

#include "dmd/internal.h"
