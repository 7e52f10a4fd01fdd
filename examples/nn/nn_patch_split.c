/* nn_patch_split.c - how the weights of the patch transformer lie over ranks that share its heads and inner width. */
#include "nn_patch_inside.h"

#include <string.h>

nn_pieces nn_patch_heads(const nn_patch_config *c) {
    return nn_pieces_of(nn_split_comm(c->split), c->width, c->width / c->heads);
}

nn_pieces nn_patch_inner(const nn_patch_config *c) {
    return nn_pieces_of(nn_split_comm(c->split), c->ffn, (c->ffn + 7) / 8);
}

xd_result nn_patch_split_check(xd_ctx *ctx, const nn_patch_config *c) {
    if (!c->split) return XD_OK;
    const int ranks = xd_comm_size(nn_split_comm(c->split));
    const int64_t pieces = nn_patch_inner(c).leaves.total;
    XD_REQUIRE(ctx, c->heads % ranks == 0, XD_ERROR_ARGUMENT, "%d heads are not a multiple of %d ranks",
               c->heads, ranks);
    XD_REQUIRE(ctx, ranks <= pieces, XD_ERROR_ARGUMENT, "%d ranks share %lld pieces of inner width %d", ranks,
               (long long)pieces, c->ffn);
    return XD_OK;
}

xd_result nn_patch_split_layout(const nn_patch_config *c, const xd_weight_desc *w, nn_patch_cut_kind cut,
                                const xd_layout **out) {
    const nn_pieces inner = nn_patch_inner(c);
    int64_t offsets[NN_SPLIT_RANKS + 1];
    xd_placement over;
    memset(&over, 0, sizeof over);
    if (cut != NN_PATCH_WHOLE) over.kind = XD_SHARD;
    if (cut == NN_PATCH_HEADS_IN || cut == NN_PATCH_INNER_IN) over.dim = 1;
    if (cut == NN_PATCH_HEADS_OUT) over.sections = 3;
    if (cut == NN_PATCH_INNER_IN || cut == NN_PATCH_INNER_OUT) {
        nn_pieces_offsets(&inner, c->ffn, offsets);
        over.offsets = offsets;
    }
    return nn_split_layout(c->split, w, (int)cut, &over, out);
}
