/* A residual convolutional network over a map of the globe whose rows are sharded over ranks.
 * Rows continue across the poles, and columns continue around the earth. The losses, the
 * gradient of the map and the trained filters have the bits of one rank.
 *
 *     cc -std=c99 -O2 examples/22_halo.c -o halo -lm -lpthread
 *
 * A layer exchanges one halo in its forward pass, and two in its backward pass. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <math.h>
#include <stdio.h>

enum { C = 3, H = 11, W = 14, K = 5, R = K / 2, LAYERS = 3, STEPS = 20, MOST_RANKS = 8 };
enum { WIDTH = W + 2 * R, MAP = C * H * W, WIDE = C * (H + 2 * R) * WIDTH };
enum { WINDOW = C * K * K, FILTERS = LAYERS * C * WINDOW };

typedef struct run {
    float losses[STEPS], filters[FILTERS], gradient[C][H][W];
} run;

/* A rank's part of the map has h rows, and `tall` rows with halo. A leaf is one row's term of
 * the filters' gradient and of the loss. */
typedef struct rank {
    xd_layout *rows;
    xd_halo *input_halo, *gradient_halo;
    xd_leaf_stack *stack;
    xd_crossing *reduce;
    int begin, h, tall, count;
    float filters[FILTERS], x[MAP], d[MAP], seen[LAYERS][WIDE], slope[LAYERS][MAP];
    float (*leaf)[FILTERS + 1];
} rank;

static xd_result create(rank *r, xd_comm *world) {
    const int ranks = xd_comm_size(world);
    const xd_topology mesh = { .axis_count = 1, .size = { ranks }, .rank_count = ranks };
    const xd_layout_desc map = { .ndim = 3, .shape = { C, H, W },
                                 .topology = &mesh, .placement = { { XD_SHARD, .dim = 1 } } };
    XD_TRY(xd_layout_create(xd_comm_ctx(world), &map, &r->rows));
    xd_halo_desc halo = { .layout = r->rows, .dtype = XD_DTYPE_F32, .before = { 0, R, R },
                          .after = { 0, R, R }, .longitude = 2, .gradient = XD_HALO_COMPLETE };
    /* This halo has zeros beyond the poles and ends, since no outputs are there. */
    XD_TRY(xd_halo_create(world, &halo, &r->gradient_halo));
    halo.boundary[1] = XD_HALO_POLE;
    halo.boundary[2] = XD_HALO_PERIODIC;
    XD_TRY(xd_halo_create(world, &halo, &r->input_halo));
    int64_t wide[3];
    xd_halo_shape(r->input_halo, wide);
    r->tall = (int)wide[1];
    const xd_crossing_desc sum = { .kind = XD_CROSSING_REDUCE, .dtype = XD_DTYPE_F32, .ndim = 1,
                                   .shape = { FILTERS + 1 }, .leaves = { r->begin, r->h, H } };
    XD_TRY(xd_crossing_create(world, &sum, &r->reduce));
    const xd_leaf_stack_desc rows = { .leaves = sum.leaves, .elements = FILTERS + 1 };
    return xd_leaf_stack_create(xd_comm_ctx(world), &rows, &r->stack);
}

/* Fills this rank's part of the map. A pixel depends on its place in the whole map alone. */
static xd_result fill(rank *r, xd_comm *world) {
    const xd_philox random = { .seed = 1, .stream = XD_STREAM_USER };
    const xd_init normal = { XD_INIT_NORMAL, .scale = 1.0f };
    xd_region region;
    xd_layout_region(r->rows, xd_comm_rank(world), &region);
    const xd_tensor_part part = { .name = "map", .dtype = XD_DTYPE_F32, .ndim = 3,
                                  .shape = { C, H, W }, .region = &region,
                                  .range = { 0, r->count }, .data = r->x };
    return xd_tensor_part_fill(xd_comm_ctx(world), &part, &normal, &random);
}

/* The place of element i of [C, h, W] in the array with halo, [C, tall, WIDTH]. */
static int with_halo(const rank *r, int i) {
    return (i / W / r->h * r->tall + i / W % r->h + R) * WIDTH + i % W + R;
}

/* Element j of the window around place i of an array [C, rows, WIDTH]; 0 outside of the array.
 * The sign -1 rotates the window by 180 degrees. */
static float at(const float *wide, int rows, int i, int j, int sign) {
    const int row = i / WIDTH % rows + sign * (j / K % K - R);
    const int column = i % WIDTH + sign * (j % K - R);
    if (row < 0 || row >= rows || column < 0 || column >= WIDTH) return 0.0f;
    return wide[(j / K / K * rows + row) * WIDTH + column];
}

/* The convolution of a layer, or its transpose, at place i. */
static float convolve(const float *filter, const float *wide, int rows, int i, bool transposed) {
    const int c = i / WIDTH / rows;
    float sum = 0.0f;
    for (int j = 0; j < WINDOW; j++) {
        const int k = transposed ? (j / K / K * C + c) * K * K + j % (K * K) : c * WINDOW + j;
        sum += filter[k] * at(wide, rows, i, j, transposed ? -1 : 1);
    }
    return sum;
}

/* Each layer computes x += tanh(convolution of x). */
static xd_result forward(rank *r, int l) {
    XD_TRY(xd_halo_exchange(r->input_halo, r->x, r->seen[l]));
    for (int i = 0; i < r->count; i++) {
        const float *filter = r->filters + l * C * WINDOW;
        const float t = tanhf(convolve(filter, r->seen[l], r->tall, with_halo(r, i), false));
        r->x[i] += t;
        r->slope[l][i] = 1.0f - t * t;
    }
    return XD_OK;
}

static xd_result backward(rank *r, int l) {
    float d_y[MAP], wide[WIDE], d_wide[WIDE], d_x[MAP];
    for (int i = 0; i < r->count; i++) {
        float *d_filter = r->leaf[i / W % r->h] + (l * C + i / W / r->h) * WINDOW;
        d_y[i] = r->d[i] * r->slope[l][i];
        for (int j = 0; j < WINDOW; j++)
            d_filter[j] += d_y[i] * at(r->seen[l], r->tall, with_halo(r, i), j, 1);
    }
    /* The first halo completes the gradient of this rank's pixels, and of the copies of pixels
     * beyond poles and ends. The second exchange adds these to the gradient of the originals. */
    XD_TRY(xd_halo_exchange(r->gradient_halo, d_y, wide));
    for (int i = 0; i < C * r->tall * WIDTH; i++)
        d_wide[i] = convolve(r->filters + l * C * WINDOW, wide, r->tall, i, true);
    XD_TRY(xd_halo_exchange_backward(r->input_halo, d_wide, d_x));
    for (int i = 0; i < r->count; i++) r->d[i] += d_x[i];
    return XD_OK;
}

static xd_result train_step(rank *r, xd_comm *world, float sums[FILTERS + 1]) {
    memset(r->leaf, 0, H * sizeof *r->leaf);
    XD_TRY(fill(r, world));
    for (int l = 0; l < LAYERS; l++) XD_TRY(forward(r, l));
    /* The loss is half the mean squared distance from 0.5. */
    for (int i = 0; i < r->count; i++) {
        r->d[i] = (r->x[i] - 0.5f) / MAP;
        r->leaf[i / W % r->h][FILTERS] += 0.5f * (r->x[i] - 0.5f) * r->d[i];
    }
    for (int l = LAYERS - 1; l >= 0; l--) XD_TRY(backward(r, l));

    xd_leaf_stack_reset(r->stack);
    for (int y = 0; y < r->h; y++) XD_TRY(xd_leaf_stack_push(r->stack, r->leaf[y]));
    XD_TRY(xd_crossing_forward(r->reduce, xd_leaf_stack_forest(r->stack), sums));
    for (int i = 0; i < FILTERS; i++) r->filters[i] -= 0.1f * sums[i];
    return XD_OK;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    static float leaves[MOST_RANKS][H][FILTERS + 1];
    run *out = argument;
    const int me = xd_comm_rank(world);
    const xd_interval own = xd_chunk(H, xd_comm_size(world), me);
    const int h = (int)(own.end - own.begin);
    rank r = { .begin = (int)own.begin, .h = h, .count = C * h * W, .leaf = leaves[me] };
    float sums[FILTERS + 1];
    XD_TRY(create(&r, world));

    for (int i = 0; i < FILTERS; i++) r.filters[i] = 0.2f * sinf((float)i * 1.7f);
    for (int step = 0; step < STEPS; step++) {
        XD_TRY(train_step(&r, world, sums));
        if (me == 0) out->losses[step] = sums[FILTERS];
    }
    for (int i = 0; i < r.count; i++)
        out->gradient[i / W / h][r.begin + i / W % h][i % W] = r.d[i];
    if (me == 0) memcpy(out->filters, r.filters, sizeof r.filters);

    xd_leaf_stack_destroy(r.stack);
    xd_crossing_destroy(r.reduce);
    xd_halo_destroy(r.input_halo);
    xd_halo_destroy(r.gradient_halo);
    xd_layout_destroy(r.rows);
    return XD_OK;
}

int main(void) {
    static run one, many;
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    xd_error error = { 0 };
    bool equal = true;
    for (int ranks = 1; ranks <= MOST_RANKS; ranks++) {
        run *r = ranks == 1 ? &one : &many;
        if (xd_run_threads(ranks, &invariant, run_rank, r, &error) != XD_OK) {
            fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
            return 1;
        }
        equal = equal && memcmp(&one, r, sizeof one) == 0;
        printf("%d ranks: loss %.6f, then %.6f: %s\n", ranks, r->losses[0], r->losses[STEPS - 1],
               equal ? "the bits of one" : "OTHER BITS");
    }
    return !equal;
}
