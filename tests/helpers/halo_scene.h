/* Halos by brute force: every place of a part with halo is looked at alone, by the definition of the boundary. */
#ifndef HALO_SCENE_H
#define HALO_SCENE_H

#include "xd_test_topology.h"

#include <stdlib.h>

enum { HALO_DIMS = 4, HALO_ROOM = 1 << 14, HALO_RANKS = 8, HALO_TERMS = 2048 };

/* One exchange on a grid of ranks, and this rank's part of it. */
typedef struct halo_scene {
    xd_layout_desc cut;
    xd_topology grid;
    xd_halo_desc halo;
    xd_layout *layout;
    int64_t own[HALO_RANKS][HALO_DIMS][2]; /* [begin, end) of each rank */
    int64_t wide[HALO_RANKS][HALO_DIMS][2];
    int ranks;
} halo_scene;

typedef int64_t halo_index[HALO_DIMS];

static uint64_t halo_mix(uint64_t x) {
    x = (x ^ (x >> 31)) * 0x7fb5d329728ea185u;
    x = (x ^ (x >> 27)) * 0x81dadef4bc2dd44du;
    return x ^ (x >> 33);
}

static int halo_draw(uint64_t *state, int below) {
    *state += 0x9e3779b97f4a7c15u;
    return (int)(halo_mix(*state) % (uint64_t)below);
}

/* Element i of an array of a dtype. */
static double halo_get(const void *data, xd_dtype dtype, int64_t i) {
    if (dtype == XD_DTYPE_I32) return ((const int32_t *)data)[i];
    return xd_load_f64(data, dtype, i);
}

static void halo_put(void *data, xd_dtype dtype, int64_t i, double value) {
    if (dtype == XD_DTYPE_I32)
        ((int32_t *)data)[i] = (int32_t)value;
    else
        xd_store_f64(data, dtype, i, value);
}

/* A value that a key has, as it is after rounding to the dtype. */
static double halo_value(uint64_t key, xd_dtype dtype) {
    double slot = 0;
    const double x = (double)(int64_t)(halo_mix(key * 0x2545f4914f6cdd1du + 1) % 2001) - 1000;
    halo_put(&slot, dtype, 0, dtype == XD_DTYPE_I32 ? x : x / 700);
    return halo_get(&slot, dtype, 0);
}

static uint64_t halo_key(const halo_scene *s, uint64_t salt, const int64_t *at) {
    uint64_t key = salt;
    for (int d = 0; d < s->cut.ndim; d++) key = key * 1009 + (uint64_t)(at[d] + 300);
    return key;
}

/* The index that lies at q, by the definition; false for a zero. *zone is the number of the place among images: 0 inside. */
static bool halo_source(const halo_scene *s, const int64_t *q, int64_t *i, int *zone) {
    bool crossed = false;
    *zone = 0;
    for (int d = 0; d < s->cut.ndim; d++) {
        const int64_t n = s->cut.shape[d];
        *zone = *zone * 3 + (q[d] < 0 ? 1 : q[d] >= n ? 2 : 0);
        i[d] = q[d];
        if (q[d] >= 0 && q[d] < n) continue;
        switch (s->halo.boundary[d]) {
        case XD_HALO_ZERO: return false;
        case XD_HALO_PERIODIC: i[d] = ((q[d] % n) + n) % n; break;
        case XD_HALO_REFLECT: i[d] = q[d] < 0 ? -q[d] : 2 * n - 2 - q[d]; break;
        case XD_HALO_POLE:
            i[d] = q[d] < 0 ? -1 - q[d] : 2 * n - 1 - q[d];
            crossed = true;
            break;
        }
    }
    const int lon = (s->halo.longitude + s->cut.ndim) % s->cut.ndim;
    const int64_t m = s->cut.shape[lon];
    if (crossed) i[lon] = (i[lon] - m / 2 + m) % m;
    return true;
}

static int64_t halo_numel(const halo_scene *s, int64_t (*box)[2]) {
    int64_t n = 1;
    for (int d = 0; d < s->cut.ndim; d++) n *= box[d][1] - box[d][0];
    return n;
}

/* Position k of a box as an index. */
static void halo_at(const halo_scene *s, int64_t (*box)[2], int64_t k, int64_t *at) {
    for (int d = s->cut.ndim - 1; d >= 0; d--) {
        const int64_t n = box[d][1] - box[d][0];
        at[d] = box[d][0] + k % n;
        k /= n;
    }
}

/* Whether two ranks exchange: same place on axes that cut nothing. */
static bool halo_pair(const halo_scene *s, int a, int b) {
    int x[XD_MESH_AXES_MAX], y[XD_MESH_AXES_MAX];
    coordinate_of(&s->grid, a, x);
    coordinate_of(&s->grid, b, y);
    for (int i = 0; i < s->grid.axis_count; i++)
        if (s->cut.placement[i].kind != XD_SHARD && x[i] != y[i]) return false;
    return true;
}

/* Fills in what follows from cut, grid and halo. */
static bool halo_open(halo_scene *s, xd_ctx *ctx, int ranks) {
    s->cut.topology = &s->grid;
    s->ranks = ranks;
    if (xd_layout_create(ctx, &s->cut, &s->layout) != XD_OK) return false;
    s->halo.layout = s->layout;
    memset(s->own, 0, sizeof s->own);
    memset(s->wide, 0, sizeof s->wide);
    for (int r = 0; r < ranks; r++) {
        xd_region region;
        bool any = xd_layout_region(s->layout, r, &region);
        for (int d = 0; d < s->cut.ndim; d++) any = any && region.count[d] == 1;
        for (int d = 0; any && d < s->cut.ndim; d++) {
            s->own[r][d][0] = region.interval[d][0].begin;
            s->own[r][d][1] = region.interval[d][0].end;
            s->wide[r][d][0] = s->own[r][d][0] - s->halo.before[d];
            s->wide[r][d][1] = s->own[r][d][1] + s->halo.after[d];
        }
    }
    return true;
}

/* Whether a rank's gradient counts at q when it is COMPLETE. */
static bool halo_speaks(const halo_scene *s, int rank, const int64_t *q) {
    for (int d = 0; d < s->cut.ndim; d++) {
        const int64_t n = s->cut.shape[d], begin = s->own[rank][d][0], end = s->own[rank][d][1];
        if (q[d] < begin && !(q[d] < 0 && begin == 0)) return false;
        if (q[d] >= end && !(q[d] >= n && end == n)) return false;
    }
    return true;
}

/* The gradient of a rank at q. */
static double halo_gradient(const halo_scene *s, int rank, const int64_t *q) {
    const bool complete = s->halo.gradient == XD_HALO_COMPLETE;
    return halo_value(halo_key(s, complete ? 77 : 100 + (uint64_t)rank, q), s->halo.dtype);
}

typedef struct halo_term {
    int zone, rank;
    double value;
} halo_term;

static int halo_term_order(const void *a, const void *b) {
    const halo_term *x = (const halo_term *)a, *y = (const halo_term *)b;
    return x->zone != y->zone ? x->zone - y->zone : x->rank - y->rank;
}

/* All terms of an element of this rank, its own first. */
static int halo_terms(const halo_scene *s, int rank, const int64_t *at, halo_term *terms) {
    int count = 1;
    for (int r = 0; r < s->ranks; r++) {
        const int64_t n = halo_pair(s, rank, r) ? halo_numel(s, (int64_t(*)[2])s->wide[r]) : 0;
        for (int64_t k = 0; k < n; k++) {
            halo_index q, i;
            int zone;
            halo_at(s, (int64_t(*)[2])s->wide[r], k, q);
            if (!halo_source(s, q, i, &zone) || memcmp(i, at, (size_t)s->cut.ndim * sizeof *i)) continue;
            if (s->halo.gradient == XD_HALO_COMPLETE && !halo_speaks(s, r, q)) continue;
            const halo_term term = { zone, r, halo_gradient(s, r, q) };
            if (zone == 0 && r == rank)
                terms[0] = term;
            else if (count < HALO_TERMS)
                terms[count++] = term;
        }
    }
    qsort(terms + 1, (size_t)count - 1, sizeof *terms, halo_term_order);
    return count;
}

static double halo_sum(const halo_term *terms, int count, xd_dtype dtype) {
    double slot = 0, sum = terms[0].value;
    for (int i = 1; i < count; i++) {
        sum += terms[i].value;
        if (dtype != XD_DTYPE_F64) sum = (double)(float)sum;
    }
    halo_put(&slot, dtype, 0, sum);
    return halo_get(&slot, dtype, 0);
}

#endif
