/* A fake score from a teacher whose shards lie on another mesh. The teacher is cut by rows over ranks 2 and 3 of four; the
 * fake score is trained under FSDP on all four, in BF16, with a head of its own. No rank ever has a whole network.
 *
 *     cc -std=c99 -O2 examples/18_meta_fake_score.c -o meta_fake_score -lm -lpthread
 *
 * First every rank describes the fake score, which takes no memory; then the ranks agree that all describe the same one and
 * that the teacher has every element of it; then each takes memory for its quarter and receives what belongs there, and
 * nothing else. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <stdio.h>

enum { ROWS = 37, COLUMNS = 24, RANKS = 4 };

static const char *const layers[] = { "layer.0", "layer.1" };

/* What the teacher has learned, for want of training: each weight tells its place. */
static float learned(int layer, int64_t element) {
    return (float)(layer + 1) + (float)element * 0.001f;
}

/* Every rank describes the teacher; those outside of its mesh hold nothing of it. */
static xd_result make_teacher(xd_comm *world, const xd_layout *cut, xd_model **out) {
    xd_ctx *ctx = xd_comm_ctx(world);
    XD_TRY(xd_model_create(ctx, &(xd_model_desc){ .rank = xd_comm_rank(world) }, out));
    const xd_weight_desc weight = { .name = "weight", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { ROWS, COLUMNS },
                                    .layout = cut, .traits.frozen = true };
    for (int i = 0; i < 2; i++) {
        xd_block *block;
        XD_TRY(xd_block_add(xd_model_root(*out), &(xd_block_desc){ .name = layers[i], .type = "layer" }, &block));
        XD_TRY(xd_weight_add(block, &weight, NULL));
    }
    XD_TRY(xd_model_seal(*out));
    XD_TRY(xd_model_allocate(*out));
    for (int layer = 0; layer < 2; layer++) {
        const xd_weight_info w = xd_weight_describe(xd_model_weight_at(*out, layer));
        const int64_t first = w.count > 0 ? w.region->interval[0][0].begin * COLUMNS : 0;
        for (int64_t i = 0; i < w.count; i++) ((float *)w.value)[i] = learned(layer, first + i);
        XD_TRY(xd_weight_set_ready(xd_model_weight_at(*out, layer)));
    }
    return XD_OK;
}

/* The teacher's weights, not cut: the wrapper will do that. */
static xd_result uncut(void *user, const char *name, xd_weight_desc *weight) {
    (void)user, (void)name;
    weight->layout = NULL;
    return XD_OK;
}

/* The fake score: as the teacher, and a head that the teacher lacks. */
static xd_result describe(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    (void)ctx, (void)place;
    XD_TRY(xd_fake_score_describe(user, &(xd_fake_score_desc){ .dtype = XD_DTYPE_BF16, .adapt = uncut }, out));
    const xd_weight_desc head = { .name = "head", .dtype = XD_DTYPE_BF16, .ndim = 2, .shape = { 4, COLUMNS },
                                  .init = { XD_INIT_NORMAL, .scale = 0.02f } };
    return xd_weight_add(xd_model_root(*out), &head, NULL);
}

static xd_result run(xd_comm *world, void *argument) {
    static const char *const units[] = { "layer" }, *const fresh[] = { "head" };
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_mesh *mesh;
    xd_layout *cut;
    xd_model *teacher;
    xd_built *built;
    xd_fake_score_report report;
    int64_t wrong = 0;
    (void)argument;
    const xd_mesh_desc two = { .axes = { { "rows", 2 } }, .ranks = (const int[]){ 2, 3 }, .rank_count = 2 };
    XD_TRY(xd_mesh_create(world, &two, &mesh));
    XD_TRY(xd_layout_create(ctx, &(xd_layout_desc){ .ndim = 2, .shape = { ROWS, COLUMNS }, .topology = xd_mesh_topology(mesh),
                                                    .placement = { { XD_SHARD, .dim = 0 } } }, &cut));
    XD_TRY(make_teacher(world, cut, &teacher));
    XD_TRY(xd_fake_score_create_meta(world, &(xd_fake_score_meta_desc){
        .teacher = teacher, .provider = { describe, teacher }, .groups = &(xd_groups){ .dp = world },
        .wrap = { XD_WRAP_FSDP, .fsdp = &(xd_fsdp_desc){ .unit_types = units, .unit_type_count = 1 } },
        .lenient = true, .fresh = fresh, .fresh_count = 1,
    }, &report, &built));
    const xd_stage fake = xd_built_stage(built, 0);
    for (int layer = 0; layer < 2; layer++) { /* gathered for a pass, as training does */
        xd_block *block = xd_model_find_block(fake.model, layers[layer]);
        xd_block_view view;
        XD_TRY(xd_block_begin(block, (xd_pass){ .kind = XD_PASS_INFERENCE }, &view));
        for (int64_t i = 0; i < ROWS * COLUMNS; i++)
            wrong += ((uint16_t *)view.values[0])[i] != xd_bf16_from_f32(learned(layer, i));
        XD_TRY(xd_block_end(block));
    }
    if (xd_comm_rank(world) == 0)
        printf("%d weights from ranks 2 and 3, rounded to BF16, and %d of its own: %d bytes of each of %d ranks; %d elements differ\n",
               (int)report.loaded, (int)report.formed, (int)xd_parallel_memory(fake.parallel).values, RANKS, (int)wrong);
    xd_built_destroy(built), xd_model_destroy(teacher), xd_layout_destroy(cut), xd_mesh_destroy(mesh);
    return wrong == 0 ? XD_OK : XD_FAIL(ctx, XD_ERROR_DATA, "%lld elements differ from the teacher's", (long long)wrong);
}

int main(void) {
    xd_error error = { 0 };
    if (xd_run_threads(RANKS, NULL, run, NULL, &error) != XD_OK) return fprintf(stderr, "%s\n", error.message), 1;
    return 0;
}
