/* nn_patch_split.c - how the weights of the patch transformer lie over ranks that share its heads and inner width. */
#include "nn_patch_inside.h"

#include <string.h>

enum { NN_SPLIT_LAYOUTS = 40, NN_SPLIT_CP = 0, NN_SPLIT_TP = 1 };

typedef struct nn_split_layout {
    xd_layout *layout;
    nn_patch_cut_kind cut;
} nn_split_layout;

struct nn_patch_split {
    xd_ctx *ctx;
    xd_comm *tp;
    xd_topology topology;
    int rank;
    int count;
    nn_split_layout layouts[NN_SPLIT_LAYOUTS];
};

xd_result nn_patch_split_create(xd_comm *tp, xd_comm *cp, nn_patch_split **out) {
    xd_ctx *ctx = xd_comm_ctx(tp);
    nn_patch_split *s = (nn_patch_split *)xd_allocate(ctx, sizeof *s);
    XD_REQUIRE(ctx, s, XD_ERROR_MEMORY, "no room for layouts over %d ranks", xd_comm_size(tp));
    memset(s, 0, sizeof *s);
    s->ctx = ctx;
    s->tp = tp;
    s->topology.axis_count = 2;
    s->topology.size[NN_SPLIT_CP] = cp ? xd_comm_size(cp) : 1;
    s->topology.size[NN_SPLIT_TP] = xd_comm_size(tp);
    s->topology.rank_count = s->topology.size[0] * s->topology.size[1];
    s->rank = (cp ? xd_comm_rank(cp) : 0) * xd_comm_size(tp) + xd_comm_rank(tp);
    *out = s;
    return XD_OK;
}

void nn_patch_split_destroy(nn_patch_split *s) {
    if (!s) return;
    for (int i = 0; i < s->count; i++) xd_layout_destroy(s->layouts[i].layout);
    xd_release(s->ctx, s);
}

int nn_patch_split_rank(const nn_patch_split *s) {
    return s ? s->rank : 0;
}

/* ---- shares ---- */

nn_pieces nn_patch_heads(const nn_patch_config *c) {
    return nn_pieces_of(c->split ? c->split->tp : NULL, c->width, c->width / c->heads);
}

nn_pieces nn_patch_inner(const nn_patch_config *c) {
    return nn_pieces_of(c->split ? c->split->tp : NULL, c->ffn, (c->ffn + 7) / 8);
}

xd_result nn_patch_split_check(xd_ctx *ctx, const nn_patch_config *c) {
    if (!c->split) return XD_OK;
    const int ranks = xd_comm_size(c->split->tp);
    const int64_t pieces = nn_patch_inner(c).leaves.total;
    XD_REQUIRE(ctx, c->heads % ranks == 0, XD_ERROR_ARGUMENT, "%d heads are not a multiple of %d ranks",
               c->heads, ranks);
    XD_REQUIRE(ctx, ranks <= pieces, XD_ERROR_ARGUMENT, "%d ranks share %lld pieces of inner width %d", ranks,
               (long long)pieces, c->ffn);
    return XD_OK;
}

/* ---- layouts ---- */

enum { NN_SPLIT_RANKS = 8 }; /* as many as there are pieces */

/* Where the inner width is cut: [ranks + 1] */
static void nn_split_offsets(const nn_patch_config *c, int64_t offsets[NN_SPLIT_RANKS + 1]) {
    const nn_pieces inner = nn_patch_inner(c);
    const int ranks = xd_comm_size(c->split->tp);
    for (int r = 0; r < ranks; r++) offsets[r] = inner.leaves.total * r / ranks * inner.length;
    offsets[ranks] = c->ffn;
}

static bool nn_split_fits(const nn_split_layout *l, const xd_weight_desc *w, nn_patch_cut_kind cut) {
    const xd_layout_desc *of = xd_layout_settings(l->layout);
    if (l->cut != cut || of->ndim != w->ndim) return false;
    for (int i = 0; i < w->ndim; i++)
        if (of->shape[i] != w->shape[i]) return false;
    return true;
}

static xd_result nn_split_make(const nn_patch_config *c, const xd_weight_desc *w, nn_patch_cut_kind cut,
                               xd_layout **out) {
    int64_t offsets[NN_SPLIT_RANKS + 1];
    xd_layout_desc d;
    memset(&d, 0, sizeof d);
    d.ndim = w->ndim;
    for (int i = 0; i < w->ndim; i++) d.shape[i] = w->shape[i];
    d.topology = &c->split->topology;
    xd_placement *over = &d.placement[NN_SPLIT_TP];
    if (cut != NN_PATCH_WHOLE) over->kind = XD_SHARD;
    if (cut == NN_PATCH_HEADS_IN || cut == NN_PATCH_INNER_IN) over->dim = 1;
    if (cut == NN_PATCH_HEADS_OUT) over->sections = 3;
    if (cut == NN_PATCH_INNER_IN || cut == NN_PATCH_INNER_OUT) {
        nn_split_offsets(c, offsets);
        over->offsets = offsets;
    }
    return xd_layout_create(c->split->ctx, &d, out);
}

xd_result nn_patch_split_layout(const nn_patch_config *c, const xd_weight_desc *w, nn_patch_cut_kind cut,
                                const xd_layout **out) {
    nn_patch_split *s = c->split;
    int at = 0;
    while (at < s->count && !nn_split_fits(&s->layouts[at], w, cut)) at++;
    XD_REQUIRE(s->ctx, at < NN_SPLIT_LAYOUTS, XD_ERROR_ARGUMENT, "more than %d layouts in one split",
               (int)NN_SPLIT_LAYOUTS);
    if (at == s->count) {
        XD_TRY(nn_split_make(c, w, cut, &s->layouts[at].layout));
        s->layouts[s->count++].cut = cut;
    }
    *out = s->layouts[at].layout;
    return XD_OK;
}
