#!/usr/bin/env python3
"""The tests of sizes, tests/test_sizes*.c, make every matrix of the users' part disagree with the others of its call: each field
and each argument of type xd_rows that docs/api.txt lists is named there, or here because it is an output. A new one fails. So is every integer of the structs that
calls read and of their arguments, in tests/helpers/sizes_counts.h or below."""
import glob
import re
import sys

LEFT_OUT = {
    "xd_route_window.rows": "an output",
    "xd_route_slot(rows)": "an output",
}


# Structs that calls only write, and numbers that belong to nothing else: ids, hashes, indices, seeds, colours.
WRITTEN = """xd_align_report xd_alignment xd_arena xd_cached_document xd_canonical xd_comm_counters xd_copy xd_denominator
xd_ema_match xd_ema_record xd_memory_bytes xd_weight_info xd_model_desc xd_bucket xd_bucket_piece xd_safetensors_layout xd_encoding xd_encoding_batch xd_error xd_exact_map xd_gradient_norm xd_launch xd_loss_values
xd_norm_sum xd_projection_report xd_redistribution_step xd_route_info xd_route_window xd_safetensors_info xd_special_pair
xd_status xd_teacher_cache_info xd_token xd_tokenizer_info xd_topology xd_uld_values xd_vocab_info xd_xtoken_values xd_rows
xd_interval xd_region xd_token_span xd_projection_origin xd_leaves""".split()
COUNTS_LEFT_OUT = """xd_adam_defaults(param_count) xd_adamw_defaults(param_count) xd_agree_same(hash) xd_allocate(bytes)
xd_arena_over(capacity) xd_arena_release(mark) xd_arena_take(bytes) xd_arena_take_pointer(bytes) xd_at(line)
xd_collective.sequence xd_comm_split(color) xd_comm_split(key) xd_comm_world_rank(rank)
xd_compat_jsd_denominator(batch) xd_compat_jsd_denominator(counted) xd_compat_jsd_denominator(vocabulary)
xd_compat_modelopt_denominator(rows) xd_compat_modelopt_denominator(vocabulary) xd_ctx_create_versioned(version)
xd_ema_view(index) xd_fail(line) xd_fail_culprit(culprit) xd_fail_culprit(line) xd_hash(bytes) xd_hash(seed)
xd_id_at(i) xd_layout_region(rank) xd_load_f64(index) xd_loss_common.ignore_index xd_normalise_rows(columns)
xd_normalise_rows(rows) xd_optimizer_state_at(index) xd_piece_weights(count) xd_positions.ignore_index
xd_redistribution_step_at(step) xd_rows_of(columns) xd_rows_of(rows) xd_safetensors_at(index)
xd_safetensors_data(index) xd_safetensors_desc.max_header_bytes xd_safetensors_metadata_at(index)
xd_sgd_defaults(param_count) xd_shift_desc.ignore_index xd_store_f64(index) xd_teacher_cache_desc.student_hash
xd_teacher_cache_desc.teacher_hash xd_tensor.device xd_tensor_bytes(rank) xd_tensor_view(rank)
xd_tokenizer_desc.max_bytes xd_topology_coordinate(rank) xd_valid_chunks(count) xd_weights_files_at(file)
xd_weights_gather_desc.max_shard_bytes xd_weights_gather_desc.staging_bytes xd_weights_writer_desc.max_shard_bytes"""
# Numbers of models, buckets and leaves: tests/test_model.c, test_buckets.c and test_comm.c make those wrong that can be.
COUNTS_OF_MODELS = """xd_bucket_param.numel xd_bucket_plan_at(index) xd_bucket_plan_desc.bucket_count xd_bucket_plan_desc.bucket_size
xd_bucket_plan_desc.chunk xd_bucket_plan_desc.instances xd_bucket_plan_desc.param_count xd_bucket_plan_desc.ranks
xd_bucket_plan_desc.stage xd_bucket_plan_param(param) xd_bucket_plan_piece(param) xd_bucket_plan_piece(rank)
xd_bucket_plan_shard(bucket) xd_bucket_plan_shard(rank) xd_ema_bytes(count) xd_leaf_stack_desc.elements
xd_leaf_stack_desc.memory_bytes xd_model_params(capacity) xd_model_weight_at(index) xd_weight_desc.group xd_weight_desc.ndim
xd_weight_desc.room xd_weight_desc.stored_rows xd_weight_set_tensor_parallel(dim) xd_weight_set_tensor_parallel(stride)
xd_weight_traits.partition_dim xd_weight_traits.partition_stride"""
# Counts that no test has made wrong yet.
COUNTS_OPEN = """xd_collective.count xd_collective.root xd_ctx_desc.rank xd_ctx_desc.threads xd_decode_desc.capacity
xd_decode_desc.count xd_ema_decay(iteration) xd_encode(bytes) xd_layout_on_rank(rank) xd_leaf_stack_create(elements)
xd_mesh_concatenate(count) xd_pieces.count xd_projection.entries xd_projection_load_memory(bytes)
xd_projection_options.k xd_projection_options.max_pieces xd_read(bytes) xd_recv(count) xd_recv(from)
xd_redistribution_pack(step) xd_redistribution_unpack(step) xd_route_span.begin xd_route_span.end
xd_run_threads(ranks) xd_safetensors_open_memory(bytes) xd_safetensors_read_box(index)
xd_safetensors_read_range(bytes) xd_safetensors_read_range(first_byte) xd_safetensors_read_range(index)
xd_safetensors_writer_write(index) xd_send(count) xd_send(to) xd_teacher_cache_entries(position)
xd_teacher_cache_find_document(d) xd_teacher_cache_open_memory(bytes) xd_teacher_cache_writer_document(bytes)
xd_teacher_piece.shard xd_thread_world_create(ranks) xd_thread_world_join(rank) xd_tokenizer_desc.special_count
xd_tokenizer_find(length) xd_tokenizer_load_memory(bytes) xd_votes_set_exact(student_id)
xd_votes_set_exact(teacher_id) xd_weights_gather_desc.metadata_count xd_weights_gather_desc.root
xd_weights_gather_desc.tensor_count xd_weights_writer_desc.entry_count xd_weights_writer_desc.metadata_count
xd_weights_writer_write(bytes) xd_weights_writer_write(first_byte) xd_weights_writer_write(index)"""

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
    held = set(re.findall(r'AT\("([^"]+)"', open("tests/helpers/sizes_counts.h").read()))
    left = set(COUNTS_LEFT_OUT.split()) | set(COUNTS_OF_MODELS.split()) | set(COUNTS_OPEN.split())
    bad = ["%s is in no test: add it to tests/helpers/sizes_counts.h" % name for name in sorted(wanted - held - left)]
    bad += ["%s does not exist, or is in a test now" % name for name in sorted(left - (wanted - held))]
    if not bad:
        print("%d numbers, %d of them open" % (len(wanted), len(COUNTS_OPEN.split())))
    return bad


def main():
    wanted = set(matrices(open("docs/api.txt").read()))
    held = set()
    for path in sorted(glob.glob("tests/test_sizes*.c")):
        held |= set(re.findall(r'\{ "([^"]+)", AT\(', open(path).read()))
    held = {re.sub(r"^xd_(mft|topk|xtoken)_desc\.(loss\.)?common\.", "xd_loss_common.", name) for name in held}
    bad = ["%s is in no test: add it to tests/test_sizes*.c" % name for name in sorted(wanted - held - set(LEFT_OUT))]
    bad += ["%s does not exist, or is in tests/test_sizes*.c now" % name for name in sorted(set(LEFT_OUT) - (wanted - held))]
    bad += check_counts(open("docs/api.txt").read())
    print("\n".join(bad) if bad else "%d matrices" % len(wanted))
    return bool(bad) or len(wanted) < 30


if __name__ == "__main__":
    sys.exit(main())
