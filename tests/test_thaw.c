/* Parameters that are frozen when the optimizer is made and trained later: their state begins when they are thawed. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp */
#endif

#include "checkpoint_files.h"
#include "averages.h"
#include "planned.h"

enum { N = 37, PARAMS = 3 /* a, trained from the start; b, thawed; c, a buffer of integers */, STEPS = 4 };

/* A list whose second entry is frozen. */
typedef struct list {
    xd_param param[PARAMS];
    double value[PARAMS][N]; /* room for elements of any type */
    float gradient[PARAMS][N];
} list;

static float number(int param, int i, int salt) {
    const int numbers[3] = { param, i, salt };
    return (float)((double)(xd_hash(0, numbers, sizeof numbers) >> 40) / 8388608.0 - 1.0);
}

static void list_set_value(list *l, int param, int salt) {
    for (int i = 0; i < N; i++)
        xd_store_f64(l->value[param], l->param[param].dtype, i, (double)number(param, i, salt));
}

static void list_open(list *l, xd_dtype dtype) {
    static const char *const names[PARAMS] = { "a", "b", "c" };
    memset(l, 0, sizeof *l);
    for (int k = 0; k < PARAMS; k++) {
        xd_param *p = &l->param[k];
        p->name = names[k];
        p->value = l->value[k];
        p->gradient = l->gradient[k];
        p->dtype = k == 2 ? XD_DTYPE_I64 : dtype;
        p->count = N;
        p->frozen = k == 1;
        p->buffer = k == 2;
        list_set_value(l, k, 0);
    }
}

static void list_set_gradients(list *l, int step) {
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < N; i++) l->gradient[k][i] = number(k, i, 100 + step);
}

static xd_optimizer_desc desc_of(const list *l, xd_optimizer_kind kind, bool reserve) {
    xd_optimizer_desc d = xd_adamw_defaults(l->param, PARAMS);
    d.kind = kind;
    d.momentum = 0.9;
    d.learning_rate = 0.01;
    d.reserve_frozen = reserve;
    return d;
}

static xd_ctx *open_ctx(void) {
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    return ctx;
}

static bool says(xd_ctx *ctx, const char *text) {
    const bool found = strstr(xd_last_error(ctx)->message, text) != NULL;
    if (!found) printf("    \"%s\" is not in \"%s\"\n", text, xd_last_error(ctx)->message);
    return found;
}

static bool same(const void *a, const void *b, size_t bytes) {
    return memcmp(a, b, bytes) == 0;
}

/* Equal states, or none in both. */
static void check_states(xd_optimizer_state a, xd_optimizer_state b) {
    CHECK_EQ_INT(*a.step, *b.step);
    CHECK((a.master == NULL) == (b.master == NULL) && (a.exp_avg_sq == NULL) == (b.exp_avg_sq == NULL));
    CHECK((a.exp_avg == NULL) == (b.exp_avg == NULL));
    if (a.exp_avg && b.exp_avg) CHECK(same(a.exp_avg, b.exp_avg, N * sizeof(float)));
    if (a.exp_avg_sq && b.exp_avg_sq) CHECK(same(a.exp_avg_sq, b.exp_avg_sq, N * sizeof(float)));
    if (a.master && b.master) CHECK(same(a.master, b.master, N * sizeof(float)));
}

/* Steps one list whose second parameter is thawed between two steps, and another whose second parameter gets an optimizer of its
 * own at that time. Its value is another one then than when the first optimizer was made. */
static void thaw_beside_a_new_one(xd_ctx *ctx, xd_optimizer_kind kind, xd_dtype dtype) {
    static list thawed, fresh;
    xd_optimizer *one = NULL, *first = NULL, *second = NULL;
    list_open(&thawed, dtype);
    list_open(&fresh, dtype);
    const xd_optimizer_desc d = desc_of(&thawed, kind, true), plain = desc_of(&fresh, kind, false);
    CHECK_EQ_INT(xd_optimizer_create(ctx, &d, &one), XD_OK);
    CHECK_EQ_INT(xd_optimizer_create(ctx, &plain, &first), XD_OK);
    for (int step = 1; step <= 2 * STEPS; step++) {
        list_set_gradients(&thawed, step);
        list_set_gradients(&fresh, step);
        if (step == STEPS + 1) {
            CHECK(!xd_optimizer_state_at(one, 1).exp_avg && !xd_optimizer_state_at(one, 1).master);
            list_set_value(&thawed, 1, 7); /* a file was loaded, for example */
            list_set_value(&fresh, 1, 7);
            thawed.param[1].frozen = false;
            CHECK_EQ_INT(xd_optimizer_thaw(one, 1), XD_OK);
            xd_param own = fresh.param[1];
            static xd_param lent;
            own.frozen = false;
            lent = own;
            xd_optimizer_desc alone = plain;
            alone.params = &lent;
            alone.param_count = 1;
            CHECK_EQ_INT(xd_optimizer_create(ctx, &alone, &second), XD_OK);
            check_states(xd_optimizer_state_at(one, 1), xd_optimizer_state_at(second, 0));
        }
        CHECK_EQ_INT(xd_optimizer_step(one, NULL, NULL), XD_OK);
        CHECK_EQ_INT(xd_optimizer_step(first, NULL, NULL), XD_OK);
        if (second) CHECK_EQ_INT(xd_optimizer_step(second, NULL, NULL), XD_OK);
    }
    CHECK(same(thawed.value, fresh.value, sizeof thawed.value));
    check_states(xd_optimizer_state_at(one, 0), xd_optimizer_state_at(first, 0));
    check_states(xd_optimizer_state_at(one, 1), xd_optimizer_state_at(second, 0));
    CHECK_EQ_INT(*xd_optimizer_state_at(one, 0).step, 2 * STEPS);
    CHECK_EQ_INT(*xd_optimizer_state_at(one, 1).step, STEPS);
    xd_optimizer_destroy(second);
    xd_optimizer_destroy(first);
    xd_optimizer_destroy(one);
}

XD_TEST(a_thawed_parameter_steps_as_one_whose_optimizer_begins_then) {
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16 };
    xd_ctx *ctx = open_ctx();
    for (int kind = 0; kind <= XD_OPTIMIZER_SGD; kind++)
        for (int k = 0; k < 3; k++) thaw_beside_a_new_one(ctx, (xd_optimizer_kind)kind, dtypes[k]);
    xd_ctx_destroy(ctx);
}

typedef struct heap {
    size_t bytes;
    int calls;
} heap;

static void *heap_allocate(void *user, size_t bytes) {
    heap *h = (heap *)user;
    h->bytes += bytes;
    h->calls++;
    return malloc(bytes);
}

static void heap_release(void *user, void *memory) {
    (void)user;
    free(memory);
}

XD_TEST(what_is_set_aside_is_told_beforehand_and_thawing_allocates_nothing) {
    static list l;
    heap h = { 0, 0 };
    xd_ctx *ctx = NULL;
    const xd_ctx_desc counted = { .allocator = { heap_allocate, heap_release, &h } };
    CHECK_EQ_INT(xd_ctx_create(&counted, &ctx), XD_OK);
    list_open(&l, XD_DTYPE_BF16);
    xd_memory_bytes without = { 0, 0 }, with = { 0, 0 };
    xd_optimizer *optimizer = NULL;
    xd_optimizer_desc d = desc_of(&l, XD_OPTIMIZER_ADAMW, false);
    CHECK_EQ_INT(PLANNED_MEMORY(ctx, xd_optimizer_create(ctx, &d, &optimizer), &without), XD_OK);
    d.reserve_frozen = true;
    CHECK_EQ_INT(PLANNED_MEMORY(ctx, xd_optimizer_create(ctx, &d, &optimizer), &with), XD_OK);
    CHECK(with.host >= without.host + 3 * N * sizeof(float)); /* master copy and two moments */
    h.bytes = 0;
    h.calls = 0;
    CHECK_EQ_INT(xd_optimizer_create(ctx, &d, &optimizer), XD_OK);
    CHECK_EQ_INT(h.calls, 1);
    CHECK_EQ_INT(h.bytes, with.host);
    l.param[1].frozen = false;
    CHECK_EQ_INT(xd_optimizer_thaw(optimizer, 1), XD_OK);
    list_set_gradients(&l, 1);
    CHECK_EQ_INT(xd_optimizer_step(optimizer, NULL, NULL), XD_OK);
    CHECK_EQ_INT(h.calls, 1);
    xd_optimizer_destroy(optimizer);
    xd_ctx_destroy(ctx);
}

XD_TEST(what_cannot_be_thawed_is_refused_by_name_and_nothing_changes) {
    static list l, before;
    xd_ctx *ctx = open_ctx();
    xd_optimizer *optimizer = NULL, *plain = NULL;
    list_open(&l, XD_DTYPE_BF16);
    xd_param *b = &l.param[1];
    const xd_optimizer_desc d = desc_of(&l, XD_OPTIMIZER_ADAMW, true),
                            none = desc_of(&l, XD_OPTIMIZER_ADAMW, false);
    CHECK_EQ_INT(xd_optimizer_create(ctx, &d, &optimizer), XD_OK);
    CHECK_EQ_INT(xd_optimizer_create(ctx, &none, &plain), XD_OK);
    CHECK_EQ_INT(xd_optimizer_thaw(optimizer, PARAMS), XD_ERROR_ARGUMENT);
    CHECK(says(ctx, "parameter 3 of 3"));
    CHECK_EQ_INT(xd_optimizer_thaw(optimizer, -1), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_optimizer_thaw(optimizer, 0), XD_ERROR_STATE);
    CHECK(says(ctx, "a: has a state already"));
    CHECK_EQ_INT(xd_optimizer_thaw(optimizer, 2), XD_ERROR_STATE);
    CHECK(says(ctx, "c: a buffer"));
    CHECK_EQ_INT(xd_optimizer_thaw(optimizer, 1), XD_ERROR_STATE);
    CHECK(says(ctx, "b: still frozen in the caller's list"));
    b->frozen = false;
    CHECK_EQ_INT(xd_optimizer_thaw(plain, 1), XD_ERROR_STATE);
    CHECK(says(ctx, "b: no memory was set aside") && says(ctx, "reserve_frozen"));
    before = l;
    CHECK_EQ_INT(xd_optimizer_step(optimizer, NULL, NULL), XD_ERROR_STATE); /* not thawed yet */
    CHECK(says(ctx, "b: value, dtype, count or flags changed") &&
          says(ctx, "frozen was 1 and is 0: see xd_optimizer_thaw"));
    CHECK_EQ_INT(xd_optimizer_step(plain, NULL, NULL), XD_ERROR_STATE);
    CHECK(same(before.value, l.value, sizeof l.value));
    b->count = N - 1;
    CHECK_EQ_INT(xd_optimizer_thaw(optimizer, 1), XD_ERROR_STATE);
    CHECK(says(ctx, "b: value, dtype, count or flags changed"));
    CHECK(!xd_optimizer_state_at(optimizer, 1).exp_avg);
    b->count = N;
    CHECK_EQ_INT(xd_optimizer_thaw(optimizer, 1), XD_OK);
    CHECK_EQ_INT(xd_optimizer_thaw(optimizer, 1), XD_ERROR_STATE);
    CHECK(says(ctx, "b: has a state already"));
    CHECK_EQ_INT(xd_optimizer_step(optimizer, NULL, NULL), XD_OK);
    b->frozen = true; /* not a way to stop it again */
    CHECK_EQ_INT(xd_optimizer_step(optimizer, NULL, NULL), XD_ERROR_STATE);
    xd_optimizer_destroy(plain);
    xd_optimizer_destroy(optimizer);
    xd_ctx_destroy(ctx);
}

XD_TEST(frozen_values_of_other_types_have_nothing_set_aside_and_groups_are_checked_at_creation) {
    static list l;
    xd_ctx *ctx = open_ctx();
    xd_optimizer *optimizer = NULL;
    list_open(&l, XD_DTYPE_F32);
    l.param[1].dtype = XD_DTYPE_I64;
    xd_optimizer_desc d = desc_of(&l, XD_OPTIMIZER_ADAMW, true);
    CHECK_EQ_INT(xd_optimizer_create(ctx, &d, &optimizer), XD_OK);
    l.param[1].frozen = false;
    CHECK_EQ_INT(xd_optimizer_thaw(optimizer, 1), XD_ERROR_DTYPE);
    CHECK(says(ctx, "b: parameters are F32, BF16 or F16, not I64"));
    xd_optimizer_destroy(optimizer);
    optimizer = NULL;
    l.param[1].dtype = XD_DTYPE_F32;
    l.param[1].frozen = true;
    l.param[1].group = 5;
    CHECK_EQ_INT(xd_optimizer_create(ctx, &d, &optimizer), XD_ERROR_ARGUMENT);
    CHECK(says(ctx, "b: group 5, but there are 1") && optimizer == NULL);
    xd_ctx_destroy(ctx);
}

/* Averages and norms are over the list itself, so they see the change at once. */
XD_TEST(averages_and_norms_over_the_list_take_the_change) {
    static list l;
    static double apart[N], fused[N];
    xd_ctx *ctx = open_ctx();
    for (int joined = 0; joined < 2; joined++) {
        xd_optimizer *optimizer = NULL;
        xd_ema *ema = NULL;
        xd_ema_desc average = xd_ema_defaults(XD_EMA_CONSTANT);
        average.decay = 0.75;
        average.init_from_current = true;
        list_open(&l, XD_DTYPE_F32);
        const xd_optimizer_desc d = desc_of(&l, XD_OPTIMIZER_ADAMW, true);
        CHECK_EQ_INT(xd_optimizer_create(ctx, &d, &optimizer), XD_OK);
        CHECK_EQ_INT(average_create(ctx, l.param, PARAMS, &average, &ema), XD_OK);
        const xd_optimizer_step_desc with = { .averages = &ema, .average_count = 1 };
        for (int step = 1; step <= 2 * STEPS; step++) {
            const xd_gradient_norm_desc norm = { .params = l.param, .param_count = PARAMS };
            xd_gradient_norm before, after;
            list_set_gradients(&l, step);
            CHECK_EQ_INT(xd_gradient_norm_compute(ctx, NULL, &norm, &before), XD_OK);
            if (step == STEPS + 1) {
                CHECK(xd_ema_view(ema, 1).shadow.frozen);
                l.param[1].frozen = false;
                CHECK_EQ_INT(xd_optimizer_thaw(optimizer, 1), XD_OK);
                CHECK(!xd_ema_view(ema, 1).shadow.frozen);
                CHECK_EQ_INT(xd_gradient_norm_compute(ctx, NULL, &norm, &after), XD_OK);
                CHECK(after.norm > before.norm * 1.1); /* two parameters instead of one */
            }
            CHECK_EQ_INT(xd_optimizer_step(optimizer, joined ? &with : NULL, NULL), XD_OK);
            if (!joined) CHECK_EQ_INT(xd_ema_update(ema, XD_EMA_NEXT, NULL), XD_OK);
        }
        memcpy(joined ? fused : apart, xd_ema_view(ema, 1).shadow.value, N * sizeof(float));
        CHECK(!same(xd_ema_view(ema, 1).shadow.value, l.value[1], N * sizeof(float)));
        xd_ema_destroy(ema);
        xd_optimizer_destroy(optimizer);
    }
    CHECK(same(apart, fused, N * sizeof(float)));
    xd_ctx_destroy(ctx);
}

/* ---- checkpoints ---- */

typedef struct job {
    const char *root;
    bool thawed_before_save, thawed_before_load, lenient;
    xd_result expected;
    int64_t tensors; /* of the state in the checkpoint */
} job;

static void trained_list(xd_ctx *ctx, list *l, xd_optimizer **optimizer, bool thawed, int salt) {
    list_open(l, XD_DTYPE_BF16);
    const xd_optimizer_desc d = desc_of(l, XD_OPTIMIZER_ADAMW, true);
    CHECK_EQ_INT(xd_optimizer_create(ctx, &d, optimizer), XD_OK);
    for (int step = 1; step <= STEPS; step++) {
        list_set_gradients(l, step + salt);
        if (thawed && step == 2) {
            l->param[1].frozen = false;
            CHECK_EQ_INT(xd_optimizer_thaw(*optimizer, 1), XD_OK);
        }
        CHECK_EQ_INT(xd_optimizer_step(*optimizer, NULL, NULL), XD_OK);
    }
}

static void list_parts(const list *l, xd_tensor_part *parts) {
    memset(parts, 0, PARAMS * sizeof *parts);
    for (int k = 0; k < PARAMS; k++) {
        parts[k].name = l->param[k].name;
        parts[k].dtype = l->param[k].dtype;
        parts[k].ndim = 1;
        parts[k].shape[0] = N;
        parts[k].range.end = N;
        parts[k].data = l->param[k].value;
    }
}

static xd_result save_and_load(xd_comm *world, void *argument) {
    const job *j = (const job *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    static list from, to;
    xd_tensor_part parts[2][PARAMS];
    xd_optimizer *saved = NULL, *loaded = NULL;
    xd_checkpoint_report report;
    trained_list(ctx, &from, &saved, j->thawed_before_save, 0);
    trained_list(ctx, &to, &loaded, j->thawed_before_load, 50);
    list_parts(&from, parts[0]);
    list_parts(&to, parts[1]);
    const xd_checkpoint_network a = { .parts = parts[0], .part_count = PARAMS, .optimizer = saved };
    const xd_checkpoint_network b = { .parts = parts[1], .part_count = PARAMS, .optimizer = loaded };
    const xd_checkpoint_save_desc save = { .root = j->root, .step = 1, .networks = &a, .network_count = 1 };
    const xd_checkpoint_load_desc load = {
        .root = j->root, .step = 1, .networks = &b, .network_count = 1, .lenient = j->lenient
    };
    CHECK_EQ_INT(xd_checkpoint_save(world, &save), XD_OK);
    CHECK_EQ_INT(xd_checkpoint_load(world, &load, &report, NULL), j->expected);
    if (j->expected == XD_OK) CHECK_EQ_INT(report.loaded + report.unexpected, PARAMS + j->tensors);
    if (j->expected == XD_OK && j->thawed_before_save == j->thawed_before_load) {
        for (int step = 1; step <= STEPS; step++) {
            list_set_gradients(&from, 200 + step);
            list_set_gradients(&to, 200 + step);
            CHECK_EQ_INT(xd_optimizer_step(saved, NULL, NULL), XD_OK);
            CHECK_EQ_INT(xd_optimizer_step(loaded, NULL, NULL), XD_OK);
        }
        CHECK(same(from.value, to.value, sizeof from.value));
        for (int k = 0; k < 2; k++)
            check_states(xd_optimizer_state_at(saved, k), xd_optimizer_state_at(loaded, k));
    }
    xd_optimizer_destroy(loaded);
    xd_optimizer_destroy(saved);
    return XD_OK;
}

/* Four tensors of state for each parameter that has one: two moments, the master copy and the count. */
XD_TEST(checkpoints_hold_the_state_of_a_thawed_parameter_and_none_before) {
    static const job jobs[] = {
        { NULL, false, false, false, XD_OK, 4 },
        { NULL, true, true, false, XD_OK, 8 },
        { NULL, true, false, false, XD_ERROR_UNEXPECTED, 8 },
        { NULL, false, true, false, XD_ERROR_MISSING, 4 },
        { NULL, true, false, true, XD_OK, 8 },
    };
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        const char *root = new_root();
        job j = jobs[i];
        j.root = root;
        CHECK_EQ_INT(xd_run_threads(1, NULL, save_and_load, &j, NULL), XD_OK);
        remove_all(root);
    }
}

/* ---- models ---- */

XD_TEST(a_weight_of_a_model_is_frozen_and_thawed_until_the_model_is_sealed) {
    xd_ctx *ctx = open_ctx();
    xd_model *model = NULL;
    xd_weight *owner = NULL, *tie = NULL, *whole = NULL;
    xd_weight_desc d = { .name = "a", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 4 } };
    CHECK_EQ_INT(xd_model_create(ctx, NULL, &model), XD_OK);
    CHECK_EQ_INT(xd_weight_add(xd_model_root(model), &d, &owner), XD_OK);
    d.name = "b";
    d.tied_to = "a";
    CHECK_EQ_INT(xd_weight_add(xd_model_root(model), &d, &tie), XD_OK);
    d = (xd_weight_desc){ .name = "c", .dtype = XD_DTYPE_I64, .ndim = 1, .shape = { 4 } };
    d.traits.frozen = true;
    CHECK_EQ_INT(xd_weight_add(xd_model_root(model), &d, &whole), XD_OK);
    CHECK_EQ_INT(xd_weight_set_frozen(owner, true), XD_OK);
    CHECK_EQ_INT(xd_weight_set_frozen(tie, false), XD_OK); /* that of its owner */
    CHECK(!xd_weight_describe(owner).desc->traits.frozen);
    CHECK_EQ_INT(xd_weight_set_frozen(whole, false), XD_ERROR_ARGUMENT);
    CHECK(says(ctx, "weight \"c\" is thawed, but has integers (I64)"));
    CHECK_EQ_INT(xd_model_seal(model), XD_OK);
    CHECK_EQ_INT(xd_model_describe(model).trained_count, 4);
    CHECK_EQ_INT(xd_weight_set_frozen(owner, false), XD_ERROR_STATE);
    CHECK(says(ctx, "\"a\" is thawed after xd_model_seal"));
    xd_model_destroy(model);
    xd_ctx_destroy(ctx);
}

/* The list of a model, with a gradient of the caller's for what is thawed. */
XD_TEST(a_frozen_weight_of_a_sealed_model_is_thawed_in_its_list) {
    static float gradient[8];
    xd_ctx *ctx = open_ctx();
    xd_model *model = NULL;
    xd_weight *weight = NULL;
    xd_optimizer *optimizer = NULL;
    xd_param param;
    int64_t count = 0;
    const xd_weight_desc d = { .name = "w",
                               .dtype = XD_DTYPE_F32,
                               .ndim = 1,
                               .shape = { 8 },
                               .init = { XD_INIT_NORMAL, 0, 1 },
                               .traits.frozen = true };
    CHECK_EQ_INT(xd_model_create(ctx, NULL, &model), XD_OK);
    CHECK_EQ_INT(xd_weight_add(xd_model_root(model), &d, &weight), XD_OK);
    CHECK(xd_model_seal(model) == XD_OK && xd_model_allocate(model) == XD_OK &&
          xd_model_init_weights(model) == XD_OK);
    CHECK_EQ_INT(xd_model_params(model, 1, &param, &count), XD_OK);
    CHECK(param.frozen && !param.gradient);
    xd_optimizer_desc adamw = xd_adamw_defaults(&param, 1);
    adamw.reserve_frozen = true;
    CHECK_EQ_INT(xd_optimizer_create(ctx, &adamw, &optimizer), XD_OK);
    const float before = *(float *)param.value;
    for (int i = 0; i < 8; i++) gradient[i] = 1.0f;
    param.gradient = gradient;
    CHECK_EQ_INT(xd_optimizer_step(optimizer, NULL, NULL), XD_OK);
    CHECK(*(float *)param.value == before);
    param.frozen = false;
    CHECK_EQ_INT(xd_optimizer_thaw(optimizer, 0), XD_OK);
    CHECK_EQ_INT(xd_optimizer_step(optimizer, NULL, NULL), XD_OK);
    CHECK_NEAR(*(float *)param.value, (double)before - 1e-3, 1e-6); /* a vector: no decay */
    xd_optimizer_destroy(optimizer);
    xd_model_destroy(model);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
