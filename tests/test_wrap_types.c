/* Types of what blocks show: the declared one by default, rounded to what is sent; another one where view_dtype asks. */
#include "xdistill.h"
#include "wrap_calls.h"

#include "wrap_weights.h"

/* A rank's model: a root and two layers, one weight of which stays in f32. */
typedef struct scene {
    xd_ctx *ctx;
    xd_model *model;
    xd_block *root, *first, *second;
    xd_parallel *parallel;
} scene;

static void open_scene(scene *s, xd_comm *world, xd_dtype sent, xd_dtype view) {
    static const char *const types[] = { "layer" };
    const xd_fsdp_desc d = {
        .unit_types = types, .unit_type_count = 1, .sent_dtype = sent, .view_dtype = view
    };
    xd_weight_desc norm = { .name = "norm", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 5 } };
    norm.init = (xd_init){ XD_INIT_NORMAL, 0.1f, 0.5f };
    norm.traits.keep_f32 = true;
    memset(s, 0, sizeof *s);
    s->ctx = xd_comm_ctx(world);
    CHECK(xd_model_create(s->ctx, NULL, &s->model) == XD_OK);
    s->root = xd_model_root(s->model);
    wrap_weight(s->root, "head", 3, 4);
    s->first = wrap_child(s->root, "first", "layer");
    s->second = wrap_child(s->root, "second", "layer");
    wrap_weight(s->first, "w", 10, 10);
    wrap_weight(s->second, "w", 10, 10);
    CHECK(xd_weight_add(s->second, &norm, NULL) == XD_OK && xd_model_seal(s->model) == XD_OK);
    CHECK(wrap_over_fsdp(s->model, world, &d, &s->parallel) == XD_OK);
}

static void close_scene(scene *s) {
    xd_parallel_destroy(s->parallel);
    xd_model_destroy(s->model);
}

static bool is_rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits & 0xffff) == 0;
}

/* A loop that reads floats, as the desc says, under sent_dtype. */
static xd_result show_floats(xd_comm *world, void *argument) {
    const xd_pass backward = { XD_PASS_BACKWARD, 0, false };
    xd_block_view view;
    scene s, plain;
    int64_t exact = 0;
    (void)argument;
    open_scene(&s, world, XD_DTYPE_BF16, XD_DTYPE_NONE);
    open_scene(&plain, world, XD_DTYPE_NONE, XD_DTYPE_NONE);
    xd_block_view expected;
    CHECK(xd_block_begin(s.second, backward, &view) == XD_OK && view.count == 2);
    CHECK(xd_block_begin(plain.second, backward, &expected) == XD_OK);
    CHECK_EQ_INT(view.value_dtypes[0], XD_DTYPE_F32);
    CHECK_EQ_INT(view.gradient_dtypes[0], XD_DTYPE_F32);
    for (int64_t i = 0; i < 100; i++) {
        const float value = ((const float *)view.values[0])[i],
                    whole = ((const float *)expected.values[0])[i];
        CHECK(value == xd_f32_from_bf16(xd_bf16_from_f32(whole)));
        exact += is_rounded(whole);
    }
    CHECK(exact < 50);
    CHECK(memcmp(view.values[1], expected.values[1], 5 * sizeof(float)) == 0); /* keep_f32: not rounded */
    CHECK(xd_block_end(s.second) == XD_OK && xd_block_end(plain.second) == XD_OK);
    CHECK(xd_block_begin(s.first, (xd_pass){ XD_PASS_FORWARD, 0, false }, &view) == XD_OK);
    CHECK(view.gradients[0] == NULL && view.gradient_dtypes[0] == XD_DTYPE_NONE);
    CHECK(xd_block_end(s.first) == XD_OK);
    close_scene(&plain);
    close_scene(&s);
    return XD_OK;
}

/* Where view_dtype asks for BF16 blocks show that, but for what stays in f32; and the declared type can be asked for. */
static xd_result show_halves(xd_comm *world, void *argument) {
    const xd_pass forward = { XD_PASS_FORWARD, 0, false };
    xd_block_view view;
    for (int sends = 0; sends < 2; sends++) {
        scene s;
        open_scene(&s, world, sends ? XD_DTYPE_BF16 : XD_DTYPE_NONE, XD_DTYPE_BF16);
        (void)argument;
        CHECK(xd_block_begin(s.second, forward, &view) == XD_OK);
        CHECK_EQ_INT(view.value_dtypes[0], XD_DTYPE_BF16);
        CHECK_EQ_INT(view.value_dtypes[1], XD_DTYPE_F32);
        CHECK(xd_block_end(s.second) == XD_OK);
        close_scene(&s);
    }
    return XD_OK;
}

/* A unit is there as it was sent and, where that is another type, as it is shown; on one rank nothing is sent. */
static xd_result count_bytes(xd_comm *world, void *argument) {
    static const xd_dtype types[][2] = { { XD_DTYPE_NONE, XD_DTYPE_NONE },
                                         { XD_DTYPE_BF16, XD_DTYPE_BF16 },
                                         { XD_DTYPE_BF16, XD_DTYPE_NONE } };
    const size_t wide = 128 * sizeof(float); /* of a buffer of the root, and of a layer */
    size_t gathered[3];
    (void)argument;
    for (int i = 0; i < 3; i++) {
        scene s;
        open_scene(&s, world, types[i][0], types[i][1]);
        gathered[i] = xd_parallel_memory(s.parallel).gathered;
        close_scene(&s);
    }
    if (xd_comm_size(world) == 1) {
        CHECK(gathered[0] == 0 && gathered[1] == 0);
        CHECK_EQ_INT(gathered[2], 3 * wide); /* every unit */
    } else {
        CHECK(gathered[1] > 0);
        CHECK_EQ_INT(gathered[2] - gathered[1], 2 * wide); /* the root, and one layer at a time */
    }
    return XD_OK;
}

static void run_ranks(int ranks, xd_rank_function function) {
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT, .timeout_seconds = 60 };
    xd_error error;
    const xd_result result = xd_run_threads(ranks, &desc, function, NULL, &error);
    if (result != XD_OK) printf("%s\n", error.message);
    CHECK(result == XD_OK);
}

XD_TEST(blocks_show_the_declared_type_rounded_to_what_is_sent) {
    for (int ranks = 1; ranks <= 3; ranks++) run_ranks(ranks, show_floats);
}

XD_TEST(blocks_show_another_type_where_view_dtype_asks_for_it) {
    for (int ranks = 1; ranks <= 2; ranks++) run_ranks(ranks, show_halves);
}

XD_TEST(a_unit_that_is_shown_wider_than_it_is_sent_takes_both) {
    for (int ranks = 1; ranks <= 2; ranks++) run_ranks(ranks, count_bytes);
}

XD_TEST_MAIN()
