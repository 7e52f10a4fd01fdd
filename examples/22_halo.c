/* A residual convolutional net over a map of the globe whose rows are cut over ranks: rows continue across the poles, columns
 * around the earth. Losses, the gradient of the map and the trained filters have the bits of one rank.
 *
 *     cc -std=c99 -O2 examples/22_halo.c -o halo -lm -lpthread
 *
 * A forward has one exchange a layer: its input with a halo. A backward has two: the output's gradient with a halo, from
 * which a rank finds the complete gradient of its own pixels and of those beyond the poles and ends, and the way home of the
 * latter. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <math.h>
#include <stdio.h>

enum { C = 3, H = 11, W = 14, K = 5, R = K / 2, LAYERS = 3, STEPS = 20 };
enum { MAP = C * H * W, WIDE = C * (H + 2 * R) * (W + 2 * R), WINDOW = C * K * K, FILTERS = LAYERS * C * WINDOW };
typedef struct run { float losses[STEPS], filters[FILTERS], gradient[C][H][W]; } run;

/* Element j of the WINDOW of inputs of an output at (y, x), in an array [C, h, W + 2 R] with halo; 0 outside of the array.
 * `sign` -1: what an input gives to outputs, the same window turned around. */
static float at(const float *wide, int h, int y, int x, int j, int sign) {
    const int row = y + sign * (j / K % K - R), column = x + sign * (j % K - R);
    return row < 0 || row >= h || column < 0 || column >= W + 2 * R ? 0.0f : wide[(j / K / K * h + row) * (W + 2 * R) + column];
}

/* The convolution of layer l at (c, y, x), or its transpose. */
static float convolve(const float *filters, int l, const float *wide, int h, int c, int y, int x, bool transposed) {
    const float *filter = filters + l * C * WINDOW;
    float sum = 0.0f;
    for (int j = 0; j < WINDOW; j++)
        sum += transposed ? filter[(j / K / K * C + c) * K * K + j % (K * K)] * at(wide, h, y, x, j, -1)
                          : filter[c * WINDOW + j] * at(wide, h, y, x, j, 1);
    return sum;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    run *r = argument;
    const xd_topology ranks = { .axis_count = 1, .size = { xd_comm_size(world) }, .rank_count = xd_comm_size(world) };
    xd_layout *rows;
    xd_halo *halo, *of_gradient;
    xd_leaf_stack *stack;
    xd_crossing *reduce; /* of the leaves */
    float filters[FILTERS], x[MAP], seen[LAYERS][WIDE], slope[LAYERS][MAP], d[MAP], d_y[MAP], wide[WIDE], d_wide[WIDE], d_x[MAP];
    static float memory[8][H][FILTERS + 1]; /* what each row gives to the gradient of the filters, and to the loss: a leaf */
    float(*leaf)[FILTERS + 1] = memory[xd_comm_rank(world)], sums[FILTERS + 1];
    XD_TRY(xd_layout_create(xd_comm_ctx(world), &(xd_layout_desc){ .ndim = 3, .shape = { C, H, W }, .topology = &ranks,
                                                                   .placement = { { XD_SHARD, .dim = 1 } } }, &rows));
    xd_halo_desc desc = { .layout = rows, .dtype = XD_DTYPE_F32, .before = { 0, R, R }, .after = { 0, R, R },
                          .longitude = 2, .gradient = XD_HALO_COMPLETE };
    XD_TRY(xd_halo_create(world, &desc, &of_gradient)); /* zeros: there are no outputs beyond the poles */
    desc.boundary[1] = XD_HALO_POLE, desc.boundary[2] = XD_HALO_PERIODIC;
    XD_TRY(xd_halo_create(world, &desc, &halo));
    const xd_interval own = xd_chunk(H, xd_comm_size(world), xd_comm_rank(world));
    const int h = (int)(own.end - own.begin), n = C * h * W, tall = h ? h + 2 * R : 0;
    const xd_crossing_desc sum = { .kind = XD_CROSSING_REDUCE, .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { FILTERS + 1 },
                                   .leaves = { own.begin, h, H } };
    XD_TRY(xd_crossing_create(world, &sum, &reduce));
    XD_TRY(xd_leaf_stack_create(xd_comm_ctx(world), sum.leaves, FILTERS + 1, &stack));
    for (int i = 0; i < FILTERS; i++) filters[i] = 0.2f * sinf((float)i * 1.7f);
    for (int step = 0; step < STEPS; step++) {
        memset(leaf, 0, sizeof memory[0]);
        for (int i = 0; i < n; i++) x[i] = sinf((float)((i / W / h * H + (int)own.begin + i / W % h) * W + i % W) * 0.7f);
        for (int l = 0; l < LAYERS; l++) { /* x += tanh(convolution of x) */
            XD_TRY(xd_halo_exchange(halo, x, seen[l]));
            for (int i = 0; i < n; i++) {
                const float t = tanhf(convolve(filters, l, seen[l], tall, i / W / h, i / W % h + R, i % W + R, false));
                x[i] += t, slope[l][i] = 1.0f - t * t;
            }
        }
        for (int i = 0; i < n; i++) /* the loss: half the mean squared distance from 0.5 */
            d[i] = (x[i] - 0.5f) / MAP, leaf[i / W % h][FILTERS] += 0.5f * (x[i] - 0.5f) * d[i];
        for (int l = LAYERS - 1; l >= 0; l--) {
            for (int i = 0; i < n; i++) d_y[i] = d[i] * slope[l][i];
            for (int i = 0; i < n; i++)
                for (int j = 0; j < WINDOW; j++)
                    leaf[i / W % h][(l * C + i / W / h) * WINDOW + j] += d_y[i] * at(seen[l], tall, i / W % h + R, i % W + R, j, 1);
            XD_TRY(xd_halo_exchange(of_gradient, d_y, wide));
            for (int i = 0; i < C * tall * (W + 2 * R); i++)
                d_wide[i] = convolve(filters, l, wide, tall, i / (W + 2 * R) / tall, i / (W + 2 * R) % tall, i % (W + 2 * R), true);
            XD_TRY(xd_halo_exchange_backward(halo, d_wide, d_x));
            for (int i = 0; i < n; i++) d[i] += d_x[i];
        }
        xd_leaf_stack_reset(stack);
        for (int y = 0; y < h; y++) XD_TRY(xd_leaf_stack_push(stack, leaf[y]));
        XD_TRY(xd_crossing_forward(reduce, xd_leaf_stack_forest(stack), sums));
        for (int i = 0; i < FILTERS; i++) filters[i] -= 0.1f * sums[i];
        if (xd_comm_rank(world) == 0) r->losses[step] = sums[FILTERS];
    }
    for (int i = 0; i < n; i++) r->gradient[i / W / h][own.begin + i / W % h][i % W] = d[i];
    if (xd_comm_rank(world) == 0) memcpy(r->filters, filters, sizeof filters);
    xd_leaf_stack_destroy(stack), xd_crossing_destroy(reduce);
    xd_halo_destroy(halo), xd_halo_destroy(of_gradient), xd_layout_destroy(rows);
    return XD_OK;
}

int main(void) {
    static run one, many;
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    xd_error error = { 0 };
    bool equal = true;
    for (int ranks = 1; ranks <= 8; ranks++) {
        run *r = ranks == 1 ? &one : &many; /* every element is written */
        if (xd_run_threads(ranks, &invariant, run_rank, r, &error) != XD_OK)
            return fprintf(stderr, "rank %d: %s\n", error.rank, error.message), 1;
        equal = equal && memcmp(&one, r, sizeof one) == 0;
        printf("%d ranks: loss %.6f, then %.6f: %s\n", ranks, r->losses[0], r->losses[STEPS - 1],
               equal ? "the bits of one" : "OTHER BITS");
    }
    return !equal;
}
