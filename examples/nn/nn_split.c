/* nn_split.c - see nn_split.h. */
#include "nn_split.h"

#include <string.h>

enum { NN_SPLIT_LAYOUTS = 40, NN_SPLIT_CP = 0, NN_SPLIT_TP = 1 };

typedef struct nn_split_entry {
    xd_layout *layout;
    int cut;
} nn_split_entry;

struct nn_split {
    xd_ctx *ctx;
    xd_comm *tp;
    xd_topology topology;
    int rank;
    int count;
    nn_split_entry layouts[NN_SPLIT_LAYOUTS];
};

xd_result nn_split_create(xd_comm *tp, xd_comm *cp, nn_split **out) {
    xd_ctx *ctx = xd_comm_ctx(tp);
    nn_split *s = (nn_split *)xd_allocate(ctx, sizeof *s);
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

void nn_split_destroy(nn_split *s) {
    if (!s) return;
    for (int i = 0; i < s->count; i++) xd_layout_destroy(s->layouts[i].layout);
    xd_release(s->ctx, s);
}

xd_comm *nn_split_comm(const nn_split *s) {
    return s ? s->tp : NULL;
}

int nn_split_rank(const nn_split *s) {
    return s ? s->rank : 0;
}

static bool nn_split_fits(const nn_split_entry *e, const xd_weight_desc *w, int cut) {
    const xd_layout_desc *of = xd_layout_settings(e->layout);
    if (e->cut != cut || of->ndim != w->ndim) return false;
    for (int i = 0; i < w->ndim; i++)
        if (of->shape[i] != w->shape[i]) return false;
    return true;
}

static xd_result nn_split_make(const nn_split *s, const xd_weight_desc *w, const xd_placement *over,
                               xd_layout **out) {
    xd_layout_desc d;
    memset(&d, 0, sizeof d);
    d.ndim = w->ndim;
    for (int i = 0; i < w->ndim; i++) d.shape[i] = w->shape[i];
    d.topology = &s->topology;
    d.placement[NN_SPLIT_TP] = *over;
    return xd_layout_create(s->ctx, &d, out);
}

xd_result nn_split_layout(nn_split *s, const xd_weight_desc *w, int cut, const xd_placement *over,
                          const xd_layout **out) {
    int at = 0;
    while (at < s->count && !nn_split_fits(&s->layouts[at], w, cut)) at++;
    XD_REQUIRE(s->ctx, at < NN_SPLIT_LAYOUTS, XD_ERROR_ARGUMENT, "more than %d layouts in one split",
               (int)NN_SPLIT_LAYOUTS);
    if (at == s->count) {
        XD_TRY(nn_split_make(s, w, over, &s->layouts[at].layout));
        s->layouts[s->count++].cut = cut;
    }
    *out = s->layouts[at].layout;
    return XD_OK;
}
