/* nn_patch_positions.c - see nn_patch_positions.h. */
#include "nn_patch_positions.h"

#include "nn_patch_rows.h"

#include <string.h>

/* ---- who has what ---- */

/* The first block of a rank. */
static int64_t nn_positions_cut(const nn_positions *at, int rank) {
    return (int64_t)NN_POSITION_BLOCKS * rank / at->ranks;
}

nn_positions nn_positions_share(int ranks, int rank, int64_t tokens) {
    nn_positions at;
    at.comm = NULL;
    at.ranks = ranks;
    at.all = tokens;
    at.each = (tokens + NN_POSITION_BLOCKS - 1) / NN_POSITION_BLOCKS;
    at.first = nn_positions_cut(&at, rank);
    at.count = nn_positions_cut(&at, rank + 1) - at.first;
    return at;
}

nn_positions nn_positions_of(xd_comm *comm, int64_t tokens) {
    nn_positions at =
        nn_positions_share(comm ? xd_comm_size(comm) : 1, comm ? xd_comm_rank(comm) : 0, tokens);
    if (at.ranks > 1) at.comm = comm;
    return at;
}

/* Tokens of the blocks [begin, end). */
static xd_interval nn_positions_range(const nn_positions *at, int64_t begin, int64_t end) {
    const xd_interval tokens = { begin * at->each < at->all ? begin * at->each : at->all,
                                 end * at->each < at->all ? end * at->each : at->all };
    return tokens;
}

xd_interval nn_positions_tokens(const nn_positions *at, int rank) {
    return nn_positions_range(at, nn_positions_cut(at, rank), nn_positions_cut(at, rank + 1));
}

xd_interval nn_positions_block(const nn_positions *at, int64_t block) {
    return nn_positions_range(at, at->first + block, at->first + block + 1);
}

xd_result nn_positions_gather(const nn_positions *at, int64_t width, const float *here, float *all) {
    int64_t counts[NN_POSITION_BLOCKS];
    for (int r = 0; r < xd_comm_size(at->comm); r++) {
        const xd_interval tokens = nn_positions_tokens(at, r);
        counts[r] = (tokens.end - tokens.begin) * width;
    }
    return xd_all_gather(at->comm, here, all, counts, XD_DTYPE_F32);
}

/* ---- sums ---- */

/* Blocks of the node that begins with one of them: the largest aligned power of two that ends here. */
static int64_t nn_positions_node(const nn_positions *at, int64_t block) {
    int64_t size = NN_POSITION_BLOCKS;
    while (block % size != 0 || block + size > at->first + at->count) size /= 2;
    return size;
}

int64_t nn_positions_nodes(const nn_positions *at) {
    int64_t nodes = 0;
    for (int64_t b = at->first; b < at->first + at->count; b += nn_positions_node(at, b)) nodes++;
    return nodes;
}

int64_t nn_sums_room(int64_t count) {
    return 3 * count; /* a right half for each level above the blocks */
}

/* out = the node of `blocks`, a power of two, from `block` on. */
static void nn_sums_node(const nn_block_sum *of, int64_t block, int64_t blocks, float *room, float *out) {
    if (blocks == 1) {
        of->run(of->user, block, out);
        return;
    }
    nn_sums_node(of, block, blocks / 2, room + of->count, out);
    nn_sums_node(of, block + blocks / 2, blocks / 2, room + of->count, room);
    nn_add_all(of->count, room, out);
}

void nn_sums_add(const nn_sums *sums, const nn_block_sum *of) {
    const nn_positions *at = sums->at;
    float *out = sums->nodes + of->offset;
    for (int64_t b = at->first, size; b < at->first + at->count; b += size, out += sums->count) {
        size = nn_positions_node(at, b);
        nn_sums_node(of, b - at->first, size, sums->room, out);
    }
}

xd_result nn_sums_join(const nn_sums *sums, const float **root) {
    xd_collective c;
    *root = sums->at->comm ? sums->root : sums->nodes;
    if (!sums->at->comm) return XD_OK;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = sums->nodes;
    c.recv = sums->root;
    c.count = sums->count;
    c.dtype = XD_DTYPE_F32;
    c.leaves.first = sums->at->first;
    c.leaves.count = sums->at->count;
    c.leaves.total = NN_POSITION_BLOCKS;
    return xd_collective_run(sums->at->comm, &c);
}
