/* Numbers that no training run should hold, in every numeric input of every call that takes numbers: helpers/poison.h says what
 * is asked. `make test` runs a sample, every 41st case; XDISTILL_POISON=all runs all of them, and XDISTILL_POISON_ONLY=name
 * those of the calls whose names contain it.
 *
 * Not in the table; tests/build/test_poison_table.py fails for a call that takes numbers and is named neither there nor here:
 *
 *   xd_all_gather, xd_all_to_all, xd_gather, xd_scatter, xd_send: move elements as bytes
 *   xd_all_reduce, xd_reduce_scatter, xd_leaf_stack_push: arithmetic on elements alone, NaN in, NaN out
 *   xd_redistribute, xd_tensor_full, xd_tensor_gather, xd_tensor_numel, xd_weights_gather: move elements as bytes
 *   xd_route_send, xd_route_slot, xd_teacher_piece_copy: move rows as bytes
 *   xd_cast, xd_bf16_from_f32, xd_f16_from_f32, xd_load_f64, xd_store_f64: conversions, tested over all values in test_base.c
 *   xd_rows_of, xd_ids_of: make a struct
 *   xd_adamw_defaults, xd_adam_defaults, xd_sgd_defaults: make a struct
 *   xd_loss_workspace_bytes, xd_head_loss_workspace_bytes, xd_topk_kl_workspace_bytes, xd_xtoken_workspace_bytes: read sizes
 *   xd_ctx_create_versioned, xd_run_threads: timeouts, tested in test_base.c
 *   xd_optimizer_create: through xd_optimizer_step
 *   xd_ema_create, xd_ema_decay: through xd_ema_update
 *   xd_status_check, xd_read_status: print a number
 *   xd_votes_read: the sums of what xd_votes_add let in
 *   xd_align_dp, xd_align_segment: scores that are not finite are refused, tested in test_align.c
 *
 * Not yet, though they belong there:
 *
 *   xd_chunk_sums, xd_chunk_averages, xd_chunk_averages_backward: sums of a chunk's rows, to be ALONE
 *   xd_vocab_topk_columns, xd_vocab_topk_gather: a NaN is never chosen; it should be told, for J of xd_xtoken_loss too
 *   xd_compat_jsd_of_probabilities: reports nothing, as its reference
 *   xd_optimizer_set_learning_rate: its check is that of xd_optimizer_create
 *   xd_ema_copy_to, xd_ema_load: convert elements
 *   xd_projection_build, xd_projection_cached, xd_projection_cache_name: options, which files are checked for in test_projection.c
 *   xd_projection_load, xd_projection_load_memory, xd_projection_save, xd_projection_to_rows: weights were checked when made
 *   xd_projection_upload: copies
 *   xd_teacher_cache_open, xd_teacher_cache_open_memory: numbers come from files, which the fuzzers change
 *   xd_teacher_cache_writer_create, xd_teacher_cache_writer_append: as above; the kind CACHED of xd_xtoken_loss waits for them
 *
 * Of calls in the table not yet: a NaN outside the columns J of PROJECTED; a vocabulary wider than a tile of the vector loops;
 * sequences that are split over ranks; in INVARIANT mode a total that overflows though each of its terms fits, and a weight
 * below 2^22 times a loss that makes one too large across tokenizers (both are told, but the gradient is not 0). */

#define _POSIX_C_SOURCE 200809L /* barriers of threads */

#include "poison_loss.h"
#include "poison_rows.h"
#include "poison_text.h"
#include "poison_train.h"
#include "poison_xtoken.h"

static const poison_family *const families[] = {
    &poison_family_loss,
    &poison_family_mft,
    &poison_family_cosine,
    &poison_family_head,
    &poison_family_topk,
    &poison_family_estimate,
    &poison_family_xtoken,
    &poison_family_uld,
    &poison_family_row_stats,
    &poison_family_log_softmax,
    &poison_family_log_softmax_backward,
    &poison_family_target_log_probs,
    &poison_family_target_log_probs_backward,
    &poison_family_gather_columns,
    &poison_family_vocab_topk,
    &poison_family_accuracy,
    &poison_family_project,
    &poison_family_project_backward,
    &poison_family_optimizer,
    &poison_family_ema,
    &poison_family_norm,
    &poison_family_clip,
    &poison_family_denominator,
    &poison_family_votes,
    &poison_family_cells,
    &poison_family_from_rows,
    &poison_family_cut,
    &poison_family_map,
    &poison_family_similarities,
    &poison_family_embeddings,
    &poison_family_special,
};

/* The families whose names contain XDISTILL_POISON_ONLY. */
static int chosen(const poison_family **out) {
    const char *only = getenv("XDISTILL_POISON_ONLY");
    int count = 0;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (!only || strstr(families[i]->name, only)) out[count++] = families[i];
    return count;
}

#if !defined( \
    POISON_BACKEND) /* tests/cuda/test_cuda_poison.cpp has the table from here and tests of its own */

XD_TEST(poison_in_any_input_is_told_and_stays_in_its_unit) {
    const char *all = getenv("XDISTILL_POISON");
    const poison_family *run[sizeof families / sizeof *families];
    const int count = chosen(run);
    poison_run(run, count, all && !strcmp(all, "all") ? 1 : 41);
    poison_report("poison");
}

XD_TEST_MAIN()

#endif
