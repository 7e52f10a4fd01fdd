/* This example makes a fake score from a teacher that is sharded over another mesh. Ranks 2 and 3
 * shard the teacher by rows. FSDP shards the fake score over all four ranks. It is in BF16 and has
 * its own head. First each rank describes the fake score, which needs no memory. Then the ranks
 * check that their descriptions are equal and that the teacher has every weight except the head.
 * Finally each rank allocates and receives its quarter, so no rank ever holds a whole network.
 *
 *     cc -std=c99 -O2 examples/18_meta_fake_score.c -o meta_fake_score -lm -lpthread
 */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <stdio.h>

enum { ROWS = 37, COLUMNS = 24, LAYERS = 2, RANKS = 4 };

static const char *const layers[LAYERS] = { "layer.0", "layer.1" };

/* Stands for the value that training would give this element. */
static float learned(int layer, int64_t element) {
    return (float)(layer + 1) + (float)element * 0.001f;
}

/* All ranks describe the teacher, but only ranks 2 and 3 hold elements of it. */
static xd_result make_teacher(xd_comm *world, const xd_layout *rows, xd_model **out) {
    const xd_weight_desc weight = {
        .name = "weight",
        .dtype = XD_DTYPE_F32,
        .ndim = 2,
        .shape = { ROWS, COLUMNS },
        .layout = rows,
        .traits.frozen = true,
    };
    const xd_model_desc here = { .rank = xd_comm_rank(world) };
    XD_TRY(xd_model_create(xd_comm_ctx(world), &here, out));
    for (int i = 0; i < LAYERS; i++) {
        const xd_block_desc layer = { .name = layers[i], .type = "layer" };
        xd_block *block;
        XD_TRY(xd_block_add(xd_model_root(*out), &layer, &block));
        XD_TRY(xd_weight_add(block, &weight, NULL));
    }
    XD_TRY(xd_model_seal(*out));
    XD_TRY(xd_model_allocate(*out));

    for (int layer = 0; layer < LAYERS; layer++) {
        xd_weight *target = xd_model_weight_at(*out, layer);
        const xd_weight_info w = xd_weight_describe(target);
        const int64_t first = w.count > 0 ? w.region->interval[0][0].begin * COLUMNS : 0;
        for (int64_t i = 0; i < w.count; i++)
            ((float *)w.value)[i] = learned(layer, first + i);
        XD_TRY(xd_weight_set_ready(target));
    }
    return XD_OK;
}

/* Describes a weight of the teacher as whole, because FSDP will shard it. */
static xd_result make_whole(void *user, const char *name, xd_weight_desc *weight) {
    (void)user;
    (void)name;
    weight->layout = NULL;
    return XD_OK;
}

/* Describes the fake score. It has the layers of the teacher and a head of its own. */
static xd_result describe(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    const xd_fake_score_desc fake = { .dtype = XD_DTYPE_BF16, .adapt = make_whole };
    const xd_weight_desc head = {
        .name = "head",
        .dtype = XD_DTYPE_BF16,
        .ndim = 2,
        .shape = { 4, COLUMNS },
        .init = { XD_INIT_NORMAL, .scale = 0.02f },
    };
    (void)ctx;
    (void)place;
    XD_TRY(xd_fake_score_describe(user, &fake, out));
    return xd_weight_add(xd_model_root(*out), &head, NULL);
}

/* Gathers each layer as a pass of the training does, and counts the elements that differ. */
static xd_result compare(xd_model *fake, int *wrong) {
    for (int layer = 0; layer < LAYERS; layer++) {
        xd_block *block = xd_model_find_block(fake, layers[layer]);
        xd_block_view view;
        XD_TRY(xd_block_begin(block, (xd_pass){ .kind = XD_PASS_INFERENCE }, &view));
        const uint16_t *values = view.values[0];
        for (int64_t i = 0; i < ROWS * COLUMNS; i++)
            *wrong += values[i] != xd_bf16_from_f32(learned(layer, i));
        XD_TRY(xd_block_end(block));
    }
    return XD_OK;
}

static xd_result run(xd_comm *world, void *argument) {
    static const char *const units[] = { "layer" };
    static const char *const fresh[] = { "head" };
    static const int teacher_ranks[] = { 2, 3 };
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_mesh *mesh;
    xd_layout *rows;
    xd_model *teacher;
    xd_built *built;
    xd_fake_score_report report;
    int wrong = 0;
    (void)argument;

    const xd_mesh_desc two = { .axes = { { "rows", 2 } }, .ranks = teacher_ranks, .rank_count = 2 };
    XD_TRY(xd_mesh_create(world, &two, &mesh));
    const xd_layout_desc sharded = { .ndim = 2, .shape = { ROWS, COLUMNS },
                                     .topology = xd_mesh_topology(mesh),
                                     .placement = { { XD_SHARD, .dim = 0 } } };
    XD_TRY(xd_layout_create(ctx, &sharded, &rows));
    XD_TRY(make_teacher(world, rows, &teacher));

    const xd_groups groups = { .dp = world };
    const xd_fsdp_desc fsdp = { .unit_types = units, .unit_type_count = 1 };
    const xd_fake_score_meta_desc meta = {
        .teacher = teacher, .provider = { describe, teacher },
        .groups = &groups, .wrap = { XD_WRAP_FSDP, .fsdp = &fsdp },
        .lenient = true, .fresh = fresh, .fresh_count = 1, .report = &report,
    };
    XD_TRY(xd_fake_score_create_meta(world, &meta, &built));
    const xd_stage fake = xd_built_stage(built, 0);
    XD_TRY(compare(fake.model, &wrong));
    if (xd_comm_rank(world) == 0)
        printf("%d weights from ranks 2 and 3, rounded to BF16, and %d of its own: "
               "%d bytes of each of %d ranks; %d elements differ\n",
               (int)report.loaded, (int)report.formed,
               (int)xd_parallel_memory(fake.parallel).values, RANKS, wrong);

    xd_built_destroy(built);
    xd_model_destroy(teacher);
    xd_layout_destroy(rows);
    xd_mesh_destroy(mesh);
    if (wrong == 0)
        return XD_OK;
    return XD_FAIL(ctx, XD_ERROR_DATA, "%d elements differ from the teacher's", wrong);
}

int main(void) {
    xd_error error = { 0 };
    if (xd_run_threads(RANKS, NULL, run, NULL, &error) != XD_OK) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    return 0;
}
