/* Wrappers: DDP and FSDP with all their settings train to the same bits as one rank alone, in INVARIANT mode. */
#include "xdistill.h"

#include "wrap_scene.h"

static const char *const kinds[] = { "DDP", "DDP, sharded optimizer", "FSDP", "FSDP, whole gradients",
                                     "HSDP" };

static bool compare(const wrap_run *one, wrap_kind kind, int ranks, int groups, int flags) {
    wrap_run *run = wrap_new(kind, ranks, one->leaves, one->reduction);
    run->groups = groups;
    run->together = (flags & 1) != 0;
    run->nested = (flags & 2) != 0;
    const bool ok = wrap_execute(run) == XD_OK && wrap_equal(one, run);
    if (!ok)
        printf("%s, %d ranks in %d groups, %lld leaves, flags %d differ\n", kinds[kind], ranks, groups,
               (long long)one->leaves, flags);
    free(run);
    return ok;
}

XD_TEST(every_wrapper_on_any_ranks_trains_to_the_bits_of_one_rank) {
    static const int64_t leaves[] = { 8, 12, 13, 24 };
    for (int l = 0; l < 4; l++) {
        wrap_run *one = wrap_new(WRAP_DDP, 1, leaves[l], XD_REDUCTION_INVARIANT);
        CHECK(wrap_execute(one) == XD_OK);
        CHECK(one->count > 300 && one->norms[2] > 0.0);
        for (int ranks = 1; ranks <= 8; ranks += ranks == 5 ? 3 : 1)
            for (int kind = WRAP_DDP; kind <= WRAP_FSDP_WHOLE; kind++)
                CHECK(compare(one, (wrap_kind)kind, ranks, 0, ranks + kind));
        free(one);
    }
}

XD_TEST(replicated_groups_of_shards_train_to_the_bits_of_one_rank) {
    wrap_run *one = wrap_new(WRAP_DDP, 1, 24, XD_REDUCTION_INVARIANT);
    CHECK(wrap_execute(one) == XD_OK);
    CHECK(compare(one, WRAP_HSDP, 6, 3, 0));
    CHECK(compare(one, WRAP_HSDP, 6, 3, 3));
    CHECK(compare(one, WRAP_HSDP, 3, 3, 1));
    free(one);
    one = wrap_new(WRAP_DDP, 1, 16, XD_REDUCTION_INVARIANT);
    CHECK(wrap_execute(one) == XD_OK);
    CHECK(compare(one, WRAP_HSDP, 8, 2, 2));
    CHECK(compare(one, WRAP_HSDP, 6, 2, 1));
    free(one);
}

XD_TEST_MAIN()
