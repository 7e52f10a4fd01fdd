/* toy.c - the network's description, and what its leaves hold. */
#include "toy.h"
#include "../helpers/regions.h"

#include <stdio.h>
#include <string.h>

float toy_number(int64_t a, int64_t b, int64_t c) {
    uint64_t x = (uint64_t)(a * 1000003 + b * 7919 + c * 31 + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9u;
    x ^= x >> 32;
    return (float)((double)(x & 0xffffff) / 16777216.0 - 0.5);
}

int toy_token(const toy_sizes *size, int step, int64_t leaf, int row) {
    return (int)((toy_number(step + 1, leaf, row) + 0.5f) * (float)size->vocab);
}

int toy_label(const toy_sizes *size, int step, int64_t leaf, int row) {
    return (int)((toy_number(step + 101, leaf, row) + 0.5f) * (float)size->vocab);
}

/* ---- description ---- */

static void toy_place(xd_weight_desc *d, int64_t count, toy_storage *s) {
    if (!s->values || count == 0) return;
    d->value = s->values;
    d->gradient = d->traits.frozen ? NULL : s->gradients;
    d->room = count;
    s->values += count;
    s->gradients += count;
}

/* What is stored here of a weight. */
static int64_t toy_stored(const toy *t, const xd_weight_desc *d) {
    const int64_t rows = d->ndim == 0 ? 1 : d->stored_rows ? d->stored_rows : d->shape[0];
    xd_region here;
    if (!d->layout) return rows * (d->ndim > 1 ? d->shape[1] : 1);
    (void)xd_layout_region(d->layout, xd_comm_rank(t->share->ranks.world), &here);
    return region_numel(&here);
}

/* Its shape, and where it lies. */
static void toy_shape(const toy *t, share_cut cut, xd_weight_desc *d) {
    d->layout = t->share->layouts[cut];
    d->ndim = share_shape(&t->share->size, cut, d->shape);
    if (cut == SHARE_VOCAB) d->stored_rows = t->share->size.stored;
}

xd_result toy_add(const toy *t, xd_block *block, share_cut cut, xd_weight_desc d, toy_storage *s) {
    d.dtype = s->dtype;
    toy_shape(t, cut, &d);
    d.init.kind = XD_INIT_NORMAL;
    d.init.center = d.ndim == 0 ? 1.0f : 0.0f;
    d.init.scale = 0.3f;
    toy_place(&d, toy_stored(t, &d), s);
    return xd_weight_add(block, &d, NULL);
}

static xd_weight_desc toy_named(const char *name, bool frozen) {
    xd_weight_desc d;
    memset(&d, 0, sizeof d);
    d.name = name;
    d.traits.frozen = frozen;
    return d;
}

static xd_result toy_add_layer(toy *t, int i, toy_storage *s) {
    const toy_sizes *z = &t->size;
    char name[32];
    xd_block_desc d;
    memset(&d, 0, sizeof d);
    snprintf(name, sizeof name, "layers.%d", i);
    d.name = name;
    d.type = "layer";
    XD_TRY(xd_block_add(xd_model_root(t->model), &d, &t->layer[i]));
    XD_TRY(toy_add(t, t->layer[i], SHARE_UP, toy_named("up", (z->frozen & 2) != 0), s));
    XD_TRY(toy_add(t, t->layer[i], SHARE_BIAS, toy_named("bias", false), s));
    XD_TRY(toy_add(t, t->layer[i], SHARE_SHIFT, toy_named("shift", true), s));
    d.name = d.type = "mlp";
    XD_TRY(xd_block_add(t->layer[i], &d, &t->mlp[i]));
    XD_TRY(toy_add(t, t->mlp[i], SHARE_DOWN, toy_named("down", (z->frozen & 4) != 0), s));
    return toy_add(t, t->mlp[i], SHARE_NOTHING, toy_named("nothing", false), s);
}

static xd_result toy_add_head(toy *t, toy_storage *s) {
    xd_weight_desc tie;
    xd_block *root = xd_model_root(t->model);
    if (!t->size.tied) return toy_add(t, root, SHARE_VOCAB, toy_named("head", false), s);
    memset(&tie, 0, sizeof tie);
    tie.name = "head";
    tie.dtype = s->dtype;
    tie.ndim = 2;
    tie.shape[0] = t->size.vocab;
    tie.shape[1] = t->size.hidden;
    tie.tied_to = "embed";
    return xd_weight_add(root, &tie, NULL);
}

/* One of two copies, which is a unit. Its first values are the caller's. */
static xd_result toy_add_copy(toy *t, const char *name, bool last, xd_dtype dtype, xd_block **out) {
    xd_block_desc block;
    xd_weight_desc d;
    memset(&block, 0, sizeof block);
    memset(&d, 0, sizeof d);
    block.name = name;
    block.type = "layer";
    d.name = "copy";
    d.dtype = dtype;
    toy_shape(t, SHARE_VOCAB, &d);
    d.init.kind = XD_INIT_CONSTANT;
    d.traits.frozen = (t->size.frozen & 1) != 0;
    d.traits.shared_embedding = true;
    d.traits.shared = last;
    XD_TRY(xd_block_add(xd_model_root(t->model), &block, out));
    return xd_weight_add(*out, &d, NULL);
}

static xd_result toy_add_ends(toy *t, toy_storage *s) {
    const toy_sizes *z = &t->size;
    xd_block *root = xd_model_root(t->model);
    if (t->cut.first && !z->copies)
        XD_TRY(toy_add(t, root, SHARE_VOCAB, toy_named("embed", (z->frozen & 1) != 0), s));
    if (t->cut.last) XD_TRY(toy_add(t, root, SHARE_SCALAR, toy_named("scale", false), s));
    if (t->cut.last && !z->copies) XD_TRY(toy_add_head(t, s));
    if (t->cut.first && z->copies) XD_TRY(toy_add_copy(t, "embed", false, s->dtype, &t->embed));
    return t->cut.last && z->copies ? toy_add_copy(t, "head", true, s->dtype, &t->head) : XD_OK;
}

static xd_result toy_describe_parts(xd_ctx *ctx, toy *t, toy_storage *s) {
    xd_model_desc d;
    memset(&d, 0, sizeof d);
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16 };
    s->dtype = dtypes[t->size.half];
    d.seed = 11;
    d.rank = xd_comm_rank(t->share->ranks.world);
    XD_TRY(xd_model_create(ctx, &d, &t->model));
    XD_TRY(toy_add_ends(t, s));
    for (int i = t->cut.begin; i < t->cut.end; i++) XD_TRY(toy_add_layer(t, i, s));
    return t->size.experts ? toy_experts_add(t, s) : XD_OK;
}

xd_result toy_describe_stage(xd_ctx *ctx, const toy_sizes *size, const toy_cut *cut, toy *out) {
    toy_storage s;
    sharing *share = out->share;
    memset(&s, 0, sizeof s);
    memset(out, 0, sizeof *out);
    out->share = share;
    out->size = *size;
    out->cut = *cut;
    return toy_describe_parts(ctx, out, &s);
}

xd_result toy_describe(xd_ctx *ctx, const toy_sizes *size, toy_storage storage, toy *out) {
    const toy_cut whole = { true, true, 0, size->layers };
    sharing *share = out->share;
    memset(out, 0, sizeof *out);
    out->share = share;
    out->size = *size;
    out->cut = whole;
    XD_TRY(toy_describe_parts(ctx, out, &storage));
    return xd_model_seal(out->model);
}

void toy_destroy(toy *t) {
    xd_model_destroy(t->model);
}

int64_t toy_count(const toy_sizes *z) {
    const int64_t matrix = (int64_t)z->vocab * z->hidden;
    const int64_t layer = 2 * (int64_t)z->inner * z->hidden + z->inner + z->hidden;
    const int64_t expert = (int64_t)z->hidden * z->hidden + z->hidden;
    return matrix * (z->tied ? 1 : 2) + 1 + z->layers * layer + z->experts * expert;
}
