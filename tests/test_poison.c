/* Numbers that no training run should hold, in every numeric input of every call that takes numbers. */

#define _POSIX_C_SOURCE 200809L /* barriers of threads */

#include "poison_loss.h"
#include "poison_xtoken.h"

static const poison_family *const families[] = {
    &poison_family_loss, &poison_family_mft,  &poison_family_cosine,
    &poison_family_head, &poison_family_topk, &poison_family_estimate,
    &poison_family_xtoken,
};

/* The families whose names contain XDISTILL_POISON_ONLY. */
static int chosen(const poison_family **out) {
    const char *only = getenv("XDISTILL_POISON_ONLY");
    int count = 0;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (!only || strstr(families[i]->name, only)) out[count++] = families[i];
    return count;
}

XD_TEST(poison_in_any_input_is_told_and_stays_in_its_unit) {
    const char *all = getenv("XDISTILL_POISON");
    const poison_family *run[sizeof families / sizeof *families];
    const int count = chosen(run);
    poison_run(run, count, all && !strcmp(all, "all") ? 1 : 23);
    poison_report("poison");
}

XD_TEST_MAIN()
