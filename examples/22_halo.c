/* A residual convolutional network over a map of the globe whose rows are sharded over ranks.
 * Rows continue across the poles, and columns continue around the earth. The losses, the
 * gradient of the map and the trained filters have the bits of one rank. A layer exchanges one
 * halo in its forward pass, and two in its backward pass.
 *
 *     cc -std=c99 -O2 examples/22_halo.c -o halo -lm -lpthread */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include <math.h>
#include <stdio.h>

enum { C = 3, H = 11, W = 14, K = 5, R = K / 2, LAYERS = 3, STEPS = 20, MOST_RANKS = 8 };
enum { MAP = H * C * W, WIDTH = W + 2 * R, WIDE = (H + 2 * R) * C * WIDTH };
enum { WINDOW = C * K * K, FILTERS = LAYERS * C * WINDOW };
typedef float wide_map[H + 2 * R][C][WIDTH];
typedef struct run { float losses[STEPS], filters[FILTERS], gradient[MAP]; } run;

/* A rank has h rows from `begin` on. A leaf is a row's terms of the filters' gradient and loss. */
typedef struct rank {
    xd_layout *rows;
    xd_halo *input_halo, *gradient_halo;
    xd_leaf_stack *stack;
    xd_crossing *reduce;
    xd_region region;
    int begin, h, count;
    float filters[FILTERS], leaves[H][FILTERS + 1], sums[FILTERS + 1];
    float x[MAP], d[MAP], slope[LAYERS][MAP];
    wide_map seen[LAYERS];
} rank;

static xd_result create(rank *r, xd_comm *world) {
    const int ranks = xd_comm_size(world);
    const xd_topology mesh = { .axis_count = 1, .size = { ranks }, .rank_count = ranks };
    const xd_layout_desc map = { .ndim = 3, .shape = { H, C, W },
                                 .topology = &mesh, .placement = { { XD_SHARD } } };
    XD_TRY(xd_layout_create(xd_comm_ctx(world), &map, &r->rows));
    xd_layout_region(r->rows, xd_comm_rank(world), &r->region);
    xd_halo_desc halo = { .layout = r->rows, .dtype = XD_DTYPE_F32, .before = { R, 0, R },
                          .after = { R, 0, R }, .longitude = 2, .gradient = XD_HALO_COMPLETE };
    /* This halo has zeros beyond the poles and ends, since no outputs are there. */
    XD_TRY(xd_halo_create(world, &halo, &r->gradient_halo));
    halo.boundary[0] = XD_HALO_POLE;
    halo.boundary[2] = XD_HALO_PERIODIC;
    XD_TRY(xd_halo_create(world, &halo, &r->input_halo));
    const xd_leaf_stack_desc stack = { .leaves = { r->begin, r->h, H }, .elements = FILTERS + 1 };
    const xd_crossing_desc sum = { .kind = XD_CROSSING_REDUCE, .dtype = XD_DTYPE_F32, .ndim = 1,
                                   .shape = { FILTERS + 1 }, .leaves = stack.leaves };
    XD_TRY(xd_leaf_stack_create(xd_comm_ctx(world), &stack, &r->stack));
    return xd_crossing_create(world, &sum, &r->reduce);
}

/* Element j of the window around pixel i of [h, C, W]. */
static float *tap(wide_map wide, int i, int j) {
    return &wide[i / W / C + j / K % K][j / K / K][i % W + j % K];
}

/* Each layer computes x += tanh(convolution of x). */
static xd_result forward(rank *r, int l) {
    XD_TRY(xd_halo_exchange(r->input_halo, r->x, r->seen[l]));
    for (int i = 0; i < r->count; i++) {
        const float *filter = r->filters + (l * C + i / W % C) * WINDOW;
        float sum = 0.0f;
        for (int j = 0; j < WINDOW; j++) sum += filter[j] * *tap(r->seen[l], i, j);
        r->x[i] += tanhf(sum);
        r->slope[l][i] = 1.0f / (coshf(sum) * coshf(sum));
    }
    return XD_OK;
}

static xd_result backward(rank *r, int l) {
    float d_y[MAP], d_x[MAP];
    wide_map wide = { 0 }, d_wide = { 0 };
    for (int i = 0; i < r->count; i++) {
        float *d_filter = r->leaves[i / W / C] + (l * C + i / W % C) * WINDOW;
        d_y[i] = r->d[i] * r->slope[l][i];
        for (int j = 0; j < WINDOW; j++) d_filter[j] += d_y[i] * *tap(r->seen[l], i, j);
    }
    /* The first halo completes the gradient of this rank's pixels, and of the copies of pixels
     * beyond poles and ends. The second exchange adds these to the gradient of the originals. */
    XD_TRY(xd_halo_exchange(r->gradient_halo, d_y, wide));
    for (int i = 0; i < WIDE * WINDOW; i++) {
        const int j = i % WINDOW;
        const int y = i / WINDOW / WIDTH / C, c = i / WINDOW / WIDTH % C, x = i / WINDOW % WIDTH;
        const int row = y + j / K % K - R, column = x + j % K - R;
        if (row < 0 || row >= H + 2 * R || column < 0 || column >= WIDTH) continue;
        d_wide[row][j / K / K][column] += r->filters[(l * C + c) * WINDOW + j] * wide[y][c][x];
    }
    XD_TRY(xd_halo_exchange_backward(r->input_halo, d_wide, d_x));
    for (int i = 0; i < r->count; i++) r->d[i] += d_x[i];
    return XD_OK;
}

/* A pixel of the first map depends on its place alone, whichever rank has it. */
static xd_result train_step(rank *r, xd_ctx *ctx) {
    const xd_tensor_part map = { .dtype = XD_DTYPE_F32, .ndim = 3, .shape = { H, C, W },
                                 .region = &r->region, .range = { 0, r->count }, .data = r->x };
    const xd_init normal = { XD_INIT_NORMAL, .scale = 1.0f };
    memset(r->leaves, 0, sizeof r->leaves);
    XD_TRY(xd_tensor_part_fill(ctx, &map, &normal, &(xd_philox){ .stream = XD_STREAM_USER }));
    for (int l = 0; l < LAYERS; l++) XD_TRY(forward(r, l));
    /* The loss is half the mean squared distance from 0.5. */
    for (int i = 0; i < r->count; i++) {
        r->d[i] = (r->x[i] - 0.5f) / MAP;
        r->leaves[i / W / C][FILTERS] += 0.5f * (r->x[i] - 0.5f) * r->d[i];
    }
    for (int l = LAYERS - 1; l >= 0; l--) XD_TRY(backward(r, l));
    xd_leaf_stack_reset(r->stack);
    for (int y = 0; y < r->h; y++) XD_TRY(xd_leaf_stack_push(r->stack, r->leaves[y]));
    XD_TRY(xd_crossing_forward(r->reduce, xd_leaf_stack_forest(r->stack), r->sums));
    for (int i = 0; i < FILTERS; i++) r->filters[i] -= 0.1f * r->sums[i];
    return XD_OK;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    run *out = argument;
    const xd_interval own = xd_chunk(H, xd_comm_size(world), xd_comm_rank(world));
    rank r = { .begin = (int)own.begin, .h = (int)(own.end - own.begin) };
    r.count = r.h * C * W;
    XD_TRY(create(&r, world));
    for (int i = 0; i < FILTERS; i++) r.filters[i] = 0.2f * sinf((float)i * 1.7f);
    for (int step = 0; step < STEPS; step++) {
        XD_TRY(train_step(&r, xd_comm_ctx(world)));
        if (xd_comm_rank(world) == 0) out->losses[step] = r.sums[FILTERS];
    }
    memcpy(out->gradient + r.begin * C * W, r.d, (size_t)r.count * sizeof *r.d);
    if (xd_comm_rank(world) == 0) memcpy(out->filters, r.filters, sizeof r.filters);
    xd_leaf_stack_destroy(r.stack);
    xd_crossing_destroy(r.reduce);
    xd_halo_destroy(r.input_halo);
    xd_halo_destroy(r.gradient_halo);
    xd_layout_destroy(r.rows);
    return XD_OK;
}

int main(void) {
    static run runs[MOST_RANKS + 1];
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    xd_error error = { 0 };
    bool equal = true;
    for (int n = 1; n <= MOST_RANKS; n++) {
        if (xd_run_threads(n, &invariant, run_rank, &runs[n], &error) != XD_OK) {
            fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
            return 1;
        }
        equal = equal && memcmp(&runs[1], &runs[n], sizeof runs[1]) == 0;
        printf("%d ranks: loss %.6f, then %.6f: %s\n", n, runs[n].losses[0],
               runs[n].losses[STEPS - 1], equal ? "the bits of one" : "OTHER BITS");
    }
    return !equal;
}
