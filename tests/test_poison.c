/* Numbers that no training run should hold, in every numeric input of every call that takes numbers: helpers/poison.h says what
 * is asked. `make test` runs a sample, every 41st case; XDISTILL_POISON=all runs all of them, a number N every Nth, and
 * XDISTILL_POISON_ONLY=name those of the calls whose names contain it. Vocabularies wider than two tiles of the vector loops are
 * a sample in any case, of every 307th case: what differs is the tile that a number is in, and the end of a row.
 * All: 1.1 million calls in 38 seconds of processor at -O2.
 *
 * Not in the table; tests/build/test_poison_table.py fails for a call that takes numbers and is named neither there nor here:
 *
 *   xd_all_gather, xd_all_gather_even, xd_all_to_all, xd_gather, xd_scatter, xd_send: move elements as bytes
 *   xd_all_reduce, xd_reduce_scatter, xd_leaf_stack_push: arithmetic on elements alone, NaN in, NaN out
 *   xd_redistribute, xd_tensor_gather, xd_tensor_numel, xd_weights_gather: move elements as bytes
 *   xd_halo_exchange, xd_crossing_forward: move elements as bytes, or add them; xd_halo_exchange_backward, xd_crossing_backward: the same
 *   xd_route_send, xd_route_slot: move rows as bytes
 *   xd_cast, xd_bf16_from_f32, xd_load_f64, xd_store_f64: conversions, tested over all values in test_base.c
 *   xd_rows_of, xd_ids_of: make a struct
 *   xd_adamw_defaults, xd_adam_defaults: make a struct
 *   xd_vsd_defaults, xd_denoise_defaults, xd_gan_defaults: make a struct
 *   xd_vsd_loss, xd_denoise_loss: every input, counted and masked, on one rank and over split samples: test_dmd_findings.c
 *   xd_denoise_term_at: numbers that are refused, tested in test_denoise_terms.c
 *   xd_gan_loss: logits, times and numbers that are refused: test_dmd_gan.c
 *   xd_plan_begin, xd_plan_end: read sizes; numbers are checked as by the calls that are planned
 *   xd_weight_add: numbers of an init that are not finite are refused, tested in test_model.c
 *   xd_tensor_part_fill: the same, tested in test_fill.c
 *   xd_model_params, xd_parallel_params, xd_built_params: make structs of a list
 *   xd_plan_memory, xd_plan_print: read sizes; numbers of optimizers and averages are checked as by the calls that create
 *   xd_ctx_create_versioned, xd_run_threads: timeouts, tested in test_base.c
 *   xd_comm_node, xd_comm_shrink: a timeout below 0 or NaN is refused, tested in test_node_join.c and test_node_shrink.c
 *   xd_ddp_create, xd_fsdp_create, xd_build: divisors that have no inverse are refused, tested in test_wrap_checks.c
 *   xd_gradient_norm_check: tells what xd_gradient_norm_compute found, tested in test_wrap_checks.c
 *   xd_optimizer_create: through xd_optimizer_step
 *   xd_ema_create: through xd_ema_update
 *   xd_state_scatter: reads the counters of a record, none of its settings
 *   xd_post_hoc_average: numbers outside their range, NaN among them, are refused, tested in test_post_hoc.c; arithmetic on
 *     elements alone, NaN in, NaN out
 *   xd_status_check: prints a number
 *   xd_noise_steps, xd_edm_scales_at: numbers outside their range, NaN among them, are refused, tested in test_noise_schedule.c
 *   xd_prediction_mix, xd_noise_mix: the same, tested in test_convert.c
 *   xd_dmd_create: numbers outside their range, NaN among them, are refused, tested in test_dmd.c
 *   xd_latent_pack, xd_latent_unpack: move elements as bytes
 *   xd_dmd_trains: reads two whole numbers
 *   xd_fake_score_create_meta: moves elements as bytes, or rounds them as xd_cast does
 *   xd_state_inherit: moves elements as bytes
 *   xd_sampler_create: numbers outside their range, NaN among them, are refused, tested in test_sampler.c
 *   xd_times_draw: the same, tested in test_times.c
 *   xd_sampler_of_student: makes a struct
 *   xd_mix_rows: arithmetic on elements alone, NaN in, NaN out, tested over every special number in test_convert.c
 *   xd_draw_rows: takes whole numbers, and writes what it draws
 *   xd_projection_build: a threshold outside [0, 1] or NaN is refused, tested in test_projection_build.c
 *   xd_projection_cache_name: prints the bits of a threshold
 *   xd_projection_upload: copies arrays as bytes */

#define _POSIX_C_SOURCE 200809L /* barriers of threads */

#include "poison_chunks.h"
#include "poison_files.h"
#include "poison_loss.h"
#include "poison_rows.h"
#include "poison_text.h" /* xdi_: families of private calls */
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
    &poison_family_chunk_sums,
    &poison_family_chunk_averages,
    &poison_family_chunk_averages_backward,
    &poison_family_topk_columns,
    &poison_family_topk_gather,
    &poison_family_jsd,
    &poison_family_rate,
    &poison_family_ema_load,
    &poison_family_ema_copy_to,
    &poison_family_to_rows,
    &poison_family_projection_save,
    &poison_family_projection_load,
    &poison_family_cache_create,
    &poison_family_cache_append,
    &poison_family_cache_open,
};

/* The families whose names contain XDISTILL_POISON_ONLY. */
static int chosen(const poison_family *const *from, int of, const poison_family **out) {
    const char *only = getenv("XDISTILL_POISON_ONLY");
    int count = 0;
    for (int i = 0; i < of; i++)
        if (!only || strstr(from[i]->name, only)) out[count++] = from[i];
    return count;
}

/* Those whose rows are worked on by tiles. */
static const poison_family *const wide[] = {
    &poison_family_loss,       &poison_family_mft,          &poison_family_cosine,
    &poison_family_head,       &poison_family_topk,         &poison_family_xtoken,
    &poison_family_row_stats,  &poison_family_log_softmax,  &poison_family_log_softmax_backward,
    &poison_family_vocab_topk, &poison_family_topk_columns, &poison_family_topk_gather,
};

#if !defined( \
    POISON_BACKEND) /* tests/cuda/test_cuda_poison.cpp has the table from here and tests of its own */

XD_TEST(poison_in_any_input_is_told_and_stays_in_its_unit) {
    const char *all = getenv("XDISTILL_POISON");
    const long given = !all ? 41 : !strcmp(all, "all") ? 1 : atol(all), stride = given > 0 ? given : 1;
    const poison_family *run[sizeof families / sizeof *families];
    const int wide_count = (int)(sizeof wide / sizeof *wide);
    poison_run(run, chosen(families, (int)(sizeof families / sizeof *families), run), stride);
    poison_run_sized(run, chosen(wide, wide_count, run), 307 * stride, POISON_WIDE);
    poison_report("poison");
}

XD_TEST_MAIN()

#endif
