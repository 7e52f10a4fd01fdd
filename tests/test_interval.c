/* Interval algebra against bit sets, and copies between regions against single elements. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "kernel/internal.h"
#    include "tensor/interval_internal.h"
#endif

#include "xd_test.h"

/* The intervals of a bit set of `n` indices. */
static int from_bits(unsigned bits, int n, xd_interval *out) {
    int count = 0;
    for (int i = 0; i < n; i++) {
        if (!(bits >> i & 1u)) continue;
        const int begin = i;
        while (i < n && bits >> i & 1u) i++;
        out[count].begin = begin;
        out[count++].end = i;
    }
    return count;
}

static unsigned to_bits(const xd_interval *list, int count) {
    unsigned bits = 0;
    for (int i = 0; i < count; i++)
        for (int64_t k = list[i].begin; k < list[i].end; k++) bits |= 1u << k;
    return bits;
}

static bool is_canonical(const xd_interval *list, int count) {
    for (int i = 0; i < count; i++)
        if (list[i].begin >= list[i].end || (i && list[i].begin <= list[i - 1].end)) return false;
    return true;
}

XD_TEST(union_intersection_and_difference_equal_those_of_every_pair_of_bit_sets) {
    enum { N = 9 };
    long wrong = 0;
    for (unsigned a = 0; a < 1u << N; a++)
        for (unsigned b = 0; b < 1u << N; b++) {
            xd_interval x[N], y[N], out[2 * N];
            const int na = from_bits(a, N, x), nb = from_bits(b, N, y);
            int n = xdi_intervals_unite(x, na, y, nb, out);
            wrong += to_bits(out, n) != (a | b) || !is_canonical(out, n);
            n = xdi_intervals_intersect(x, na, y, nb, out);
            wrong += to_bits(out, n) != (a & b) || !is_canonical(out, n);
            n = xdi_intervals_subtract(x, na, y, nb, out);
            wrong += to_bits(out, n) != (a & ~b) || !is_canonical(out, n);
        }
    CHECK_EQ_INT(wrong, 0);
}

XD_TEST(selecting_positions_equals_counting_them) {
    enum { N = 8 };
    long wrong = 0;
    for (unsigned a = 0; a < 1u << N; a++)
        for (int begin = 0; begin <= N; begin++)
            for (int end = begin; end <= N; end++) {
                xd_interval x[N], out[N];
                unsigned expected = 0;
                const int n = from_bits(a, N, x);
                for (int i = 0, position = 0; i < N; i++) {
                    if (!(a >> i & 1u)) continue;
                    if (position >= begin && position < end) expected |= 1u << i;
                    position++;
                }
                wrong += to_bits(out, xdi_intervals_select(x, n, begin, end, out)) != expected;
            }
    CHECK_EQ_INT(wrong, 0);
}

XD_TEST(a_cover_is_checked_for_gaps_and_overlaps) {
    const xd_interval a[2] = { { 0, 3 }, { 7, 9 } }, b[1] = { { 3, 7 } }, c[1] = { { 4, 7 } },
                      d[1] = { { 2, 7 } };
    const xd_interval *lists[2] = { a, b };
    const int counts[2] = { 2, 1 };
    int64_t first = -1;
    int holders = -1;
    CHECK(xdi_intervals_cover_once(lists, counts, 2, 9, &first, &holders));
    CHECK(!xdi_intervals_cover_once(lists, counts, 2, 10, &first, &holders));
    CHECK_EQ_INT(first, 9);
    CHECK_EQ_INT(holders, 0);
    lists[1] = c;
    CHECK(!xdi_intervals_cover_once(lists, counts, 2, 9, &first, &holders));
    CHECK_EQ_INT(first, 3);
    lists[1] = d;
    CHECK(!xdi_intervals_cover_once(lists, counts, 2, 9, &first, &holders));
    CHECK_EQ_INT(first, 2);
    CHECK_EQ_INT(holders, 2);
    CHECK(xdi_intervals_cover_once(NULL, NULL, 0, 0, &first, &holders));
    CHECK(xdi_intervals_are_valid(a, 2, 9) && !xdi_intervals_are_valid(a, 2, 8));
    CHECK_EQ_INT(xdi_intervals_extent(a, 2), 5);
}

static int64_t copy_elements(const xd_copy *copy) {
    int64_t count = 1;
    for (int i = 0; i < copy->ndim; i++) count *= copy->extent[i];
    return count;
}

/* Moves the common part of two regions of a 6 x 6 shape whose rows are padded to `pad` and compares with the
 * elements. */
static long copy_between(const xd_region *a, const xd_region *b, int64_t pad) {
    xd_copy copies[64];
    int src[64], dst[64];
    int64_t sa[2], sb[2], moved = 0;
    long wrong = 0;
    xd_region common;
    xdi_region_shape(a, sa);
    xdi_region_shape(b, sb);
    const int64_t stride[2] = { sa[1] + pad, 1 };
    int at = 0;
    for (int i = 0; i < 64; i++) src[i] = dst[i] = -1;
    for (int i = 0; i < a->count[0]; i++)
        for (int64_t r = a->interval[0][i].begin; r < a->interval[0][i].end; r++, at++) {
            int64_t column = at * stride[0];
            for (int k = 0; k < a->count[1]; k++)
                for (int64_t c = a->interval[1][k].begin; c < a->interval[1][k].end; c++)
                    src[column++] = (int)(6 * r + c);
        }
    const int64_t n = xdi_region_copies(a, stride, b, NULL, copies, 64);
    for (int64_t i = 0; i < n; i++) {
        moved += copy_elements(&copies[i]);
        xdi_copy_run(&copies[i], src, dst, sizeof *src);
    }
    wrong += moved != (xdi_region_intersect(a, b, &common) ? xdi_region_numel(&common) : 0);
    at = 0;
    for (int i = 0; i < b->count[0]; i++)
        for (int64_t r = b->interval[0][i].begin; r < b->interval[0][i].end; r++)
            for (int k = 0; k < b->count[1]; k++)
                for (int64_t c = b->interval[1][k].begin; c < b->interval[1][k].end; c++, at++) {
                    bool held = false, row = false;
                    for (int j = 0; j < a->count[0]; j++)
                        row = row || (r >= a->interval[0][j].begin && r < a->interval[0][j].end);
                    for (int j = 0; j < a->count[1]; j++)
                        held = held || (c >= a->interval[1][j].begin && c < a->interval[1][j].end);
                    wrong += dst[at] != (held && row ? (int)(6 * r + c) : -1);
                }
    return wrong;
}

XD_TEST(copies_between_regions_move_each_common_element_once) {
    long wrong = 0;
    for (unsigned i = 0; i < 64 * 64; i += 3)
        for (unsigned k = 0; k < 64 * 64; k += 61) {
            xd_region a, b;
            memset(&a, 0, sizeof a);
            memset(&b, 0, sizeof b);
            a.ndim = b.ndim = 2;
            a.count[0] = from_bits(i % 64, 6, a.interval[0]);
            a.count[1] = from_bits(i / 64, 6, a.interval[1]);
            b.count[0] = from_bits(k % 64, 6, b.interval[0]);
            b.count[1] = from_bits(k / 64, 6, b.interval[1]);
            wrong += copy_between(&a, &b, i % 3);
        }
    CHECK_EQ_INT(wrong, 0);
}

XD_TEST(copies_are_as_few_as_the_two_storages_allow) {
    const int64_t shape[3] = { 4, 6, 5 };
    const xd_region whole = xdi_region_whole(3, shape);
    xd_region rows = whole, holes;
    xd_copy copies[8];
    rows.interval[0][0].begin = 1;
    CHECK_EQ_INT(xdi_region_copies(&whole, NULL, &rows, NULL, copies, 8), 1);
    CHECK_EQ_INT(copies[0].ndim, 1);
    CHECK_EQ_INT(copies[0].extent[0], 90);
    CHECK_EQ_INT(copies[0].src_offset, 30);
    holes = whole;
    holes.count[1] = 2; /* columns 0-1 and 4-5, held alike on both sides: one block a pair */
    holes.interval[1][0].end = 2;
    holes.interval[1][1].begin = 4;
    holes.interval[1][1].end = 6;
    CHECK_EQ_INT(xdi_region_copies(&holes, NULL, &holes, NULL, copies, 8), 1);
    CHECK_EQ_INT(copies[0].extent[0], 4 * 4 * 5);
    CHECK_EQ_INT(xdi_region_copies(&whole, NULL, &holes, NULL, copies, 8), 2);
    CHECK(xdi_region_equal(&holes, &holes) && !xdi_region_equal(&holes, &whole));
}

XD_TEST(a_scalar_is_one_element_and_an_empty_region_none) {
    const xd_region scalar = xdi_region_whole(0, NULL);
    const int64_t none[2] = { 3, 0 };
    const xd_region empty = xdi_region_whole(2, none);
    xd_copy copy;
    CHECK_EQ_INT(xdi_region_numel(&scalar), 1);
    CHECK_EQ_INT(xdi_region_copies(&scalar, NULL, &scalar, NULL, &copy, 1), 1);
    CHECK_EQ_INT(copy_elements(&copy), 1);
    CHECK_EQ_INT(xdi_region_numel(&empty), 0);
    CHECK_EQ_INT(xdi_region_copies(&empty, NULL, &empty, NULL, &copy, 1), 0);
}

/* ---- ranges of positions ---- */

/* How many elements of a piece do not have the next position in the storage of the region. */
static long out_of_order(const xd_region *region, const xd_region *piece, int64_t *next) {
    xd_copy copies[64];
    int64_t order[256], moved[256];
    long wrong = 0;
    for (int64_t i = 0; i < 256; i++) order[i] = i;
    const int64_t n = xdi_region_copies(region, NULL, piece, NULL, copies, 64);
    CHECK(n <= 64);
    for (int64_t i = 0; i < n; i++) xdi_copy_run(&copies[i], order, moved, sizeof *order);
    for (int64_t i = 0; i < xdi_region_numel(piece); i++) wrong += moved[i] != (*next)++;
    return wrong;
}

/* Every range of a region: its pieces hold its positions in their order, and are no more than the bound. */
static long flat_ranges(xd_ctx *ctx, const xd_region *region) {
    const int64_t numel = xdi_region_numel(region);
    const int bound = region->ndim ? 2 * region->ndim - 1 : 1;
    long wrong = 0;
    for (int64_t begin = 0; begin <= numel; begin++)
        for (int64_t end = begin; end <= numel; end++) {
            xd_region out[XDI_REGION_FLAT_MAX];
            const xd_interval range = { begin, end };
            int64_t next = begin;
            int count = -1;
            if (xdi_region_flat_range(ctx, region, range, out, &count) != XD_OK) return 1;
            wrong += count > bound || (begin == end && count != 0);
            for (int i = 0; i < count; i++) {
                wrong += out[i].ndim != region->ndim || xdi_region_numel(&out[i]) == 0;
                wrong += out_of_order(region, &out[i], &next);
            }
            wrong += next != end;
        }
    return wrong;
}

XD_TEST(every_range_of_every_small_box_is_at_most_two_boxes_a_dimension_less_one) {
    enum { SIDE = 4 }; /* extents 0 to 3 */
    xd_ctx *ctx = NULL;
    long wrong = 0;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    for (int ndim = 0, boxes = 1; ndim <= 4; ndim++, boxes *= SIDE)
        for (int k = 0; k < boxes; k++) {
            int64_t shape[4] = { 0 };
            for (int d = 0, rest = k; d < ndim; d++, rest /= SIDE) shape[d] = rest % SIDE;
            const xd_region box = xdi_region_whole(ndim, shape);
            wrong += flat_ranges(ctx, &box);
        }
    CHECK_EQ_INT(wrong, 0);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_bound_is_reached_and_whole_rows_are_one_box) {
    const int64_t shape[4] = { 3, 3, 3, 3 };
    const xd_region box = xdi_region_whole(4, shape);
    const xd_interval most = { 1, 80 }, rows = { 27, 81 }, row = { 30, 33 };
    xd_region out[XDI_REGION_FLAT_MAX];
    xd_ctx *ctx = NULL;
    int count = 0;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(xdi_region_flat_range(ctx, &box, most, out, &count) == XD_OK);
    CHECK_EQ_INT(count, 7);
    CHECK(xdi_region_flat_range(ctx, &box, rows, out, &count) == XD_OK);
    CHECK(count == 1 && out[0].interval[0][0].begin == 1 && out[0].interval[0][0].end == 3);
    CHECK(xdi_region_flat_range(ctx, &box, row, out, &count) == XD_OK);
    CHECK(count == 1 && out[0].interval[2][0].begin == 1 && out[0].interval[2][0].end == 2);
    xd_ctx_destroy(ctx);
}

XD_TEST(ranges_of_regions_with_gaps_are_positions_in_their_storage) {
    xd_ctx *ctx = NULL;
    long wrong = 0;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    for (unsigned bits = 0; bits < 64 * 64; bits += 37) {
        xd_region region;
        memset(&region, 0, sizeof region);
        region.ndim = 2;
        region.count[0] = from_bits(bits % 64, 6, region.interval[0]);
        region.count[1] = from_bits(bits / 64, 6, region.interval[1]);
        wrong += flat_ranges(ctx, &region);
    }
    CHECK_EQ_INT(wrong, 0);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_range_outside_the_region_is_refused_with_its_ends_and_the_size) {
    static const xd_interval bad[] = { { 0, 7 }, { -1, 2 }, { 4, 3 }, { 7, 7 }, { 1, INT64_MAX } };
    static const char *const ends[] = { "[0, 7)", "[-1, 2)", "[4, 3)", "[7, 7)", "[1, 9223372036854775807)" };
    const int64_t shape[2] = { 2, 3 };
    const xd_region box = xdi_region_whole(2, shape);
    xd_region out[XDI_REGION_FLAT_MAX];
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    for (int i = 0; i < 5; i++) {
        int count = -5;
        CHECK(xdi_region_flat_range(ctx, &box, bad[i], out, &count) == XD_ERROR_ARGUMENT);
        CHECK_EQ_INT(count, -5);
        CHECK(strstr(xd_last_error(ctx)->message, ends[i]) != NULL);
        CHECK(strstr(xd_last_error(ctx)->message, "6 elements") != NULL);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
