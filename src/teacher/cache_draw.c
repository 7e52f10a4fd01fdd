/* Systematic draws of a teacher's less likely ids.
 *
 * The mass of all ids but the k likeliest, in the order of ids, is cut by `count` points at equal distances, the first at a random
 * place in its interval. A point stands for the id whose mass it lies in, with 1/count of the mass of all. The expected weight of
 * an id is its probability. Masses are integers, so shards of the vocabulary see the same points. */

#include "loss/softmax.h"
#include "teacher/internal.h"

#include <math.h>
#include <string.h>

/* Columns of a block: their masses are computed again where a point lies in them. */
enum { XDI_CACHE_BLOCK = 256 };

XD_PRIVATE int64_t xdi_cache_blocks(int64_t columns) {
    return (columns + XDI_CACHE_BLOCK - 1) / XDI_CACHE_BLOCK;
}

XD_PRIVATE bool xdi_cache_is_other(const double *last, const int64_t *last_ids, int64_t k, double z,
                                   int64_t id) {
    return !(z > last[k - 1] || (z == last[k - 1] && id <= last_ids[k - 1]));
}

/* In units of 2^-56: a row's sum stays far below 2^63. */
static uint64_t xdi_cache_mass(double probability) {
    return (uint64_t)(probability * 72057594037927936.0);
}

XD_PRIVATE void xdi_cache_add_block(uint64_t *blocks, int64_t column, double probability) {
    blocks[column / XDI_CACHE_BLOCK] += xdi_cache_mass(probability);
}

/* The column of a row that holds `point`, in units of this shard's mass. */
static int64_t xdi_cache_column(const xdi_cache_draws *d, int64_t row, uint64_t point) {
    const xd_vocab_info info = xd_vocab_describe(d->vocab);
    const uint64_t *blocks = d->blocks + row * xdi_cache_blocks(info.end - info.begin);
    int64_t block = 0, found = 0;
    for (; point >= blocks[block]; block++) point -= blocks[block];
    for (int64_t id = info.begin + block * XDI_CACHE_BLOCK; id < info.end; id++) {
        const double z = xdi_loss_load(d->logits, row, id - info.begin);
        if (!xdi_cache_is_other(d->last + row * d->k, d->last_ids + row * d->k, d->k, z, id)) continue;
        const uint64_t mass = xdi_cache_mass(exp(z / d->temperature - d->lse[row]));
        found = id;
        if (point < mass) break;
        point -= mass;
    }
    return found;
}

/* Point j of a row of this mass. */
static uint64_t xdi_cache_point(const xdi_cache_draws *d, int64_t row, int64_t j, uint64_t mass) {
    const double offset = xd_philox_uniform_f64(&d->random, d->first + row);
    const uint64_t point = (uint64_t)((double)mass * (((double)j + offset) / (double)d->count));
    return point < mass ? point : mass - 1;
}

/* The lowest id that is none of the k: for a row whose other ids have no mass that counts. */
static int64_t xdi_cache_lowest(const xdi_cache_draws *d, int64_t row) {
    const int64_t *ids = d->last_ids + row * d->k;
    int64_t id = 0;
    for (int64_t j = 0; j < d->k; j++)
        if (ids[j] == id) {
            id++;
            j = -1; /* begin again: the k are in order of probability */
        }
    return id < xd_vocab_describe(d->vocab).size ? id : 0;
}

/* The draws of a row that lie in this shard; zeros where others have them. */
static void xdi_cache_draw_row(const xdi_cache_draws *d, int64_t row, uint64_t before, uint64_t own,
                               uint64_t mass) {
    const xd_comm *tp = xd_vocab_describe(d->vocab).tp;
    const bool first = !tp || xd_comm_rank(tp) == 0;
    int64_t *out = d->drawn + row * d->count;
    for (int64_t j = 0; j < d->count; j++) {
        const uint64_t point = mass ? xdi_cache_point(d, row, j, mass) : 0;
        if (mass == 0)
            out[j] = first ? xdi_cache_lowest(d, row) : 0;
        else
            out[j] = point >= before && point - before < own ? xdi_cache_column(d, row, point - before) : 0;
    }
}

XD_PRIVATE xd_result xdi_cache_draw(const xdi_cache_draws *d) {
    const xd_vocab_info info = xd_vocab_describe(d->vocab);
    const int64_t rows = d->logits->rows, blocks = xdi_cache_blocks(info.end - info.begin);
    const int ranks = info.tp ? xd_comm_size(info.tp) : 1, rank = info.tp ? xd_comm_rank(info.tp) : 0;
    uint64_t *mine = d->masses + rank * rows;
    memset(mine, 0, (size_t)rows * sizeof *mine);
    for (int64_t i = 0; i < rows * blocks; i++) mine[i / blocks] += d->blocks[i];
    for (int r = 0; r < ranks; r++) d->counts[r] = rows;
    if (info.tp) XD_TRY(xd_all_gather(info.tp, mine, d->masses, d->counts, XD_DTYPE_I64));
    for (int64_t row = 0; row < rows; row++) {
        uint64_t before = 0, mass = 0;
        for (int r = 0; r < ranks; r++) {
            if (r == rank) before = mass;
            mass += d->masses[r * rows + row];
        }
        xdi_cache_draw_row(d, row, before, mine[row], mass);
    }
    if (!info.tp) return XD_OK;
    return xd_all_reduce(info.tp, d->drawn, d->drawn, rows * d->count, XD_DTYPE_I64, XD_SUM);
}
