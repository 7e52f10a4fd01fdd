/* Topologies that are written by hand, as programs do for layouts without a mesh. */
#ifndef XD_TEST_TOPOLOGY_H
#define XD_TEST_TOPOLOGY_H

#include "xdistill.h"

#include <stdio.h>
#include <string.h>

/* The axes over ranks, or with NULL over 0, 1, ... */
static inline xd_topology grid_of(const xd_axis *axes, int axis_count, const int *ranks) {
    xd_topology t;
    memset(&t, 0, sizeof t);
    t.axis_count = axis_count;
    t.rank_count = 1;
    t.ranks = ranks;
    for (int i = 0; i < axis_count; i++) {
        t.size[i] = axes[i].size;
        t.rank_count *= axes[i].size;
        if (axes[i].name) snprintf(t.name[i], sizeof t.name[i], "%s", axes[i].name);
    }
    return t;
}

static inline xd_topology line_of(const char *name, int ranks) {
    const xd_axis axis = { name, ranks };
    return grid_of(&axis, 1, NULL);
}

/* The coordinate of a rank; false for one that is not in it. */
static inline bool coordinate_of(const xd_topology *t, int rank, int *coordinate) {
    int place = 0;
    while (place < t->rank_count && (t->ranks ? t->ranks[place] : place) != rank) place++;
    if (place == t->rank_count) return false;
    for (int i = t->axis_count - 1; i >= 0; place /= t->size[i--]) coordinate[i] = place % t->size[i];
    return true;
}

#endif
