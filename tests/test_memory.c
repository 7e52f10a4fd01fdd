/* One training step on two ranks with the n-th allocation failing, for every n: each run ends with an error on the
 * runner, never with a hang, and gives back everything it took. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"

#include <stdlib.h>

enum { RANKS = 2, ROWS = 3, COLUMNS = 5 };

typedef struct heap {
    int64_t calls, fails_at, live; /* atomic; fails_at 0 -> never */
} heap;

static void *heap_allocate(void *user, size_t bytes) {
    heap *h = (heap *)user;
    if (__atomic_add_fetch(&h->calls, 1, __ATOMIC_RELAXED) == h->fails_at) return NULL;
    __atomic_add_fetch(&h->live, 1, __ATOMIC_RELAXED);
    return malloc(bytes);
}

static void heap_release(void *user, void *memory) {
    heap *h = (heap *)user;
    __atomic_sub_fetch(&h->live, 1, __ATOMIC_RELAXED);
    free(memory);
}

typedef struct parts {
    xd_mesh *mesh;
    xd_vocab *vocab;
    xd_optimizer *optimizer;
    xd_ema *ema;
    xd_param param;
    float logits[ROWS * COLUMNS], gradient[ROWS * COLUMNS];
} parts;

static xd_result make(xd_comm *world, parts *p) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_mesh_desc mesh = { .axes = { { "tp", RANKS } } };
    xd_comm *tp = NULL;
    XDI_TRY(xd_mesh_create(world, &mesh, &p->mesh));
    XDI_TRY(xd_mesh_group(p->mesh, "tp", &tp));
    XDI_TRY(xd_vocab_create_even(ctx, tp, RANKS * COLUMNS, &p->vocab));
    p->param.name = "logits";
    p->param.value = p->logits;
    p->param.gradient = p->gradient;
    p->param.dtype = XD_DTYPE_F32;
    p->param.count = ROWS * COLUMNS;
    const xd_optimizer_desc adamw = { .params = &p->param, .param_count = 1 };
    /* Both can fail on one rank alone: agree before anybody communicates. */
    xd_result mine = xd_optimizer_create(ctx, &adamw, &p->optimizer);
    if (mine == XD_OK) mine = xd_ema_create(ctx, &p->param, 1, NULL, &p->ema);
    return xd_agree(world, mine);
}

static xd_result step(xd_comm *world, parts *p) {
    static const int64_t labels[ROWS] = { 1, 7, 4 };
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_rows student = { p->logits, XD_DTYPE_F32, ROWS, COLUMNS, 0 };
    const xd_rows gradient = { p->gradient, XD_DTYPE_F32, ROWS, COLUMNS, 0 };
    const xd_loss_desc loss = { .student = student, .labels = labels, .vocab = p->vocab, .gradient = gradient };
    const xd_gradient_norm_desc clip = { .params = &p->param, .param_count = 1, .max_norm = 1.0 };
    xd_loss_values values;
    xd_gradient_norm norm;
    XDI_TRY(xd_loss(ctx, &loss, &values));
    XDI_TRY(xd_gradient_norm_compute(ctx, world, &clip, &norm));
    const xd_optimizer_step_desc how = { .gradient_scale = &norm.coefficient };
    XDI_TRY(xd_optimizer_step(p->optimizer, &how, NULL));
    return xd_ema_update(p->ema, XD_EMA_NEXT, NULL);
}

static xd_result train_rank(xd_comm *world, void *argument) {
    parts p;
    (void)argument;
    memset(&p, 0, sizeof p);
    xd_result result = make(world, &p);
    if (result == XD_OK) result = step(world, &p);
    xd_ema_destroy(p.ema);
    xd_optimizer_destroy(p.optimizer);
    xd_vocab_destroy(p.vocab);
    xd_mesh_destroy(p.mesh);
    return result;
}

static xd_result train(heap *h) {
    const xd_ctx_desc desc = { .allocator = { heap_allocate, heap_release, h }, .timeout_seconds = 20 };
    return xd_run_threads(RANKS, &desc, train_rank, NULL, NULL);
}

XD_TEST(a_training_step_survives_a_failure_of_each_of_its_allocations) {
    heap whole = { 0, 0, 0 };
    CHECK_EQ_INT(train(&whole), XD_OK);
    CHECK_EQ_INT(whole.live, 0);
    CHECK(whole.calls > 20);
    for (int64_t n = 1; n <= whole.calls; n++) {
        heap h = { 0, n, 0 };
        const xd_result result = train(&h);
        CHECK_EQ_INT(result, XD_ERROR_MEMORY);
        CHECK_EQ_INT(h.live, 0);
        if (result != XD_ERROR_MEMORY) printf("    at allocation %lld of %lld\n", (long long)n, (long long)whole.calls);
    }
}

XD_TEST_MAIN()
