/* A trainer of the kind of llm.c, with one buffer of parameters, one of gradients and pointers into both, made parallel: its
 * passes stay as they are, and its buffers stay its own. wrap() is all that it takes.
 *
 *     cc -std=c99 -O2 examples/13_flat_buffer.c -o flat_buffer -lm -lpthread
 *
 * The network guesses the next letter: embedding, one matrix, and the embedding again as the head, as in GPT-2. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { VOCABULARY = 27, WIDTH = 13, LEAVES = 4, STEPS = 60, TENSORS = 2, POSITIONS = 64 };
static const char text[] = "the quick brown fox jumps over the lazy dog and the dog sleeps on";

/* ---- the trainer, which knows no ranks ---- */
static const char *const names[TENSORS] = { "wte.weight", "mlp.weight" };
static const int64_t shapes[TENSORS][2] = { { VOCABULARY, WIDTH }, { WIDTH, WIDTH } };
enum { WTE = 0, MLP = VOCABULARY * WIDTH, ALL = MLP + WIDTH * WIDTH }; /* where each begins in the buffers */

typedef struct trainer { float params[ALL], grads[ALL], loss; } trainer; /* the loss is that of this rank's positions */
/* Adds the loss and the gradient of one position. */
static void train_position(trainer *t, int i) {
    const int now = text[i] == ' ' ? 0 : text[i] - 'a' + 1, next = text[i + 1] == ' ' ? 0 : text[i + 1] - 'a' + 1;
    const float *wte = t->params + WTE, *mlp = t->params + MLP, *x = wte + now * WIDTH;
    float h[WIDTH] = { 0 }, d_h[WIDTH] = { 0 }, p[VOCABULARY] = { 0 }, sum = 0.0f;
    for (int j = 0; j < WIDTH; j++)
        for (int k = 0; k < WIDTH; k++) h[j] += mlp[j * WIDTH + k] * x[k];
    for (int v = 0; v < VOCABULARY; v++) {
        for (int j = 0; j < WIDTH; j++) p[v] += wte[v * WIDTH + j] * h[j];
        sum += p[v] = expf(p[v]);
    }
    t->loss -= logf(p[next] / sum) / POSITIONS;
    for (int v = 0; v < VOCABULARY; v++)
        for (int j = 0; j < WIDTH; j++) {
            const float d = (p[v] / sum - (float)(v == next)) / POSITIONS;
            d_h[j] += d * wte[v * WIDTH + j];
            t->grads[WTE + v * WIDTH + j] += d * h[j];
        }
    for (int j = 0; j < WIDTH; j++)
        for (int k = 0; k < WIDTH; k++) {
            t->grads[MLP + j * WIDTH + k] += d_h[j] * x[k];
            t->grads[WTE + now * WIDTH + k] += d_h[j] * mlp[j * WIDTH + k];
        }
}

/* ---- what makes it parallel ---- */
static xd_result wrap(xd_comm *world, trainer *t, xd_model **model, xd_parallel **parallel) {
    int64_t at = 0;
    XD_TRY(xd_model_create(xd_comm_ctx(world), NULL, model));
    for (int i = 0; i < TENSORS; i++) {
        xd_weight_desc w = { .name = names[i], .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { shapes[i][0], shapes[i][1] } };
        w.room = w.shape[0] * w.shape[1];
        w.value = t->params + at, w.gradient = t->grads + at;
        at += w.room;
        XD_TRY(xd_weight_add(xd_model_root(*model), &w, NULL));
    }
    XD_TRY(xd_model_seal(*model));
    return xd_ddp_create(*model, world, &(xd_ddp_desc){ .leaves = LEAVES, .sharded_optimizer = true }, parallel);
}

static xd_result train(xd_comm *world, void *out) {
    xd_model *model = NULL;
    xd_parallel *parallel = NULL;
    xd_optimizer *adamw;
    xd_param params[TENSORS];
    int64_t count;
    trainer t;
    for (int i = 0; i < ALL; i++) t.params[i] = 0.3f * sinf(1.7f * (float)i);
    XD_TRY(wrap(world, &t, &model, &parallel));
    XD_TRY(xd_parallel_params(parallel, TENSORS, params, &count));
    xd_optimizer_desc d = xd_adamw_defaults(params, count);
    d.learning_rate = 0.03;
    XD_TRY(xd_optimizer_create(xd_comm_ctx(world), &d, &adamw));
    for (int step = 0; step < STEPS; step++) {
        t.loss = 0.0f;
        for (int64_t k = 0; k < xd_parallel_leaves(parallel).own; k++) {
            memset(t.grads, 0, sizeof t.grads);
            for (int i = (int)xd_parallel_leaf(parallel, k); i < POSITIONS; i += LEAVES) train_position(&t, i);
            XD_TRY(xd_parallel_push_leaf(parallel)); /* the whole buffer of gradients */
        }
        XD_TRY(xd_parallel_reduce(parallel));
        XD_TRY(xd_optimizer_step(adamw, NULL, NULL));
        XD_TRY(xd_parallel_publish(parallel)); /* the whole buffer of parameters */
    }
    if (xd_comm_rank(world) == 0) *(trainer *)out = t;
    xd_optimizer_destroy(adamw);
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    return XD_OK;
}

int main(void) {
    static trainer one, two;
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    if (xd_run_threads(1, &invariant, train, &one, NULL) || xd_run_threads(2, &invariant, train, &two, NULL)) return 1;
    if (memcmp(one.params, two.params, sizeof one.params) != 0) return 1;
    printf("loss %.4f after %d steps; the parameters of two ranks equal those of one\n", one.loss, STEPS);
    return 0;
}
