/* Checkpoints are the same on every layout, load on every other one, and training goes on as if it had not stopped. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp */
#endif

#include "checkpoint_files.h"
#include "checkpoint_scene.h"

/* ---- saves ---- */

static const char state[] = "{\"cursor\": 17, \"seeds\":[1,2.50,\"\\u00e9\"]}";

typedef struct job {
    const char *root;
    int cut, steps, more; /* steps before the save, and after it or after the load */
    int64_t step;
    uint64_t shard_bytes;
    size_t staging_bytes, block_bytes;
    xd_checkpoint_check check;
    scene_whole *whole;
} job;

static xd_result save_scene(xd_comm *world, void *argument) {
    const job *j = (const job *)argument;
    scene *s = (scene *)malloc(sizeof *s);
    scene_create(s, xd_comm_ctx(world), xd_comm_rank(world), xd_comm_size(world), j->cut);
    for (int i = 1; i <= j->steps; i++) scene_step(s, i);
    const xd_checkpoint_file file = { "config.json", "{}", 2 };
    xd_checkpoint_save_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.root = j->root;
    desc.step = j->step;
    desc.networks = &s->network;
    desc.network_count = 1;
    desc.state = s->rank == 0 ? state : NULL;
    desc.files = s->rank == 0 ? &file : NULL;
    desc.file_count = s->rank == 0;
    desc.max_shard_bytes = j->shard_bytes;
    desc.staging_bytes = j->staging_bytes;
    desc.block_bytes = j->block_bytes;
    CHECK_EQ_INT(xd_checkpoint_save(world, &desc), XD_OK);
    scene_destroy(s);
    free(s);
    return XD_OK;
}

static xd_result load_scene(xd_comm *world, void *argument) {
    const job *j = (const job *)argument;
    scene *s = (scene *)malloc(sizeof *s);
    xd_checkpoint_load_desc desc;
    xd_checkpoint_report report;
    char *own = NULL;
    scene_create(s, xd_comm_ctx(world), xd_comm_rank(world), xd_comm_size(world), j->cut);
    scene_fill(s, 99);
    memset(&desc, 0, sizeof desc);
    desc.root = j->root;
    desc.step = j->step;
    desc.networks = &s->network;
    desc.network_count = 1;
    desc.staging_bytes = j->staging_bytes;
    desc.check = j->check;
    CHECK_EQ_INT(xd_checkpoint_load(world, &desc, &report, &own), XD_OK);
    CHECK_EQ_STR(own, state);
    CHECK_EQ_INT(report.step, 7);
    CHECK_EQ_INT(report.loaded, 3 * SCENE_TENSORS + 6 * 3 + 2);
    CHECK_EQ_INT(report.missing + report.unexpected + report.wrong_shape + report.converted, 0);
    for (int i = 1; i <= j->more; i++) scene_step(s, j->steps + i);
    for (int r = 0; r < s->ranks; r++) { /* one after the other: they write the same memory */
        if (r == s->rank) scene_collect(s, j->whole);
        CHECK_EQ_INT(xd_barrier(world), XD_OK);
    }
    xd_release(s->ctx, own);
    scene_destroy(s);
    free(s);
    return XD_OK;
}

static xd_result run(int ranks, xd_rank_function function, job *j) {
    const xd_ctx_desc desc = scene_ctx_desc();
    return xd_run_threads(ranks, &desc, function, j, NULL);
}

static job new_job(const char *root, int cut) {
    job j;
    memset(&j, 0, sizeof j);
    j.root = root;
    j.cut = cut;
    j.steps = 5;
    j.step = 7;
    return j;
}

XD_TEST(equal_content_gives_equal_directories_on_every_layout) {
    static const uint64_t shard_bytes[] = { 0, 300 };
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    const char *base = new_root(), *one = path_in(base, "one"), *other = path_in(base, "other");
    const char *step_one = path_in(one, "step-7"), *step_other = path_in(other, "step-7");
    for (int shards = 0; shards < 2; shards++) {
        job j = new_job(one, 0);
        j.shard_bytes = shard_bytes[shards];
        j.block_bytes = 4096;
        CHECK_EQ_INT(run(1, save_scene, &j), XD_OK);
        CHECK_EQ_INT(xd_checkpoint_verify(ctx, step_one), XD_OK);
        for (int ranks = 1; ranks <= 5; ranks++)
            for (int cut = 0; cut < SCENE_CUTS; cut++) {
                j.root = other;
                j.cut = cut;
                j.staging_bytes = cut % 2 ? 64 : 0;
                CHECK_EQ_INT(run(ranks, save_scene, &j), XD_OK);
                const int files = compare_directories(ctx, step_one, step_other);
                CHECK(shards ? files > 15 : files == 7);
                remove_all(other);
            }
        remove_all(one);
    }
    remove_all(base);
    xd_ctx_destroy(ctx);
}

XD_TEST(training_goes_on_on_other_ranks_as_if_it_had_not_stopped) {
    scene_whole *expected = (scene_whole *)malloc(2 * sizeof *expected), *found = expected + 1;
    const char *root = new_root();
    for (int more = 0; more < 2; more++)
        for (int ranks = 1; ranks <= 5; ranks++) {
            job j = new_job(root, ranks);
            j.block_bytes = 4096;
            CHECK_EQ_INT(run(1 + ranks % 3, save_scene, &j), XD_OK);
            j.more = 3 * more;
            scene_expected(j.steps + j.more, expected);
            for (int cut = 0; cut < SCENE_CUTS; cut++) {
                memset(found, 0, sizeof *found);
                j.cut = cut;
                j.whole = found;
                j.staging_bytes = cut % 2 ? 0 : 64;
                j.check = (xd_checkpoint_check)(cut % 3);
                j.step = cut % 2 ? 7 : XD_CHECKPOINT_NEWEST;
                CHECK_EQ_INT(run(ranks, load_scene, &j), XD_OK);
                compare_wholes(expected, found);
            }
            remove_all(root);
        }
    free(expected);
}

XD_TEST_MAIN()
