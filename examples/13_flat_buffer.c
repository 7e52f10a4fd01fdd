/* This example makes a trainer of the kind of llm.c data parallel. The trainer keeps one buffer of
 * parameters, one buffer of gradients, and pointers into both. wrap() describes the buffers to DDP,
 * and the two passes do not change. The network predicts the next letter of a text. Its layers are
 * an embedding, one matrix, and the embedding again as the head, as in GPT-2.
 *
 *     cc -std=c99 -O2 examples/13_flat_buffer.c -o flat_buffer -lm -lpthread
 */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { VOCABULARY = 27, WIDTH = 13, TENSORS = 2 };
enum { MICRO_BATCHES = 4, STEPS = 60, POSITIONS = 64 };

/* The offset of each tensor in the buffers, and the size of a buffer. */
enum { WTE = 0, MLP = VOCABULARY * WIDTH, ALL = MLP + WIDTH * WIDTH };

static const char text[] = "the quick brown fox jumps over the lazy dog and the dog sleeps on";
static const char *const names[TENSORS] = { "wte.weight", "mlp.weight" };
static const int64_t shapes[TENSORS][2] = { { VOCABULARY, WIDTH }, { WIDTH, WIDTH } };

/* ---- the trainer, which does not use the library ---- */

typedef struct trainer {
    float params[ALL];
    float grads[ALL];
    float loss; /* sum over the positions of this rank */
} trainer;

static int token_at(int position) {
    return text[position] == ' ' ? 0 : text[position] - 'a' + 1;
}

/* Adds the loss and the gradient of one position. */
static void train_position(trainer *t, int position) {
    const int token = token_at(position), target = token_at(position + 1);
    const float *wte = t->params + WTE, *mlp = t->params + MLP;
    const float *x = wte + token * WIDTH;
    float h[WIDTH] = { 0 }, d_h[WIDTH] = { 0 };
    float p[VOCABULARY] = { 0 }, sum = 0.0f;

    for (int j = 0; j < WIDTH; j++)
        for (int k = 0; k < WIDTH; k++)
            h[j] += mlp[j * WIDTH + k] * x[k];
    for (int v = 0; v < VOCABULARY; v++) {
        for (int j = 0; j < WIDTH; j++)
            p[v] += wte[v * WIDTH + j] * h[j];
        p[v] = expf(p[v]);
        sum += p[v];
    }
    t->loss -= logf(p[target] / sum) / POSITIONS;

    for (int v = 0; v < VOCABULARY; v++)
        for (int j = 0; j < WIDTH; j++) {
            const float d = (p[v] / sum - (float)(v == target)) / POSITIONS;
            d_h[j] += d * wte[v * WIDTH + j];
            t->grads[WTE + v * WIDTH + j] += d * h[j];
        }
    for (int j = 0; j < WIDTH; j++)
        for (int k = 0; k < WIDTH; k++) {
            t->grads[MLP + j * WIDTH + k] += d_h[j] * x[k];
            t->grads[WTE + token * WIDTH + k] += d_h[j] * mlp[j * WIDTH + k];
        }
}

/* ---- the code that makes it parallel ---- */

static xd_result wrap(xd_comm *world, trainer *t, xd_model **model, xd_parallel **parallel) {
    int64_t at = 0;
    XD_TRY(xd_model_create(xd_comm_ctx(world), NULL, model));
    for (int i = 0; i < TENSORS; i++) {
        xd_weight_desc w = { .name = names[i], .dtype = XD_DTYPE_F32, .ndim = 2 };
        w.shape[0] = shapes[i][0];
        w.shape[1] = shapes[i][1];
        w.room = w.shape[0] * w.shape[1];
        w.value = t->params + at;
        w.gradient = t->grads + at;
        at += w.room;
        XD_TRY(xd_weight_add(xd_model_root(*model), &w, NULL));
    }
    XD_TRY(xd_model_seal(*model));

    const xd_ddp_desc ddp = { .data = world, .micro_batches = MICRO_BATCHES, .sharded_optimizer = true };
    return xd_ddp_create(*model, &ddp, parallel);
}

static xd_result train_step(trainer *t, xd_parallel *parallel, xd_optimizer *adamw) {
    t->loss = 0.0f;
    for (int64_t k = 0; k < xd_parallel_micro_batches(parallel).own; k++) {
        memset(t->grads, 0, sizeof t->grads);
        for (int i = (int)xd_parallel_micro_batch(parallel, k); i < POSITIONS; i += MICRO_BATCHES)
            train_position(t, i);
        /* DDP takes the whole buffer of gradients. */
        XD_TRY(xd_parallel_push_micro_batch(parallel));
    }
    XD_TRY(xd_parallel_reduce(parallel));
    XD_TRY(xd_optimizer_step(adamw, NULL, NULL));

    /* Each rank has stepped its shard, and this call gathers the whole buffer of parameters. */
    return xd_parallel_publish(parallel);
}

static xd_result train(xd_comm *world, void *out) {
    xd_model *model = NULL;
    xd_parallel *parallel = NULL;
    xd_optimizer *adamw;
    xd_param params[TENSORS];
    int64_t count;
    trainer t;
    for (int i = 0; i < ALL; i++)
        t.params[i] = 0.3f * sinf(1.7f * (float)i);
    XD_TRY(wrap(world, &t, &model, &parallel));

    XD_TRY(xd_parallel_params(parallel, TENSORS, params, &count));
    xd_optimizer_desc d = xd_adamw_defaults(params, count);
    d.learning_rate = 0.03;
    XD_TRY(xd_optimizer_create(xd_comm_ctx(world), &d, &adamw));

    for (int step = 0; step < STEPS; step++)
        XD_TRY(train_step(&t, parallel, adamw));
    if (xd_comm_rank(world) == 0)
        *(trainer *)out = t;

    xd_optimizer_destroy(adamw);
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    return XD_OK;
}

int main(void) {
    static trainer one, two;
    const xd_ctx_desc invariant = { .reduction = XD_REDUCTION_INVARIANT };
    if (xd_run_threads(1, &invariant, train, &one, NULL) != XD_OK)
        return 1;
    if (xd_run_threads(2, &invariant, train, &two, NULL) != XD_OK)
        return 1;
    if (memcmp(one.params, two.params, sizeof one.params) != 0)
        return 1;

    printf("loss %.4f after %d steps; the parameters of two ranks equal those of one\n", one.loss,
           STEPS);
    return 0;
}
