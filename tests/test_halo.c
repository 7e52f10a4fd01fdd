/* Halo exchange: every place of every part against the definition, on up to 8 ranks; bits of the backward; bytes; refusals. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "live_bytes.h"
#include "planned.h"
#include "xd_test.h"

#include "halo_scene.h"

static const xd_dtype halo_dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F64, XD_DTYPE_F16,
                                        XD_DTYPE_I32 };

/* ---- one exchange ---- */

static void check_forward(const halo_scene *s, xd_halo *halo, int rank, void *part, void *wide) {
    int64_t(*own)[2] = (int64_t(*)[2])s->own[rank], (*box)[2] = (int64_t(*)[2])s->wide[rank];
    const int64_t n = halo_numel(s, own), w = halo_numel(s, box);
    int64_t shape[HALO_DIMS], bad = 0;
    for (int64_t k = 0; k < n; k++) {
        halo_index at;
        halo_at(s, own, k, at);
        halo_put(part, s->halo.dtype, k, halo_value(halo_key(s, 1, at), s->halo.dtype));
    }
    memset(wide, 0x5a, HALO_ROOM);
    CHECK_EQ_INT(xd_halo_exchange(halo, n ? part : NULL, w ? wide : NULL), XD_OK);
    xd_halo_shape(halo, shape);
    for (int d = 0; d < s->cut.ndim && n; d++) CHECK_EQ_INT(shape[d], box[d][1] - box[d][0]);
    for (int64_t k = 0; k < w; k++) {
        halo_index q, i;
        int zone;
        halo_at(s, box, k, q);
        const double expected =
            halo_source(s, q, i, &zone) ? halo_value(halo_key(s, 1, i), s->halo.dtype) : 0.0;
        bad += halo_get(wide, s->halo.dtype, k) != expected;
    }
    CHECK_EQ_INT(bad, 0);
    const size_t used = (size_t)w * xd_dtype_size(s->halo.dtype);
    CHECK_EQ_INT(((unsigned char *)wide)[used], 0x5a); /* nothing behind it */
}

static void check_backward(const halo_scene *s, xd_halo *halo, int rank, void *part, void *wide) {
    static __thread halo_term terms[HALO_TERMS];
    int64_t(*own)[2] = (int64_t(*)[2])s->own[rank], (*box)[2] = (int64_t(*)[2])s->wide[rank];
    const int64_t n = halo_numel(s, own), w = halo_numel(s, box);
    const bool complete = s->halo.gradient == XD_HALO_COMPLETE;
    int64_t bad = 0, shared = 0;
    for (int64_t k = 0; k < w; k++) {
        halo_index q;
        halo_at(s, box, k, q);
        const bool read = !complete || halo_speaks(s, rank, q);
        halo_put(wide, s->halo.dtype, k, read ? halo_gradient(s, rank, q) : -12345.0);
    }
    memset(part, 0x5a, HALO_ROOM);
    CHECK_EQ_INT(xd_halo_exchange_backward(halo, w ? wide : NULL, n ? part : NULL), XD_OK);
    for (int64_t k = 0; k < n; k++) {
        halo_index at;
        halo_at(s, own, k, at);
        const int count = halo_terms(s, rank, at, terms);
        bad += halo_get(part, s->halo.dtype, k) != halo_sum(terms, count, s->halo.dtype);
        /* of a complete gradient no two ranks give the same image */
        for (int i = 1; complete && i < count; i++) shared += terms[i].zone == terms[i - 1].zone;
    }
    CHECK_EQ_INT(bad, 0);
    CHECK_EQ_INT(shared, 0);
    CHECK_EQ_INT(((unsigned char *)part)[(size_t)n * xd_dtype_size(s->halo.dtype)], 0x5a);
}

/* Forward, backward, and the bytes of both. */
static void check_scene(halo_scene *s, xd_comm *world) {
    static __thread double part[HALO_ROOM / 8 + 1], wide[HALO_ROOM / 8 + 1];
    xd_ctx *ctx = xd_comm_ctx(world);
    const int rank = xd_comm_rank(world);
    xd_halo *halo = NULL;
    xd_planned bytes;
    const bool open = halo_open(s, ctx, xd_comm_size(world));
    CHECK(open);
    if (!open) return;
    const xd_result made = xd_halo_create(world, &s->halo, &halo);
    CHECK_EQ_INT(made, XD_OK);
    if (made != XD_OK && !rank) printf("%s\n", xd_last_error(ctx)->message);
    xd_halo *none = halo;
    CHECK_EQ_INT(PLANNED(ctx, xd_halo_create(world, &s->halo, &none), &bytes), XD_OK);
    CHECK(none == NULL);
    if (made == XD_OK) {
        const uint64_t start = xd_comm_traffic(world).bytes_sent;
        check_forward(s, halo, rank, part, wide);
        const uint64_t middle = xd_comm_traffic(world).bytes_sent;
        check_backward(s, halo, rank, part, wide);
        CHECK_EQ_INT(middle - start, bytes.forward_sent);
        CHECK_EQ_INT(xd_comm_traffic(world).bytes_sent - middle, bytes.backward_sent);
    }
    xd_halo_destroy(halo);
    xd_layout_destroy(s->layout);
}

static void set_grid(halo_scene *s, int a, int b) {
    memset(s, 0, sizeof *s);
    s->grid.axis_count = b ? 2 : 1;
    s->grid.size[0] = a;
    s->grid.size[1] = b;
    s->grid.rank_count = b ? a * b : a;
}

static void run(int ranks, xd_rank_function function, void *argument) {
    xd_error error;
    memset(&error, 0, sizeof error);
    const xd_result result = xd_run_threads(ranks, NULL, function, argument, &error);
    if (result != XD_OK) printf("rank %d: %s\n", error.rank, error.message);
    CHECK_EQ_INT(result, XD_OK);
}

/* ---- value and gradient ---- */

/* Every width that a rule allows, on every short line. */
static xd_result lines(xd_comm *world, void *argument) {
    const int n = *(const int *)argument;
    for (int rule = 0; rule <= XD_HALO_REFLECT; rule++) {
        const int most = rule == XD_HALO_REFLECT ? n - 1 : rule == XD_HALO_ZERO ? n + 2 : n;
        for (int before = 0; before <= most; before++)
            for (int after = before % 2; after <= most; after += 2) {
                halo_scene s;
                set_grid(&s, xd_comm_size(world), 0);
                s.cut.ndim = 1;
                s.cut.shape[0] = n;
                s.cut.placement[0].kind = XD_SHARD;
                s.halo.before[0] = before;
                s.halo.after[0] = after;
                s.halo.boundary[0] = (xd_halo_boundary)rule;
                s.halo.gradient = (xd_halo_gradient)(before & 1);
                s.halo.dtype = halo_dtypes[(before + after) % 5];
                check_scene(&s, world);
            }
    }
    return XD_OK;
}

XD_TEST(lines_of_every_length_width_and_rule_on_one_to_eight_ranks) {
    const int lengths[] = { 0, 1, 2, 3, 5, 8, 9 };
    for (int ranks = 1; ranks <= HALO_RANKS; ranks++)
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
            int n = lengths[i];
            run(ranks, lines, &n);
        }
}

static bool draw_scene(halo_scene *s, int ranks, uint64_t *state) {
    int a = 1 + halo_draw(state, ranks), pole = -1;
    while (ranks % a) a--;
    set_grid(s, a, ranks / a);
    s->cut.ndim = 1 + halo_draw(state, HALO_DIMS);
    for (int d = 0; d < s->cut.ndim; d++)
        s->cut.shape[d] = s->cut.ndim < 3 ? 1 + halo_draw(state, 9) : 1 + halo_draw(state, 5);
    if (halo_draw(state, 20) == 0) s->cut.shape[0] = 0;
    for (int axis = 0; axis < 2; axis++) {
        s->cut.placement[axis].kind = halo_draw(state, 4) ? XD_SHARD : XD_REPLICATE;
        s->cut.placement[axis].dim = halo_draw(state, s->cut.ndim);
    }
    for (int d = 0; d < s->cut.ndim; d++) {
        const int n = (int)s->cut.shape[d];
        xd_halo_boundary rule = (xd_halo_boundary)halo_draw(state, pole < 0 && s->cut.ndim > 1 ? 4 : 3);
        if (rule == XD_HALO_POLE) pole = d;
        const int most = rule == XD_HALO_REFLECT ? (n ? n - 1 : 0) : rule == XD_HALO_ZERO ? 3 : n < 4 ? n : 4;
        s->halo.boundary[d] = rule;
        s->halo.before[d] = halo_draw(state, most + 1);
        s->halo.after[d] = halo_draw(state, most + 1);
    }
    if (pole >= 0) {
        s->halo.longitude = (pole + 1 + halo_draw(state, s->cut.ndim - 1)) % s->cut.ndim;
        if (halo_draw(state, 2)) s->halo.longitude -= s->cut.ndim;
    }
    s->halo.gradient = (xd_halo_gradient)halo_draw(state, 2);
    s->halo.dtype = halo_dtypes[halo_draw(state, 5)];
    int64_t room = 1;
    for (int d = 0; d < s->cut.ndim; d++) room *= s->cut.shape[d] + s->halo.before[d] + s->halo.after[d];
    return room < 900;
}

static xd_result draws(xd_comm *world, void *argument) {
    uint64_t state = *(const uint64_t *)argument;
    for (int k = 0, done = 0; k < 200 && done < 40; k++) {
        halo_scene s;
        if (!draw_scene(&s, xd_comm_size(world), &state)) continue;
        done++;
        check_scene(&s, world);
    }
    return XD_OK;
}

XD_TEST(random_cuts_of_one_to_four_dimensions_over_two_axes_with_every_rule) {
    for (int ranks = 1; ranks <= HALO_RANKS; ranks++) {
        uint64_t seed = 2100 + (uint64_t)ranks;
        run(ranks, draws, &seed);
    }
}

static xd_result image(xd_comm *world, void *argument) {
    const int *p = (const int *)argument; /* grid, rule of the rows */
    halo_scene s;
    set_grid(&s, p[0], p[1]);
    s.cut.ndim = 3;
    s.cut.shape[0] = 2;
    s.cut.shape[1] = 7;
    s.cut.shape[2] = 9;
    for (int axis = 0; axis < 2; axis++) {
        s.cut.placement[axis].kind = XD_SHARD;
        s.cut.placement[axis].dim = axis + 1;
        s.halo.before[axis + 1] = s.halo.after[axis + 1] = 3;
    }
    s.halo.boundary[1] = (xd_halo_boundary)p[2];
    s.halo.boundary[2] = XD_HALO_PERIODIC;
    s.halo.longitude = -1;
    for (int i = 0; i < 4; i++) {
        s.halo.dtype = halo_dtypes[i];
        s.halo.gradient = (xd_halo_gradient)(i & 1);
        check_scene(&s, world);
    }
    return XD_OK;
}

XD_TEST(images_cut_in_both_directions_have_corners_and_rows_across_the_poles) {
    static const int grids[][2] = { { 1, 1 }, { 2, 1 }, { 1, 2 }, { 2, 2 }, { 3, 2 },
                                    { 2, 3 }, { 4, 2 }, { 2, 4 }, { 8, 1 }, { 1, 8 } };
    for (size_t i = 0; i < sizeof grids / sizeof grids[0]; i++)
        for (int rule = 0; rule <= XD_HALO_POLE; rule++) {
            int p[3] = { grids[i][0], grids[i][1], rule };
            run(p[0] * p[1], image, p);
        }
}

/* Cuts at given places, and axes in another order. */
static xd_result offsets(xd_comm *world, void *argument) {
    static const int64_t at[] = { 0, 1, 1, 6, 7 };
    halo_scene s;
    (void)argument;
    set_grid(&s, 4, 2);
    s.cut.ndim = 2;
    s.cut.shape[0] = 7;
    s.cut.shape[1] = 3;
    s.cut.placement[0].kind = XD_SHARD;
    s.cut.placement[0].offsets = at;
    s.cut.placement[1].kind = XD_SHARD;
    s.cut.placement[1].dim = 0;
    s.halo.before[0] = 4;
    s.halo.after[0] = 2;
    s.halo.after[1] = 1;
    s.halo.boundary[0] = XD_HALO_REFLECT;
    s.halo.dtype = XD_DTYPE_BF16;
    check_scene(&s, world);
    s.cut.order[0] = 1;
    s.cut.placement[0].offsets = NULL;
    check_scene(&s, world);
    return XD_OK;
}

XD_TEST(cuts_at_given_places_and_twice_along_one_dimension) {
    run(8, offsets, NULL);
}

/* Ranks outside the mesh call as well. */
static xd_result outsiders(xd_comm *world, void *argument) {
    static const int ranks[] = { 3, 1 };
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_topology t;
    xd_layout_desc cut;
    xd_halo_desc d;
    xd_layout *layout = NULL;
    xd_halo *halo = NULL;
    float part[4], wide[6];
    (void)argument;
    memset(&t, 0, sizeof t);
    memset(&cut, 0, sizeof cut);
    memset(&d, 0, sizeof d);
    t.axis_count = 1;
    t.size[0] = t.rank_count = 2;
    t.ranks = ranks;
    cut.ndim = 1;
    cut.shape[0] = 7;
    cut.topology = &t;
    cut.placement[0].kind = XD_SHARD;
    XD_TRY(xd_layout_create(ctx, &cut, &layout));
    d.layout = layout;
    d.dtype = XD_DTYPE_F32;
    d.before[0] = d.after[0] = 1;
    const int me = xd_comm_rank(world), first = me == 3 ? 0 : 4, n = me == 3 ? 4 : me == 1 ? 3 : 0;
    for (int i = 0; i < n; i++) part[i] = (float)(first + i + 1);
    XD_TRY(xd_halo_create(world, &d, &halo));
    XD_TRY(xd_halo_exchange(halo, n ? part : NULL, n ? wide : NULL));
    for (int i = 0; i < n + 2 && n; i++) CHECK(wide[i] == (float)((first + i) % 8));
    xd_halo_destroy(halo);
    xd_layout_destroy(layout);
    return XD_OK;
}

XD_TEST(ranks_outside_the_mesh_take_part_with_nothing) {
    run(4, outsiders, NULL);
}

/* ---- one pass as many ranks would have it ---- */

/* A line of 24, y = x[i - 2] w0 + ... + x[i + 2] w4: its input gradient over a second exchange is complete. */
typedef struct line_pass {
    xd_halo_boundary rule;
    float gradient[24];
} line_pass;

static xd_result train_line(xd_comm *world, void *argument) {
    enum { N = 24, W = 2 };
    static const float w[] = { 0.3f, -0.7f, 1.1f, 0.45f, -0.2f };
    line_pass *p = (line_pass *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    halo_scene s;
    xd_halo *halo = NULL, *of_gradient = NULL;
    float x[N], wide[N + 2 * W], d_y[N], wide_d_y[N + 2 * W], d_wide[N + 2 * W], d_x[N];
    set_grid(&s, xd_comm_size(world), 0);
    s.cut.ndim = 1;
    s.cut.shape[0] = N;
    s.cut.placement[0].kind = XD_SHARD;
    s.halo.before[0] = s.halo.after[0] = W;
    s.halo.dtype = XD_DTYPE_F32;
    s.halo.boundary[0] = p->rule;
    s.halo.gradient = XD_HALO_COMPLETE;
    CHECK(halo_open(&s, ctx, xd_comm_size(world)));
    XD_TRY(xd_halo_create(world, &s.halo, &halo));
    s.halo.boundary[0] = XD_HALO_ZERO;
    XD_TRY(xd_halo_create(world, &s.halo, &of_gradient));
    const int64_t begin = s.own[xd_comm_rank(world)][0][0], n = s.own[xd_comm_rank(world)][0][1] - begin;
    for (int64_t i = 0; i < n; i++) x[i] = sinf((float)(begin + i));
    XD_TRY(xd_halo_exchange(halo, x, wide));
    for (int64_t i = 0; i < n; i++) {
        float y = 0;
        for (int k = 0; k <= 2 * W; k++) y += w[k] * wide[i + k];
        d_y[i] = y * y;
    }
    XD_TRY(xd_halo_exchange(of_gradient, d_y, wide_d_y));
    for (int64_t q = 0; q < n + 2 * W; q++) {
        d_wide[q] = 0;
        for (int k = 2 * W; k >= 0; k--) /* output q - k of this rank, whose halo has it */
            if (q - k + W >= 0 && q - k + W < n + 2 * W) d_wide[q] += w[k] * wide_d_y[q - k + W];
    }
    XD_TRY(xd_halo_exchange_backward(halo, d_wide, d_x));
    for (int64_t i = 0; i < n; i++) p->gradient[begin + i] = d_x[i];
    xd_halo_destroy(of_gradient);
    xd_halo_destroy(halo);
    xd_layout_destroy(s.layout);
    return XD_OK;
}

XD_TEST(a_complete_gradient_has_the_bits_of_one_rank_on_up_to_eight_in_invariant_mode) {
    xd_ctx_desc invariant;
    memset(&invariant, 0, sizeof invariant);
    invariant.reduction = XD_REDUCTION_INVARIANT;
    for (int rule = 0; rule <= XD_HALO_REFLECT; rule++) {
        line_pass one, many;
        memset(&one, 0, sizeof one);
        one.rule = many.rule = (xd_halo_boundary)rule;
        CHECK_EQ_INT(xd_run_threads(1, &invariant, train_line, &one, NULL), XD_OK);
        for (int ranks = 2; ranks <= 8; ranks++) {
            memset(many.gradient, 0, sizeof many.gradient);
            CHECK_EQ_INT(xd_run_threads(ranks, &invariant, train_line, &many, NULL), XD_OK);
            CHECK(memcmp(one.gradient, many.gradient, sizeof one.gradient) == 0);
        }
    }
}

/* ---- memory ---- */

static xd_result weigh(xd_comm *world, void *argument) {
    xd_ctx *ctx = xd_comm_ctx(world);
    halo_scene s;
    xd_halo *halo = NULL;
    xd_planned bytes;
    static __thread double part[HALO_ROOM / 8 + 1], wide[HALO_ROOM / 8 + 1];
    (void)argument;
    set_grid(&s, 2, 3);
    s.cut.ndim = 2;
    s.cut.shape[0] = 9;
    s.cut.shape[1] = 7;
    for (int d = 0; d < 2; d++) {
        s.cut.placement[d].kind = XD_SHARD;
        s.cut.placement[d].dim = d;
        s.halo.before[d] = s.halo.after[d] = 2;
        s.halo.boundary[d] = XD_HALO_PERIODIC;
    }
    s.halo.dtype = XD_DTYPE_F32;
    CHECK(halo_open(&s, ctx, 6));
    const long long before = live_bytes;
    XD_TRY(xd_halo_create(world, &s.halo, &halo));
    const long long taken = live_bytes - before;
    xd_halo *none = NULL;
    XD_TRY(PLANNED(ctx, xd_halo_create(world, &s.halo, &none), &bytes));
    CHECK_EQ_INT(taken, bytes.memory.host + bytes.memory.device);
    CHECK_EQ_INT(bytes.memory.device, 0);
    check_forward(&s, halo, xd_comm_rank(world), part, wide);
    const long long warm = live_bytes;
    for (int i = 0; i < 3; i++) {
        check_forward(&s, halo, xd_comm_rank(world), part, wide);
        check_backward(&s, halo, xd_comm_rank(world), part, wide);
    }
    CHECK_EQ_INT(live_bytes, warm);
    xd_halo_destroy(halo);
    CHECK_EQ_INT(live_bytes - before, 0);
    xd_layout_destroy(s.layout);
    return XD_OK;
}

XD_TEST(memory_is_what_bytes_says_and_calls_take_none) {
    xd_ctx_desc counting;
    memset(&counting, 0, sizeof counting);
    counting.allocator.allocate = count_allocate;
    counting.allocator.release = count_release;
    CHECK_EQ_INT(xd_run_threads(6, &counting, weigh, NULL, NULL), XD_OK);
}

/* A part of one row goes to both sides, and its array touches the next one: what is sent is longer than the part. */
static xd_result neighbours(xd_comm *world, void *argument) {
    static __thread double room[64];
    halo_scene s;
    xd_halo *halo = NULL;
    (void)argument;
    set_grid(&s, 3, 0);
    s.cut.ndim = 2;
    s.cut.shape[0] = 3;
    s.cut.shape[1] = 5;
    s.cut.placement[0].kind = XD_SHARD;
    s.halo.before[0] = s.halo.after[0] = 1;
    s.halo.dtype = XD_DTYPE_F64;
    CHECK(halo_open(&s, xd_comm_ctx(world), 3));
    XD_TRY(xd_halo_create(world, &s.halo, &halo));
    for (int i = 0; i < 5; i++) room[i] = xd_comm_rank(world) * 5 + i + 1;
    CHECK_EQ_INT(xd_halo_exchange(halo, room, room + 5), XD_OK);
    for (int i = 0; i < 15; i++) {
        const int at = xd_comm_rank(world) * 5 - 5 + i;
        CHECK(room[5 + i] == (at < 0 || at > 14 ? 0 : at + 1));
    }
    xd_halo_destroy(halo);
    xd_layout_destroy(s.layout);
    return XD_OK;
}

XD_TEST(a_part_that_is_sent_twice_may_touch_the_array_with_halo) {
    run(3, neighbours, NULL);
}

XD_TEST(rows_of_the_first_dimension_are_exchanged_in_place) {
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    xd_halo *none = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK && xd_comm_self(ctx, &self) == XD_OK);
    size_t host[2];
    for (int cut = 0; cut < 2; cut++) {
        halo_scene s;
        xd_planned bytes;
        set_grid(&s, 4, 0);
        s.cut.ndim = 2;
        s.cut.shape[0] = s.cut.shape[1] = 1000;
        s.cut.placement[0].kind = XD_SHARD;
        s.cut.placement[0].dim = cut;
        s.halo.before[cut] = s.halo.after[cut] = 1;
        s.halo.dtype = XD_DTYPE_F32;
        s.halo.gradient = XD_HALO_COMPLETE;
        CHECK(halo_open(&s, ctx, 4));
        CHECK_EQ_INT(PLANNED_FOR(ctx, 1, 4, xd_halo_create(self, &s.halo, &none), &bytes), XD_OK);
        CHECK_EQ_INT(bytes.forward_sent, 2 * 1000 * 4);
        CHECK_EQ_INT(bytes.backward_sent, 0);
        host[cut] = bytes.memory.host;
        xd_layout_destroy(s.layout);
    }
    CHECK(host[0] < 8000 && host[1] >= host[0] + 2 * 2 * 1000 * 4);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

/* ---- refusals ---- */

typedef struct refusal {
    const char *text;
    xd_result result;
    int case_number;
} refusal;

static const refusal refusals[] = {
    { "a halo needs the layout of the 3 ranks", XD_ERROR_ARGUMENT, 0 },
    { "dtype 99 does not exist", XD_ERROR_DTYPE, 1 },
    { "gradient 7 does not exist", XD_ERROR_ARGUMENT, 2 },
    { "dimension 0: boundary 9 does not exist", XD_ERROR_ARGUMENT, 3 },
    { "dimension 1: a halo of -1 before and 0 after", XD_ERROR_ARGUMENT, 4 },
    { "dimension 0: a halo of 0 before and 8 after; of extent 7 its boundary allows 7", XD_ERROR_SHAPE, 5 },
    { "dimension 0: a halo of 7 before and 0 after; of extent 7 its boundary allows 6", XD_ERROR_SHAPE, 6 },
    { "a halo in dimension 2 of a tensor that has 2", XD_ERROR_ARGUMENT, 7 },
    { "dimensions 0 and 1 both have poles", XD_ERROR_ARGUMENT, 8 },
    { "longitude is dimension 0 of 2, and dimension 0 has the poles", XD_ERROR_ARGUMENT, 9 },
    { "longitude is dimension -3 of 2, and dimension 0 has the poles", XD_ERROR_ARGUMENT, 10 },
    { "axis 0 of 1 is partial: reduce it first", XD_ERROR_UNSUPPORTED, 11 },
    { "holds 2 intervals of dimension 0: a halo goes around one", XD_ERROR_UNSUPPORTED, 12 },
    { "the layout is on rank 3, there are 3", XD_ERROR_TOPOLOGY, 13 },
    { "dimension 0: a halo of 1 before and 0 after; of extent 0 its boundary allows 0", XD_ERROR_SHAPE, 14 },
    { "dimension 0: a halo of 1 before and 0 after; of extent 0 its boundary allows 0", XD_ERROR_SHAPE, 15 },
    { "dimension 1: a halo of 9223372036854775807 before", XD_ERROR_SHAPE, 16 },
    { "has more than 2^62 elements with a halo of", XD_ERROR_SHAPE, 17 },
    { "dimension 0: a halo of 8 before and 0 after; of extent 7 its boundary allows 7", XD_ERROR_SHAPE, 18 },
};

/* Makes one thing wrong. */
static void spoil(halo_scene *s, int number) {
    xd_halo_desc *h = &s->halo;
    switch (number) {
    case 1: h->dtype = (xd_dtype)99; break;
    case 2: h->gradient = (xd_halo_gradient)7; break;
    case 3: h->boundary[0] = (xd_halo_boundary)9; break;
    case 4: h->before[1] = -1; break;
    case 5: h->boundary[0] = XD_HALO_PERIODIC, h->after[0] = 8; break;
    case 6: h->boundary[0] = XD_HALO_REFLECT, h->before[0] = 7; break;
    case 7: h->after[2] = 1; break;
    case 8: h->boundary[0] = h->boundary[1] = XD_HALO_POLE; break;
    case 9: h->boundary[0] = XD_HALO_POLE; break;
    case 10: h->boundary[0] = XD_HALO_POLE, h->longitude = -3; break;
    case 11: s->cut.placement[0].kind = XD_PARTIAL; break;
    case 12: s->cut.placement[0].balanced = true, s->cut.shape[0] = 12; break;
    case 13: s->grid.size[0] = s->grid.rank_count = 4; break;
    case 14:
    case 15:
        s->cut.shape[0] = 0;
        h->boundary[0] = number == 14 ? XD_HALO_PERIODIC : XD_HALO_REFLECT;
        h->before[0] = 1;
        break;
    case 16: h->before[1] = INT64_MAX; break;
    case 17: h->before[0] = h->before[1] = (int64_t)1 << 40; break;
    case 18: h->boundary[0] = XD_HALO_POLE, h->longitude = 1, h->before[0] = 8; break;
    default: break;
    }
}

static void small_scene(halo_scene *s, int ranks) {
    set_grid(s, ranks, 0);
    s->cut.ndim = 2;
    s->cut.shape[0] = 7;
    s->cut.shape[1] = 3;
    s->cut.placement[0].kind = XD_SHARD;
    s->halo.dtype = XD_DTYPE_F32;
}

static xd_result refuse(xd_comm *world, void *argument) {
    const int number = *(const int *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_halo *halo = NULL;
    xd_planned bytes;
    halo_scene s;
    small_scene(&s, 3);
    spoil(&s, number);
    CHECK(halo_open(&s, ctx, 3));
    if (number == 0) s.halo.layout = NULL;
    const refusal *r = &refusals[number];
    CHECK_EQ_INT(xd_halo_create(world, &s.halo, &halo), r->result);
    CHECK(strstr(xd_last_error(ctx)->message, r->text) != NULL);
    if (!strstr(xd_last_error(ctx)->message, r->text)) printf("%s\n", xd_last_error(ctx)->message);
    CHECK(!halo);
    CHECK_EQ_INT(PLANNED_FOR(ctx, 1, 3, xd_halo_create(world, &s.halo, &halo), &bytes), r->result);
    xd_layout_destroy(s.layout);
    return XD_OK;
}

XD_TEST(wrong_settings_are_refused_with_their_numbers_on_every_rank) {
    for (int i = 0; i < (int)(sizeof refusals / sizeof refusals[0]); i++) {
        CHECK_EQ_INT(refusals[i].case_number, i);
        run(3, refuse, &i);
    }
}

/* One rank has other settings than the rest. */
static xd_result differ(xd_comm *world, void *argument) {
    static const char *const texts[7] = {
        "halo: rank 2 passed before[0] = 1, rank 0 passed %lld",
        "halo: rank 2 passed after[1] = 2, rank 0 passed %lld",
        "halo: rank 2 passed boundary[0] = 1, rank 0 passed 0",
        "halo: rank 2 passed gradient = 1, rank 0 passed 0",
        "halo: rank 2 passed dtype = BF16, rank 0 passed F32",
        "halo: rank 2 passed layout.shape[0] = 8, rank 0 passed %lld",
        "a halo of -1 before",
    };
    const int what = *(const int *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_halo *halo = NULL;
    halo_scene s;
    char text[128];
    small_scene(&s, 3);
    const int64_t of_rank_0 = what == 0 ? s.halo.before[0] : what == 1 ? s.halo.after[1] : s.cut.shape[0];
    snprintf(text, sizeof text, texts[what], (long long)of_rank_0);
    if (xd_comm_rank(world) == 2) {
        if (what == 0) s.halo.before[0] = 1;
        if (what == 1) s.halo.after[1] = 2;
        if (what == 2) s.halo.boundary[0] = XD_HALO_PERIODIC;
        if (what == 3) s.halo.gradient = XD_HALO_COMPLETE;
        if (what == 4) s.halo.dtype = XD_DTYPE_BF16;
        if (what == 5) s.cut.shape[0] = 8;
        if (what == 6) s.halo.before[0] = -1;
    }
    CHECK(halo_open(&s, ctx, 3));
    const xd_result wanted = what < 6                   ? XD_ERROR_MISMATCH
                             : xd_comm_rank(world) == 2 ? XD_ERROR_ARGUMENT
                                                        : XD_ERROR_PEER;
    CHECK_EQ_INT(xd_halo_create(world, &s.halo, &halo), wanted);
    CHECK(strstr(xd_last_error(ctx)->message, text) != NULL);
    CHECK(!halo);
    xd_layout_destroy(s.layout);
    return xd_barrier(world); /* the group goes on */
}

XD_TEST(ranks_that_plan_differently_all_hear_of_it) {
    for (int what = 0; what < 7; what++) run(3, differ, &what);
}

static xd_result run_wrong(xd_comm *world, void *argument) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const bool second = xd_comm_rank(world) == 1;
    xd_halo *halo = NULL;
    halo_scene s;
    float part[9], wide[40], kept = 4.5f;
    (void)argument;
    small_scene(&s, 3);
    s.halo.before[0] = 1;
    CHECK(halo_open(&s, ctx, 3));
    XD_TRY(xd_halo_create(world, &s.halo, &halo));
    memset(part, 0, sizeof part);
    for (int i = 0; i < 40; i++) wide[i] = kept;
    CHECK_EQ_INT(xd_halo_exchange(halo, second ? NULL : part, wide),
                 second ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(strstr(xd_last_error(ctx)->message, "halo: the part of 9 elements is NULL") != NULL);
    for (int i = 0; i < 40; i++) CHECK(wide[i] == kept);
    CHECK_EQ_INT(xd_halo_exchange_backward(halo, second ? NULL : wide, part),
                 second ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(strstr(xd_last_error(ctx)->message, "halo: the part with halo, 12 elements, is NULL") != NULL);
    CHECK_EQ_INT(xd_halo_exchange(halo, part, wide), XD_OK);
    xd_halo_destroy(halo);
    s.halo.dtype = XD_DTYPE_BOOL;
    XD_TRY(xd_halo_create(world, &s.halo, &halo));
    CHECK_EQ_INT(xd_halo_exchange(halo, part, wide), XD_OK);
    CHECK_EQ_INT(xd_halo_exchange_backward(halo, wide, part), XD_ERROR_DTYPE);
    CHECK(strstr(xd_last_error(ctx)->message, "has no sums for a backward") != NULL);
    xd_halo_destroy(halo);
    xd_halo_destroy(NULL);
    CHECK_EQ_INT(xd_plan_begin(ctx, &(xd_plan_desc){ .ranks = 3, .rank = 3 }), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "rank 3 of 3") != NULL);
    xd_layout_destroy(s.layout);
    return XD_OK;
}

XD_TEST(missing_arrays_reach_every_rank_and_the_group_goes_on) {
    run(3, run_wrong, NULL);
}

static xd_result invariant_partial(xd_comm *world, void *argument) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_halo *halo = NULL;
    halo_scene s;
    float part[9], wide[12];
    int32_t whole[9], wide_whole[12];
    (void)argument;
    small_scene(&s, 3);
    s.halo.before[0] = 1;
    memset(wide, 0, sizeof wide);
    memset(wide_whole, 0, sizeof wide_whole);
    CHECK(halo_open(&s, ctx, 3));
    XD_TRY(xd_halo_create(world, &s.halo, &halo));
    CHECK_EQ_INT(xd_halo_exchange_backward(halo, wide, part), XD_ERROR_UNSUPPORTED);
    CHECK(strstr(xd_last_error(ctx)->message, "must be COMPLETE: sums of PARTIAL ones depend on the cut") !=
          NULL);
    xd_halo_destroy(halo);
    s.halo.dtype = XD_DTYPE_I32; /* integers have no rounding */
    XD_TRY(xd_halo_create(world, &s.halo, &halo));
    CHECK_EQ_INT(xd_halo_exchange_backward(halo, wide_whole, whole), XD_OK);
    xd_halo_destroy(halo);
    xd_layout_destroy(s.layout);
    return XD_OK;
}

XD_TEST(invariant_mode_refuses_sums_whose_bits_depend_on_the_cut) {
    xd_ctx_desc invariant;
    memset(&invariant, 0, sizeof invariant);
    invariant.reduction = XD_REDUCTION_INVARIANT;
    CHECK_EQ_INT(xd_run_threads(3, &invariant, invariant_partial, NULL, NULL), XD_OK);
}

XD_TEST_MAIN()
