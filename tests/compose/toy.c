/* toy.c - the network's description and its passes. */
#include "toy.h"

#include <stdio.h>
#include <string.h>

/* What stands before and behind the layers, found by toy_ends_of; and entries of the views, in the order in which weights are added. */
enum { EMBED, SCALE, HEAD, ENDS };
enum { UP, BIAS, SHIFT, LAYER_COUNT }; /* of a layer */
enum { DOWN, NOTHING };                /* of the block in it */

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

void toy_place(xd_weight_desc *d, int64_t count, toy_storage *s) {
    if (!s->values || count == 0) return;
    d->value = s->values;
    d->gradient = d->traits.frozen ? NULL : s->gradients;
    d->room = count;
    s->values += count;
    s->gradients += count;
}

static xd_result toy_add(xd_block *block, const char *name, int rows, int columns, bool frozen,
                         toy_storage *s) {
    xd_weight_desc d;
    memset(&d, 0, sizeof d);
    const int64_t count = (rows < 0 ? 1 : rows) * (int64_t)(columns < 0 ? 1 : columns);
    d.name = name;
    d.dtype = s->dtype;
    d.ndim = (rows >= 0) + (columns >= 0);
    d.shape[0] = rows < 0 ? 0 : rows;
    d.shape[1] = columns < 0 ? 0 : columns;
    d.init.kind = XD_INIT_NORMAL;
    d.init.center = rows < 0 ? 1.0f : 0.0f;
    d.init.scale = 0.3f;
    d.traits.frozen = frozen;
    toy_place(&d, count, s);
    return xd_weight_add(block, &d, NULL);
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
    XD_TRY(toy_add(t->layer[i], "up", z->inner, z->hidden, (z->frozen & 2) != 0, s));
    XD_TRY(toy_add(t->layer[i], "bias", z->inner, -1, false, s));
    XD_TRY(toy_add(t->layer[i], "shift", z->hidden, -1, true, s));
    d.name = d.type = "mlp";
    XD_TRY(xd_block_add(t->layer[i], &d, &t->mlp[i]));
    XD_TRY(toy_add(t->mlp[i], "down", z->hidden, z->inner, (z->frozen & 4) != 0, s));
    return toy_add(t->mlp[i], "nothing", 0, z->hidden, false, s);
}

static xd_result toy_add_head(toy *t, toy_storage *s) {
    xd_weight_desc tie;
    xd_block *root = xd_model_root(t->model);
    if (!t->size.tied) return toy_add(root, "head", t->size.vocab, t->size.hidden, false, s);
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
    d.ndim = 2;
    d.shape[0] = t->size.vocab;
    d.shape[1] = t->size.hidden;
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
        XD_TRY(toy_add(root, "embed", z->vocab, z->hidden, (z->frozen & 1) != 0, s));
    if (t->cut.last) XD_TRY(toy_add(root, "scale", -1, -1, false, s));
    if (t->cut.last && !z->copies) XD_TRY(toy_add_head(t, s));
    if (t->cut.first && z->copies) XD_TRY(toy_add_copy(t, "embed", false, s->dtype, &t->embed));
    return t->cut.last && z->copies ? toy_add_copy(t, "head", true, s->dtype, &t->head) : XD_OK;
}

static xd_result toy_describe_parts(xd_ctx *ctx, toy *t, toy_storage *s) {
    xd_model_desc d;
    memset(&d, 0, sizeof d);
    s->dtype = t->size.half ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    d.seed = 11;
    d.rank = t->members ? xd_comm_rank(t->members) : 0;
    XD_TRY(xd_model_create(ctx, &d, &t->model));
    XD_TRY(toy_add_ends(t, s));
    for (int i = t->cut.begin; i < t->cut.end; i++) XD_TRY(toy_add_layer(t, i, s));
    return t->size.experts ? toy_experts_add(t, ctx, s) : XD_OK;
}

xd_result toy_describe_stage(xd_ctx *ctx, const toy_sizes *size, const toy_cut *cut, toy *out) {
    toy_storage s;
    memset(&s, 0, sizeof s);
    memset(out, 0, sizeof *out);
    out->size = *size;
    out->cut = *cut;
    return toy_describe_parts(ctx, out, &s);
}

xd_result toy_describe(xd_ctx *ctx, const toy_sizes *size, toy_storage storage, toy *out) {
    const toy_cut whole = { true, true, 0, size->layers };
    xd_comm *members = out->members;
    memset(out, 0, sizeof *out);
    out->size = *size;
    out->cut = whole;
    out->members = members;
    XD_TRY(toy_describe_parts(ctx, out, &storage));
    return xd_model_seal(out->model);
}

void toy_destroy(toy *t) {
    xd_model_destroy(t->model);
    for (int i = 0; i < 2; i++) xd_layout_destroy(t->layouts[i]);
}

int64_t toy_count(const toy_sizes *z) {
    const int64_t matrix = (int64_t)z->vocab * z->hidden;
    const int64_t layer = 2 * (int64_t)z->inner * z->hidden + z->inner + z->hidden;
    const int64_t expert = (int64_t)z->hidden * z->hidden + z->hidden;
    return matrix * (z->tied ? 1 : 2) + 1 + z->layers * layer + z->experts * expert;
}

/* ---- forward ---- */

static void toy_look(const toy *t, const xd_block *block, float **values, float **gradients) {
    int64_t n = 0;
    for (int64_t i = 0; i < xd_model_weight_count(t->model); i++) {
        const xd_weight_info info = xd_weight_describe(xd_model_weight_at(t->model, i));
        if (info.block != block) continue;
        values[n] = (float *)info.value;
        if (gradients) gradients[n] = (float *)info.gradient;
        n++;
    }
}

xd_result toy_open(const toy *t, xd_block *block, xd_pass pass, float **values, float **gradients) {
    xd_block_view view;
    if (t->plain) {
        toy_look(t, block, values, gradients);
        return XD_OK;
    }
    XD_TRY(xd_block_begin(block, pass, &view));
    for (int64_t i = 0; i < view.count; i++) {
        values[i] = (float *)view.values[i];
        if (gradients) gradients[i] = (float *)view.gradients[i];
    }
    return XD_OK;
}

xd_result toy_close(const toy *t, xd_block *block) {
    return t->plain ? XD_OK : xd_block_end(block);
}

static bool toy_skips(const toy *t, int step, int layer) {
    return t->size.skips && (step + layer) % 3 == 0;
}

static float toy_bend(float x) {
    return x > 0.0f ? x : 0.125f * x;
}

static void toy_layer_row(const toy_sizes *z, float *const *w, const float *down, const float *h,
                          float *inner, float *out) {
    for (int j = 0; j < z->inner; j++) {
        inner[j] = w[BIAS][j];
        for (int c = 0; c < z->hidden; c++) inner[j] += w[UP][j * z->hidden + c] * h[c];
    }
    for (int c = 0; c < z->hidden; c++) {
        float sum = w[SHIFT][c];
        for (int j = 0; j < z->inner; j++) sum += down[c * z->inner + j] * toy_bend(inner[j]);
        out[c] = h[c] + sum;
    }
}

static xd_result toy_layer(const toy *t, int i, xd_pass_kind kind, int64_t leaf, toy_kept *kept) {
    const xd_pass pass = { kind, 0, false };
    float *w[LAYER_COUNT], *m[2];
    XD_TRY(toy_open(t, t->layer[i], pass, w, NULL));
    XD_TRY(toy_open(t, t->mlp[i], pass, m, NULL));
    for (int r = 0; r < t->size.rows && leaf >= 0; r++)
        toy_layer_row(&t->size, w, m[DOWN], kept->h[i][r], kept->inner[i][r], kept->h[i + 1][r]);
    XD_TRY(toy_close(t, t->mlp[i]));
    return toy_close(t, t->layer[i]);
}

/* What the root shows, at its place. */
static void toy_ends_of(const toy *t, float *const *shown, float *ends[ENDS]) {
    int at = 0;
    const bool copies = t->size.copies != 0;
    ends[EMBED] = t->cut.first && !copies ? shown[at++] : NULL;
    ends[SCALE] = t->cut.last ? shown[at++] : NULL;
    ends[HEAD] = t->cut.last && !copies ? shown[at] : NULL;
}

static xd_result toy_open_root(const toy *t, xd_pass pass, float *w[ENDS], float *g[ENDS]) {
    float *values[ENDS] = { NULL, NULL, NULL }, *gradients[ENDS] = { NULL, NULL, NULL };
    XD_TRY(toy_open(t, xd_model_root(t->model), pass, values, g ? gradients : NULL));
    toy_ends_of(t, values, w);
    if (g) toy_ends_of(t, gradients, g);
    return XD_OK;
}

/* A copy is open while it is used; others are in the root. */
static xd_result toy_open_copy(const toy *t, xd_block *copy, xd_pass pass, float **w, float **g) {
    return copy ? toy_open(t, copy, pass, w, g) : XD_OK;
}

static xd_result toy_close_copy(const toy *t, xd_block *copy) {
    return copy ? toy_close(t, copy) : XD_OK;
}

/* What goes into the head. */
static const float *toy_top(const toy_sizes *z, const toy_kept *kept, int row) {
    return kept->h[z->layers + (z->experts > 0)][row];
}

static void toy_head(const toy_sizes *z, float *const *w, const toy_kept *kept, float *logits) {
    for (int r = 0; r < z->rows; r++)
        for (int v = 0; v < z->vocab; v++) {
            float sum = 0.0f;
            for (int c = 0; c < z->hidden; c++) sum += w[HEAD][v * z->hidden + c] * toy_top(z, kept, r)[c];
            logits[r * z->vocab + v] = *w[SCALE] * sum;
        }
}

/* Into the first layer: the embedding, or what came from the stage before. */
static xd_result toy_enter(const toy *t, const toy_pass *p, float *w[ENDS]) {
    const toy_sizes *z = &t->size;
    const xd_pass pass = { p->kind, 0, false };
    float(*h)[TOY_HIDDEN] = p->kept->h[t->cut.begin];
    if (!t->cut.first) {
        if (p->leaf >= 0) memcpy(h, p->input, (size_t)z->rows * sizeof *h);
        return XD_OK;
    }
    XD_TRY(toy_open_copy(t, t->embed, pass, &w[EMBED], NULL));
    for (int r = 0; r < z->rows && p->leaf >= 0; r++)
        memcpy(h[r], w[EMBED] + toy_token(z, p->step, p->leaf, r) * z->hidden,
               (size_t)z->hidden * sizeof(float));
    return toy_close_copy(t, t->embed);
}

static xd_result toy_leave(const toy *t, const toy_pass *p, float *w[ENDS]) {
    const xd_pass pass = { p->kind, 0, false };
    if (!t->cut.last) {
        if (p->leaf >= 0)
            memcpy(p->output, p->kept->h[t->cut.end], (size_t)t->size.rows * sizeof p->kept->h[0][0]);
        return XD_OK;
    }
    XD_TRY(toy_open_copy(t, t->head, pass, &w[HEAD], NULL));
    if (p->leaf >= 0) toy_head(&t->size, w, p->kept, p->output);
    return toy_close_copy(t, t->head);
}

xd_result toy_forward(const toy *t, const toy_pass *p) {
    const xd_pass pass = { p->kind, 0, false };
    float *w[ENDS];
    if (p->beyond) return t->size.experts ? toy_experts_forward(t, p) : XD_OK;
    XD_TRY(toy_open_root(t, pass, w, NULL));
    XD_TRY(toy_enter(t, p, w));
    for (int i = t->cut.begin; i < t->cut.end; i++) {
        if (toy_skips(t, p->step, i))
            memcpy(p->kept->h[i + 1], p->kept->h[i], sizeof p->kept->h[i]);
        else
            XD_TRY(toy_layer(t, i, p->kind, p->leaf, p->kept));
    }
    if (t->size.experts) XD_TRY(toy_experts_forward(t, p));
    XD_TRY(toy_leave(t, p, w));
    return toy_close(t, xd_model_root(t->model));
}

/* ---- backward ---- */

static void toy_head_backward(const toy_sizes *z, float *const *w, float *const *g, const toy_kept *kept,
                              const float *d_logits, float d_h[TOY_ROWS][TOY_HIDDEN]) {
    for (int r = 0; r < z->rows; r++)
        for (int v = 0; v < z->vocab; v++) {
            const float *h = toy_top(z, kept, r), *row = w[HEAD] + v * z->hidden,
                        d = d_logits[r * z->vocab + v];
            for (int c = 0; c < z->hidden; c++) {
                if (g[SCALE]) *g[SCALE] += d * row[c] * h[c];
                if (g[HEAD]) g[HEAD][v * z->hidden + c] += d * *w[SCALE] * h[c];
                d_h[r][c] += d * *w[SCALE] * row[c];
            }
        }
}

/* d_h becomes the gradient of the layer's input. */
static void toy_layer_row_backward(const toy_sizes *z, float *const *w, const float *down, float *const *g,
                                   float *d_down, const float *h, const float *inner, float *d_h) {
    float d_inner[TOY_INNER];
    for (int c = 0; c < z->hidden && g[SHIFT]; c++) g[SHIFT][c] += d_h[c];
    for (int j = 0; j < z->inner; j++) {
        float d = 0.0f;
        for (int c = 0; c < z->hidden; c++) {
            d += down[c * z->inner + j] * d_h[c];
            if (d_down) d_down[c * z->inner + j] += d_h[c] * toy_bend(inner[j]);
        }
        d_inner[j] = inner[j] > 0.0f ? d : 0.125f * d;
        g[BIAS][j] += d_inner[j];
    }
    for (int j = 0; j < z->inner; j++)
        for (int c = 0; c < z->hidden; c++) {
            if (g[UP]) g[UP][j * z->hidden + c] += d_inner[j] * h[c];
            d_h[c] += d_inner[j] * w[UP][j * z->hidden + c];
        }
}

static xd_result toy_layer_backward(const toy *t, int i, int64_t leaf, int64_t k, bool recompute,
                                    toy_kept *kept, float d_h[TOY_ROWS][TOY_HIDDEN]) {
    const xd_pass pass = { XD_PASS_BACKWARD, k, false };
    float *w[LAYER_COUNT], *g[LAYER_COUNT], *m[2], *d[2];
    XD_TRY(toy_open(t, t->layer[i], pass, w, g));
    XD_TRY(toy_open(t, t->mlp[i], pass, m, d));
    if (recompute) XD_TRY(toy_layer(t, i, XD_PASS_RECOMPUTE, leaf, kept));
    for (int r = 0; r < t->size.rows && leaf >= 0; r++)
        toy_layer_row_backward(&t->size, w, m[DOWN], g, d[DOWN], kept->h[i][r], kept->inner[i][r], d_h[r]);
    XD_TRY(toy_close(t, t->mlp[i]));
    return toy_close(t, t->layer[i]);
}

static xd_result toy_layer_skip(const toy *t, int i, int64_t k) {
    if (t->plain) return XD_OK;
    XD_TRY(xd_block_skip(t->mlp[i], k));
    return xd_block_skip(t->layer[i], k);
}

/* d_h = the gradient of the last layer's output. */
static xd_result toy_leave_backward(const toy *t, const toy_pass *p, float *w[ENDS], float *g[ENDS],
                                    float d_h[TOY_ROWS][TOY_HIDDEN]) {
    const xd_pass pass = { XD_PASS_BACKWARD, p->k, false };
    if (!t->cut.last) {
        if (p->leaf >= 0) memcpy(d_h, p->input, (size_t)t->size.rows * sizeof *d_h);
        return XD_OK;
    }
    XD_TRY(toy_open_copy(t, t->head, pass, &w[HEAD], &g[HEAD]));
    if (p->leaf >= 0) toy_head_backward(&t->size, w, g, p->kept, p->input, d_h);
    return toy_close_copy(t, t->head);
}

static xd_result toy_enter_backward(const toy *t, const toy_pass *p, float *w[ENDS], float *g[ENDS],
                                    float d_h[TOY_ROWS][TOY_HIDDEN]) {
    const toy_sizes *z = &t->size;
    const xd_pass pass = { XD_PASS_BACKWARD, p->k, false };
    if (!t->cut.first) {
        if (p->leaf >= 0) memcpy(p->output, d_h, (size_t)z->rows * sizeof *d_h);
        return XD_OK;
    }
    XD_TRY(toy_open_copy(t, t->embed, pass, &w[EMBED], &g[EMBED]));
    for (int r = 0; r < z->rows && p->leaf >= 0; r++)
        for (int c = 0; c < z->hidden && g[EMBED]; c++)
            g[EMBED][toy_token(z, p->step, p->leaf, r) * z->hidden + c] += d_h[r][c];
    return toy_close_copy(t, t->embed);
}

xd_result toy_backward(const toy *t, const toy_pass *p) {
    const xd_pass pass = { XD_PASS_BACKWARD, p->k, false };
    float *w[ENDS], *g[ENDS], d_h[TOY_ROWS][TOY_HIDDEN];
    memset(d_h, 0, sizeof d_h);
    if (p->beyond) return t->size.experts ? toy_experts_backward(t, p, d_h) : XD_OK;
    XD_TRY(toy_open_root(t, pass, w, g));
    XD_TRY(toy_leave_backward(t, p, w, g, d_h));
    if (t->size.experts) XD_TRY(toy_experts_backward(t, p, d_h));
    for (int i = t->cut.end - 1; i >= t->cut.begin; i--)
        XD_TRY(toy_skips(t, p->step, i)
                   ? toy_layer_skip(t, i, p->k)
                   : toy_layer_backward(t, i, p->leaf, p->k, p->recompute, p->kept, d_h));
    XD_TRY(toy_enter_backward(t, p, w, g, d_h));
    return toy_close(t, xd_model_root(t->model));
}
