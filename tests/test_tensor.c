/* Layouts and redistribution: exhaustively against arrays of indices in one thread, and executed by ranks on
 * a sample. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "tensor/internal.h"
#    include "tensor/redistribute_internal.h"
#endif

#include "xd_test.h"

#include "tensor_model.h"

enum { RANKS = 12 };

static xd_ctx *plain_ctx(void) {
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    return ctx;
}

static xd_topology grid(int a, int b) {
    xd_topology t;
    memset(&t, 0, sizeof t);
    t.axis_count = b ? 2 : 1;
    t.size[0] = a;
    t.size[1] = b;
    t.rank_count = b ? a * b : a;
    return t;
}

static xd_layout_desc line(const xd_topology *t, int64_t n) {
    xd_layout_desc d;
    memset(&d, 0, sizeof d);
    d.ndim = 1;
    d.shape[0] = n;
    d.topology = t;
    return d;
}

/* Does every rank's region hold what the model says? */
static bool layout_is_right(const xd_layout *layout, int ranks) {
    const xd_layout_desc *d = xd_layout_settings(layout);
    for (int r = 0; r < ranks; r++) {
        static int held[MODEL_NUMEL];
        xd_region region;
        const int count = model_held(d, r, held);
        if (xd_layout_region(layout, r, &region) != (count >= 0)) return false;
        if (count < 0) continue;
        if (xdi_region_numel(&region) != count) return false;
        int at = 0;
        for (int i = 0; d->ndim == 1 && i < region.count[0]; i++)
            for (int64_t v = region.interval[0][i].begin; v < region.interval[0][i].end; v++)
                if (held[at++] != v) return false;
    }
    return true;
}

XD_TEST(chunks_follow_the_table_of_the_rule) {
    static const int table[][10] = {
        { 10, 4, 3, 3, 3, 1 }, { 5, 4, 2, 2, 1, 0 }, { 6, 4, 2, 2, 2, 0 },
        { 7, 3, 3, 3, 1 },     { 9, 2, 5, 4 },       { 3, 8, 1, 1, 1, 0, 0, 0, 0, 0 },
        { 1, 2, 1, 0 },        { 0, 3, 0, 0, 0 },    { 20, 8, 3, 3, 3, 3, 3, 3, 2, 0 }
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        int64_t begin = 0;
        for (int r = 0; r < table[i][1]; r++) {
            const xd_interval c = xd_chunk(table[i][0], table[i][1], r);
            CHECK_EQ_INT(c.begin, begin);
            CHECK_EQ_INT(c.end - c.begin, table[i][2 + r]);
            begin = c.end;
        }
    }
    CHECK_EQ_INT(xd_chunk(INT64_MAX, 3, 2).end, INT64_MAX);
    CHECK_EQ_INT(xd_chunk(INT64_MAX, 3, 1).begin, INT64_MAX / 3 + (INT64_MAX % 3 != 0));
}

XD_TEST(a_layout_counts_elements_and_bytes_and_moves_whole_to_one_rank) {
    xd_ctx *ctx = plain_ctx();
    const xd_topology t = grid(2, 3);
    xd_layout_desc d = line(&t, 11);
    xd_layout *cut = NULL, *same = NULL, *other = NULL, *alone = NULL;
    xd_region region;
    size_t bytes = 0;
    d.ndim = 2;
    d.shape[1] = 5;
    d.placement[1].kind = XD_SHARD;
    CHECK(xd_layout_create(ctx, &d, &cut) == XD_OK && xd_layout_create(ctx, &d, &same) == XD_OK);
    d.placement[1].dim = 1;
    CHECK(xd_layout_create(ctx, &d, &other) == XD_OK);
    CHECK_EQ_INT(xdi_layout_numel(cut), 55);
    CHECK(xdi_layout_hash(cut) == xdi_layout_hash(same) && xdi_layout_hash(cut) != xdi_layout_hash(other));
    for (int r = 0; r < 6; r++) { /* 4, 4 and 3 rows of 5 */
        CHECK_EQ_INT(xdi_tensor_bytes(cut, r, XD_DTYPE_BF16), r % 3 == 2 ? 30 : 40);
        bytes += xdi_tensor_bytes(cut, r, XD_DTYPE_F64);
    }
    CHECK_EQ_INT(bytes, 2 * 55 * 8);
    CHECK_EQ_INT(xdi_tensor_bytes(cut, 6, XD_DTYPE_F64), 0);
    CHECK_EQ_INT(xdi_layout_on_rank(ctx, cut, -1, &alone), XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(ctx)->message, "rank -1 is negative");
    CHECK(xdi_layout_on_rank(ctx, cut, 4, &alone) == XD_OK);
    CHECK_EQ_INT(xdi_layout_numel(alone), 55);
    for (int r = 0; r < 6; r++) {
        CHECK_EQ_INT(xd_layout_region(alone, r, &region), r == 4);
        CHECK_EQ_INT(xdi_tensor_bytes(alone, r, XD_DTYPE_U8), r == 4 ? 55 : 0);
    }
    xd_layout *const all[] = { cut, same, other, alone };
    for (int i = 0; i < 4; i++) xd_layout_destroy(all[i]);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_redistribution_says_what_its_destination_measures) {
    const xd_region window = { 2, { 1, 1 }, { { { 2, 9 } }, { { 1, 4 } } } };
    xd_ctx *ctx = plain_ctx();
    const xd_topology t = grid(3, 0);
    xd_layout_desc d = line(&t, 11);
    xd_layout *cut = NULL, *whole = NULL;
    d.ndim = 2;
    d.shape[1] = 5;
    d.placement[0].kind = XD_SHARD;
    CHECK(xd_layout_create(ctx, &d, &cut) == XD_OK && xdi_layout_replicated(ctx, cut, &whole) == XD_OK);
    for (int r = 0; r < 3; r++)
        for (int form = 0; form < 3; form++) {
            xdi_redistribution *plan = NULL;
            xdi_redistribution_desc p;
            int64_t shape[2] = { -1, -1 };
            memset(&p, 0, sizeof p);
            p.from = form ? cut : whole;
            p.to = form ? whole : cut;
            p.window = form == 2 ? &window : NULL;
            p.dtype = XD_DTYPE_F32;
            p.ranks = 3;
            p.rank = r;
            CHECK(xdi_redistribution_create(ctx, &p, &plan) == XD_OK);
            CHECK_EQ_INT(xdi_redistribution_pack(plan, 9, NULL, NULL), XD_ERROR_ARGUMENT);
            CHECK_EQ_STR(xd_last_error(ctx)->message, "step 9 of 1");
            CHECK_EQ_INT(xdi_redistribution_unpack(plan, -1, NULL, NULL, NULL), XD_ERROR_ARGUMENT);
            CHECK_EQ_STR(xd_last_error(ctx)->message, "step -1 of 1");
            CHECK(xdi_redistribution_step_at(plan, 0).send_counts != NULL);
            CHECK(xdi_redistribution_step_at(plan, -1).send_counts == NULL);
            CHECK(xdi_redistribution_step_at(plan, 1).copy_count == 0);
            xdi_redistribution_shape(plan, shape);
            CHECK_EQ_INT(shape[0], form == 0 ? (r == 2 ? 3 : 4) : form == 1 ? 11 : 7);
            CHECK_EQ_INT(shape[1], form == 2 ? 3 : 5);
            xdi_redistribution_destroy(plan);
        }
    xd_layout_destroy(whole);
    xd_layout_destroy(cut);
    xd_ctx_destroy(ctx);
}

XD_TEST(nested_shards_follow_the_application_order) {
    /* n, tp, dp, then (offset, size) for each tp and dp: tp splits first although it is the faster axis. */
    static const int cases[][27] = {
        { 5, 2, 2, 0, 2, 2, 1, 3, 1, 4, 1 },
        { 6, 2, 2, 0, 2, 2, 1, 3, 2, 5, 1 },
        { 7, 2, 3, 0, 2, 2, 2, 4, 0, 4, 1, 5, 1, 6, 1 },
        { 10, 4, 2, 0, 2, 2, 1, 3, 2, 5, 1, 6, 2, 8, 1, 9, 1, 10, 0 },
    };
    xd_ctx *ctx = plain_ctx();
    for (int i = 0; i < 4; i++) {
        const int tp = cases[i][1], dp = cases[i][2];
        const xd_topology t = grid(dp, tp);
        xd_layout_desc d = line(&t, cases[i][0]);
        xd_layout *layout = NULL;
        d.placement[0].kind = d.placement[1].kind = XD_SHARD;
        d.order[0] = 1;
        d.order[1] = 0;
        CHECK(xd_layout_create(ctx, &d, &layout) == XD_OK);
        for (int a = 0; layout && a < tp; a++)
            for (int b = 0; b < dp; b++) {
                xd_region region;
                const int *expected = &cases[i][3 + 2 * (a * dp + b)];
                xd_layout_region(layout, b * tp + a, &region);
                CHECK_EQ_INT(xdi_region_numel(&region), expected[1]);
                if (expected[1]) CHECK_EQ_INT(region.interval[0][0].begin, expected[0]);
            }
        xd_layout_destroy(layout);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(every_layout_up_to_40_indices_and_12_ranks_equals_the_model) {
    xd_ctx *ctx = plain_ctx();
    long layouts = 0, wrong = 0;
    for (int a = 1; a <= RANKS; a++)
        for (int b = 1; a * b <= RANKS; b++)
            for (int n = 0; n <= 40; n++)
                for (int form = 0; form < 20; form++) {
                    const xd_topology t = grid(a, b);
                    xd_layout_desc d = line(&t, n);
                    int64_t offsets[RANKS + 1] = { 0 }, sizes[3];
                    uint64_t state = (uint64_t)(a * 1000 + b * 100 + n);
                    const int first = form & 1, kind = form >> 1 & 1, split = form / 4;
                    const int extent_needs = split == 1 ? 3 : split == 2 ? 2 * t.size[first] : 1;
                    d.order[0] = first;
                    d.order[1] = !first;
                    d.placement[first].kind = XD_SHARD;
                    d.placement[!first].kind = kind ? XD_SHARD : XD_REPLICATE;
                    if (n % extent_needs) continue;
                    if (split == 1) d.placement[first].sections = 3;
                    if (split == 2) d.placement[first].balanced = true;
                    if (split == 3) {
                        sizes[0] = n / 2;
                        sizes[1] = n - n / 2 - n / 7;
                        sizes[2] = n / 7;
                        d.placement[first].sections = 3;
                        d.placement[first].section_sizes = sizes;
                    }
                    if (split == 4) {
                        for (int i = 0; i < t.size[first]; i++)
                            offsets[i + 1] = i + 1 < t.size[first]
                                                 ? offsets[i] + model_draw(&state, n - (int)offsets[i] + 1)
                                                 : n;
                        d.placement[first].offsets = offsets;
                    }
                    xd_layout *layout = NULL;
                    layouts++;
                    if (xd_layout_create(ctx, &d, &layout) != XD_OK || !layout_is_right(layout, RANKS))
                        wrong++;
                    xd_layout_destroy(layout);
                }
    CHECK_EQ_INT(wrong, 0);
    CHECK(layouts > 20000);
    xd_ctx_destroy(ctx);
}

XD_TEST(bad_layouts_are_refused_with_both_numbers) {
    xd_ctx *ctx = plain_ctx();
    const xd_topology t = grid(2, 2);
    const int64_t gap[3] = { 0, 4, 9 }, back[3] = { 0, 11, 10 };
    xd_layout *layout = NULL;
    xd_layout_desc d = line(&t, 10);
    d.placement[0].kind = XD_SHARD;
    d.placement[0].offsets = gap;
    CHECK(xd_layout_create(ctx, &d, &layout) == XD_ERROR_SHAPE);
    CHECK(strstr(xd_last_error(ctx)->message, "splits 10 indices") &&
          strstr(xd_last_error(ctx)->message, "end at 9"));
    d.placement[0].offsets = back;
    CHECK(xd_layout_create(ctx, &d, &layout) == XD_ERROR_ARGUMENT);
    d.placement[0].offsets = NULL;
    d.placement[0].balanced = true;
    CHECK(xd_layout_create(ctx, &d, &layout) == XD_ERROR_SHAPE);
    d.placement[0].sections = 2;
    CHECK(xd_layout_create(ctx, &d, &layout) == XD_ERROR_ARGUMENT);
    d = line(&t, 10);
    d.placement[1].kind = XD_SHARD;
    d.placement[1].dim = 1;
    CHECK(xd_layout_create(ctx, &d, &layout) == XD_ERROR_ARGUMENT);
    d = line(&t, 10);
    d.placement[0].kind = d.placement[1].kind = XD_PARTIAL;
    d.placement[1].op = XD_MAX;
    CHECK(xd_layout_create(ctx, &d, &layout) == XD_ERROR_UNSUPPORTED);
    d = line(&t, -1);
    CHECK(xd_layout_create(ctx, &d, &layout) == XD_ERROR_SHAPE);
    d = line(&t, INT64_MAX);
    CHECK(xd_layout_create(ctx, &d, &layout) == XD_ERROR_SHAPE);
    CHECK(layout == NULL);
    xd_ctx_destroy(ctx);
}

/* ---- plans ---- */

/* What one rank's element holds before, and what it must hold afterwards. Partial coordinates add up to 7 x
 * number. */
static int64_t partial_weight(const xd_layout_desc *d, int rank) {
    int c[XD_MESH_AXES_MAX], linear = 0, size = 1;
    coordinate_of(d->topology, rank, c);
    for (int i = 0; i < d->topology->axis_count; i++) {
        if (d->placement[i].kind != XD_PARTIAL) continue;
        linear = linear * d->topology->size[i] + c[i];
        size *= d->topology->size[i];
    }
    if (size == 1) return 7;
    return linear == 0 ? 7 - 3 * (size - 1) : 3;
}

static int64_t *filled(const xd_layout_desc *d, int rank, int64_t *out) {
    int held[MODEL_NUMEL];
    const int count = model_held(d, rank, held);
    for (int i = 0; i < count; i++) out[i] = partial_weight(d, rank) * (held[i] + 1);
    return out;
}

static long differing(const xd_layout_desc *d, int rank, const int64_t *got) {
    int held[MODEL_NUMEL];
    const int count = model_held(d, rank, held);
    long wrong = 0;
    for (int i = 0; i < count; i++) wrong += got[i] != partial_weight(d, rank) * (held[i] + 1);
    return wrong;
}

static bool has_partial(const xd_layout_desc *d) {
    for (int i = 0; i < d->topology->axis_count; i++)
        if (d->placement[i].kind == XD_PARTIAL && d->topology->size[i] > 1) return true;
    return false;
}

/* Elements that must move at least: those a rank is to have and does not hold. Only for layouts without
 * partial axes. */
static int64_t least_moved(const xd_layout_desc *from, const xd_layout_desc *to) {
    int64_t moved = 0;
    for (int r = 0; r < RANKS; r++) {
        int a[MODEL_NUMEL], b[MODEL_NUMEL];
        const int na = model_held(from, r, a), nb = model_held(to, r, b);
        for (int i = 0, k = 0; i < nb; i++) {
            while (k < na && a[k] < b[i]) k++;
            moved += k >= na || a[k] != b[i];
        }
    }
    return moved;
}

/* Makes every rank's plan, moves the bytes between arrays, and counts wrong elements. */
static long simulate(xd_ctx *ctx, const xd_layout *from, const xd_layout *to) {
    static int64_t src[RANKS][MODEL_NUMEL], dst[RANKS][MODEL_NUMEL];
    xdi_redistribution *plans[RANKS] = { NULL };
    void *send[RANKS], *recv[RANKS];
    const xd_layout_desc *df = xd_layout_settings(from), *dt = xd_layout_settings(to);
    long wrong = 0;
    int64_t total = 0;
    for (int r = 0; r < RANKS; r++) {
        xdi_redistribution_desc d;
        memset(&d, 0, sizeof d);
        d.from = from;
        d.to = to;
        d.dtype = XD_DTYPE_I64;
        d.ranks = RANKS;
        d.rank = r;
        if (xdi_redistribution_create(ctx, &d, &plans[r]) != XD_OK) return 1;
        filled(df, r, src[r]);
    }
    for (int s = 0; s < xdi_redistribution_step_count(plans[0]); s++) {
        xdi_redistribution_step steps[RANKS];
        for (int r = 0; r < RANKS; r++) {
            steps[r] = xdi_redistribution_step_at(plans[r], s);
            send[r] = malloc((size_t)steps[r].send_count * 8 + 1);
            recv[r] = malloc((size_t)steps[r].recv_capacity * 8 + 1);
            xdi_redistribution_pack(plans[r], s, src[r], send[r]);
            wrong += steps[r].total_count != steps[0].total_count;
            total += steps[r].send_count;
        }
        for (int a = 0; a < RANKS; a++)
            for (int b = 0; b < RANKS; b++) {
                const int64_t n = steps[a].send_counts[b];
                wrong += n != steps[b].recv_counts[a] || (a == b && n != 0);
                memcpy((char *)recv[b] + 8 * steps[b].recv_displacements[a],
                       (char *)send[a] + 8 * steps[a].send_displacements[b], (size_t)n * 8);
            }
        for (int r = 0; r < RANKS; r++) {
            wrong += xdi_redistribution_unpack(plans[r], s, src[r], recv[r], dst[r]) != XD_OK;
            free(send[r]);
            free(recv[r]);
        }
    }
    for (int r = 0; r < RANKS; r++) {
        wrong += differing(dt, r, dst[r]);
        xdi_redistribution_destroy(plans[r]);
    }
    if (!has_partial(df) && !has_partial(dt)) wrong += total != least_moved(df, dt);
    return wrong;
}

XD_TEST(every_plan_between_two_lines_of_ranks_moves_what_is_missing_and_no_more) {
    xd_ctx *ctx = plain_ctx();
    long wrong = 0;
    for (int a = 1; a <= RANKS; a++)
        for (int b = 1; b <= RANKS; b++)
            for (int n = 0; n <= 40; n += XD_TEST_SANITIZED ? 3 : 1)
                for (int form = 0; form < 6; form++) { /* {shard, replica, partial} to {shard, replica} */
                    const xd_topology ta = grid(a, 0), tb = grid(b, 0);
                    xd_layout_desc da = line(&ta, n), db = line(&tb, n);
                    xd_layout *from = NULL, *to = NULL;
                    da.placement[0].kind = form / 2 == 0   ? XD_SHARD
                                           : form / 2 == 1 ? XD_REPLICATE
                                                           : XD_PARTIAL;
                    db.placement[0].kind = form % 2 ? XD_REPLICATE : XD_SHARD;
                    wrong += xd_layout_create(ctx, &da, &from) != XD_OK ||
                             xd_layout_create(ctx, &db, &to) != XD_OK;
                    wrong += simulate(ctx, from, to);
                    xd_layout_destroy(from);
                    xd_layout_destroy(to);
                }
    CHECK_EQ_INT(wrong, 0);
    xd_ctx_destroy(ctx);
}

/* A random layout of the shape: any mesh of up to three axes over any ranks, any placement. */
static void draw_layout(uint64_t *state, xd_layout_desc *d, xd_topology *t, int *ranks, int64_t *offsets) {
    for (int i = 0; i < RANKS; i++) ranks[i] = i;
    for (int i = RANKS - 1; i > 0; i--) {
        const int k = model_draw(state, i + 1), swap = ranks[i];
        ranks[i] = ranks[k];
        ranks[k] = swap;
    }
    memset(t, 0, sizeof *t);
    t->axis_count = 1 + model_draw(state, 3);
    t->rank_count = 1;
    for (int i = 0; i < t->axis_count; i++) {
        t->size[i] = 1 + model_draw(state, RANKS / t->rank_count < 4 ? RANKS / t->rank_count : 4);
        t->rank_count *= t->size[i];
    }
    t->ranks = ranks;
    d->topology = t;
    memset(d->placement, 0, sizeof d->placement);
    const int turn = model_draw(state, t->axis_count);
    for (int i = 0; i < t->axis_count; i++) {
        xd_placement *p = &d->placement[i];
        d->order[i] = (i + turn) % t->axis_count;
        p->kind = (xd_placement_kind)model_draw(state, 3);
        p->dim = d->ndim ? model_draw(state, d->ndim) : 0;
        if (p->kind == XD_SHARD && d->ndim == 0) p->kind = XD_REPLICATE;
        if (p->kind == XD_SHARD && d->shape[p->dim] % 2 == 0 && i == turn && model_draw(state, 2))
            p->sections = 2;
        if (p->kind != XD_SHARD || i != turn || p->sections || model_draw(state, 2)) continue;
        for (int k = 0; k < t->size[i]; k++)
            offsets[k + 1] = k + 1 < t->size[i]
                                 ? offsets[k] + model_draw(state, (int)(d->shape[p->dim] - offsets[k]) + 1)
                                 : d->shape[p->dim];
        p->offsets = offsets;
    }
}

XD_TEST(plans_between_drawn_meshes_of_up_to_three_axes_equal_the_model) {
    xd_ctx *ctx = plain_ctx();
    uint64_t state = 7;
    long done = 0, wrong = 0;
    for (int i = 0; i < 3000; i++) {
        xd_topology ta, tb;
        xd_layout_desc da, db;
        int ra[RANKS], rb[RANKS];
        int64_t oa[RANKS + 1] = { 0 }, ob[RANKS + 1] = { 0 };
        xd_layout *from = NULL, *to = NULL;
        memset(&da, 0, sizeof da);
        da.ndim = model_draw(&state, 4);
        for (int k = 0; k < da.ndim; k++) da.shape[k] = model_draw(&state, k ? 9 : 14);
        db = da;
        draw_layout(&state, &da, &ta, ra, oa);
        draw_layout(&state, &db, &tb, rb, ob);
        if (model_draw(&state, 2)) { /* the same mesh, so that partial destinations are legal too */
            memcpy(rb, ra, sizeof rb);
            tb = ta;
            tb.ranks = rb;
            db.topology = &tb;
            memset(db.placement, 0, sizeof db.placement);
            memcpy(db.order, da.order, sizeof db.order);
            for (int k = 0; k < ta.axis_count; k++) {
                db.placement[k].kind = (xd_placement_kind)model_draw(&state, db.ndim ? 3 : 1);
                db.placement[k].dim = db.ndim ? model_draw(&state, db.ndim) : 0;
                const bool sharded = da.placement[k].kind == XD_SHARD,
                           partial = db.placement[k].kind == XD_PARTIAL;
                if (partial && (sharded || da.placement[k].kind == XD_REPLICATE))
                    db.placement[k].kind = XD_REPLICATE;
            }
            /* What stays partial keeps what each rank holds, so the model needs the same axes. */
            for (int k = 0; k < ta.axis_count; k++)
                if (has_partial(&db))
                    db.placement[k].kind =
                        da.placement[k].kind == XD_PARTIAL ? XD_PARTIAL : db.placement[k].kind;
        } else
            for (int k = 0; k < tb.axis_count; k++)
                if (db.placement[k].kind == XD_PARTIAL) db.placement[k].kind = XD_REPLICATE;
        wrong += xd_layout_create(ctx, &da, &from) != XD_OK || xd_layout_create(ctx, &db, &to) != XD_OK;
        if (from && to) {
            const long bad = simulate(ctx, from, to);
            wrong += bad;
            done++;
            if (bad && xd_test_fail())
                printf("case %d: %ld wrong, %s\n", i, bad, xd_last_error(ctx)->message);
        }
        xd_layout_destroy(from);
        xd_layout_destroy(to);
    }
    CHECK_EQ_INT(wrong, 0);
    CHECK_EQ_INT(done, 3000);
    xd_ctx_destroy(ctx);
}

/* There is no TiB. A sanitizer ends a process that asks malloc for so much. */
static void *allocate_within_reason(void *user, size_t bytes) {
    (void)user;
    return bytes < (size_t)1 << 40 ? malloc(bytes) : NULL;
}

static void release_again(void *user, void *memory) {
    (void)user;
    free(memory);
}

/* 2^62 elements are legal in a layout; their bytes are not a number, and messages of many ranks are more elements. */
XD_TEST(a_plan_whose_bytes_are_no_number_is_refused) {
    static const struct {
        int64_t extent;
        xd_dtype dtype;
        int ranks;
        xd_result expected;
    } cases[] = { { INT64_C(1) << 62, XD_DTYPE_F32, 1, XD_ERROR_SHAPE },
                  { INT64_C(1) << 61, XD_DTYPE_F32, 1, XD_ERROR_SHAPE },
                  { INT64_C(1) << 62, XD_DTYPE_U8, 1, XD_OK },
                  { INT64_C(1) << 60, XD_DTYPE_F32, 1, XD_OK },
                  { INT64_C(1) << 60, XD_DTYPE_F32, 8, XD_ERROR_MEMORY },
                  { INT64_C(1) << 62, XD_DTYPE_U8, 8, XD_ERROR_MEMORY } };
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    memset(&desc, 0, sizeof desc);
    desc.allocator.allocate = allocate_within_reason;
    desc.allocator.release = release_again;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const xd_topology t = grid(cases[i].ranks, 0);
        xd_layout_desc d = line(&t, cases[i].extent);
        xd_layout *whole = NULL, *sum = NULL;
        xdi_redistribution_desc p;
        xdi_redistribution *plan = NULL;
        CHECK(xd_layout_create(ctx, &d, &whole) == XD_OK);
        d.placement[0].kind = XD_PARTIAL;
        d.placement[0].op = XD_MAX;
        CHECK(xd_layout_create(ctx, &d, &sum) == XD_OK);
        memset(&p, 0, sizeof p);
        p.from = cases[i].ranks > 1 ? sum : whole;
        p.to = whole;
        p.dtype = cases[i].dtype;
        p.ranks = cases[i].ranks;
        CHECK_EQ_INT(xdi_redistribution_create(ctx, &p, &plan), cases[i].expected);
        if (cases[i].expected == XD_ERROR_SHAPE)
            CHECK(strstr(xd_last_error(ctx)->message, "elements of F32 has more than 2^63 bytes") != NULL);
        xdi_redistribution_destroy(plan);
        xd_layout_destroy(sum);
        xd_layout_destroy(whole);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(transitions_that_have_no_meaning_are_refused) {
    xd_ctx *ctx = plain_ctx();
    const xd_topology t = grid(2, 0), other = grid(3, 0);
    xd_layout_desc d = line(&t, 6);
    xd_layout *shard = NULL, *sum = NULL, *max = NULL, *elsewhere = NULL, *longer = NULL;
    d.placement[0].kind = XD_SHARD;
    CHECK(xd_layout_create(ctx, &d, &shard) == XD_OK);
    d.placement[0].kind = XD_PARTIAL;
    CHECK(xd_layout_create(ctx, &d, &sum) == XD_OK);
    d.placement[0].op = XD_MAX;
    CHECK(xd_layout_create(ctx, &d, &max) == XD_OK);
    d.topology = &other;
    CHECK(xd_layout_create(ctx, &d, &elsewhere) == XD_OK);
    d = line(&t, 7);
    CHECK(xd_layout_create(ctx, &d, &longer) == XD_OK);
    const struct {
        const xd_layout *from, *to;
        xd_dtype dtype;
        int ranks;
        xd_result expected;
    } cases[] = {
        { shard, sum, XD_DTYPE_F32, 3, XD_ERROR_UNSUPPORTED },
        { sum, max, XD_DTYPE_F32, 3, XD_ERROR_UNSUPPORTED },
        { max, elsewhere, XD_DTYPE_F32, 3, XD_ERROR_UNSUPPORTED },
        { shard, longer, XD_DTYPE_F32, 3, XD_ERROR_SHAPE },
        { sum, shard, XD_DTYPE_BOOL, 3, XD_ERROR_DTYPE },
        { shard, shard, XD_DTYPE_NONE, 3, XD_ERROR_ARGUMENT },
        { shard, shard, XD_DTYPE_F32, 1, XD_ERROR_TOPOLOGY },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        xdi_redistribution_desc p;
        xdi_redistribution *plan = NULL;
        memset(&p, 0, sizeof p);
        p.from = cases[i].from;
        p.to = cases[i].to;
        p.dtype = cases[i].dtype;
        p.ranks = cases[i].ranks;
        CHECK_EQ_INT(xdi_redistribution_create(ctx, &p, &plan), cases[i].expected);
        CHECK(plan == NULL);
    }
    xd_layout_destroy(longer);
    xd_layout_destroy(elsewhere);
    xd_layout_destroy(max);
    xd_layout_destroy(sum);
    xd_layout_destroy(shard);
    xd_ctx_destroy(ctx);
}

/* ---- execution ---- */

/* A move of [4, 6] over 2 by 2 ranks that one rank plans otherwise. */
static xd_result plan_otherwise(xd_ctx *ctx, int what, bool odd, int rank, xd_layout *ends[2],
                                xdi_redistribution **plan) {
    static const int64_t offsets[] = { 0, 1, 4 };
    const xd_topology t = odd && what == 2 ? grid(1, 4) : grid(2, 2);
    xd_layout_desc from = line(&t, 4), to;
    xdi_redistribution_desc p;
    from.ndim = 2;
    from.shape[1] = odd && what == 1 ? 8 : 6;
    to = from;
    from.placement[0].kind = to.placement[1].kind = XD_SHARD;
    if (odd && what == 3) from.placement[0].dim = 1;
    if (odd && what == 4) to.placement[1].kind = XD_REPLICATE;
    if (odd && what == 5) to.placement[1].offsets = offsets;
    XD_TRY(xd_layout_create(ctx, &from, &ends[0]));
    XD_TRY(xd_layout_create(ctx, &to, &ends[1]));
    memset(&p, 0, sizeof p);
    p.from = ends[0];
    p.to = ends[1];
    p.dtype = odd && what == 0 ? XD_DTYPE_F64 : XD_DTYPE_F32;
    p.ranks = 4;
    p.rank = rank;
    return xdi_redistribution_create(ctx, &p, plan);
}

static xd_result run_other_plans(xd_comm *world, void *argument) {
    static const char *const texts[] = { "dtype = F64, rank 0 passed F32",
                                         "from.shape[1] = 8, rank 0 passed 6",
                                         "from.axes[0].size = 1, rank 0 passed 2",
                                         "from.placement[0].dim = 1, rank 0 passed 0",
                                         "to.placement[1].kind = 0, rank 0 passed 1",
                                         "another to.op, offsets, sections, balanced, or order" };
    xd_ctx *ctx = xd_comm_ctx(world);
    const int me = xd_comm_rank(world);
    (void)argument;
    for (int what = 0; what < (int)(sizeof texts / sizeof texts[0]); what++) {
        xd_layout *ends[2] = { NULL, NULL };
        xdi_redistribution *plan = NULL;
        char text[128];
        CHECK(plan_otherwise(ctx, what, me == 3, me, ends, &plan) == XD_OK);
        CHECK_EQ_INT(xdi_redistribution_agree(plan, world, XD_OK), XD_ERROR_MISMATCH);
        snprintf(text, sizeof text, "redistribution: rank 3 passed %s", texts[what]);
        if (!strstr(xd_last_error(ctx)->message, text)) CHECK_EQ_STR(xd_last_error(ctx)->message, text);
        xdi_redistribution_destroy(plan);
        for (int i = 0; i < 2; i++) xd_layout_destroy(ends[i]);
    }
    return XD_OK;
}

XD_TEST(ranks_that_plan_other_moves_are_named_with_the_field_and_both_values) {
    CHECK_EQ_INT(xd_run_threads(4, NULL, run_other_plans, NULL, NULL), XD_OK);
}

/* One rank moves random layouts around and compares with the model and with the transport's counters. */
static xd_result run_moves(xd_comm *world, void *argument) {
    const int size = xd_comm_size(world), me = xd_comm_rank(world);
    xd_ctx *ctx = xd_comm_ctx(world);
    uint64_t state = 100 + (uint64_t)size;
    (void)argument;
    for (int i = 0; i < 60; i++) {
        static const xd_placement_kind kinds[5][2] = { { XD_SHARD, XD_REPLICATE },
                                                       { XD_REPLICATE, XD_SHARD },
                                                       { XD_SHARD, XD_SHARD },
                                                       { XD_PARTIAL, XD_SHARD },
                                                       { XD_PARTIAL, XD_REPLICATE } };
        const int members = size - (i % 3 == 2 && size > 1); /* sometimes smaller than the world */
        xd_topology ta = grid(members, 0), tb = grid(size, 0);
        xd_layout_desc da = line(&ta, 0), db;
        xd_layout *from = NULL, *to = NULL;
        xdi_redistribution *plan = NULL;
        int64_t src[512], dst[512];
        da.ndim = 2;
        da.shape[0] = model_draw(&state, 12);
        da.shape[1] = model_draw(&state, 8);
        db = da;
        db.topology = &tb;
        da.placement[0].kind = kinds[i % 5][0];
        db.placement[0].kind = kinds[i % 5][1];
        db.placement[0].dim = 1;
        CHECK(xd_layout_create(ctx, &da, &from) == XD_OK && xd_layout_create(ctx, &db, &to) == XD_OK);
        xdi_redistribution_desc p;
        memset(&p, 0, sizeof p);
        p.from = from;
        p.to = to;
        p.dtype = XD_DTYPE_I64;
        p.ranks = size;
        p.rank = me;
        CHECK(xdi_redistribution_create(ctx, &p, &plan) == XD_OK);
        CHECK(xdi_redistribution_agree(plan, world, XD_OK) == XD_OK);
        const xd_comm_counters before = xd_comm_traffic(world);
        CHECK(xdi_redistribution_execute(plan, world, filled(&da, me, src), dst) == XD_OK);
        const xd_comm_counters after = xd_comm_traffic(world);
        CHECK_EQ_INT(after.bytes_sent - before.bytes_sent, xdi_redistribution_bytes_sent(plan));
        CHECK_EQ_INT(differing(&db, me, dst), 0);
        xd_tensor from_view = xd_tensor_view(from, me, src, XD_DTYPE_I64),
                  to_view = xd_tensor_view(to, me, dst, XD_DTYPE_I64);
        memset(dst, 0, sizeof dst);
        CHECK(xd_redistribute(world, &from_view, &to_view) == XD_OK);
        CHECK_EQ_INT(differing(&db, me, dst), 0);
        xdi_redistribution_destroy(plan);
        xd_layout_destroy(from);
        xd_layout_destroy(to);
    }
    return XD_OK;
}

XD_TEST(executed_moves_equal_the_model_and_the_bytes_equal_the_plan) {
    static const int worlds[] = { 1, 2, 3, 4, 6, 8 };
    for (int i = 0; i < 6; i++) CHECK(xd_run_threads(worlds[i], NULL, run_moves, NULL, NULL) == XD_OK);
}

static xd_result run_gather(xd_comm *world, void *argument) {
    const int size = xd_comm_size(world), me = xd_comm_rank(world);
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_topology t = grid(size, 0);
    xd_layout_desc d = line(&t, 11);
    xd_layout *layout = NULL;
    int64_t src[64], full[64], part[64];
    const xd_interval window[2] = { { 3, 9 }, { 1, 4 } }, past[2] = { { 3, 3 }, { 1, 6 } },
                      back[2] = { { 3, 2 }, { 0, 1 } };
    (void)argument;
    d.ndim = 2;
    d.shape[1] = 5;
    d.placement[0].kind = XD_SHARD;
    CHECK(xd_layout_create(ctx, &d, &layout) == XD_OK);
    xd_tensor view = xd_tensor_view(layout, me, filled(&d, me, src), XD_DTYPE_I64);
    CHECK(xd_tensor_gather(world, &view, NULL, -1, full) == XD_OK);
    for (int i = 0; i < 55; i++) CHECK_EQ_INT(full[i], 7 * (i + 1));
    memset(full, 0, sizeof full);
    CHECK(xd_tensor_gather(world, &view, NULL, size - 1, me == size - 1 ? full : NULL) == XD_OK);
    for (int i = 0; me == size - 1 && i < 55; i++) CHECK_EQ_INT(full[i], 7 * (i + 1));
    CHECK(xd_tensor_gather(world, &view, window, 0, me == 0 ? part : NULL) == XD_OK);
    for (int i = 0; me == 0 && i < 18; i++) CHECK_EQ_INT(part[i], 7 * ((3 + i / 3) * 5 + 1 + i % 3 + 1));
    CHECK(xd_tensor_gather(world, &view, past, 0, NULL) == XD_ERROR_ARGUMENT);
    CHECK(xd_tensor_gather(world, &view, back, 0, NULL) == XD_ERROR_ARGUMENT);
    if (me == size - 1) view.shape[0]++;
    const xd_result expected = me == size - 1 ? XD_ERROR_SHAPE : XD_ERROR_PEER;
    CHECK_EQ_INT(xd_tensor_gather(world, &view, NULL, -1, full), expected);
    xd_layout_destroy(layout);
    return XD_OK;
}

XD_TEST(full_tensors_ranges_and_one_rank_gathers_are_exact_and_errors_are_agreed) {
    for (int size = 1; size <= 6; size++) CHECK(xd_run_threads(size, NULL, run_gather, NULL, NULL) == XD_OK);
}

/* Averages and extrema: reduced like the transport's own collective, bit for bit. */
static xd_result run_reductions(xd_comm *world, void *argument) {
    static const xd_reduce_op ops[] = { XD_SUM, XD_MAX, XD_MIN, XD_AVG };
    const int size = xd_comm_size(world), me = xd_comm_rank(world);
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_topology t = grid(size, 0);
    (void)argument;
    for (int i = 0; i < 4; i++) {
        xd_layout_desc d = line(&t, 13);
        xd_layout *partial = NULL;
        float mine[13], want[13], got[13];
        for (int k = 0; k < 13; k++) mine[k] = 1.0f / (float)(1 + k + 17 * me);
        d.placement[0].kind = XD_PARTIAL;
        d.placement[0].op = ops[i];
        CHECK(xd_layout_create(ctx, &d, &partial) == XD_OK);
        const xd_tensor view = xd_tensor_view(partial, me, mine, XD_DTYPE_F32);
        CHECK(xd_tensor_gather(world, &view, NULL, -1, got) == XD_OK);
        CHECK(xd_all_reduce(world, mine, want, 13, XD_DTYPE_F32, ops[i]) == XD_OK);
        CHECK(memcmp(got, want, sizeof got) == 0);
        xd_layout_destroy(partial);
    }
    return XD_OK;
}

XD_TEST(partial_values_reduce_to_the_bits_of_all_reduce) {
    for (int size = 1; size <= 5; size++)
        CHECK(xd_run_threads(size, NULL, run_reductions, NULL, NULL) == XD_OK);
}

static xd_result run_sum_of_replicas(xd_comm *world, void *argument) {
    const int me = xd_comm_rank(world);
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_topology t = grid(xd_comm_size(world), 0);
    xd_layout_desc d = line(&t, 5);
    xd_layout *replicated = NULL, *sum = NULL;
    float value[5] = { 1, 2, 3, 4, 5 }, out[5] = { 9, 9, 9, 9, 9 };
    (void)argument;
    CHECK(xd_layout_create(ctx, &d, &replicated) == XD_OK);
    d.placement[0].kind = XD_PARTIAL;
    CHECK(xd_layout_create(ctx, &d, &sum) == XD_OK);
    const xd_tensor a = xd_tensor_view(replicated, me, value, XD_DTYPE_F32),
                    b = xd_tensor_view(sum, me, out, XD_DTYPE_F32);
    CHECK(xd_redistribute(world, &a, &b) == XD_OK);
    for (int i = 0; i < 5; i++) CHECK_NEAR(out[i], me ? 0.0f : value[i], 0);
    xd_layout_destroy(sum);
    xd_layout_destroy(replicated);
    return XD_OK;
}

/* Between rows with room behind them: the elements are those of a dense move, and what is between them stays. */
static xd_result run_padded(xd_comm *world, void *argument) {
    enum { LINES = 7, WIDTH = 5, FROM = 8, TO = 11, ROOM = LINES * TO };
    static const xd_placement_kind kinds[][2] = {
        { XD_SHARD, XD_SHARD },     { XD_REPLICATE, XD_SHARD },    { XD_SHARD, XD_REPLICATE },
        { XD_PARTIAL, XD_SHARD },   { XD_PARTIAL, XD_REPLICATE },  { XD_REPLICATE, XD_PARTIAL },
        { XD_PARTIAL, XD_PARTIAL }, { XD_REPLICATE, XD_REPLICATE }
    };
    static const int64_t from_stride[] = { FROM, 1 }, to_stride[] = { TO, 1 };
    xd_ctx *ctx = xd_comm_ctx(world);
    const int me = xd_comm_rank(world);
    const xd_topology t = grid(xd_comm_size(world), 0);
    (void)argument;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        xd_layout_desc d = line(&t, LINES);
        xd_layout *from = NULL, *to = NULL;
        int64_t dense[ROOM] = { 0 }, expected[ROOM], padded[ROOM], out[ROOM], width = 0;
        d.ndim = 2;
        d.shape[1] = WIDTH;
        d.placement[0].kind = kinds[i][0];
        CHECK(xd_layout_create(ctx, &d, &from) == XD_OK);
        d.placement[0].kind = kinds[i][1];
        d.placement[0].dim = 1;
        CHECK(xd_layout_create(ctx, &d, &to) == XD_OK);
        for (int k = 0; k < ROOM; k++) padded[k] = -7, out[k] = expected[k] = -9;
        for (int k = 0; k < LINES * WIDTH; k++)
            padded[k / WIDTH * FROM + k % WIDTH] = dense[k] = 100 * (kinds[i][0] != XD_REPLICATE) * me + k;
        for (int form = 0; form < 2; form++) {
            xdi_redistribution *plan = NULL;
            xdi_redistribution_desc p;
            int64_t shape[2] = { 0, 0 };
            memset(&p, 0, sizeof p);
            p.from = from;
            p.to = to;
            p.dtype = XD_DTYPE_I64;
            p.ranks = t.size[0];
            p.rank = me;
            if (form) p.from_stride = from_stride;
            if (form) p.to_stride = to_stride;
            CHECK(xdi_redistribution_create(ctx, &p, &plan) == XD_OK);
            CHECK_EQ_INT(
                xdi_redistribution_execute(plan, world, form ? padded : dense, form ? out : expected), XD_OK);
            xdi_redistribution_shape(plan, shape);
            width = shape[1];
            xdi_redistribution_destroy(plan);
        }
        const int64_t lines = xd_tensor_view(to, me, NULL, XD_DTYPE_I64).shape[0];
        for (int k = 0; k < ROOM; k++) {
            const bool within = k / TO < lines && k % TO < width;
            CHECK_EQ_INT(out[k], within ? expected[k / TO * width + k % TO] : -9);
        }
        xd_layout_destroy(to);
        xd_layout_destroy(from);
    }
    return XD_OK;
}

XD_TEST(padded_rows_move_as_dense_ones_and_their_padding_stays) {
    for (int size = 1; size <= 3; size++) CHECK(xd_run_threads(size, NULL, run_padded, NULL, NULL) == XD_OK);
}

XD_TEST(a_replica_becomes_a_partial_sum_by_zeros_beside_it) {
    CHECK(xd_run_threads(3, NULL, run_sum_of_replicas, NULL, NULL) == XD_OK);
}

XD_TEST_MAIN()
