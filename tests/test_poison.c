/* Numbers that no training run should hold, in every numeric input of every call that takes numbers. */

#define _POSIX_C_SOURCE 200809L /* barriers of threads */

#include "poison_loss.h"
#include "poison_rows.h"
#include "poison_text.h"
#include "poison_train.h"
#include "poison_xtoken.h"

static const poison_family *const families[] = {
    &poison_family_loss, &poison_family_mft,  &poison_family_cosine,
    &poison_family_head, &poison_family_topk, &poison_family_estimate,
    &poison_family_xtoken,
    &poison_family_row_stats, &poison_family_log_softmax, &poison_family_log_softmax_backward,
    &poison_family_target_log_probs, &poison_family_target_log_probs_backward, &poison_family_gather_columns,
    &poison_family_vocab_topk, &poison_family_accuracy, &poison_family_project, &poison_family_project_backward,
    &poison_family_optimizer, &poison_family_ema, &poison_family_norm, &poison_family_clip, &poison_family_denominator,
    &poison_family_votes, &poison_family_cells, &poison_family_from_rows, &poison_family_cut, &poison_family_map,
    &poison_family_similarities, &poison_family_embeddings, &poison_family_special,
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
