/* nn_blocks.c - a block is opened where a pass enters it, and closed where the pass leaves. */
#include "nn_blocks.h"

#include <string.h>

static int nn_blocks_begin(void *user, int block, nn_pass pass, nn_weights *out) {
    static const xd_pass_kind kinds[] = { XD_PASS_FORWARD, XD_PASS_INFERENCE, XD_PASS_BACKWARD };
    const nn_blocks *blocks = (const nn_blocks *)user;
    xd_block_view view;
    xd_pass what;
    memset(&what, 0, sizeof what);
    what.kind = kinds[pass];
    what.leaf = pass == NN_BACKWARD ? blocks->leaf : 0;
    const xd_result result = xd_block_begin(nn_find_block(blocks->model, block), what, &view);
    if (result != XD_OK) return (int)result;
    for (int i = 0; i < nn_block_weights(block); i++) {
        out->value[i] = (const float *)view.values[i];
        out->gradient[i] = (float *)view.gradients[i];
    }
    return 0;
}

static int nn_blocks_end(void *user, int block) {
    return (int)xd_block_end(nn_find_block(((const nn_blocks *)user)->model, block));
}

nn_source nn_blocks_source(nn_blocks *blocks) {
    const nn_source source = { blocks, nn_blocks_begin, nn_blocks_end };
    return source;
}

int nn_blocks_sum_pieces(void *comm, const float *forest, nn_pieces pieces, int64_t count, float *x) {
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = forest;
    c.recv = x;
    c.count = count;
    c.dtype = XD_DTYPE_F32;
    c.leaves.first = pieces.first;
    c.leaves.count = pieces.count;
    c.leaves.total = pieces.total;
    return (int)xd_collective_run((xd_comm *)comm, &c);
}
