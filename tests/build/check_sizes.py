#!/usr/bin/env python3
"""The tests of sizes, tests/test_sizes*.c, make every matrix of the users' part disagree with the others of its call: each field
and each argument of type xd_rows that docs/api.txt lists is named there, or here because it is an output. A new one fails. So is every integer of the structs that
calls read and of their arguments, in the tables of these tests, or below with the reason why not."""
import glob
import re
import sys

LEFT_OUT = {
    "xd_route_window.rows": "an output",
    "xd_route_slot(rows)": "an output",
    "xd_mix_desc.p": "in test_convert.c",
    "xd_mix_desc.q": "in test_convert.c",
    "xd_mix_desc.out": "in test_convert.c",
    "xd_draw_desc.out": "an output, in test_draw.c",
    "xd_latent_pack(packed)": "in test_pack.c",
    "xd_latent_unpack(packed)": "in test_pack.c",
}


# Structs that calls only write, and numbers that belong to nothing else: ids, hashes, indices, seeds, colours.
WRITTEN = """xd_align_report xd_alignment xd_arena xd_cached_document xd_comm_counters xd_denominator
xd_queue_info xd_checkpoint_report xd_state_report xd_checkpoint_info xd_checkpoint_file_info xd_checkpoint_tensor_info xd_stage_place xd_pipeline_work xd_pipeline_counts xd_pipeline_call
xd_ema_info xd_ema_match xd_ema_record xd_model_info xd_weights_file xd_weights_info xd_fake_score_report xd_memory_bytes xd_memory_plan xd_block_view xd_parallel_bytes xd_parallel_micro_batch_count xd_weight_info xd_model_desc xd_weights_layout xd_encoding xd_encoding_batch xd_error xd_exact_map xd_gradient_norm xd_launch xd_launch_info xd_loss_values
xd_sample_values xd_norm_sum xd_projection_report xd_route_info xd_route_window xd_weights_tensor
xd_status xd_teacher_cache_info xd_token xd_tokenizer_info xd_topology xd_uld_values xd_vocab_info xd_xtoken_values xd_rows
xd_planned xd_interval xd_region xd_token_span xd_projection_origin xd_leaves""".split()
# Numbers for which no value is wrong, or that nothing else in the call tells, by the reason.
COUNTS_LEFT_OUT = {
    "a desc keeps it for the call that checks it": """xd_adam_defaults(param_count) xd_adamw_defaults(param_count)
        xd_rows_of(columns) xd_rows_of(rows)""",
    "the identity of contents: whether two are equal is all that is asked": """
        xd_agree_same(hash) xd_hash(seed) xd_teacher_cache_desc.student_hash xd_teacher_cache_desc.teacher_hash""",
    "a line of source, or a rank, that messages print": """xd_at(line) xd_fail(line) xd_fail_culprit(culprit)
        xd_fail_culprit(line) xd_ctx_desc.rank""",
    "any number names a group or an order": "xd_comm_split(color) xd_comm_split(key)",
    "set by the library, whatever the caller wrote": "xd_collective.sequence",
    "any number may be the id that is ignored": """xd_loss_common.ignore_index xd_positions.ignore_index
        xd_shift_desc.ignore_index""",
    "arithmetic without a context or a result: the extent of arrays that only the caller knows": """xd_hash(bytes)
        xd_load_f64(index) xd_store_f64(index)""",
    "a copy of memory of which only the caller knows the extent": "xd_read(bytes)",
    "memory that is there or not: NULL or false when it is not (tests/test_base.c)": """xd_allocate(bytes)
        xd_arena_over(capacity) xd_arena_take_pointer(bytes)""",
    "a key to look for: -1 when no token has so many bytes": "xd_tokenizer_find(length)",
    "a limit that every model can meet: a tensor above it has a file of its own": """
        xd_weights_gather_desc.max_shard_bytes xd_weights_writer_desc.max_shard_bytes""",
    "tests/test_build*.c make those wrong that can be": """xd_built_stage(index)
        xd_pipeline_desc.layer_count xd_pipeline_desc.ranks xd_pipeline_desc.virtual_stages
        xd_precision.keep_count xd_stage_hooks.count xd_stages.count""",
    "tests/test_wrap_errors.c makes those wrong that can be; any other micro-batch is -1": """xd_ddp_desc.micro_batches xd_fsdp_desc.micro_batches
        xd_block_skip(micro_batch) xd_ddp_desc.bucket_size xd_fsdp_desc.prefetch xd_fsdp_desc.reshard_ranks xd_fsdp_desc.unit_type_count xd_parallel_micro_batch(k) xd_parallel_expert_micro_batch(k) xd_parallel_params(capacity) xd_parallel_parts(capacity)
        xd_pass.micro_batch""",
    "tests/test_build_buckets.c makes those wrong that can be": """xd_ddp_desc.bucket_count xd_ddp_desc.chunk
        xd_ddp_desc.stage""",
    "any number is a meaning: below 0 never, 0 the default": "xd_ddp_desc.compare_steps xd_fsdp_desc.compare_steps",
    "tests/test_plan.c makes those wrong that can be": """xd_memory_plan_desc.average_count xd_memory_plan_desc.groups
        xd_memory_plan_desc.ranks xd_memory_plan_desc.pipeline_rank xd_memory_plan_desc.expert_ranks xd_plan_memory(rank)""",
    "tests/test_pipeline_table.c and test_pipeline_errors.c make those wrong that can be": """xd_pipeline_schedule.group
        xd_pipeline_schedule.micro_batches xd_pipeline_schedule.ranks xd_pipeline_schedule.virtual_stages xd_pipeline_run_desc.ndim
        xd_pipeline_run_desc.value_count xd_pipeline_table(capacity) xd_pipeline_measure(rank)
        xd_pipeline_finish_desc.tokens""",
    "tests/test_build_casts.c makes those wrong that can be": """xd_stage_cast(count)
        xd_stage_values.count""",
    "tests/test_build_list.c makes them wrong": "xd_built_params(capacity) xd_built_parts(capacity)",
    "tests/test_recompute.c makes those wrong that can be": """xd_inputs_desc.bytes xd_inputs_desc.in_flight
        xd_inputs_keep(bytes) xd_inputs_keep(micro_batch) xd_recompute(micro_batch)""",
    "tests/test_model.c, test_buckets.c and test_comm.c make those wrong that can be": """
        xd_leaf_stack_desc.memory_bytes
        xd_model_params(capacity) xd_model_weight_at(index) xd_weight_desc.group xd_weight_desc.ndim xd_weight_desc.room
        xd_weight_desc.stored_rows
        xd_weight_traits.partition_dim xd_weight_traits.partition_stride""",
    "tests/test_halo.c and test_crossing.c make those wrong that can be": """xd_crossing_desc.dim xd_crossing_desc.ndim xd_crossing_desc.other_dim
        xd_halo_desc.longitude""",
    "tests/test_queue.c and test_exchange.c make those wrong that can be": """xd_exchange(count) xd_queue_desc.capacity
        xd_ticket.number""",
    "tests/test_checkpoint_refusals.c and its neighbours make those wrong that can be": """xd_checkpoint_file.bytes
        xd_checkpoint_file_at(index) xd_checkpoint_load_desc.network_count xd_checkpoint_load_desc.staging_bytes
        xd_checkpoint_load_desc.step xd_checkpoint_network.average_count xd_checkpoint_network.part_count
        xd_checkpoint_desc.bytes xd_checkpoint_save_desc.block_bytes xd_checkpoint_save_desc.file_count
        xd_checkpoint_save_desc.keep xd_checkpoint_save_desc.max_shard_bytes xd_checkpoint_save_desc.network_count
        xd_checkpoint_save_desc.staging_bytes xd_checkpoint_save_desc.step
        xd_checkpoint_saver_desc.network_count xd_checkpoint_tensor_at(index) xd_tensor_part.ndim""",
    "tests/test_weight_map_refusals.c makes those wrong that can be": """xd_mapped_weights.map_count xd_mapped_weights.part_count
        xd_weight_map.dim xd_weight_map.length xd_weight_map.our_begin xd_weight_map.their_begin xd_weights_export_desc.max_shard_bytes
        xd_weights_export_desc.metadata_count xd_weights_export_desc.staging_bytes xd_weights_import_desc.staging_bytes""",
    "tests/test_pack.c makes those wrong that can be": """xd_latents.channels xd_latents.height xd_latents.samples
        xd_latents.width""",
    "tests/test_dmd.c, test_dmd_ratios.c and test_dmd_record.c make those wrong that can be; the others are told to functions of the caller, or are what was told": """
        xd_dmd_batch.first xd_dmd_batch.samples xd_dmd_desc.frequency xd_dmd_desc.seed xd_dmd_discriminator(micro_batch)
        xd_dmd_draw.columns xd_dmd_draw.first xd_dmd_draw.rows xd_dmd_fake_score(micro_batch) xd_dmd_trains(step)
        xd_dmd_desc.lead xd_dmd_record.seed xd_dmd_record.step xd_dmd_record.warm_up xd_dmd_regression.step_samples
        xd_dmd_regression.substeps xd_dmd_rungs.hold xd_dmd_rungs.steps xd_dmd_sizes.elements xd_dmd_sizes.first_element
        xd_dmd_sizes.samples xd_dmd_sizes.step_samples xd_dmd_sizes.whole_elements xd_dmd_student(micro_batch)
        xd_dmd_fdistill.bins xd_dmd_state_desc.allow_missing
        xd_dmd_trainer.average_count xd_network.feature_count xd_network.heads xd_network_call.micro_batch
        xd_network_call.samples xd_network_call.slot""",
    "tests/test_sampler.c and test_sampler_rescale.c make those wrong that can be": """
        xd_sampler_desc.elements xd_sampler_desc.first_element xd_sampler_desc.samples xd_sampler_desc.seed
        xd_sampler_desc.step xd_sampler_desc.steps xd_sampler_desc.whole_elements""",
    "tests/test_noise_schedule.c and test_times.c make those wrong that can be; any block is a place in a sequence": """
        xd_draw_index(block) xd_draw_index(count)
        xd_noise_schedule.table_count xd_noise_steps(steps)
        xd_time_sampler.chunk xd_time_sampler.count xd_time_sampler.first xd_time_sampler.last xd_time_sampler.list_count
        xd_times_draw(count)""",
    "tests/test_draw.c makes it wrong": "xd_draw_desc.first",
    "tests/test_thaw.c and test_rounding.c make them wrong": "xd_optimizer_thaw(index) xd_param.first",
    "tests/test_post_hoc.c makes those wrong that can be": """xd_post_hoc_desc.snapshot_count xd_post_hoc_profile.iteration
        xd_post_hoc_desc.target_count""",
    "any number names a sequence or a place in it: arithmetic without a context": """xd_ema_desc.seed xd_optimizer_desc.seed xd_philox.seed
        xd_teacher_cache_desc.seed
        xd_philox_fill_normal(count) xd_philox_fill_normal(first) xd_philox_fill_uniform(count)
        xd_philox_fill_uniform(first) xd_philox_uniform_f64(block)""",
    "tests/test_full_state.c makes those wrong that can be; staging too small for an element of each rank is made larger": """
        xd_state_gather_desc.network_count xd_state_gather_desc.staging_bytes xd_state_scatter_desc.network_count
        xd_state_scatter_desc.staging_bytes xd_state_scatter_desc.tensor_count xd_state_tensor.ndim""",
    "tests/test_state_inherit.c makes those wrong that can be; any staging is made large enough": """
        xd_state_inherit_desc.network_count xd_state_inherit_desc.staging_bytes xd_state_inherit_desc.step""",
    "tests/test_fake_score.c and test_fake_score_errors.c make those wrong that can be; any staging is made large enough": """
        xd_fake_score_desc.frozen_count xd_fake_score_meta_desc.fresh_count xd_fake_score_meta_desc.staging_bytes
        xd_fake_score_reader.entry_count xd_fake_score_source.part_count xd_fake_score_source.tensor_count""",
    "tests/test_node_join.c makes those wrong that can be": """xd_node_desc.rank xd_node_desc.size xd_node_desc.slot_bytes""",
    "no call reads it: all data of a tensor is on the context's device": "xd_tensor.device",
}

def matrices(text):
    """Names of all fields and arguments of type xd_rows."""
    struct = None
    for line in text.splitlines():
        if line.startswith("struct "):
            struct = line.split()[1]
        elif match := re.match(r"    xd_rows (\w+)$", line):
            yield "%s.%s" % (struct, match.group(1))
        elif match := re.match(r"function [\w ]*?\**(\w+)\((.*)\)$", line):
            for argument in match.group(2).split(", "):
                if found := re.match(r"(?:const )?xd_rows \*?(\w+)$", argument):
                    yield "%s(%s)" % (match.group(1), found.group(1))


def counts(text):
    """Names of the integers that calls read."""
    struct = None
    for line in text.splitlines():
        if line.startswith("struct "):
            struct = line.split()[1]
        elif match := re.match(r"    (?:size_t|int|int64_t|uint64_t) (\w+)$", line):
            if struct not in WRITTEN:
                yield "%s.%s" % (struct, match.group(1))
        elif match := re.match(r"function .*?\b(xd_\w+)\((.*)\)$", line):
            for argument in match.group(2).split(", "):
                if found := re.match(r"(?:size_t|int|int64_t|uint64_t) (\w+)$", argument):
                    yield "%s(%s)" % (match.group(1), found.group(1))


def check_counts(text):
    wanted = set(counts(text))
    held = set()
    for path in ["tests/helpers/sizes_counts.h"] + sorted(glob.glob("tests/test_sizes*.c")):
        held |= set(re.findall(r'(?:AT|ASK)\(\s*"([^"]+)"', open(path).read()))
    left = [name for names in COUNTS_LEFT_OUT.values() for name in names.split()]
    bad = ["%s has two reasons" % name for name in sorted(set(left)) if left.count(name) > 1]
    left = set(left)
    bad += ["%s is in no test: add it to tests/test_sizes*.c" % name for name in sorted(wanted - held - left)]
    bad += ["%s does not exist, or is in a test now" % name for name in sorted(left - (wanted - held))]
    if not bad:
        print("%d numbers, %d in a test" % (len(wanted), len(wanted & held)))
    return bad


def main():
    wanted = set(matrices(open("docs/api.txt").read()))
    held = set()
    for path in sorted(glob.glob("tests/test_sizes*.c")):
        held |= set(re.findall(r'\{ "([^"]+)", AT\(', open(path).read()))
    held = {re.sub(r"^xd_(topk|xtoken)_desc\.(loss\.)?common\.", "xd_loss_common.", name) for name in held}
    bad = ["%s is in no test: add it to tests/test_sizes*.c" % name for name in sorted(wanted - held - set(LEFT_OUT))]
    bad += ["%s does not exist, or is in tests/test_sizes*.c now" % name for name in sorted(set(LEFT_OUT) - (wanted - held))]
    bad += check_counts(open("docs/api.txt").read())
    print("\n".join(bad) if bad else "%d matrices" % len(wanted))
    return bool(bad) or len(wanted) < 30


if __name__ == "__main__":
    sys.exit(main())
