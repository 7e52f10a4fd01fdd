/* tensor_model.h - the plain model that layouts and plans are compared with: arrays of indices, one entry per element. */
#ifndef TENSOR_MODEL_H
#define TENSOR_MODEL_H

#include "xd_test_topology.h"

#include <stdlib.h>

enum { MODEL_EXTENT = 64, MODEL_NUMEL = 4096 };

/* A small generator, so that every run has the same cases. */
static inline int model_draw(uint64_t *state, int below) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (int)((*state >> 33) % (uint64_t)below);
}

/* Reduces `list` to what a coordinate of one axis gets; returns the new length. Written from the rule, not from the code. */
static inline int model_split(int *list, int n, const xd_placement *p, int size, int coordinate) {
    int kept[MODEL_EXTENT], count = 0;
    for (int i = 0; i < n; i++) {
        int owner;
        if (p->offsets) {
            owner = 0;
            while (i >= p->offsets[owner + 1]) owner++;
        } else if (p->balanced) {
            const int piece = i / (n / (2 * size));
            owner = piece < size ? piece : 2 * size - 1 - piece;
        } else {
            int begin = 0, section = 0, length;
            for (;; section++, begin += length) {
                length = p->section_sizes ? (int)p->section_sizes[section]
                         : p->sections    ? n / p->sections
                                          : n;
                if (i < begin + length) break;
            }
            owner = (i - begin) / ((length + size - 1) / size);
        }
        if (owner == coordinate) kept[count++] = list[i];
    }
    memcpy(list, kept, (size_t)count * sizeof *list);
    return count;
}

/* Global row-major numbers of what a rank holds, in the order of its memory. Returns how many; -1 for a rank outside the
 * mesh. */
static inline int model_held(const xd_layout_desc *d, int rank, int *held) {
    int list[XD_DIMS_MAX][MODEL_EXTENT], n[XD_DIMS_MAX], c[XD_MESH_AXES_MAX], count = 1;
    if (!coordinate_of(d->topology, rank, c)) return -1;
    for (int k = 0; k < d->ndim; k++) {
        n[k] = (int)d->shape[k];
        for (int i = 0; i < n[k]; i++) list[k][i] = i;
    }
    for (int i = 0; i < d->topology->axis_count; i++) {
        const int axis = d->order[i];
        const xd_placement *p = &d->placement[axis];
        if (p->kind == XD_SHARD)
            n[p->dim] = model_split(list[p->dim], n[p->dim], p, d->topology->size[axis], c[axis]);
    }
    for (int k = 0; k < d->ndim; k++) count *= n[k];
    for (int i = 0; i < count; i++) {
        int rest = i, at[XD_DIMS_MAX], number = 0;
        for (int k = d->ndim - 1; k >= 0; k--) {
            at[k] = list[k][rest % n[k]];
            rest /= n[k];
        }
        for (int k = 0; k < d->ndim; k++) number = number * (int)d->shape[k] + at[k];
        held[i] = number;
    }
    return count;
}

#endif
