/* Calls that no other test makes on a world of one rank, made as they should be: tests/build/nulls.py asks them with each of their
 * pointers NULL in turn. */
#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp */
#endif

#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_private.h"
#include "planned.h"
#include "xd_test.h"
#include "xd_test_topology.h"
#include "checkpoint_files.h"
#include "averages.h"
#include "weights_calls.h"

/* A context and its world of one rank. */
typedef struct alone {
    xd_ctx *ctx;
    xd_comm *world;
} alone;

static alone alone_open(void) {
    alone a = { NULL, NULL };
    CHECK(xd_ctx_create(NULL, &a.ctx) == XD_OK);
    CHECK(xd_comm_self(a.ctx, &a.world) == XD_OK);
    return a;
}

static void alone_close(alone *a) {
    xd_comm_destroy(a->world);
    xd_ctx_destroy(a->ctx);
}

/* ---- collectives ---- */

static xd_result pair_rank(xd_comm *world, void *argument) {
    const int rank = xd_comm_rank(world);
    (void)argument;
    for (int i = 0; i < 3; i++) {
        double number = rank == 0 ? 1.5 + i : 0.0;
        XD_TRY(rank == 0 ? xd_send(world, &number, 1, XD_DTYPE_F64, 1)
                         : xd_recv(world, &number, 1, XD_DTYPE_F64, 0));
        CHECK(number == 1.5 + i);
    }
    return XD_OK;
}

/* Both send first, then both receive first. */
static xd_result exchange_rank(xd_comm *world, void *argument) {
    const int rank = xd_comm_rank(world), other = 1 - rank;
    (void)argument;
    for (int i = 0; i < 4; i++) {
        const double mine = rank + 10.0;
        double theirs = 0.0;
        const xd_collective send = {
            .kind = XD_COLLECTIVE_SEND, .count = 1, .dtype = XD_DTYPE_F64, .send = &mine, .root = other
        };
        const xd_collective recv = {
            .kind = XD_COLLECTIVE_RECV, .count = 1, .dtype = XD_DTYPE_F64, .recv = &theirs, .root = other
        };
        const xd_collective records[2] = { i < 2 ? send : recv, i < 2 ? recv : send };
        XD_TRY(xd_exchange(world, records, 2));
        CHECK(theirs == other + 10.0);
    }
    return XD_OK;
}

XD_TEST(two_ranks_send_and_receive) {
    CHECK_EQ_INT(xd_run_threads(2, NULL, pair_rank, NULL, NULL), XD_OK);
    CHECK_EQ_INT(xd_run_threads(2, NULL, exchange_rank, NULL, NULL), XD_OK);
}

XD_TEST(records_on_one_rank) {
    static const xd_collective_kind kinds[] = { XD_COLLECTIVE_ALL_REDUCE, XD_COLLECTIVE_REDUCE_SCATTER,
                                                XD_COLLECTIVE_ALL_GATHER };
    const int64_t counts[1] = { 2 };
    alone a = alone_open();
    for (int i = 0; i < 3; i++) {
        const double mine[2] = { 3.0, 4.0 };
        double ours[2] = { 0.0, 0.0 };
        xd_collective record = { .kind = kinds[i], .send = mine, .recv = ours, .dtype = XD_DTYPE_F64 };
        record.op = i < 2 ? XD_SUM : (xd_reduce_op)0;
        if (i == 0) record.count = 2;
        if (i == 1) record.send_counts = counts;
        if (i == 2) record.recv_counts = counts;
        CHECK_EQ_INT(xd_collective_run(a.world, &record), XD_OK);
        CHECK(ours[0] == 3.0 && ours[1] == 4.0);
    }
    alone_close(&a);
}

XD_TEST(a_queue_that_is_waited_for) {
    alone a = alone_open();
    xd_queue *queue = NULL;
    double mine = 2.0, ours = 0.0;
    const xd_collective record = { .kind = XD_COLLECTIVE_ALL_REDUCE,
                                   .count = 1,
                                   .dtype = XD_DTYPE_F64,
                                   .send = &mine,
                                   .recv = &ours,
                                   .op = XD_SUM };
    CHECK(xd_queue_create(a.world, NULL, &queue) == XD_OK);
    CHECK(xd_queue_start(queue, &record, NULL) == XD_OK);
    CHECK(xd_queue_wait_all(queue) == XD_OK);
    CHECK(ours == 2.0);
    xd_ticket ticket;
    ours = 0.0;
    CHECK(xd_queue_start(queue, &record, &ticket) == XD_OK);
    CHECK(xd_queue_wait(queue, ticket) == XD_OK);
    CHECK(ours == 2.0);
    xd_queue_destroy(queue);
    alone_close(&a);
}

XD_TEST(sums_and_agreement_on_one_rank) {
    alone a = alone_open();
    const int64_t counts[1] = { 2 };
    const double mine[2] = { 3.0, 4.0 };
    double ours[2] = { 0.0, 0.0 };
    CHECK(xd_reduce_scatter(a.world, mine, ours, counts, XD_DTYPE_F64, XD_SUM) == XD_OK);
    CHECK(ours[0] == 3.0 && ours[1] == 4.0);
    CHECK(xd_agree(a.world, XD_OK) == XD_OK);
    alone_close(&a);
}

XD_TEST(leaves_in_memory_of_the_caller) {
    alone a = alone_open();
    float memory[8];
    const xd_leaf_stack_desc desc = {
        .leaves = { 0, 1, 1 }, .elements = 2, .memory = memory, .memory_bytes = sizeof memory
    };
    xd_leaf_stack *stack = NULL;
    CHECK(xd_leaf_stack_create(a.ctx, &desc, &stack) == XD_OK);
    xd_leaf_stack_destroy(stack);
    alone_close(&a);
}

XD_TEST(a_tensor_is_moved_on_one_rank) {
    alone a = alone_open();
    const xd_topology topology = line_of("dp", 1);
    const xd_layout_desc settings = { .ndim = 1, .shape = { 2 }, .topology = &topology };
    xd_layout *layout = NULL;
    CHECK(xd_layout_create(a.ctx, &settings, &layout) == XD_OK);
    float source[2] = { 1.0f, 2.0f }, target[2] = { 0.0f, 0.0f };
    const xd_tensor from = xd_tensor_view(layout, 0, source, XD_DTYPE_F32);
    const xd_tensor to = xd_tensor_view(layout, 0, target, XD_DTYPE_F32);
    source[0] = 5.0f;
    CHECK(xd_redistribute(a.world, &from, &to) == XD_OK);
    CHECK(target[0] == 5.0f);
    CHECK(xd_tensor_gather(a.world, &to, NULL, 0, source) == XD_OK && source[1] == 2.0f);
    xd_layout_destroy(layout);
    alone_close(&a);
}

XD_TEST(a_world_of_one_process) {
    char name[64];
    snprintf(name, sizeof name, "nulls-%ld", (long)getpid());
    const xd_node_desc desc = { .name = name, .rank = 0, .size = 1 };
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    CHECK(xd_comm_node(ctx, &desc, &world) == XD_OK);
    CHECK_EQ_INT(xd_comm_size(world), 1);
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
}

/* ---- routes ---- */

XD_TEST(a_route_from_a_rank_to_itself) {
    alone a = alone_open();
    xd_route *route = NULL;
    const xd_route_desc desc = { .payload = XD_ROUTE_COLUMNS,
                                 .samples = 2,
                                 .length = 1,
                                 .columns = 2,
                                 .teacher = { .sample_count = 2, .micro_batch = 1 },
                                 .student = { .sample_count = 2, .micro_batch = 1 } };
    CHECK(xd_route_create(a.world, &desc, &route) == XD_OK);
    for (int i = 0; i < 2; i++) {
        float values[2] = { 1.0f + (float)i, 2.0f };
        const int64_t columns[2] = { 0, 5 };
        int64_t *ids = NULL;
        xd_rows slot;
        xd_route_window window;
        if (i == 0) {
            CHECK(xd_route_slot(route, &slot, &ids) == XD_OK);
            memcpy(slot.data, values, sizeof values);
            memcpy(ids, columns, sizeof columns);
            CHECK(xd_route_post(route) == XD_OK);
        } else {
            CHECK(xd_route_send(route, xd_rows_of(values, XD_DTYPE_F32, 1, 2), columns) == XD_OK);
        }
        CHECK(xd_route_take(route, &window) == XD_OK);
        CHECK(((const float *)window.rows.data)[0] == 1.0f + (float)i);
        CHECK(xd_route_release(route) == XD_OK);
    }
    xd_route_destroy(route);
    alone_close(&a);
}

/* ---- files ---- */

XD_TEST(files_with_metadata) {
    alone a = alone_open();
    char directory[64];
    strcpy(directory, new_root());
    const int64_t shape[1] = { 2 };
    const float values[2] = { 1.0f, 2.0f };
    const xd_weights_pair pair = { "made", "by a test" };
    const xd_weights_entry entry = { "w", XD_DTYPE_F32, 1, shape };
    const xd_weights_writer_desc one = {
        .entries = &entry, .entry_count = 1, .metadata = &pair, .metadata_count = 1
    };
    const xd_weights_writer_desc all = {
        .entries = &entry, .entry_count = 1, .metadata = &pair, .metadata_count = 1
    };
    xd_weights_layout *layout = NULL;
    xd_weights_writer *writer = NULL;
    CHECK(xd_weights_plan(a.ctx, &one, &layout) == XD_OK);
    xd_release(a.ctx, layout);
    CHECK(weights_write_directory(a.ctx, directory, &all, &writer) == XD_OK);
    CHECK(xd_weights_writer_write(writer, 0, 0, sizeof values, values) == XD_OK);
    CHECK(xd_weights_writer_commit(writer) == XD_OK);
    remove_all(directory);
    alone_close(&a);
}

XD_TEST(a_checkpoint_in_the_background) {
    alone a = alone_open();
    char root[64];
    strcpy(root, new_root());
    float values[2] = { 1.0f, 2.0f }, gradient[2] = { 0.0f, 0.0f };
    const xd_param param = {
        .name = "w", .value = values, .gradient = gradient, .dtype = XD_DTYPE_F32, .count = 2
    };
    const xd_ema_desc settings = { .decay = 0.5, .init_from_current = true };
    const xd_tensor_part part = {
        .name = "w", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 2 }, .range = { 0, 2 }, .data = values
    };
    const xd_checkpoint_file file = { "note.txt", "text", 4 };
    xd_ema *ema = NULL;
    CHECK(average_create(a.ctx, &param, 1, &settings, &ema) == XD_OK);
    const xd_checkpoint_average average = { "slow", ema };
    const xd_checkpoint_network network = {
        .parts = &part, .part_count = 1, .averages = &average, .average_count = 1
    };
    const xd_checkpoint_save_desc desc = {
        .root = root, .step = 3, .networks = &network, .network_count = 1, .files = &file, .file_count = 1
    };
    xd_checkpoint_saver *saver = NULL;
    xd_memory_bytes bytes = { 0, 0 };
    int64_t step = -1;
    const xd_checkpoint_saver_desc saves = { &network, 1 };
    CHECK(PLANNED_MEMORY(a.ctx, xd_checkpoint_saver_create(a.world, &saves, &saver), &bytes) == XD_OK);
    CHECK(bytes.host > 0);
    CHECK(xd_checkpoint_saver_create(a.world, &saves, &saver) == XD_OK);
    CHECK(xd_checkpoint_save_start(saver, &desc) == XD_OK);
    CHECK(xd_checkpoint_save_wait(saver) == XD_OK);
    CHECK(xd_checkpoint_find(a.ctx, root, &step) == XD_OK && step == 3);
    const xd_state_inherit_desc inherit = {
        .from = &network, .networks = &network, .network_count = 1, .step = 3
    };
    CHECK(xd_state_inherit(a.world, &inherit, &step, NULL) == XD_OK && step == 3);
    xd_checkpoint_saver_destroy(saver);
    xd_ema_destroy(ema);
    remove_all(root);
    alone_close(&a);
}

/* ---- plans ---- */

static void take_line(void *user, const char *line) {
    (void)line;
    ++*(int *)user;
}

XD_TEST(a_plan_with_averages) {
    alone a = alone_open();
    int lines = 0;
    const xd_weight_desc weight = { .name = "w", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 4 } };
    const xd_ddp_desc ddp = { .micro_batches = 1 };
    const xd_ema_desc average = { .decay = 0.5 };
    const xd_memory_plan_desc desc = { .ddp = &ddp, .averages = &average, .average_count = 1 };
    const xd_build_report report = { take_line, &lines };
    xd_model *model = NULL;
    CHECK(xd_model_create(a.ctx, NULL, &model) == XD_OK);
    CHECK(xd_weight_add(xd_model_root(model), &weight, NULL) == XD_OK);
    CHECK(xd_model_seal(model) == XD_OK);
    CHECK(xd_plan_print(model, &desc, report) == XD_OK);
    CHECK(lines > 0);
    xd_model_destroy(model);
    alone_close(&a);
}

static xd_result run_again(void *user, const xd_block_view *view, const void *input) {
    (void)view;
    *(float *)user = *(const float *)input;
    return XD_OK;
}

XD_TEST(a_block_that_is_run_again) {
    alone a = alone_open();
    const xd_block_desc block_desc = { .name = "a", .recompute = true };
    const xd_weight_desc weight = { .name = "w", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 4 } };
    const xd_inputs_desc desc = { .bytes = sizeof(float) };
    const float input = 6.0f;
    float seen = 0.0f;
    const xd_forward forward = { run_again, &seen };
    xd_model *model = NULL;
    xd_block *block = NULL;
    xd_inputs *inputs = NULL;
    xd_block_view view;
    CHECK(xd_model_create(a.ctx, NULL, &model) == XD_OK);
    CHECK(xd_block_add(xd_model_root(model), &block_desc, &block) == XD_OK);
    CHECK(xd_weight_add(block, &weight, NULL) == XD_OK);
    CHECK(xd_model_seal(model) == XD_OK);
    CHECK(xd_model_allocate(model) == XD_OK);
    CHECK(xd_inputs_create(model, &desc, &inputs) == XD_OK);
    CHECK(xd_block_begin(block, (xd_pass){ .kind = XD_PASS_FORWARD }, &view) == XD_OK);
    CHECK(xd_inputs_keep(block, 0, &input, sizeof input) == XD_OK);
    CHECK(xd_block_end(block) == XD_OK);
    CHECK(xd_recompute(block, 0, forward) == XD_OK);
    CHECK(seen == 6.0f);
    xd_inputs_destroy(inputs);
    xd_model_destroy(model);
    alone_close(&a);
}

/* ---- schedules ---- */

XD_TEST(a_schedule_with_a_table) {
    alone a = alone_open();
    const double table[3] = { 0.9, 0.5, 0.1 };
    xd_noise_schedule schedule = xd_noise_defaults(XD_NOISE_VP);
    schedule.table = table;
    schedule.table_count = 3;
    const xd_conversion conversion = { .from = XD_PREDICT_EPS, .to = XD_PREDICT_X0 };
    xd_mix mix;
    CHECK(xd_noise_mix(a.ctx, &schedule, 0.5, &mix) == XD_OK);
    CHECK(xd_prediction_mix(a.ctx, &schedule, &conversion, 0.5, &mix) == XD_OK);
    const xd_time_sampler sampler = { .kind = XD_TIME_UNIFORM, .min_t = 0.1, .max_t = 0.9 };
    const xd_denoise_form form = { .native = XD_PREDICT_EPS, .space = XD_PREDICT_EPS };
    xd_denoise_term term;
    const xd_philox random = { .seed = 1 };
    double t = 0.0;
    CHECK(xd_times_draw(a.ctx, &sampler, &random, 1, &t) == XD_OK && t > 0.0);
    CHECK(xd_denoise_term_at(a.ctx, &schedule, &form, 0.5, &term) == XD_OK);
    alone_close(&a);
}

/* ---- entries of lists ---- */

XD_TEST(an_entry_without_its_list_is_refused) {
    alone a = alone_open();
    const xd_align_side none = { .count = 2 };
    xd_align_job job = { .student = none, .teacher = none };
    CHECK(xd_align_batch(a.ctx, &job, 1) == XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(a.ctx)->message, "sequence 0: student: spans is NULL and count 2");

    const xd_text text = { "a", 1 }, empty = { NULL, 1 };
    xdi_align_dp_desc dp = { .student = { &text, 1 }, .teacher = { &empty, 1 } };
    xd_alignment aligned;
    CHECK(xdi_align_segment(a.ctx, &dp, &aligned, NULL) == XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(a.ctx)->message, "token 0: data is NULL and size 1");
    dp.teacher.texts = &text;
    CHECK(xdi_align_segment(a.ctx, &dp, &aligned, NULL) == XD_OK);
    xd_alignment_destroy(a.ctx, &aligned);

    const xd_named_tensor tensor = { .name = "w" };
    const xd_weights_gather_desc desc = { .directory = ".", .tensors = &tensor, .tensor_count = 1 };
    CHECK(xd_weights_gather(a.world, &desc) == XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(a.ctx)->message, "tensors[0] has no layout");
    alone_close(&a);
}

XD_TEST_MAIN()
