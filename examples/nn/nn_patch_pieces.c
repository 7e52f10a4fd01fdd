/* nn_patch_pieces.c - see nn_patch_pieces.h. */
#include "nn_patch_pieces.h"

#include "nn_matmul.h"
#include "nn_patch_rows.h"

#include <string.h>

static int64_t nn_pieces_smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

nn_pieces nn_pieces_of(xd_comm *comm, int64_t whole, int64_t length) {
    const int64_t ranks = comm ? xd_comm_size(comm) : 1, rank = comm ? xd_comm_rank(comm) : 0;
    nn_pieces p;
    memset(&p, 0, sizeof p);
    p.comm = comm;
    p.length = length;
    p.leaves.total = (whole + length - 1) / length;
    p.leaves.first = p.leaves.total * rank / ranks;
    p.leaves.count = p.leaves.total * (rank + 1) / ranks - p.leaves.first;
    p.begin = p.leaves.first * length;
    p.end = nn_pieces_smaller((p.leaves.first + p.leaves.count) * length, whole);
    return p;
}

void nn_pieces_offsets(const nn_pieces *p, int64_t whole, int64_t *offsets) {
    const int ranks = p->comm ? xd_comm_size(p->comm) : 1;
    for (int r = 0; r < ranks; r++) offsets[r] = p->leaves.total * r / ranks * p->length;
    offsets[ranks] = whole;
}

/* ---- sums ---- */

/* Each rank's nodes to the sum on all; the stack is empty afterwards. */
static xd_result nn_pieces_join(const nn_pieces *p) {
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = xd_leaf_stack_forest(p->stack);
    c.recv = p->sum;
    c.count = p->elements;
    c.dtype = XD_DTYPE_F32;
    c.leaves = p->leaves;
    const xd_result result = xd_collective_run(p->comm, &c);
    xd_leaf_stack_reset(p->stack);
    return result;
}

xd_result nn_pieces_sum(const nn_pieces *p, const nn_piece_sum *of, float *y) {
    for (int64_t piece = 0; piece < p->leaves.count; piece++) {
        const int64_t first = piece * p->length;
        float *place;
        XD_TRY(xd_leaf_stack_next(p->stack, &place));
        of->run(of->user, first, nn_pieces_smaller(p->length, p->end - p->begin - first), place);
        memset(place + of->count, 0, (size_t)(p->elements - of->count) * sizeof *place);
        XD_TRY(xd_leaf_stack_push(p->stack, place));
    }
    XD_TRY(nn_pieces_join(p));
    memcpy(y, p->sum, (size_t)of->count * sizeof *y);
    return XD_OK;
}

/* ---- products ---- */

typedef struct nn_piece_factors {
    const nn_piece_product *of;
    int64_t here;
} nn_piece_factors;

/* One piece: [rows, out] */
static void nn_piece_multiply(const void *user, int64_t first, int64_t n, float *out) {
    const nn_piece_product *of = ((const nn_piece_factors *)user)->of;
    const int64_t here = ((const nn_piece_factors *)user)->here, all = of->sections * here;
    for (int s = 0; s < of->sections; s++) {
        const int64_t at = s * here + first;
        const nn_view weight = of->turned ? nn_transpose(nn_block(of->weight + at, of->out, n, all))
                                          : nn_dense(of->weight + at * of->out, n, of->out);
        nn_matmul(nn_block(of->x + at, of->rows, n, all), weight, out, of->out, s > 0);
    }
}

xd_result nn_pieces_multiply(const nn_pieces *p, const nn_piece_product *of, const float *bias, float *y) {
    const nn_piece_factors factors = { of, p->end - p->begin };
    const nn_piece_sum sum = { nn_piece_multiply, &factors, of->rows * of->out };
    XD_TRY(nn_pieces_sum(p, &sum, y));
    for (int64_t r = 0; bias && r < of->rows; r++) nn_add_all(of->out, bias, y + r * of->out);
    return XD_OK;
}
