/* Parts kept in another context (CPU offload): the bits of parts that are kept where the model is, and where everything lies. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "wrap_calls.h"

#include "checkpoint_files.h"
#include "wrap_train.h"

#include <stdlib.h>

static wrap_run *like(const wrap_run *run, wrap_kind kind, int ranks) {
    wrap_run *out = wrap_new(kind, ranks, run->leaves ? run->leaves : 8, XD_REDUCTION_INVARIANT);
    out->kept = run->kept;
    out->sent = run->sent;
    out->view = run->view;
    out->divide = run->divide;
    memcpy(out->thaws, run->thaws, sizeof out->thaws);
    return out;
}

/* An offloaded run against one rank that keeps its parts with the model. */
static void check_equal(const wrap_run *settings, wrap_kind kind, int ranks, int groups) {
    wrap_run *one = like(settings, WRAP_FSDP, 1), *run = like(settings, kind, ranks);
    run->offloaded = true;
    run->groups = groups;
    run->queues = settings->queues;
    run->prefetch = settings->prefetch;
    run->reshard = settings->reshard;
    run->nested = ranks % 2 == 0;
    run->together = ranks % 3 == 0;
    CHECK(wrap_execute(one) == XD_OK && wrap_execute(run) == XD_OK);
    CHECK(one->count > 300 && wrap_equal(one, run));
    free(run);
    free(one);
}

XD_TEST(offloaded_parts_train_to_the_bits_of_one_rank) {
    const wrap_run plain = { .leaves = 8 }, uneven = { .leaves = 13 };
    for (int ranks = 1; ranks <= 5; ranks++)
        for (int kind = WRAP_FSDP; kind <= WRAP_FSDP_WHOLE; kind++) {
            check_equal(&plain, (wrap_kind)kind, ranks, 0);
            check_equal(&uneven, (wrap_kind)kind, ranks, 0);
        }
}

XD_TEST(offloaded_groups_of_replicas_train_to_the_bits_of_one_rank) {
    const wrap_run dealt = { .leaves = 16 }, rows = { .leaves = 12 };
    check_equal(&dealt, WRAP_HSDP, 8, 2);
    check_equal(&dealt, WRAP_HSDP, 6, 2);
    check_equal(&rows, WRAP_HSDP, 3, 3);
}

XD_TEST(offloaded_parts_are_sent_and_shown_in_any_type) {
    const wrap_run narrow = { .sent = XD_DTYPE_BF16 }, wide = { .sent = XD_DTYPE_BF16, .view = XD_DTYPE_F32 },
                   half = { .kept = XD_DTYPE_BF16 },
                   divided = { .divide = { .average = true, .before = 2.0 } };
    for (int ranks = 1; ranks <= 4; ranks += ranks) {
        check_equal(&narrow, WRAP_FSDP, ranks, 0);
        check_equal(&wide, WRAP_FSDP, ranks, 0);
        check_equal(&half, WRAP_FSDP_WHOLE, ranks, 0);
        check_equal(&divided, WRAP_FSDP, ranks, 0);
    }
}

XD_TEST(queues_thaws_and_kept_units_go_with_offloaded_parts) {
    const wrap_run inline_ = { .queues = 1, .prefetch = 1 }, workers = { .queues = 2, .prefetch = 2 },
                   near = { .reshard = 2 }, all = { .reshard = 1 },
                   thaws = { .thaws = { { "layers.1.mlp.up", 1 }, { "embed", 2 } } };
    for (int kind = WRAP_FSDP; kind <= WRAP_FSDP_WHOLE; kind++) {
        check_equal(&inline_, (wrap_kind)kind, 2, 0);
        check_equal(&workers, (wrap_kind)kind, 4, 0);
        check_equal(&workers, (wrap_kind)kind, 3, 0);
        check_equal(&near, (wrap_kind)kind, 4, 0);
        check_equal(&all, (wrap_kind)kind, 2, 0);
        check_equal(&thaws, (wrap_kind)kind, 2, 0);
    }
}

/* ---- memory, files ---- */

static size_t device_bytes(const xd_parallel *parallel) {
    const xd_parallel_bytes b = xd_parallel_memory(parallel);
    return b.values + b.gradients + b.gathered + b.whole_gradients;
}

/* A model wrapped with its parts here or there, and their list. */
static int64_t wrap_one(wrap_rank *r, bool offloaded, xd_tensor_part *parts) {
    int64_t count = 0;
    r->run->offloaded = offloaded;
    r->model = wrap_model(r->ctx, XD_DTYPE_F32);
    CHECK(wrap_home(r) == XD_OK && wrap_groups(r) == XD_OK && wrap_create(r) == XD_OK);
    CHECK(xd_parallel_parts(r->parallel, WRAP_WEIGHTS, parts, &count) == XD_OK);
    return count;
}

static size_t part_bytes(const xd_tensor_part *part) {
    return (size_t)(part->range.end - part->range.begin) * xd_dtype_size(part->dtype);
}

static bool parts_equal(const xd_tensor_part *a, const xd_tensor_part *b, int64_t count) {
    bool equal = true;
    for (int64_t i = 0; i < count; i++)
        equal = equal && part_bytes(&a[i]) == part_bytes(&b[i]) &&
                (part_bytes(&a[i]) == 0 || memcmp(a[i].data, b[i].data, part_bytes(&a[i])) == 0);
    return equal;
}

static void save_and_load(const wrap_rank *away, const wrap_rank *here, const xd_tensor_part *from,
                          const xd_tensor_part *to, int64_t count) {
    const xd_checkpoint_network saved = { .parts = from, .part_count = count },
                                loaded = { .parts = to, .part_count = count };
    const xd_checkpoint_save_desc save = { .root = away->run->findings[0],
                                           .networks = &saved,
                                           .network_count = 1 };
    const xd_checkpoint_load_desc load = { .root = save.root, .networks = &loaded, .network_count = 1 };
    for (int64_t i = 0; i < count; i++)
        if (part_bytes(&to[i])) memset(to[i].data, 0x3f, part_bytes(&to[i]));
    CHECK(!parts_equal(from, to, count));
    CHECK(xd_checkpoint_save(away->over, &save) == XD_OK);
    CHECK(xd_checkpoint_load(here->over, &load, NULL, NULL) == XD_OK);
    CHECK(parts_equal(from, to, count));
}

static xd_result train_there_and_here(xd_comm *world, void *argument) {
    wrap_rank away = { .run = (wrap_run *)argument, .world = world, .ctx = xd_comm_ctx(world) }, here = away;
    wrap_run *run = wrap_new(WRAP_FSDP, 2, 4, XD_REDUCTION_INVARIANT);
    xd_tensor_part from[WRAP_WEIGHTS], to[WRAP_WEIGHTS];
    memcpy(run->findings[0], away.run->findings[0], sizeof run->findings[0]);
    away.run = here.run = run;
    const int64_t count = wrap_one(&away, true, from);
    CHECK_EQ_INT(wrap_one(&here, false, to), count);
    const xd_parallel_bytes a = xd_parallel_memory(away.parallel), h = xd_parallel_memory(here.parallel);
    CHECK(h.host == 0 && h.gradients > 0 && a.gradients == 0);
    CHECK(a.host >= h.gradients + (h.values - a.values));
    CHECK(device_bytes(away.parallel) < device_bytes(here.parallel));
    CHECK(parts_equal(from, to, count));
    save_and_load(&away, &here, from, to, count);
    wrap_close(&here);
    wrap_close(&away);
    free(run);
    return XD_OK;
}

XD_TEST(offloaded_parts_take_no_memory_of_the_models_context_and_are_saved_from_the_host) {
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    wrap_run *run = wrap_new(WRAP_FSDP, 2, 4, XD_REDUCTION_INVARIANT);
    snprintf(run->findings[0], sizeof run->findings[0], "%s", new_root());
    CHECK(xd_run_threads(2, &desc, train_there_and_here, run, NULL) == XD_OK);
    remove_all(run->findings[0]);
    free(run);
}

/* ---- refusals ---- */

static xd_result refuse(xd_comm *world, void *argument) {
    const xd_ctx_desc other = { .reduction = XD_REDUCTION_DETERMINISTIC };
    xd_ctx *ctx = xd_comm_ctx(world), *host = NULL;
    xd_comm *twin = world;
    xd_parallel *parallel = NULL;
    (void)argument;
    CHECK(xd_ctx_create(&other, &host) == XD_OK);
    CHECK_EQ_INT(xd_comm_fork(world, host, &twin), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "a group of reduction mode 2 is forked for a context of mode"));
    CHECK_EQ_INT(xd_comm_fork(world, NULL, &twin), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "2 ranks is forked for no context") && twin == world);
    xd_model *model = wrap_model(ctx, XD_DTYPE_F32);
    const xd_fsdp_desc d = { .host = host };
    CHECK_EQ_INT(wrap_over_fsdp(model, world, &d, &parallel), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "the context for them has reduction mode") && !parallel);
    const xd_fsdp_desc one = { .host = xd_comm_rank(world) == 0 ? ctx : NULL };
    CHECK_EQ_INT(wrap_over_fsdp(model, world, &one, &parallel), XD_ERROR_MISMATCH);
    xd_model_destroy(model);
    xd_ctx_destroy(host);
    return XD_OK;
}

XD_TEST(contexts_that_would_not_give_the_same_bits_are_refused_on_every_rank) {
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    CHECK(xd_run_threads(2, &desc, refuse, NULL, NULL) == XD_OK);
}

XD_TEST_MAIN()
