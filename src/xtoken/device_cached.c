/* CACHED on a device. The host reads the cache once a call, for all tiles: J and a of every chunk go to the device in
 * one copy, and its passes run without the host, a tile in some ten launches. */

#include "xtoken/internal.h"

#include <string.h>

static int64_t xdi_staged_list_tiles(const xdi_xtoken *x, const xdi_xtoken_term *term) {
    int64_t tiles = 0;
    for (int64_t b = 0; b < x->d.sequences; b++) tiles += xdi_xtoken_tiles(term, b);
    return tiles;
}

/* ---- memory ---- */

/* Entries that the chunks with a place can have at most. */
static int64_t xdi_staged_cached_room(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                      const xdi_xcached_places *p) {
    const int64_t chunks = term->teacher->chunks;
    int64_t room = 0;
    for (int64_t i = 0; i < x->d.sequences * chunks; i++)
        if (term->place[i] >= 0) room += xdi_xcached_bound(term, p, i);
    return room;
}

/* The lists, and behind them what the host needs to make them. */
static bool xdi_staged_cached_layout_host(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t room,
                                          xdi_xcached_places *p, xdi_staged_cached *h, xd_arena *arena) {
    const int64_t tiles = xdi_staged_list_tiles(x, term), chunks = term->teacher->chunks;
    bool fits = true;
    h->width = (chunks < term->tile ? chunks : term->tile) + 1;
    h->begin = (int64_t *)xdi_arena_array(arena, tiles + 1, sizeof(int64_t), &fits);
    h->offset = (int64_t *)xdi_arena_array(arena, tiles * h->width, sizeof(int64_t), &fits);
    h->target = (double *)xdi_arena_array(arena, room, sizeof(double), &fits);
    h->ids = (int32_t *)xdi_arena_array(arena, room, sizeof(int32_t), &fits);
    h->here = arena->base;
    h->bytes = arena->used;
    xdi_xcached_layout_places(x, term, p, arena, &fits);
    return fits;
}

static bool xdi_staged_cached_layout_device(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                            xdi_staged_cached *h, xd_arena *arena) {
    const int64_t tiles = xdi_staged_list_tiles(x, term);
    int64_t most = 0;
    bool fits = true;
    for (int64_t i = 0; i < tiles; i++)
        if (h->begin[i + 1] - h->begin[i] > most) most = h->begin[i + 1] - h->begin[i];
    h->there = (unsigned char *)xdi_arena_array(arena, (int64_t)h->bytes, 1, &fits);
    h->q = (double *)xdi_arena_array(arena, most, x->fixed ? sizeof(xd_fixed) : sizeof(double), &fits);
    h->settled = (double *)xdi_arena_array(arena, x->fixed ? most : 0, sizeof(double), &fits);
    h->slots = (int32_t *)xdi_arena_array(arena, (h->width - 1) * term->vocabulary, sizeof(int32_t), &fits);
    return fits;
}

XD_PRIVATE void xdi_xtoken_device_cached_close(const xdi_xtoken *x, xdi_xtoken_lists *l) {
    x->device.kernels->memory.release(x->ctx, l->cached.there);
    xd_release(x->ctx, l->cached.here);
    memset(&l->cached, 0, sizeof l->cached);
}

/* ---- lists ---- */

/* J and a of all chunks with a place, tile after tile. */
static void xdi_staged_cached_read(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached_places *p,
                                   xdi_staged_cached *h) {
    int64_t at = 0, index = 0;
    for (int64_t b = 0; b < x->d.sequences; b++)
        for (int64_t i = 0; i < xdi_xtoken_tiles(term, b); i++, index++) {
            const xdi_xtoken_tile tile = xdi_xtoken_tile_at(x, term, b, i);
            const int64_t first = b * term->teacher->chunks, *order = term->order + first + tile.first;
            int64_t *offset = h->offset + index * h->width;
            h->begin[index] = at;
            for (int64_t place = 0; place < tile.count; place++) {
                at += xdi_xcached_target(x, term, p, first + order[place], h->ids + at, h->target + at);
                *++offset = at - h->begin[index]; /* the first of them is 0 */
            }
        }
    h->begin[index] = at;
}

/* Memory of the host, and in it everything that the device is told. Positions are exchanged. */
static xd_result xdi_staged_cached_host(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                        xdi_staged_cached *h) {
    xd_arena arena = xd_arena_over(NULL, 0);
    xd_result result = XD_OK;
    xdi_xcached_places p;
    XD_TRY(xdi_xcached_size_places(x, term, &p));
    const int64_t room = xdi_staged_cached_room(x, term, &p);
    if (xdi_staged_cached_layout_host(x, term, room, &p, h, &arena))
        h->here = (unsigned char *)xd_allocate(x->ctx, arena.peak + 1);
    if (!h->here)
        result = XD_FAIL(x->ctx, XD_ERROR_MEMORY, "no room for %lld cached positions", (long long)p.total);
    XD_TRY(xdi_vocab_agree(x->vocab.tp, x->d.comm, result));
    arena = xd_arena_over(h->here, arena.peak);
    xdi_staged_cached_layout_host(x, term, room, &p, h, &arena);
    XD_TRY(xdi_xcached_find_places(x, term, &p));
    xdi_staged_cached_read(x, term, &p, h);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_device_cached_open(xdi_xtoken *x, const xdi_xtoken_term *term,
                                                   xdi_xtoken_lists *l) {
    const xd_device_ops memory = x->device.kernels->memory;
    xdi_staged_cached *h = &l->cached;
    xd_arena arena = xd_arena_over(NULL, 0);
    xd_result result = XD_OK;
    XD_TRY(xdi_staged_cached_host(x, term, h));
    if (xdi_staged_cached_layout_device(x, term, h, &arena))
        h->there = (unsigned char *)memory.allocate(x->ctx, arena.peak + 1);
    if (!h->there)
        result =
            XD_FAIL(x->ctx, XD_ERROR_MEMORY, "the device has no room for %zu bytes of a cache", arena.peak);
    XD_TRY(xdi_vocab_agree(x->vocab.tp, x->d.comm, result));
    arena = xd_arena_over(h->there, arena.peak);
    xdi_staged_cached_layout_device(x, term, h, &arena);
    return memory.copy(&x->launch, h->there, h->here, h->bytes, XD_COPY_TO_DEVICE);
}

XD_PRIVATE void xdi_xtoken_device_cached_fill(xdi_xtoken *x, const xdi_xtoken_term *term,
                                              xdi_xtoken_lists *l) {
    int64_t index = 0;
    xdi_xtoken_device_rows(x, term, &term->student_rows, l->first, l->rows, l->places);
    for (int64_t b = 0; b < x->d.sequences; b++)
        for (int64_t i = 0; i < xdi_xtoken_tiles(term, b); i++, index++) {
            const xdi_xtoken_tile tile = xdi_xtoken_tile_at(x, term, b, i);
            const int64_t first = b * term->teacher->chunks + tile.first;
            const int64_t *offset = l->cached.offset + index * l->cached.width;
            for (int64_t at = first; at < first + tile.count; at++, offset++)
                l->chunks[at] = xdi_xcached_chunk(x, term, b, term->order[at], offset[0] != offset[1]);
        }
}

/* ---- tiles ---- */

/* The device's address of something in the lists of a cache. */
static const void *xdi_staged_cached_there(const xdi_staged_cached *h, const void *list) {
    return h->there + ((const unsigned char *)list - h->here);
}

/* Tile `index` of all. */
static xd_xtoken_args xdi_staged_cached_args(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                             const xdi_xtoken_lists *l, const xdi_xtoken_tile *tile,
                                             int64_t index) {
    const xdi_staged_cached *h = &l->cached;
    const int64_t at = l->first[index];
    xd_xtoken_args a = xdi_xtoken_device_args(x, l->rows + at, l->places + at, l->first[index + 1] - at);
    a.place_count = tile->count;
    a.offset = (const int64_t *)xdi_staged_cached_there(h, h->offset + index * h->width);
    a.list = (const int32_t *)xdi_staged_cached_there(h, h->ids + h->begin[index]);
    a.k = h->begin[index + 1] - h->begin[index];
    a.student = h->q;
    a.teacher = (double *)xdi_staged_cached_there(h, h->target + h->begin[index]);
    a.chunks = (xd_xtoken_chunk *)xdi_xtoken_there(x, xdi_xtoken_device_chunks(term, l, tile));
    a.vocabulary = term->vocabulary;
    a.reverse = x->d.reverse;
    if (!term->teacher->projection) return a;
    a.matrix.column_begin = l->projection.column_begin;
    a.matrix.column_student = l->projection.student_id;
    a.matrix.column_weight = l->projection.column_weight;
    return a;
}

/* Sums of the tile over all ranks, as doubles. */
static xd_result xdi_staged_cached_sums(const xdi_xtoken *x, const xdi_staged_cached *h, xd_comm *comm,
                                        xd_xtoken_args *a) {
    const size_t cell = x->fixed ? sizeof(xd_fixed) : sizeof(double);
    xd_xtoken_args s = *a;
    s.cells = h->q;
    XD_TRY(x->device.kernels->memory.fill(&x->launch, s.cells, 0, (size_t)a->k * cell));
    XD_TRY(x->kernels.list_project(&x->launch, &s));
    XD_TRY(xdi_xtoken_reduce(x, x->vocab.tp, s.cells, a->k));
    XD_TRY(xdi_xtoken_reduce(x, comm, s.cells, a->k));
    if (!x->fixed) return XD_OK;
    s.count = a->k;
    s.out = a->student = h->settled;
    return x->kernels.settle(&x->launch, &s);
}

/* dz = p (h - delta) / tau, h = M dy and delta = sum_v p_v h_v; delta is summed in units of the largest |dy|, for
 * fixed point. */
static xd_result xdi_staged_cached_gradient(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                            const xdi_xtoken_lists *l, const xd_xtoken_args *tile) {
    const size_t cell = x->fixed ? sizeof(xd_fixed) : sizeof(double);
    xd_xtoken_args a = *tile;
    a.cells = x->student;
    XD_TRY(x->device.kernels->memory.fill(&x->launch, a.cells, 0, (size_t)a.count * cell));
    XD_TRY(x->kernels.list_delta(&x->launch, &a));
    XD_TRY(xdi_xtoken_reduce(x, x->vocab.tp, a.cells, a.count));
    a.out = x->device.delta;
    XD_TRY(x->kernels.row_deltas(&x->launch, &a));
    a.delta = a.out;
    a.slots = l->cached.slots;
    XD_TRY(x->kernels.list_slots(&x->launch, &a));
    a.matrix.places = a.slots;
    if (term->teacher->projection) {
        a.matrix.begin = l->projection.row_begin + x->vocab.begin;
        a.matrix.slot = l->projection.teacher_id;
        a.matrix.weight = l->projection.weight;
    }
    return x->kernels.gradient(&x->launch, &a);
}

XD_PRIVATE xd_result xdi_xtoken_device_cached(xdi_xtoken *x, const xdi_xtoken_term *term,
                                              const xdi_xtoken_lists *l) {
    int64_t index = 0;
    for (int64_t b = 0; b < x->d.sequences; b++)
        for (int64_t i = 0; i < xdi_xtoken_tiles(term, b); i++, index++) {
            const xdi_xtoken_tile tile = xdi_xtoken_tile_at(x, term, b, i);
            xd_xtoken_args a = xdi_staged_cached_args(x, term, l, &tile, index);
            if (a.k > 0) {
                XD_TRY(xdi_staged_cached_sums(x, &l->cached, tile.comm, &a));
                XD_TRY(x->kernels.list_divergence(&x->launch, &a));
            }
            if (x->write) XD_TRY(xdi_staged_cached_gradient(x, term, l, &a));
        }
    return XD_OK;
}
