/* Golden cases of the area shard, and the sequence layouts of xtoken-parts. */
#if defined(XD_TEST_LAYERS)
#    include "kernel/internal.h"
#    include "model/buckets_internal.h"
#    include "tensor/interval_internal.h"
#endif
#include "golden.h"

#include <stdio.h>
#include <string.h>

enum { RANKS = 16, NAME = 64 };

static xd_topology grid(int a, int b) {
    xd_topology t;
    memset(&t, 0, sizeof t);
    t.axis_count = b ? 2 : 1;
    t.size[0] = a;
    t.size[1] = b;
    t.rank_count = b ? a * b : a;
    return t;
}

/* Size and offset of what one rank holds of n indices, split over every axis in turn. */
static bool line_part(golden_case *c, const xd_topology *t, int64_t n, int rank, double *size,
                      double *offset) {
    xd_layout_desc d;
    xd_layout *layout = NULL;
    xd_region region;
    memset(&d, 0, sizeof d);
    d.ndim = 1;
    d.shape[0] = n;
    d.topology = t;
    for (int i = 0; i < t->axis_count; i++) d.placement[i].kind = XD_SHARD;
    if (!golden_ok(c, xd_layout_create(golden_ctx(c), &d, &layout))) return false;
    xd_layout_region(layout, rank, &region);
    *size = (double)xdi_region_numel(&region);
    /* An empty shard has no begin of its own; the rule puts it at the end of what was split last. */
    *offset = region.count[0] ? (double)region.interval[0][0].begin : -1.0;
    xd_layout_destroy(layout);
    return true;
}

/* ---- the chunk rule over one and two axes: rows of sizes, coordinates, local size, offset ---- */

static bool chunk_claims(const golden_case *c) {
    return golden_is(c, "area", "shard") && golden_origin_has(c, "torch.chunk") && golden_has(c, "out.table");
}

static void chunk_run(golden_case *c) {
    const golden_array table = golden_tensor(c, "out.table");
    const int64_t columns = table.ndim == 2 ? table.shape[1] : 0;
    const int axes = columns == 7 ? 2 : 1;
    double *got = (double *)golden_memory(c, (size_t)(table.count + 1) * sizeof *got);
    if (columns != 5 && columns != 7) {
        golden_fail(c, "a table of %lld columns is none of the known ones", (long long)columns);
        return;
    }
    memcpy(got, table.values, (size_t)table.count * sizeof *got);
    for (int64_t row = 0; row < table.count; row += columns) {
        const int64_t n = (int64_t)got[row];
        const int a = (int)got[row + 1], b = axes == 2 ? (int)got[row + 2] : 0;
        const int ca = (int)got[row + 1 + axes], cb = axes == 2 ? (int)got[row + 4] : 0;
        const xd_topology t = grid(a, b);
        double *size = got + row + columns - 2, *offset = size + 1;
        if (!line_part(c, &t, n, axes == 2 ? ca * b + cb : ca, size, offset)) return;
        if (*size > 0) continue;
        const xd_interval outer = xd_chunk(n, a, ca);
        *offset = axes == 2 ? (double)(outer.begin + xd_chunk(outer.end - outer.begin, b, cb).begin)
                            : (double)outer.begin;
    }
    golden_exact(c, "out.table", got, table.count);
}

/* ---- a tensor cut along one dimension ---- */

static bool cut_claims(const golden_case *c) {
    return golden_is(c, "area", "shard") && golden_text(c, "cfg.ranks") && golden_has(c, "in.full");
}

static void cut_run(golden_case *c) {
    const golden_array full = golden_tensor(c, "in.full");
    const int ranks = golden_integer(c, "cfg.ranks", 1, 1, 1024);
    const int dim = golden_integer(c, "cfg.dim", 0, -full.ndim, full.ndim - 1);
    const xd_topology t = grid(ranks, 0);
    const xd_region whole = xdi_region_whole(full.ndim, full.shape);
    const float *values = golden_f32(c, &full);
    double *sizes = (double *)golden_memory(c, (size_t)ranks * sizeof *sizes);
    xd_layout_desc d;
    xd_layout *layout = NULL;
    memset(&d, 0, sizeof d);
    d.ndim = full.ndim;
    memcpy(d.shape, full.shape, sizeof d.shape);
    d.topology = &t;
    d.placement[0].kind = XD_SHARD;
    d.placement[0].dim = dim;
    if (!golden_ok(c, xd_layout_create(golden_ctx(c), &d, &layout))) return;
    for (int r = 0; r < ranks; r++) {
        char name[NAME];
        xd_region part;
        xd_copy copies[4];
        int64_t shape[XD_DIMS_MAX];
        xd_layout_region(layout, r, &part);
        float *got = (float *)golden_memory(c, (size_t)(xdi_region_numel(&part) + 1) * sizeof *got);
        const int64_t n = xdi_region_copies(&whole, NULL, &part, NULL, copies, 4);
        for (int64_t i = 0; i < n && i < 4; i++) xdi_copy_run(&copies[i], values, got, sizeof *got);
        xdi_region_shape(&part, shape);
        sizes[r] = (double)shape[dim < 0 ? dim + full.ndim : dim];
        snprintf(name, sizeof name, "out.rank%d", r);
        golden_exact(c, name, golden_widen(c, got, XD_DTYPE_F32, xdi_region_numel(&part)),
                     xdi_region_numel(&part));
    }
    golden_exact(c, "out.sizes", sizes, ranks);
    xd_layout_destroy(layout);
}

/* ---- load-balanced and contiguous sequence layouts ---- */

static bool sequence_claims(const golden_case *c) {
    return golden_is(c, "area", "xtoken-parts") && golden_origin_has(c, "cp_load_balanced_to_contiguous");
}

/* One rank's results; every rank writes only its own, and they are compared after all ranks have returned. */
typedef struct sequence_part {
    const float *balanced, *weight; /* this rank's shard; the whole weight */
    float *contiguous, *shifted, *gradient;
    int64_t *balanced_index, *contiguous_index, *shifted_index;
} sequence_part;

typedef struct sequence_case {
    int64_t batch, length, width;
    int ranks;
    sequence_part part[RANKS];
} sequence_case;

/* The sequence dimension split over the ranks in one of three ways. */
static xd_result sequence_layout(xd_ctx *ctx, const sequence_case *s, const xd_topology *t, bool balanced,
                                 const int64_t *offsets, xd_layout **out) {
    xd_layout_desc d;
    memset(&d, 0, sizeof d);
    d.ndim = 3;
    d.shape[0] = s->batch;
    d.shape[1] = s->length;
    d.shape[2] = s->width;
    d.topology = t;
    d.placement[0].kind = XD_SHARD;
    d.placement[0].dim = 1;
    d.placement[0].balanced = balanced;
    d.placement[0].offsets = offsets;
    return xd_layout_create(ctx, &d, out);
}

static xd_result sequence_move(xd_comm *world, const xd_layout *from, const void *source, const xd_layout *to,
                               void *out) {
    const int me = xd_comm_rank(world);
    const xd_tensor a = xd_tensor_view(from, me, (void *)(uintptr_t)source, XD_DTYPE_F32);
    const xd_tensor b = xd_tensor_view(to, me, out, XD_DTYPE_F32);
    return xd_redistribute(world, &a, &b);
}

/* The next position's values: a layout one position further on, whose first rank also keeps position 0 and
 * whose last rank is one short; the missing value is zero. */
static xd_result sequence_shift(xd_comm *world, const sequence_case *s, const xd_layout *from,
                                float *shifted) {
    const int me = xd_comm_rank(world);
    const int64_t held = s->length / s->ranks, first = me == 0;
    const xd_topology t = grid(s->ranks, 0);
    int64_t offsets[RANKS + 1];
    xd_layout *next = NULL;
    for (int i = 0; i <= s->ranks; i++) offsets[i] = i == 0 ? 0 : i == s->ranks ? s->length : i * held + 1;
    const int64_t have = offsets[me + 1] - offsets[me];
    float *values =
        (float *)xd_allocate(xd_comm_ctx(world), (size_t)(s->batch * have * s->width + 1) * sizeof *values);
    xd_result result = sequence_layout(xd_comm_ctx(world), s, &t, false, offsets, &next);
    if (result == XD_OK) result = sequence_move(world, from, s->part[me].contiguous, next, values);
    for (int64_t b = 0; result == XD_OK && b < s->batch; b++)
        memcpy(shifted + b * held * s->width, values + (b * have + first) * s->width,
               (size_t)((have - first) * s->width) * sizeof *values);
    xd_layout_destroy(next);
    xd_release(xd_comm_ctx(world), values);
    return result;
}

static xd_result sequence_indices(xd_comm *world, const sequence_case *s, const xd_layout *contiguous) {
    const int me = xd_comm_rank(world);
    const sequence_part *p = &s->part[me];
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_shift_desc d;
    xd_region region;
    int64_t held = 0;
    xd_layout_region(contiguous, me, &region);
    for (int i = 0; i < region.count[1]; i++)
        for (int64_t k = region.interval[1][i].begin; k < region.interval[1][i].end; k++)
            p->contiguous_index[held++] = k;
    xd_result result = xd_load_balanced_positions(ctx, s->length, me, s->ranks, p->balanced_index);
    memset(&d, 0, sizeof d);
    d.sequences = 1;
    d.length = s->length;
    d.positions = p->contiguous_index;
    d.ids = xd_ids_of(p->contiguous_index, XD_DTYPE_I64);
    d.held = held;
    d.has_ignore_index = true;
    d.ignore_index = -1;
    d.comm = world;
    if (result == XD_OK) result = xd_next_token_labels(ctx, &d, p->shifted_index);
    return result;
}

static xd_result sequence_rank(xd_comm *world, void *argument) {
    const sequence_case *s = (const sequence_case *)argument;
    const int me = xd_comm_rank(world);
    const sequence_part *p = &s->part[me];
    const xd_topology t = grid(s->ranks, 0);
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_layout *balanced = NULL, *contiguous = NULL, *whole = NULL;
    xd_result result = sequence_layout(ctx, s, &t, true, NULL, &balanced);
    if (result == XD_OK) result = sequence_layout(ctx, s, &t, false, NULL, &contiguous);
    if (result == XD_OK) {
        xd_layout_desc everywhere = *xd_layout_settings(contiguous);
        memset(everywhere.placement, 0, sizeof everywhere.placement);
        result = xd_layout_create(ctx, &everywhere, &whole);
    }
    if (result == XD_OK) result = sequence_move(world, balanced, p->balanced, contiguous, p->contiguous);
    if (result == XD_OK) result = sequence_shift(world, s, contiguous, p->shifted);
    /* The gradient of a move is the reverse move: here from the weight's contiguous windows. */
    if (result == XD_OK) result = sequence_move(world, whole, p->weight, balanced, p->gradient);
    if (result == XD_OK) result = sequence_indices(world, s, contiguous);
    xd_layout_destroy(whole);
    xd_layout_destroy(contiguous);
    xd_layout_destroy(balanced);
    return result;
}

static void sequence_compare(golden_case *c, int rank, const char *format, const void *got, xd_dtype dtype,
                             int64_t count) {
    char name[NAME];
    snprintf(name, sizeof name, format, rank);
    golden_exact(c, name, golden_widen(c, got, dtype, count), count);
}

static void sequence_run(golden_case *c) {
    const golden_array full = golden_tensor(c, "in.full");
    const golden_array weight = golden_tensor(c, golden_has(c, "in.weight") ? "in.weight" : "in.full");
    sequence_case s;
    char name[NAME];
    memset(&s, 0, sizeof s);
    s.ranks = golden_integer(c, "cfg.cp", 1, 1, RANKS);
    if (full.ndim != 3) {
        golden_fail(c, "in.full has %d dimensions, not 3", full.ndim);
        return;
    }
    golden_only(c, "cfg.seq_len", (double)full.shape[1]);
    s.batch = full.shape[0];
    s.length = full.shape[1];
    s.width = full.shape[2];
    const int64_t held = s.length / s.ranks, count = s.batch * held * s.width;
    for (int r = 0; r < s.ranks; r++) {
        snprintf(name, sizeof name, "in.rank%d.shard", r);
        const golden_array shard = golden_tensor(c, name);
        float *floats = (float *)golden_memory(c, (size_t)(3 * count + 1) * sizeof *floats);
        int64_t *index = (int64_t *)golden_memory(c, (size_t)(3 * held + 1) * sizeof *index);
        const sequence_part part = { golden_f32(c, &shard), golden_f32(c, &weight), floats,
                                     floats + count,        floats + 2 * count,     index,
                                     index + held,          index + 2 * held };
        s.part[r] = part;
    }
    xd_error error;
    if (xd_run_threads(s.ranks, NULL, sequence_rank, &s, &error) != XD_OK) {
        golden_fail(c, "rank %d: %s", error.rank, error.message);
        return;
    }
    for (int r = 0; r < s.ranks; r++) {
        const sequence_part *p = &s.part[r];
        sequence_compare(c, r, "out.rank%d.contiguous", p->contiguous, XD_DTYPE_F32, count);
        sequence_compare(c, r, "out.rank%d.shift_next", p->shifted, XD_DTYPE_F32, count);
        sequence_compare(c, r, "grad.rank%d.shard", p->gradient, XD_DTYPE_F32, count);
        sequence_compare(c, r, "out.rank%d.load_balanced_index", p->balanced_index, XD_DTYPE_I64, held);
        sequence_compare(c, r, "out.rank%d.contiguous_index", p->contiguous_index, XD_DTYPE_I64, held);
        sequence_compare(c, r, "out.rank%d.shift_next_index", p->shifted_index, XD_DTYPE_I64, held);
    }
}

/* ---- gradient buckets ---- */

static bool bucket_claims(const golden_case *c) {
    return golden_is(c, "area", "shard") && golden_has(c, "in.param_numel") &&
           (golden_origin_has(c, "param_and_grad_buffer.py") || golden_origin_has(c, "param_layout.py"));
}

/* The desc of a vector; its kind of layout is in the origin, everything else in the configuration. */
static xdi_bucket_plan_desc bucket_desc(golden_case *c, const golden_array *sizes) {
    const int64_t *numel = golden_i64(c, sizes);
    xdi_bucket_param *params =
        (xdi_bucket_param *)golden_memory(c, (size_t)(sizes->count + 1) * sizeof *params);
    double *shared = (double *)golden_memory(c, (size_t)(sizes->count + 1) * sizeof *shared);
    xdi_bucket_plan_desc d;
    memset(&d, 0, sizeof d);
    for (int64_t i = 0; i < sizes->count; i++) params[i].numel = numel[i];
    const int count = golden_numbers(c, "cfg.shared_embedding", shared, (int)sizes->count);
    for (int i = 0; i < count; i++) {
        if (shared[i] >= 0 && shared[i] < (double)sizes->count)
            params[(int64_t)shared[i]].shared_embedding = true;
        else
            golden_fail(c, "cfg.shared_embedding names parameter %g", shared[i]);
    }
    d.params = params;
    d.param_count = sizes->count;
    d.sharded = golden_origin_has(c, "distrib_optimizer.py");
    d.ranks = golden_integer(c, "cfg.dp", 1, 1, 1 << 20);
    d.wide_padding = golden_flag(c, "cfg.pad_buckets_for_high_nccl_busbw", false);
    d.bucket_size = golden_integer(c, "cfg.bucket_size", 0, 0, 1 << 30);
    d.overlap = d.bucket_size > 0; /* the peer's null: one bucket */
    if (!d.overlap && golden_is(c, "cfg.bucket_size", "0"))
        golden_fail(c, "cfg.bucket_size = 0 has no form here");
    return d;
}

/* Rows of rank, bucket and parameter and where they meet, in the order of the buffer. */
static void bucket_ranges(golden_case *c, const xdi_bucket_plan *plan, const xdi_bucket_plan_desc *d) {
    double *rows =
        (double *)golden_memory(c, (size_t)(10 * d->ranks * (int64_t)(d->param_count + 1)) * sizeof *rows);
    int64_t n = 0;
    for (int rank = 0; rank < d->ranks; rank++)
        for (int64_t i = d->param_count - 1; i >= 0; i--) {
            xdi_bucket_piece p;
            if (!xdi_bucket_plan_piece(plan, i, rank, &p)) continue;
            const int64_t row[10] = { rank,           p.bucket,     i,
                                      p.buffer.begin, p.buffer.end, p.in_bucket.begin,
                                      p.shard.begin,  p.shard.end,  p.param.begin,
                                      p.param.end };
            for (int k = 0; k < 10; k++) rows[n++] = (double)row[k];
        }
    golden_exact(c, "out.ranges", rows, n);
}

static void bucket_run(golden_case *c) {
    const golden_array sizes = golden_tensor(c, "in.param_numel");
    const xdi_bucket_plan_desc d = bucket_desc(c, &sizes);
    xdi_bucket_plan *plan = NULL;
    if (!golden_ok(c, xdi_bucket_plan_create(golden_ctx(c), &d, &plan))) return;
    const int64_t buckets = xdi_bucket_plan_count(plan);
    double *index = (double *)golden_memory(c, (size_t)(3 * d.param_count + 1) * sizeof *index);
    double *bounds = (double *)golden_memory(c, (size_t)(3 * buckets + 1) * sizeof *bounds);
    double *unpadded = bounds + 2 * buckets;
    for (int64_t i = 0; i < d.param_count; i++) {
        int64_t bucket;
        const xd_interval place = xdi_bucket_plan_param(plan, i, &bucket);
        index[3 * i] = (double)place.begin;
        index[3 * i + 1] = (double)place.end;
        index[3 * i + 2] = (double)bucket;
    }
    for (int64_t b = 0; b < buckets; b++) {
        const xdi_planned_bucket bucket = xdi_bucket_plan_at(plan, b);
        bounds[2 * b] = (double)bucket.buffer.begin;
        bounds[2 * b + 1] = (double)bucket.buffer.end;
        unpadded[b] = (double)bucket.unpadded;
    }
    golden_exact(c, "out.param_index", index, 3 * d.param_count);
    golden_exact(c, "out.buckets", bounds, 2 * buckets);
    golden_exact(c, "out.bucket_unpadded", unpadded, buckets);
    if (golden_wants(c, "out.ranges")) bucket_ranges(c, plan, &d);
    xdi_bucket_plan_destroy(plan);
}

/* ---- padding of buckets: rows of value, dp, wide, where a parameter behind `value` elements begins, and where a bucket of
 * them ends ---- */

static bool padding_claims(const golden_case *c) {
    return golden_is(c, "area", "shard") && golden_has(c, "out.table") &&
           golden_origin_has(c, "param_layout.py::pad_param_start");
}

static void padding_run(golden_case *c) {
    const golden_array table = golden_tensor(c, "out.table");
    double *got = (double *)golden_memory(c, (size_t)(table.count + 1) * sizeof *got);
    if (table.ndim != 2 || table.shape[1] != 5) {
        golden_fail(c, "the table has not 5 columns");
        return;
    }
    memcpy(got, table.values, (size_t)table.count * sizeof *got);
    for (double *row = got; row < got + table.count; row += 5) {
        const xdi_bucket_param params[2] = { { 1, false }, { (int64_t)row[0], false } };
        xdi_bucket_plan_desc d;
        memset(&d, 0, sizeof d);
        d.params = params;
        d.param_count = 2;
        d.sharded = true;
        d.ranks = (int)row[1];
        d.wide_padding = row[2] != 0;
        xdi_bucket_plan *start = NULL, *end = NULL;
        if (!golden_ok(c, xdi_bucket_plan_create(golden_ctx(c), &d, &start))) return;
        d.params = params + 1;
        d.param_count = 1;
        if (golden_ok(c, xdi_bucket_plan_create(golden_ctx(c), &d, &end))) {
            row[3] = (double)xdi_bucket_plan_param(start, 0, NULL).begin;
            row[4] = (double)xdi_bucket_plan_numel(end);
        }
        xdi_bucket_plan_destroy(end);
        xdi_bucket_plan_destroy(start);
    }
    golden_exact(c, "out.table", got, table.count);
}

const golden_kind golden_kinds_shard[] = { { "chunks", chunk_claims, chunk_run },
                                           { "cut tensors", cut_claims, cut_run },
                                           { "gradient buckets", bucket_claims, bucket_run },
                                           { "padding of buckets", padding_claims, padding_run },
                                           { NULL, NULL, NULL } };

const golden_kind golden_kinds_sequence[] = { { "sequence layouts", sequence_claims, sequence_run },
                                              { NULL, NULL, NULL } };
