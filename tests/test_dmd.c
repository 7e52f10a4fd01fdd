/* Whole steps of a distillation: turns, the same bits on every layout, findings, resumed runs. */
#include "xdistill.h"

#include "dmd_scene.h"

static dmd_run *new_run(xd_dmd_recipe recipe, int rungs, bool gan) {
    dmd_run *run = (dmd_run *)calloc(1, sizeof *run);
    run->desc = dmd_settings(recipe, rungs);
    run->gan = gan;
    run->steps = 6;
    run->poisoned = -1;
    if (gan) run->desc.gan.r1_weight = 2.0;
    return run;
}

static bool same(const dmd_run *a, const dmd_run *b) {
    return a->hash == b->hash && memcmp(a->values, b->values, sizeof a->values) == 0 &&
           memcmp(&a->record, &b->record, sizeof a->record) == 0;
}

static void check_layouts(const dmd_run *like) {
    dmd_run *one = (dmd_run *)calloc(1, sizeof *one), *other = (dmd_run *)calloc(1, sizeof *other);
    *one = *like;
    CHECK_EQ_INT(dmd_execute(one, 1, XD_REDUCTION_INVARIANT), XD_OK);
    CHECK(one->hash != 0);
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int fsdp = 0; fsdp < 2; fsdp++) {
            *other = *like;
            other->fsdp = fsdp != 0;
            CHECK_EQ_INT(dmd_execute(other, ranks, XD_REDUCTION_INVARIANT), XD_OK);
            CHECK(same(one, other));
            if (!same(one, other)) printf("%d ranks, %s\n", ranks, fsdp ? "FSDP" : "DDP");
        }
    free(one);
    free(other);
}

XD_TEST(a_student_of_one_step_has_the_bits_of_one_rank_on_every_layout) {
    dmd_run *run = new_run(XD_DMD_MODELOPT, 1, false);
    check_layouts(run);
    free(run);
}

XD_TEST(a_discriminator_with_its_penalty_keeps_the_bits) {
    dmd_run *run = new_run(XD_DMD_FASTGEN, 3, true);
    check_layouts(run);
    run->desc.gan.same_noise = true;
    run->desc.gan.r1_on_clean = true;
    run->desc.gan.kind = XD_GAN_HINGE;
    check_layouts(run);
    free(run);
}

XD_TEST(roll_outs_with_either_noise_keep_the_bits) {
    dmd_run *run = new_run(XD_DMD_MODELOPT, 3, false);
    run->desc.rungs.roll_out = true;
    check_layouts(run);
    run->desc.rungs.fresh_noise = true;
    check_layouts(run);
    free(run);
}

XD_TEST(critics_on_the_students_own_samples_keep_the_bits) {
    dmd_run *run = new_run(XD_DMD_ORIGINAL, 1, true);
    check_layouts(run);
    free(run);
}
XD_TEST_MAIN()
