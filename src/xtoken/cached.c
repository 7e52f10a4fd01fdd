/* CACHED: from a file of a teacher's most probable tokens. The host reads J and a of several tiles
 * and copies them to the device at once: on a GPU all tiles once a call, on a CPU as many as stay in the processor's
 * caches. */

#include "align/project.h"
#include "teacher/internal.h"
#include "xtoken/internal.h"

#include <math.h>
#include <string.h>

/* Entries that a CPU holds at once, unless a single tile has more; and the maximum number of words of a tile's maps from
 * teacher ids to lists. */
enum { XDI_XCACHED_ROOM = 16384, XDI_XCACHED_MAPS = 1 << 22 };

/* Cache positions of all chunks, the same on every rank that shares the sequences. */
typedef struct xdi_xcached_places {
    int64_t k, most, total;  /* ids a position, teacher rows of a rank, those with a chunk on all ranks */
    int64_t *mine, *all;     /* [2 most] and those of all ranks: chunk and place in the cache of each row */
    int64_t *begin, *filled; /* [B C + 1] where a chunk's places begin; [B C] how many are there, first 0 */
    int64_t *places;         /* [total] ascending within a chunk */
    double *mass;            /* [V_t] zero between uses */
    int32_t *ids;            /* [k] of one position, and their probabilities */
    double *probabilities;
} xdi_xcached_places;

/* Allocated in the call, because only then the size of the cache is known. */
typedef struct xdi_xcached {
    xdi_xcached_places in;
    xd_projection projection, copied; /* in memory of the device; what to free of it */
    int64_t tiles, room;              /* of the teacher; entries at once */
    int64_t first, end;               /* tiles that are loaded */
    int64_t width;                    /* tiles have so many offsets */
    int64_t *begin;                   /* [tiles + 1] where the entries of a loaded tile begin */
    int64_t *offset;                  /* [tiles, width] where, within a tile, those of its chunks begin */
    double *target;                   /* [room] a */
    int32_t *ids;                     /* [room] J of one chunk after the other */
    double *q; /* the device's: room and cells of the largest tile; as doubles, and after the chunk d loss /
                * d y */
    int64_t settle_room;
    void *scratch;               /* the device's: of list_gradient */
    unsigned char *here, *there; /* the lists from begin to ids; both to be released */
    size_t bytes;                /* of the lists */
} xdi_xcached;

/* ---- checks ---- */

static xd_result xdi_xcached_check(xd_ctx *ctx, const xd_xtoken_desc *d, int index, int64_t size) {
    const xd_xtoken_teacher *t = &d->teachers[index];
    XD_REQUIRE(ctx, t->cached.cache, XD_ERROR_ARGUMENT, "teacher %d has no cache", index);
    const double temperature = xd_teacher_cache_describe(t->cached.cache).desc.temperature;
    XD_REQUIRE(ctx, temperature == d->temperature, XD_ERROR_ARGUMENT,
               "teacher %d was cached at temperature %g, the loss is at %g", index, temperature,
               d->temperature);
    return xdi_xtoken_check_projection(ctx, t, index, size, "its cache");
}

/* ---- memory ---- */

static int64_t xdi_xcached_tile(const xdi_xtoken *x, const xdi_xtoken_term *term, int64_t tile) {
    const int64_t maps = xdi_xtoken_fits(XDI_XCACHED_MAPS, term->vocabulary);
    (void)x;
    return tile < maps ? tile : maps;
}

static void xdi_xcached_size(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xtoken_sizes *s) {
    (void)term;
    s->cells = xdi_xtoken_most(s->cells, x->held); /* of deltas */
}

static void xdi_xcached_layout(const xdi_xtoken *x, xdi_xtoken_term *term, xdi_xtoken_arenas *a) {
    xdi_xcached plan;
    (void)x;
    xdi_xtoken_own(term, a, &plan, sizeof plan);
}

/* Maximum number of entries of a chunk. */
static int64_t xdi_xcached_bound(const xdi_xtoken_term *term, const xdi_xcached_places *p, int64_t slot) {
    const int64_t entries = term->teacher_sizes[slot] * p->k;
    return entries < term->vocabulary ? entries : term->vocabulary;
}

static int64_t xdi_xcached_tile_bound(const xdi_xtoken_term *term, const xdi_xcached_places *p,
                                      const xdi_xtoken_tile *tile) {
    const int64_t *order = term->places.order + xdi_xtoken_tile_start(&term->places, tile);
    int64_t bound = 0;
    for (int64_t i = 0; i < tile->count; i++)
        bound += xdi_xcached_bound(term, p, tile->b * term->teacher->chunks + order[i]);
    return bound;
}

/* Sizes; collective over sequence_comm. */
static xd_result xdi_xcached_measure(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h,
                                     int64_t *longest) {
    const int64_t chunks = term->teacher->chunks;
    xdi_xcached_places *p = &h->in;
    const xd_teacher_cache_desc cache = xd_teacher_cache_describe(term->teacher->cached.cache).desc;
    p->k = cache.k + cache.draws;
    p->most = term->teacher->logits.rows;
    p->total = h->tiles = h->room = 0;
    *longest = 1;
    for (int64_t i = 0; i < x->d.sequences * chunks; i++) p->total += term->teacher_sizes[i];
    for (int64_t b = 0; b < x->d.sequences; b++)
        for (int64_t i = 0; i < xdi_xtoken_tiles(&term->places, b); i++, h->tiles++) {
            const xdi_xtoken_tile tile = xdi_xtoken_tile_at(&term->places, x->d.sequence_comm, b, i);
            const int64_t bound = xdi_xcached_tile_bound(term, p, &tile);
            *longest = xdi_xtoken_most(*longest, bound);
            h->room += bound;
        }
    if (!x->on_device && h->room > XDI_XCACHED_ROOM) h->room = xdi_xtoken_most(*longest, XDI_XCACHED_ROOM);
    h->width = (chunks < term->places.tile ? chunks : term->places.tile) + 1;
    if (!x->d.sequence_comm) return XD_OK;
    return xd_all_reduce(x->d.sequence_comm, &p->most, &p->most, 1, XD_DTYPE_I64, XD_MAX);
}

static void xdi_xcached_layout_places(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached_places *p,
                                      xd_arena *arena, bool *fits) {
    const int64_t slots = x->d.sequences * term->teacher->chunks;
    const int64_t ranks = x->d.sequence_comm ? xd_comm_size(x->d.sequence_comm) : 1;
    p->mine = (int64_t *)xdi_arena_array(arena, 2 * p->most, sizeof(int64_t), fits);
    p->all = (int64_t *)xdi_arena_array(arena, 2 * p->most * ranks, sizeof(int64_t), fits);
    p->begin = (int64_t *)xdi_arena_array(arena, slots + 1, sizeof(int64_t), fits);
    p->filled = (int64_t *)xdi_arena_array(arena, slots, sizeof(int64_t), fits);
    p->places = (int64_t *)xdi_arena_array(arena, p->total, sizeof(int64_t), fits);
    p->mass = (double *)xdi_arena_array(arena, term->vocabulary, sizeof(double), fits);
    p->ids = (int32_t *)xdi_arena_array(arena, p->k, sizeof(int32_t), fits);
    p->probabilities = (double *)xdi_arena_array(arena, p->k, sizeof(double), fits);
}

/* The lists, followed by what the host needs to make them. */
static bool xdi_xcached_layout_host(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h,
                                    xd_arena *arena) {
    bool fits = true;
    h->begin = (int64_t *)xdi_arena_array(arena, h->tiles + 1, sizeof(int64_t), &fits);
    h->offset = (int64_t *)xdi_arena_array(arena, h->tiles * h->width, sizeof(int64_t), &fits);
    h->target = (double *)xdi_arena_array(arena, h->room, sizeof(double), &fits);
    h->ids = (int32_t *)xdi_arena_array(arena, h->room, sizeof(int32_t), &fits);
    h->bytes = arena->used;
    xdi_xcached_layout_places(x, term, &h->in, arena, &fits);
    return fits;
}

static xd_xtoken_lists xdi_xcached_lists(const xdi_xtoken_term *term, const xdi_xcached *h) {
    xd_xtoken_lists l;
    memset(&l, 0, sizeof l);
    if (term->teacher->cached.projection) l.projection = xdi_projection_for_kernels(&h->projection);
    l.projection.teacher_size = term->vocabulary;
    l.count = h->width - 1;
    return l;
}

/* The lists come first when they are in other memory than the host's. */
static bool xdi_xcached_layout_work(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h,
                                    int64_t longest, xd_arena *arena) {
    const xd_xtoken_lists lists = xdi_xcached_lists(term, h);
    const size_t scratch = x->kernels->xtoken.list_bytes(x->columns, &lists);
    bool fits = true;
    xdi_arena_array(arena, x->on_device ? (int64_t)h->bytes : 0, 1, &fits);
    h->settle_room = xdi_xtoken_settle_room(x, longest);
    h->q = (double *)xdi_arena_array(arena, h->settle_room + xdi_xtoken_wide(x) * longest, sizeof(double),
                                     &fits);
    h->scratch = xdi_arena_array(arena, (int64_t)scratch, 1, &fits);
    return fits;
}

/* ---- positions in the cache ---- */

/* Every rank gets the cache positions of all rows and reads the cache itself. */
static xd_result xdi_xcached_exchange(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached_places *p,
                                      const int64_t **all, int64_t *count) {
    const xd_xtoken_teacher *t = term->teacher;
    xd_comm *comm = x->d.sequence_comm;
    const bool alone = !comm || xd_comm_size(comm) == 1;
    for (int64_t i = 0; i < p->most; i++) {
        const bool held = i < t->logits.rows && t->teacher_chunks[i] >= 0;
        p->mine[2 * i] = held ? i / term->held * t->chunks + t->teacher_chunks[i] : -1;
        p->mine[2 * i + 1] = held ? t->cached.positions[i] : -1;
    }
    *all = alone ? p->mine : p->all;
    *count = p->most * (alone ? 1 : xd_comm_size(comm));
    return alone ? XD_OK : xdi_comm_all_gather_equal(comm, p->mine, p->all, 2 * p->most, XD_DTYPE_I64);
}

/* Sorted by chunk and cache position, so that sums do not depend on which rank held which row. */
static xd_result xdi_xcached_find_places(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                         xdi_xcached_places *p) {
    const int64_t slots = x->d.sequences * term->teacher->chunks, *all;
    int64_t count;
    XD_TRY(xdi_xcached_exchange(x, term, p, &all, &count));
    memset(p->filled, 0, (size_t)slots * sizeof *p->filled);
    memset(p->mass, 0, (size_t)term->vocabulary * sizeof *p->mass);
    p->begin[0] = 0;
    for (int64_t i = 0; i < slots; i++) p->begin[i + 1] = p->begin[i] + term->teacher_sizes[i];
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = all[2 * i], place = all[2 * i + 1];
        if (slot < 0) continue;
        int64_t at = p->begin[slot] + p->filled[slot]++;
        for (; at > p->begin[slot] && p->places[at - 1] > place; at--) p->places[at] = p->places[at - 1];
        p->places[at] = place;
    }
    return XD_OK;
}

/* J and a of one chunk; returns the number of entries. */
static int64_t xdi_xcached_target(const xdi_xtoken_term *term, xdi_xcached_places *p, int64_t slot,
                                  int32_t *columns, double *target) {
    const xd_teacher_cache *cache = term->teacher->cached.cache;
    const double positions = (double)term->teacher_sizes[slot];
    int64_t count = 0;
    for (int64_t i = p->begin[slot]; i < p->begin[slot + 1]; i++) {
        xdi_cache_entries(cache, p->places[i], p->ids, p->probabilities);
        for (int64_t j = 0; j < p->k; j++) {
            const int32_t id = p->ids[j];
            if (p->probabilities[j] == 0.0) continue;
            if (p->mass[id] == 0.0) columns[count++] = id;
            p->mass[id] += p->probabilities[j];
        }
    }
    for (int64_t i = 0; i < count; i++) {
        target[i] = p->mass[columns[i]] / positions;
        p->mass[columns[i]] = 0.0;
    }
    return count;
}

/* ---- loaded tiles ---- */

/* Tile `index` of all. */
static void xdi_xcached_read_tile(const xdi_xtoken_term *term, xdi_xcached *h, const xdi_xtoken_tile *tile,
                                  int64_t index) {
    const int64_t *order = term->places.order + xdi_xtoken_tile_start(&term->places, tile);
    int64_t *offset = h->offset + index * h->width, at = h->begin[index];
    offset[0] = 0;
    for (int64_t place = 0; place < tile->count; place++) {
        at += xdi_xcached_target(term, &h->in, tile->b * term->teacher->chunks + order[place], h->ids + at,
                                 h->target + at);
        offset[place + 1] = at - h->begin[index];
    }
    h->begin[index + 1] = at;
}

static xd_result xdi_xcached_upload(const xdi_xtoken *x, const xdi_xcached *h) {
    return x->on_device ? xdi_xtoken_copy(x, h->there, h->here, h->bytes, XD_COPY_TO_DEVICE) : XD_OK;
}

/* Copies to the device as many tiles as fit, from tile `index` of all on; the device has finished the tiles before. */
static xd_result xdi_xcached_bring(const xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h,
                                   int64_t index, int64_t b, int64_t i) {
    if (index >= h->first && index < h->end) return XD_OK;
    XD_TRY(x->kernels->memory.synchronize(&x->launch));
    h->first = h->end = index;
    h->begin[index] = 0;
    for (; b < x->d.sequences; b++, i = 0)
        for (; i < xdi_xtoken_tiles(&term->places, b); i++) {
            const xdi_xtoken_tile tile = xdi_xtoken_tile_at(&term->places, x->d.sequence_comm, b, i);
            if (h->begin[h->end] + xdi_xcached_tile_bound(term, &h->in, &tile) > h->room)
                return xdi_xcached_upload(x, h);
            xdi_xcached_read_tile(term, h, &tile, h->end++);
        }
    return xdi_xcached_upload(x, h);
}

/* Host and device memory, and the cache positions. */
static xd_result xdi_xcached_take(xdi_xtoken *x, const xdi_xtoken_term *term, xdi_xcached *h) {
    xd_arena host = xd_arena_over(NULL, 0), work = host;
    xd_result result = XD_OK;
    int64_t longest;
    XD_TRY(xdi_xcached_measure(x, term, h, &longest));
    if (xdi_xcached_layout_host(x, term, h, &host))
        h->here = (unsigned char *)xd_allocate(x->ctx, host.peak + 1);
    if (h->here && xdi_xcached_layout_work(x, term, h, longest, &work))
        h->there = (unsigned char *)x->kernels->memory.allocate(x->ctx, work.peak + 1);
    if (!h->there)
        result = XD_FAIL(x->ctx, XD_ERROR_MEMORY, "no room for %lld cached positions in %zu and %zu bytes",
                         (long long)h->in.total, host.peak, work.peak);
    XD_TRY(xdi_vocab_agree(x->vocab.tp, x->d.common.comm, result));
    host = xd_arena_over(h->here, host.peak);
    work = xd_arena_over(h->there, work.peak);
    xdi_xcached_layout_host(x, term, h, &host);
    xdi_xcached_layout_work(x, term, h, longest, &work);
    return xdi_xcached_find_places(x, term, &h->in);
}

static xd_result xdi_xcached_open(xdi_xtoken *x, xdi_xtoken_term *term) {
    xdi_xcached *h = (xdi_xcached *)term->own;
    const xd_projection *m = term->teacher->cached.projection;
    if (!m) return XD_OK;
    h->projection = *m;
    if (xdi_projection_is_near(x->ctx, m)) return XD_OK;
    XD_TRY(xd_projection_upload(x->ctx, m, &h->copied));
    h->projection = h->copied;
    return XD_OK;
}

static xd_result xdi_xcached_begin(xdi_xtoken *x, xdi_xtoken_term *term) {
    return xdi_xcached_take(x, term, (xdi_xcached *)term->own);
}

static void xdi_xcached_close(const xdi_xtoken *x, xdi_xtoken_term *term) {
    xdi_xcached *h = (xdi_xcached *)term->own;
    x->kernels->memory.release(x->ctx, h->there);
    xd_release(x->ctx, h->here);
    xd_projection_unload(x->ctx, &h->copied);
}

/* ---- a pass ---- */

static xd_result xdi_xcached_fill(xdi_xtoken *x, xdi_xtoken_term *term) {
    for (int64_t b = 0; b < x->d.sequences; b++)
        for (int64_t place = 0; place < term->places.listed[b]; place++) {
            const int64_t at = b * term->teacher->chunks + place;
            term->chunks[at] = xdi_xtoken_chunk_of(x, term, b, term->places.order[at], 0.0);
        }
    return XD_OK;
}

/* The device's address of something in the lists of the cache. */
static const void *xdi_xcached_there(const xdi_xtoken *x, const xdi_xcached *h, const void *list) {
    return x->on_device ? h->there + ((const unsigned char *)list - h->here) : list;
}

/* Tile `index` of all, with its sums over all ranks. */
static xd_result xdi_xcached_sums(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                  const xdi_xtoken_tile *tile, int64_t index, xd_xtoken_list_args *a) {
    const xdi_xcached *h = (const xdi_xcached *)term->own;
    const int64_t begin = h->begin[index];
    memset(a, 0, sizeof *a);
    a->x = xdi_xtoken_student_tile(x, term, tile);
    a->lists = xdi_xcached_lists(term, h);
    a->lists.count = tile->count;
    a->lists.offset = (const int64_t *)xdi_xcached_there(x, h, h->offset + index * h->width);
    a->lists.ids = (const int32_t *)xdi_xcached_there(x, h, h->ids + begin);
    a->lists.entries = h->begin[index + 1] - begin;
    a->teacher = (double *)(uintptr_t)xdi_xcached_there(x, h, h->target + begin); /* read alone */
    a->chunks = (xd_xtoken_chunk *)xdi_xtoken_there(
        &x->lists, term->chunks + xdi_xtoken_tile_start(&term->places, tile));
    a->cells = h->q + h->settle_room;
    a->fixed = x->fixed;
    a->reverse = x->d.reverse;
    const int64_t entries = a->lists.entries;
    XD_TRY(x->kernels->memory.fill(&x->launch, a->cells, 0, (size_t)entries * xdi_xtoken_cell(x)));
    XD_TRY(x->kernels->xtoken.list_project(&x->launch, a));
    XD_TRY(xdi_xtoken_reduce(x, x->vocab.tp, a->cells, entries));
    XD_TRY(xdi_xtoken_reduce(x, tile->comm, a->cells, entries));
    return xdi_xtoken_settle(x, a->cells, h->settle_room, entries, &a->student);
}

/* dz = p (h - delta) / tau, h = M dy and delta = sum_v p_v h_v; delta is summed in units of the largest |dy|, for
 * fixed point. */
static xd_result xdi_xcached_gradient(const xdi_xtoken *x, const xdi_xtoken_term *term,
                                      const xd_xtoken_list_args *tile) {
    xd_xtoken_list_args a = *tile;
    const xd_xtoken_list_gradient_args g = {
        xdi_xtoken_gradient_of(x, a.x),           a.lists, a.student, x->work.delta, a.chunks,
        ((const xdi_xcached *)term->own)->scratch
    };
    a.cells = x->work.cells;
    XD_TRY(x->kernels->memory.fill(&x->launch, a.cells, 0, (size_t)a.x.count * xdi_xtoken_cell(x)));
    XD_TRY(x->kernels->xtoken.list_delta(&x->launch, &a));
    XD_TRY(xdi_xtoken_row_deltas(x, &a.x, a.chunks, a.cells));
    return x->kernels->xtoken.list_gradient(&x->launch, &g);
}

static xd_result xdi_xcached_run(xdi_xtoken *x, xdi_xtoken_term *term) {
    xdi_xcached *h = (xdi_xcached *)term->own;
    int64_t index = 0;
    for (int64_t b = 0; b < x->d.sequences; b++)
        for (int64_t i = 0; i < xdi_xtoken_tiles(&term->places, b); i++, index++) {
            const xdi_xtoken_tile tile = xdi_xtoken_tile_at(&term->places, x->d.sequence_comm, b, i);
            xd_xtoken_list_args a;
            XD_TRY(xdi_xcached_bring(x, term, h, index, b, i));
            XD_TRY(xdi_xcached_sums(x, term, &tile, index, &a));
            XD_TRY(x->kernels->xtoken.list_divergence(&x->launch, &a));
            if (x->write) XD_TRY(xdi_xcached_gradient(x, term, &a));
        }
    return XD_OK;
}

XD_PRIVATE const xdi_xtoken_kind *xdi_xcached_kind(void) {
    static const xdi_xtoken_kind kind = { 0,
                                          xdi_xcached_check,
                                          xdi_xcached_tile,
                                          xdi_xcached_size,
                                          xdi_xcached_layout,
                                          xdi_xcached_open,
                                          xdi_xcached_begin,
                                          xdi_xcached_fill,
                                          xdi_xcached_run,
                                          xdi_xtoken_tell_chunks,
                                          xdi_xcached_close };
    return &kind;
}
