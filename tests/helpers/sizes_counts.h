/* sizes_counts.h - the table of tests/test_sizes_counts.c: name, field of the stage, wrong number, call, result, what the message
 * says, and whether the call is local. */
AT("xd_xtoken_desc.sequences", x.xtoken[0].sequences, 3, xcall_projected, XD_ERROR_SHAPE,
   "student has 8 rows for 3 sequences", false)
AT("xd_xtoken_desc.teacher_count", x.xtoken[0].teacher_count, -1, xcall_projected, XD_ERROR_ARGUMENT,
   "the loss has -1 teachers", false)
AT("xd_xtoken_desc.columns", x.xtoken[0].columns, 0, xcall_projected, XD_ERROR_ARGUMENT,
   "0 columns, a tail of 3 and tiles of 0", false)
AT("xd_xtoken_desc.tail", x.xtoken[1].tail, -1, xcall_gold, XD_ERROR_ARGUMENT,
   "8 columns, a tail of -1 and tiles of 0", false)
AT("xd_xtoken_desc.tile", x.xtoken[0].tile, -1, xcall_projected, XD_ERROR_ARGUMENT,
   "8 columns, a tail of 3 and tiles of -1", false)
AT("xd_xtoken_teacher.vocabulary", x.teacher[0].vocabulary, XU + 1, xcall_projected, XD_ERROR_SHAPE,
   "teacher 0 has 10 columns but its vocabulary is 11", false)
AT("xd_xtoken_teacher.vocabulary", x.teacher[0].vocabulary, XU - 1, xcall_projected, XD_ERROR_SHAPE,
   "the projection of teacher 0 has 10 columns but its vocabulary is 9 ids", false)
AT("xd_xtoken_teacher.vocabulary", x.teacher[1].vocabulary, XU - 1, xcall_gold, XD_ERROR_ARGUMENT,
   "the exact map has teacher id 9, the vocabulary 9", false)
AT("xd_xtoken_teacher.vocabulary", x.teacher[2].vocabulary, XV - 1, xcall_same, XD_ERROR_SHAPE,
   "teacher 0 has 11 columns, less than the student's vocabulary of 12", false)
AT("xd_xtoken_teacher.vocabulary", x.teacher[3].vocabulary, XU + 1, xcall_cached, XD_ERROR_SHAPE,
   "teacher 0 has a vocabulary of 11 ids but its cache 10", false)
AT("xd_xtoken_teacher.chunks", x.teacher[0].chunks, 1, xcall_projected, XD_ERROR_ARGUMENT,
   "teacher 0: chunk id 1 of student row 1 is outside [-1, 1)", false)
AT("xd_xtoken_teacher.chunks", x.teacher[4].chunks, -1, xcall_likelihood, XD_ERROR_ARGUMENT,
   "teacher 0 has -1 chunks", false)
AT("xd_uld_desc.chunk_count", x.uld.chunk_count, -1, xcall_uld, XD_ERROR_ARGUMENT, "-1 chunks", true)
AT("xd_uld_desc.matched_count", x.uld.matched_count, -1, xcall_uld, XD_ERROR_ARGUMENT, "-1 matched ids", true)
AT("xd_uld_side.vocabulary", x.uld.student.vocabulary, XV + 1, xcall_uld, XD_ERROR_SHAPE,
   "student logits have 12 columns for a vocabulary of 13", true)
AT("xdi_chunk_map.sequences", x.chunk_map.sequences, 3, xcall_chunk_sums, XD_ERROR_SHAPE,
   "values has 8 rows but 3 sequences of 4 positions", false)
AT("xdi_chunk_map.sequences", x.chunk_map.sequences, -1, xcall_chunk_sizes, XD_ERROR_ARGUMENT,
   "-1 sequences of 4 positions in 2 chunks", false)
AT("xdi_chunk_map.sequences", x.chunk_map.sequences, (int64_t)1 << 62, xcall_chunk_sums, XD_ERROR_ARGUMENT,
   "4611686018427387904 sequences of 4 positions in 2 chunks are too many", false)
AT("xdi_chunk_map.sequences", x.chunk_map.sequences, (int64_t)1 << 62, xcall_chunk_sizes, XD_ERROR_ARGUMENT,
   "4611686018427387904 sequences of 4 positions in 2 chunks are too many", false)
AT("xdi_chunk_map.sequences", x.chunk_map.sequences, (int64_t)1 << 62, xcall_chunk_backward,
   XD_ERROR_ARGUMENT, "4611686018427387904 sequences of 4 positions in 2 chunks are too many", true)
AT("xdi_chunk_map.held", x.chunk_map.held, 5, xcall_chunk_sums, XD_ERROR_SHAPE,
   "values has 8 rows but 2 sequences of 5 positions", false)
AT("xdi_chunk_map.chunks", x.chunk_map.chunks, 1, xcall_chunk_sums, XD_ERROR_ARGUMENT,
   "chunk id 1 of position 1 is outside [-1, 1)", false)
AT("xdi_chunk_map.chunks", x.chunk_map.chunks, 3, xcall_chunk_sums, XD_ERROR_MISMATCH, "", false)
AT("xdi_chunk_map.chunks", x.chunk_map.chunks, 3, xcall_chunk_sizes, XD_ERROR_MISMATCH, "", false)
AT("xdi_chunk_averages(chunks)", x.chunks, -1, xcall_chunk_averages, XD_ERROR_ARGUMENT,
   "-1 chunks of 10 columns", true)
AT("xdi_chunk_averages(n)", x.n, -1, xcall_chunk_averages, XD_ERROR_ARGUMENT, "4 chunks of -1 columns", true)
AT("xdi_project_desc.k", x.project.k, -1, xcall_project, XD_ERROR_SHAPE,
   "-1 columns of a projection that has 10", false)
AT("xd_projection.student_size", x.matrix.student_size, XV + 1, xcall_project, XD_ERROR_SHAPE,
   "the vocabulary has 12 ids but the projection 13 rows", false)
AT("xd_projection.teacher_size", x.matrix.teacher_size, XU - 1, xcall_project_backward, XD_ERROR_ARGUMENT,
   "column 9 is outside the projection's 9", false)
AT("xd_teacher_cache_desc.vocabulary", x.cache_desc.vocabulary, XU - 5, xcall_append, XD_ERROR_ARGUMENT,
   "row 4 has id 4 and next 5, the vocabulary 5", true)
AT("xd_teacher_cache_desc.k", x.cache_desc.k, XU + 1, xcall_append, XD_ERROR_ARGUMENT,
   "k is 11, with a vocabulary of 10 allowed are 1 to 10", true)
AT("xd_teacher_cache_desc.draws", x.cache_desc.draws, -1, xcall_append, XD_ERROR_ARGUMENT,
   "-1 draws beside k of", true)
AT("xd_teacher_cache_desc.context", x.cache_desc.context, -1, xcall_append, XD_ERROR_ARGUMENT,
   "a context of -1 tokens", true)
AT("xd_teacher_cache_read_desc.first", x.first, -1, xcall_read, XD_ERROR_ARGUMENT,
   "2 positions from -1 on, it has 6", true)
AT("xd_teacher_cache_read_desc.count", x.count, XQ, xcall_read, XD_ERROR_ARGUMENT,
   "6 positions from 1 on, it has 6", true)
AT("xd_route_desc.samples", x.route.samples, 1, xcall_route, XD_ERROR_ARGUMENT, "", true)
AT("xd_route_desc.length", x.route.length, 0, xcall_route, XD_ERROR_ARGUMENT,
   "a route of 2 samples of 0 positions by 10 columns", true)
AT("xd_route_desc.columns", x.route.columns, 0, xcall_route, XD_ERROR_ARGUMENT,
   "a route of 2 samples of 3 positions by 0 columns", true)
AT("xd_route_desc.slots", x.route.slots, -1, xcall_route, XD_ERROR_ARGUMENT, "a ring of -1 slots", true)
AT("xd_route_side.sample_count", x.route.teacher.sample_count, 3, xcall_route, XD_ERROR_ARGUMENT, "", false)
AT("xd_route_side.sample_begin", x.route.teacher.sample_begin, 1, xcall_route, XD_ERROR_ARGUMENT, "", false)
AT("xd_route_side.micro_batch", x.route.teacher.micro_batch, -1, xcall_route, XD_ERROR_ARGUMENT,
   "a teacher side of 2 samples in micro-batches of -1 with 1 spans", false)
AT("xd_route_side.span_count", x.route.teacher.span_count, -1, xcall_route, XD_ERROR_ARGUMENT,
   "a teacher side of 2 samples in micro-batches of 2 with -1 spans", false)
AT("xd_route_side.column_end", x.route.teacher.column_end, XU + 1, xcall_route, XD_ERROR_ARGUMENT, "", false)
AT("xd_route_side.column_begin", x.route.teacher.column_begin, -1, xcall_route, XD_ERROR_ARGUMENT, "", false)
AT("xdi_teacher_piece.positions", x.piece.positions, XT + 1, xcall_piece, XD_ERROR_SHAPE,
   "a piece of 4 positions from 0 on by 10 columns from 0 on leaves shard ", true)
AT("xdi_teacher_piece.columns", x.piece.columns, INT64_MAX, xcall_piece, XD_ERROR_SHAPE,
   "a piece of 3 positions from 0 on by 9223372036854775807 columns from 0", true)
AT("xdi_teacher_piece.from_position", x.piece.from_position, 1, xcall_piece, XD_ERROR_SHAPE,
   "a piece of 3 positions from 1 on by 10 columns from 0 on leaves shard ", true)
AT("xdi_teacher_piece.from_column", x.piece.from_column, INT64_MAX, xcall_piece, XD_ERROR_SHAPE,
   "a piece of 3 positions from 0 on by 10 columns from 922337203685477580", true)
AT("xdi_teacher_piece.to_position", x.piece.to_position, 1, xcall_piece, XD_ERROR_SHAPE,
   "a piece of 3 positions from 1 on by 10 columns from 0 on leaves window", true)
AT("xdi_teacher_piece.to_column", x.piece.to_column, -1, xcall_piece, XD_ERROR_SHAPE,
   "a piece of 3 positions from 0 on by 10 columns from -1 on leaves windo", true)
AT("xdi_teacher_route_desc.count", x.plan.count, -1, xcall_plan, XD_ERROR_ARGUMENT, "-1 shards", true)
AT("xdi_teacher_route_desc.begin", x.plan.begin, XT + 1, xcall_plan, XD_ERROR_ARGUMENT,
   "a window of positions [4, 3) by 10 columns", true)
AT("xdi_teacher_route_desc.end", x.plan.end, XT + 1, xcall_plan, XD_ERROR_SHAPE,
   "shards hold 30 of the window's 40 logits", true)
AT("xdi_teacher_route_desc.vocabulary", x.plan.vocabulary, XU - 1, xcall_plan, XD_ERROR_ARGUMENT,
   "shard 0 has columns [0, 10) of a vocabulary of 9", true)
AT("xdi_teacher_shard.position_begin", x.shard.position_begin, XT + 1, xcall_plan, XD_ERROR_ARGUMENT,
   "shard 0 is [4, 3) by [0, 10)", true)
AT("xdi_teacher_shard.position_end", x.shard.position_end, XT - 1, xcall_plan, XD_ERROR_SHAPE,
   "shards hold 20 of the window's 30 logits", true)
AT("xdi_teacher_shard.vocabulary_begin", x.shard.vocabulary_begin, -1, xcall_plan, XD_ERROR_ARGUMENT,
   "shard 0 has columns [-1, 10) of a vocabulary of 10", true)
AT("xdi_teacher_shard.vocabulary_end", x.shard.vocabulary_end, XU + 1, xcall_plan, XD_ERROR_ARGUMENT,
   "shard 0 has columns [0, 11) of a vocabulary of 10", true)
AT("xdi_similarity_desc.k", x.similarity.k, 0, xcall_similarities, XD_ERROR_ARGUMENT, "0 entries a row", true)
AT("xd_loss_desc(rows of one rank)", teacher_rows, XR - 1, call_loss_rows, XD_ERROR_MISMATCH, "", false)
AT("xd_loss_common.workspace_bytes", loss.common.workspace_bytes, 7, call_loss_workspace, XD_ERROR_ARGUMENT,
   "workspace has 7 bytes", false)
AT("xd_log_probs_desc.workspace_bytes", log_probs.workspace_bytes, 7, call_log_probs, XD_ERROR_ARGUMENT,
   "workspace has 7 bytes", false)
AT("xd_head_loss_desc.workspace_bytes", head.workspace_bytes, 7, call_head, XD_ERROR_ARGUMENT,
   "workspace has 7 bytes", false)
AT("xd_head_loss_desc.chunk_rows", head.chunk_rows, 255, call_head, XD_ERROR_ARGUMENT,
   "chunk_rows 255 is not a multiple of 256", false)
AT("xd_topk_desc.k", topk.k, XV + 1, call_topk, XD_ERROR_ARGUMENT,
   "k is 13 but the vocabulary has 12 columns", false)
AT("xd_topk_desc.k", topk.k, 0, call_topk, XD_ERROR_ARGUMENT, "k is 0 but the vocabulary has 12 columns",
   false)
AT("xd_vocab_topk_desc.k", choice.k, XV + 1, call_choice, XD_ERROR_ARGUMENT,
   "k is 13 but the vocabulary has 12 columns", false)
AT("xd_vocab_topk_desc.sequences", choice.sequences, 3, call_choice, XD_ERROR_SHAPE, "8 rows for 3 sequences",
   false)
AT("xd_vocab_topk(k)", a, XV + 1, call_vocab_topk, XD_ERROR_ARGUMENT,
   "k is 13 but the vocabulary has 12 columns", false)
AT("xd_log_probs_desc.ids_per_row", a, -1, call_gather, XD_ERROR_ARGUMENT, "-1 ids a row with stride -1",
   false)
AT("xd_positions.count", positions.count, XR - 1, call_accuracy, XD_ERROR_SHAPE,
   "counted has 7 rows but logits have 8", false)
AT("xd_positions.count", positions.count, -1, call_denominator, XD_ERROR_ARGUMENT, "a batch of -1 positions",
   true)
AT("xd_denominator_count(batch_count)", a, 0, call_denominator, XD_ERROR_ARGUMENT, "-1 batches of positions",
   true)
AT("xd_shift_desc.sequences", shift.sequences, -1, call_shift, XD_ERROR_ARGUMENT, "", false)
AT("xd_shift_desc.length", shift.length, 1, call_shift, XD_ERROR_ARGUMENT, "", false)
AT("xd_shift_desc.held", shift.held, -1, call_shift, XD_ERROR_ARGUMENT, "", false)
AT("xd_shift_desc.held", shift.held, POSITIONS - 1, call_shift, XD_ERROR_SHAPE,
   "is held by 0 ranks, not by 1", false)
AT("xd_shift_desc.sequences", shift.sequences, (int64_t)1 << 61, call_shift, XD_ERROR_MEMORY,
   "no room for 2305843009213693952 sequences of ", false)
AT("xd_load_balanced_positions(length)", a, 3, call_balanced, XD_ERROR_SHAPE,
   "length 6 is not a multiple of 4", true)
AT("xd_load_balanced_positions(rank)", b, 3, call_balanced, XD_ERROR_ARGUMENT, "", true)
AT("xd_load_balanced_positions(ranks)", c, 0, call_balanced, XD_ERROR_ARGUMENT, "", true)
AT("xd_kl_estimate_desc.count", estimate.count, -1, call_estimate, XD_ERROR_ARGUMENT, "-1 tokens", true)
AT("xd_vocab_desc.size", a, 3, call_vocab, XD_ERROR_SHAPE,
   "vocabulary shards end at column 12 but there are 13", true)
AT("xd_vocab_desc.size, an even split", a, -1, call_vocab_even, XD_ERROR_SHAPE,
   "vocabulary shard 0 begins at column -1 but the shards before it end at", true)
AT("xd_cast(count)", a, -1, call_cast, XD_ERROR_ARGUMENT, "-1 elements to convert", true)
AT("xd_optimizer_desc.param_count", optimizer.param_count, -1, call_optimizer, XD_ERROR_ARGUMENT,
   "-1 parameters", true)
AT("xd_optimizer_desc.group_count", optimizer.group_count, -1, call_optimizer, XD_ERROR_ARGUMENT,
   "-1 groups of parameters", true)
AT("xd_param.group", param[1].group, 1, call_optimizer, XD_ERROR_ARGUMENT, "v: group 1, but there are 1",
   true)
AT("xd_param.count", param[1].count, -1, call_optimizer, XD_ERROR_ARGUMENT, "v: -1 elements", true)
AT("xd_param.count", param[1].count, ELEMENTS - 1, call_step, XD_ERROR_STATE,
   "v: value, dtype, count or flags changed since creation", true)
AT("xd_param.dims", param[1].dims, -1, call_ema, XD_ERROR_ARGUMENT, "v: -1 dimensions", true)
AT("xd_optimizer_step_desc.average_count", step.average_count, -1, call_optimizer, XD_ERROR_ARGUMENT,
   "-1 averages at NULL", true)
AT("xd_ema_desc.param_count", a, -1, call_ema, XD_ERROR_ARGUMENT, "-1 parameters", true)
AT("xd_ema_update(iteration)", b, -2, call_ema, XD_ERROR_ARGUMENT, "iteration -2 is negative", true)
AT("xd_ema_copy_to(count)", c, -1, call_ema, XD_ERROR_ARGUMENT, "-1 tensors", true)
AT("xd_ema_load_desc.source_count", d, -1, call_ema, XD_ERROR_ARGUMENT, "-1 tensors", true)
AT("xd_ema_desc.batch_size", ema.batch_size, -1, call_ema, XD_ERROR_ARGUMENT, "batch_size -1 is negative",
   true)
AT("xd_ema_desc.start_iteration", ema.start_iteration, -1, call_ema, XD_ERROR_ARGUMENT,
   "start_iteration -1 is negative", true)
AT("xd_ema_desc.strip_count", ema.strip_count, -1, call_ema, XD_ERROR_ARGUMENT, "-1 tokens to strip", true)
AT("xd_gradient_norm_desc.param_count", norm.param_count, -1, call_norm, XD_ERROR_ARGUMENT, "-1 parameters",
   false)
AT("xd_clip_gradients(param_count)", a, -1, call_clip, XD_ERROR_ARGUMENT, "-1 parameters", true)
AT("xd_axis.size", mesh.axes[1].size, -2, call_mesh, XD_ERROR_ARGUMENT,
   "axis 1 has size -2, must be at least 1, or -1 to fill", true)
AT("xd_mesh_desc.world_size", mesh.world_size, 5, call_mesh, XD_ERROR_ARGUMENT, "", false)
AT("xd_mesh_desc.rank_count", mesh.rank_count, 3, call_mesh, XD_ERROR_TOPOLOGY,
   "axis sizes multiply to 1 but the list has 3 ranks", true)
AT("xd_mesh_derive_desc.part_count", derive.part_count, 9, call_derive, XD_ERROR_ARGUMENT,
   "9 parts for one of 2 axes, at most 8 axes are possible", false)
AT("xd_expert_desc.world_size", experts.world_size, 3, call_experts, XD_ERROR_TOPOLOGY,
   "tp 2 x cp 1 x ep 1 x pp 1 does not divide a world of 3 ranks", true)
AT("xd_expert_desc.tp", experts.tp, 3, call_experts, XD_ERROR_TOPOLOGY,
   "tp 3 x cp 1 x ep 1 x pp 1 does not divide a world of 4 ranks", true)
AT("xd_expert_desc.cp", experts.cp, 3, call_experts, XD_ERROR_TOPOLOGY,
   "tp 2 x cp 3 x ep 1 x pp 1 does not divide a world of 4 ranks", true)
AT("xd_expert_desc.ep", experts.ep, 3, call_experts, XD_ERROR_TOPOLOGY,
   "tp 2 x cp 1 x ep 3 x pp 1 does not divide a world of 4 ranks", true)
AT("xd_expert_desc.pp", experts.pp, 3, call_experts, XD_ERROR_TOPOLOGY,
   "tp 2 x cp 1 x ep 1 x pp 3 does not divide a world of 4 ranks", true)
AT("xd_expert_desc.expert_tp", experts.expert_tp, 3, call_experts, XD_ERROR_TOPOLOGY,
   "tp 3 x cp 1 x ep 2 x pp 1 does not divide a world of 4 ranks", true)
AT("xd_expert_desc.optimizer_instances", experts.optimizer_instances, 3, call_experts, XD_ERROR_TOPOLOGY,
   "dp x cp is 2, not a multiple of 3 optimizer instances", true)
AT("xd_expert_desc.virtual_pipeline", experts.virtual_pipeline, 2, call_experts, XD_ERROR_ARGUMENT,
   "virtual_pipeline is 2 but pp is 1", true)
AT("xd_layout_desc.ndim", layout.ndim, 9, call_layout, XD_ERROR_ARGUMENT, "9 dimensions, 0 to 8 are possible",
   true)
AT("xd_layout_desc.shape", layout.shape[0], -1, call_layout, XD_ERROR_SHAPE, "dimension 0 has extent -1",
   true)
AT("xd_placement.dim", layout.placement[1].dim, 2, call_layout, XD_ERROR_ARGUMENT,
   "axis 1 splits dimension 2 of a tensor of 2 dimensions", true)
AT("xd_placement.sections", layout.placement[1].sections, 4, call_layout, XD_ERROR_SHAPE, "", true)
AT("xdi_redistribution_desc.ranks", plan.ranks, 0, call_plan, XD_ERROR_ARGUMENT, "", true)
AT("xdi_redistribution_desc.rank", plan.rank, 5, call_plan, XD_ERROR_ARGUMENT, "", true)
AT("xdi_redistribution_desc(shapes)", a, 3, call_plan, XD_ERROR_SHAPE,
   "dimension 0: the source has extent 6, the destination 7", true)
AT("xd_tensor.ndim", b, 3, call_tensor, XD_ERROR_SHAPE, "the source has 3 dimensions, its layout 2", false)
AT("xd_tensor.shape", a, 5, call_tensor, XD_ERROR_SHAPE, "", false)
AT("xd_tensor_gather(root)", root, 5, call_tensor, XD_ERROR_TOPOLOGY, "", true)
AT("xd_tensor_gather(root)", root, -2, call_tensor, XD_ERROR_ARGUMENT, "rank -2 is negative", true)
AT("xd_all_reduce(count)", a, -1, call_reduce, XD_ERROR_ARGUMENT,
   "all_reduce: count -1 is negative or too large", false)
AT("xd_broadcast(count)", a, -1, call_broadcast, XD_ERROR_ARGUMENT,
   "broadcast: count -1 is negative or too large", false)
AT("xd_broadcast(root)", root, 5, call_broadcast, XD_ERROR_ARGUMENT, "", true)
AT("xd_all_gather_even(count)", a, -1, call_gather_even, XD_ERROR_ARGUMENT,
   "all_gather: recv count -1 of rank 0 is negative or too large", false)
AT("xd_sum_values(count)", a, -1, call_sum_values, XD_ERROR_ARGUMENT, "a sum of -1 values of each rank",
   false)
AT("xd_gather(root)", root, 5, call_gather_root, XD_ERROR_ARGUMENT, "", true)
AT("xd_scatter(root)", root, 5, call_scatter_root, XD_ERROR_ARGUMENT, "", true)
AT("xd_projection_rows.rows", rows.rows, -1, call_rows, XD_ERROR_ARGUMENT, "-1 rows of 3 entries", true)
AT("xd_projection_rows.k", rows.k, -1, call_rows, XD_ERROR_ARGUMENT, "12 rows of -1 entries", true)
AT("xd_projection_rows.rows", rows.rows, -1, call_cut, XD_ERROR_ARGUMENT, "-1 rows of 3 entries", true)
AT("xd_projection_rows.k", rows.k, -1, call_cut, XD_ERROR_ARGUMENT, "12 rows of -1 entries", true)
AT("xd_projection_rows.rows", rows.rows, -1, call_map, XD_ERROR_ARGUMENT, "-1 rows of 3 entries", true)
AT("xd_projection_rows.k", rows.k, -1, call_map, XD_ERROR_ARGUMENT,
   "needs 2 entries a row, the projection has -1", true)
AT("xd_projection_from_rows(student_size)", a, -20, call_rows, XD_ERROR_ARGUMENT,
   "vocabularies of -8 and 12 ids", true)
AT("xd_projection_from_rows(teacher_size)", b, -20, call_rows, XD_ERROR_ARGUMENT,
   "vocabularies of 14 and -10 ids", true)
AT("xdi_projection_cells.count", cells.count, -1, call_cells, XD_ERROR_ARGUMENT, "-1 cells", true)
AT("xdi_projection_cells.student_size", cells.student_size, -1, call_cells, XD_ERROR_ARGUMENT,
   "vocabularies of -1 and 10 ids", true)
AT("xdi_projection_cells.teacher_size", cells.teacher_size, -1, call_cells, XD_ERROR_ARGUMENT,
   "vocabularies of 12 and -1 ids", true)
AT("xd_exact_map_desc.teacher_size", a, -20, call_map, XD_ERROR_ARGUMENT, "-10 teacher ids", true)
AT("xd_exact_map_desc.teacher_size", a, -1, call_map, XD_ERROR_ARGUMENT,
   "row 3 has teacher id 9, the vocabulary 9", true)
AT("xdi_projection_cut_desc.k", cut.k, 0, call_cut, XD_ERROR_ARGUMENT, "0 entries a row", true)
AT("xd_texts.count", texts.count, -1, call_exact, XD_ERROR_ARGUMENT, "vocabularies of -1 and 3 strings", true)
AT("xd_texts.count", dp.teacher.count, -1, call_exact, XD_ERROR_ARGUMENT, "vocabularies of 3 and -1 strings",
   true)
AT("xd_projection_to_rows(k)", a, -1, call_to_rows, XD_ERROR_ARGUMENT, "-1 entries a row", true)
AT("xd_votes_desc.student_size", a, -8, call_votes, XD_ERROR_ARGUMENT,
   "votes between vocabularies of 0 and 10 ids", true)
AT("xd_votes_desc.teacher_size", b, -8, call_votes, XD_ERROR_ARGUMENT,
   "votes between vocabularies of 10 and 0 ids", true)
AT("xd_votes_add(student_id)", c, 10, call_votes, XD_ERROR_ARGUMENT,
   "student id 10 is outside a vocabulary of 10", true)
AT("xd_votes_add(teacher_id)", d, 10, call_votes, XD_ERROR_ARGUMENT,
   "teacher id 10 is outside a vocabulary of 10", true)
AT("xdi_votes_pass.count", pass.count, -1, call_votes, XD_ERROR_ARGUMENT,
   "-1 tokens, of which 1 are skipped and 1 pieces", true)
AT("xdi_votes_pass.max_pieces", pass.max_pieces, 0, call_votes, XD_ERROR_ARGUMENT,
   "max_pieces 0 is outside [1, 32]", true)
AT("xdi_votes_pass.skip_count", pass.skip_count, -1, call_votes, XD_ERROR_ARGUMENT,
   "1 tokens, of which -1 are skipped and 1 pieces", true)
AT("xdi_votes_pass.foreign_skip_count", pass.foreign_skip_count, -1, call_votes, XD_ERROR_ARGUMENT,
   "1 tokens, of which 1 are skipped and -1 pieces", true)
AT("xdi_vote_pieces.count", pieces.count, -1, call_votes, XD_ERROR_ARGUMENT, "token 0 of 1 has -1 pieces",
   true)
AT("xd_projection_rows_desc.k", from_votes.k, 0, call_votes, XD_ERROR_ARGUMENT, "0 entries a row", true)
AT("xdi_special_desc.max_pairs", special.max_pairs, -1, call_special, XD_ERROR_ARGUMENT,
   "max_pairs -1 is negative", true)
AT("xd_texts.count", special.student.count, -1, call_special, XD_ERROR_ARGUMENT,
   "vocabularies of -1 and 3 strings", true)
AT("xd_align_side.count", side.count, -1, call_align, XD_ERROR_ARGUMENT, "sequence 0: student has -1 tokens",
   true)
AT("xd_align_batch(count)", a, -1, call_align, XD_ERROR_ARGUMENT, "-1 pairs of sequences", true)
AT("xdi_align_dp_desc.max_combination", dp.max_combination, 65, call_align_dp, XD_ERROR_ARGUMENT,
   "max_combination 65 is outside [1, 64]", true)
AT("xd_texts.count", dp.student.count, -1, call_align_dp, XD_ERROR_ARGUMENT, "sequences of -1 and 3 tokens",
   true)
AT("xdi_canonical_sequence(count)", a, -1, call_canonical, XD_ERROR_ARGUMENT, "-1 tokens", true)
AT("xd_text.size", text[1].size, -1, call_canonical, XD_ERROR_ARGUMENT, "token 1 has -1 bytes", true)
AT("xdi_uld_trl_side.count", trl.student.count, -1, call_trl, XD_ERROR_ARGUMENT,
   "sequences of -1 and 4 tokens", true)
AT("xd_weights_entry.ndim", entry.ndim, -1, call_writer, XD_ERROR_ARGUMENT, "", true)
AT("xd_weights_writer_desc.entry_count", writer.entry_count, -1, call_writer, XD_ERROR_ARGUMENT,
   "-1 tensors, allowed are 3125000", true)
AT("xd_weights_writer_desc.metadata_count", writer.metadata_count, -1, call_writer, XD_ERROR_ARGUMENT,
   "-1 pairs of metadata", true)
AT("xd_weights_writer_desc.alignment", writer.alignment, 12, call_writer, XD_ERROR_ARGUMENT,
   "alignment 12 is no power of two from 8 on", true)
AT("xd_weights_writer_write(index)", a, 3, call_writer, XD_ERROR_ARGUMENT, "tensor 1 of 1", true)
AT("xd_weights_writer_write(first_byte)", b, 4, call_writer, XD_ERROR_ARGUMENT,
   "24 bytes from 2 of tensor 0, which has 24", true)
AT("xd_weights_writer_write(bytes)", c, 3, call_writer, XD_ERROR_ARGUMENT,
   "25 bytes from 0 of tensor 0, which has 24", true)
