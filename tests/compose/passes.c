/* passes.c - a leaf through the network, or through a stage of it, and its gradient back. */
#include "toy.h"

#include <string.h>

/* What stands before and behind the layers, found by toy_ends_of; and entries of the views, in the order in which weights are added. */
enum { EMBED, SCALE, HEAD, ENDS };
enum { UP, BIAS, SHIFT, LAYER_COUNT }; /* of a layer */
enum { DOWN, NOTHING };                /* of the block in it */

/* ---- forward ---- */

static void toy_look(const toy *t, const xd_block *block, float **values, float **gradients) {
    int64_t n = 0;
    for (int64_t i = 0; i < xd_model_describe(t->model).weight_count; i++) {
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

/* Numbers of what is here of the inner width, and of the vocabulary. */
static int toy_inner(const toy *t) {
    return (int)(t->share->inner.end - t->share->inner.begin);
}

static int toy_columns(const toy *t) {
    return (int)(t->share->vocab.end - t->share->vocab.begin);
}

/* seen = h, and a quarter of the row before it. */
static xd_result toy_see(const toy *t, float h[TOY_ROWS][TOY_HIDDEN], float seen[TOY_ROWS][TOY_HIDDEN]) {
    const sharing *s = t->share;
    float all[TOY_ROWS][TOY_HIDDEN];
    XD_TRY(xd_crossing_forward(s->crossings[SHARE_SEE], h[s->rows.begin], all));
    for (int64_t r = s->rows.begin; r < s->rows.end; r++)
        for (int c = 0; c < t->size.hidden; c++)
            seen[r][c] = r > 0 ? all[r][c] + 0.25f * all[r - 1][c] : all[r][c];
    return XD_OK;
}

/* The layer's block, from what is seen to the inner width. */
static void toy_layer_enter(const toy *t, float *const *w, const float *seen, float *inner) {
    const int hidden = t->size.hidden;
    for (int j = 0; j < toy_inner(t); j++) {
        inner[j] = w[BIAS][j];
        for (int c = 0; c < hidden; c++) inner[j] += w[UP][j * hidden + c] * seen[c];
    }
}

/* out = h + shift + what comes out of the inner width. */
static xd_result toy_layer_leave(const toy *t, float *const *w, const float *down, int i, toy_kept *kept) {
    sharing *s = t->share;
    const int here = toy_inner(t);
    float sum[TOY_ROWS][TOY_HIDDEN];
    for (int j = 0; j < here; j++) {
        float *place;
        XD_TRY(share_place(s->stacks[SHARE_LEAVE], t->size.rows * TOY_HIDDEN, &place));
        for (int64_t r = s->rows.begin; r < s->rows.end; r++)
            for (int c = 0; c < t->size.hidden; c++)
                place[r * TOY_HIDDEN + c] = down[c * here + j] * toy_bend(kept->inner[i][r][j]);
        XD_TRY(xd_leaf_stack_push(s->stacks[SHARE_LEAVE], place));
    }
    XD_TRY(share_forward(s, SHARE_LEAVE, sum[0]));
    for (int64_t r = s->rows.begin; r < s->rows.end; r++)
        for (int c = 0; c < t->size.hidden; c++)
            kept->h[i + 1][r][c] = kept->h[i][r][c] + (w[SHIFT][c] + sum[r][c]);
    return XD_OK;
}

static xd_result toy_layer(const toy *t, int i, xd_pass_kind kind, int64_t leaf, toy_kept *kept) {
    const xd_pass pass = { kind, 0, false };
    const xd_interval rows = t->share->rows;
    float *w[LAYER_COUNT], *m[2];
    XD_TRY(toy_open(t, t->layer[i], pass, w, NULL));
    XD_TRY(toy_open(t, t->mlp[i], pass, m, NULL));
    if (leaf >= 0) {
        XD_TRY(toy_see(t, kept->h[i], kept->seen[i]));
        for (int64_t r = rows.begin; r < rows.end; r++)
            toy_layer_enter(t, w, kept->seen[i][r], kept->inner[i][r]);
        XD_TRY(toy_layer_leave(t, w, m[DOWN], i, kept));
    }
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

static void toy_head(const toy *t, float *const *w, const toy_kept *kept, float *logits) {
    const xd_interval rows = t->share->rows;
    const int columns = toy_columns(t), hidden = t->size.hidden;
    for (int64_t r = rows.begin; r < rows.end; r++)
        for (int v = 0; v < columns; v++) {
            const float *h = toy_top(&t->size, kept, (int)r);
            float sum = 0.0f;
            for (int c = 0; c < hidden; c++) sum += w[HEAD][v * hidden + c] * h[c];
            logits[(r - rows.begin) * columns + v] = *w[SCALE] * sum;
        }
}

/* The row of the embedding that a row's token has here, -1 where another rank has it. */
static int64_t toy_found(const toy *t, const toy_pass *p, int64_t row) {
    const int64_t token = toy_token(&t->size, p->step, p->leaf, (int)row);
    return token >= t->share->vocab.begin && token < t->share->vocab.end ? token - t->share->vocab.begin : -1;
}

/* h = the embeddings of all rows' tokens. */
static xd_result toy_look_up(const toy *t, const toy_pass *p, const float *embed, float (*h)[TOY_HIDDEN]) {
    sharing *s = t->share;
    float *place;
    XD_TRY(share_place(s->stacks[SHARE_LOOK], t->size.rows * TOY_HIDDEN, &place));
    for (int64_t r = s->rows.begin; r < s->rows.end; r++) {
        const int64_t found = toy_found(t, p, r);
        if (found < 0) continue;
        memcpy(place + r * TOY_HIDDEN, embed + found * t->size.hidden,
               (size_t)t->size.hidden * sizeof(float));
    }
    XD_TRY(xd_leaf_stack_push(s->stacks[SHARE_LOOK], place));
    return share_forward(s, SHARE_LOOK, h[0]);
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
    if (p->leaf >= 0) XD_TRY(toy_look_up(t, p, w[EMBED], h));
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
    if (p->leaf >= 0) toy_head(t, w, p->kept, p->output);
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

void toy_add_to(float *gradient, const float *sum, int64_t count) {
    for (int64_t i = 0; i < count && gradient; i++) gradient[i] += sum[i];
}

/* A term for each column of the vocabulary: of d_h, and of the gradient of the scale that each row gives. */
static xd_result toy_head_terms(const toy *t, float *const *w, const toy_kept *kept, const float *d_logits) {
    sharing *s = t->share;
    const int columns = toy_columns(t), hidden = t->size.hidden, rows = t->size.rows;
    for (int v = 0; v < columns; v++) {
        const float *row = w[HEAD] + v * hidden;
        float *place;
        XD_TRY(share_place(s->stacks[SHARE_LOGITS], rows * (TOY_HIDDEN + 1), &place));
        for (int64_t r = s->rows.begin; r < s->rows.end; r++) {
            const float *h = toy_top(&t->size, kept, (int)r), d = d_logits[(r - s->rows.begin) * columns + v];
            for (int c = 0; c < hidden; c++) {
                place[r * TOY_HIDDEN + c] = d * *w[SCALE] * row[c];
                place[rows * TOY_HIDDEN + r] += d * row[c] * h[c];
            }
        }
        XD_TRY(xd_leaf_stack_push(s->stacks[SHARE_LOGITS], place));
    }
    return XD_OK;
}

/* The gradients of the scale and of the head; `scales` [rows]. */
static xd_result toy_head_weights(const toy *t, float *const *w, float *const *g, const toy_pass *p,
                                  const float *scales) {
    sharing *s = t->share;
    const int columns = toy_columns(t), hidden = t->size.hidden;
    xd_leaf_stack *stack = s->weights[SHARE_OF_HEAD];
    for (int64_t r = s->rows.begin; r < s->rows.end; r++) {
        const float *h = toy_top(&t->size, p->kept, (int)r);
        float *place;
        XD_TRY(share_place(stack, s->counts[SHARE_OF_HEAD], &place));
        *place = scales[r];
        for (int v = 0; v < columns; v++)
            for (int c = 0; c < hidden; c++)
                place[1 + v * hidden + c] = p->input[(r - s->rows.begin) * columns + v] * *w[SCALE] * h[c];
        XD_TRY(xd_leaf_stack_push(stack, place));
    }
    XD_TRY(share_join(s, SHARE_OF_HEAD));
    toy_add_to(g[SCALE], s->sum, 1);
    toy_add_to(g[HEAD], s->sum + 1, (int64_t)columns * hidden);
    return XD_OK;
}

static xd_result toy_head_backward(const toy *t, float *const *w, float *const *g, const toy_pass *p,
                                   float d_h[TOY_ROWS][TOY_HIDDEN]) {
    float sums[TOY_ROWS * (TOY_HIDDEN + 1)];
    XD_TRY(toy_head_terms(t, w, p->kept, p->input));
    XD_TRY(share_backward(t->share, SHARE_LOGITS, sums));
    memcpy(d_h, sums, (size_t)t->size.rows * sizeof *d_h);
    return toy_head_weights(t, w, g, p, sums + t->size.rows * TOY_HIDDEN);
}

/* The gradient of the inner width of a row, before the bend. */
static void toy_layer_row_backward(const toy *t, const float *down, const float *inner, const float *d_h,
                                   float *d_inner) {
    const int here = toy_inner(t);
    for (int j = 0; j < here; j++) {
        float d = 0.0f;
        for (int c = 0; c < t->size.hidden; c++) d += down[c * here + j] * d_h[c];
        d_inner[j] = inner[j] > 0.0f ? d : 0.125f * d;
    }
}

/* What one row gives to the gradients of up, bias, shift and down, which lie in `out` one behind the other. */
static void toy_layer_row_weights(const toy *t, const toy_kept *kept, int i, int64_t r, const float *d_inner,
                                  const float *d_h, float *out) {
    const int here = toy_inner(t), hidden = t->size.hidden;
    float *bias = out + here * hidden, *shift = bias + here, *down = shift + hidden;
    for (int j = 0; j < here; j++) {
        for (int c = 0; c < hidden; c++) {
            out[j * hidden + c] = d_inner[j] * kept->seen[i][r][c];
            down[c * here + j] = d_h[c] * toy_bend(kept->inner[i][r][j]);
        }
        bias[j] = d_inner[j];
    }
    for (int c = 0; c < hidden; c++) shift[c] = d_h[c];
}

static xd_result toy_layer_weights(const toy *t, const toy_kept *kept, int i,
                                   float d_inner[TOY_ROWS][TOY_INNER], float d_h[TOY_ROWS][TOY_HIDDEN],
                                   float *const *g, float *d_down) {
    sharing *s = t->share;
    const int64_t matrix = (int64_t)toy_inner(t) * t->size.hidden;
    xd_leaf_stack *stack = s->weights[SHARE_OF_LAYER];
    for (int64_t r = s->rows.begin; r < s->rows.end; r++) {
        float *place;
        XD_TRY(xd_leaf_stack_next(stack, &place));
        toy_layer_row_weights(t, kept, i, r, d_inner[r], d_h[r], place);
        XD_TRY(xd_leaf_stack_push(stack, place));
    }
    XD_TRY(share_join(s, SHARE_OF_LAYER));
    toy_add_to(g[UP], s->sum, matrix);
    toy_add_to(g[BIAS], s->sum + matrix, toy_inner(t));
    toy_add_to(g[SHIFT], s->sum + matrix + toy_inner(t), t->size.hidden);
    toy_add_to(d_down, s->sum + s->counts[SHARE_OF_LAYER] - matrix, matrix);
    return XD_OK;
}

/* d_seen = the gradient of what the layer saw. */
static xd_result toy_layer_input(const toy *t, const float *up, float d_inner[TOY_ROWS][TOY_INNER],
                                 float d_seen[TOY_ROWS][TOY_HIDDEN]) {
    sharing *s = t->share;
    for (int j = 0; j < toy_inner(t); j++) {
        float *place;
        XD_TRY(share_place(s->stacks[SHARE_ENTER], t->size.rows * TOY_HIDDEN, &place));
        for (int64_t r = s->rows.begin; r < s->rows.end; r++)
            for (int c = 0; c < t->size.hidden; c++)
                place[r * TOY_HIDDEN + c] = d_inner[r][j] * up[j * t->size.hidden + c];
        XD_TRY(xd_leaf_stack_push(s->stacks[SHARE_ENTER], place));
    }
    return share_backward(s, SHARE_ENTER, d_seen[0]);
}

/* To d_h, what the rows that saw it say. */
static xd_result toy_see_backward(const toy *t, float d_seen[TOY_ROWS][TOY_HIDDEN],
                                  float d_h[TOY_ROWS][TOY_HIDDEN]) {
    sharing *s = t->share;
    float here[TOY_ROWS][TOY_HIDDEN];
    for (int64_t r = s->rows.begin; r < s->rows.end; r++) {
        float *place;
        XD_TRY(share_place(s->stacks[SHARE_SEE], t->size.rows * TOY_HIDDEN, &place));
        for (int c = 0; c < t->size.hidden; c++) {
            place[r * TOY_HIDDEN + c] = d_seen[r][c];
            if (r > 0) place[(r - 1) * TOY_HIDDEN + c] = 0.25f * d_seen[r][c];
        }
        XD_TRY(xd_leaf_stack_push(s->stacks[SHARE_SEE], place));
    }
    XD_TRY(share_backward(s, SHARE_SEE, here[0]));
    for (int64_t r = s->rows.begin; r < s->rows.end; r++)
        for (int c = 0; c < t->size.hidden; c++) d_h[r][c] += here[r - s->rows.begin][c];
    return XD_OK;
}

/* d_h becomes the gradient of the layer's input. */
static xd_result toy_layer_arithmetic(const toy *t, int i, const toy_kept *kept, float *const *w,
                                      float *const *g, float *const *m, float *const *d,
                                      float d_h[TOY_ROWS][TOY_HIDDEN]) {
    const xd_interval rows = t->share->rows;
    float d_inner[TOY_ROWS][TOY_INNER], d_seen[TOY_ROWS][TOY_HIDDEN];
    for (int64_t r = rows.begin; r < rows.end; r++)
        toy_layer_row_backward(t, m[DOWN], kept->inner[i][r], d_h[r], d_inner[r]);
    XD_TRY(toy_layer_weights(t, kept, i, d_inner, d_h, g, d[DOWN]));
    XD_TRY(toy_layer_input(t, w[UP], d_inner, d_seen));
    return toy_see_backward(t, d_seen, d_h);
}

static xd_result toy_layer_backward(const toy *t, int i, const toy_pass *p, float d_h[TOY_ROWS][TOY_HIDDEN]) {
    const xd_pass pass = { XD_PASS_BACKWARD, p->k, false };
    float *w[LAYER_COUNT], *g[LAYER_COUNT], *m[2], *d[2];
    XD_TRY(toy_open(t, t->layer[i], pass, w, g));
    XD_TRY(toy_open(t, t->mlp[i], pass, m, d));
    if (p->recompute) XD_TRY(toy_layer(t, i, XD_PASS_RECOMPUTE, p->leaf, p->kept));
    if (p->leaf >= 0) XD_TRY(toy_layer_arithmetic(t, i, p->kept, w, g, m, d, d_h));
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
    if (p->leaf >= 0) XD_TRY(toy_head_backward(t, w, g, p, d_h));
    return toy_close_copy(t, t->head);
}

static xd_result toy_look_up_backward(const toy *t, const toy_pass *p, float *gradient,
                                      float d_h[TOY_ROWS][TOY_HIDDEN]) {
    sharing *s = t->share;
    xd_leaf_stack *stack = s->weights[SHARE_OF_EMBED];
    for (int64_t r = s->rows.begin; r < s->rows.end; r++) {
        const int64_t found = toy_found(t, p, r);
        float *place;
        XD_TRY(share_place(stack, s->counts[SHARE_OF_EMBED], &place));
        if (found >= 0)
            memcpy(place + found * t->size.hidden, d_h[r], (size_t)t->size.hidden * sizeof(float));
        XD_TRY(xd_leaf_stack_push(stack, place));
    }
    XD_TRY(share_join(s, SHARE_OF_EMBED));
    toy_add_to(gradient, s->sum, s->counts[SHARE_OF_EMBED]);
    return XD_OK;
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
    if (p->leaf >= 0) XD_TRY(toy_look_up_backward(t, p, g[EMBED], d_h));
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
        XD_TRY(toy_skips(t, p->step, i) ? toy_layer_skip(t, i, p->k) : toy_layer_backward(t, i, p, d_h));
    XD_TRY(toy_enter_backward(t, p, w, g, d_h));
    return toy_close(t, xd_model_root(t->model));
}
