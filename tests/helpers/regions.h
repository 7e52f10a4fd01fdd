/* regions.h - regions in tests: the whole of a shape, and how much a region holds. */
#ifndef REGIONS_H
#define REGIONS_H

#include "xdistill.h"

#include <string.h>

static inline xd_region region_whole(int ndim, const int64_t *shape) {
    xd_region region;
    memset(&region, 0, sizeof region);
    region.ndim = ndim;
    for (int d = 0; d < ndim; d++) {
        region.count[d] = shape[d] > 0;
        region.interval[d][0].end = shape[d];
    }
    return region;
}

/* Indices of a dimension. */
static inline int64_t region_extent(const xd_region *region, int d) {
    int64_t extent = 0;
    for (int i = 0; i < region->count[d]; i++)
        extent += region->interval[d][i].end - region->interval[d][i].begin;
    return extent;
}

static inline int64_t region_numel(const xd_region *region) {
    int64_t numel = 1;
    for (int d = 0; d < region->ndim; d++) numel *= region_extent(region, d);
    return numel;
}

#endif
