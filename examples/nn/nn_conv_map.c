/* nn_conv_map.c - see nn_conv_map.h. */
#include "nn_conv_map.h"

#include "nn_matmul.h"
#include "nn_patch_layer.h"

#include <string.h>

enum { NN_CONV_SIDE = 3 };

static nn_patch_map nn_conv_product(const nn_conv_map *m) {
    const nn_patch_map product = { m->samples * m->height * m->width, m->in * NN_CONV_SEEN, m->out, m->weight,
                                   m->bias };
    return product;
}

/* The row that is seen from row `r` through number `k` of its nine; -1 beyond the edge. */
static int64_t nn_conv_seen(const nn_conv_map *m, int64_t r, int k) {
    const int64_t place = r % (m->height * m->width), dy = k / NN_CONV_SIDE - 1, dx = k % NN_CONV_SIDE - 1;
    const int64_t y = place / m->width + dy, x = place % m->width + dx;
    if (y < 0 || y >= m->height || x < 0 || x >= m->width) return -1;
    return r + dy * m->width + dx;
}

static void nn_conv_gather(const nn_conv_map *m, const float *x) {
    const int64_t rows = m->samples * m->height * m->width, terms = m->in * NN_CONV_SEEN;
    for (int64_t r = 0; r < rows; r++)
        for (int k = 0; k < NN_CONV_SEEN; k++) {
            const int64_t from = nn_conv_seen(m, r, k);
            float *to = m->columns + r * terms + k;
            for (int64_t c = 0; c < m->in; c++) to[c * NN_CONV_SEEN] = from < 0 ? 0.0f : x[from * m->in + c];
        }
}

/* The way back. */
static void nn_conv_scatter(const nn_conv_map *m, float *x) {
    const int64_t rows = m->samples * m->height * m->width, terms = m->in * NN_CONV_SEEN;
    memset(x, 0, (size_t)(rows * m->in) * sizeof *x);
    for (int64_t r = 0; r < rows; r++)
        for (int k = 0; k < NN_CONV_SEEN; k++) {
            const int64_t to = nn_conv_seen(m, r, k);
            const float *from = m->columns + r * terms + k;
            for (int64_t c = 0; to >= 0 && c < m->in; c++) x[to * m->in + c] += from[c * NN_CONV_SEEN];
        }
}

void nn_conv_map_forward(const nn_conv_map *map, const float *x, float *y) {
    const nn_patch_map product = nn_conv_product(map);
    nn_conv_gather(map, x);
    nn_patch_map_forward(&product, map->columns, y);
}

/* The columns are those of x first, and then the gradient by these. */
void nn_conv_map_backward(const nn_conv_map *map, const float *x, const float *d_y, float *d_x,
                          float *const gradients[2]) {
    float *const none[2] = { NULL, NULL };
    const nn_patch_map product = nn_conv_product(map);
    if (gradients[0]) nn_conv_gather(map, x);
    nn_patch_map_backward(&product, map->columns, d_y, NULL, gradients);
    if (!d_x) return;
    nn_patch_map_backward(&product, NULL, d_y, map->columns, none);
    nn_conv_scatter(map, d_x);
}

/* ---- channels that ranks share ---- */

/* Pieces of channels are pieces of columns. */
xd_result nn_conv_map_join(const nn_conv_map *map, const nn_pieces *in, const float *x, float *y) {
    const int64_t rows = map->samples * map->height * map->width;
    const nn_piece_product product = { map->columns, map->weight, rows, map->out, 1, true };
    nn_pieces columns = *in;
    columns.begin *= NN_CONV_SEEN;
    columns.end *= NN_CONV_SEEN;
    columns.length *= NN_CONV_SEEN;
    nn_conv_gather(map, x);
    return nn_pieces_multiply(&columns, &product, map->bias, y);
}

typedef struct nn_conv_above {
    const nn_conv_map *map;
    const float *d_y;
} nn_conv_above;

static void nn_conv_piece_backward(const void *user, int64_t first, int64_t n, float *out) {
    const nn_conv_map *map = ((const nn_conv_above *)user)->map;
    const float *d_y = ((const nn_conv_above *)user)->d_y + first;
    const int64_t rows = map->samples * map->height * map->width, terms = map->in * NN_CONV_SEEN;
    nn_matmul(nn_block(d_y, rows, n, map->out), nn_dense(map->weight + first * terms, n, terms), map->columns,
              terms, false);
    nn_conv_scatter(map, out);
}

xd_result nn_conv_map_join_backward(const nn_conv_map *map, const nn_pieces *out, const float *d_y,
                                    float *d_x) {
    const nn_conv_above above = { map, d_y };
    const nn_piece_sum sum = { nn_conv_piece_backward, &above,
                               map->samples * map->height * map->width * map->in };
    return nn_pieces_sum(out, &sum, d_x);
}
