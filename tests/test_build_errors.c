/* Builds: hooks, what is refused on which ranks in which words, failing allocations, ranks that do not come. */
#include "xdistill.h"
#include "wrap_calls.h"

#include "build_scene.h"

#include <stdlib.h>

/* ---- hooks ---- */

typedef struct trace {
    char text[64];
} trace;

typedef struct tracer {
    trace *trace;
    const char *letter;
    xd_result result;
} tracer;

static xd_result note(void *user, xd_ctx *ctx, const xd_stages *in, xd_stages *out) {
    const tracer *t = (const tracer *)user;
    (void)ctx;
    CHECK(in->count >= 1 && out->count == 0);
    strcat(t->trace->text, t->letter);
    return t->result;
}

/* Behind all others, or before them. */
static void add_hook(xd_stage_hooks *list, xd_stage_hook hook, bool prepend) {
    for (int i = list->count; i > 0 && prepend; i--) list->hooks[i] = list->hooks[i - 1];
    list->hooks[prepend ? 0 : list->count] = hook;
    list->count++;
}

static void add_tracer(xd_stage_hooks *list, tracer *t, bool prepend) {
    add_hook(list, (xd_stage_hook){ note, t }, prepend);
}

static xd_result order_hooks(xd_comm *world, void *argument) {
    trace seen = { "" };
    tracer a = { &seen, "a", XD_OK }, b = { &seen, "b", XD_OK }, c = { &seen, "c", XD_OK },
           d = { &seen, "d", XD_OK };
    xd_stage_hooks override = { 0 };
    const xd_stage_hooks empty = { 0 };
    build_scene s;
    (void)argument;
    build_open(&s, world, NULL);
    add_tracer(&s.before, &a, false);
    add_tracer(&s.before, &b, false);
    add_tracer(&s.before, &c, true);
    add_tracer(&s.after, &d, false);
    CHECK(build_run(&s) == XD_OK);
    CHECK_EQ_STR(seen.text, "cabd");
    build_drop(&s);
    add_tracer(&override, &b, false);
    s.desc.before_override = &override; /* instead of all others */
    s.desc.after_override = &empty;     /* also when it is empty */
    seen.text[0] = 0;
    CHECK(build_run(&s) == XD_OK);
    CHECK_EQ_STR(seen.text, "b");
    build_drop(&s);
    s.desc.before = s.desc.after = s.desc.before_override = s.desc.after_override = NULL;
    seen.text[0] = 0;
    CHECK(build_run(&s) == XD_OK && xd_built_stage_count(s.built) == 1);
    CHECK_EQ_STR(seen.text, "");
    build_close(&s);
    return XD_OK;
}

XD_TEST(hooks_are_called_in_order_and_overridden_as_a_list) {
    build_ranks(2, order_hooks);
}

static xd_result misfit_hooks(xd_comm *world, void *argument) {
    trace seen = { "" };
    tracer t = { &seen, "t", XD_OK };
    build_scene s;
    (void)argument;
    build_open(&s, world, NULL);
    s.before.count = 1;
    CHECK(build_run(&s) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(s.ctx)->message, "hook 0 of 1 before the wrap has no function"));
    for (int i = 0; i < XD_STAGE_HOOKS_MAX; i++) s.before.hooks[i] = (xd_stage_hook){ note, &t };
    s.before.count = XD_STAGE_HOOKS_MAX + 1;
    CHECK(build_run(&s) == XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(s.ctx)->message, "17 hooks before the wrap, at most 16 are possible"));
    CHECK_EQ_STR(seen.text, "");
    build_close(&s);
    return XD_OK;
}

XD_TEST(lists_of_hooks_refuse_what_does_not_fit) {
    build_ranks(1, misfit_hooks);
}

/* Adds an adapter to the stage and freezes what was there. */
static xd_result adapt(void *user, xd_ctx *ctx, const xd_stages *in, xd_stages *out) {
    const xd_weight_desc d = { .name = "adapter", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 10 } };
    xd_model *model = in->stages[0].model;
    (void)user;
    (void)ctx;
    (void)out;
    XD_TRY(xd_weight_set_frozen(xd_model_find_weight(model, "embed"), true));
    return xd_weight_add(xd_model_root(model), &d, NULL);
}

static int wrapped_seen;

static xd_result see_wrappers(void *user, xd_ctx *ctx, const xd_stages *in, xd_stages *out) {
    (void)user;
    (void)ctx;
    (void)out;
    for (int i = 0; i < in->count; i++) wrapped_seen += in->stages[i].parallel != NULL;
    return XD_OK;
}

static xd_result adapt_stages(xd_comm *world, void *argument) {
    const xd_ddp_desc ddp = { .micro_batches = 0 };
    build_scene s;
    (void)argument;
    build_open(&s, world, NULL);
    add_hook(&s.before, (xd_stage_hook){ adapt, NULL }, false);
    add_hook(&s.after, (xd_stage_hook){ see_wrappers, NULL }, false);
    s.desc.wrap = (xd_wrap){ XD_WRAP_DDP, &ddp, NULL };
    wrapped_seen = 0;
    CHECK(build_run(&s) == XD_OK && wrapped_seen == 1);
    CHECK(build_info(&s, 0, "embed").desc->traits.frozen && build_info(&s, 0, "adapter").ready);
    CHECK_EQ_INT(xd_model_describe(xd_built_stage(s.built, 0).model).parameter_count, 42);
    CHECK_EQ_INT(xd_model_describe(xd_built_stage(s.built, 0).model).trained_count, 39);
    CHECK(strstr(s.line, ": 42")); /* the line comes after the hooks */
    CHECK(xd_weight_set_frozen(xd_model_find_weight(xd_built_stage(s.built, 0).model, "head"), true) ==
          XD_ERROR_STATE);
    CHECK(build_says(&s, "\"head\" is frozen after xd_model_seal"));
    build_close(&s);
    return XD_OK;
}

XD_TEST(hooks_before_the_wrap_add_and_freeze_those_after_it_see_wrappers) {
    build_ranks(1, adapt_stages);
}

XD_TEST(weights_with_a_gradient_of_the_callers_are_not_frozen_and_ties_follow) {
    static float memory[4];
    xd_ctx *ctx = NULL;
    xd_model *model = NULL;
    xd_weight *owner = NULL, *tie = NULL, *given = NULL;
    xd_weight_desc d = { .name = "a", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 4 } };
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK && xd_model_create(ctx, NULL, &model) == XD_OK);
    CHECK(xd_weight_add(xd_model_root(model), &d, &owner) == XD_OK);
    d.name = "b";
    d.tied_to = "a";
    CHECK(xd_weight_add(xd_model_root(model), &d, &tie) == XD_OK);
    d = (xd_weight_desc){ .name = "c", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 4 } };
    d.gradient = memory;
    d.room = 4;
    CHECK(xd_weight_add(xd_model_root(model), &d, &given) == XD_OK);
    CHECK(xd_weight_set_frozen(given, true) == XD_ERROR_STATE);
    CHECK(strstr(xd_last_error(ctx)->message, "\"c\" is frozen, but has a gradient"));
    CHECK(xd_weight_set_frozen(tie, true) == XD_OK && xd_model_seal(model) == XD_OK);
    CHECK(xd_weight_describe(owner).desc->traits.frozen && xd_weight_describe(tie).desc->traits.frozen);
    CHECK_EQ_INT(xd_model_describe(model).trained_count, 4);
    xd_model_destroy(model);
    xd_ctx_destroy(ctx);
}

/* Replaces the list: the first stage is left out, a new one comes last. */
static xd_result replace(void *user, xd_ctx *ctx, const xd_stages *in, xd_stages *out) {
    build_scene *s = (build_scene *)user;
    const xd_stage_place place = { 0, 1, 0, 1, false, true, 9, 1 };
    for (int i = 1; i < in->count; i++) out->stages[out->count++] = in->stages[i];
    out->stages[out->count].place = place;
    return build_describe(s, ctx, &place, &out->stages[out->count++].model);
}

static xd_result replace_stages(xd_comm *world, void *argument) {
    const xd_ddp_desc ddp = { .micro_batches = 0 };
    build_scene s;
    (void)argument;
    build_open(&s, world, &(xd_expert_desc){ .pp = 2 });
    s.desc.pipeline.virtual_stages = 2;
    s.desc.wrap = (xd_wrap){ XD_WRAP_DDP, &ddp, NULL };
    add_hook(&s.before, (xd_stage_hook){ replace, &s }, false);
    add_hook(&s.before, (xd_stage_hook){ replace, &s }, false);
    CHECK(build_run(&s) == XD_OK && xd_built_stage_count(s.built) == 2);
    CHECK(build_info(&s, 1, "layers.9.w").ready && xd_built_stage(s.built, 1).parallel);
    CHECK(xd_built_stage(s.built, 1).place.first_layer == 9);
    build_drop(&s);
    /* After the wrap the wrapper goes with its stage. */
    s.before.count = 0;
    add_hook(&s.after, (xd_stage_hook){ replace, &s }, false);
    CHECK(build_run(&s) == XD_OK && xd_built_stage_count(s.built) == 2);
    CHECK(xd_built_stage(s.built, 0).parallel && !xd_built_stage(s.built, 1).parallel);
    build_close(&s);
    return XD_OK;
}

XD_TEST(hooks_may_leave_out_stages_and_add_others) {
    build_ranks(2, replace_stages);
}

/* Of stages that exist, those that a hook has added are freed after a failure, the caller's are not. */
static xd_result existing_and_added(xd_comm *world, void *argument) {
    trace seen = { "" };
    tracer bad = { &seen, "x", XD_ERROR_DATA };
    build_scene s;
    xd_stages *stages = (xd_stages *)calloc(1, sizeof *stages);
    const xd_stage_place place = { 0, 1, 0, 1, true, true, 0, 1 };
    (void)argument;
    build_open(&s, world, NULL);
    for (stages->count = 0; stages->count < 2; stages->count++) {
        stages->stages[stages->count].place = place;
        CHECK(build_describe(&s, s.ctx, &place, &stages->stages[stages->count].model) == XD_OK);
    }
    add_hook(&s.after, (xd_stage_hook){ replace, &s }, false);
    add_tracer(&s.after, &bad, false);
    s.desc.provider.describe = NULL;
    s.desc.before = NULL;
    CHECK(build_existing(world, &s.desc, stages, &s.built) == XD_ERROR_DATA && !s.built);
    CHECK_EQ_INT(xd_model_describe(stages->stages[1].model).weight_count,
                 4); /* sealed; the first one is gone */
    xd_model_destroy(stages->stages[1].model);
    build_close(&s);
    free(stages);
    return XD_OK;
}

XD_TEST(what_hooks_added_to_stages_that_exist_is_freed_after_a_failure) {
    build_ranks(2, existing_and_added);
}

/* Rank 1 has its stages already: it has fewer settings than rank 0, and both name the first that differs. */
static xd_result existing_on_one(xd_comm *world, void *argument) {
    const xd_stage_place place = { 0, 1, 0, 1, true, true, 0, 1 };
    build_scene s;
    xd_stages *stages = (xd_stages *)calloc(1, sizeof *stages);
    (void)argument;
    build_open(&s, world, NULL);
    stages->count = 1;
    stages->stages[0].place = place;
    if (s.rank == 0) {
        CHECK(build_run(&s) == XD_ERROR_MISMATCH && !s.built);
    } else {
        CHECK(build_describe(&s, s.ctx, &place, &stages->stages[0].model) == XD_OK);
        s.desc.provider.describe = NULL;
        s.desc.before = NULL;
        CHECK(build_existing(world, &s.desc, stages, &s.built) == XD_ERROR_MISMATCH && !s.built);
        xd_model_destroy(stages->stages[0].model);
    }
    CHECK(strstr(xd_last_error(s.ctx)->message,
                 "settings of a build: rank 1 passed existing models = 1, rank 0 passed 0") != NULL);
    build_close(&s);
    free(stages);
    return XD_OK;
}

XD_TEST(lists_of_settings_of_different_lengths_differ_by_name_too) {
    build_ranks(2, existing_on_one);
}

/* ---- providers and hooks that fail ---- */

enum {
    FINE,
    FAIL_WITH_MESSAGE,
    FAIL_SILENTLY,
    FAIL_ODDLY,
    NO_MODEL,
    SAME_MODEL,
    FOREIGN_MODEL,
    WRAPPED_MODEL
};

typedef struct bad_provider {
    build_scene *s;
    int kind, rank; /* of the rank that does it; -1 -> all */
    xd_model *other;
} bad_provider;

static xd_result describe_badly(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    bad_provider *b = (bad_provider *)user;
    const bool mine = b->rank < 0 || b->rank == b->s->rank;
    if (mine && place->virtual_stage == 1 && b->kind == FAIL_WITH_MESSAGE)
        return XD_FAIL(ctx, XD_ERROR_IO, "no file for layer %lld", (long long)place->first_layer);
    if (mine && place->virtual_stage == 1 && b->kind == FAIL_SILENTLY) return XD_ERROR_CORRUPT;
    if (mine && place->virtual_stage == 1 && b->kind == FAIL_ODDLY) return (xd_result)-7;
    if (mine && place->virtual_stage == 1 && b->kind == NO_MODEL) return XD_OK;
    if (mine && place->virtual_stage == 1 && b->kind >= SAME_MODEL) {
        *out = b->other;
        return XD_OK;
    }
    XD_TRY(build_describe(b->s, ctx, place, out));
    if (b->kind == SAME_MODEL) b->other = *out;
    return XD_OK;
}

static void check_provider(build_scene *s, bad_provider *b, int kind, xd_result result, const char *text) {
    for (b->rank = -1; b->rank < 4; b->rank += 2) {
        b->kind = kind;
        s->desc.provider = (xd_stage_provider){ describe_badly, b };
        build_fails(s, result, b->rank < 0, text);
        CHECK(b->rank < 0 || b->rank == s->rank || xd_last_error(s->ctx)->culprit == b->rank);
    }
}

static xd_result bad_providers(xd_comm *world, void *argument) {
    build_scene s;
    xd_ctx *ctx = NULL;
    xd_comm *alone = NULL;
    xd_parallel *parallel = NULL;
    (void)argument;
    build_open(&s, world, &(xd_expert_desc){ .pp = 2 });
    s.desc.pipeline.virtual_stages = 2;
    bad_provider b = { &s, FINE, -1, NULL };
    check_provider(&s, &b, FAIL_WITH_MESSAGE, XD_ERROR_IO, "no file for layer");
    check_provider(&s, &b, FAIL_SILENTLY, XD_ERROR_CORRUPT, "virtual stage 1 returned 12 (ERROR_CORRUPT)");
    check_provider(&s, &b, FAIL_ODDLY, XD_ERROR_ARGUMENT, "virtual stage 1 returned -7 (ERROR_UNKNOWN)");
    check_provider(&s, &b, NO_MODEL, XD_ERROR_ARGUMENT, "provider's stages: stage 1 of 2 is no model");
    check_provider(&s, &b, SAME_MODEL, XD_ERROR_ARGUMENT, "stages 0 and 1 of 2 are the same model");
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK && xd_model_create(ctx, NULL, &b.other) == XD_OK);
    check_provider(&s, &b, FOREIGN_MODEL, XD_ERROR_ARGUMENT, "stage 1 of 2 is another context's");
    xd_model_destroy(b.other);
    xd_ctx_destroy(ctx);
    CHECK(xd_comm_self(s.ctx, &alone) == XD_OK && xd_model_create(s.ctx, NULL, &b.other) == XD_OK);
    CHECK(xd_model_seal(b.other) == XD_OK && wrap_over_ddp(b.other, alone, NULL, &parallel) == XD_OK);
    check_provider(&s, &b, WRAPPED_MODEL, XD_ERROR_ARGUMENT, "wrapped by what is not the stage's wrapper");
    xd_parallel_destroy(parallel);
    xd_model_destroy(b.other);
    xd_comm_destroy(alone);
    b.kind = FINE;
    CHECK(build_run(&s) == XD_OK); /* the ranks are still together */
    build_close(&s);
    return XD_OK;
}

XD_TEST(a_provider_that_fails_or_returns_no_stage_of_its_own_ends_the_build_on_all_ranks) {
    build_ranks(4, bad_providers);
}

typedef struct bad_hook {
    build_scene *s;
    int kind, rank;
} bad_hook;

enum { HOOK_FAILS, HOOK_NO_MODEL, HOOK_TWICE, HOOK_TOO_MANY, HOOK_NEGATIVE, HOOK_STAYS };

static xd_result change_badly(void *user, xd_ctx *ctx, const xd_stages *in, xd_stages *out) {
    const bad_hook *b = (const bad_hook *)user;
    if (b->s->rank != b->rank || b->kind == HOOK_STAYS)
        return b->s->rank == 0 ? replace(b->s, ctx, in, out) : XD_OK; /* what it adds is freed all the same */
    if (b->kind == HOOK_FAILS) return XD_FAIL(ctx, XD_ERROR_FORMAT, "a hook on rank %d", b->s->rank);
    *out = *in;
    if (b->kind == HOOK_NO_MODEL) out->stages[out->count++].model = NULL;
    if (b->kind == HOOK_TWICE) out->stages[out->count++] = in->stages[0];
    if (b->kind == HOOK_TOO_MANY) out->count = XD_STAGES_MAX + 1;
    if (b->kind == HOOK_NEGATIVE) out->count = -1;
    return XD_OK;
}

static xd_result bad_hooks(xd_comm *world, void *argument) {
    static const char *const texts[] = { "a hook on rank 2", "a hook's list: stage 1 of 2 is no model",
                                         "stages 0 and 1 of 2 are the same model",
                                         "129 stages, from 1 to 128", "-1 stages, from 1 to 128" };
    build_scene s;
    (void)argument;
    build_open(&s, world, NULL);
    bad_hook b = { &s, 0, 2 };
    for (int after = 0; after < 2; after++) {
        s.before.count = s.after.count = 0;
        add_hook(after ? &s.after : &s.before, (xd_stage_hook){ change_badly, &b }, false);
        for (b.kind = HOOK_FAILS; b.kind <= HOOK_NEGATIVE; b.kind++) {
            build_fails(&s, b.kind == HOOK_FAILS ? XD_ERROR_FORMAT : XD_ERROR_ARGUMENT, false, texts[b.kind]);
            CHECK(s.rank == 2 || xd_last_error(s.ctx)->culprit == 2);
        }
    }
    /* A hook that changes one rank's stages alone. */
    s.after.count = 0;
    add_hook(&s.before, (xd_stage_hook){ change_badly, &b }, false);
    b.kind = HOOK_STAYS;
    build_fails(&s, XD_ERROR_MISMATCH, true, "models differ first at weight 0");
    build_close(&s);
    return XD_OK;
}

XD_TEST(a_hook_that_fails_or_returns_no_list_of_stages_ends_the_build_on_all_ranks) {
    build_ranks(3, bad_hooks);
}

/* Rank 1 has one stage more than the others of its data group. */
static xd_result add_stage(void *user, xd_ctx *ctx, const xd_stages *in, xd_stages *out) {
    build_scene *s = (build_scene *)user;
    const xd_stage_place place = { 0, 1, 0, 1, false, true, 9, 1 };
    if (s->rank != 1) return XD_OK;
    *out = *in;
    out->stages[out->count].place = place;
    return build_describe(s, ctx, &place, &out->stages[out->count++].model);
}

static xd_result count_stages(xd_comm *world, void *argument) {
    build_scene s;
    (void)argument;
    build_open(&s, world, NULL);
    add_hook(&s.before, (xd_stage_hook){ add_stage, &s }, false);
    build_fails(&s, XD_ERROR_MISMATCH, true, "from 1 to 2 stages");
    build_close(&s);
    return XD_OK;
}

XD_TEST(data_ranks_with_other_numbers_of_stages_are_told_both) {
    build_ranks(3, count_stages);
}

/* A callback of step 6. */
static xd_result init_badly(void *user, xd_model *model, xd_block *block) {
    const build_scene *s = (const build_scene *)user;
    (void)model;
    return s->rank == 1 && strcmp(xd_block_describe(block).name, "layers.1") == 0 ? XD_ERROR_DATA : XD_OK;
}

static xd_result bad_init(xd_comm *world, void *argument) {
    build_scene s;
    (void)argument;
    build_open(&s, world, NULL);
    s.desc.init = (xd_block_init){ init_badly, &s };
    build_fails(&s, XD_ERROR_DATA, false, "init of block 2 returned 9 (ERROR_DATA)");
    build_close(&s);
    return XD_OK;
}

XD_TEST(a_callback_of_first_values_that_fails_ends_the_build_on_all_ranks) {
    build_ranks(2, bad_init);
}

/* ---- settings ---- */

typedef struct bad_setting {
    void (*spoil)(xd_build_desc *d);
    xd_result result;
    const char *text;
} bad_setting;

static const xd_ddp_desc plain_ddp;
static const xd_fsdp_desc plain_fsdp;
static xd_stage_hooks long_list = { XD_STAGE_HOOKS_MAX + 1, { { 0 } } }, hollow_list = { 1, { { 0 } } };

static void spoil_provider(xd_build_desc *d) {
    d->provider.describe = NULL;
}
static void spoil_layers(xd_build_desc *d) {
    d->pipeline.layer_count = -1;
}
static void spoil_stages(xd_build_desc *d) {
    d->pipeline.virtual_stages = XD_STAGES_MAX + 1;
}
static void spoil_pipeline(xd_build_desc *d) {
    d->pipeline.ranks = 2;
}
static void spoil_halves(xd_build_desc *d) {
    d->precision.f16 = d->precision.bf16 = true;
}
static void spoil_keep(xd_build_desc *d) {
    d->precision.keep_count = -2;
}
static void spoil_keep_list(xd_build_desc *d) {
    d->precision.keep_count = 2;
}
static void spoil_keep_count(xd_build_desc *d) {
    static const char *const patterns[] = { "a" };
    d->precision.keep = patterns;
}
static void spoil_pattern(xd_build_desc *d) {
    static const char *const patterns[] = { "a", NULL };
    d->precision.keep = patterns;
    d->precision.keep_count = 2;
}
static void spoil_storage(xd_build_desc *d) {
    d->storage = (xd_build_storage)3;
}
static void spoil_kind(xd_build_desc *d) {
    d->wrap.kind = (xd_wrap_kind)-1;
}
static void spoil_ddp(xd_build_desc *d) {
    d->wrap.kind = XD_WRAP_DDP;
}
static void spoil_fsdp(xd_build_desc *d) {
    d->wrap.kind = XD_WRAP_FSDP;
}
static void spoil_both(xd_build_desc *d) {
    d->wrap = (xd_wrap){ XD_WRAP_DDP, &plain_ddp, &plain_fsdp };
}
static void spoil_other(xd_build_desc *d) {
    d->wrap = (xd_wrap){ XD_WRAP_DDP, NULL, &plain_fsdp };
}
static void spoil_none(xd_build_desc *d) {
    d->wrap.fsdp = &plain_fsdp;
}
static void spoil_before(xd_build_desc *d) {
    d->before = &long_list;
}
static void spoil_after(xd_build_desc *d) {
    d->after_override = &hollow_list;
}
static void spoil_leaves(xd_build_desc *d) {
    static const xd_ddp_desc few = { .micro_batches = 1 };
    d->wrap = (xd_wrap){ XD_WRAP_DDP, &few, NULL };
}

static const bad_setting settings[] = {
    { spoil_provider, XD_ERROR_ARGUMENT, "4 layers without a provider" },
    { spoil_layers, XD_ERROR_ARGUMENT, "-1 layers" },
    { spoil_stages, XD_ERROR_ARGUMENT, "129 virtual stages, at most 128" },
    { spoil_pipeline, XD_ERROR_TOPOLOGY, "a pipeline of 2 ranks, but group pp of 1" },
    { spoil_halves, XD_ERROR_ARGUMENT, "both f16 and bf16" },
    { spoil_keep, XD_ERROR_ARGUMENT, "-2 patterns" },
    { spoil_keep_list, XD_ERROR_ARGUMENT, "2 patterns of names to keep, but no list" },
    { spoil_keep_count, XD_ERROR_ARGUMENT, "a list of names to keep, and keep_count 0" },
    { spoil_pattern, XD_ERROR_ARGUMENT, "pattern 1 of 2 to keep is NULL" },
    { spoil_storage, XD_ERROR_ARGUMENT, "storage 3 is unknown" },
    { spoil_kind, XD_ERROR_ARGUMENT, "wrap -1 is unknown" },
    { spoil_ddp, XD_ERROR_ARGUMENT, "wrap is DDP, without settings of DDP" },
    { spoil_fsdp, XD_ERROR_ARGUMENT, "wrap is FSDP, without settings of FSDP" },
    { spoil_both, XD_ERROR_ARGUMENT, "settings of DDP and of FSDP" },
    { spoil_other, XD_ERROR_ARGUMENT, "wrap is DDP, without settings of DDP" },
    { spoil_none, XD_ERROR_ARGUMENT, "settings of FSDP, but wrap is NONE" },
    { spoil_before, XD_ERROR_ARGUMENT, "17 hooks before the wrap, at most 16" },
    { spoil_after, XD_ERROR_ARGUMENT, "hook 0 of 1 after the wrap has no function" },
    { spoil_leaves, XD_ERROR_ARGUMENT, "1 micro-batches for 3 data ranks" },
};

static xd_result bad_settings(xd_comm *world, void *argument) {
    build_scene s;
    (void)argument;
    build_open(&s, world, NULL);
    const xd_build_desc good = s.desc;
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        settings[i].spoil(&s.desc);
        build_fails(&s, settings[i].result, true, settings[i].text);
        s.desc = good;
    }
    /* One rank alone. */
    if (s.rank == 1) spoil_halves(&s.desc);
    build_fails(&s, XD_ERROR_ARGUMENT, false, "both f16 and bf16");
    s.desc = good;
    if (s.rank == 1) s.desc.precision.f16 = true;
    build_fails(&s, XD_ERROR_MISMATCH, true,
                "settings of a build: rank 1 passed precision.f16 = 1, rank 0 passed 0");
    s.desc = good;
    if (s.rank == 2) s.desc.before = NULL; /* both lists are empty */
    CHECK(build_run(&s) == XD_OK);
    build_close(&s);
    return XD_OK;
}

XD_TEST(settings_that_do_not_fit_are_refused_on_all_ranks) {
    build_ranks(3, bad_settings);
}

static xd_result bad_groups(xd_comm *world, void *argument) {
    build_scene s;
    (void)argument;
    build_open(&s, world, &(xd_expert_desc){ .cp = 2, .pp = 1 });
    xd_groups g = *s.desc.groups;
    const xd_fsdp_desc fsdp = { .replicas = g.cp };
    s.desc.groups = &g;
    g.dp_cp = g.dp;
    build_fails(&s, XD_ERROR_TOPOLOGY, true, "groups dp of 2 and cp of 2 ranks, but dp_cp of 2");
    g.dp_cp = NULL;
    build_fails(&s, XD_ERROR_TOPOLOGY, true, "group cp has 2 ranks, and there is no dp_cp");
    g = *xd_grid_groups(s.grid);
    g.intra_dp_cp = NULL;
    s.desc.wrap = (xd_wrap){ XD_WRAP_FSDP, NULL, &fsdp };
    build_fails(&s, XD_ERROR_ARGUMENT, true,
                "FSDP with replicas of 2 groups shards over intra_dp_cp, which is NULL");
    const xd_ddp_desc ddp = { .replicas = g.cp };
    s.desc.wrap = (xd_wrap){ XD_WRAP_DDP, &ddp, NULL };
    build_fails(&s, XD_ERROR_ARGUMENT, true,
                "DDP with replicas of 2 groups shards over intra_dp_cp, which is NULL");
    build_close(&s);
    return XD_OK;
}

XD_TEST(groups_that_contradict_each_other_are_refused) {
    build_ranks(4, bad_groups);
}

/* ---- models ---- */

static xd_result other_models(xd_comm *world, void *argument) {
    build_scene s;
    (void)argument;
    build_open(&s, world, &(xd_expert_desc){ .tp = 2 });
    if (s.rank == 2) s.layer_rows = 3; /* data group 0, 2 */
    build_fails(&s, XD_ERROR_MISMATCH, s.rank % 2 == 0, "\"layers.0.w\" on rank 2 with another shape");
    if (s.rank % 2 == 0) CHECK(strstr(xd_last_error(s.ctx)->message, "] against F32 ["));
    s.layer_rows = s.rank % 2 ? 3 : 0; /* tensor-parallel groups */
    build_fails(&s, XD_ERROR_MISMATCH, true, "models differ first at weight");
    s.layer_rows = 0;
    s.seed = (uint64_t)s.rank / 2;
    build_fails(&s, XD_ERROR_MISMATCH, true, "another seed");
    s.seed = 1;
    if (s.rank == 3) s.tables = true;
    build_fails(&s, XD_ERROR_MISMATCH, s.rank % 2 == 1, "the models differ first");
    s.tables = false;
    CHECK(build_run(&s) == XD_OK);
    build_close(&s);
    return XD_OK;
}

XD_TEST(ranks_that_describe_other_models_are_told_the_first_difference) {
    build_ranks(4, other_models);
}

/* Ranks of a group with the same experts that have others, and a stage in which one rank has none. */
static xd_result other_experts(xd_comm *world, void *argument) {
    build_scene s;
    (void)argument;
    build_open(&s, world, &(xd_expert_desc){ .ep = 2 });
    s.desc.wrap = (xd_wrap){ XD_WRAP_DDP, &plain_ddp, NULL };
    s.expert = s.rank != 3;
    build_fails(&s, XD_ERROR_MISMATCH, false, "the models differ first");
    xd_groups groups = *s.desc.groups;
    s.expert = true;
    groups.expert_dp = groups.dp; /* all have the same, this says */
    s.desc.groups = &groups;
    build_fails(&s, XD_ERROR_MISMATCH, true,
                "the models differ first at weight 4: \"layers.0.experts.0\" on rank 0");
    build_close(&s);
    return XD_OK;
}

XD_TEST(experts_that_are_not_those_of_their_group_are_told) {
    build_ranks(4, other_experts);
}

/* The caller's storage cannot change its type. */
static xd_result describe_given(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    static float memory[4];
    const xd_weight_desc d = {
        .name = "given", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 4 }, .value = memory, .room = 4
    };
    (void)user;
    (void)place;
    XD_TRY(xd_model_create(ctx, NULL, out));
    return xd_weight_add(xd_model_root(*out), &d, NULL);
}

static xd_result given_storage(xd_comm *world, void *argument) {
    build_scene s;
    (void)argument;
    build_open(&s, world, NULL);
    s.desc.provider.describe = describe_given;
    s.desc.precision.f16 = true;
    build_fails(&s, XD_ERROR_STATE, true,
                "\"given\" has the caller's storage of F32, which cannot become F16");
    build_close(&s);
    return XD_OK;
}

XD_TEST(storage_of_the_caller_does_not_change_its_type) {
    build_ranks(1, given_storage);
}

/* Rank 0 says of a buffer that it holds values, the others do not. */
static xd_result ready_on_one(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    const build_scene *s = (const build_scene *)user;
    XD_TRY(build_describe(user, ctx, place, out));
    XD_TRY(xd_model_seal(*out));
    XD_TRY(xd_model_allocate(*out));
    return s->rank == 0 ? xd_weight_set_ready(xd_model_find_weight(*out, "layers.0.angles")) : XD_OK;
}

static xd_result uneven_values(xd_comm *world, void *argument) {
    build_scene s;
    (void)argument;
    build_open(&s, world, NULL);
    s.desc.provider.describe = ready_on_one;
    s.desc.storage = XD_STORAGE_CALLER;
    s.desc.values.broadcast = true;
    build_fails(&s, XD_ERROR_MISMATCH, true,
                "the list of weights that hold values: rank 1 passed number of entries = 0, rank 0 passed 1");
    build_close(&s);
    return XD_OK;
}

XD_TEST(values_that_one_rank_alone_holds_are_not_broadcast) {
    build_ranks(2, uneven_values);
}

/* ---- memory, and ranks that leave ---- */

static __thread int64_t fails_in; /* allocations of this thread until one fails; 0 -> never */
static int64_t live;

static void *count_allocate(void *user, size_t bytes) {
    (void)user;
    if (fails_in > 0 && --fails_in == 0) return NULL;
    __atomic_add_fetch(&live, 1, __ATOMIC_RELAXED);
    return malloc(bytes);
}

static void count_release(void *user, void *memory) {
    (void)user;
    __atomic_sub_fetch(&live, 1, __ATOMIC_RELAXED);
    free(memory);
}

/* Without CHECKs: their failure is the point. */
static xd_result describe_plainly(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    const xd_weight_desc d = {
        .name = "w", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 4 }, .traits = { .frozen = true }
    };
    xd_model *model = NULL;
    (void)user;
    (void)place;
    XD_TRY(xd_model_create(ctx, NULL, &model));
    xd_result result = xd_weight_add(xd_model_root(model), &d, NULL);
    if (result == XD_OK) result = xd_model_seal(model);
    if (result == XD_OK) result = xd_model_allocate(model);
    if (result == XD_OK) result = xd_weight_set_ready(xd_model_weight_at(model, 0));
    if (result == XD_OK)
        *out = model;
    else
        xd_model_destroy(model);
    return result;
}

static xd_result build_without_memory(xd_comm *world, bool existing, int victim, int64_t n) {
    const xd_expert_desc sizes = { .pp = 2, .optimizer_instances = 1 };
    const int rank = xd_comm_rank(world);
    xd_grid *grid = NULL;
    xd_built *built = NULL;
    xd_stages *stages = (xd_stages *)calloc(1, sizeof *stages);
    xd_build_desc d = { .provider = { describe_plainly, NULL }, .precision = { .bf16 = true } };
    d.values.check = true;
    d.wrap = (xd_wrap){ XD_WRAP_DDP, &plain_ddp, NULL };
    d.pipeline.virtual_stages = 2;
    stages->count = 1;
    if (existing) {
        CHECK(describe_plainly(NULL, xd_comm_ctx(world), NULL, &stages->stages[0].model) == XD_OK);
        d.provider.describe = NULL;
    }
    fails_in = rank == victim ? n : 0;
    xd_result result = xd_grid_create(world, &sizes, &grid);
    if (result == XD_OK) {
        d.groups = xd_grid_groups(grid);
        result = existing ? build_existing(world, &d, stages, &built) : xd_build(world, &d, &built);
    }
    fails_in = fails_in > 0 ? 0 : -1; /* -1: something failed */
    CHECK((built != NULL) == (result == XD_OK));
    if (existing && result != XD_OK) xd_model_destroy(stages->stages[0].model);
    xd_built_destroy(built);
    xd_grid_destroy(grid);
    free(stages);
    return result;
}

static xd_result starve(xd_comm *world, void *argument) {
    const bool existing = *(const bool *)argument;
    int64_t failed = 0;
    for (int victim = 0; victim < 4; victim += 3)
        for (int64_t n = 1;; n++) {
            const xd_result result = build_without_memory(world, existing, victim, n);
            fails_in = 0;
            if (result == XD_OK) break;
            /* A group that is split off has no room on any of its ranks. */
            CHECK(result == XD_ERROR_MEMORY || (result == XD_ERROR_PEER && xd_comm_rank(world) != victim));
            failed++;
        }
    CHECK(failed > 50);
    return XD_OK;
}

XD_TEST(each_allocation_of_a_build_may_fail_on_one_rank) {
    const xd_ctx_desc desc = { .allocator = { count_allocate, count_release, NULL }, .timeout_seconds = 60 };
    for (int i = 0; i < 2; i++) {
        bool existing = i == 1;
        xd_error error;
        CHECK(xd_run_threads(4, &desc, starve, &existing, &error) == XD_OK);
        CHECK_EQ_INT(live, 0);
    }
}

/* A rank leaves inside its provider: the others are told, and free what they have. */
static xd_result leave_describing(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    build_scene *s = (build_scene *)user;
    if (s->rank == 1) xd_comm_abort(s->world);
    return build_describe(user, ctx, place, out);
}

static xd_result leave(xd_comm *world, void *argument) {
    build_scene s;
    (void)argument;
    build_open(&s, world, NULL);
    s.desc.provider.describe = leave_describing;
    CHECK(build_run(&s) == XD_ERROR_PEER && !s.built);
    CHECK(s.rank == 1 || xd_last_error(s.ctx)->culprit == 1);
    build_close(&s);
    return XD_OK;
}

XD_TEST(a_rank_that_leaves_in_the_first_step_ends_it_on_the_others) {
    const xd_ctx_desc desc = { .allocator = { count_allocate, count_release, NULL }, .timeout_seconds = 60 };
    xd_error error;
    (void)xd_run_threads(3, &desc, leave, NULL, &error);
    CHECK_EQ_INT(live, 0);
}

XD_TEST_MAIN()
