/* Numbers that no training run should hold, in every numeric input of every call that takes numbers. */

#define _POSIX_C_SOURCE 200809L /* barriers of threads */

#include "poison_loss.h"

static const poison_family *const families[] = {
    &poison_family_loss, &poison_family_mft,  &poison_family_cosine,
    &poison_family_head, &poison_family_topk, &poison_family_estimate,
};

XD_TEST(poison_in_any_input_is_told_and_stays_in_its_unit) {
    const char *all = getenv("XDISTILL_POISON");
    poison_run(families, (int)(sizeof families / sizeof *families), all && !strcmp(all, "all") ? 1 : 23);
    poison_report("poison");
}

XD_TEST_MAIN()
